/* selection.cu — selects the tokens to keep by their scores. A single block does it, so that order and ties are
 * deterministic. */
#include "scan.h"

namespace
{
enum {
    THREADS = 256,
    DIGIT_BITS = 8,
    DIGITS = 4, /* in a score's 32 bits */
    BUCKETS = 1 << DIGIT_BITS,
};

/* The bits of a score; those of scores that are not negative have the order of the scores. */
__device__ __forceinline__ uint32_t bits_of(float score) { return __float_as_uint(score + 0.0f); /* -0 becomes 0 */ }

/* A number with the order of the scores, of either sign: negative scores have bits in the opposite order. */
__device__ __forceinline__ uint32_t order_of(float score)
{
    uint32_t bits = bits_of(score), sign = 1u << 31;
    return bits & sign ? ~bits : bits | sign;
}

__global__ void __launch_bounds__(THREADS) average_scores(float *mean, const float *scores, int m, int n)
{
    int j = blockIdx.x * THREADS + threadIdx.x;
    if (j < m) mean[j] = n == 1 ? scores[j] : mean[j] + (scores[j] - mean[j]) / (float)n;
}

__global__ void __launch_bounds__(THREADS) smooth_scores(float *out, const float *scores, int m, int width)
{
    int j = blockIdx.x * THREADS + threadIdx.x;
    if (j >= m) return;
    int64_t first = (int64_t)j - width / 2, last = (int64_t)j + width / 2;
    if (first < 0) first = 0;
    if (last > m - 1) last = m - 1;
    double sum = 0.0;
    for (int64_t i = first; i <= last; i++) sum += scores[i];
    out[j] = (float)(sum / (double)(last - first + 1));
}

struct tokens {
    const int32_t *in_play; /* (m,) */
    const float *scores;    /* (m,) */
    const uint8_t *flags;   /* by position */
    int m;
    int layer;           /* that computed the scores */
    lazy_bad_score *bad; /* minimum over scores that are not numbers; see lazy_bad_score */
};

__device__ __forceinline__ bool is_free(const tokens &t, int j) { return t.flags[t.in_play[j]] == LAZY_PRUNABLE; }

__device__ __forceinline__ void note_bad_scores(const tokens &t, float lowest)
{
    for (int j = threadIdx.x; j < t.m; j += SCAN_THREADS)
        if (!(t.scores[j] >= lowest)) atomicMin(t.bad, (lazy_bad_score)t.layer << 32 | (unsigned)t.in_play[j]);
}

/* The score in units of 2^-60. Integer sums do not depend on the order of addition; the unit is far below f32's
 * rounding. */
__device__ __forceinline__ unsigned long long units_of(float score)
{
    return (unsigned long long)((double)score * 0x1p60);
}

struct histogram { /* in shared memory */
    unsigned long long weight[BUCKETS];
    unsigned prefix;                  /* the threshold's digits found so far */
    unsigned long long above;         /* weight of the scores above the threshold's bucket */
    unsigned long long total, forced; /* count_mass: units of all prunable tokens, and of the forced ones among them */
};

/* Radix select: the highest score such that the free tokens with at least that score weigh `wanted` or more in total. A
 * token weighs units_of(score), and the result is bits_of(score); or a token weighs 1, and it is order_of(score).
 * Afterwards h->above is the weight of the tokens with higher scores. */
template <bool BY_SCORE> __device__ uint32_t threshold_of(const tokens &t, unsigned long long wanted, histogram *h)
{
    if (threadIdx.x == 0) {
        h->prefix = 0;
        h->above = 0;
    }
    for (int digit = 0; digit < DIGITS; digit++) {
        int shift = 32 - DIGIT_BITS * (digit + 1);
        for (int b = threadIdx.x; b < BUCKETS; b += SCAN_THREADS) h->weight[b] = 0;
        __syncthreads();
        for (int j = threadIdx.x; j < t.m; j += SCAN_THREADS) {
            uint32_t bits = BY_SCORE ? bits_of(t.scores[j]) : order_of(t.scores[j]);
            if (!is_free(t, j) || (digit && (bits ^ h->prefix) >> (shift + DIGIT_BITS))) continue;
            atomicAdd(&h->weight[bits >> shift & (BUCKETS - 1)], BY_SCORE ? units_of(t.scores[j]) : 1ull);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            int b = BUCKETS - 1;
            while (b > 0 && h->above + h->weight[b] < wanted) h->above += h->weight[b--];
            h->prefix |= (unsigned)b << shift;
        }
        __syncthreads();
    }
    return h->prefix;
}

/* kept = tokens that are not free, and the n_free free tokens with the highest scores, the first ones among equal
 * scores; ascending. */
__global__ void __launch_bounds__(SCAN_THREADS) select_tokens(int32_t *kept, tokens t, int n_free)
{
    __shared__ histogram h;
    __shared__ scan_scratch scratch;
    note_bad_scores(t, -INFINITY);
    uint32_t threshold = UINT32_MAX;
    int ties = 0; /* tokens with exactly the threshold score still to be kept */
    if (n_free) {
        threshold = threshold_of<false>(t, (unsigned long long)n_free, &h);
        ties = n_free - (int)h.above;
    }
    int out = 0;
    for (int first = 0; first < t.m; first += SCAN_THREADS) {
        int j = first + (int)threadIdx.x, total = 0;
        uint32_t order = j < t.m ? order_of(t.scores[j]) : 0;
        bool stays = j < t.m && (!is_free(t, j) || order > threshold);
        bool tied = j < t.m && !stays && order == threshold;
        int rank = rank_in_block(tied, &total, &scratch);
        stays = stays || (tied && rank < ties);
        ties = ties > total ? ties - total : 0;
        int place = out + rank_in_block(stays, &total, &scratch);
        if (stays) kept[place] = t.in_play[j];
        out += total;
    }
}

/* *n_free = how many of the highest-scoring free tokens are needed so that they and the forced prunable tokens together
 * have `mass` of the prunable tokens' scores. */
__global__ void __launch_bounds__(SCAN_THREADS) count_mass(int32_t *n_free, tokens t, double mass)
{
    __shared__ histogram h;
    __shared__ int above_threshold, at_threshold;
    note_bad_scores(t, 0.0f);
    if (threadIdx.x == 0) {
        h.total = 0;
        h.forced = 0;
        above_threshold = 0;
        at_threshold = 0;
    }
    __syncthreads();
    for (int j = threadIdx.x; j < t.m; j += SCAN_THREADS) {
        if (!(t.flags[t.in_play[j]] & LAZY_PRUNABLE)) continue;
        atomicAdd(&h.total, units_of(t.scores[j]));
        if (!is_free(t, j)) atomicAdd(&h.forced, units_of(t.scores[j]));
    }
    __syncthreads();
    double target = ceil(mass * (double)h.total);
    unsigned long long wanted = target > (double)h.forced ? (unsigned long long)target - h.forced : 0;
    if (!wanted) {
        if (threadIdx.x == 0) *n_free = 0;
        return;
    }
    uint32_t threshold = threshold_of<true>(t, wanted, &h);
    for (int j = threadIdx.x; j < t.m; j += SCAN_THREADS) {
        if (!is_free(t, j)) continue;
        uint32_t bits = bits_of(t.scores[j]);
        if (bits > threshold) atomicAdd(&above_threshold, 1);
        if (bits == threshold) atomicAdd(&at_threshold, 1);
    }
    __syncthreads();
    if (threadIdx.x) return;
    unsigned long long each = at_threshold ? units_of(__uint_as_float(threshold)) : 0,
                       ties = each ? (wanted - h.above + each - 1) / each : 0;
    *n_free = above_threshold + (ties < (unsigned long long)at_threshold ? (int)ties : at_threshold);
}
} // namespace

int lazy_cuda_average(lazy_stream *stream, float *mean, const float *scores, int m, int n, lazy_error *err)
{
    return lazy_cuda_op(stream, "averaging over layers", err, [&](cudaStream_t queue) {
        return lazy_launch(average_scores, dim3((m + THREADS - 1) / THREADS), dim3(THREADS), 0, queue, mean, scores, m,
                           n);
    });
}

int lazy_cuda_smooth(lazy_stream *stream, float *out, const float *scores, int m, int width, lazy_error *err)
{
    return lazy_cuda_op(stream, "smoothing", err, [&](cudaStream_t queue) {
        return lazy_launch(smooth_scores, dim3((m + THREADS - 1) / THREADS), dim3(THREADS), 0, queue, out, scores, m,
                           width);
    });
}

static tokens tokens_of(lazy_stream *stream, const int32_t *in_play, const float *scores, int m, const uint8_t *flags)
{
    return { in_play, scores, flags, m, stream->layers_done - 1, lazy_cuda_scratch(stream)->bad_score };
}

int lazy_cuda_mass(lazy_stream *stream, int *n_free, const int32_t *in_play, const float *scores, int m,
                   const uint8_t *flags, double mass, lazy_error *err)
{
    int32_t *count = lazy_cuda_scratch(stream)->count;
    int code = lazy_cuda_op(stream, "counting by mass", err, [&](cudaStream_t queue) {
        return lazy_launch(count_mass, dim3(1), dim3(SCAN_THREADS), 0, queue, count,
                           tokens_of(stream, in_play, scores, m, flags), mass);
    });
    return code ? code : stream->backend->ops->download(stream, n_free, count, sizeof *n_free, err);
}

int lazy_cuda_select(lazy_stream *stream, int32_t *kept, const int32_t *in_play, const float *scores, int m,
                     const uint8_t *flags, int n_free, lazy_error *err)
{
    lazy_cuda_forget_ranges(stream);
    return lazy_cuda_op(stream, "selection", err, [&](cudaStream_t queue) {
        return lazy_launch(select_tokens, dim3(1), dim3(SCAN_THREADS), 0, queue, kept,
                           tokens_of(stream, in_play, scores, m, flags), n_free);
    });
}
