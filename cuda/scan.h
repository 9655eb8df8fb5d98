/* scan.h — sums over the threads before each thread, in a block and in a grid; used to filter lists without changing
 * their order. */
#pragma once

#include "values.h"

enum { SCAN_THREADS = LAZY_TOKEN_BLOCK, SCAN_WARPS = SCAN_THREADS / 32 };

/* The sum of the values of earlier threads; *total = that of all SCAN_THREADS threads of the block. of_warp: at least
 * (SCAN_WARPS,) in shared memory. */
template <class T> __device__ __forceinline__ T sum_before(T value, T *total, T *of_warp)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    T before = value;
    for (int step = 1; step < 32; step *= 2) {
        T earlier = __shfl_sync(~0u, before, lane - step);
        if (lane >= step) before += earlier;
    }
    __syncthreads(); /* an earlier call may still be reading of_warp */
    if (lane == 31) of_warp[warp] = before;
    __syncthreads();
    before -= value;
    *total = 0;
#pragma unroll 4 /* full unrolling would spill registers */
    for (int w = 0; w < SCAN_WARPS; w++) {
        if (w < warp) before += of_warp[w];
        *total += of_warp[w];
    }
    return before;
}

/* The same over the grid, whose blocks' totals are known; over the block if `totals` is NULL. scratch: (32,) in shared
 * memory. */
template <class T> __device__ __forceinline__ T sum_before_in_grid(T value, const T *totals, T *scratch)
{
    T earlier = 0, total;
    for (int b = threadIdx.x; totals && b < (int)blockIdx.x; b += SCAN_THREADS) earlier += totals[b];
    earlier = lazy_block_sum(earlier, scratch);
    return earlier + sum_before(value, &total, scratch);
}
