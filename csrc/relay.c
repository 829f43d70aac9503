/* A thread that reads a worker's link: streamed tokens to the texts they belong to, the rest to the event loop. */
#define _GNU_SOURCE
#include <errno.h>
#include <math.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "bytes.h"
#include "textout.h"
#include "relay.h"
#include "varint.h"

enum {
    LENGTH_BYTES = 4,
    HEAD_BYTES = 25, /* length, version, type, seq, correlation, class */
    LEAST = HEAD_BYTES - LENGTH_BYTES,
    MOST_EMIT = 1 << 16, /* a longer frame is for the event loop */
    READ_BYTES = 1 << 16,
    MOST_WAITING = 1 << 23, /* bytes for the event loop before the worker has to wait */
};

typedef struct {
    uint64_t tag;
    sf_text_out *out;
} Lent;

struct sf_relay {
    int fd, news, wake;
    uint16_t version, emit_type;
    pthread_t thread;
    pthread_mutex_t lock; /* of all below, but not of what the thread alone uses */
    sf_bytes waiting, taken;
    int ended;
    bool told, full, closing;
    Lent *lent;
    size_t lent_count, lent_room;
    /* of the thread */
    sf_bytes read;     /* whole or begun frames */
    size_t passing; /* bytes of a frame that is for the event loop and not read yet */
    bool garbled;   /* no frame begins here: all is for the event loop */
    uint32_t tokens[MOST_EMIT];
};

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void signal_to(int descriptor)
{
    const uint64_t one = 1;
    while (write(descriptor, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

static void reset(int descriptor)
{
    uint64_t count;
    while (read(descriptor, &count, sizeof count) < 0 && errno == EINTR)
        ;
}

/* Under the lock. */
static void tell(sf_relay *relay)
{
    if (!relay->told) {
        relay->told = true;
        signal_to(relay->news);
    }
}

/* Under the lock. */
static void end(sf_relay *relay, int how)
{
    relay->ended = how;
    tell(relay);
}

/* Hand bytes to the event loop, under the lock. */
static void pass(sf_relay *relay, const uint8_t *data, size_t length)
{
    if (!length || relay->ended)
        return;
    if (!sf_bytes_reserve(&relay->waiting, length)) {
        end(relay, -ENOMEM);
        return;
    }
    sf_bytes_append(&relay->waiting, data, length);
    relay->full = relay->waiting.length >= MOST_WAITING;
    tell(relay);
}

static uint64_t little(const uint8_t *data, int bytes)
{
    uint64_t value = 0;
    for (int i = bytes; i--;)
        value = value << 8 | data[i];
    return value;
}

static bool is_emit(const sf_relay *relay, const uint8_t *head)
{
    return little(head + 4, 2) == relay->version && little(head + 6, 2) == relay->emit_type &&
           little(head + 16, 8) == 0 && head[24] == relay->emit_type >> 15;
}

/* Give the tokens of an emit to the text of its lane, under the lock; false: it is for the event loop. */
static bool put(sf_relay *relay, const uint8_t *payload, size_t length)
{
    uint64_t tag;
    size_t count;
    int64_t at = sf_varint_decode(payload, length, 0, &tag);
    if (at < 0)
        return false;
    sf_text_out *out = NULL;
    for (size_t i = 0; i < relay->lent_count && !out; i++)
        if (relay->lent[i].tag == tag)
            out = relay->lent[i].out;
    if (!out)
        return false;
    at = sf_tokens_count(payload, length, (size_t)at, &count);
    if (at < 0) /* a count is checked against the bytes left, so the tokens have room */
        return false;
    at = sf_tokens_decode(payload, length, (size_t)at, relay->tokens, count);
    return at == (int64_t)length && sf_text_out_put(out, relay->tokens, count, now());
}

/* Sort what was read, under the lock. Returns the bytes that are done with. */
static size_t sort(sf_relay *relay, const uint8_t *data, size_t length)
{
    size_t at = 0, passed = 0; /* bytes before `passed` are handed on or taken */
    while (at < length) {
        if (relay->passing || relay->garbled) {
            const size_t left = length - at;
            const size_t some = relay->garbled || relay->passing > left ? left : relay->passing;
            relay->passing -= relay->garbled ? relay->passing : some;
            at += some;
            continue;
        }
        if (length - at < LENGTH_BYTES)
            break;
        const size_t frame = little(data + at, LENGTH_BYTES);
        if (frame < LEAST) {
            relay->garbled = true;
            continue;
        }
        if (frame <= MOST_EMIT) {
            if (length - at < LENGTH_BYTES + frame && (length - at < HEAD_BYTES || is_emit(relay, data + at)))
                break; /* the rest is to come */
            if (is_emit(relay, data + at)) {
                pass(relay, data + passed, at - passed); /* in order: what stood before it */
                passed = at;
                if (put(relay, data + at + HEAD_BYTES, frame - LEAST))
                    passed += LENGTH_BYTES + frame;
                at += LENGTH_BYTES + frame;
                continue;
            }
        }
        relay->passing = LENGTH_BYTES + frame;
    }
    pass(relay, data + passed, at - passed);
    return at;
}

static double first_due(sf_relay *relay)
{
    double due = INFINITY;
    for (size_t i = 0; i < relay->lent_count; i++)
        due = fmin(due, sf_text_out_due(relay->lent[i].out));
    return due;
}

/* Write the texts that are due, under the lock; milliseconds until the next is, -1 for none. */
static int write_due(sf_relay *relay)
{
    if (isinf(first_due(relay)))
        return -1;
    const double at = now();
    for (size_t i = 0; i < relay->lent_count; i++)
        sf_text_out_pass(relay->lent[i].out, at);
    const double due = first_due(relay);
    return isinf(due) ? -1 : due > at ? (int)ceil((due - at) * 1e3) : 0;
}

/* Read once; false at the end. */
static bool read_some(sf_relay *relay)
{
    sf_bytes *held = &relay->read;
    int how = -ENOMEM;
    if (sf_bytes_reserve(held, READ_BYTES)) {
        const ssize_t got = recv(relay->fd, held->at + held->length, READ_BYTES, MSG_DONTWAIT);
        if (got > 0) {
            held->length += (size_t)got;
            return true;
        }
        if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
            return true;
        how = got < 0 ? -errno : 1;
    }
    pthread_mutex_lock(&relay->lock);
    pass(relay, held->at, held->length); /* half a frame: whoever reads it says so */
    if (!relay->ended)
        end(relay, how);
    pthread_mutex_unlock(&relay->lock);
    return false;
}

static void *run(void *argument)
{
    sf_relay *relay = argument;
    sf_bytes *held = &relay->read;
    struct pollfd watched[2] = {{.fd = relay->wake, .events = POLLIN}, {.fd = relay->fd, .events = POLLIN}};
    while (true) {
        pthread_mutex_lock(&relay->lock);
        const size_t done = sort(relay, held->at, held->length);
        const int timeout = write_due(relay);
        const bool full = relay->full, over = relay->closing || relay->ended;
        pthread_mutex_unlock(&relay->lock);
        if (over)
            return NULL;
        if (done) {
            memmove(held->at, held->at + done, held->length - done);
            held->length -= done;
        }
        watched[0].revents = watched[1].revents = 0;
        if (poll(watched, full ? 1 : 2, timeout) < 0 && errno != EINTR)
            watched[1].revents = POLLIN; /* out of memory: reading says the same, or goes on */
        if (watched[0].revents)
            reset(relay->wake);
        if (watched[1].revents && !read_some(relay))
            return NULL;
    }
}

sf_relay *sf_relay_open(int fd, uint16_t version, uint16_t emit_type, const uint8_t *before, size_t bytes)
{
    sf_relay *relay = calloc(1, sizeof *relay);
    if (!relay)
        return NULL;
    relay->fd = fd;
    relay->version = version;
    relay->emit_type = emit_type;
    relay->news = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    relay->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    pthread_mutex_init(&relay->lock, NULL);
    int failure = relay->news < 0 || relay->wake < 0 ? errno : 0;
    if (!failure && !sf_bytes_reserve(&relay->read, bytes))
        failure = ENOMEM;
    if (!failure) {
        sf_bytes_append(&relay->read, before, bytes);
        sigset_t all, old; /* signals are for the threads of the interpreter */
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &old);
        failure = pthread_create(&relay->thread, NULL, run, relay);
        pthread_sigmask(SIG_SETMASK, &old, NULL);
    }
    if (!failure) {
        pthread_setname_np(relay->thread, "link-relay");
        return relay;
    }
    if (relay->news >= 0)
        close(relay->news);
    if (relay->wake >= 0)
        close(relay->wake);
    free(relay->read.at);
    free(relay);
    errno = failure;
    return NULL;
}

int sf_relay_news(const sf_relay *relay)
{
    return relay->news;
}

size_t sf_relay_take(sf_relay *relay, const uint8_t **bytes, int *ended)
{
    pthread_mutex_lock(&relay->lock);
    const sf_bytes swapped = relay->taken;
    relay->taken = relay->waiting;
    relay->waiting = swapped;
    relay->waiting.length = 0;
    if (relay->told && !relay->ended) { /* an end stays readable */
        relay->told = false;
        reset(relay->news);
    }
    const bool full = relay->full;
    relay->full = false;
    *ended = relay->ended;
    *bytes = relay->taken.at;
    const size_t length = relay->taken.length;
    pthread_mutex_unlock(&relay->lock);
    if (full)
        signal_to(relay->wake);
    return length;
}

_Bool sf_relay_lend(sf_relay *relay, uint64_t tag, sf_text_out *out)
{
    pthread_mutex_lock(&relay->lock);
    if (relay->lent_count == relay->lent_room) {
        const size_t room = relay->lent_room ? 2 * relay->lent_room : 8;
        Lent *more = realloc(relay->lent, room * sizeof *more);
        if (more) {
            relay->lent = more;
            relay->lent_room = room;
        }
    }
    const bool room = relay->lent_count < relay->lent_room;
    if (room)
        relay->lent[relay->lent_count++] = (Lent){tag, out};
    pthread_mutex_unlock(&relay->lock);
    return room;
}

void sf_relay_return(sf_relay *relay)
{
    pthread_mutex_lock(&relay->lock);
    relay->lent_count = 0;
    pthread_mutex_unlock(&relay->lock);
}

void sf_relay_close(sf_relay *relay)
{
    pthread_mutex_lock(&relay->lock);
    relay->closing = true;
    pthread_mutex_unlock(&relay->lock);
    signal_to(relay->wake);
    pthread_join(relay->thread, NULL);
    close(relay->news);
    close(relay->wake);
    pthread_mutex_destroy(&relay->lock);
    free(relay->read.at);
    free(relay->waiting.at);
    free(relay->taken.at);
    free(relay->lent);
    free(relay);
}
