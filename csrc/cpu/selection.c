/* selection.c — which tokens stay, by their scores. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../error.h"
#include "cpu.h"

int lazy_cpu_average(lazy_stream *stream, float *mean, const float *scores, int m, int n, lazy_error *err)
{
    (void)stream, (void)err;
    for (int j = 0; j < m; j++) mean[j] = n == 1 ? scores[j] : mean[j] + (scores[j] - mean[j]) / (float)n;
    return LAZY_OK;
}

int lazy_cpu_smooth(lazy_stream *stream, float *out, const float *scores, int m, int width, lazy_error *err)
{
    (void)stream, (void)err;
    for (int j = 0; j < m; j++) {
        int64_t first = (int64_t)j - width / 2, last = (int64_t)j + width / 2;
        if (first < 0) first = 0;
        if (last > m - 1) last = m - 1;
        double sum = 0;
        for (int64_t i = first; i <= last; i++) sum += scores[i];
        out[j] = (float)(sum / (double)(last - first + 1));
    }
    return LAZY_OK;
}

/* Scores are never negative, so that their bits sort as they do; NaN sorts above them all. */
static uint32_t score_bits(float score)
{
    uint32_t bits;
    score += 0.0f; /* -0 becomes 0 */
    memcpy(&bits, &score, sizeof bits);
    return bits;
}

static bool is_free(const uint8_t *flags, int32_t position) { return flags[position] == LAZY_PRUNABLE; }

static int check_scores(const int32_t *in_play, const float *scores, int m, lazy_error *err)
{
    for (int j = 0; j < m; j++)
        if (!(scores[j] >= 0))
            return lazy_fail(err, LAZY_CHECKPOINT, "the score of the token at position %d is %g; the weights before it are damaged",
                             in_play[j], scores[j]);
    return LAZY_OK;
}

static int higher(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x < y) - (x > y);
}

int lazy_cpu_mass(lazy_stream *stream, int *n_free, const int32_t *in_play, const float *scores, int m, const uint8_t *flags, double mass,
                  lazy_error *err)
{
    int code = check_scores(in_play, scores, m, err);
    if (code) return code;
    uint32_t *sorted = ((lazy_cpu_stream *)stream)->order;
    double total = 0, held = 0;
    int n = 0;
    for (int j = 0; j < m; j++) {
        if (!(flags[in_play[j]] & LAZY_PRUNABLE)) continue;
        total += scores[j];
        if (is_free(flags, in_play[j])) sorted[n++] = score_bits(scores[j]);
        else held += scores[j];
    }
    qsort(sorted, (size_t)n, sizeof *sorted, higher);
    for (*n_free = 0; *n_free < n && held < mass * total; ++*n_free) {
        float score;
        memcpy(&score, &sorted[*n_free], sizeof score);
        held += score;
    }
    return LAZY_OK;
}

/* The score bits of the n_free-th highest of n free tokens, found digit by digit; *above = how many are higher. */
static uint32_t threshold(const uint32_t *bits, int n, int n_free, int *above)
{
    enum { DIGIT = 11, BUCKETS = 1 << DIGIT };
    uint32_t prefix = 0, mask = 0;
    *above = 0;
    for (int shift = 21; shift >= -1; shift -= DIGIT) {
        int low = shift < 0 ? 0 : shift, width = shift < 0 ? DIGIT - 1 : DIGIT;
        int count[BUCKETS] = { 0 };
        for (int i = 0; i < n; i++)
            if ((bits[i] & mask) == prefix) count[bits[i] >> low & ((1u << width) - 1)]++;
        int digit = (1 << width) - 1;
        while (*above + count[digit] < n_free) *above += count[digit--];
        prefix |= (uint32_t)digit << low;
        mask |= ((1u << width) - 1) << low;
    }
    return prefix;
}

int lazy_cpu_select(lazy_stream *stream, int32_t *kept, const int32_t *in_play, const float *scores, int m, const uint8_t *flags,
                    int n_free, lazy_error *err)
{
    int code = check_scores(in_play, scores, m, err);
    if (code) return code;
    uint32_t *bits = ((lazy_cpu_stream *)stream)->order;
    int n = 0, above = 0;
    for (int j = 0; j < m; j++)
        if (is_free(flags, in_play[j])) bits[n++] = score_bits(scores[j]);
    uint32_t bar = n_free ? threshold(bits, n, n_free, &above) : UINT32_MAX;
    int ties = n_free - above; /* of those at the bar, the first ones stay */
    for (int j = 0, out = 0; j < m; j++) {
        uint32_t own = score_bits(scores[j]);
        if (!is_free(flags, in_play[j]) || own > bar || (own == bar && ties-- > 0)) kept[out++] = in_play[j];
    }
    return LAZY_OK;
}
