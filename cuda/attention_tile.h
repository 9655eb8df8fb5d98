/* attention_tile.h — softmax and output of a warp's 16 rows, shared by the mma.sync and wgmma kernels, which use one
 * register layout: x[j] of lane l holds columns 8j + 2 (l % 4) and 8j + 2 (l % 4) + 1 of row l / 4 (x[j][0], x[j][1])
 * and of row l / 4 + 8 (x[j][2], x[j][3]). Rows are rows x heads of a tile. */
#pragma once

#include "attention.h"

/* Softmax so far of the two rows that a lane holds elements of. */
struct row_pair {
    lazy_key_range keys[2]; /* keys of the block's chunk that the row attends to; both ends ascend */
    float max_score[2] = { -INFINITY, -INFINITY }; /* of the unscaled dot products */
    float sum[2] = {};                             /* of this lane's powers */
};

/* Packs the powers of 16 keys, low = s[2j] and high = s[2j + 1], as a left operand of the product with V. */
template <class T>
__device__ __forceinline__ void narrow_step(uint32_t (&p)[4], const float (&low)[4], const float (&high)[4])
{
    p[0] = pair_of<T>(low[0], low[1]);
    p[1] = pair_of<T>(low[2], low[3]);
    p[2] = pair_of<T>(high[0], high[1]);
    p[3] = pair_of<T>(high[2], high[3]);
}

/* Maximum and sum over the four lanes that hold one row. */
__device__ __forceinline__ float max_of_row(float x)
{
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float sum_of_row(float x)
{
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

template <class T>
__device__ __forceinline__ row_pair rows_of_lane(const attention_task<T> &t, int warp_top, int end_of_chunk)
{
    row_pair rows;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int at = min(warp_top + (int)threadIdx.x % 32 / 4 + 8 * half, t.n * t.group - 1);
        rows.keys[half] = t.ranges[at / t.group];
        rows.keys[half].end = min(rows.keys[half].end, end_of_chunk);
    }
    return rows;
}

/* Masks the keys that a row does not attend to; s[j] holds keys first + 8j … first + 8j + 7. */
template <int N> __device__ __forceinline__ void hide_unseen(float (&s)[N][4], const row_pair &rows, int first)
{
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int key = first + 8 * j + lane % 4 * 2 + e % 2;
            if (key < rows.keys[e / 2].begin || key >= rows.keys[e / 2].end) s[j][e] = -INFINITY;
        }
}

/* Caps unscaled dot products: x becomes c tanh(x / c) = c - 2 c / (1 + exp(2 x / c)), or NaN where it is infinite. The
 * error is relative to c, and far below that of 16-bit operands. */
template <int N> __device__ __forceinline__ void cap_products(float (&s)[N][4], float c)
{
    float to_power = 2.0f * (float)M_LOG2E / c;
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            s[j][e] = c - __fdividef(2.0f * c, 1.0f + fast_exp2f(s[j][e] * to_power)) + (s[j][e] - s[j][e]);
}

/* Replaces the dot products with keys first … first+8N-1 by powers of 2 relative to the running maximum, and updates
 * that maximum and the sum. The caller must multiply the outputs so far by rescale. */
template <int N>
__device__ __forceinline__ void online_softmax(float (&s)[N][4], row_pair &rows, float (&rescale)[2], int first,
                                               float scale, float cap)
{
    if (cap != 0.0f) cap_products(s, cap / scale);
    if (first < rows.keys[1].begin || first + 8 * N > rows.keys[0].end) hide_unseen(s, rows, first);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float new_max = rows.max_score[half];
#pragma unroll
        for (int j = 0; j < N; j++) new_max = fmaxf(new_max, fmaxf(s[j][2 * half], s[j][2 * half + 1]));
        new_max = max_of_row(new_max);
        float base = new_max == -INFINITY ? 0.0f : new_max * scale, total = 0.0f;
        rescale[half] = fast_exp2f(fmaf(rows.max_score[half], scale, -base));
        rows.max_score[half] = new_max;
#pragma unroll
        for (int j = 0; j < N; j++)
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; e++) total += s[j][e] = fast_exp2f(fmaf(s[j][e], scale, -base));
        rows.sum[half] = rows.sum[half] * rescale[half] + total; /* of this lane only: lanes are added in write_rows */
    }
}

template <int N> __device__ __forceinline__ void rescale_outputs(float (&out)[N][4], const float (&rescale)[2])
{
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) out[i][e] *= rescale[e / 2];
}

/* Writes unnormalised outputs, maximum and sum of the warp's row i to partial(i); NULL: not written. */
template <int N, class F>
__device__ __forceinline__ void write_partials(const float (&out)[N][4], const row_pair &rows, float scale, F partial)
{
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float *to = partial(lane / 4 + 8 * half), total = sum_of_row(rows.sum[half]);
        if (!to) continue;
#pragma unroll
        for (int i = 0; i < N; i++)
            *reinterpret_cast<float2 *>(to + 8 * i + lane % 4 * 2) = { out[i][2 * half], out[i][2 * half + 1] };
        if (lane % 4 == 0) *reinterpret_cast<float2 *>(to + 8 * N) = { rows.max_score[half] * scale, total };
    }
}

/* Writes y; of several chunks, writes this one's partial results, then y if the other chunks' are written. */
template <class T, int N>
__device__ __forceinline__ void write_rows(const attention_task<T> &t, const float (&out)[N][4], const row_pair &rows,
                                           int warp_top, int g, int chunk)
{
    int lane = threadIdx.x % 32, end = min(warp_top + 16, t.n * t.group);
    if (warp_top >= end) return;
    if (t.chunks > 1) {
        write_partials(out, rows, t.scale,
                       [&](int i) { return warp_top + i < end ? partial_of(t, g, warp_top + i, chunk) : nullptr; });
        merge_if_last<8 * N>(t, g, warp_top, end);
        return;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int at = warp_top + lane / 4 + 8 * half;
        float total = sum_of_row(rows.sum[half]);
        if (at >= end) continue;
        T *y = output_of(t, g, at);
#pragma unroll
        for (int i = 0; i < N; i++)
            *reinterpret_cast<uint32_t *>(y + 8 * i + lane % 4 * 2) =
                pair_of<T>(out[i][2 * half] / total, out[i][2 * half + 1] / total);
    }
}
