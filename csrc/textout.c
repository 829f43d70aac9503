/* Text of a streamed answer: tokens to bytes, whole characters to JSON, to a chunk, to the socket without waiting. */
#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "bytes.h"
#include "textout.h"

enum {
    MOST_ESCAPED = 6, /* bytes that one becomes at most: \u001f */
    MOST_HEADER = 18, /* a chunk's size in hex digits, and \r\n */
    CHARACTER = 4,
};

struct sf_text_out {
    pthread_mutex_t lock;
    bool open;
    int fd;
    double pace, written; /* when the last chunk was */
    const uint8_t *pieces;
    const unsigned long *ends;
    uint32_t vocabulary, *special;
    size_t specials, lead_bytes, tail_bytes;
    uint8_t *lead, *tail;
    uint8_t begun[CHARACTER]; /* of a character that is not whole yet */
    size_t begun_bytes;
    sf_bytes raw;  /* the bytes of the tokens at hand */
    sf_bytes text; /* JSON that is kept back */
    sf_bytes chunk, rest, tokens, taken;
};

static void *copied(const void *data, size_t bytes)
{
    void *copy = malloc(bytes ? bytes : 1);
    if (copy && bytes)
        memcpy(copy, data, bytes);
    return copy;
}

sf_text_out *sf_text_out_new(int fd, const uint8_t *pieces, const unsigned long *ends, uint32_t vocabulary,
                             const uint32_t *special, size_t specials, const uint8_t *lead, size_t lead_bytes,
                             const uint8_t *tail, size_t tail_bytes, double pace)
{
    sf_text_out *out = calloc(1, sizeof *out);
    if (!out)
        return NULL;
    out->fd = fd;
    out->pieces = pieces;
    out->ends = ends;
    out->vocabulary = vocabulary;
    out->specials = specials;
    out->lead_bytes = lead_bytes;
    out->tail_bytes = tail_bytes;
    out->pace = pace;
    out->written = -INFINITY;
    out->special = copied(special, specials * sizeof *special);
    out->lead = copied(lead, lead_bytes);
    out->tail = copied(tail, tail_bytes);
    pthread_mutex_init(&out->lock, NULL);
    if (!out->special || !out->lead || !out->tail) {
        sf_text_out_free(out);
        return NULL;
    }
    return out;
}

void sf_text_out_free(sf_text_out *out)
{
    if (!out)
        return;
    pthread_mutex_destroy(&out->lock);
    void *const owned[] = {out->special, out->lead,    out->tail,      out->raw.at,   out->text.at,
                           out->chunk.at, out->rest.at, out->tokens.at, out->taken.at, out};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++)
        free(owned[i]);
}

void sf_text_out_open(sf_text_out *out)
{
    pthread_mutex_lock(&out->lock);
    out->open = true;
    out->begun_bytes = out->text.length = out->rest.length = 0;
    pthread_mutex_unlock(&out->lock);
}

static bool is_special(const sf_text_out *out, uint32_t token)
{
    size_t low = 0, high = out->specials;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        if (out->special[middle] < token)
            low = middle + 1;
        else
            high = middle;
    }
    return low < out->specials && out->special[low] == token;
}

/* Bytes of the character that begins at data: 0 where it may only go on past `length`, -1 where no character does. */
static int character(const uint8_t *data, size_t length)
{
    const uint8_t first = data[0];
    if (first < 0x80)
        return 1;
    if (first < 0xC2 || first > 0xF4)
        return -1;
    const int bytes = first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
    for (int i = 1; i < bytes; i++) {
        if ((size_t)i >= length)
            return 0;
        uint8_t least = 0x80, most = 0xBF;
        if (i == 1) { /* no overlong forms, no surrogates, nothing past U+10FFFF */
            least = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
            most = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
        }
        if (data[i] < least || data[i] > most)
            return -1;
    }
    return bytes;
}

/* Bytes of the whole characters at the beginning of data; -1: it is not the beginning of any UTF-8. */
static ptrdiff_t whole(const uint8_t *data, size_t length)
{
    size_t at = 0;
    while (at < length) {
        const int bytes = character(data + at, length - at);
        if (bytes < 0)
            return -1;
        if (!bytes)
            break;
        at += (size_t)bytes;
    }
    return (ptrdiff_t)at;
}

/* Append text as the inside of a JSON string; there is room for MOST_ESCAPED bytes a byte. */
static void escape(sf_bytes *out, const uint8_t *text, size_t length)
{
    static const char digits[] = "0123456789abcdef";
    uint8_t *to = out->at + out->length;
    for (size_t i = 0; i < length; i++) {
        const uint8_t byte = text[i];
        const char *short_form = byte == '"' ? "\"" : byte == '\\' ? "\\" : byte == '\n' ? "n" : byte == '\t' ? "t"
                               : byte == '\r' ? "r" : byte == '\b' ? "b" : byte == '\f' ? "f" : NULL;
        if (short_form) {
            *to++ = '\\';
            *to++ = (uint8_t)*short_form;
        } else if (byte < 0x20) {
            memcpy(to, "\\u00", 4);
            to[4] = (uint8_t)digits[byte >> 4];
            to[5] = (uint8_t)digits[byte & 15];
            to += MOST_ESCAPED;
        } else {
            *to++ = byte;
        }
    }
    out->length = (size_t)(to - out->at);
}

/* Send the text that is kept back as a chunk; what the socket does not take ends up in `rest`, and closes. `put` made
   the room. */
static void write_chunk(sf_text_out *out, double now)
{
    const size_t body = out->lead_bytes + out->text.length + out->tail_bytes;
    char header[MOST_HEADER + 1];
    const int header_bytes = snprintf(header, sizeof header, "%zx\r\n", body);
    out->chunk.length = 0;
    sf_bytes_append(&out->chunk, header, (size_t)header_bytes);
    sf_bytes_append(&out->chunk, out->lead, out->lead_bytes);
    sf_bytes_append(&out->chunk, out->text.at, out->text.length);
    sf_bytes_append(&out->chunk, out->tail, out->tail_bytes);
    sf_bytes_append(&out->chunk, "\r\n", 2);
    out->text.length = 0;
    out->written = now;
    const ssize_t sent = send(out->fd, out->chunk.at, out->chunk.length, MSG_DONTWAIT | MSG_NOSIGNAL);
    const size_t taken = sent < 0 ? 0 : (size_t)sent;
    if (taken < out->chunk.length) { /* full, or gone: whoever writes next is told */
        out->open = false;
        sf_bytes_append(&out->rest, out->chunk.at + taken, out->chunk.length - taken);
    }
}

static size_t chunk_bytes(const sf_text_out *out)
{
    return MOST_HEADER + out->lead_bytes + out->text.length + out->tail_bytes + 2;
}

/* Make room for all that taking `count` tokens, their bytes in `raw`, can need. */
static bool has_room(sf_text_out *out, size_t count)
{
    if (!sf_bytes_reserve(&out->text, MOST_ESCAPED * out->raw.length) ||
        !sf_bytes_reserve(&out->tokens, count * sizeof(uint32_t)))
        return false;
    out->chunk.length = out->rest.length = 0;
    const size_t chunk = chunk_bytes(out) + MOST_ESCAPED * out->raw.length;
    return sf_bytes_reserve(&out->chunk, chunk) && sf_bytes_reserve(&out->rest, chunk);
}

static bool take(sf_text_out *out, const uint32_t *tokens, size_t count, double now)
{
    sf_bytes *raw = &out->raw;
    raw->length = 0;
    if (!sf_bytes_reserve(raw, CHARACTER))
        return false;
    sf_bytes_append(raw, out->begun, out->begun_bytes);
    for (size_t i = 0; i < count; i++) {
        if (is_special(out, tokens[i]))
            return false;
        if (tokens[i] >= out->vocabulary)
            continue;
        const size_t start = out->ends[tokens[i]], bytes = out->ends[tokens[i] + 1] - start;
        if (!sf_bytes_reserve(raw, bytes))
            return false;
        sf_bytes_append(raw, out->pieces + start, bytes);
    }
    const ptrdiff_t used = whole(raw->at, raw->length);
    if (used < 0 || !has_room(out, count))
        return false;
    sf_bytes_append(&out->tokens, tokens, count * sizeof *tokens);
    escape(&out->text, raw->at, (size_t)used);
    out->begun_bytes = raw->length - (size_t)used;
    memcpy(out->begun, raw->at + used, out->begun_bytes);
    if (out->text.length && now >= out->written + out->pace)
        write_chunk(out, now);
    return true;
}

_Bool sf_text_out_put(sf_text_out *out, const uint32_t *tokens, size_t count, double now)
{
    pthread_mutex_lock(&out->lock);
    const bool taken = out->open && take(out, tokens, count, now);
    if (!taken && out->open) {
        if (out->text.length)
            write_chunk(out, now);
        out->open = false;
    }
    pthread_mutex_unlock(&out->lock);
    return taken;
}

double sf_text_out_due(sf_text_out *out)
{
    pthread_mutex_lock(&out->lock);
    const double due = out->open && out->text.length ? out->written + out->pace : INFINITY;
    pthread_mutex_unlock(&out->lock);
    return due;
}

void sf_text_out_pass(sf_text_out *out, double now)
{
    pthread_mutex_lock(&out->lock);
    if (out->open && out->text.length && now >= out->written + out->pace)
        write_chunk(out, now);
    pthread_mutex_unlock(&out->lock);
}

size_t sf_text_out_close(sf_text_out *out, const uint8_t **rest)
{
    pthread_mutex_lock(&out->lock);
    if (out->open && out->text.length)
        write_chunk(out, out->written);
    out->open = false;
    const size_t left = out->rest.length;
    *rest = out->rest.at;
    out->rest.length = 0; /* they are handed over once */
    pthread_mutex_unlock(&out->lock);
    return left;
}

size_t sf_text_out_taken(sf_text_out *out, const uint32_t **tokens)
{
    pthread_mutex_lock(&out->lock);
    const sf_bytes swapped = out->taken;
    out->taken = out->tokens;
    out->tokens = swapped;
    out->tokens.length = 0;
    *tokens = (const uint32_t *)(const void *)out->taken.at;
    const size_t count = out->taken.length / sizeof **tokens;
    pthread_mutex_unlock(&out->lock);
    return count;
}
