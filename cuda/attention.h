/* attention.h — the arguments shared by all attention kernels, and how the work is split into blocks. */
#pragma once

#include "values.h"

enum { KEY_UNIT = 16 /* keys are split at multiples of this from the first on */ };

/* Scores are scaled for powers of 2. A block processes one chunk of the keys that its rows attend to. With one chunk it
 * writes y. With several it writes the unnormalised outputs, maximum score and sum of powers of its chunk to `partial`,
 * and the warp that does so last for some rows merges all their chunks into y. */
template <class T> struct attention_task {
    T *y;                                         /* (n, H D) */
    const T *q;                                   /* (n, H D), rows q_stride values apart */
    const T *k, *v;                               /* (G, capacity, D) */
    const int32_t *in_play;                       /* (m,) positions */
    const lazy_key_range *ranges;                 /* (n,) what each row attends to; both ends ascend with the rows */
    float *partial;                               /* (G, n H / G, chunks, D + 2) */
    unsigned *tickets;                            /* (n H,) 0 before and after */
    int n, n_heads, group, d, q_stride, capacity; /* group: H / G */
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

/* (D,) The output of row x head `at` of key head g: of its head at % group in row at / group. */
template <class T> __device__ __forceinline__ T *output_of(const attention_task<T> &t, int g, int at)
{
    return t.y + ((int64_t)(at / t.group) * t.n_heads + g * t.group + at % t.group) * t.d;
}

/* (D + 2,) outputs, maximum score, sum of powers of row x head `at`. */
template <class T> __device__ __forceinline__ float *partial_of(const attention_task<T> &t, int g, int at, int chunk)
{
    return t.partial + (((int64_t)g * t.n * t.group + at) * t.chunks + chunk) * (t.d + 2);
}

/* The keys of one chunk of a block that computes the rows first … last; empty if begin >= end. parts: into which each
 * chunk is split; `chunk` then counts these. */
template <class T>
__device__ __forceinline__ lazy_key_range keys_of_chunk(const attention_task<T> &t, int first, int last, int chunk,
                                                        int parts = 1)
{
    int begin = t.ranges[first].begin, end = t.ranges[last].end, units = (end - begin + KEY_UNIT - 1) / KEY_UNIT;
    int each = units / (t.chunks * parts), more = units % (t.chunks * parts);
    begin += (each * chunk + min(chunk, more)) * KEY_UNIT;
    return { begin, min(begin + (each + (chunk < more)) * KEY_UNIT, end) };
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

/* The state of a warp for one row and head: lane l holds the outputs l, l + 32, … */
template <int MAX_D> struct merged_row {
    float out[(MAX_D + 31) / 32] = {}, max_score = -INFINITY, sum = 0.0f;
};

/* Merges partial results, (n, d + 2), in their order. */
template <int MAX_D> __device__ __forceinline__ merged_row<MAX_D> merge(const float *partial, int n, int d)
{
    merged_row<MAX_D> row;
    int lane = (int)threadIdx.x % 32;
    for (int i = lane; i < n; i += 32) row.max_score = fmaxf(row.max_score, partial[i * (d + 2) + d]);
    row.max_score = lazy_warp_max(row.max_score);
    float base = row.max_score == -INFINITY ? 0.0f : row.max_score;
#pragma unroll(MAX_D <= 256 ? 4 : 1)
    for (int i = 0; i < n; i++, partial += d + 2) {
        float factor = exp2f(partial[d] - base);
        row.sum += partial[d + 1] * factor;
#pragma unroll
        for (int e = 0; e < (MAX_D + 31) / 32; e++)
            if (lane + 32 * e < d) row.out[e] += partial[lane + 32 * e] * factor;
    }
    return row;
}

template <int MAX_D, class T>
__device__ __forceinline__ void write_row(const attention_task<T> &t, int g, int at, const merged_row<MAX_D> &row)
{
    T *y = output_of(t, g, at);
#pragma unroll
    for (int e = 0, i = (int)threadIdx.x % 32; e < (MAX_D + 31) / 32; e++, i += 32)
        if (i < t.d) lazy_narrow(&y[i], row.out[e] / row.sum);
}

template <int MAX_D, class T>
__device__ __forceinline__ void write_partial(const attention_task<T> &t, int g, int at, int chunk,
                                              const merged_row<MAX_D> &row)
{
    float *partial = partial_of(t, g, at, chunk);
    int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int e = 0, i = lane; e < (MAX_D + 31) / 32; e++, i += 32)
        if (i < t.d) partial[i] = row.out[e];
    if (lane == 0) {
        partial[t.d] = row.max_score;
        partial[t.d + 1] = row.sum;
    }
}

/* By a warp that has written its chunk's results of the rows x heads first … end-1 of key head g: merges all chunks
 * into y if the others have been written too. */
template <int MAX_D, class T>
__device__ __forceinline__ void merge_if_last(const attention_task<T> &t, int g, int first, int end)
{
    __syncwarp(); /* all lanes have written */
    bool is_last = threadIdx.x % 32 == 0 && take_ticket(&t.tickets[g * t.n * t.group + first], (unsigned)t.chunks);
    if (!__ballot_sync(~0u, is_last)) return;
    __syncwarp(); /* lane 0 has seen the others' results */
    for (int at = first; at < end; at++) write_row(t, g, at, merge<MAX_D>(partial_of(t, g, at, 0), t.chunks, t.d));
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
    int at_once;         /* blocks of a multiprocessor, for all that registers allow */
};
lazy_tiling lazy_cuda_mma_tiling(int head_dim, int rows);
bool lazy_cuda_wgmma_supports(int head_dim);
