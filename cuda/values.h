/* values.h — conversion of the three element types to and from float, launches of ops, and reductions over warps and
 * blocks. */
#ifndef LAZY_CUDA_VALUES_H
#define LAZY_CUDA_VALUES_H

#include "cuda.h"
#include "kernel.h"

__host__ __device__ __forceinline__ float lazy_wide(float x) { return x; }
__host__ __device__ __forceinline__ float lazy_wide(__half x) { return __half2float(x); }
__host__ __device__ __forceinline__ float lazy_wide(__nv_bfloat16 x) { return __bfloat162float(x); }

__host__ __device__ __forceinline__ void lazy_narrow(float *to, float x) { *to = x; }
__host__ __device__ __forceinline__ void lazy_narrow(__half *to, float x) { *to = __float2half(x); }
__host__ __device__ __forceinline__ void lazy_narrow(__nv_bfloat16 *to, float x) { *to = __float2bfloat16(x); }

/* The larger of the two; a NaN if one is. */
__device__ __forceinline__ float lazy_larger(float a, float b) { return b <= a ? b != b ? b : a : a != a ? a : b; }

/* cap tanh(x / cap), or NaN where x is infinite; x itself if cap is 0. */
__device__ __forceinline__ float lazy_capped(float x, float cap)
{
    return cap != 0.0f ? cap * tanhf(x / cap) + (x - x) : x;
}

/* 16 bytes of values, the largest single load. */
template <class T> struct alignas(16) lazy_pack {
    T value[16 / sizeof(T)];
};

/* The grid of a thread for each of n. */
static inline dim3 lazy_blocks(int n, int threads) { return dim3((n + threads - 1) / threads); }

/* Runs an op: calls launch(queue) with the stream's device current. */
template <class F> int lazy_cuda_op(lazy_stream *stream, const char *what, lazy_error *err, F launch)
{
    int code = lazy_cuda_enter(stream->backend, err);
    return code ? code : lazy_cuda_check(launch(lazy_cuda_scratch(stream)->queue), what, err);
}

/* The same for kernels that depend on the backend's type: calls launch(value of that type, queue). */
template <class F> int lazy_cuda_typed_op(lazy_stream *stream, const char *what, lazy_error *err, F launch)
{
    return lazy_cuda_op(stream, what, err, [&](cudaStream_t queue) {
        switch (lazy_cuda_of(stream)->type) {
        case LAZY_F16: return launch(__half{}, queue);
        case LAZY_BF16: return launch(__nv_bfloat16{}, queue);
        case LAZY_F32:
        default: break;
        }
        return launch(float{}, queue);
    });
}

/* Sum over the warp, returned to all of its threads. Not a memory barrier. */
template <class T> __device__ __forceinline__ T lazy_warp_sum(T value)
{
    for (int step = 16; step; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
}

/* Sum and maximum over the block, returned to all of its threads. scratch: (32,) in shared memory. */
template <class T> __device__ __forceinline__ T lazy_block_sum(T value, T *scratch)
{
    value = lazy_warp_sum(value);
    int warps = ((int)blockDim.x + 31) / 32;
    __syncthreads(); /* an earlier call may still be reading scratch */
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
    __syncthreads();
    T total = scratch[0];
    for (int w = 1; w < warps; w++) total += scratch[w];
    return total;
}

__device__ __forceinline__ float lazy_block_max(float value, float *scratch)
{
    for (int step = 16; step; step /= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, step));
    int warps = ((int)blockDim.x + 31) / 32;
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
    __syncthreads();
    float max_value = scratch[0];
    for (int w = 1; w < warps; w++) max_value = fmaxf(max_value, scratch[w]);
    return max_value;
}

#endif
