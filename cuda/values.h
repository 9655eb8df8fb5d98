/* values.h — conversion of the three element types to and from float, launches of ops, a search, and reductions over
 * warps and blocks. */
#pragma once

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

/* How many blocks of `size` it takes for n. */
__host__ __device__ constexpr int lazy_blocks(int n, int size) { return (n + size - 1) / size; }

/* Launches a kernel without dynamic shared memory on the stream's device. */
template <class... P, class... A>
int lazy_cuda_run(lazy_stream *stream, const char *what, lazy_error *err, void (*kernel)(P...), dim3 grid, int threads,
                  A &&...args)
{
    int code = lazy_cuda_enter(stream->backend, err);
    if (code) return code;
    cudaStream_t queue = lazy_cuda_scratch(stream)->queue;
    return lazy_cuda_check(lazy_launch(kernel, grid, dim3(threads), 0, queue, std::forward<A>(args)...), what, err);
}

/* Calls use(a value of the backend's type). */
template <class F> int lazy_cuda_with_type(const lazy_stream *stream, F use)
{
    lazy_dtype type = lazy_cuda_of(stream)->type;
    return type == LAZY_F16 ? use(__half{}) : type == LAZY_BF16 ? use(__nv_bfloat16{}) : use(float{});
}

/* The index of the first of n ascending values that is at least `value`; n if none is. */
__device__ __forceinline__ int lazy_first_from(const int32_t *list, int n, int value)
{
    int low = 0, high = n;
    while (low < high) {
        int middle = (low + high) / 2;
        if (list[middle] < value) low = middle + 1;
        else high = middle;
    }
    return low;
}

struct lazy_add {
    template <class T> __device__ __forceinline__ T operator()(T a, T b) const { return a + b; }
};
struct lazy_max {
    __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

/* The values of `lanes` neighbouring threads (a power of 2) put together, for each of them; the whole warp calls it.
 * Not a memory barrier. */
template <class T, class F> __device__ __forceinline__ T lazy_warp_reduce(T value, F put_together, int lanes = 32)
{
    for (int step = lanes / 2; step; step /= 2) value = put_together(value, __shfl_xor_sync(~0u, value, step));
    return value;
}
template <class T> __device__ __forceinline__ T lazy_warp_sum(T value) { return lazy_warp_reduce(value, lazy_add()); }
__device__ __forceinline__ float lazy_warp_max(float value) { return lazy_warp_reduce(value, lazy_max()); }

/* The same over the block. scratch: (32,) in shared memory. */
template <class T, class F> __device__ __forceinline__ T lazy_block_reduce(T value, T *scratch, F put_together)
{
    value = lazy_warp_reduce(value, put_together);
    int warps = lazy_blocks((int)blockDim.x, 32);
    __syncthreads(); /* an earlier call may still be reading scratch */
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
    __syncthreads();
    T total = scratch[0];
    for (int w = 1; w < warps; w++) total = put_together(total, scratch[w]);
    return total;
}
template <class T> __device__ __forceinline__ T lazy_block_sum(T value, T *scratch)
{
    return lazy_block_reduce(value, scratch, lazy_add());
}

__device__ __forceinline__ __nv_bfloat162 narrow_pair(float low, float high, __nv_bfloat16)
{
    return __floats2bfloat162_rn(low, high);
}
__device__ __forceinline__ __half2 narrow_pair(float low, float high, __half) { return __floats2half2_rn(low, high); }

/* Packs two values into the lower and the upper half of a register. */
template <class T> __device__ __forceinline__ uint32_t pair_of(float low, float high)
{
    auto pair = narrow_pair(low, high, T{});
    uint32_t bits;
    memcpy(&bits, &pair, sizeof bits);
    return bits;
}
