#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "fnv.h"

#define PRIME UINT64_C(0x100000001B3)

static uint64_t one_by_one(const uint8_t *data, size_t len, uint64_t h)
{
    for (size_t i = 0; i < len; i++)
        h = (h ^ data[i]) * PRIME;
    return h;
}

#if defined(__GNUC__) && defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
/* Byte by byte, every multiplication waits for the one before. Here the spans of a block are hashed side by side.
 *
 * A byte of data meets only the low byte of h, and the low byte of a product is that of its factors' low bytes. So a
 * span entered with the right low byte, and zeros above it, ends short of (what was above) * PRIME^length only, which
 * is added afterwards.
 *
 * The low bytes the spans are entered with are found in eight passes of narrow multiplications, a span a lane. Bit k
 * of the low byte at a span's end depends on the bits under k at its entry, and is flipped when bit k there is. So a
 * pass with k bits right at every entry gives one more at every end, and an end is the next span's entry. */

enum { SPANS = 64, SPAN = 256, LANES = 8, VECTORS = SPANS / LANES, CHAINS = 8 };

typedef uint16_t vector __attribute__((vector_size(2 * LANES)));

/* Run the low byte of each span over `pairs`, two bytes of every span a row; what is over it in a lane is rubbish. */
static void low_bytes(uint16_t pairs[SPAN / 2][SPANS], uint16_t lows[SPANS])
{
    const uint16_t prime = (uint8_t)PRIME;
    vector h[VECTORS];
    memcpy(h, lows, sizeof h);
    for (int i = 0; i < SPAN / 2; i++) {
        for (int j = 0; j < VECTORS; j++) {
            vector pair;
            memcpy(&pair, &pairs[i][j * LANES], sizeof pair);
            h[j] = (h[j] ^ pair) * prime;
            h[j] = (h[j] ^ pair >> 8) * prime;
        }
    }
    memcpy(lows, h, sizeof h);
}

static void find_entries(const uint8_t *data, uint8_t first, uint16_t entries[SPANS])
{
    uint16_t pairs[SPAN / 2][SPANS], ends[SPANS];
    for (int j = 0; j < SPANS; j += CHAINS)
        for (int i = 0; i < SPAN / 2; i++)
            for (int k = j; k < j + CHAINS; k++)
                memcpy(&pairs[i][k], data + k * SPAN + 2 * i, 2);
    memset(entries, 0, SPANS * sizeof *entries);
    entries[0] = first;
    for (unsigned bit = 1; bit < 256; bit <<= 1) {
        memcpy(ends, entries, sizeof ends);
        low_bytes(pairs, ends);
        unsigned flipped = 0;
        for (int j = 1; j < SPANS; j++) {
            unsigned entry = (ends[j - 1] ^ flipped) & (2 * bit - 1);
            flipped = entry & bit; /* it was run with this bit clear */
            entries[j] = (uint16_t)entry;
        }
    }
}

static uint64_t block(const uint8_t *data, uint64_t h, uint64_t power)
{
    uint16_t entries[SPANS];
    find_entries(data, (uint8_t)h, entries);
    for (int j = 0; j < SPANS; j += CHAINS) {
        const uint8_t *spans = data + j * SPAN;
        uint64_t g[CHAINS];
        for (int k = 0; k < CHAINS; k++)
            g[k] = entries[j + k];
        for (int i = 0; i < SPAN; i++)
            for (int k = 0; k < CHAINS; k++)
                g[k] = (g[k] ^ spans[k * SPAN + i]) * PRIME;
        for (int k = 0; k < CHAINS; k++)
            h = g[k] + (h - entries[j + k]) * power;
    }
    return h;
}

uint64_t sf_fnv1a(const uint8_t *data, size_t len, uint64_t basis)
{
    if (len >= SPANS * SPAN) {
        uint64_t power = 1;
        for (int i = 0; i < SPAN; i++)
            power *= PRIME;
        for (; len >= SPANS * SPAN; len -= SPANS * SPAN, data += SPANS * SPAN)
            basis = block(data, basis, power);
    }
    return one_by_one(data, len, basis);
}
#else
uint64_t sf_fnv1a(const uint8_t *data, size_t len, uint64_t basis)
{
    return one_by_one(data, len, basis);
}
#endif
