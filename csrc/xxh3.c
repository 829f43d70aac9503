#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "xxh3.h"

/* XXH3-64 at seed 0, written from the algorithm's published description: one path per length class. */

#define P32_1 UINT64_C(0x9E3779B1)
#define P32_2 UINT64_C(0x85EBCA77)
#define P32_3 UINT64_C(0xC2B2AE3D)
#define P64_1 UINT64_C(0x9E3779B185EBCA87)
#define P64_2 UINT64_C(0xC2B2AE3D27D4EB4F)
#define P64_3 UINT64_C(0x165667B19E3779F9)
#define P64_4 UINT64_C(0x85EBCA77C2B2AE63)
#define P64_5 UINT64_C(0x27D4EB2F165667C5)
#define MIX_1 UINT64_C(0x165667919E3779F9)
#define MIX_2 UINT64_C(0x9FB21C651E98DF25)

enum { SECRET_LEN = 192, STRIPE = 64, STRIPES_PER_BLOCK = (SECRET_LEN - STRIPE) / 8 };

static const uint8_t SECRET[SECRET_LEN] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static inline uint32_t load32(const uint8_t *p)
{
    uint32_t v;
    memcpy(&v, p, sizeof v);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    v = __builtin_bswap32(v);
#endif
    return v;
}

static inline uint64_t load64(const uint8_t *p)
{
    uint64_t v;
    memcpy(&v, p, sizeof v);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    v = __builtin_bswap64(v);
#endif
    return v;
}

static inline uint64_t rotate(uint64_t v, int n)
{
    return v << n | v >> (64 - n);
}

static inline uint64_t fold(uint64_t a, uint64_t b)
{
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline uint64_t avalanche(uint64_t h)
{
    h = (h ^ h >> 37) * MIX_1;
    return h ^ h >> 32;
}

static inline uint64_t avalanche64(uint64_t h)
{
    h = (h ^ h >> 33) * P64_2;
    h = (h ^ h >> 29) * P64_3;
    return h ^ h >> 32;
}

static inline uint64_t mix16(const uint8_t *data, const uint8_t *secret)
{
    return fold(load64(data) ^ load64(secret), load64(data + 8) ^ load64(secret + 8));
}

static uint64_t up_to_16(const uint8_t *data, size_t len)
{
    if (len > 8) {
        uint64_t low = load64(data) ^ load64(SECRET + 24) ^ load64(SECRET + 32);
        uint64_t high = load64(data + len - 8) ^ load64(SECRET + 40) ^ load64(SECRET + 48);
        return avalanche(len + __builtin_bswap64(low) + high + fold(low, high));
    }
    if (len >= 4) {
        uint64_t h = load32(data + len - 4) + ((uint64_t)load32(data) << 32);
        h ^= load64(SECRET + 8) ^ load64(SECRET + 16);
        h ^= rotate(h, 49) ^ rotate(h, 24);
        h *= MIX_2;
        h ^= (h >> 35) + len;
        h *= MIX_2;
        return h ^ h >> 28;
    }
    if (len) {
        uint32_t h = (uint32_t)data[0] << 16 | (uint32_t)data[len >> 1] << 24 | data[len - 1] | (uint32_t)len << 8;
        return avalanche64(h ^ (uint64_t)(load32(SECRET) ^ load32(SECRET + 4)));
    }
    return avalanche64(load64(SECRET + 56) ^ load64(SECRET + 64));
}

static uint64_t up_to_128(const uint8_t *data, size_t len)
{
    uint64_t acc = len * P64_1;
    for (size_t i = (len - 1) / 32 + 1; i-- > 0;) {
        acc += mix16(data + 16 * i, SECRET + 32 * i);
        acc += mix16(data + len - 16 * (i + 1), SECRET + 32 * i + 16);
    }
    return avalanche(acc);
}

static uint64_t up_to_240(const uint8_t *data, size_t len)
{
    uint64_t acc = len * P64_1;
    size_t pieces = len / 16;
    for (size_t i = 0; i < 8; i++)
        acc += mix16(data + 16 * i, SECRET + 16 * i);
    acc = avalanche(acc);
    for (size_t i = 8; i < pieces; i++)
        acc += mix16(data + 16 * i, SECRET + 16 * (i - 8) + 3);
    acc += mix16(data + len - 16, SECRET + 136 - 17);
    return avalanche(acc);
}

static inline void accumulate(uint64_t *acc, const uint8_t *data, const uint8_t *secret)
{
    for (int i = 0; i < 8; i++) {
        uint64_t value = load64(data + 8 * i);
        uint64_t keyed = value ^ load64(secret + 8 * i);
        acc[i ^ 1] += value;
        acc[i] += (keyed & 0xffffffff) * (keyed >> 32);
    }
}

static uint64_t longer(const uint8_t *data, size_t len)
{
    uint64_t acc[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    const size_t block = STRIPE * STRIPES_PER_BLOCK;
    size_t blocks = (len - 1) / block;
    for (size_t b = 0; b < blocks; b++) {
        for (size_t s = 0; s < STRIPES_PER_BLOCK; s++)
            accumulate(acc, data + b * block + s * STRIPE, SECRET + 8 * s);
        for (int i = 0; i < 8; i++)
            acc[i] = (acc[i] ^ acc[i] >> 47 ^ load64(SECRET + SECRET_LEN - STRIPE + 8 * i)) * P32_1;
    }
    size_t stripes = (len - 1 - blocks * block) / STRIPE;
    for (size_t s = 0; s < stripes; s++)
        accumulate(acc, data + blocks * block + s * STRIPE, SECRET + 8 * s);
    accumulate(acc, data + len - STRIPE, SECRET + SECRET_LEN - STRIPE - 7);
    uint64_t h = len * P64_1;
    for (int i = 0; i < 4; i++)
        h += fold(acc[2 * i] ^ load64(SECRET + 11 + 16 * i), acc[2 * i + 1] ^ load64(SECRET + 11 + 16 * i + 8));
    return avalanche(h);
}

uint64_t sf_xxh3_64(const uint8_t *data, size_t len)
{
    if (len <= 16)
        return up_to_16(data, len);
    if (len <= 128)
        return up_to_128(data, len);
    if (len <= 240)
        return up_to_240(data, len);
    return longer(data, len);
}
