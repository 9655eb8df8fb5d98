/* attention_plain.cu — attention by a thread a key, then a thread a value: for f32, and for heads that no other kernel takes. */
#include "attention.h"

namespace
{
enum {
    THREADS = 128, /* and keys at a time */
    MOST_D = 512,
    PER_THREAD = MOST_D / THREADS, /* outputs */
};

template <class T> __device__ __forceinline__ float dot(const float *q, const T *key, int d)
{
    constexpr int WIDE = 16 / sizeof(T);
    float sum = 0.0f;
    if (d % WIDE) {
        for (int i = 0; i < d; i++) sum += q[i] * lazy_wide(key[i]);
        return sum;
    }
    for (int i = 0; i < d; i += WIDE) {
        lazy_pack<T> part = *reinterpret_cast<const lazy_pack<T> *>(key + i);
#pragma unroll
        for (int e = 0; e < WIDE; e++) sum += q[i + e] * lazy_wide(part.value[e]);
    }
    return sum;
}

/* A block takes one head of one row through one chunk of keys. */
template <class T> __global__ void __launch_bounds__(THREADS) attend(attention_task<T> t)
{
    __shared__ float q[MOST_D], share[THREADS], room[32];
    int row = t.n - 1 - (int)blockIdx.x, head = blockIdx.y, chunk = blockIdx.z, g = head / t.group; /* long rows first */
    int end = min((chunk + 1) * t.chunk, t.limits[row]);
    float out[PER_THREAD] = {}, most = -INFINITY, sum = 0.0f;
    for (int i = threadIdx.x; i < t.d; i += THREADS) q[i] = lazy_wide(t.qkv[(int64_t)row * t.width + head * t.d + i]) * t.scale;
    __syncthreads();
    for (int first = chunk * t.chunk; first < end; first += THREADS) {
        int j = first + (int)threadIdx.x, n = min((int)THREADS, end - first);
        float score = j < end ? dot(q, cache_row(t.k, t, g, j), t.d) : -INFINITY;
        float now = fmaxf(most, lazy_block_max(score, room)), shrink = exp2f(most - now), power = exp2f(score - now);
        share[threadIdx.x] = power;
        sum = sum * shrink + lazy_block_sum(power, room); /* its barriers also show the shares to all */
        most = now;
#pragma unroll
        for (int e = 0; e < PER_THREAD; e++) out[e] *= shrink;
        for (int i = 0; i < n; i++) {
            const T *value = cache_row(t.v, t, g, first + i);
#pragma unroll
            for (int e = 0; e < PER_THREAD; e++) {
                int at = threadIdx.x + e * THREADS;
                if (at < t.d) out[e] += share[i] * lazy_wide(value[at]);
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int e = 0; e < PER_THREAD; e++) {
        int at = threadIdx.x + e * THREADS;
        if (at >= t.d) break;
        if (t.chunks == 1) lazy_narrow(&t.y[((int64_t)row * t.n_heads + head) * t.d + at], out[e] / sum);
        else partial_of(t, row, head, chunk)[at] = out[e];
    }
    if (t.chunks > 1 && threadIdx.x == 0) {
        partial_of(t, row, head, chunk)[t.d] = most;
        partial_of(t, row, head, chunk)[t.d + 1] = sum;
    }
}
} // namespace

template <class T> cudaError_t lazy_cuda_attend_plainly(const attention_task<T> &t, const lazy_queue &queue)
{
    return lazy_launch(attend<T>, dim3(t.n, t.n_heads, t.chunks), dim3(THREADS), 0, queue, t);
}

template cudaError_t lazy_cuda_attend_plainly(const attention_task<float> &, const lazy_queue &);
template cudaError_t lazy_cuda_attend_plainly(const attention_task<__half> &, const lazy_queue &);
template cudaError_t lazy_cuda_attend_plainly(const attention_task<__nv_bfloat16> &, const lazy_queue &);
