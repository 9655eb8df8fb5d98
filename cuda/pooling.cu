/* pooling.cu — combines the scores of several layers, and of several passes. */
#include "values.h"

namespace
{
enum { THREADS = 256 };

/* Runs twice: first without `share`, and writes the sum of each block of tokens; then adds these up, in one order, and
 * writes the shares, by position. */
__global__ void __launch_bounds__(LAZY_TOKEN_BLOCK)
    share_scores(float *share, double *sums, const float *scores, const int32_t *in_play, int m, const uint8_t *flags)
{
    begin_kernel();
    __shared__ double scratch[32];
    int j = blockIdx.x * LAZY_TOKEN_BLOCK + threadIdx.x;
    bool is_free = j < m && (flags[in_play[j]] & (LAZY_PRUNABLE | LAZY_FORCED)) == LAZY_PRUNABLE;
    double sum = !share && is_free ? scores[j] : 0.0;
    for (int b = threadIdx.x; share && b < (int)gridDim.x; b += LAZY_TOKEN_BLOCK) sum += sums[b];
    sum = lazy_block_sum(sum, scratch);
    if (!share && threadIdx.x == 0) sums[blockIdx.x] = sum;
    if (share && j < m) share[in_play[j]] = is_free && sum != 0.0 ? (float)(scores[j] / sum) : 0.0f;
}

/* shares: (n, capacity) by position */
__global__ void __launch_bounds__(THREADS)
    find_largest(float *scores, const float *shares, int n, int capacity, const int32_t *in_play, int m, bool also)
{
    begin_kernel();
    int j = blockIdx.x * THREADS + threadIdx.x;
    if (j >= m) return;
    float largest = also ? scores[j] : shares[in_play[j]];
    for (int k = !also; k < n; k++) largest = lazy_larger(largest, shares[(int64_t)k * capacity + in_play[j]]);
    scores[j] = largest;
}

/* A block multiplies what is remembered of the positions from its first token in play up to the next block's by
 * memory.factor, then takes the larger of that and the score for each of its tokens. */
__global__ void __launch_bounds__(THREADS) recall(float *scores, lazy_memory memory, const int32_t *in_play, int m)
{
    begin_kernel();
    int first = blockIdx.x * THREADS, next = first + THREADS, j = first + threadIdx.x;
    int begin = first ? in_play[first] : 0, end = next < m ? in_play[next] : memory.length;
    float *remembered = memory.remembered;
    for (int i = begin + (int)threadIdx.x; i < end; i += THREADS)
        remembered[i] = i < memory.n_old ? memory.factor * remembered[i] : 0.0f;
    __syncthreads();
    if (j >= m) return;
    float score = remembered[in_play[j]] = lazy_larger(remembered[in_play[j]], scores[j]);
    scores[j] = memory.depth[in_play[j]] == memory.waiting ? memory.revival * score : score;
}
} // namespace

int lazy_cuda_share(lazy_stream *stream, float *share, const float *scores, const int32_t *in_play, int m,
                    const uint8_t *flags, lazy_error *err)
{
    double *sums = (double *)lazy_cuda_scratch(stream)->of_blocks;
    int code = LAZY_OK, blocks = lazy_blocks(m, LAZY_TOKEN_BLOCK);
    for (float *out : { (float *)nullptr, share })
        if (!code)
            code = lazy_cuda_run(stream, "shares of a layer", err, share_scores, blocks, LAZY_TOKEN_BLOCK, out, sums,
                                 scores, in_play, m, flags);
    return code;
}

int lazy_cuda_largest(lazy_stream *stream, float *scores, const float *shares, int n, int capacity,
                      const int32_t *in_play, int m, bool also, lazy_error *err)
{
    return lazy_cuda_run(stream, "scores over layers", err, find_largest, lazy_blocks(m, THREADS), THREADS, scores,
                         shares, n, capacity, in_play, m, also);
}

int lazy_cuda_remember(lazy_stream *stream, float *scores, const lazy_memory *memory, const int32_t *in_play, int m,
                       lazy_error *err)
{
    return lazy_cuda_run(stream, "remembered scores", err, recall, lazy_blocks(m, THREADS), THREADS, scores, *memory,
                         in_play, m);
}
