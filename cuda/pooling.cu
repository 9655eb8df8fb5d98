/* pooling.cu — combines the scores of several layers, and of several passes. */
#include "values.h"

namespace
{
enum { THREADS = 256 };

__global__ void __launch_bounds__(THREADS)
    place_scores(float *layer, const float *scores, const int32_t *in_play, int m, const uint8_t *flags)
{
    begin_kernel();
    int j = blockIdx.x * THREADS + threadIdx.x;
    if (j >= m) return;
    bool is_free = (flags[in_play[j]] & (LAZY_PRUNABLE | LAZY_FORCED)) == LAZY_PRUNABLE;
    layer[in_play[j]] = is_free ? scores[j] : 0.0f;
}

/* layers: (n, capacity) by position */
__global__ void __launch_bounds__(THREADS)
    find_largest(float *scores, const float *layers, int n, int capacity, const int32_t *in_play, int m, bool also)
{
    begin_kernel();
    int j = blockIdx.x * THREADS + threadIdx.x;
    if (j >= m) return;
    float largest = also ? scores[j] : layers[in_play[j]];
    for (int k = !also; k < n; k++) largest = lazy_larger(largest, layers[(int64_t)k * capacity + in_play[j]]);
    scores[j] = largest;
}

/* A block multiplies what is remembered of the positions from its first token in play up to the next block's by
 * memory.factor, then takes the larger of that and memory.gain times the score for each of its tokens. */
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
    float score = remembered[in_play[j]] = lazy_larger(remembered[in_play[j]], memory.gain * scores[j]);
    scores[j] = memory.depth[in_play[j]] == memory.waiting ? memory.revival * score : score;
}
} // namespace

int lazy_cuda_keep_scores(lazy_stream *stream, float *layer, const float *scores, const int32_t *in_play, int m,
                          const uint8_t *flags, lazy_error *err)
{
    return lazy_cuda_run(stream, "scores of a layer", err, place_scores, lazy_blocks(m, THREADS), THREADS, layer,
                         scores, in_play, m, flags);
}

int lazy_cuda_largest(lazy_stream *stream, float *scores, const float *layers, int n, int capacity,
                      const int32_t *in_play, int m, bool also, lazy_error *err)
{
    return lazy_cuda_run(stream, "scores over layers", err, find_largest, lazy_blocks(m, THREADS), THREADS, scores,
                         layers, n, capacity, in_play, m, also);
}

int lazy_cuda_remember(lazy_stream *stream, float *scores, const lazy_memory *memory, const int32_t *in_play, int m,
                       lazy_error *err)
{
    return lazy_cuda_run(stream, "remembered scores", err, recall, lazy_blocks(m, THREADS), THREADS, scores, *memory,
                         in_play, m);
}
