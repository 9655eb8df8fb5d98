/* selection.cu — selects the tokens to keep by their scores. Each block of threads orders a block of tokens; the last
 * to finish finds the threshold, and a second kernel writes. Sums are of integers: the order of threads cannot show. */
#include <type_traits>

#include "scan.h"

namespace
{
enum { THREADS = 256, DIGIT_BITS = 11 /* of the three digits of 32 bits */, IN_LANE = SCAN_THREADS / 32 };
static_assert(LAZY_BUCKETS == 1 << DIGIT_BITS, "one bucket for each value of a digit");

/* The order of a token that is kept whatever its score, and the highest of others: their first digits differ. */
const uint32_t KEPT = UINT32_MAX, HIGHEST = KEPT - (1u << (32 - DIGIT_BITS));

/* A number above 0 with the order of the scores, of either sign: negative scores have bits in the opposite order. */
__device__ __forceinline__ uint32_t order_of(float score)
{
    uint32_t bits = __float_as_uint(score + 0.0f), sign = 1u << 31; /* -0 becomes 0 */
    return min(max(bits & sign ? ~bits : bits | sign, 1u), HIGHEST);
}

__global__ void __launch_bounds__(THREADS) average_scores(float *mean, const float *scores, int m, int n)
{
    begin_kernel();
    int j = blockIdx.x * THREADS + threadIdx.x;
    if (j < m) mean[j] = n == 1 ? scores[j] : mean[j] + (scores[j] - mean[j]) / (float)n;
}

__global__ void __launch_bounds__(THREADS) smooth_scores(float *out, const float *scores, int m, int width)
{
    begin_kernel();
    int j = blockIdx.x * THREADS + threadIdx.x;
    if (j >= m) return;
    int64_t first = (int64_t)j - width / 2, last = (int64_t)j + width / 2;
    if (first < 0) first = 0;
    if (last > m - 1) last = m - 1;
    double sum = 0.0;
    for (int64_t i = first; i <= last; i++) sum += scores[i];
    out[j] = (float)(sum / (double)(last - first + 1));
}

/* True if the token at index j goes on with the word of the one before. */
__device__ __forceinline__ bool goes_on(const int32_t *in_play, int j, const uint8_t *flags)
{
    return in_play[j] == in_play[j - 1] + 1 && flags[in_play[j]] & LAZY_JOINED;
}

__global__ void __launch_bounds__(THREADS)
    complete_words(float *out, const float *scores, const int32_t *in_play, int m, const uint8_t *flags)
{
    begin_kernel();
    int j = blockIdx.x * THREADS + threadIdx.x;
    if (j >= m) return;
    float largest = scores[j]; /* a NaN stays one, and is no other token's */
    for (int i = j; i > 0 && i > j - LAZY_WORD_REACH && goes_on(in_play, i, flags); i--)
        if (scores[i - 1] > largest) largest = scores[i - 1];
    for (int i = j + 1; i < m && i <= j + LAZY_WORD_REACH && goes_on(in_play, i, flags); i++)
        if (scores[i] > largest) largest = scores[i];
    out[j] = largest;
}

struct tokens {
    const int32_t *in_play; /* (m,) */
    const float *scores;    /* (m,) */
    const uint8_t *flags;   /* by position */
    int m;
    int layer;           /* that computed the scores */
    lazy_bad_score *bad; /* see lazy_findings */
    uint32_t *orders;    /* (m,), then 0 up to the end of the last block */
};

/* The weight of a free token: 1 for `select`; for `mass` the score in units of 2^-60, far below f32's rounding. */
template <class W> __device__ __forceinline__ W weight_of(float score)
{
    return sizeof(W) == sizeof(unsigned) ? 1 : (W)((double)score * 0x1p60);
}

/* The score, which must not be negative. */
__device__ __forceinline__ float score_of(uint32_t order) { return __uint_as_float(order & INT32_MAX); }

template <class W> struct histogram { /* in shared memory */
    W weight[LAZY_BUCKETS], scratch[32];
    uint32_t bucket; /* that the threshold is in */
    W above, inside; /* weight of the buckets above it, and its own */
    bool is_last;
};

template <class W> __device__ __forceinline__ void clear(histogram<W> *h)
{
    for (int b = threadIdx.x; b < LAZY_BUCKETS; b += SCAN_THREADS) h->weight[b] = 0;
    __syncthreads();
}

/* Adds the weights of a warp's lanes. Most may be for one bucket: those for the first lane's are added up before. */
template <class W> __device__ __forceinline__ void add_weights(histogram<W> *h, uint32_t bucket, W weight)
{
    uint32_t common = __shfl_sync(~0u, bucket, 0);
    W sum = lazy_warp_sum(bucket == common ? weight : W(0));
    if (threadIdx.x % 32 == 0) atomicAdd(&h->weight[common], sum);
    if (bucket != common && weight) atomicAdd(&h->weight[bucket], weight);
}

/* Finds the highest bucket that weighs `wanted` or more together with those above it. wanted: at least 1 */
template <class W> __device__ void find_bucket(histogram<W> *h, W wanted)
{
    constexpr int EACH = LAZY_BUCKETS / SCAN_THREADS;
    int b = LAZY_BUCKETS - 1 - EACH * (int)threadIdx.x;
    W own = 0, total;
    for (int i = 0; i < EACH; i++) own += h->weight[b - i];
    W above = sum_before(own, &total, h->scratch);
    if (above < wanted && wanted <= above + own) {
        while (above + h->weight[b] < wanted) above += h->weight[b--];
        h->bucket = b;
        h->above = above;
        h->inside = h->weight[b];
    }
    __syncthreads();
}

/* Calls f(block, orders) for each block of tokens; a warp reads whole blocks, and `orders` are the lane's. */
template <class F> __device__ __forceinline__ void for_blocks(const tokens &t, F f)
{
    for (int block = threadIdx.x / 32; block < (int)gridDim.x; block += SCAN_WARPS) {
        uint32_t orders[IN_LANE];
#pragma unroll
        for (int i = 0; i < IN_LANE; i++) orders[i] = t.orders[block * SCAN_THREADS + 32 * i + threadIdx.x % 32];
        f(block, orders);
    }
}

/* The histogram of the digit at bit `low`, of the orders that agree with `prefix` from bit `shift` on. */
template <class W> __device__ void count_digit(histogram<W> *h, const tokens &t, uint32_t prefix, int shift, int low)
{
    clear(h);
    uint32_t bucket = 0; /* of this thread's last orders, whose weight is not added yet */
    W weight = 0;
    for_blocks(t, [&](int, const uint32_t(&orders)[IN_LANE]) {
#pragma unroll
        for (uint32_t order : orders) {
            if ((order ^ prefix) >> shift) continue;
            uint32_t next = order >> low & (LAZY_BUCKETS - 1);
            if (next != bucket && weight) atomicAdd(&h->weight[bucket], weight);
            weight = (next == bucket ? weight : 0) + weight_of<W>(score_of(order));
            bucket = next;
        }
    });
    add_weights(h, bucket, weight);
    __syncthreads();
}

/* 1 for an order above the threshold, 2^32 for one at it. */
__device__ __forceinline__ unsigned long long count_of(uint32_t order, uint32_t threshold, int shift)
{
    return order >> shift > threshold ? 1 : order >> shift == threshold ? 1ull << 32 : 0;
}

/* Orders the tokens. For `select`, finds the lowest order of the `wanted` highest-scoring free tokens, and counts[b] =
 * sum of count_of over block b. For `mass`, *n_free = how many of the highest-scoring free tokens are needed so that
 * they and the forced prunable ones hold the fraction `wanted` of the scores of all prunable tokens. */
template <bool BY_MASS>
__global__ void __launch_bounds__(SCAN_THREADS)
    find_threshold(tokens t, double wanted, lazy_choice *choice, unsigned long long *counts, int32_t *n_free)
{
    begin_kernel();
    using W = std::conditional_t<BY_MASS, unsigned long long, unsigned>;
    __shared__ histogram<W> h;
    clear(&h);
    int j = blockIdx.x * SCAN_THREADS + threadIdx.x, position = j < t.m ? t.in_play[j] : 0;
    float score = j < t.m ? t.scores[j] : 0.0f;
    uint8_t flags = j < t.m ? t.flags[position] : 0;
    bool is_free = (flags & (LAZY_PRUNABLE | LAZY_FORCED)) == LAZY_PRUNABLE;
    uint32_t order = is_free ? order_of(score) : BY_MASS || j >= t.m ? 0 : KEPT;
    t.orders[j] = order;
    if (!(score >= (BY_MASS ? 0.0f : -INFINITY))) atomicMin(t.bad, (lazy_bad_score)t.layer << 32 | (unsigned)position);
    /* forced tokens' weight goes to bucket 0, which is below all scores that are not negative */
    add_weights(&h, order >> (32 - DIGIT_BITS),
                is_free || (BY_MASS && flags & LAZY_PRUNABLE) ? weight_of<W>(score) : 0);
    __syncthreads();
    W *weight = (W *)choice->weight, total = 0;
    for (int b = threadIdx.x; b < LAZY_BUCKETS; b += SCAN_THREADS)
        if (h.weight[b]) atomicAdd(&weight[b], h.weight[b]);
    __syncthreads();
    if (threadIdx.x == 0) h.is_last = take_ticket(&choice->tickets, gridDim.x);
    __syncthreads();
    if (!h.is_last) return;

    for (int b = threadIdx.x; b < LAZY_BUCKETS; b += SCAN_THREADS) {
        total += h.weight[b] = weight[b];
        weight[b] = 0;
    }
    total = lazy_block_sum(total, h.scratch);
    W missing = (W)wanted;
    if (BY_MASS) {
        W forced = h.weight[0], target = (W)ceil(wanted * (double)total);
        missing = target > forced ? min(target, total) - forced : 0;
    }
    uint32_t prefix = missing ? 0 : HIGHEST; /* the threshold's bits from bit `shift` on */
    int shift = missing ? 32 : 0;
    while (shift) {
        int low = max(shift - DIGIT_BITS, 0);
        if (shift < 32) count_digit(&h, t, prefix, shift, low);
        find_bucket(&h, missing);
        missing -= h.above;
        prefix |= h.bucket << low;
        shift = low;
        if (!BY_MASS && h.inside == missing) break; /* the rest of the digits does not matter */
    }

    uint32_t threshold = prefix >> shift;
    unsigned long long all = 0;
    for_blocks(t, [&](int block, const uint32_t(&orders)[IN_LANE]) {
        unsigned long long count = 0;
#pragma unroll
        for (uint32_t order : orders) count += count_of(order, threshold, shift);
        all += count;
        if (BY_MASS) return;
        count = lazy_warp_sum(count);
        if (threadIdx.x % 32 == 0) counts[block] = count;
    });
    if (BY_MASS) all = lazy_block_sum(all, (unsigned long long *)h.scratch);
    if (threadIdx.x) return;
    if (BY_MASS) {
        W each = missing ? weight_of<W>(score_of(prefix)) : 0, ties = each ? (missing + each - 1) / each : 0;
        *n_free = (int)(unsigned)all + (int)min(ties, (W)(all >> 32));
    } else {
        choice->threshold = threshold;
        choice->shift = shift;
        choice->ties = (int)missing;
    }
}

/* kept = the tokens above the threshold and the first ones at it, ascending. */
__global__ void __launch_bounds__(SCAN_THREADS)
    write_kept(int32_t *kept, tokens t, const lazy_choice *choice, const unsigned long long *counts)
{
    begin_kernel();
    __shared__ unsigned long long scratch[32];
    int j = blockIdx.x * SCAN_THREADS + threadIdx.x, ties = choice->ties;
    unsigned long long own = count_of(t.orders[j], choice->threshold, choice->shift),
                       before = sum_before_in_grid(own, counts, scratch);
    int above = (int)(unsigned)before, tied = (int)(before >> 32);
    if (j < t.m && (own == 1 || (own && tied < ties))) kept[above + min(tied, ties)] = t.in_play[j];
}
} // namespace

int lazy_cuda_average(lazy_stream *stream, float *mean, const float *scores, int m, int n, lazy_error *err)
{
    return lazy_cuda_run(stream, "averaging over layers", err, average_scores, lazy_blocks(m, THREADS), THREADS, mean,
                         scores, m, n);
}

int lazy_cuda_smooth(lazy_stream *stream, float *out, const float *scores, int m, int width, lazy_error *err)
{
    return lazy_cuda_run(stream, "smoothing", err, smooth_scores, lazy_blocks(m, THREADS), THREADS, out, scores, m,
                         width);
}

int lazy_cuda_complete(lazy_stream *stream, float *out, const float *scores, const int32_t *in_play, int m,
                       const uint8_t *flags, lazy_error *err)
{
    return lazy_cuda_run(stream, "completing words", err, complete_words, lazy_blocks(m, THREADS), THREADS, out, scores,
                         in_play, m, flags);
}

static tokens tokens_of(lazy_stream *stream, const int32_t *in_play, const float *scores, int m, const uint8_t *flags)
{
    const lazy_cuda_stream *s = lazy_cuda_scratch(stream);
    return { in_play, scores, flags, m, stream->layers_done, &s->found->bad_score, s->orders };
}

int lazy_cuda_mass(lazy_stream *stream, int *n_free, const int32_t *in_play, const float *scores, int m,
                   const uint8_t *flags, double mass, lazy_error *err)
{
    const lazy_cuda_stream *s = lazy_cuda_scratch(stream);
    int code =
        lazy_cuda_run(stream, "counting by mass", err, find_threshold<true>, lazy_blocks(m, SCAN_THREADS), SCAN_THREADS,
                      tokens_of(stream, in_play, scores, m, flags), mass, s->choice, nullptr, &s->found->count);
    if (!code) code = lazy_cuda_wait(stream, err);
    *n_free = s->found->count;
    return code;
}

int lazy_cuda_select(lazy_stream *stream, int32_t *kept, const int32_t *in_play, const float *scores, int m,
                     const uint8_t *flags, int n_free, lazy_error *err)
{
    lazy_cuda_forget_ranges(stream);
    const lazy_cuda_stream *s = lazy_cuda_scratch(stream);
    const tokens t = tokens_of(stream, in_play, scores, m, flags);
    auto *counts = (unsigned long long *)s->of_blocks;
    int blocks = lazy_blocks(m, SCAN_THREADS);
    int code = lazy_cuda_run(stream, "selection", err, find_threshold<false>, blocks, SCAN_THREADS, t, n_free,
                             s->choice, counts, nullptr);
    return code ? code
                : lazy_cuda_run(stream, "selection", err, write_kept, blocks, SCAN_THREADS, kept, t, s->choice, counts);
}
