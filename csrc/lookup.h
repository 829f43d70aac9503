/* Where a stream's end has occurred before: the position after the last earlier occurrence (which may overlap the end)
   of its last `most` ids, else of one fewer, down to `least`; 0 when there is none. */
size_t sf_prompt_lookup(const uint32_t *stream, size_t length, size_t most, size_t least);
