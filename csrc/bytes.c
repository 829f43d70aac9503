/* Bytes that grow at their end. */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "bytes.h"

_Bool sf_bytes_reserve(sf_bytes *bytes, size_t more)
{
    const size_t need = bytes->length + more;
    if (need <= bytes->room)
        return true;
    const size_t room = need > 2 * bytes->room ? need : 2 * bytes->room;
    uint8_t *at = realloc(bytes->at, room);
    if (!at)
        return false;
    bytes->at = at;
    bytes->room = room;
    return true;
}

void sf_bytes_append(sf_bytes *bytes, const void *data, size_t length)
{
    if (length)
        memcpy(bytes->at + bytes->length, data, length);
    bytes->length += length;
}
