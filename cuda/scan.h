/* scan.h — counting within a block, in the order of its threads: what keeps lists sorted. */
#ifndef LAZY_CUDA_SCAN_H
#define LAZY_CUDA_SCAN_H

#include "values.h"

enum { SCAN_THREADS = 512, SCAN_WARPS = SCAN_THREADS / 32 };

struct scan_room { /* in shared memory */
    int of_warp[SCAN_WARPS];
};

/* How many threads before this one say yes; *total of all. For blocks of SCAN_THREADS. */
__device__ __forceinline__ int rank_in_block(bool yes, int *total, scan_room *room)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    unsigned votes = __ballot_sync(~0u, yes);
    __syncthreads(); /* the room may still be read from */
    if (lane == 0) room->of_warp[warp] = __popc(votes);
    __syncthreads();
    int before = __popc(votes & ((1u << lane) - 1));
    *total = 0;
#pragma unroll 4 /* all at once would take more registers than there are */
    for (int w = 0; w < SCAN_WARPS; w++) {
        if (w < warp) before += room->of_warp[w];
        *total += room->of_warp[w];
    }
    return before;
}

#endif
