/* LEB128 of each value after the count; `out` has room for 5 bytes a value and 10 more. Returns the bytes written. */
size_t sf_tokens_encode(const uint32_t *values, size_t count, uint8_t *out);

/* Read a count at data[offset..length) and check it against the bytes left; then decode that many u32 varints. Both
   return the offset after what was read; or -1 ends early, -2 count over the bytes left, -3 a varint that is too long
   or past its width. */
int64_t sf_tokens_count(const uint8_t *data, size_t length, size_t offset, size_t *count);
int64_t sf_tokens_decode(const uint8_t *data, size_t length, size_t offset, uint32_t *out, size_t count);

/* Read one u64 varint; the same returns. */
int64_t sf_varint_decode(const uint8_t *data, size_t length, size_t offset, uint64_t *value);
