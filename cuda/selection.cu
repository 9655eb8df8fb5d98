/* selection.cu — which tokens stay, by their scores: one block, so that order and ties need no other care. */
#include "scan.h"

namespace
{
enum {
    THREADS = 256,
    DIGIT_BITS = 8,
    DIGITS = 4, /* of a score's 32 bits */
    BUCKETS = 1 << DIGIT_BITS,
};

/* Scores are never negative, so that their bits sort as they do. */
__device__ __forceinline__ uint32_t bits_of(float score) { return __float_as_uint(score + 0.0f); /* -0 becomes 0 */ }

__device__ __forceinline__ bool is_number(float score) { return score >= 0.0f; }

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
    int layer;           /* that gave the scores */
    lazy_bad_score *bad; /* its note of one that is no number */
};

__device__ __forceinline__ bool is_free(const tokens &t, int j) { return t.flags[t.in_play[j]] == LAZY_PRUNABLE; }

__device__ __forceinline__ void note_bad_scores(const tokens &t)
{
    for (int j = threadIdx.x; j < t.m; j += SCAN_THREADS)
        if (!is_number(t.scores[j])) atomicMin(t.bad, (lazy_bad_score)t.layer << 32 | (unsigned)t.in_play[j]);
}

/* Shares of a score of one, as whole numbers, so that no sum depends on its order. Far below f32's own rounding. */
__device__ __forceinline__ unsigned long long shares_of(float score) { return (unsigned long long)((double)score * 0x1p60); }

struct histogram { /* in shared memory */
    unsigned long long weight[BUCKETS];
    unsigned prefix;          /* the digits found so far */
    unsigned long long above; /* weight of what is higher */
    unsigned long long total, held;
};

/* The bits of the lowest score that is wanted, digit by digit: those whose weights, from the highest down, reach `wanted`. Each
 * free token weighs its shares, or one. What is higher weighs h->above. */
template <bool BY_SHARES> __device__ uint32_t bar_of(const tokens &t, unsigned long long wanted, histogram *h)
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
            uint32_t bits = bits_of(t.scores[j]);
            if (!is_free(t, j) || (digit && (bits ^ h->prefix) >> (shift + DIGIT_BITS))) continue;
            atomicAdd(&h->weight[bits >> shift & (BUCKETS - 1)], BY_SHARES ? shares_of(t.scores[j]) : 1ull);
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

/* kept: what may not leave, and the n_free highest of the others; of equals those that come first. */
__global__ void __launch_bounds__(SCAN_THREADS) select_tokens(int32_t *kept, tokens t, int n_free)
{
    __shared__ histogram h;
    __shared__ scan_room room;
    note_bad_scores(t);
    uint32_t bar = UINT32_MAX;
    int ties = 0; /* at the bar, still to be taken */
    if (n_free) {
        bar = bar_of<false>(t, (unsigned long long)n_free, &h);
        ties = n_free - (int)h.above;
    }
    int out = 0;
    for (int first = 0; first < t.m; first += SCAN_THREADS) {
        int j = first + (int)threadIdx.x, total = 0;
        uint32_t own = j < t.m ? bits_of(t.scores[j]) : 0;
        bool stays = j < t.m && (!is_free(t, j) || own > bar);
        bool tied = j < t.m && !stays && own == bar;
        int rank = rank_in_block(tied, &total, &room);
        stays = stays || (tied && rank < ties);
        ties = ties > total ? ties - total : 0;
        int place = out + rank_in_block(stays, &total, &room);
        if (stays) kept[place] = t.in_play[j];
        out += total;
    }
}

/* *n_free = how many of the highest free tokens it takes until they hold `mass` of all prunable ones' scores. */
__global__ void __launch_bounds__(SCAN_THREADS) count_mass(int32_t *n_free, tokens t, double mass)
{
    __shared__ histogram h;
    __shared__ int above_bar, at_bar;
    note_bad_scores(t);
    if (threadIdx.x == 0) {
        h.total = 0;
        h.held = 0;
        above_bar = 0;
        at_bar = 0;
    }
    __syncthreads();
    for (int j = threadIdx.x; j < t.m; j += SCAN_THREADS) {
        if (!(t.flags[t.in_play[j]] & LAZY_PRUNABLE)) continue;
        atomicAdd(&h.total, shares_of(t.scores[j]));
        if (!is_free(t, j)) atomicAdd(&h.held, shares_of(t.scores[j]));
    }
    __syncthreads();
    double target = ceil(mass * (double)h.total);
    unsigned long long wanted = target > (double)h.held ? (unsigned long long)target - h.held : 0;
    if (!wanted) {
        if (threadIdx.x == 0) *n_free = 0;
        return;
    }
    uint32_t bar = bar_of<true>(t, wanted, &h);
    for (int j = threadIdx.x; j < t.m; j += SCAN_THREADS) {
        if (!is_free(t, j)) continue;
        uint32_t bits = bits_of(t.scores[j]);
        if (bits > bar) atomicAdd(&above_bar, 1);
        if (bits == bar) atomicAdd(&at_bar, 1);
    }
    __syncthreads();
    if (threadIdx.x) return;
    unsigned long long each = at_bar ? shares_of(__uint_as_float(bar)) : 0, ties = each ? (wanted - h.above + each - 1) / each : 0;
    *n_free = above_bar + (ties < (unsigned long long)at_bar ? (int)ties : at_bar);
}
} // namespace

int lazy_cuda_average(lazy_stream *stream, float *mean, const float *scores, int m, int n, lazy_error *err)
{
    return lazy_cuda_op(stream, "averaging over layers", err, [&](const lazy_queue &queue) {
        return lazy_launch(average_scores, dim3((m + THREADS - 1) / THREADS), dim3(THREADS), 0, queue, mean, scores, m, n);
    });
}

int lazy_cuda_smooth(lazy_stream *stream, float *out, const float *scores, int m, int width, lazy_error *err)
{
    return lazy_cuda_op(stream, "smoothing", err, [&](const lazy_queue &queue) {
        return lazy_launch(smooth_scores, dim3((m + THREADS - 1) / THREADS), dim3(THREADS), 0, queue, out, scores, m, width);
    });
}

static tokens tokens_of(lazy_stream *stream, const int32_t *in_play, const float *scores, int m, const uint8_t *flags)
{
    return { in_play, scores, flags, m, stream->layers_done - 1, lazy_cuda_scratch(stream)->bad_score };
}

int lazy_cuda_mass(lazy_stream *stream, int *n_free, const int32_t *in_play, const float *scores, int m, const uint8_t *flags, double mass,
                   lazy_error *err)
{
    int32_t *count = lazy_cuda_scratch(stream)->count;
    int code = lazy_cuda_op(stream, "counting by mass", err, [&](const lazy_queue &queue) {
        return lazy_launch(count_mass, dim3(1), dim3(SCAN_THREADS), 0, queue, count, tokens_of(stream, in_play, scores, m, flags), mass);
    });
    return code ? code : stream->backend->ops->download(stream, n_free, count, sizeof *n_free, err);
}

int lazy_cuda_select(lazy_stream *stream, int32_t *kept, const int32_t *in_play, const float *scores, int m, const uint8_t *flags,
                     int n_free, lazy_error *err)
{
    return lazy_cuda_op(stream, "selection", err, [&](const lazy_queue &queue) {
        return lazy_launch(select_tokens, dim3(1), dim3(SCAN_THREADS), 0, queue, kept, tokens_of(stream, in_play, scores, m, flags),
                           n_free);
    });
}
