/* Content digests of several prefixes of one span in one pass: FNV-1a from two bases over little-endian ids.
   `lengths` ascend; digest i (32 bytes at out + 32 i, the last 16 zero) is that of the first lengths[i] ids. */
void sf_content_digests(const uint32_t *tokens, const uint32_t *lengths, size_t n, uint8_t *out);
