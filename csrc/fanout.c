/* Frames that differ only in a follower's number, written to many sockets: what a delivery costs is its system calls. */
#include <errno.h>
#include <stdint.h>
#include <stddef.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/types.h>

#include "fanout.h"

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0 /* the interpreter ignores SIGPIPE where there is no flag for it */
#endif

enum { LENGTH = 4, NOTHING = -1 };

size_t sf_fanout_frames(uint64_t number, const uint8_t *bodies, const uint32_t *ends, const uint8_t *variants,
                        size_t frames, uint8_t *out)
{
    uint8_t digits[10];
    size_t n_digits = 0, n = 0;
    uint32_t start = 0;
    for (; number >= 0x80; number >>= 7)
        digits[n_digits++] = (uint8_t)(number | 0x80);
    digits[n_digits++] = (uint8_t)number;
    for (size_t i = 0; i < frames; i++) {
        const uint32_t body = ends[i] - start, length = (uint32_t)(1 + n_digits) + body;
        for (int byte = 0; byte < LENGTH; byte++)
            out[n++] = (uint8_t)(length >> 8 * byte);
        out[n++] = variants[i];
        memcpy(out + n, digits, n_digits);
        n += n_digits;
        memcpy(out + n, bodies + start, body);
        n += body;
        start = ends[i];
    }
    return n;
}

static int stuck(const int32_t *fds, const int64_t *left, size_t i)
{
    for (size_t j = 0; j < i; j++)
        if (left[j] != 0 && fds[j] == fds[i])
            return 1;
    return 0;
}

size_t sf_fanout_send(const int32_t *fds, const uint64_t *numbers, size_t followers, const uint8_t *bodies,
                      const uint32_t *ends, const uint8_t *variants, size_t frames, uint8_t *out, int64_t *left)
{
    size_t whole = 0;
    for (size_t i = 0; i < followers; i++) {
        left[i] = NOTHING;
        if (whole < i && stuck(fds, left, i))
            continue;
        const size_t size = sf_fanout_frames(numbers[i], bodies, ends, variants, frames, out);
        ssize_t took;
        do
            took = send(fds[i], out, size, MSG_DONTWAIT | MSG_NOSIGNAL);
        while (took < 0 && errno == EINTR);
        if (took > 0)
            left[i] = (int64_t)size - took;
        whole += left[i] == 0;
    }
    return whole;
}
