/* The ids of words, kept in two generations: a full one becomes the older, and what is asked for again moves to the
   younger. One caller at a time. */
typedef struct sf_word_memory sf_word_memory;

/* `seed` is any number, not known to those who write the texts. NULL without memory for it. */
sf_word_memory *sf_word_memory_new(uint64_t seed);
void sf_word_memory_free(sf_word_memory *memory);

/* Begins a new generation, forgetting the older one, when the younger holds `room` words or more. */
void sf_word_memory_turn(sf_word_memory *memory, size_t room);

/* Ids of the words of a text that `n_cuts` offsets cut. Those that are not known are gaps, three numbers each: how many
   ids stand before it, and where it begins and ends in the text. So are the last word when it may end in white space,
   and the first unless a text's beginning is like its middle (`whole`). `gaps` has room for n_cuts + 1 of them. Returns
   the number of ids; a word that finds no room in `ids` is a gap. */
size_t sf_words_known(sf_word_memory *memory, const uint8_t *text, size_t length, const uint32_t *cuts, size_t n_cuts,
                      int whole, uint32_t *ids, size_t room, uint32_t *gaps, size_t *n_gaps);

/* Puts words of a text that could be known and are not into `asked`, once each, and those of more than `longest` bytes
   into `beyond`: memories that are used for nothing else. */
void sf_words_unknown(sf_word_memory *memory, sf_word_memory *asked, sf_word_memory *beyond, size_t longest,
                      const uint8_t *text, size_t length, const uint32_t *cuts, size_t n_cuts, int whole);

/* The words that sf_words_unknown has put into a memory, one behind the other in the order they came, and where each
   ends. Returns how many; they stay where they are until more are put there. */
size_t sf_word_memory_words(const sf_word_memory *memory, const uint8_t **text, const uint32_t **ends);

/* Makes texts of many words, each of at most `room` bytes of words or of one word: a word follows another where `pairs`
   allows a cut between them, or with `glue` in between, which is then a word too. `ends` are the words' offsets in
   `text`. Writes the texts one behind the other (length + n * glue_length bytes), where each of their words ends in its
   own text (2 n numbers), and of each text how many words it has (n numbers). Returns the number of texts. */
size_t sf_words_pack(const uint8_t *pairs, const uint8_t *text, const uint32_t *ends, size_t n, const uint8_t *glue,
                     size_t glue_length, size_t room, uint8_t *out, uint32_t *out_ends, uint32_t *counts);

/* Remembers each of the `n` words of a text by its part of the text's ids. Returns 0 and keeps nothing where several
   words' parts cannot be told: the bytes of the ids (data[offsets[id]..offsets[id + 1]]) are not those of the text, or
   an id reaches from one word into the next. */
int sf_words_learn(sf_word_memory *memory, const uint8_t *text, const uint32_t *ends, size_t n, const uint32_t *ids,
                   size_t n_ids, const uint8_t *data, const unsigned long *offsets, size_t n_tokens);
