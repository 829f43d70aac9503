#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "word_memory.h"

/* A word: its bytes in `keys`, its ids in `ids`. */
struct entry {
    uint64_t hash; /* 0: none */
    uint32_t key, key_length;
    uint32_t first, n_ids;
};

struct generation {
    struct entry *entries; /* a power of two of them, at most half of them used */
    size_t capacity, count;
    uint8_t *keys;
    size_t keys_used, keys_room;
    uint32_t *ids;
    size_t ids_used, ids_room;
};

struct sf_word_memory {
    uint64_t seed;
    struct generation younger, older;
};

enum { FIRST_ENTRIES = 1024, FIRST_ROOM = 4096 };

/* Every bit of a word reaches every bit of its hash, and nobody who writes words knows the seed: words that all go to
   one place cannot be made up. */
static uint64_t hash_of(uint64_t seed, const uint8_t *word, size_t length)
{
    uint64_t hash = seed ^ length;
    while (length) {
        uint64_t part = 0;
        size_t taken = length < 8 ? length : 8;
        memcpy(&part, word, taken);
        hash = (hash ^ part) * 0xff51afd7ed558ccdu;
        hash = (hash ^ hash >> 33) * 0xc4ceb9fe1a85ec53u;
        hash ^= hash >> 33;
        word += taken;
        length -= taken;
    }
    return hash ? hash : 1;
}

/* Where a word is, or would go. */
static struct entry *place(const struct generation *in, uint64_t hash, const uint8_t *word, size_t length)
{
    for (size_t at = hash & (in->capacity - 1);; at = (at + 1) & (in->capacity - 1)) {
        struct entry *entry = &in->entries[at];
        if (!entry->hash || (entry->hash == hash && entry->key_length == length &&
                             !memcmp(in->keys + entry->key, word, length)))
            return entry;
    }
}

static int grow(void **buffer, size_t *room, size_t wanted, size_t width)
{
    size_t made = *room ? *room : FIRST_ROOM;
    while (made < wanted)
        made *= 2;
    if (made == *room)
        return 1;
    void *moved = made > UINT32_MAX ? NULL : realloc(*buffer, made * width);
    if (!moved)
        return 0;
    *buffer = moved;
    *room = made;
    return 1;
}

static int rehash(struct generation *in)
{
    size_t capacity = in->capacity ? in->capacity * 2 : FIRST_ENTRIES;
    struct entry *entries = calloc(capacity, sizeof *entries);
    if (!entries)
        return 0;
    for (size_t i = 0; i < in->capacity; i++) {
        if (!in->entries[i].hash)
            continue;
        size_t at = in->entries[i].hash & (capacity - 1);
        while (entries[at].hash)
            at = (at + 1) & (capacity - 1);
        entries[at] = in->entries[i];
    }
    free(in->entries);
    in->entries = entries;
    in->capacity = capacity;
    return 1;
}

/* Without memory for it, a word is not remembered. */
static void put(struct generation *in, uint64_t hash, const uint8_t *word, size_t length, const uint32_t *ids, size_t n)
{
    if (2 * (in->count + 1) > in->capacity && !rehash(in))
        return;
    struct entry *entry = place(in, hash, word, length);
    if (entry->hash || !grow((void **)&in->keys, &in->keys_room, in->keys_used + length, 1) ||
        !grow((void **)&in->ids, &in->ids_room, in->ids_used + n, sizeof *ids))
        return;
    memcpy(in->keys + in->keys_used, word, length);
    memcpy(in->ids + in->ids_used, ids, n * sizeof *ids);
    *entry = (struct entry){hash, (uint32_t)in->keys_used, (uint32_t)length, (uint32_t)in->ids_used, (uint32_t)n};
    in->keys_used += length;
    in->ids_used += n;
    in->count++;
}

/* The ids of a known word; NULL for another. */
static const uint32_t *find(sf_word_memory *memory, const uint8_t *word, size_t length, size_t *n)
{
    uint64_t hash = hash_of(memory->seed, word, length);
    struct generation *younger = &memory->younger, *older = &memory->older;
    if (younger->count) {
        struct entry *entry = place(younger, hash, word, length);
        if (entry->hash) {
            *n = entry->n_ids;
            return younger->ids + entry->first;
        }
    }
    if (!older->count)
        return NULL;
    struct entry *entry = place(older, hash, word, length);
    if (!entry->hash)
        return NULL;
    *n = entry->n_ids;
    put(younger, hash, word, length, older->ids + entry->first, entry->n_ids);
    return older->ids + entry->first;
}

static void forget(struct generation *in)
{
    free(in->entries);
    free(in->keys);
    free(in->ids);
    memset(in, 0, sizeof *in);
}

sf_word_memory *sf_word_memory_new(uint64_t seed)
{
    sf_word_memory *memory = calloc(1, sizeof *memory);
    if (memory)
        memory->seed = seed;
    return memory;
}

void sf_word_memory_free(sf_word_memory *memory)
{
    if (!memory)
        return;
    forget(&memory->younger);
    forget(&memory->older);
    free(memory);
}

void sf_word_memory_turn(sf_word_memory *memory, size_t room)
{
    if (memory->younger.count < room)
        return;
    forget(&memory->older);
    memory->older = memory->younger;
    memset(&memory->younger, 0, sizeof memory->younger);
}

/* White space at the end of a text encodes as it does nowhere else. */
static int ends_like_others(const uint8_t *text, size_t length)
{
    return text[length - 1] > ' ' && text[length - 1] < 0x7f;
}

size_t sf_words_known(sf_word_memory *memory, const uint8_t *text, size_t length, const uint32_t *cuts, size_t n_cuts,
                      int whole, uint32_t *ids, size_t room, uint32_t *gaps, size_t *n_gaps)
{
    size_t written = 0, found = 0, start = 0;
    for (size_t i = 0; i <= n_cuts; i++) {
        size_t end = i < n_cuts ? cuts[i] : length, n = 0;
        int known_of = (i || whole) && (i < n_cuts || ends_like_others(text, length));
        const uint32_t *known = known_of ? find(memory, text + start, end - start, &n) : NULL;
        if (known && written + n <= room) {
            memcpy(ids + written, known, n * sizeof *ids);
            written += n;
        } else {
            gaps[3 * found] = (uint32_t)written;
            gaps[3 * found + 1] = (uint32_t)start;
            gaps[3 * found + 2] = (uint32_t)end;
            found++;
        }
        start = end;
    }
    *n_gaps = found;
    return written;
}

void sf_words_unknown(sf_word_memory *memory, sf_word_memory *asked, sf_word_memory *beyond, size_t longest,
                      const uint8_t *text, size_t length, const uint32_t *cuts, size_t n_cuts, int whole)
{
    for (size_t i = !whole; i < n_cuts + ends_like_others(text, length); i++) {
        size_t start = i ? cuts[i - 1] : 0, size = (i < n_cuts ? cuts[i] : length) - start, n = 0;
        struct generation *into = size <= longest ? &asked->younger : &beyond->younger;
        if (find(memory, text + start, size, &n))
            continue;
        uint32_t end = (uint32_t)(into->keys_used + size);
        put(into, hash_of(memory->seed, text + start, size), text + start, size, &end, 1);
    }
}

size_t sf_word_memory_words(const sf_word_memory *memory, const uint8_t **text, const uint32_t **ends)
{
    *text = memory->younger.keys;
    *ends = memory->younger.ids;
    return memory->younger.count;
}

static int may_follow(const uint8_t *pairs, uint8_t left, uint8_t right) { return pairs[(size_t)left << 8 | right]; }

size_t sf_words_pack(const uint8_t *pairs, const uint8_t *text, const uint32_t *ends, size_t n, const uint8_t *glue,
                     size_t glue_length, size_t room, uint8_t *out, uint32_t *out_ends, uint32_t *counts)
{
    size_t groups = 0, left = 0, start = 0, size = 0; /* size: of the text under way */
    for (size_t i = 0; i < n; start = ends[i++]) {
        const uint8_t *word = text + start;
        size_t length = ends[i] - start;
        int joined = 0;
        if (size && length <= left) {
            uint8_t last = out[-1];
            if (may_follow(pairs, last, word[0])) {
                joined = 1;
            } else if (may_follow(pairs, last, glue[0]) && may_follow(pairs, glue[glue_length - 1], word[0])) {
                memcpy(out, glue, glue_length);
                out += glue_length;
                size += glue_length;
                *out_ends++ = (uint32_t)size;
                counts[groups - 1]++;
                joined = 1;
            }
        }
        if (!joined) {
            counts[groups++] = 0;
            left = room;
            size = 0;
        }
        memcpy(out, word, length);
        out += length;
        size += length;
        *out_ends++ = (uint32_t)size;
        counts[groups - 1]++;
        left = length < left ? left - length : 0;
    }
    return groups;
}

/* Whether the ids spell the text and none reaches over the end of a word. */
static int spells(const uint8_t *text, const uint32_t *ends, size_t n, const uint32_t *ids, size_t n_ids,
                  const uint8_t *data, const unsigned long *offsets, size_t n_tokens)
{
    size_t at = 0, word = 0;
    for (size_t i = 0; i < n_ids; i++) {
        if (ids[i] >= n_tokens || word == n)
            return 0;
        size_t size = offsets[ids[i] + 1] - offsets[ids[i]];
        if (!size || at + size > ends[word] || memcmp(data + offsets[ids[i]], text + at, size))
            return 0;
        at += size;
        if (at == ends[word])
            word++;
    }
    return word == n;
}

int sf_words_learn(sf_word_memory *memory, const uint8_t *text, const uint32_t *ends, size_t n, const uint32_t *ids,
                   size_t n_ids, const uint8_t *data, const unsigned long *offsets, size_t n_tokens)
{
    if (n == 1) {
        put(&memory->younger, hash_of(memory->seed, text, ends[0]), text, ends[0], ids, n_ids);
        return 1;
    }
    if (!spells(text, ends, n, ids, n_ids, data, offsets, n_tokens))
        return 0;
    size_t at = 0, start = 0, first = 0, word = 0;
    for (size_t i = 0; i < n_ids; i++) {
        at += offsets[ids[i] + 1] - offsets[ids[i]];
        if (at != ends[word])
            continue;
        uint64_t hash = hash_of(memory->seed, text + start, at - start);
        put(&memory->younger, hash, text + start, at - start, ids + first, i + 1 - first);
        start = at;
        first = i + 1;
        word++;
    }
    return 1;
}
