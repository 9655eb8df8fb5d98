/* products.cu — products with weights: many rows by cuBLASLt, few rows by reading every weight once. */
#include <type_traits>

#include "values.h"

namespace
{
enum {
    FEW = LAZY_FEW_ROWS, /* the products of so many are bound by reading weights: one warp a column of y */
    WARPS = 4,           /* of a block */
    THREADS = 256,
};

/* sum[r] += x[r, :cols] . w[:cols], this lane's share */
template <class T, int ROWS> __device__ __forceinline__ void add_products(float (&sum)[ROWS], const T *x, int n, const T *w, int cols)
{
    constexpr int WIDE = 16 / sizeof(T);
    int lane = threadIdx.x % 32;
    if (cols % WIDE) { /* rows that do not begin where a pack may */
        for (int k = lane; k < cols; k += 32)
            for (int r = 0; r < ROWS; r++)
                if (r < n) sum[r] += lazy_wide(w[k]) * lazy_wide(x[(int64_t)r * cols + k]);
        return;
    }
#pragma unroll 4
    for (int k = lane * WIDE; k < cols; k += 32 * WIDE) {
        lazy_pack<T> weights = *reinterpret_cast<const lazy_pack<T> *>(w + k);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (r >= n) break;
            lazy_pack<T> values = *reinterpret_cast<const lazy_pack<T> *>(x + (int64_t)r * cols + k);
#pragma unroll
            for (int i = 0; i < WIDE; i++) sum[r] += lazy_wide(weights.value[i]) * lazy_wide(values.value[i]);
        }
    }
}

__device__ __forceinline__ float swiglu(float gate, float up) { return gate / (1.0f + expf(-gate)) * up; }

template <class T> struct few_product {
    const T *x;        /* (n, cols) */
    const T *w;        /* (columns, cols), where gated another as large below it */
    const float *bias; /* as many as w has rows, or NULL */
    int n, columns, cols;
    bool accumulate;
};

/* y[n, columns], of T or f32 */
template <class T, class Y, int ROWS, bool GATED> __global__ void __launch_bounds__(32 * WARPS) multiply_few(Y *y, few_product<T> p)
{
    int column = blockIdx.x * WARPS + threadIdx.x / 32;
    if (column >= p.columns) return;
    float sum[ROWS] = {}, up[ROWS] = {};
    add_products(sum, p.x, p.n, p.w + (int64_t)column * p.cols, p.cols);
    if (GATED) add_products(up, p.x, p.n, p.w + (int64_t)(p.columns + column) * p.cols, p.cols);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        if (r >= p.n) break;
        float total = lazy_warp_sum(sum[r]) + (p.bias ? p.bias[column] : 0.0f);
        if (GATED) total = swiglu(total, lazy_warp_sum(up[r]) + (p.bias ? p.bias[p.columns + column] : 0.0f));
        Y *out = y + (int64_t)r * p.columns + column;
        if (threadIdx.x % 32 == 0) lazy_narrow(out, p.accumulate ? lazy_wide(*out) + total : total);
    }
}

template <class T, class Y, bool GATED> cudaError_t run_few(Y *y, const few_product<T> &p, const lazy_queue &queue)
{
    dim3 grid((p.columns + WARPS - 1) / WARPS), block(32 * WARPS);
    if (p.n == 1) return lazy_launch(multiply_few<T, Y, 1, GATED>, grid, block, 0, queue, y, p);
    if (p.n == 2) return lazy_launch(multiply_few<T, Y, 2, GATED>, grid, block, 0, queue, y, p);
    return lazy_launch(multiply_few<T, Y, FEW, GATED>, grid, block, 0, queue, y, p);
}

template <class Y> __global__ void __launch_bounds__(THREADS) add_bias(Y *y, const float *bias, int64_t size, int columns)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i < size) lazy_narrow(&y[i], lazy_wide(y[i]) + bias[i % columns]);
}

/* both: (n, 2 F) */
template <class T> __global__ void __launch_bounds__(THREADS) join_gate(T *y, const T *both, int64_t size, int ffn)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= size) return;
    const T *gate = both + i / ffn * 2 * ffn + i % ffn;
    lazy_narrow(&y[i], swiglu(lazy_wide(gate[0]), lazy_wide(gate[ffn])));
}

dim3 blocks_for(int64_t size) { return dim3((unsigned)((size + THREADS - 1) / THREADS)); }

/* y[n, w->rows] (+)= x w^T + bias; y as wide as activations, or f32. */
template <class Y> int multiply(lazy_stream *stream, Y *y, const void *x, int n, const lazy_matrix *w, bool accumulate, lazy_error *err)
{
    const void *weights = w->part[0].data;
    if (n <= FEW)
        return lazy_cuda_typed_op(stream, "product of few rows", err, [&](auto type, const lazy_queue &queue) {
            using T = decltype(type);
            few_product<T> p = { (const T *)x, (const T *)weights, w->bias, n, w->rows, w->cols, accumulate };
            if constexpr (std::is_same_v<Y, float>) return run_few<T, float, false>(y, p, queue);
            else return run_few<T, T, false>((T *)y, p, queue);
        });
    int code = lazy_cuda_settle(stream, err);
    cudaDataType_t type = lazy_cuda_data_type(lazy_cuda_of(stream)->type);
    if (!code)
        code = lazy_gemm_run(lazy_cuda_scratch(stream)->gemm, y, x, weights, n, w->rows, w->cols, accumulate, type,
                             std::is_same_v<Y, float> ? CUDA_R_32F : type, err);
    if (code || !w->bias) return code;
    int64_t size = (int64_t)n * w->rows;
    return lazy_cuda_typed_op(stream, "bias", err, [&](auto type, const lazy_queue &queue) {
        using Out = std::conditional_t<std::is_same_v<Y, float>, float, decltype(type)>;
        return lazy_launch(add_bias<Out>, blocks_for(size), dim3(THREADS), 0, queue, (Out *)y, w->bias, size, w->rows);
    });
}
} // namespace

int lazy_cuda_matmul(lazy_stream *stream, void *y, const void *x, int n, const lazy_matrix *w, bool accumulate, lazy_error *err)
{
    return multiply(stream, y, x, n, w, accumulate, err);
}

int lazy_cuda_logits(lazy_stream *stream, float *y, const void *x, int n, const lazy_matrix *w, lazy_error *err)
{
    return multiply(stream, y, x, n, w, false, err);
}

int lazy_cuda_gated(lazy_stream *stream, void *y, const void *x, int n, const lazy_matrix *gate_up, lazy_error *err)
{
    int ffn = gate_up->rows / 2;
    if (n <= FEW)
        return lazy_cuda_typed_op(stream, "gated product of few rows", err, [&](auto type, const lazy_queue &queue) {
            using T = decltype(type);
            few_product<T> p = { (const T *)x, (const T *)gate_up->part[0].data, gate_up->bias, n, ffn, gate_up->cols, false };
            return run_few<T, T, true>((T *)y, p, queue);
        });
    void *both = lazy_cuda_scratch(stream)->gate_up;
    int code = multiply(stream, both, x, n, gate_up, false, err);
    if (code) return code;
    int64_t size = (int64_t)n * ffn;
    return lazy_cuda_typed_op(stream, "SwiGLU", err, [&](auto type, const lazy_queue &queue) {
        using T = decltype(type);
        return lazy_launch(join_gate<T>, blocks_for(size), dim3(THREADS), 0, queue, (T *)y, (const T *)both, size, ffn);
    });
}
