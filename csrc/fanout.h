/* One delivery to many followers. A frame is u32 little-endian length, variant, varint of the follower's number, body;
   frame i has variants[i] and the bytes of `bodies` from the end of frame i - 1 up to ends[i]. `out` has room for
   ends[frames - 1] and 15 bytes more a frame. */

/* Write the frames of follower `number` to `out`. Returns their bytes. */
size_t sf_fanout_frames(uint64_t number, const uint8_t *bodies, const uint32_t *ends, const uint8_t *variants,
                        size_t frames, uint8_t *out);

/* Send each follower its frames, and wait for none. left[i] is 0 when fds[i] took all, the bytes it did not take when
   it took some, -1 when it took nothing (full or broken: whoever writes to it next is told). Behind a follower with
   frames left nothing goes to others on the same fd (-1): it would land in the middle of a frame. Returns how many
   took all. */
size_t sf_fanout_send(const int32_t *fds, const uint64_t *numbers, size_t followers, const uint8_t *bodies,
                      const uint32_t *ends, const uint8_t *variants, size_t frames, uint8_t *out, int64_t *left);
