/* ceilings.cu — the peak rate of reading the device's memory, for benchmarks. */
#include "values.h"

namespace
{
enum {
    THREADS = 256,
    BLOCKS_PER_PROCESSOR = 8,
};

__global__ void __launch_bounds__(THREADS) read_all(const uint4 *memory, size_t n, int *sink)
{
    begin_kernel();
    unsigned sum = 0;
    for (size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += (size_t)gridDim.x * THREADS) {
        uint4 words = memory[i];
        sum += words.x ^ words.y ^ words.z ^ words.w;
    }
    if (sum == 0x9e3779b9u) *sink = 1; /* almost never true: keeps the compiler from removing the loads */
}

} // namespace

int lazy_cuda_read(lazy_stream *stream, const void *memory, size_t bytes, lazy_error *err)
{
    int blocks = lazy_cuda_of(stream)->processors * BLOCKS_PER_PROCESSOR;
    int code = lazy_cuda_run(stream, "reading", err, read_all, blocks, THREADS, (const uint4 *)memory,
                             bytes / sizeof(uint4), &lazy_cuda_scratch(stream)->found->count);
    return code ? code : lazy_cuda_wait(stream, err);
}
