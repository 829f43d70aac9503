/* One frame of a session log. `tokens`: ids in the record's span. `a`, `b` by variant: Created parent (flags 1 when
   there is one); Forked, Rebased parent and fork point; MetaUpdated version; Purged generation and mode; Rerooted
   parent; QosSet class and flag; Pinned deadline. */
typedef struct {
    uint64_t offset;
    uint64_t session;
    uint64_t event_id;
    uint64_t epoch;
    uint64_t ts_unix_ms;
    uint64_t a;
    uint64_t b;
    uint32_t length;
    uint32_t tokens;
    uint32_t variant;
    uint32_t flags;
} sf_wal_row;

/* Scan frames of `data` from *position on, into at most `capacity` rows (*count of them), leaving *position at the
   first frame not taken. `timed`: records carry a timestamp. Returns 0 at the end of the data, 1 when the rows are
   full, 2 a frame that runs past the end, 3 a length over 2^30, 4 a failed checksum, 5 a record that does not
   decode. */
int sf_wal_scan(const uint8_t *data, uint64_t size, int timed, sf_wal_row *rows, size_t capacity, size_t *count,
                uint64_t *position);

/* Frames of `count` EpochBump records, the i-th `sizes[i]` bytes long; `out` holds at least 56 bytes for each.
   Returns the bytes written. */
size_t sf_wal_bumps(const uint64_t *sessions, const uint64_t *event_ids, const uint64_t *epochs, uint64_t ts_unix_ms,
                    int timed, size_t count, uint8_t *out, uint8_t *sizes);

/* Whether `size` bytes, at file offset `offset`, touch a 512-byte sector of `file` (`file_size` bytes) that is all
   zero. */
int sf_wal_zero_sector(const uint8_t *file, uint64_t file_size, uint64_t offset, uint64_t size);
