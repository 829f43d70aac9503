/* Bytes that grow at their end. All zero is empty; `at` is free()d. */
typedef struct {
    uint8_t *at;
    size_t length, room;
} sf_bytes;

/* Make room for `more` bytes behind `length`; false without memory, and nothing has changed. */
_Bool sf_bytes_reserve(sf_bytes *bytes, size_t more);

/* Append `length` bytes for which there is room. */
void sf_bytes_append(sf_bytes *bytes, const void *data, size_t length);
