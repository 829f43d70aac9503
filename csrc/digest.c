#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "digest.h"

static void store_u64(uint8_t *out, uint64_t value)
{
    for (int i = 0; i < 8; i++)
        out[i] = (uint8_t)(value >> (8 * i));
}

void sf_content_digests(const uint32_t *tokens, const uint32_t *lengths, size_t n, uint8_t *out)
{
    const uint64_t prime = UINT64_C(0x100000001B3);
    uint64_t a = UINT64_C(0xCBF29CE484222325), b = ~a;
    uint32_t at = 0;
    for (size_t i = 0; i < n; i++) {
        for (; at < lengths[i]; at++) {
            uint32_t id = tokens[at];
            for (int k = 0; k < 4; k++, id >>= 8) {
                a = (a ^ (id & 0xFF)) * prime;
                b = (b ^ (id & 0xFF)) * prime;
            }
        }
        uint8_t *digest = out + 32 * i;
        memset(digest, 0, 32);
        store_u64(digest, a);
        store_u64(digest + 8, b);
    }
}
