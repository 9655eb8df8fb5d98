/* products.cu — products with weight matrices: by cuBLASLt for many rows of x; by a GEMV kernel for one row, and for
 * shapes that cuBLASLt refuses; for 2 to LAZY_FEW_ROWS rows of x and quantized weights by tensor cores, from blocks
 * that are widened in registers. Both kernels read quantized weights as they are stored; for cuBLASLt they are widened
 * first, a panel of rows at a time. With Q8_0 on an H100, a 7B model's decode step of 32 rows takes 4.8 ms longer than
 * one of a single row by the kernel, and 9.7 ms longer by cuBLASLt. */
#include <algorithm>

#include "blocks.h"

namespace
{
enum {
    WARPS = 4, /* per block of gemv */
    THREADS = 256,
    MAX_GRID = 32768,      /* rows in one launch of gemv */
    ALIGNED_COLUMNS = 128, /* cuBLASLt is faster where a panel's columns of y begin at a multiple of 256 bytes */
    FEW_COLUMNS = 16,      /* of a block of few_rows: rows of a left operand */
    FEW_WARPS = 8,         /* which share the sums over a row's length */
    TILE_ROWS = 8,         /* of x: columns of a right operand */
};

/* x . w, this lane's elements only, f32 accumulation */
template <class T, class W> __device__ __forceinline__ float dot_of_lane(const T *x, const W *w, int cols)
{
    constexpr bool PLAIN = lazy_block_values<W> == 1;
    constexpr int WIDE = 16 / sizeof(T), UNIT = PLAIN ? WIDE : LAZY_UNIT;
    /* Blocks are not unrolled, because a unit takes so many instructions that other warps hide its loads, the more of
     * them the fewer registers each has. */
    [[maybe_unused]] constexpr int UNROLLED = PLAIN ? 4 : 1;
    int lane = threadIdx.x % 32;
    float sum = 0.0f;
    if (PLAIN && cols % WIDE) { /* rows are not aligned to a pack */
        for (int k = lane; k < cols; k += 32)
            if constexpr (PLAIN) sum += lazy_wide(w[k]) * lazy_wide(x[k]);
        return sum;
    }
#pragma unroll UNROLLED
    for (int u = lane; u < cols / UNIT; u += 32) {
        float weights[UNIT];
        const T *at = x + lazy_widen_unit(weights, w, u);
#pragma unroll
        for (int k = 0; k < UNIT; k += WIDE) {
            lazy_pack<T> values = *reinterpret_cast<const lazy_pack<T> *>(at + lazy_place_in_unit<W>(k));
#pragma unroll
            for (int i = 0; i < WIDE; i++) sum += weights[k + i] * lazy_wide(values.value[i]);
        }
    }
    return sum;
}

/* activation(gate) * up. SiLU: x / (1 + exp(-x)). GELU, by its tanh form: x / (1 + exp(-2u)),
 * u = sqrt(2/pi) (x + 0.044715 x^3). */
__device__ __forceinline__ float gated_value(float gate, float up, bool gelu)
{
    constexpr float TWICE_ROOT = 1.5957691216f; /* 2 sqrt(2 / pi) */
    float x = gelu ? TWICE_ROOT * (gate + 0.044715f * gate * gate * gate) : gate;
    return gate / (1.0f + expf(-x)) * up;
}

struct gemv_task {
    void *y;           /* (n, columns), rows of it `stride` apart, f32 if wide, else of type T */
    const void *x;     /* (n / uses, cols): row r of y is of row r / uses */
    const void *w;     /* (columns, cols), if gated (2 columns, cols): gate above up */
    const float *bias; /* (rows of w,) or NULL */
    int n, columns, cols, stride;
    bool wide, accumulate, gelu;
    const int32_t *chosen = nullptr; /* (n,) each row's matrix, of those at w; NULL: the first, and uses is 1 */
    int uses = 1;
    int64_t matrix_bytes = 0; /* from one to the next */
    int first = 0;            /* row of y of the first block */
};

template <class T> __device__ __forceinline__ void put_product(const gemv_task &p, int row, int column, float total)
{
    int64_t at = (int64_t)row * p.stride + column;
    auto put = [&](auto *y) { lazy_narrow(&y[at], p.accumulate ? lazy_wide(y[at]) + total : total); };
    if (p.wide) put(static_cast<float *>(p.y));
    else put(static_cast<T *>(p.y));
}

/* W: T, or the blocks of a format. Grid: (blocks of columns, rows of x). */
template <class T, class W, bool GATED> __global__ void __launch_bounds__(32 * WARPS) gemv(gemv_task p)
{
    int column = blockIdx.x * WARPS + threadIdx.x / 32, row = p.first + blockIdx.y, of_x = row;
    auto *matrix = static_cast<const char *>(p.w);
    begin_kernel(false);
    if (column >= p.columns) return;
    if (p.chosen) {
        of_x /= p.uses;
        matrix += p.chosen[row] * p.matrix_bytes;
    }
    const T *x = static_cast<const T *>(p.x) + (int64_t)of_x * p.cols;
    const W *w = reinterpret_cast<const W *>(matrix);
    int64_t blocks = p.cols / lazy_block_values<W>;
    float total = lazy_warp_sum(dot_of_lane(x, w + column * blocks, p.cols));
    if (p.bias) total += p.bias[column];
    if constexpr (GATED) {
        float up = lazy_warp_sum(dot_of_lane(x, w + (p.columns + column) * blocks, p.cols));
        total = gated_value(total, up, p.gelu);
    }
    if (threadIdx.x % 32 == 0) put_product<T>(p, row, column, total);
}

/* Up to TILES * TILE_ROWS rows of x times FEW_COLUMNS rows of blocks W, which are widened to T. Each warp takes every
 * FEW_WARPS-th stretch of four units; a lane widens unit lane % 4 of it for the columns lane / 4 and lane / 4 + 8. An
 * mma takes 4 values of each unit, in any order that is the same in both operands. Grid: (blocks of columns). */
template <class T, class W, int TILES> __global__ void __launch_bounds__(32 * FEW_WARPS) few_rows(gemv_task p)
{
    begin_kernel(false);
    __shared__ float parts[FEW_WARPS][TILES * TILE_ROWS][FEW_COLUMNS];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = blockIdx.x * FEW_COLUMNS, units = p.cols / LAZY_UNIT;
    int64_t blocks = p.cols / lazy_block_values<W>;
    const W *w[2];
    float sum[TILES][4] = {};
#pragma unroll
    for (int j = 0; j < 2; j++) /* beyond the last column, that one once more */
        w[j] = static_cast<const W *>(p.w) + min(first + lane / 4 + 8 * j, p.columns - 1) * blocks;
    for (int begin = 4 * warp; begin < units; begin += 4 * FEW_WARPS) {
        int u = begin + lane % 4, at = 0;
        uint32_t a[2][LAZY_UNIT / 2] = {};
#pragma unroll
        for (int j = 0; j < 2 && u < units; j++) {
            float weights[LAZY_UNIT];
            at = lazy_widen_unit(weights, w[j], u);
#pragma unroll
            for (int i = 0; i < LAZY_UNIT / 2; i++) a[j][i] = pair_of<T>(weights[2 * i], weights[2 * i + 1]);
        }
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const T *x = static_cast<const T *>(p.x) + (int64_t)min(tile * TILE_ROWS + lane / 4, p.n - 1) * p.cols + at;
            uint4 runs[2] = {};
            if (u < units)
                for (int run = 0; run < 2; run++)
                    runs[run] = *reinterpret_cast<const uint4 *>(x + lazy_place_in_unit<W>(8 * run));
#pragma unroll
            for (int run = 0; run < 2; run++) {
                const uint32_t *of_a[2] = { a[0] + 4 * run, a[1] + 4 * run };
                mma_m16n8k16(sum[tile], { of_a[0][0], of_a[1][0], of_a[0][1], of_a[1][1] },
                             { runs[run].x, runs[run].y }, T{});
                mma_m16n8k16(sum[tile], { of_a[0][2], of_a[1][2], of_a[0][3], of_a[1][3] },
                             { runs[run].z, runs[run].w }, T{});
            }
        }
    }
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            parts[warp][tile * TILE_ROWS + lane % 4 * 2 + i % 2][lane / 4 + i / 2 * 8] = sum[tile][i];
    __syncthreads();
    for (int i = threadIdx.x; i < p.n * FEW_COLUMNS; i += 32 * FEW_WARPS) {
        int row = i / FEW_COLUMNS, column = first + i % FEW_COLUMNS;
        if (column >= p.columns) continue;
        float total = p.bias ? p.bias[column] : 0.0f;
        for (int part = 0; part < FEW_WARPS; part++) total += parts[part][row][i % FEW_COLUMNS];
        put_product<T>(p, row, column, total);
    }
}

template <class T, class W, bool GATED> cudaError_t run_gemv(gemv_task p, cudaStream_t queue)
{
    if constexpr (lazy_block_values<W> > 1 && sizeof(T) == 2 && !GATED)
        if (p.n > 1 && p.n <= LAZY_FEW_ROWS && !p.chosen)
            return lazy_launch(p.n <= TILE_ROWS       ? few_rows<T, W, 1>
                               : p.n <= 2 * TILE_ROWS ? few_rows<T, W, 2>
                                                      : few_rows<T, W, 4>,
                               dim3(lazy_blocks(p.columns, FEW_COLUMNS)), dim3(32 * FEW_WARPS), 0, queue, p);
    cudaError_t failed = cudaSuccess;
    for (; p.first < p.n && failed == cudaSuccess; p.first += MAX_GRID)
        failed =
            lazy_launch(gemv<T, W, GATED>, dim3(lazy_blocks(p.columns, WARPS), std::min(p.n - p.first, (int)MAX_GRID)),
                        dim3(32 * WARPS), 0, queue, p);
    return failed;
}

template <bool GATED>
int run_gemv(lazy_stream *stream, const char *what, lazy_dtype dtype, const gemv_task &p, lazy_error *err)
{
    int code = lazy_cuda_enter(stream->backend, err);
    if (code) return code;
    return lazy_cuda_with_type(stream, [&](auto type) {
        using T = decltype(type);
        cudaStream_t queue = lazy_cuda_scratch(stream)->queue;
        auto run = [&](auto format) { return run_gemv<T, decltype(format), GATED>(p, queue); };
        return lazy_cuda_check(lazy_with_format<T>(dtype, run), what, err);
    });
}

/* y: (n, columns), of rows `stride` apart. Grid: (n, blocks of columns). */
template <class Y> __global__ void __launch_bounds__(THREADS) add_bias(Y *y, const float *bias, int columns, int stride)
{
    begin_kernel();
    int column = blockIdx.y * THREADS + threadIdx.x;
    Y *at = y + (int64_t)blockIdx.x * stride + column;
    if (column < columns) lazy_narrow(at, lazy_wide(*at) + bias[column]);
}

/* y[n, F] = activation(gate) * up; gate_up: (n, 2 F), gate then up. A thread computes WIDE elements. Grid: (n, blocks
 * of elements). */
template <class T> __global__ void __launch_bounds__(THREADS) apply_gate(T *y, const T *gate_up, int ffn, bool gelu)
{
    begin_kernel();
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
    begin_kernel();
    int v = blockIdx.y * THREADS + threadIdx.x;
    if (v >= vocab) return;
    float *logit = logits + (int64_t)blockIdx.x * vocab + v;
    *logit = lazy_capped(*logit, cap);
}

dim3 blocks_of(int n, int columns, int per_block) { return dim3(n, lazy_blocks(columns, per_block)); }

/* The most rows of x for which these kernels are chosen; they take more where cuBLASLt refuses. With plain weights one,
 * since for two to four rows cuBLASLt takes half as long. */
int most_few_rows(lazy_stream *stream, lazy_dtype dtype)
{
    return lazy_is_quantized(dtype) ? lazy_few_rows(lazy_cuda_of(stream)) : 1;
}

/* The product by cuBLASLt, panel by panel if w is quantized. */
int multiply_many(lazy_stream *stream, const gemv_task &p, lazy_dtype dtype, lazy_error *err)
{
    const lazy_cuda *cuda = lazy_cuda_of(stream);
    const lazy_cuda_stream *s = lazy_cuda_scratch(stream);
    cudaDataType_t type = lazy_cuda_data_type(cuda->type);
    bool widens = lazy_is_quantized(dtype);
    int most = widens ? (int)(s->panel_bytes / lazy_row_bytes(cuda->type, p.cols)) : p.columns;
    if (most < p.columns && most > ALIGNED_COLUMNS) most -= most % ALIGNED_COLUMNS;
    int code = lazy_cuda_enter(stream->backend, err);
    for (int first = 0; first < p.columns && !code; first += most) {
        bool refused = false;
        gemv_task panel = p;
        panel.y = (char *)p.y + first * lazy_row_bytes(p.wide ? LAZY_F32 : cuda->type, 1);
        panel.w = (const char *)p.w + first * lazy_row_bytes(dtype, p.cols);
        panel.columns = std::min(most, p.columns - first);
        panel.bias = nullptr;
        if (widens) code = lazy_cuda_widen(stream, s->panel, panel.w, dtype, nullptr, panel.columns, p.cols, 1, err);
        if (!code)
            code = lazy_gemm_run(cuda->gemm, s->queue, panel.y, p.x, widens ? s->panel : panel.w, p.n, panel.columns,
                                 p.cols, p.stride, p.accumulate, type, p.wide ? CUDA_R_32F : type, &refused, err);
        if (!code && refused) code = run_gemv<false>(stream, "GEMV", dtype, panel, err);
    }
    if (code || !p.bias) return code;
    auto add = [&](auto type) {
        using Y = decltype(type);
        return lazy_cuda_run(stream, "bias", err, add_bias<Y>, blocks_of(p.n, p.columns, THREADS), THREADS, (Y *)p.y,
                             p.bias, p.columns, p.stride);
    };
    return p.wide ? add(float{}) : lazy_cuda_with_type(stream, add);
}

/* y[n, w->rows] (+)= x w^T + bias; y is f32 if wide, else of the backend's type. */
int multiply(lazy_stream *stream, void *y, bool wide, const void *x, int n, const lazy_matrix *w, bool accumulate,
             lazy_error *err)
{
    gemv_task p = { y, x, nullptr, w->bias, n, 0, w->cols, w->rows, wide, accumulate, false };
    int code = LAZY_OK;
    for (int i = 0; i < w->n_parts && !code; i++) {
        const lazy_part &part = w->part[i];
        p.w = part.data;
        p.columns = part.rows;
        code = n <= most_few_rows(stream, part.dtype) ? run_gemv<false>(stream, "GEMV", part.dtype, p, err)
                                                      : multiply_many(stream, p, part.dtype, err);
        p.y = (char *)p.y + part.rows * lazy_row_bytes(wide ? LAZY_F32 : lazy_cuda_of(stream)->type, 1);
        if (p.bias) p.bias += part.rows;
    }
    return code;
}
} // namespace

int lazy_cuda_matmul(lazy_stream *stream, void *y, const void *x, int n, const lazy_matrix *w, bool accumulate,
                     lazy_error *err)
{
    return multiply(stream, y, false, x, n, w, accumulate, err);
}

int lazy_cuda_f32_product(lazy_stream *stream, float *y, const void *x, int n, const lazy_matrix *w, lazy_error *err)
{
    return multiply(stream, y, true, x, n, w, false, err);
}

int lazy_cuda_logits(lazy_stream *stream, float *y, const void *x, int n, const lazy_matrix *w, lazy_error *err)
{
    float cap = stream->config->logit_cap;
    int code = lazy_cuda_f32_product(stream, y, x, n, w, err);
    if (code || !cap) return code;
    return lazy_cuda_run(stream, "capping logits", err, cap_logits, blocks_of(n, w->rows, THREADS), THREADS, y, w->rows,
                         cap);
}

int lazy_cuda_gated(lazy_stream *stream, void *y, const void *x, int n, const lazy_matrix *gate_up, lazy_error *err)
{
    int ffn = gate_up->rows / 2;
    bool gelu = stream->config->gelu;
    const lazy_part &part = gate_up->part[0];
    if (gate_up->n_parts == 1 && n == 1)
        return run_gemv<true>(stream, "gated GEMV", part.dtype,
                              { y, x, part.data, nullptr, n, ffn, gate_up->cols, ffn, false, false, gelu }, err);
    void *product = lazy_cuda_scratch(stream)->gate_up;
    int code = multiply(stream, product, false, x, n, gate_up, false, err);
    if (code) return code;
    return lazy_cuda_with_type(stream, [&](auto type) {
        using T = decltype(type);
        return lazy_cuda_run(stream, "gate", err, apply_gate<T>, blocks_of(n, ffn, THREADS * 16 / sizeof(T)), THREADS,
                             (T *)y, (const T *)product, ffn, gelu);
    });
}

int lazy_cuda_multiply_pairs(lazy_stream *stream, void *y, const void *x, int n, int uses, const int32_t *chosen,
                             const lazy_matrix *w, bool gated, lazy_error *err)
{
    int columns = gated ? w->rows / 2 : w->rows;
    const lazy_part &part = w->part[0];
    int64_t bytes = (int64_t)lazy_cuda_aligned(w->rows * lazy_row_bytes(part.dtype, w->cols));
    gemv_task p = { y,      x,    part.data, nullptr, n, columns, w->cols, columns, false, false, stream->config->gelu,
                    chosen, uses, bytes };
    return gated ? run_gemv<true>(stream, "GEMV of experts", part.dtype, p, err)
                 : run_gemv<false>(stream, "GEMV of experts", part.dtype, p, err);
}
