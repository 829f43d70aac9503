/* The text of one streamed answer, written to its socket as its tokens come, whichever thread brings them. What is
   written is `lead`, the text as the inside of a JSON string, and `tail`, as one chunk of an HTTP/1.1 body. */
typedef struct sf_text_out sf_text_out;

/* Token t has the bytes pieces[ends[t]..ends[t + 1]), none from `vocabulary` on. Tokens in `special` (sorted) are not
   taken. Texts that come closer together than `pace` (seconds) are written together. `pieces` and `ends` are kept,
   the rest is copied. It is closed at first; NULL: no memory. */
sf_text_out *sf_text_out_new(int fd, const uint8_t *pieces, const unsigned long *ends, uint32_t vocabulary,
                             const uint32_t *special, size_t specials, const uint8_t *lead, size_t lead_bytes,
                             const uint8_t *tail, size_t tail_bytes, double pace);
void sf_text_out_free(sf_text_out *out);

/* Let it write, beginning with a whole character. */
void sf_text_out_open(sf_text_out *out);

/* Take tokens at the time `now`. False: it is closed, or it closes before them, because one is special, they are not
   UTF-8 or there is no memory; whoever reads the tokens goes on then. */
_Bool sf_text_out_put(sf_text_out *out, const uint32_t *tokens, size_t count, double now);

/* When text that is kept back is due, INFINITY without any; write what is due. */
double sf_text_out_due(sf_text_out *out);
void sf_text_out_pass(sf_text_out *out, double now);

/* Write what is kept back, and nothing more. Returns the bytes of chunks that the socket did not take; they are valid
   until it is opened. */
size_t sf_text_out_close(sf_text_out *out, const uint8_t **rest);

/* The tokens taken since the last call; they are valid until the next. */
size_t sf_text_out_taken(sf_text_out *out, const uint32_t **tokens);
