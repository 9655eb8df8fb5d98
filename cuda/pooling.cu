/* pooling.cu — puts the scores of several layers, and of several passes, together. */
#include "values.h"

namespace
{
enum { THREADS = 256 };

dim3 blocks_of(int n) { return dim3((n + THREADS - 1) / THREADS); }

/* share: by position. Launched with one block, so that the sum has one order. */
__global__ void __launch_bounds__(THREADS)
    share_scores(float *share, const float *scores, const int32_t *in_play, int m, const uint8_t *flags)
{
    __shared__ double scratch[32];
    double sum = 0.0;
    for (int j = threadIdx.x; j < m; j += THREADS)
        if (flags[in_play[j]] == LAZY_PRUNABLE) sum += scores[j];
    sum = lazy_block_sum(sum, scratch);
    for (int j = threadIdx.x; j < m; j += THREADS)
        share[in_play[j]] = flags[in_play[j]] == LAZY_PRUNABLE && sum != 0.0 ? (float)(scores[j] / sum) : 0.0f;
}

/* shares: (n, capacity) by position */
__global__ void __launch_bounds__(THREADS)
    find_largest(float *scores, const float *shares, int n, int capacity, const int32_t *in_play, int m, bool also)
{
    int j = blockIdx.x * THREADS + threadIdx.x;
    if (j >= m) return;
    float largest = also ? scores[j] : shares[in_play[j]];
    for (int k = !also; k < n; k++) largest = lazy_larger(largest, shares[(int64_t)k * capacity + in_play[j]]);
    scores[j] = largest;
}

__global__ void __launch_bounds__(THREADS) fade(float *remembered, int n_old, int length, float factor)
{
    int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < length) remembered[i] = i < n_old ? factor * remembered[i] : 0.0f;
}

__global__ void __launch_bounds__(THREADS) recall(float *scores, float *remembered, const int32_t *in_play, int m)
{
    int j = blockIdx.x * THREADS + threadIdx.x;
    if (j < m) scores[j] = remembered[in_play[j]] = lazy_larger(remembered[in_play[j]], scores[j]);
}
} // namespace

int lazy_cuda_share(lazy_stream *stream, float *share, const float *scores, const int32_t *in_play, int m,
                    const uint8_t *flags, lazy_error *err)
{
    return lazy_cuda_op(stream, "shares of a layer", err, [&](cudaStream_t queue) {
        return lazy_launch(share_scores, dim3(1), dim3(THREADS), 0, queue, share, scores, in_play, m, flags);
    });
}

int lazy_cuda_largest(lazy_stream *stream, float *scores, const float *shares, int n, int capacity,
                      const int32_t *in_play, int m, bool also, lazy_error *err)
{
    return lazy_cuda_op(stream, "scores over layers", err, [&](cudaStream_t queue) {
        return lazy_launch(find_largest, blocks_of(m), dim3(THREADS), 0, queue, scores, shares, n, capacity, in_play, m,
                           also);
    });
}

int lazy_cuda_remember(lazy_stream *stream, float *scores, float *remembered, int n_old, int length, float factor,
                       const int32_t *in_play, int m, lazy_error *err)
{
    return lazy_cuda_op(stream, "remembered scores", err, [&](cudaStream_t queue) {
        cudaError_t failed =
            lazy_launch(fade, blocks_of(length), dim3(THREADS), 0, queue, remembered, n_old, length, factor);
        return failed != cudaSuccess
                   ? failed
                   : lazy_launch(recall, blocks_of(m), dim3(THREADS), 0, queue, scores, remembered, in_play, m);
    });
}
