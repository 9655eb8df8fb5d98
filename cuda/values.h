/* values.h — elements of the three types that a backend may compute in, as floats. */
#ifndef LAZY_CUDA_VALUES_H
#define LAZY_CUDA_VALUES_H

#include <utility>

#include "cuda.h"
#include "kernel.h"

__host__ __device__ __forceinline__ float lazy_wide(float x) { return x; }
__host__ __device__ __forceinline__ float lazy_wide(__half x) { return __half2float(x); }
__host__ __device__ __forceinline__ float lazy_wide(__nv_bfloat16 x) { return __bfloat162float(x); }

__host__ __device__ __forceinline__ void lazy_narrow(float *to, float x) { *to = x; }
__host__ __device__ __forceinline__ void lazy_narrow(__half *to, float x) { *to = __float2half(x); }
__host__ __device__ __forceinline__ void lazy_narrow(__nv_bfloat16 *to, float x) { *to = __float2bfloat16(x); }

/* What one load brings at most. */
template <class T> struct alignas(16) lazy_pack {
    T value[16 / sizeof(T)];
};

/* A launch of an op: started, or written down to be started with others. */
template <class... P, class... A>
cudaError_t lazy_launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes, const lazy_queue &queue, A &&...args)
{
    static_assert(sizeof...(P) <= GRAPH_MOST_ARGUMENTS && (0 + ... + ((sizeof(P) + 15) / 16 * 16)) <= GRAPH_ARGUMENT_BYTES);
    if (!queue.graphs) return lazy_launch(kernel, grid, block, shared_bytes, queue.stream, std::forward<A>(args)...);
    cudaError_t code = lazy_prepare(kernel, shared_bytes);
    if (code != cudaSuccess) return code;
    lazy_graph_launch *launch = lazy_graphs_add(queue.graphs);
    if (!launch) return cudaErrorLaunchOutOfResources;
    launch->kernel = (const void *)kernel;
    launch->grid = grid;
    launch->block = block;
    launch->shared_bytes = shared_bytes;
    launch->what = queue.what;
    launch->layers_done = queue.layers_done;
    (launch->add(static_cast<P>(args)), ...);
    return cudaSuccess;
}

/* An op: what `launch` starts on the stream's queue, on the stream's device. */
template <class F> int lazy_cuda_op(lazy_stream *stream, const char *what, lazy_error *err, F launch)
{
    lazy_queue queue;
    int code = lazy_cuda_queue(stream, what, &queue, err);
    return code ? code : lazy_cuda_check(launch(queue), what, err);
}

/* The same for launches that are made for the backend's type, of which they get a value first. */
template <class F> int lazy_cuda_typed_op(lazy_stream *stream, const char *what, lazy_error *err, F launch)
{
    return lazy_cuda_op(stream, what, err, [&](const lazy_queue &queue) {
        switch (lazy_cuda_of(stream)->type) {
        case LAZY_F16: return launch(__half{}, queue);
        case LAZY_BF16: return launch(__nv_bfloat16{}, queue);
        case LAZY_F32: break;
        }
        return launch(float{}, queue);
    });
}

/* The sum over the warp, known to all of its threads. Orders no memory. */
template <class T> __device__ __forceinline__ T lazy_warp_sum(T value)
{
    for (int step = 16; step; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
}

/* Sums and maxima over the block, known to all of its threads afterwards. `room` is shared, 32 values. */
template <class T> __device__ __forceinline__ T lazy_block_sum(T value, T *room)
{
    value = lazy_warp_sum(value);
    int warps = ((int)blockDim.x + 31) / 32;
    __syncthreads(); /* the room may still be read from */
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = value;
    __syncthreads();
    T total = room[0];
    for (int w = 1; w < warps; w++) total += room[w];
    return total;
}

__device__ __forceinline__ float lazy_block_max(float value, float *room)
{
    for (int step = 16; step; step /= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, step));
    int warps = ((int)blockDim.x + 31) / 32;
    __syncthreads();
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = value;
    __syncthreads();
    float most = room[0];
    for (int w = 1; w < warps; w++) most = fmaxf(most, room[w]);
    return most;
}

#endif
