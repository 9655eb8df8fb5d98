/* scan.h — prefix count within a block, in thread order; used to filter lists without changing their order. */
#ifndef LAZY_CUDA_SCAN_H
#define LAZY_CUDA_SCAN_H

#include "values.h"

enum { SCAN_THREADS = 512, SCAN_WARPS = SCAN_THREADS / 32 };

struct scan_scratch { /* in shared memory */
    int of_warp[SCAN_WARPS];
};

/* The number of earlier threads with `yes`; *total = the number in the whole block of SCAN_THREADS threads. */
__device__ __forceinline__ int rank_in_block(bool yes, int *total, scan_scratch *scratch)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    unsigned votes = __ballot_sync(~0u, yes);
    __syncthreads(); /* an earlier call may still be reading scratch */
    if (lane == 0) scratch->of_warp[warp] = __popc(votes);
    __syncthreads();
    int before = __popc(votes & ((1u << lane) - 1));
    *total = 0;
#pragma unroll 4 /* full unrolling would spill registers */
    for (int w = 0; w < SCAN_WARPS; w++) {
        if (w < warp) before += scratch->of_warp[w];
        *total += scratch->of_warp[w];
    }
    return before;
}

#endif
