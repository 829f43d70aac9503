/* One aligned 8-byte word of shared memory, stored with release and loaded with acquire order. */
void sf_word_store(uint8_t *base, size_t offset, uint64_t value);
uint64_t sf_word_load(const uint8_t *base, size_t offset);

/* Write a slot at `offset`: generation u64, length u32, pad u32, payload. The caller has checked that it fits. */
void sf_ring_write(uint8_t *base, size_t offset, uint64_t generation, const uint8_t *payload, uint32_t length);

/* Copy the payload that was written at `offset` as `generation` when it fits `capacity` bytes of `out` (else copy
   nothing) and return its length; -1 when the slot holds or got another generation, -2 when its length is over `room`. */
int64_t sf_ring_read(const uint8_t *base, size_t offset, uint64_t generation, uint32_t room, uint8_t *out,
                     size_t capacity);
