/* Reads a worker's link on a thread of its own. Streamed tokens of lanes that have a text out go straight there; all
   other bytes, as they came, are for the event loop, which is woken for them alone. */
struct sf_text_out;
typedef struct sf_relay sf_relay;

/* Read the socket `fd`, which must not be read otherwise and stays open until the relay is closed. `version` and
   `emit_type` are of the frames that carry streamed tokens; `before`: the bytes of the next frame read already.
   NULL with errno set: it could not be made. */
sf_relay *sf_relay_open(int fd, uint16_t version, uint16_t emit_type, const uint8_t *before, size_t bytes);

/* Readable while `take` would bring something. */
int sf_relay_news(const sf_relay *relay);

/* Bytes for the event loop, valid until the next call. *ended: 0, 1 at the end of the stream, or the negative errno
   that ended it; there is no more then. */
size_t sf_relay_take(sf_relay *relay, const uint8_t **bytes, int *ended);

/* Lend the lane `tag` a text out, and have all back. 0: no memory. */
_Bool sf_relay_lend(sf_relay *relay, uint64_t tag, struct sf_text_out *out);
void sf_relay_return(sf_relay *relay);

/* Ends the thread. */
void sf_relay_close(sf_relay *relay);
