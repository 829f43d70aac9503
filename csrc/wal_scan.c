#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "wal_scan.h"
#include "xxh3.h"

enum { HEADER = 12, SECTOR = 512, DEEPEST = 512 };
#define LONGEST (UINT32_C(1) << 30)

enum variant {
    CREATED, APPENDED, MESSAGE, GENERATION_PROMPT, GENERATED, TOOL_USE, TOOL_RESULT, EPOCH_BUMP,
    GENERATION_FINGERPRINT, TOOL_PARSE_FAILURE, FORKED, META_UPDATED, REBASED, TOOL_EXPIRED, PURGED, REROOTED,
    QOS_SET, BLOCK, PERMISSION_REQUEST, PERMISSION_RESPONSE, TOOL_CANCEL_REQUESTED, TOOL_OUTCOME,
    TOOL_RECONCILIATION, TOOL_LEASE, PINNED,
};

/* A reader of one payload. A read past the end, or of something postcard refuses, sets `bad`; reads go on. */
struct reader {
    const uint8_t *at, *end;
    int bad;
};

static inline uint64_t fail(struct reader *r)
{
    r->bad = 1;
    r->at = r->end;
    return 0;
}

static inline uint64_t varint(struct reader *r, int bits)
{
    uint64_t value = 0;
    for (int shift = 0; shift < bits; shift += 7) {
        if (r->at == r->end)
            return fail(r);
        uint8_t byte = *r->at++;
        if (shift + 7 > bits && byte >> (bits - shift))
            return fail(r);
        value |= (uint64_t)(byte & 0x7f) << shift;
        if (!(byte & 0x80))
            return value;
    }
    return fail(r);
}

static inline uint64_t u64(struct reader *r)
{
    return varint(r, 64);
}

static inline uint32_t u32(struct reader *r)
{
    return (uint32_t)varint(r, 32);
}

static inline uint8_t u8(struct reader *r)
{
    if (r->at == r->end)
        return (uint8_t)fail(r);
    return *r->at++;
}

static inline int boolean(struct reader *r)
{
    uint8_t value = u8(r);
    if (value > 1)
        fail(r);
    return value == 1;
}

static int utf8(const uint8_t *p, const uint8_t *end)
{
    while (p < end) {
        while (end - p >= 8) {
            uint64_t eight;
            memcpy(&eight, p, 8);
            if (eight & UINT64_C(0x8080808080808080))
                break;
            p += 8;
        }
        if (p == end)
            break;
        uint8_t lead = *p++;
        if (lead < 0x80)
            continue;
        int more = lead >= 0xc2 && lead < 0xe0 ? 1 : lead >= 0xe0 && lead < 0xf0 ? 2 : lead >= 0xf0 && lead < 0xf5 ? 3 : 0;
        if (!more || end - p < more)
            return 0;
        /* overlong forms, surrogates and what lies past U+10FFFF show in the second byte */
        if ((lead == 0xe0 && p[0] < 0xa0) || (lead == 0xed && p[0] > 0x9f) || (lead == 0xf0 && p[0] < 0x90) ||
            (lead == 0xf4 && p[0] > 0x8f))
            return 0;
        for (; more; more--)
            if ((*p++ & 0xc0) != 0x80)
                return 0;
    }
    return 1;
}

static void string(struct reader *r)
{
    uint64_t length = u64(r);
    if (length > (uint64_t)(r->end - r->at) || !utf8(r->at, r->at + length)) {
        fail(r);
        return;
    }
    r->at += length;
}

static int optional_string(struct reader *r)
{
    int present = boolean(r);
    if (present)
        string(r);
    return present;
}

static uint32_t span(struct reader *r)
{
    uint64_t count = u64(r);
    if (count > (uint64_t)(r->end - r->at))
        return (uint32_t)fail(r);
    for (uint64_t i = 0; i < count; i++)
        u32(r);
    return r->bad ? 0 : (uint32_t)count;
}

static void params(struct reader *r)
{
    if (r->end - r->at < 12) {
        fail(r);
        return;
    }
    r->at += 12; /* temperature, top_p, min_p */
    u32(r);
    u64(r);
}

static void edits(struct reader *r)
{
    for (uint64_t count = u64(r); count && !r->bad; count--) {
        uint32_t kind = u32(r);
        u64(r);
        u64(r);
        if (kind == 1) {
            u32(r);
            string(r);
        } else if (kind) {
            fail(r);
        }
    }
}

static void body(struct reader *r, sf_wal_row *row, int depth)
{
    row->variant = u32(r);
    switch (row->variant) {
    case CREATED:
        row->flags = (uint32_t)boolean(r);
        if (row->flags)
            row->a = u64(r);
        params(r);
        break;
    case APPENDED:
        optional_string(r);
        row->tokens = span(r);
        break;
    case MESSAGE:
        u32(r);
        string(r);
        row->tokens = span(r);
        break;
    case GENERATION_PROMPT:
        row->tokens = span(r);
        break;
    case GENERATED:
        row->tokens = span(r);
        string(r);
        u32(r);
        u32(r);
        break;
    case TOOL_USE:
        string(r);
        string(r);
        break;
    case TOOL_RESULT:
        u64(r);
        string(r);
        row->tokens = span(r);
        break;
    case EPOCH_BUMP:
        break;
    case GENERATION_FINGERPRINT:
    case TOOL_CANCEL_REQUESTED:
        u64(r);
        break;
    case TOOL_PARSE_FAILURE:
        string(r);
        break;
    case FORKED:
    case REBASED:
        row->a = u64(r);
        row->b = u64(r);
        params(r);
        if (row->variant == REBASED)
            edits(r);
        break;
    case META_UPDATED:
        row->a = u64(r);
        optional_string(r);
        if (boolean(r))
            boolean(r);
        break;
    case TOOL_EXPIRED:
    case PERMISSION_REQUEST:
    case TOOL_RECONCILIATION:
        u64(r);
        string(r);
        break;
    case PURGED:
        row->a = u64(r);
        row->b = u32(r);
        if (row->b > 1)
            fail(r);
        break;
    case REROOTED:
        row->a = u64(r);
        if (depth == DEEPEST)
            fail(r);
        for (uint64_t count = u64(r); count && !r->bad; count--) {
            sf_wal_row inner = {0};
            u64(r);
            body(r, &inner, depth + 1);
        }
        break;
    case QOS_SET:
        row->a = u8(r);
        row->b = (uint64_t)boolean(r);
        break;
    case BLOCK:
        u32(r);
        u32(r);
        string(r);
        row->tokens = span(r);
        u32(r);
        break;
    case PERMISSION_RESPONSE:
        u64(r);
        boolean(r);
        break;
    case TOOL_OUTCOME:
        u64(r);
        u8(r);
        string(r);
        break;
    case TOOL_LEASE:
        u64(r);
        u64(r);
        break;
    case PINNED:
        row->a = u64(r);
        break;
    default:
        fail(r);
    }
}

static uint64_t little_endian(const uint8_t *p, int bytes)
{
    uint64_t value = 0;
    for (int i = 0; i < bytes; i++)
        value |= (uint64_t)p[i] << (8 * i);
    return value;
}

int sf_wal_scan(const uint8_t *data, uint64_t size, int timed, sf_wal_row *rows, size_t capacity, size_t *count,
                uint64_t *position)
{
    size_t taken = 0;
    uint64_t at = *position;
    int stop = 0;
    while (at < size) {
        if (taken == capacity) {
            stop = 1;
            break;
        }
        uint64_t left = size - at;
        uint64_t length = left < 4 ? 0 : little_endian(data + at, 4);
        if (length > LONGEST) {
            stop = 3;
            break;
        }
        if (left < HEADER || left - HEADER < length) {
            stop = 2;
            break;
        }
        const uint8_t *payload = data + at + HEADER;
        if (sf_xxh3_64(payload, length) != little_endian(data + at + 4, 8)) {
            stop = 4;
            break;
        }
        sf_wal_row *row = &rows[taken];
        struct reader r = {payload, payload + length, 0};
        *row = (sf_wal_row){.offset = at, .length = (uint32_t)length};
        row->session = u64(&r);
        row->event_id = u64(&r);
        row->epoch = u64(&r);
        row->ts_unix_ms = timed ? u64(&r) : 0;
        body(&r, row, 0);
        if (r.bad) {
            stop = 5;
            break;
        }
        taken++;
        at += HEADER + length;
    }
    *count = taken;
    *position = at;
    return stop;
}

static uint8_t *put(uint8_t *out, uint64_t value)
{
    for (; value >= 0x80; value >>= 7)
        *out++ = (uint8_t)value | 0x80;
    *out++ = (uint8_t)value;
    return out;
}

size_t sf_wal_bumps(const uint64_t *sessions, const uint64_t *event_ids, const uint64_t *epochs, uint64_t ts_unix_ms,
                    int timed, size_t count, uint8_t *out, uint8_t *sizes)
{
    uint8_t *at = out;
    for (size_t i = 0; i < count; i++) {
        uint8_t *payload = at + HEADER;
        uint8_t *end = put(put(put(payload, sessions[i]), event_ids[i]), epochs[i]);
        if (timed)
            end = put(end, ts_unix_ms);
        end = put(end, EPOCH_BUMP);
        uint64_t length = (uint64_t)(end - payload), sum = sf_xxh3_64(payload, length);
        for (int b = 0; b < 4; b++)
            at[b] = (uint8_t)(length >> (8 * b));
        for (int b = 0; b < 8; b++)
            at[4 + b] = (uint8_t)(sum >> (8 * b));
        sizes[i] = (uint8_t)(end - at);
        at = end;
    }
    return (size_t)(at - out);
}

int sf_wal_zero_sector(const uint8_t *file, uint64_t file_size, uint64_t offset, uint64_t size)
{
    static const uint8_t zeros[SECTOR];
    uint64_t end = offset + size < file_size ? offset + size : file_size;
    for (uint64_t at = offset / SECTOR * SECTOR; at < end && file_size - at >= SECTOR; at += SECTOR)
        if (!memcmp(file + at, zeros, SECTOR))
            return 1;
    return 0;
}
