#include <stddef.h>
#include <stdint.h>

#include "fnv.h"

uint64_t sf_fnv1a(const uint8_t *data, size_t len, uint64_t basis)
{
    uint64_t h = basis;
    for (size_t i = 0; i < len; i++)
        h = (h ^ data[i]) * UINT64_C(0x100000001B3);
    return h;
}
