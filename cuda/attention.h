/* attention.h — the arguments shared by all attention kernels, and how the work is split into blocks. */
#ifndef LAZY_CUDA_ATTENTION_H
#define LAZY_CUDA_ATTENTION_H

#include "ranges.h"

enum { KEY_UNIT = 64 /* lengths of chunks are multiples of this, and of the keys that a kernel processes per step */ };

/* Scores are scaled for powers of 2. A block processes one chunk of the keys that its rows attend to. With one chunk
 * the kernel writes y. With several, each block writes the unnormalised outputs, maximum score and sum of powers of its
 * chunk to `partial`, and merge_chunks writes y. */
template <class T> struct attention_task {
    T *y;                                         /* (n, H D) */
    const T *qkv;                                 /* (n, width) */
    const T *k, *v;                               /* (G, capacity, D) */
    const int32_t *in_play;                       /* (m,) positions */
    const lazy_key_range *ranges;                 /* (n,) what each row attends to; both ends ascend with the rows */
    float *partial;                               /* (n, H, chunks, D + 2) */
    int n, m, n_heads, group, d, width, capacity; /* group: H / G; width: (H + 2G) D */
    int chunks;                                   /* into which each block's keys are split */
    float scale;                                  /* log2(e) / sqrt(query_scalar) */
    float cap;                                    /* of scaled products; 0: none */
};

/* (D,) the key or value of in_play[j] in key head g. */
template <class T>
__device__ __forceinline__ const T *cache_row(const T *k_or_v, const attention_task<T> &t, int g, int j)
{
    return k_or_v + ((int64_t)g * t.capacity + t.in_play[j]) * t.d;
}

/* (D + 2,) outputs, maximum score, sum of powers. */
template <class T>
__device__ __forceinline__ float *partial_of(const attention_task<T> &t, int row, int head, int chunk)
{
    return t.partial + (((int64_t)row * t.n_heads + head) * t.chunks + chunk) * (t.d + 2);
}

/* The keys of one chunk of a block that computes the rows first … last; empty if begin >= end. */
template <class T>
__device__ __forceinline__ lazy_key_range keys_of_chunk(const attention_task<T> &t, int first, int last, int chunk)
{
    int begin = t.ranges[first].begin, end = t.ranges[last].end;
    int length = ((end - begin + t.chunks - 1) / t.chunks + KEY_UNIT - 1) / KEY_UNIT * KEY_UNIT;
    begin += chunk * length;
    return { begin, min(begin + length, end) };
}

/* The first key from `key` on that one of the rows *row … last attends to: key itself if all their ranges have begun
 * there, as they have without a window; else keys between the windows of scattered rows are skipped. Advances *row past
 * rows whose ranges have ended. */
template <class T> __device__ __forceinline__ int next_key(const attention_task<T> &t, int key, int *row, int last)
{
    if (t.ranges[last].begin <= key) return key;
    while (*row < last && t.ranges[*row].end <= key) ++*row;
    return max(key, t.ranges[*row].begin);
}

/* attention_plain.cu: any type, head_dim up to 512. attention_mma.cu: 16-bit types, head_dim 64, 80, 96, 128 or 256, on
 * tensor cores. attention_sm90a.cu: 16-bit types, head_dim 64 or 128, on the tensor cores of compute capability 9.0;
 * without a cap. */
template <class T> cudaError_t lazy_cuda_attend_plain(const attention_task<T> &t, cudaStream_t queue);
template <class T> cudaError_t lazy_cuda_attend_mma(const attention_task<T> &t, cudaStream_t queue);
template <class T> cudaError_t lazy_cuda_attend_wgmma(const attention_task<T> &t, cudaStream_t queue);
bool lazy_cuda_mma_supports(int head_dim);
/* The blocks that lazy_cuda_attend_mma uses for that many rows x heads of one key head. */
struct lazy_tiling {
    int rows;            /* rows x heads of one block */
    size_t shared_bytes; /* of one block */
};
lazy_tiling lazy_cuda_mma_tiling(int head_dim, int rows);
bool lazy_cuda_wgmma_supports(int head_dim);

#endif
