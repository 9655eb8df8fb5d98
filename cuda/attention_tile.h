/* attention_tile.h — what a warp does with 16 rows of scores and of outputs, which mma.sync and wgmma leave in the same places:
 * lane l has, in x[j], [l / 4][8j + 2 (l % 4) and the one after], then the same of row l / 4 + 8. Rows are rows x heads of a tile. */
#ifndef LAZY_CUDA_ATTENTION_TILE_H
#define LAZY_CUDA_ATTENTION_TILE_H

#include "attention.h"

/* Of the two rows that a lane has elements of. */
struct row_pair {
    int limit[2]; /* keys in sight */
    float most[2] = { -INFINITY, -INFINITY } /* dot products, not scaled yet */, sum[2] = {};
};

__device__ __forceinline__ __nv_bfloat162 narrow_pair(float low, float high, __nv_bfloat16) { return __floats2bfloat162_rn(low, high); }
__device__ __forceinline__ __half2 narrow_pair(float low, float high, __half) { return __floats2half2_rn(low, high); }

/* Two values in the lower and the upper half of a register. */
template <class T> __device__ __forceinline__ uint32_t pair_of(float low, float high)
{
    auto pair = narrow_pair(low, high, T{});
    uint32_t bits;
    memcpy(&bits, &pair, sizeof bits);
    return bits;
}

/* The left operand of a product by values: the shares of keys 16j … 16j+15 for `shares` = s[2j], `more` = s[2j + 1]. */
template <class T> __device__ __forceinline__ void narrow_shares(uint32_t (&to)[4], const float (&shares)[4], const float (&more)[4])
{
    to[0] = pair_of<T>(shares[0], shares[1]);
    to[1] = pair_of<T>(shares[2], shares[3]);
    to[2] = pair_of<T>(more[0], more[1]);
    to[3] = pair_of<T>(more[2], more[3]);
}

/* The four lanes that hold one row. */
__device__ __forceinline__ float most_of_row(float x)
{
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float sum_of_row(float x)
{
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

template <class T> __device__ __forceinline__ row_pair rows_of_lane(const attention_task<T> &t, int warp_top)
{
    row_pair rows;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int at = min(warp_top + (int)threadIdx.x % 32 / 4 + 8 * half, t.n * t.group - 1);
        rows.limit[half] = t.limits[at / t.group];
    }
    return rows;
}

/* s[j] is of keys first + 8j … first + 8j + 7 */
template <int N> __device__ __forceinline__ void hide_unseen(float (&s)[N][4], const row_pair &rows, int first)
{
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (first + 8 * j + lane % 4 * 2 + e % 2 >= rows.limit[e / 2]) s[j][e] = -INFINITY;
}

/* Turns dot products with keys first … first+8N-1 into powers and takes maxima and sums along; outputs so far are to be multiplied by
 * shrink. */
template <int N>
__device__ __forceinline__ void soften(float (&s)[N][4], row_pair &rows, float (&shrink)[2], int first, float scale, bool all_visible)
{
    if (!all_visible) hide_unseen(s, rows, first);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float highest = rows.most[half];
#pragma unroll
        for (int j = 0; j < N; j++) highest = fmaxf(highest, fmaxf(s[j][2 * half], s[j][2 * half + 1]));
        highest = most_of_row(highest);
        float base = highest == -INFINITY ? 0.0f : highest * scale, total = 0.0f;
        shrink[half] = fast_exp2f(fmaf(rows.most[half], scale, -base));
        rows.most[half] = highest;
#pragma unroll
        for (int j = 0; j < N; j++)
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; e++) total += s[j][e] = fast_exp2f(fmaf(s[j][e], scale, -base));
        rows.sum[half] = rows.sum[half] * shrink[half] + total; /* this lane's share: rows are summed up at the end */
    }
}

template <int N> __device__ __forceinline__ void shrink_outputs(float (&out)[N][4], const float (&shrink)[2])
{
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) out[i][e] *= shrink[e / 2];
}

/* Finished, or as one chunk's part. */
template <class T, int N>
__device__ __forceinline__ void write_rows(const attention_task<T> &t, const float (&out)[N][4], const row_pair &rows, int warp_top, int g,
                                           int chunk)
{
    constexpr int D = 8 * N;
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int at = warp_top + lane / 4 + 8 * half, row = at / t.group, head = g * t.group + at % t.group;
        float total = sum_of_row(rows.sum[half]);
        if (at >= t.n * t.group) continue;
        T *y = t.y + ((int64_t)row * t.n_heads + head) * D;
        float *partial = partial_of(t, row, head, chunk);
#pragma unroll
        for (int i = 0; i < N; i++) {
            int element = 8 * i + lane % 4 * 2;
            float a = out[i][2 * half], b = out[i][2 * half + 1];
            if (t.chunks == 1) {
                *reinterpret_cast<uint32_t *>(y + element) = pair_of<T>(a / total, b / total);
            } else {
                partial[element] = a;
                partial[element + 1] = b;
            }
        }
        if (t.chunks > 1 && lane % 4 == 0) {
            partial[D] = rows.most[half] * t.scale;
            partial[D + 1] = total;
        }
    }
}

#endif
