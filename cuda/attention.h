/* attention.h — one problem for every attention kernel, and how it is cut into tasks. */
#ifndef LAZY_CUDA_ATTENTION_H
#define LAZY_CUDA_ATTENTION_H

#include "limits.h"

/* Scores are to the base 2. A task's result is finished, or where there are chunks a partial one: outputs, maximum, sum. */
template <class T> struct attention_task {
    T *y;           /* (n, H D) */
    const T *qkv;   /* (n, width) */
    const T *k, *v; /* (G, capacity, D) */
    const int32_t *in_play, *limits;
    float *partial; /* (n, H, chunks, D + 2) */
    int n, m, n_heads, group, d, width, capacity;
    int chunk, chunks; /* keys in one task; one chunk means all of them */
    float scale;
};

template <class T> __device__ __forceinline__ const T *cache_row(const T *k_or_v, const attention_task<T> &t, int g, int j)
{
    return k_or_v + ((int64_t)g * t.capacity + t.in_play[j]) * t.d;
}

template <class T> __device__ __forceinline__ float *partial_of(const attention_task<T> &t, int row, int head, int chunk)
{
    return t.partial + (((int64_t)row * t.n_heads + head) * t.chunks + chunk) * (t.d + 2);
}

/* attention_plain.cu: any type, any head. attention_mma.cu: 16 bits, heads of 64, 80, 96, 128, on tensor cores. attention_sm90a.cu: 16 bits,
 * heads of 64 and 128, on tensor cores of compute capability 9.0. */
template <class T> cudaError_t lazy_cuda_attend_plainly(const attention_task<T> &t, const lazy_queue &queue);
template <class T> cudaError_t lazy_cuda_attend_by_mma(const attention_task<T> &t, const lazy_queue &queue);
template <class T> cudaError_t lazy_cuda_attend_by_wgmma(const attention_task<T> &t, const lazy_queue &queue);
bool lazy_cuda_mma_takes(int head_dim);
bool lazy_cuda_wgmma_takes(int head_dim);

#endif
