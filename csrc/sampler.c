/* sampler.c — from logits to the next token: greedy, or drawn by temperature, top-k and top-p from a seed.
 *
 * The definition sorts all candidates by descending logit, the smaller id first among equals, and walks down their
 * cumulative weight exp((logit - best) / temperature). Sorting a whole vocabulary takes tens of milliseconds, so
 * candidates are put into buckets of nearly equal weight instead, and only the bucket in which a cumulative weight is
 * reached is sorted. A result that rounding could change is drawn by the definition. */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "error.h"
#include "memory.h"

enum {
    N_BUCKETS = 4096,
    MAX_NATS = 40, /* below the best logit; all weights further below sum to less than ROUNDING */
};

/* More than the relative error of any sum of weights here, for up to 2^24 candidates. */
static const double ROUNDING = 1e-8;

typedef struct candidate {
    float logit;
    int32_t id;
    double weight;
} candidate;

struct lazy_sampler {
    double temperature, top_p;
    int top_k;
    uint64_t state[4]; /* xoshiro256** */
    candidate *sorted; /* (n_vocab,), and in the same memory: */
    uint16_t *bucket;  /* (n_vocab,) of each id */
    int n_vocab;
    int count[N_BUCKETS];     /* candidates in each bucket, descending by logit */
    double weight[N_BUCKETS]; /* of all of them */
};

/* splitmix64 spreads a seed over the generator's state. */
static uint64_t split_mix(uint64_t *seed)
{
    uint64_t z = (*seed += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static uint64_t rotate_left(uint64_t x, int by) { return (x << by) | (x >> (64 - by)); }

/* xoshiro256** of Blackman and Vigna; uniform in [0, 1). */
static double draw(lazy_sampler *sampler)
{
    uint64_t *s = sampler->state, result = rotate_left(s[1] * 5, 7) * 9, t = s[1] << 17;
    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= t;
    s[3] = rotate_left(s[3], 45);
    return (double)(result >> 11) * 0x1p-53;
}

int lazy_sampler_open(lazy_sampler **out, double temperature, double top_p, int top_k, uint64_t seed, lazy_error *err)
{
    *out = NULL;
    if (!(temperature >= 0 && isfinite(temperature)))
        return lazy_invalid(err, "temperature is %g; it must be 0 or more", temperature);
    if (!(top_p > 0 && top_p <= 1)) return lazy_invalid(err, "top_p is %g; it must be above 0 and at most 1", top_p);
    if (top_k < 0) return lazy_invalid(err, "top_k is %d; it must be 0 (all) or more", top_k);
    int code = lazy_alloc_zeroed(out, 1, "the sampler", err);
    if (code) return code;
    (*out)->temperature = temperature;
    (*out)->top_p = top_p;
    (*out)->top_k = top_k;
    for (int i = 0; i < 4; i++) (*out)->state[i] = split_mix(&seed);
    return LAZY_OK;
}

void lazy_sampler_close(lazy_sampler *sampler)
{
    if (!sampler) return;
    lazy_free(sampler->sorted);
    lazy_free(sampler);
}

bool lazy_sampler_is_greedy(const lazy_sampler *sampler) { return sampler->temperature == 0; }

static int compare_likelier(const void *a, const void *b)
{
    const candidate *x = a, *y = b;
    if (x->logit != y->logit) return x->logit > y->logit ? -1 : 1;
    return x->id < y->id ? -1 : 1;
}

int lazy_sampler_reserve(lazy_sampler *sampler, int n_vocab, lazy_error *err)
{
    if (sampler->n_vocab == n_vocab) return LAZY_OK;
    void *memory;
    const size_t each = sizeof *sampler->sorted + sizeof *sampler->bucket;
    int code = lazy_alloc_bytes(&memory, (size_t)n_vocab, each, NULL, "the sampler's candidates", err);
    if (code) return code;
    lazy_free(sampler->sorted);
    sampler->sorted = memory;
    sampler->bucket = (uint16_t *)(sampler->sorted + n_vocab);
    sampler->n_vocab = n_vocab;
    return LAZY_OK;
}

/* Fills bucket, count and weight. Buckets are `width` nats wide and reach from the best logit down to the least, or
 * MAX_NATS below the best; the last one holds the candidates further below, minus infinity included, whose weight
 * counts as 0. */
static void fill_buckets(lazy_sampler *sampler, const float *logits, float best, float least)
{
    double width = fmax(fmin(((double)best - least) / sampler->temperature, MAX_NATS), 1e-9) / (N_BUCKETS - 2);
    double per_logit = fmin(1.0 / (sampler->temperature * width), DBL_MAX); /* finite, as it is multiplied by 0 */
    memset(sampler->count, 0, sizeof sampler->count);
    memset(sampler->weight, 0, sizeof sampler->weight);
    for (int i = 0; i < sampler->n_vocab; i++) {
        double place = ((double)best - logits[i]) * per_logit;
        if (place > N_BUCKETS - 1) place = N_BUCKETS - 1;
        int b = (int)place;
        double x = (b - place) * width; /* exp(x) by its series: x is within -0.01 … 0 */
        sampler->bucket[i] = (uint16_t)b;
        sampler->count[b]++;
        sampler->weight[b] += 1 + x * (1 + x * (0.5 + x * (1.0 / 6)));
    }
    for (int b = 0; b < N_BUCKETS - 1; b++) sampler->weight[b] *= exp(-b * width);
    sampler->weight[N_BUCKETS - 1] = 0;
}

/* Sorts the candidates of buckets first … last, with their weights; returns how many there are. */
static int sort_buckets(lazy_sampler *sampler, const float *logits, float best, int first, int last)
{
    int n = 0;
    for (int i = 0; i < sampler->n_vocab; i++)
        if (sampler->bucket[i] >= first && sampler->bucket[i] <= last)
            sampler->sorted[n++] = (candidate){ logits[i], i, 0 };
    qsort(sampler->sorted, (size_t)n, sizeof *sampler->sorted, compare_likelier);
    for (int i = 0; i < n; i++)
        sampler->sorted[i].weight = exp(((double)sampler->sorted[i].logit - best) / sampler->temperature);
    return n;
}

/* Finds the first candidate in descending order at which the cumulative weight reaches `goal`, and that weight. False
 * where the cumulative weight before or at that candidate is within `slack` of the goal. */
static bool find_reaching(lazy_sampler *sampler, const float *logits, float best, double goal, double slack,
                          int32_t *token, double *reached)
{
    double before = 0;
    int b = 0;
    while (b < N_BUCKETS - 1 && before + sampler->weight[b] < goal) before += sampler->weight[b++];
    int n = sort_buckets(sampler, logits, best, b, b);
    for (int i = 0; i < n; i++, before = *reached) {
        *reached = before + sampler->sorted[i].weight;
        if (*reached < goal) continue;
        *token = sampler->sorted[i].id;
        return goal - before > slack && *reached - goal > slack;
    }
    return false;
}

/* Draws without sorting everything; false where rounding decides. uniform: the random number, within [0, 1). */
static bool draw_by_buckets(lazy_sampler *sampler, const float *logits, float best, double uniform, int32_t *token)
{
    double total = 0;
    for (int b = 0; b < N_BUCKETS; b++) total += sampler->weight[b];
    double nucleus = total, slack = ROUNDING * total;
    if (sampler->top_p < 1 && !find_reaching(sampler, logits, best, sampler->top_p * total, slack, token, &nucleus))
        return false;
    double reached;
    return nucleus - uniform * nucleus > slack &&
           find_reaching(sampler, logits, best, uniform * nucleus, slack, token, &reached);
}

/* Draws from the first n of the sorted candidates, by the definition. */
static int32_t draw_sorted(const candidate *c, int n, double top_p, double uniform)
{
    double total = 0, nucleus = 0; /* nucleus: of the fewest candidates that hold top_p of the weight */
    int kept = 0, chosen = 0;
    for (int i = 0; i < n; i++) total += c[i].weight;
    while (kept < n && (kept == 0 || nucleus < top_p * total)) nucleus += c[kept++].weight;
    double target = uniform * nucleus;
    for (double sum = c[0].weight; sum <= target && chosen < kept - 1; sum += c[chosen].weight) chosen++;
    return c[chosen].id;
}

static int32_t draw_token(lazy_sampler *sampler, const float *logits, float best, float least)
{
    int n = sampler->top_k && sampler->top_k < sampler->n_vocab ? sampler->top_k : sampler->n_vocab, last = 0;
    double uniform = draw(sampler);
    int32_t token;
    fill_buckets(sampler, logits, best, least);
    if (n == sampler->n_vocab && draw_by_buckets(sampler, logits, best, uniform, &token)) return token;
    for (int counted = sampler->count[0]; counted < n; counted += sampler->count[last]) last++;
    sort_buckets(sampler, logits, best, 0, last);
    return draw_sorted(sampler->sorted, n, sampler->top_p, uniform);
}

int lazy_sampler_next(lazy_sampler *sampler, const float *logits, int n_vocab, int32_t *token, lazy_error *err)
{
    if (n_vocab < 1) return lazy_invalid(err, "no logits were given");
    float best = -INFINITY, least = INFINITY; /* the least finite one */
    *token = 0;
    for (int i = 0; i < n_vocab; i++) {
        if (!(logits[i] <= best)) {
            if (isnan(logits[i])) return lazy_invalid(err, "logit %d is NaN", i);
            best = logits[i];
            *token = i;
        }
        if (logits[i] < least && logits[i] > -INFINITY) least = logits[i];
    }
    if (lazy_sampler_is_greedy(sampler)) return LAZY_OK;

    int code = lazy_sampler_reserve(sampler, n_vocab, err);
    if (!code && isfinite(best)) *token = draw_token(sampler, logits, best, least);
    else if (!code) draw(sampler);
    return code;
}
