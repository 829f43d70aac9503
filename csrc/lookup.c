#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "lookup.h"

size_t sf_prompt_lookup(const uint32_t *stream, size_t length, size_t most, size_t least)
{
    for (size_t n = most; n >= least && n > 0; n--) {
        if (length <= n)
            continue;
        const uint32_t *end = stream + length - n;
        for (const uint32_t *at = end; at-- > stream;)
            if (*at == *end && !memcmp(at, end, n * sizeof *at))
                return (size_t)(at - stream) + n;
    }
    return 0;
}
