/* pwrite and fsync from a thread that gives way to all others, waited for. Bytes written (0 of fsync), or -errno. */
int64_t sf_write_behind(int descriptor, const uint8_t *data, size_t len, int64_t offset);
int64_t sf_sync_behind(int descriptor);
