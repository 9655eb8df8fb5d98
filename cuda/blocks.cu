/* blocks.cu — widens rows of quantized weights: for the embedding, and into panels for products of many rows. */
#include <type_traits>

#include "blocks.h"

namespace
{
enum { THREADS = 256 };

/* to[r, :] = scale * row ids[r] of w, or row r if ids is NULL; a thread widens a unit. to: (n, cols) */
template <class T, class B>
__global__ void __launch_bounds__(THREADS)
    widen_rows(T *to, const B *w, const int32_t *ids, int n, int cols, float scale)
{
    int i = blockIdx.x * THREADS + threadIdx.x, units = cols / LAZY_UNIT, r = i / units;
    if (r >= n) return;
    float values[LAZY_UNIT];
    T rounded;
    lazy_narrow(&rounded, scale);
    int first = lazy_widen_unit(values, w + (int64_t)(ids ? ids[r] : r) * (cols / lazy_block_values<B>), i % units);
    lazy_pack<T> packs[LAZY_UNIT * sizeof(T) / 16];
    constexpr int WIDE = 16 / sizeof(T), PER_RUN = 8 / WIDE;
#pragma unroll
    for (int k = 0; k < LAZY_UNIT; k++) lazy_narrow(&packs[k / WIDE].value[k % WIDE], values[k] * lazy_wide(rounded));
    T *at = to + (int64_t)r * cols + first;
#pragma unroll
    for (int k = 0; k < 2 * PER_RUN; k++)
        reinterpret_cast<lazy_pack<T> *>(at + k / PER_RUN * lazy_gap<B>)[k % PER_RUN] = packs[k];
}
} // namespace

int lazy_cuda_widen(lazy_stream *stream, void *to, const void *w, lazy_dtype dtype, const int32_t *ids, int n, int cols,
                    float scale, lazy_error *err)
{
    return lazy_cuda_typed_op(stream, "widening weights", err, [&](auto type, cudaStream_t queue) {
        using T = decltype(type);
        return lazy_with_format<T>(dtype, [&](auto block) {
            using B = decltype(block);
            if constexpr (std::is_same_v<B, T>) return cudaErrorInvalidValue;
            else
                return lazy_launch(widen_rows<T, B>, lazy_blocks(n * (cols / LAZY_UNIT), THREADS), dim3(THREADS), 0,
                                   queue, (T *)to, (const B *)w, ids, n, cols, scale);
        });
    });
}
