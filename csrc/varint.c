/* Postcard vectors of u32: a varint count, then a varint of at most 5 bytes per value. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "varint.h"

enum { SHORT = -1, BAD_COUNT = -2, BAD_VARINT = -3, MAX_U32 = 5, MAX_U64 = 10 };

static size_t put(uint64_t value, uint8_t *out)
{
    size_t n = 0;
    while (value >= 0x80) {
        out[n++] = (uint8_t)(value | 0x80);
        value >>= 7;
    }
    out[n++] = (uint8_t)value;
    return n;
}

/* Bytes read, or an error; `limit` bytes at most, of which the last holds no bit above `last`. */
static int64_t get(const uint8_t *data, size_t left, int limit, uint8_t last, uint64_t *value)
{
    uint64_t sum = 0;
    for (int i = 0; i < limit; i++) {
        if ((size_t)i >= left)
            return SHORT;
        const uint8_t byte = data[i];
        if (i == limit - 1 && byte > last)
            return BAD_VARINT;
        sum |= (uint64_t)(byte & 0x7F) << (7 * i);
        if (byte < 0x80) {
            *value = sum;
            return i + 1;
        }
    }
    return BAD_VARINT;
}

/* The lengths of neighbours differ, so no branch depends on them: eight bytes are read or written, and as many counted
   as the value has. */
static const int little_endian = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__;

static uint64_t spread(uint64_t value)
{
    return (value & 0x7F) | (value & 0x3F80) << 1 | (value & 0x1FC000) << 2 | (value & 0xFE00000) << 3 |
           (value & 0xF0000000) << 4;
}

static uint64_t gathered(uint64_t bytes)
{
    return (bytes & 0x7F) | (bytes >> 1 & 0x3F80) | (bytes >> 2 & 0x1FC000) | (bytes >> 3 & 0xFE00000) |
           (bytes >> 4 & 0xF0000000);
}

size_t sf_tokens_encode(const uint32_t *values, size_t count, uint8_t *out)
{
    size_t n = put(count, out), i = 0;
    for (; little_endian && i < count; i++) { /* past the last value's five bytes is the count's room */
        const uint32_t value = values[i];
        const unsigned more = (value > 0x7F) + (value > 0x3FFF) + (value > 0x1FFFFF) + (value > 0xFFFFFFF);
        const uint64_t bytes = spread(value) | (UINT64_C(0x80808080) & ((UINT64_C(1) << 8 * more) - 1));
        memcpy(out + n, &bytes, sizeof bytes);
        n += more + 1;
    }
    for (; i < count; i++)
        n += put(values[i], out + n);
    return n;
}

int64_t sf_tokens_count(const uint8_t *data, size_t length, size_t offset, size_t *count)
{
    uint64_t n;
    if (offset > length)
        return SHORT;
    const int64_t used = get(data + offset, length - offset, MAX_U64, 0x01, &n);
    if (used < 0)
        return used;
    offset += (size_t)used;
    if (n > length - offset)
        return BAD_COUNT;
    *count = (size_t)n;
    return (int64_t)offset;
}

int64_t sf_varint_decode(const uint8_t *data, size_t length, size_t offset, uint64_t *value)
{
    if (offset > length)
        return SHORT;
    const int64_t used = get(data + offset, length - offset, MAX_U64, 0x01, value);
    return used < 0 ? used : (int64_t)offset + used;
}

int64_t sf_tokens_decode(const uint8_t *data, size_t length, size_t offset, uint32_t *out, size_t count)
{
    size_t i = 0;
    for (; little_endian && i < count && offset + 8 <= length; i++) {
        uint64_t bytes;
        memcpy(&bytes, data + offset, sizeof bytes);
        const uint64_t ends = ~bytes & UINT64_C(0x8080808080);
        bytes &= ends ^ (ends - 1);
        if (!ends || bytes >> 36) /* more than five bytes, or bits past u32 */
            return BAD_VARINT;
        out[i] = (uint32_t)gathered(bytes);
        offset += (size_t)(__builtin_ctzll(ends) / 8 + 1);
    }
    for (; i < count; i++) {
        uint64_t value;
        const int64_t used = get(data + offset, length - offset, MAX_U32, 0x0F, &value);
        if (used < 0)
            return used;
        out[i] = (uint32_t)value;
        offset += (size_t)used;
    }
    return (int64_t)offset;
}
