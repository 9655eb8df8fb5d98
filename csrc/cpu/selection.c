/* selection.c — averages and smooths scores, selects the tokens that stay in play by them, and regroups their rows. */
#include <stdlib.h>
#include <string.h>

#include "../error.h"
#include "cpu.h"

int lazy_cpu_keep_scores(lazy_stream *stream, float *layer, const float *scores, const int32_t *in_play, int m,
                         const uint8_t *flags, lazy_error *err)
{
    for (int j = 0; j < m; j++) layer[in_play[j]] = lazy_is_free(flags[in_play[j]]) ? scores[j] : 0.0f;
    return LAZY_OK;
}

int lazy_cpu_largest(lazy_stream *stream, float *scores, const float *layers, int n, int capacity,
                     const int32_t *in_play, int m, bool also, lazy_error *err)
{
    for (int j = 0; j < m; j++) {
        float largest = also ? scores[j] : layers[in_play[j]];
        for (int k = !also; k < n; k++) {
            float score = layers[(int64_t)k * capacity + in_play[j]];
            if (!(score <= largest) && !isnan(largest))
                largest = score; /* a NaN is kept, and refused by the selection */
        }
        scores[j] = largest;
    }
    return LAZY_OK;
}

int lazy_cpu_remember(lazy_stream *stream, float *scores, const lazy_memory *memory, const int32_t *in_play, int m,
                      lazy_error *err)
{
    float *remembered = memory->remembered;
    for (int i = 0; i < memory->n_old; i++) remembered[i] *= memory->factor;
    for (int i = memory->n_old; i < memory->length; i++) remembered[i] = 0.0f;
    for (int j = 0; j < m; j++) {
        float *known = &remembered[in_play[j]], score = memory->gain * scores[j];
        if (!(score <= *known)) *known = score;
        scores[j] = memory->depth[in_play[j]] == memory->waiting ? memory->revival * *known : *known;
    }
    return LAZY_OK;
}

int lazy_cpu_average(lazy_stream *stream, float *mean, const float *scores, int m, int n, lazy_error *err)
{
    for (int j = 0; j < m; j++) mean[j] = n == 1 ? scores[j] : mean[j] + (scores[j] - mean[j]) / (float)n;
    return LAZY_OK;
}

/* Scores are cut into blocks of `width`. A window reaches into two of them at most: it is the end of one and the
 * beginning of the next, so that sums from every score to its block's end, and from a block's beginning on, give each
 * window by one addition.
 *
 * Nothing is ever subtracted. A running sum from which scores are taken again would keep the rounding error of the
 * largest score that it has seen, which may be more than all of a later window. Here the relative error is below width
 * 2^-53, as it is when a window is summed term by term, and sums of at most 2^29 equal scores are exact, so that
 * windows of equal scores tie as they should. */
int lazy_cpu_smooth(lazy_stream *stream, float *out, const float *scores, int m, int width, lazy_error *err)
{
    double *to_block_end = ((lazy_cpu_stream *)stream)->block_sums, from_block_start = 0;
    for (int i = m - 1; i >= 0; i--)
        to_block_end[i] = scores[i] + (i == m - 1 || i % width == width - 1 ? 0.0 : to_block_end[i + 1]);
    int half = min_int(width / 2, m - 1);
    for (int j = 0, last = -1; j < m; j++) {
        int first = max_int(j - half, 0);
        while (last < m - 1 && last < j + half) {
            last++;
            from_block_start = scores[last] + (last % width ? from_block_start : 0.0);
        }
        double sum = first / width < last / width ? to_block_end[first] + from_block_start
                     : first % width              ? to_block_end[first]
                                                  : from_block_start;
        out[j] = (float)(sum / (last - first + 1));
    }
    return LAZY_OK;
}

/* True if the token at index j goes on with the word of the one before. */
static bool goes_on(const int32_t *in_play, int j, const uint8_t *flags)
{
    return in_play[j] == in_play[j - 1] + 1 && flags[in_play[j]] & LAZY_JOINED;
}

int lazy_cpu_complete(lazy_stream *stream, float *out, const float *scores, const int32_t *in_play, int m,
                      const uint8_t *flags, lazy_error *err)
{
    for (int j = 0; j < m; j++) {
        float largest = scores[j]; /* a NaN stays one, and is no other token's */
        for (int i = j; i > 0 && i > j - LAZY_WORD_REACH && goes_on(in_play, i, flags); i--)
            if (scores[i - 1] > largest) largest = scores[i - 1];
        for (int i = j + 1; i < m && i <= j + LAZY_WORD_REACH && goes_on(in_play, i, flags); i++)
            if (scores[i] > largest) largest = scores[i];
        out[j] = largest;
    }
    return LAZY_OK;
}

/* A score that is not negative as an integer of the same order: its bits. */
static uint32_t score_bits(float score)
{
    uint32_t bits;
    score += 0.0f; /* -0 becomes 0 */
    memcpy(&bits, &score, sizeof bits);
    return bits;
}

/* The same for scores of either sign: the bits of those below 0 have the opposite order. */
static uint32_t order_of(float score)
{
    uint32_t bits = score_bits(score), sign = 1u << 31;
    return bits & sign ? ~bits : bits | sign;
}

static int check_scores(const int32_t *in_play, const float *scores, int m, float lowest, lazy_error *err)
{
    for (int j = 0; j < m; j++)
        if (!(scores[j] >= lowest))
            return lazy_fail(err, LAZY_CHECKPOINT,
                             "the score of the token at position %d is %g; the weights before it are damaged",
                             in_play[j], scores[j]);
    return LAZY_OK;
}

static int higher(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x < y) - (x > y);
}

int lazy_cpu_mass(lazy_stream *stream, int *n_free, const int32_t *in_play, const float *scores, int m,
                  const uint8_t *flags, double mass, lazy_error *err)
{
    int code = check_scores(in_play, scores, m, 0.0f, err);
    if (code) return code;
    uint32_t *sorted = ((lazy_cpu_stream *)stream)->order;
    double total = 0, held = 0;
    int n = 0;
    for (int j = 0; j < m; j++) {
        if (!(flags[in_play[j]] & LAZY_PRUNABLE)) continue;
        total += scores[j];
        if (lazy_is_free(flags[in_play[j]])) sorted[n++] = score_bits(scores[j]);
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

/* Radix select: the n_free-th largest of bits (n,); *above = number of larger ones. */
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

int lazy_cpu_select(lazy_stream *stream, int32_t *kept, const int32_t *in_play, const float *scores, int m,
                    const uint8_t *flags, int n_free, lazy_error *err)
{
    int code = check_scores(in_play, scores, m, -INFINITY, err);
    if (code) return code;
    uint32_t *bits = ((lazy_cpu_stream *)stream)->order;
    int n = 0, above = 0;
    for (int j = 0; j < m; j++)
        if (lazy_is_free(flags[in_play[j]])) bits[n++] = order_of(scores[j]);
    uint32_t lowest = n_free ? threshold(bits, n, n_free, &above) : UINT32_MAX;
    int ties = n_free - above; /* tokens with a score equal to the threshold that stay: the first ones */
    for (int j = 0, out = 0; j < m; j++) {
        uint32_t own = order_of(scores[j]);
        if (!lazy_is_free(flags[in_play[j]]) || own > lowest || (own == lowest && ties-- > 0)) kept[out++] = in_play[j];
    }
    return LAZY_OK;
}

/* ---- ascending lists of positions --------------------------------------------------------- */

int lazy_cpu_mark(lazy_stream *stream, int32_t *depth, const int32_t *rows, int n, int value, lazy_error *err)
{
    for (int r = 0; r < n; r++) depth[rows[r]] = value;
    return LAZY_OK;
}

int lazy_cpu_filter(lazy_stream *stream, int32_t *out, int *n_out, const int32_t *positions, int n,
                    const int32_t *depth, int low, int high, lazy_error *err)
{
    int found = 0;
    for (int i = 0; i < n; i++)
        if (depth[positions[i]] >= low && depth[positions[i]] <= high) out[found++] = positions[i];
    if (n_out) *n_out = found;
    return LAZY_OK;
}

int lazy_cpu_regroup(lazy_stream *stream, void *y, const int32_t *new_rows, int n_new, const void *x,
                     const int32_t *rows, int n, void *aux, int d, int32_t *n_revived, lazy_error *err)
{
    size_t bytes = (size_t)d * sizeof(float);
    for (int i = 0, r = 0; i < n_new || r < n;) {
        int old = r < n ? rows[r] : INT32_MAX, new = i < n_new ? new_rows[i] : INT32_MAX;
        float *row = (float *)y + (int64_t)i * d, *waiting = aux ? (float *)aux + (int64_t)min_int(old, new) * d : NULL;
        const float *from = (const float *)x + (int64_t)r * d;
        if (old > new) memcpy(row, waiting, bytes); /* it is revived */
        else if (old == new) memcpy(row, from, bytes);
        else if (waiting) memcpy(waiting, from, bytes); /* it is dropped */
        *n_revived += old > new;
        r += old <= new;
        i += new <= old;
    }
    return LAZY_OK;
}
