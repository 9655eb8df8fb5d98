/* attention_plain.cu — attention without tensor cores, for f32 and for head sizes that the other kernels do not
 * support. Of 128 keys at a time, each thread computes the score of one, then sums up to four elements of the output
 * over all. */
#include "attention.h"

namespace
{
enum {
    THREADS = 128, /* also the keys per step */
    MAX_D = 512,
    PER_THREAD = MAX_D / THREADS, /* output elements per thread */
};

/* q, key: (d,). 16-byte loads need d to be a multiple of WIDE, else the keys are not aligned. */
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

/* A block processes one head of one row over one chunk of keys. */
template <class T> __global__ void __launch_bounds__(THREADS) attend(attention_task<T> t)
{
    begin_kernel();
    __shared__ float q[MAX_D], powers[THREADS], scratch[32];
    int row = t.n - 1 - (int)blockIdx.x; /* rows with the most keys first */
    int head = blockIdx.y, chunk = blockIdx.z, g = head / t.group;
    lazy_key_range keys = keys_of_chunk(t, row, row, chunk);
    float out[PER_THREAD] = {}, max_score = -INFINITY, sum = 0.0f;
    for (int i = threadIdx.x; i < t.d; i += THREADS)
        q[i] = lazy_wide(t.q[(int64_t)row * t.q_stride + head * t.d + i]) * t.scale;
    __syncthreads();
    for (int first = keys.begin; first < keys.end; first += THREADS) {
        int j = first + (int)threadIdx.x, n = min((int)THREADS, keys.end - first);
        float score = j < keys.end ? lazy_capped(dot(q, cache_row(t.k, t, g, j), t.d), t.cap) : -INFINITY;
        float new_max = fmaxf(max_score, lazy_block_reduce(score, scratch, lazy_max())),
              rescale = exp2f(max_score - new_max), power = exp2f(score - new_max);
        powers[threadIdx.x] = power;
        /* the barriers of lazy_block_sum also make powers[] visible to the whole block */
        sum = sum * rescale + lazy_block_sum(power, scratch);
        max_score = new_max;
#pragma unroll
        for (int e = 0; e < PER_THREAD; e++) out[e] *= rescale;
        for (int i = 0; i < n; i++) {
            const T *value = cache_row(t.v, t, g, first + i);
#pragma unroll
            for (int e = 0; e < PER_THREAD; e++) {
                int at = threadIdx.x + e * THREADS;
                if (at < t.d) out[e] += powers[i] * lazy_wide(value[at]);
            }
        }
        __syncthreads();
    }
    int at = row * t.group + head % t.group;
    float *partial = partial_of(t, g, at, chunk);
#pragma unroll
    for (int e = 0; e < PER_THREAD; e++) {
        int i = threadIdx.x + e * THREADS;
        if (i >= t.d) break;
        if (t.chunks == 1) lazy_narrow(&output_of(t, g, at)[i], out[e] / sum);
        else partial[i] = out[e];
    }
    if (t.chunks == 1) return;
    if (threadIdx.x == 0) {
        partial[t.d] = max_score;
        partial[t.d + 1] = sum;
    }
    __syncthreads();
    if (threadIdx.x < 32) merge_if_last<MAX_D>(t, g, at, at + 1);
}
} // namespace

template <class T> cudaError_t lazy_cuda_attend_plain(const attention_task<T> &t, cudaStream_t queue)
{
    return lazy_launch(attend<T>, dim3(t.n, t.n_heads, t.chunks), dim3(THREADS), 0, queue, t);
}

template cudaError_t lazy_cuda_attend_plain(const attention_task<float> &, cudaStream_t);
template cudaError_t lazy_cuda_attend_plain(const attention_task<__half> &, cudaStream_t);
template cudaError_t lazy_cuda_attend_plain(const attention_task<__nv_bfloat16> &, cudaStream_t);
