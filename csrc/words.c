#include <stddef.h>
#include <stdint.h>

#include "words.h"

static int is_space(uint8_t byte)
{
    return byte == ' ' || (byte >= '\t' && byte <= '\r') || (byte >= 0x1c && byte <= 0x1f);
}

/* Whether the bytes before `end` may be a white space character beyond ASCII. All of U+2000 to U+207F counts. */
static int ends_wide_space(const uint8_t *text, size_t end)
{
    uint8_t last = text[end - 1];
    if (last < 0x80 || end < 2)
        return 0;
    uint8_t second = text[end - 2];
    if (second == 0xc2)
        return last == 0x85 || last == 0xa0;
    if (end < 3)
        return 0;
    uint8_t first = text[end - 3];
    return (first == 0xe2 && (second == 0x80 || second == 0x81)) || (first == 0xe3 && second == 0x80 && last == 0x80) ||
           (first == 0xe1 && second == 0x9a && last == 0x80);
}

size_t sf_word_cuts(const uint8_t *pairs, const uint8_t *text, size_t length, uint32_t *cuts, size_t room)
{
    size_t count = 0;
    for (size_t at = 1; at < length; at++) {
        uint8_t left = text[at - 1], right = text[at];
        if (!pairs[(size_t)left << 8 | right])
            continue;
        if (right == ' ' && (at + 1 == length || is_space(text[at + 1])))
            continue;
        if (left >= 0x80 && ends_wide_space(text, at))
            continue;
        if (count < room)
            cuts[count] = (uint32_t)at;
        count++;
    }
    return count;
}
