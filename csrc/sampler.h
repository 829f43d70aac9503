/* Picking a token from a row of logits. Every sum has a pinned order, so a draw depends on neither compiler nor machine. */

typedef struct sf_sampler sf_sampler;

/* What a lane asks of each pick, and what its last pick was. Pointers are borrowed for as long as they stand here. */
typedef struct {
    float temperature, top_p, min_p;
    uint32_t top_k;                       /* 0: off */
    float repeat, presence, frequency;    /* repeat 0 means 1 */
    uint32_t greedy;
    uint64_t position;                    /* of the next draw; wraps */
    const uint32_t *mask;                 /* bit i: id i is allowed; ids past the mask are not; null: no mask */
    uint32_t mask_words;
    uint32_t n_bias;
    const uint32_t *bias_ids;
    const float *bias_values;
    uint32_t want_logprobs;               /* 0: none, else 1 + alternatives */
    uint32_t window_fill, window_next;
    uint32_t window[64];                  /* the stream's last tokens, as a ring */
    uint32_t token;
    float logprob;
    uint32_t n_top;
    uint32_t top_ids[20];
    float top_logprobs[20];
} sf_lane;

/* A sampler of rows n wide; `exempt` (bit i: penalties spare id i) is copied, null for none. Null when out of memory. */
sf_sampler *sf_sampler_new(uint32_t n, const uint32_t *exempt);
void sf_sampler_free(sf_sampler *s);

/* Add a token to the penalty window. */
void sf_lane_push(sf_lane *lane, uint32_t token);

/* Pick one token per row (row i at rows + i * stride) and advance its lane. Rows are masked, biased, penalized in place. */
void sf_pick_rows(sf_sampler *s, float *rows, size_t stride, sf_lane *const *lanes, uint32_t n_rows, uint32_t *tokens);

void sf_penalize(const sf_sampler *s, const sf_lane *lane, float *row);
void sf_logprobs(const sf_sampler *s, const float *row, uint32_t token, sf_lane *lane);

/* The full softmax of row / temperature into the sampler's probabilities; false when the row has no mass. */
int sf_softmax(sf_sampler *s, const float *row, float temperature);
const float *sf_probabilities(const sf_sampler *s);

uint32_t sf_argmax(const float *row, uint32_t n);
double sf_uniform(uint64_t position);
