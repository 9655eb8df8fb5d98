/* ceilings.cu — the most that the device can do, for benchmarks: a large product of cuBLASLt, and one sweep over memory. */
#include "values.h"

namespace
{
enum {
    THREADS = 256,
    BLOCKS_PER_PROCESSOR = 8,
    PRODUCTS = 64,           /* of one run: what surrounds them must not count */
    SIZE_PER_PROCESSOR = 64, /* of the product's sides: about 8192 on the largest devices */
};

__global__ void __launch_bounds__(THREADS) fill(uint32_t *words, size_t n, uint32_t mask, uint32_t bits)
{
    for (size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += (size_t)gridDim.x * THREADS)
        words[i] = (((uint32_t)i * 2654435761u ^ (uint32_t)(i >> 7) * 40503u) & mask) | bits;
}

__global__ void __launch_bounds__(THREADS) read_all(const uint4 *memory, size_t n, int *sink)
{
    unsigned sum = 0;
    for (size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += (size_t)gridDim.x * THREADS) {
        uint4 words = memory[i];
        sum += words.x ^ words.y ^ words.z ^ words.w;
    }
    if (sum == 0x9e3779b9u) *sink = 1; /* hardly ever: only so that nothing is left out */
}

unsigned blocks(lazy_stream *stream) { return (unsigned)lazy_cuda_of(stream)->processors * BLOCKS_PER_PROCESSOR; }
} // namespace

int lazy_cuda_multiply_adds(lazy_stream *stream, double *flops, lazy_error *err)
{
    lazy_cuda *cuda = lazy_cuda_of(stream);
    int side = cuda->processors * SIZE_PER_PROCESSOR;
    size_t width = cuda->base.activation_bytes, words = (size_t)side * (size_t)side * width / sizeof(uint32_t);
    /* a sign and any fraction, exponents just below one: two of 16 bits, or one of 32, in each word */
    uint32_t mask = cuda->type == LAZY_F32 ? 0x807fffffu : 0x807f807fu, bits = cuda->type == LAZY_F32    ? 0x3f000000u
                                                                               : cuda->type == LAZY_BF16 ? 0x3f003f00u
                                                                                                         : 0x38003800u;
    cudaDataType_t type = lazy_cuda_data_type(cuda->type);
    const lazy_ops *ops = stream->backend->ops;
    void *x = nullptr, *w = nullptr, *y = nullptr;
    char last;
    int code = ops->alloc(stream->backend, &x, words * sizeof(uint32_t), "a product", err);
    if (!code) code = ops->alloc(stream->backend, &w, words * sizeof(uint32_t), "a product", err);
    if (!code) code = ops->alloc(stream->backend, &y, words * sizeof(uint32_t), "a product", err);
    if (!code)
        code = lazy_cuda_op(stream, "filling a product", err, [&](const lazy_queue &queue) {
            cudaError_t failed = lazy_launch(fill, dim3(blocks(stream)), dim3(THREADS), 0, queue, (uint32_t *)x, words, mask, bits);
            return failed == cudaSuccess
                       ? lazy_launch(fill, dim3(blocks(stream)), dim3(THREADS), 0, queue, (uint32_t *)w, words, mask, bits)
                       : failed;
        });
    for (int i = 0; i < PRODUCTS && !code; i++)
        code = lazy_gemm_run(lazy_cuda_scratch(stream)->gemm, y, x, w, side, side, side, false, type, type, err);
    if (!code) code = ops->download(stream, &last, y, 1, err); /* waits */
    *flops = 2.0 * side * side * side * PRODUCTS;
    ops->free(stream->backend, x);
    ops->free(stream->backend, w);
    ops->free(stream->backend, y);
    return code;
}

int lazy_cuda_read(lazy_stream *stream, const void *memory, size_t bytes, lazy_error *err)
{
    lazy_cuda_stream *s = lazy_cuda_scratch(stream);
    int code = lazy_cuda_op(stream, "reading", err, [&](const lazy_queue &queue) {
        return lazy_launch(read_all, dim3(blocks(stream)), dim3(THREADS), 0, queue, (const uint4 *)memory, bytes / sizeof(uint4), s->count);
    });
    int32_t waited;
    return code ? code : stream->backend->ops->download(stream, &waited, s->count, sizeof waited, err);
}
