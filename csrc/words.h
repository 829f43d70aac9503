/* Where UTF-8 text may be cut into words. pairs[left << 8 | right] is 1 where a cut between two bytes is allowed; none
   is made inside white space, nor before a space that white space or nothing follows. Writes the offsets of at most
   `room` cuts and returns how many there are. */
size_t sf_word_cuts(const uint8_t *pairs, const uint8_t *text, size_t length, uint32_t *cuts, size_t room);
