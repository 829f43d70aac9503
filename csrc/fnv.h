/* FNV-1a, 64 bits, continued from `basis`. Hashing in pieces equals hashing the whole. */
uint64_t sf_fnv1a(const uint8_t *data, size_t len, uint64_t basis);
