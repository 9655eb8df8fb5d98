/* sampler.c — from logits to the next token: greedy, or drawn by temperature, top-k and top-p from a seed. */
#include <math.h>
#include <stdlib.h>

#include "error.h"
#include "memory.h"

struct lazy_sampler {
    double temperature, top_p;
    int top_k;
    uint64_t state[4]; /* xoshiro256** */
    struct candidate {
        float logit;
        int32_t id;
        double weight;
    } *candidates; /* (n_candidates,) */
    int n_candidates;
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
        return lazy_fail(err, LAZY_INVALID, "temperature is %g; it must be 0 or more", temperature);
    if (!(top_p > 0 && top_p <= 1)) return lazy_fail(err, LAZY_INVALID, "top_p is %g; it must be above 0 and at most 1", top_p);
    if (top_k < 0) return lazy_fail(err, LAZY_INVALID, "top_k is %d; it must be 0 (all) or more", top_k);
    int code = lazy_alloc_zeroed((void **)out, 1, sizeof **out, "the sampler", err);
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
    lazy_free(sampler->candidates);
    lazy_free(sampler);
}

bool lazy_sampler_is_greedy(const lazy_sampler *sampler) { return sampler->temperature == 0; }

static int likelier(const void *a, const void *b)
{
    const struct candidate *x = a, *y = b;
    if (x->logit != y->logit) return x->logit > y->logit ? -1 : 1;
    return x->id < y->id ? -1 : 1;
}

int lazy_sampler_next(lazy_sampler *sampler, const float *logits, int n_vocab, int32_t *token, lazy_error *err)
{
    if (n_vocab < 1) return lazy_fail(err, LAZY_INVALID, "no logits were given");
    int best = 0;
    for (int i = 0; i < n_vocab; i++) {
        if (isnan(logits[i])) return lazy_fail(err, LAZY_INVALID, "logit %d is NaN", i);
        if (logits[i] > logits[best]) best = i;
    }
    if (lazy_sampler_is_greedy(sampler)) {
        *token = best;
        return LAZY_OK;
    }
    if (sampler->n_candidates != n_vocab) {
        struct candidate *candidates;
        int code = lazy_alloc((void **)&candidates, (size_t)n_vocab, sizeof *candidates, "the sampler's candidates", err);
        if (code) return code;
        lazy_free(sampler->candidates);
        sampler->candidates = candidates;
        sampler->n_candidates = n_vocab;
    }

    struct candidate *c = sampler->candidates;
    double total = 0;
    for (int i = 0; i < n_vocab; i++)
        c[i] = (struct candidate){ logits[i], i, exp(((double)logits[i] - logits[best]) / sampler->temperature) };
    qsort(c, (size_t)n_vocab, sizeof *c, likelier);
    int n = sampler->top_k && sampler->top_k < n_vocab ? sampler->top_k : n_vocab;
    for (int i = 0; i < n; i++) total += c[i].weight;

    double nucleus = 0; /* the fewest candidates that hold top_p of the weight */
    int kept = 0;
    while (kept < n && (kept == 0 || nucleus < sampler->top_p * total)) nucleus += c[kept++].weight;

    double target = draw(sampler) * nucleus;
    int chosen = 0;
    for (double sum = c[0].weight; sum <= target && chosen < kept - 1; sum += c[chosen].weight) chosen++;
    *token = c[chosen].id;
    return LAZY_OK;
}
