/* products.cu — products with weight matrices: by cuBLASLt for many rows; by a GEMV kernel, which reads every weight
 * once for each group of rows, for few rows and for shapes that cuBLASLt refuses. */
#include <algorithm>
#include <type_traits>

#include "values.h"

namespace
{
enum {
    GEMV_ROWS = LAZY_GEMV_ROWS, /* of a group; one warp per column of y */
    WARPS = 4,                  /* per block */
    THREADS = 256,
    MAX_GROUPS = 16, /* in one launch */
};

/* sum[r] += x[r, :cols] . w[:cols], this lane's elements only; f32 accumulation */
template <class T, int ROWS>
__device__ __forceinline__ void add_products(float (&sum)[ROWS], const T *x, int n, const T *w, int cols)
{
    constexpr int WIDE = 16 / sizeof(T);
    int lane = threadIdx.x % 32;
    if (cols % WIDE) { /* rows are not aligned to a pack */
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

/* activation(gate) * up. SiLU: x / (1 + exp(-x)). GELU, by its tanh form: x / (1 + exp(-2u)),
 * u = sqrt(2/pi) (x + 0.044715 x^3). */
__device__ __forceinline__ float gated_value(float gate, float up, bool gelu)
{
    constexpr float TWICE_ROOT = 1.5957691216f; /* 2 sqrt(2 / pi) */
    float x = gelu ? TWICE_ROOT * (gate + 0.044715f * gate * gate * gate) : gate;
    return gate / (1.0f + expf(-x)) * up;
}

template <class T> struct gemv_task {
    const T *x;        /* (n, cols) */
    const T *w;        /* (columns, cols), if gated (2 columns, cols): gate above up */
    const float *bias; /* (rows of w,) or NULL */
    int n, columns, cols;
    bool accumulate, gelu;
};

/* y: (n, columns), of type T or f32. Grid: (blocks of columns, groups of ROWS rows). */
template <class T, class Y, int ROWS, bool GATED>
__global__ void __launch_bounds__(32 * WARPS) gemv(Y *y, gemv_task<T> p)
{
    int column = blockIdx.x * WARPS + threadIdx.x / 32, first = blockIdx.y * ROWS, n = min(ROWS, p.n - first);
    if (column >= p.columns) return;
    const T *x = p.x + (int64_t)first * p.cols;
    float sum[ROWS] = {}, up[ROWS] = {};
    add_products(sum, x, n, p.w + (int64_t)column * p.cols, p.cols);
    if (GATED) add_products(up, x, n, p.w + (int64_t)(p.columns + column) * p.cols, p.cols);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        if (r >= n) break;
        float total = lazy_warp_sum(sum[r]) + (p.bias ? p.bias[column] : 0.0f);
        if (GATED)
            total = gated_value(total, lazy_warp_sum(up[r]) + (p.bias ? p.bias[p.columns + column] : 0.0f), p.gelu);
        Y *out = y + (int64_t)(first + r) * p.columns + column;
        if (threadIdx.x % 32 == 0) lazy_narrow(out, p.accumulate ? lazy_wide(*out) + total : total);
    }
}

/* lazy_cuda_multiply_pairs; columns: of y. Grid: (blocks of columns, pairs). */
template <class T, bool GATED>
__global__ void __launch_bounds__(32 * WARPS)
    multiply_pairs(T *y, const T *x, int share, const int32_t *chosen, const T *w, int columns, int cols, bool gelu)
{
    int column = blockIdx.x * WARPS + threadIdx.x / 32, pair = blockIdx.y;
    if (column >= columns) return;
    x += (int64_t)(pair / share) * cols;
    w += ((int64_t)chosen[pair] * (GATED ? 2 : 1) * columns + column) * cols;
    float sum[1] = {}, up[1] = {};
    add_products(sum, x, 1, w, cols);
    if (GATED) add_products(up, x, 1, w + (int64_t)columns * cols, cols);
    float total = lazy_warp_sum(sum[0]);
    if (GATED) total = gated_value(total, lazy_warp_sum(up[0]), gelu);
    if (threadIdx.x % 32 == 0) lazy_narrow(y + (int64_t)pair * columns + column, total);
}

template <class T, class Y, bool GATED> cudaError_t run_gemv(Y *y, gemv_task<T> p, cudaStream_t queue)
{
    dim3 block(32 * WARPS), grid((p.columns + WARPS - 1) / WARPS);
    if (p.n == 1) return lazy_launch(gemv<T, Y, 1, GATED>, grid, block, 0, queue, y, p);
    if (p.n == 2) return lazy_launch(gemv<T, Y, 2, GATED>, grid, block, 0, queue, y, p);
    cudaError_t failed = cudaSuccess;
    for (int left = p.n; left > 0 && failed == cudaSuccess; left -= GEMV_ROWS * MAX_GROUPS) {
        p.n = std::min(left, GEMV_ROWS * MAX_GROUPS);
        grid.y = (unsigned)(p.n + GEMV_ROWS - 1) / GEMV_ROWS;
        failed = lazy_launch(gemv<T, Y, GEMV_ROWS, GATED>, grid, block, 0, queue, y, p);
        p.x += (int64_t)p.n * p.cols;
        y += (int64_t)p.n * p.columns;
    }
    return failed;
}

/* y: (n, columns). Grid: (n, blocks of columns). */
template <class Y> __global__ void __launch_bounds__(THREADS) add_bias(Y *y, const float *bias, int columns)
{
    int column = blockIdx.y * THREADS + threadIdx.x;
    Y *at = y + (int64_t)blockIdx.x * columns + column;
    if (column < columns) lazy_narrow(at, lazy_wide(*at) + bias[column]);
}

/* y[n, F] = activation(gate) * up; gate_up: (n, 2 F), gate then up. A thread computes WIDE elements. Grid: (n, blocks
 * of elements). */
template <class T> __global__ void __launch_bounds__(THREADS) apply_gate(T *y, const T *gate_up, int ffn, bool gelu)
{
    constexpr int WIDE = 16 / sizeof(T);
    int first = (blockIdx.y * THREADS + threadIdx.x) * WIDE;
    const T *gate = gate_up + (int64_t)blockIdx.x * 2 * ffn + first, *up = gate + ffn;
    T *to = y + (int64_t)blockIdx.x * ffn + first;
    if (ffn % WIDE) { /* rows are not aligned to a pack */
        for (int i = 0; i < min(WIDE, ffn - first); i++)
            lazy_narrow(&to[i], gated_value(lazy_wide(gate[i]), lazy_wide(up[i]), gelu));
        return;
    }
    if (first >= ffn) return;
    lazy_pack<T> a = *reinterpret_cast<const lazy_pack<T> *>(gate), b = *reinterpret_cast<const lazy_pack<T> *>(up),
                 out;
#pragma unroll
    for (int i = 0; i < WIDE; i++)
        lazy_narrow(&out.value[i], gated_value(lazy_wide(a.value[i]), lazy_wide(b.value[i]), gelu));
    *reinterpret_cast<lazy_pack<T> *>(to) = out;
}

/* logits: (n, vocab). Grid: (n, blocks of columns). */
__global__ void __launch_bounds__(THREADS) cap_logits(float *logits, int vocab, float cap)
{
    int v = blockIdx.y * THREADS + threadIdx.x;
    if (v >= vocab) return;
    float *logit = logits + (int64_t)blockIdx.x * vocab + v;
    *logit = lazy_capped(*logit, cap);
}

dim3 blocks_of(int n, int columns, int per_block) { return dim3(n, (columns + per_block - 1) / per_block); }

/* The product by gemv; y as in `multiply`. */
template <class Y>
int multiply_by_gemv(lazy_stream *stream, Y *y, const void *x, int n, const lazy_matrix *w, bool accumulate,
                     lazy_error *err)
{
    return lazy_cuda_typed_op(stream, "GEMV", err, [&](auto type, cudaStream_t queue) {
        using T = decltype(type);
        gemv_task<T> p = { (const T *)x, (const T *)w->part[0].data, w->bias, n, w->rows, w->cols, accumulate, false };
        if constexpr (std::is_same_v<Y, float>) return run_gemv<T, float, false>(y, p, queue);
        else return run_gemv<T, T, false>((T *)y, p, queue);
    });
}

/* y[n, w->rows] (+)= x w^T + bias; y is f32 if Y is float, else (Y is void) of the backend's type. */
template <class Y>
int multiply(lazy_stream *stream, Y *y, const void *x, int n, const lazy_matrix *w, bool accumulate, lazy_error *err)
{
    if (n <= GEMV_ROWS) return multiply_by_gemv(stream, y, x, n, w, accumulate, err);
    cudaDataType_t type = lazy_cuda_data_type(lazy_cuda_of(stream)->type);
    bool refused = false;
    int code = lazy_cuda_enter(stream->backend, err);
    if (!code)
        code = lazy_gemm_run(lazy_cuda_of(stream)->gemm, lazy_cuda_scratch(stream)->queue, y, x, w->part[0].data, n,
                             w->rows, w->cols, accumulate, type, std::is_same_v<Y, float> ? CUDA_R_32F : type, &refused,
                             err);
    if (!code && refused) return multiply_by_gemv(stream, y, x, n, w, accumulate, err);
    if (code || !w->bias) return code;
    return lazy_cuda_typed_op(stream, "bias", err, [&](auto type, cudaStream_t queue) {
        using Out = std::conditional_t<std::is_same_v<Y, float>, float, decltype(type)>;
        return lazy_launch(add_bias<Out>, blocks_of(n, w->rows, THREADS), dim3(THREADS), 0, queue, (Out *)y, w->bias,
                           w->rows);
    });
}
} // namespace

int lazy_cuda_matmul(lazy_stream *stream, void *y, const void *x, int n, const lazy_matrix *w, bool accumulate,
                     lazy_error *err)
{
    return multiply(stream, y, x, n, w, accumulate, err);
}

int lazy_cuda_f32_product(lazy_stream *stream, float *y, const void *x, int n, const lazy_matrix *w, lazy_error *err)
{
    return multiply(stream, y, x, n, w, false, err);
}

int lazy_cuda_logits(lazy_stream *stream, float *y, const void *x, int n, const lazy_matrix *w, lazy_error *err)
{
    float cap = stream->config->logit_cap;
    int code = lazy_cuda_f32_product(stream, y, x, n, w, err);
    if (code || !cap) return code;
    return lazy_cuda_op(stream, "capping logits", err, [&](cudaStream_t queue) {
        return lazy_launch(cap_logits, blocks_of(n, w->rows, THREADS), dim3(THREADS), 0, queue, y, w->rows, cap);
    });
}

int lazy_cuda_gated(lazy_stream *stream, void *y, const void *x, int n, const lazy_matrix *gate_up, lazy_error *err)
{
    int ffn = gate_up->rows / 2;
    bool gelu = stream->config->gelu;
    if (n <= GEMV_ROWS)
        return lazy_cuda_typed_op(stream, "gated GEMV", err, [&](auto type, cudaStream_t queue) {
            using T = decltype(type);
            gemv_task<T> p = {
                (const T *)x, (const T *)gate_up->part[0].data, gate_up->bias, n, ffn, gate_up->cols, false, gelu
            };
            return run_gemv<T, T, true>((T *)y, p, queue);
        });
    void *product = lazy_cuda_scratch(stream)->gate_up;
    int code = multiply(stream, product, x, n, gate_up, false, err);
    if (code) return code;
    return lazy_cuda_typed_op(stream, "gate", err, [&](auto type, cudaStream_t queue) {
        using T = decltype(type);
        return lazy_launch(apply_gate<T>, blocks_of(n, ffn, THREADS * 16 / sizeof(T)), dim3(THREADS), 0, queue, (T *)y,
                           (const T *)product, ffn, gelu);
    });
}

int lazy_cuda_multiply_pairs(lazy_stream *stream, void *y, const void *x, int n, int share, const int32_t *chosen,
                             const lazy_matrix *w, bool gated, lazy_error *err)
{
    int columns = gated ? w->rows / 2 : w->rows;
    return lazy_cuda_typed_op(stream, "GEMV of experts", err, [&](auto type, cudaStream_t queue) {
        using T = decltype(type);
        return lazy_launch(gated ? multiply_pairs<T, true> : multiply_pairs<T, false>,
                           dim3((columns + WARPS - 1) / WARPS, n), dim3(32 * WARPS), 0, queue, (T *)y, (const T *)x,
                           share, chosen, (const T *)w->part[0].data, columns, w->cols, stream->config->gelu);
    });
}
