/* A tokenizer library of bytes and two special strings: what any program may ship for the daemon to load. The model
   "file" names what it holds: "plain", "bos" (id 256 leads), anything else is refused. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef VERSION
#define VERSION 1
#endif
#define NAME(f) superfluid_tokenizer_##f

struct toy { int bos; };

static const char *const SPECIAL[] = {"<|s|>", "<|end|>"}; /* ids 256, 257 */

uint32_t NAME(abi_version)(void) { return VERSION; }

void *NAME(open)(const char *model, char *err, size_t err_len)
{
    const char *name = strrchr(model, '/') ? strrchr(model, '/') + 1 : model;
    if (strcmp(name, "plain") && strcmp(name, "bos")) {
        snprintf(err, err_len, "no vocabulary in %s", name);
        return NULL;
    }
    struct toy *made = malloc(sizeof *made);
    made->bos = !strcmp(name, "bos");
    return made;
}

void NAME(close)(void *handle) { free(handle); }

static void put(uint32_t *out, size_t cap, size_t at, uint32_t id)
{
    if (at < cap)
        out[at] = id;
}

size_t NAME(encode)(void *handle, const uint8_t *text, size_t len, uint32_t *out, size_t cap)
{
    if (!handle)
        return 0;
    size_t count = 0;
    if (((struct toy *)handle)->bos)
        put(out, cap, count++, 256);
    for (size_t at = 0; at < len;) {
        int found = 0;
        for (uint32_t i = 0; i < 2 && !found; i++) {
            size_t n = strlen(SPECIAL[i]);
            if (at + n <= len && !memcmp(text + at, SPECIAL[i], n)) {
                put(out, cap, count++, 256 + i);
                at += n;
                found = 1;
            }
        }
        if (found)
            continue;
        int times = text[at] == 0x01 ? 40 : 1; /* more ids than bytes: the caller's first guess is too small */
        for (int i = 0; i < times; i++)
            put(out, cap, count++, text[at]);
        at++;
    }
    return count;
}

size_t NAME(token_bytes)(void *handle, uint32_t id, uint8_t *out, size_t cap)
{
    if (!handle || id > 258)
        return 0;
    if (id == 258) { /* longer than a first guess */
        memset(out, 'x', cap < 1000 ? cap : 1000);
        return 1000;
    }
    if (id > 255)
        return 0;
    if (cap)
        out[0] = (uint8_t)id;
    return 1;
}

uint32_t NAME(vocab_size)(void *handle) { return handle ? 259 : 0; }

size_t NAME(special_tokens)(void *handle, uint8_t *out, size_t cap)
{
    size_t size = 0;
    for (uint32_t i = 0; handle && i < 2; i++) {
        uint32_t head[2] = {256 + i, (uint32_t)strlen(SPECIAL[i])};
        if (size + 8 + head[1] <= cap) {
            memcpy(out + size, head, 8);
            memcpy(out + size + 8, SPECIAL[i], head[1]);
        }
        size += 8 + head[1];
    }
    if (handle && size + 6 <= cap) /* a record that is cut off */
        memset(out + size, 1, 6);
    return handle ? size + 6 : 0;
}

int64_t NAME(bos)(void *handle) { return handle && ((struct toy *)handle)->bos ? 256 : -1; }

uint32_t NAME(eos)(void *handle) { return handle ? 257 : 0; }

#ifndef WITHOUT_TEMPLATE
size_t NAME(chat_template)(void *handle, const char *name, uint8_t *out, size_t cap)
{
    static const char text[] = "{% for m in messages %}<|s|>{{ m.content }}<|end|>{% endfor %}{{ tools | tojson }}";
    if (!handle || (name && strcmp(name, "tool_use")))
        return SIZE_MAX;
    size_t size = sizeof text - 1 - (name ? 0 : strlen("{{ tools | tojson }}"));
    memcpy(out, text, size < cap ? size : cap);
    return size;
}
#endif
