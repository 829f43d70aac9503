#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __SSE__
#include <xmmintrin.h>
#endif

#include "sampler.h"

enum { LANES = 16, BLOCK = 64, STRETCH = 1024, WINDOW = 64, MAX_TOP = 20, SMALL_SORT = 48 };

static const float NO_WEIGHT = -36.7368f; /* ln 2^-53: below it a weight is 0 */

/* A candidate: ~probability bits relative to its level (sorts ascending), and its id. */
typedef struct {
    uint32_t key, id;
} candidate;

struct sf_sampler {
    uint32_t n, n_blocks;
    uint32_t *exempt;
    float *p;         /* probabilities, padded with zeros to whole blocks */
    float *block_max; /* largest probability of each block */
    candidate *found, *spare;
};

static uint32_t bits_of(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

static uint32_t min_u32(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* Four floats at once, in gcc's and clang's portable vectors (SSE, NEON); a block of sixteen is four of them. */
typedef float v4f __attribute__((vector_size(16)));
typedef uint32_t v4u __attribute__((vector_size(16)));

static inline v4f load4(const float *p)
{
    v4f v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline v4f splat(float f)
{
    return (v4f){f, f, f, f};
}

/* a where it is larger, else b: NaN in a never wins */
static inline v4f larger(v4f a, v4f b)
{
#ifdef __SSE__
    return (v4f)_mm_max_ps((__m128)a, (__m128)b); /* the same in one instruction, which gcc does not find by itself */
#else
    return (v4f)(((v4u)(a > b) & (v4u)a) | (~(v4u)(a > b) & (v4u)b));
#endif
}

/* exp(x) for NO_WEIGHT < x <= 0, else 0: 2^k (1 + r + r^2 q(r)), |r| <= ln(2)/2, q fitted for least relative error
   (1e-7). Every operation rounds on its own, so each lane gives what a single float would. */
static inline v4f weight4(v4f x)
{
    const v4f round = splat(12582912.0f); /* 1.5 x 2^23: adding it rounds to an integer */
    v4f shifted = x * splat(1.44269504f) + round;
    v4f k = shifted - round;
    v4f r = x - k * splat(0.693359375f); /* ln 2 in two parts, the first exact when multiplied */
    r = r - k * splat(-2.12194440e-4f);
    v4f q = splat(0.00831250194f);
    q = q * r + splat(0.0418903306f);
    q = q * r + splat(0.166671157f);
    q = q * r + splat(0.499992311f);
    v4f e = (q * r) * r + r + splat(1.0f);
    v4u scaled = (v4u)e + (((v4u)shifted - (v4u)round) << 23);
    return (v4f)(scaled & (v4u)(x > splat(NO_WEIGHT)));
}

static float weight(float x)
{
    return weight4(splat(x))[0];
}

/* Largest value, NaN ignored; -inf for none. */
static float row_max(const float *row, uint32_t n)
{
    v4f best[4] = {splat(-INFINITY), splat(-INFINITY), splat(-INFINITY), splat(-INFINITY)};
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int q = 0; q < 4; q++)
            best[q] = larger(load4(row + i + 4 * q), best[q]);
    best[0] = larger(larger(best[0], best[1]), larger(best[2], best[3]));
    float top = -INFINITY;
    for (int q = 0; q < 4; q++)
        top = best[0][q] > top ? best[0][q] : top;
    for (; i < n; i++)
        top = row[i] > top ? row[i] : top;
    return top;
}

uint32_t sf_argmax(const float *row, uint32_t n)
{
    if (n == 0 || row[0] != row[0])
        return 0;
    float best = -INFINITY;
    uint32_t found = 0; /* where the first stretch that holds the best begins */
    for (uint32_t i = 0; i < n; i += STRETCH) {
        float here = row_max(row + i, min_u32(STRETCH, n - i));
        if (here > best) {
            best = here;
            found = i;
        }
    }
    for (uint32_t i = found; i < n; i++)
        if (row[i] == best)
            return i;
    return 0;
}

double sf_uniform(uint64_t position)
{
    uint64_t z = position + UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    z ^= z >> 31;
    return (double)(z >> 11) / 9007199254740992.0;
}

/* The sum of exp(row x scale - top) in its pinned order: sixteen partial sums over whole blocks of sixteen, folded, then
   the tail. The weights go to `out` when there is one. */
static inline float sum_weights(const float *row, uint32_t n, float scale, float top, float *restrict out)
{
    v4f s[4] = {splat(0), splat(0), splat(0), splat(0)};
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int q = 0; q < 4; q++) {
            v4f w = weight4(load4(row + i + 4 * q) * splat(scale) - splat(top));
            if (out)
                memcpy(out + i + 4 * q, &w, sizeof w);
            s[q] += w;
        }
    v4f a = (s[0] + s[1]) + (s[2] + s[3]);
    float sum = (a[0] + a[1]) + (a[2] + a[3]);
    for (; i < n; i++) {
        float w = weight(row[i] * scale - top);
        if (out)
            out[i] = w;
        sum += w;
    }
    return sum;
}

sf_sampler *sf_sampler_new(uint32_t n, const uint32_t *exempt)
{
    sf_sampler *s = calloc(1, sizeof *s);
    if (!s)
        return NULL;
    s->n = n;
    s->n_blocks = n / BLOCK + 1;
    size_t words = (size_t)n / 32 + 1;
    s->exempt = calloc(words, sizeof *s->exempt);
    s->p = calloc((size_t)s->n_blocks * BLOCK, sizeof *s->p);
    s->block_max = calloc(s->n_blocks, sizeof *s->block_max);
    s->found = calloc((size_t)n + 1, sizeof *s->found);
    s->spare = calloc((size_t)n + 1, sizeof *s->spare);
    if (!s->exempt || !s->p || !s->block_max || !s->found || !s->spare) {
        sf_sampler_free(s);
        return NULL;
    }
    if (exempt)
        memcpy(s->exempt, exempt, ((size_t)n + 31) / 32 * sizeof *exempt);
    return s;
}

void sf_sampler_free(sf_sampler *s)
{
    if (!s)
        return;
    free(s->exempt);
    free(s->p);
    free(s->block_max);
    free(s->found);
    free(s->spare);
    free(s);
}

int sf_softmax(sf_sampler *s, const float *row, float temperature)
{
    float scale = 1.0f / temperature;
    float top = row_max(row, s->n) * scale;
    float sum = sum_weights(row, s->n, scale, top, s->p);
    if (!(sum > 0))
        return 0;
    for (uint32_t b = 0; b < s->n_blocks; b++) {
        float *p = s->p + (size_t)b * BLOCK;
        v4f best = splat(0);
        for (int i = 0; i < BLOCK; i += 4) {
            v4f v = load4(p + i) / splat(sum);
            memcpy(p + i, &v, sizeof v);
            best = larger(v, best);
        }
        float top_of_block = 0;
        for (int q = 0; q < 4; q++)
            top_of_block = best[q] > top_of_block ? best[q] : top_of_block;
        s->block_max[b] = top_of_block;
    }
    return 1;
}

const float *sf_probabilities(const sf_sampler *s)
{
    return s->p;
}

/* ---- candidates, likeliest first

The whole vocabulary is never sorted. Probabilities are taken level by level, [low, high), each level a wider band of
powers of two under the best; a level is gathered (blocks whose largest value is under it are passed over), cut to what
is still wanted, and sorted. Ids are gathered in ascending order and every sort is stable, so ties stay in id order. */

static void sort_small(candidate *c, uint32_t n)
{
    for (uint32_t i = 1; i < n; i++) {
        candidate x = c[i];
        uint32_t j = i;
        for (; j > 0 && c[j - 1].key > x.key; j--)
            c[j] = c[j - 1];
        c[j] = x;
    }
}

static void sort_candidates(candidate *c, candidate *spare, uint32_t n)
{
    if (n <= SMALL_SORT) {
        sort_small(c, n);
        return;
    }
    uint32_t used = 0;
    for (uint32_t i = 0; i < n; i++)
        used |= c[i].key;
    candidate *from = c, *to = spare;
    for (int shift = 0; shift < 32 && used >> shift; shift += 8) {
        uint32_t start[256] = {0}, at = 0;
        for (uint32_t i = 0; i < n; i++)
            start[from[i].key >> shift & 255]++;
        for (int d = 0; d < 256; d++) {
            uint32_t count = start[d];
            start[d] = at;
            at += count;
        }
        for (uint32_t i = 0; i < n; i++)
            to[start[from[i].key >> shift & 255]++] = from[i];
        candidate *swap = from;
        from = to;
        to = swap;
    }
    if (from != c)
        memcpy(c, from, n * sizeof *c);
}

/* Drop what cannot be among the `wanted` smallest keys; keeps the order. Returns what is left (at least `wanted`). */
static uint32_t trim(candidate *c, uint32_t n, uint32_t wanted)
{
    uint32_t used = 0, count[256] = {0}, seen = 0;
    for (uint32_t i = 0; i < n; i++)
        used |= c[i].key;
    int shift = 0;
    while (used >> shift > 255)
        shift++;
    for (uint32_t i = 0; i < n; i++)
        count[c[i].key >> shift]++;
    uint32_t last = 0;
    for (; last < 256; last++)
        if ((seen += count[last]) >= wanted)
            break;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < n; i++)
        if (c[i].key >> shift <= last)
            c[kept++] = c[i];
    return kept;
}

typedef struct {
    sf_sampler *s;
    float high;     /* everything at or over it is found already */
    float best;
    int width;      /* of the next level, in powers of two */
    uint32_t found; /* candidates in s->found, in order */
} level_walk;

/* Append the next level that is not empty, at most `wanted` candidates of it; false when nothing with mass is left. */
static int next_level(level_walk *w, uint32_t wanted)
{
    sf_sampler *s = w->s;
    while (w->high > 0) {
        float low = ldexpf(w->high < INFINITY ? w->high : w->best, -w->width);
        if (!(low > w->best * 0x1p-56f) || low == 0)
            low = 0;
        w->width++;
        candidate *c = s->found + w->found;
        uint32_t n = 0, top = 0;
        for (uint32_t b = 0; b < s->n_blocks; b++) {
            if (!(s->block_max[b] >= low) || s->block_max[b] == 0)
                continue;
            const float *p = s->p + (size_t)b * BLOCK;
            for (uint32_t j = 0; j < BLOCK; j++)
                if (p[j] >= low && p[j] < w->high && p[j] > 0) {
                    uint32_t key = bits_of(p[j]);
                    top = key > top ? key : top;
                    c[n++] = (candidate){key, b * BLOCK + j};
                }
        }
        w->high = low;
        if (n == 0)
            continue;
        for (uint32_t i = 0; i < n; i++)
            c[i].key = top - c[i].key;
        if (n / 2 > wanted)
            n = trim(c, n, wanted);
        sort_candidates(c, s->spare, n);
        w->found += min_u32(n, wanted);
        return 1;
    }
    return 0;
}

/* One draw from the sampler's probabilities, cut as the lane asks. */
static uint32_t draw(sf_sampler *s, const sf_lane *lane)
{
    const float *p = s->p;
    const uint32_t limit = lane->top_k ? min_u32(lane->top_k, s->n) : s->n;
    const float best = row_max(s->block_max, s->n_blocks);
    const float floor = lane->min_p > 0 ? lane->min_p * best : 0.0f;
    const int nucleus = lane->top_p < 1;
    const int whole = limit == s->n && floor == 0 && !nucleus;
    const float u = (float)sf_uniform(lane->position);
    level_walk w = {.s = s, .high = INFINITY, .best = best, .width = 1};

    float mass = 0, t = u;
    uint32_t kept = 0, last = 0;
    int cut = limit < s->n;
    while (kept < limit && next_level(&w, limit - w.found)) {
        for (; kept < w.found; kept++) {
            float v = p[s->found[kept].id];
            if (whole) {
                last = s->found[kept].id;
                if (t < v)
                    return last;
                t -= v;
                continue;
            }
            if (kept > 0 && v < floor) {
                cut = 1;
                goto drawn;
            }
            mass += v;
            if (nucleus && mass >= lane->top_p) {
                kept++;
                cut |= kept < s->n;
                goto drawn;
            }
        }
    }
    cut |= floor > 0 && kept < s->n;
drawn:
    if (whole)
        return last;
    t = u * (cut ? mass : 1.0f);
    for (uint32_t i = 0; i < kept; i++) {
        last = s->found[i].id;
        if (t < p[last])
            return last;
        t -= p[last];
    }
    return last;
}

/* ---- the row before the pick */

static void apply_mask(const sf_lane *lane, float *row, uint32_t n)
{
    for (uint32_t i = 0; i < n; i += 32) {
        uint32_t allowed = i / 32 < lane->mask_words ? lane->mask[i / 32] : 0;
        uint32_t end = min_u32(i + 32, n);
        if (allowed == 0xFFFFFFFFu)
            continue;
        for (uint32_t j = i; j < end; j++)
            row[j] = allowed >> (j - i) & 1 ? row[j] : -INFINITY;
    }
}

void sf_penalize(const sf_sampler *s, const sf_lane *lane, float *row)
{
    float repeat = lane->repeat == 0 ? 1.0f : lane->repeat;
    if (repeat == 1 && lane->presence == 0 && lane->frequency == 0)
        return;
    for (uint32_t i = 0; i < lane->window_fill; i++) {
        uint32_t id = lane->window[i], count = 0, earlier = 0;
        for (uint32_t j = 0; j < lane->window_fill; j++) {
            count += lane->window[j] == id;
            earlier |= j < i && lane->window[j] == id;
        }
        if (earlier || id >= s->n || (s->exempt[id / 32] >> (id % 32) & 1))
            continue;
        float logit = row[id];
        logit = logit > 0 ? logit / repeat : logit * repeat;
        row[id] = logit - (lane->presence + lane->frequency * (float)count);
    }
}

void sf_logprobs(const sf_sampler *s, const float *row, uint32_t token, sf_lane *lane)
{
    float top = row_max(row, s->n);
    float sum = sum_weights(row, s->n, 1.0f, top, NULL);
    float log_sum = top + (float)log((double)sum);
    uint32_t want = lane->want_logprobs ? min_u32(lane->want_logprobs - 1, MAX_TOP) : 0, n = 0;
    float *values = lane->top_logprobs;
    for (uint32_t i = 0; i < s->n && want; i++) {
        float v = row[i];
        if (v != v || (n == want && !(v > values[n - 1])))
            continue;
        uint32_t j = n < want ? n++ : n - 1;
        for (; j > 0 && v > values[j - 1]; j--) {
            values[j] = values[j - 1];
            lane->top_ids[j] = lane->top_ids[j - 1];
        }
        values[j] = v;
        lane->top_ids[j] = i;
    }
    for (uint32_t j = 0; j < n; j++)
        values[j] = values[j] == -INFINITY ? -INFINITY : values[j] - log_sum;
    lane->n_top = n;
    lane->logprob = token < s->n && row[token] != -INFINITY ? row[token] - log_sum : -INFINITY;
}

void sf_lane_push(sf_lane *lane, uint32_t token)
{
    lane->window[lane->window_next] = token;
    lane->window_next = (lane->window_next + 1) % WINDOW;
    if (lane->window_fill < WINDOW)
        lane->window_fill++;
}

void sf_pick_rows(sf_sampler *s, float *rows, size_t stride, sf_lane *const *lanes, uint32_t n_rows, uint32_t *tokens)
{
    for (uint32_t r = 0; r < n_rows; r++) {
        float *row = rows + r * stride;
        sf_lane *lane = lanes[r];
        if (lane->mask)
            apply_mask(lane, row, s->n);
        for (uint32_t i = 0; i < lane->n_bias; i++)
            if (lane->bias_ids[i] < s->n)
                row[lane->bias_ids[i]] += lane->bias_values[i];
        sf_penalize(s, lane, row);
        uint32_t token;
        if (lane->greedy || lane->temperature <= 0)
            token = sf_argmax(row, s->n);
        else
            token = sf_softmax(s, row, lane->temperature) ? draw(s, lane) : 0;
        if (lane->want_logprobs)
            sf_logprobs(s, row, token, lane);
        lane->token = token;
        lane->position++;
        sf_lane_push(lane, token);
        tokens[r] = token;
    }
}
