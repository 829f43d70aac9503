#include <stdint.h>

#include "result.h"

/* Call `T function(void)`, whose struct T is returned in memory, with a result buffer of our own. A C call would let
   the compiler choose the buffer and its size; here the caller fills it beforehand and sees what was written. */
void sf_call_with_result(uintptr_t function, void *result)
{
#if defined(__aarch64__)
    /* AAPCS64: the result's address travels in x8, which no C argument reaches. */
    __asm__ volatile(
        "mov x8, %1\n\t"
        "blr %0"
        :
        : "r"(function), "r"(result)
        : "x0", "x1", "x2", "x3", "x4", "x5", "x6", "x7", "x8", "x9", "x10", "x11", "x12", "x13", "x14", "x15", "x16",
          "x17", "x30", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v16", "v17", "v18", "v19", "v20", "v21", "v22",
          "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31", "cc", "memory");
#else
    /* x86-64 System V: it is the hidden first argument. */
    ((void (*)(void *))function)(result);
#endif
}
