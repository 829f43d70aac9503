/* XXH3-64 with seed 0 of `len` bytes. */
uint64_t sf_xxh3_64(const uint8_t *data, size_t len);
