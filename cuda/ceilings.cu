/* ceilings.cu — the device's peak rates for benchmarks: a large cuBLASLt matrix product, and one pass over memory. */
#include "values.h"

namespace
{
enum {
    THREADS = 256,
    BLOCKS_PER_PROCESSOR = 8,
    PRODUCTS = 64,           /* per run, so that launch and wait overhead is negligible */
    SIZE_PER_PROCESSOR = 64, /* rows and columns of the matrices: about 8192 on the largest devices */
};

/* Pseudo-random words: the bits in `mask` vary, those in `bits` are set. */
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
    if (sum == 0x9e3779b9u) *sink = 1; /* almost never true: keeps the compiler from removing the loads */
}

unsigned blocks(lazy_stream *stream) { return (unsigned)lazy_cuda_of(stream)->processors * BLOCKS_PER_PROCESSOR; }
} // namespace

int lazy_cuda_multiply_adds(lazy_stream *stream, double *flops, lazy_error *err)
{
    lazy_cuda *cuda = lazy_cuda_of(stream);
    int side = cuda->processors * SIZE_PER_PROCESSOR;
    size_t width = lazy_activation_bytes(&cuda->base), words = (size_t)side * (size_t)side * width / sizeof(uint32_t);
    /* random sign and fraction, magnitudes in [0.5, 1): two 16-bit values or one f32 per word */
    uint32_t mask = cuda->type == LAZY_F32 ? 0x807fffffu : 0x807f807fu, bits = cuda->type == LAZY_F32    ? 0x3f000000u
                                                                               : cuda->type == LAZY_BF16 ? 0x3f003f00u
                                                                                                         : 0x38003800u;
    const lazy_ops *ops = stream->backend->ops;
    void *x = nullptr, *w = nullptr, *y = nullptr;
    char last;
    int code = ops->alloc(stream->backend, &x, words * sizeof(uint32_t), "a product", err);
    if (!code) code = ops->alloc(stream->backend, &w, words * sizeof(uint32_t), "a product", err);
    if (!code) code = ops->alloc(stream->backend, &y, words * sizeof(uint32_t), "a product", err);
    if (!code)
        code = lazy_cuda_op(stream, "filling a product", err, [&](cudaStream_t queue) {
            cudaError_t failed =
                lazy_launch(fill, dim3(blocks(stream)), dim3(THREADS), 0, queue, (uint32_t *)x, words, mask, bits);
            return failed == cudaSuccess ? lazy_launch(fill, dim3(blocks(stream)), dim3(THREADS), 0, queue,
                                                       (uint32_t *)w, words, mask, bits)
                                         : failed;
        });
    lazy_matrix weights = { { { w, side, cuda->type } }, 1, side, side, nullptr };
    for (int i = 0; i < PRODUCTS && !code; i++) code = ops->matmul(stream, y, x, side, &weights, false, err);
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
    int code = lazy_cuda_op(stream, "reading", err, [&](cudaStream_t queue) {
        return lazy_launch(read_all, dim3(blocks(stream)), dim3(THREADS), 0, queue, (const uint4 *)memory,
                           bytes / sizeof(uint4), s->count);
    });
    int32_t ignored;
    return code ? code : stream->backend->ops->download(stream, &ignored, s->count, sizeof ignored, err);
}
