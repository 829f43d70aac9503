/* Ring slots as sequence locks: generation 0 says "being written", and a reader trusts a copy only when the generation
   was the same before and after it. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "ring.h"

enum { SLOT_HEADER = 16, STALE = -1, BAD_LENGTH = -2 };

void sf_word_store(uint8_t *base, size_t offset, uint64_t value)
{
    __atomic_store_n((uint64_t *)(void *)(base + offset), value, __ATOMIC_RELEASE);
}

uint64_t sf_word_load(const uint8_t *base, size_t offset)
{
    return __atomic_load_n((const uint64_t *)(const void *)(base + offset), __ATOMIC_ACQUIRE);
}

void sf_ring_write(uint8_t *base, size_t offset, uint64_t generation, const uint8_t *payload, uint32_t length)
{
    uint8_t *slot = base + offset;
    uint64_t *word = (uint64_t *)(void *)slot;
    const uint32_t head[2] = {length, 0};

    __atomic_store_n(word, 0, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    memcpy(slot + 8, head, sizeof head);
    memcpy(slot + SLOT_HEADER, payload, length);
    __atomic_store_n(word, generation, __ATOMIC_RELEASE);
}

int64_t sf_ring_read(const uint8_t *base, size_t offset, uint64_t generation, uint32_t room, uint8_t *out,
                     size_t capacity)
{
    const uint8_t *slot = base + offset;
    const uint64_t *word = (const uint64_t *)(const void *)slot;
    uint32_t length;

    if (generation == 0 || __atomic_load_n(word, __ATOMIC_ACQUIRE) != generation)
        return STALE;
    memcpy(&length, slot + 8, sizeof length);
    if (length <= room && length <= capacity)
        memcpy(out, slot + SLOT_HEADER, length);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    if (__atomic_load_n(word, __ATOMIC_RELAXED) != generation)
        return STALE;
    return length <= room ? (int64_t)length : BAD_LENGTH;
}
