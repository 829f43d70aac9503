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
/* Byte by byte, every multiplication waits for the one before. Here a block is cut into spans that go side by side.
 *
 * A byte of data meets only the low byte of h, and the low byte of a product is that of its factors' low bytes: low
 * bytes can be had without the rest. Let l be the low byte of h before a byte d of data, x = l ^ d what it becomes.
 * Then h ^ d is h + (x - l), so that over n bytes h becomes h * PRIME^n plus the sum of their (x - l), the first one
 * times PRIME^n, the last one times PRIME: a sum of products that can be taken in any order, in 16-bit pieces.
 *
 * The low bytes the spans are entered with are found in passes of narrow multiplications, a span a lane. Bit k of the
 * low byte at a span's end depends on the bits under k at its entry, and is flipped when bit k there is. So a pass
 * with k bits right at every entry gives one more at every end, and an end is the next span's entry. */

enum { SPANS = 128, SPAN = 256, BLOCK = SPANS * SPAN, LANES = 16, VECTORS = SPANS / LANES, TILE = 8, PIECES = 4, LINE = 64 };

typedef uint16_t vector __attribute__((vector_size(2 * LANES)));
typedef uint16_t tile_row __attribute__((vector_size(2 * TILE)));
typedef uint16_t pair_rows[SPAN / 2][SPANS]; /* two bytes of every span a row */

#define LOW ((uint16_t)(uint8_t)PRIME)
#define INLINE static inline __attribute__((always_inline)) /* into every clone */
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("avx2", "default")))
#else
#define CLONES
#endif
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (tile_row){__VA_ARGS__})
#endif

INLINE void transpose(tile_row tile[TILE])
{
    for (int round = 0; round < 3; round++) {
        tile_row next[TILE];
        for (int i = 0; i < TILE / 2; i++) {
            next[2 * i] = SHUFFLE(tile[i], tile[i + TILE / 2], 0, 8, 1, 9, 2, 10, 3, 11);
            next[2 * i + 1] = SHUFFLE(tile[i], tile[i + TILE / 2], 4, 12, 5, 13, 6, 14, 7, 15);
        }
        memcpy(tile, next, sizeof next);
    }
}

INLINE void to_rows(const uint8_t *data, pair_rows rows)
{
    for (int j = 0; j < SPANS; j += TILE)
        for (int i = 0; i < SPAN / 2; i += TILE) {
            tile_row tile[TILE];
            for (int k = 0; k < TILE; k++)
                memcpy(&tile[k], data + (j + k) * SPAN + 2 * i, sizeof tile[k]);
            transpose(tile);
            for (int k = 0; k < TILE; k++)
                memcpy(&rows[i + k][j], &tile[k], sizeof tile[k]);
        }
}

INLINE void from_rows(pair_rows rows, uint8_t *data)
{
    for (int j = 0; j < SPANS; j += TILE)
        for (int i = 0; i < SPAN / 2; i += TILE) {
            tile_row tile[TILE];
            for (int k = 0; k < TILE; k++)
                memcpy(&tile[k], &rows[i + k][j], sizeof tile[k]);
            transpose(tile);
            for (int k = 0; k < TILE; k++)
                memcpy(data + (j + k) * SPAN + 2 * i, &tile[k], sizeof tile[k]);
        }
}

/* Bits of the entries, from those of the ends of spans entered with zeros there; the first entry has its own. */
INLINE void join(uint16_t entries[SPANS], const uint16_t ends[SPANS], unsigned bits)
{
    unsigned entry = entries[0];
    for (int j = 1; j < SPANS; j++)
        entries[j] |= (uint16_t)((entry ^= ends[j - 1]) & bits);
}

/* The two lowest bits need no multiplication. Bit 0 of an end is the exclusive or of all bits 0. In bit 1, each x also
 * adds its bit 0, which holds the bits 0 up to there: those of even bytes come up an even number of times. */
INLINE void find_two_bits(pair_rows rows, uint16_t entries[SPANS])
{
    vector all[VECTORS] = {0};
    for (int i = 0; i < SPAN / 2; i++)
        for (int j = 0; j < VECTORS; j++) {
            vector pair;
            memcpy(&pair, &rows[i][j * LANES], sizeof pair);
            all[j] ^= pair;
        }
    for (int j = 0; j < VECTORS; j++)
        all[j] ^= all[j] >> 8 ^ (all[j] >> 7 & 2);
    uint16_t ends[SPANS];
    memcpy(ends, all, sizeof ends);
    join(entries, ends, 3);
}

/* Run the low byte of each span over the rows; what is over it in a lane is rubbish. */
INLINE void run(pair_rows rows, uint16_t lows[SPANS])
{
    vector h[VECTORS];
    memcpy(h, lows, sizeof h);
    for (int i = 0; i < SPAN / 2; i++)
        for (int j = 0; j < VECTORS; j++) {
            vector pair;
            memcpy(&pair, &rows[i][j * LANES], sizeof pair);
            h[j] = (h[j] ^ pair) * LOW;
            h[j] = (h[j] ^ pair >> 8) * LOW;
        }
    memcpy(lows, h, sizeof h);
}

/* Make each byte of the rows the x it becomes. */
INLINE void become(pair_rows rows, const uint16_t entries[SPANS])
{
    vector h[VECTORS];
    memcpy(h, entries, sizeof h);
    for (int i = 0; i < SPAN / 2; i++)
        for (int j = 0; j < VECTORS; j++) {
            vector pair, first, second;
            memcpy(&pair, &rows[i][j * LANES], sizeof pair);
            first = (h[j] ^ pair) & 255;
            second = (first * LOW ^ pair >> 8) & 255;
            h[j] = second * LOW;
            pair = first | second << 8;
            memcpy(&rows[i][j * LANES], &pair, sizeof pair);
        }
}

/* The sum over a span. The last of its partial sums is 256 * 255 * 2^15 at most, which is under 2^31. */
INLINE uint64_t sum_of(const uint8_t *data, const uint8_t *x, int16_t powers[PIECES][SPAN])
{
    int32_t sums[PIECES] = {0};
    for (int i = 0; i < SPAN; i++) {
        int16_t step = (int16_t)(x[i] - (x[i] ^ data[i]));
        sums[0] += step * powers[0][i];
        sums[1] += step * powers[1][i];
        sums[2] += step * powers[2][i];
        sums[3] += step * powers[3][i];
    }
    uint64_t sum = 0;
    for (int k = 0; k < PIECES; k++)
        sum += (uint64_t)(int64_t)sums[k] << 16 * k;
    return sum;
}

CLONES static uint64_t blocks(const uint8_t *data, size_t count, uint64_t h)
{
    int16_t powers[PIECES][SPAN]; /* of PRIME, in pieces of 16 bits with a sign, the first byte's first */
    uint64_t power = 1;
    for (int i = SPAN; i-- > 0;) {
        uint64_t rest = power *= PRIME;
        for (int k = 0; k < PIECES; k++) {
            powers[k][i] = (int16_t)(uint16_t)rest;
            rest = (rest - (uint64_t)(int64_t)powers[k][i]) >> 16;
        }
    }
    _Alignas(LINE) pair_rows rows;
    _Alignas(LINE) uint16_t entries[SPANS], ends[SPANS];
    _Alignas(LINE) uint8_t x[BLOCK];
    for (; count; count--, data += BLOCK) {
        to_rows(data, rows);
        memset(entries, 0, sizeof entries);
        entries[0] = (uint8_t)h;
        find_two_bits(rows, entries);
        for (unsigned bit = 4; bit < 256; bit <<= 1) {
            memcpy(ends, entries, sizeof ends);
            ends[0] &= (uint16_t)(bit - 1);
            run(rows, ends);
            join(entries, ends, bit);
        }
        become(rows, entries);
        from_rows(rows, x);
        for (int at = 0; at < BLOCK; at += SPAN) {
            for (int i = 0; count > 1 && i < SPAN; i += LINE)
                __builtin_prefetch(data + BLOCK + at + i);
            h = h * power + sum_of(data + at, x + at, powers);
        }
    }
    return h;
}

uint64_t sf_fnv1a(const uint8_t *data, size_t len, uint64_t basis)
{
    size_t whole = len / BLOCK;
    if (whole)
        basis = blocks(data, whole, basis);
    return one_by_one(data + whole * BLOCK, len % BLOCK, basis);
}
#else
uint64_t sf_fnv1a(const uint8_t *data, size_t len, uint64_t basis)
{
    return one_by_one(data, len, basis);
}
#endif
