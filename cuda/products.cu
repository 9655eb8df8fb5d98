/* products.cu — products with weight matrices: by cuBLASLt for many rows; by a GEMV kernel, which reads and widens
 * every weight once for GEMV_ROWS rows, for few rows and for shapes that cuBLASLt refuses. The kernel reads quantized
 * weights as they are stored; for cuBLASLt they are widened, a panel of rows at a time. A row's result by the kernel is
 * the same to the bit, however many rows it multiplies.
 *
 * Why 12 rows: in a 7B's decode step on an H100 each row takes the kernel 1.0 ms with Q8_0 and 0.8 ms with Q4_1;
 * widening for cuBLASLt takes 9.7 and 9.0 ms more than one row, however many there are. */
#include <algorithm>

#include "blocks.h"

namespace
{
enum {
    GEMV_ROWS = LAZY_GEMV_ROWS, /* of a group */
    WARPS = 4,                  /* per block */
    THREADS = 256,
    MAX_GROUPS = 16,       /* in one launch */
    ALIGNED_COLUMNS = 128, /* cuBLASLt is faster where a panel's columns of y begin at a multiple of 256 bytes */
};

/* sum[j][r] += x[r, :cols] . w[j][:cols], this lane's elements only; f32 accumulation, for each row and column in the
 * same order whatever the others are. A unit of each w[j] is widened once for all rows; rows of x are read and widened
 * once for all w[j]. */
template <class T, class W, int ROWS, int N_W>
__device__ __forceinline__ void add_products(float (*sum)[ROWS], const T *x, int n, const W *const *w, int cols)
{
    constexpr bool PLAIN = lazy_block_values<W> == 1;
    constexpr int WIDE = 16 / sizeof(T), UNIT = PLAIN ? WIDE : LAZY_UNIT;
    /* Blocks are not unrolled, because a unit takes so many instructions that other warps hide its loads, the more of
     * them the fewer registers each has. */
    [[maybe_unused]] constexpr int UNROLLED = PLAIN && ROWS == 1 ? 4 : 1;
    int lane = threadIdx.x % 32;
    if (PLAIN && cols % WIDE) { /* rows are not aligned to a pack */
        for (int k = lane; k < cols; k += 32)
            for (int r = 0; r < ROWS; r++)
                for (int j = 0; j < N_W; j++)
                    if constexpr (PLAIN)
                        if (r < n) sum[j][r] += lazy_wide(w[j][k]) * lazy_wide(x[(int64_t)r * cols + k]);
        return;
    }
#pragma unroll UNROLLED
    for (int u = lane; u < cols / UNIT; u += 32) {
        float weights[N_W][UNIT];
        const T *at = x;
#pragma unroll
        for (int j = 0; j < N_W; j++) at = x + lazy_widen_unit(weights[j], w[j], u);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (r && r >= n) break; /* n is at least 1: no branch in front of the first loads of x */
#pragma unroll
            for (int k = 0; k < UNIT; k += WIDE) {
                auto *from = at + (int64_t)r * cols + lazy_place_in_unit<W>(k);
                lazy_pack<T> values = *reinterpret_cast<const lazy_pack<T> *>(from);
#pragma unroll
                for (int i = 0; i < WIDE; i++)
#pragma unroll
                    for (int j = 0; j < N_W; j++) sum[j][r] += weights[j][k + i] * lazy_wide(values.value[i]);
            }
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

struct gemv_task {
    void *y;           /* (n, columns), rows of it `stride` apart, f32 if wide, else of type T */
    const void *x;     /* (n, cols), of which row r / share is multiplied */
    const void *w;     /* (columns, cols), if gated (2 columns, cols): gate above up */
    const float *bias; /* (rows of w,) or NULL */
    int n, columns, cols, stride;
    bool wide, accumulate, gelu;
    const int32_t *chosen = nullptr; /* (n,) each row's matrix, of those at w; NULL: the first, and share is 1 */
    int share = 1;
    int64_t matrix_bytes = 0; /* from one to the next */
    int first = 0;            /* row of y of the first group */
};

template <class Y> __device__ __forceinline__ void put(void *y, int64_t at, float total, bool accumulate)
{
    Y *out = static_cast<Y *>(y) + at;
    lazy_narrow(out, accumulate ? lazy_wide(*out) + total : total);
}

/* Columns of y of one warp. Two share the loads of x where there are rows enough for these to matter; gate and up do
 * as well. */
template <int ROWS, bool GATED> constexpr int columns_of_warp = ROWS == 1 || GATED ? 1 : 2;

/* W: T, or the blocks of a format. Grid: (blocks of columns, groups of ROWS rows). Of many rows four blocks at a time
 * have registers enough; for five, some in f32 would spill. */
template <class T, class W, int ROWS, bool GATED>
__global__ void __launch_bounds__(32 * WARPS, ROWS == 1 ? 0 : 4) gemv(gemv_task p)
{
    constexpr int COLUMNS = columns_of_warp<ROWS, GATED>, N_W = GATED ? 2 : COLUMNS, AT_ONCE = ROWS == 1 ? 1 : N_W;
    int column = (blockIdx.x * WARPS + threadIdx.x / 32) * COLUMNS, first = p.first + blockIdx.y * ROWS,
        n = min(ROWS, p.n - first), of_x = first;
    int64_t row = p.cols / lazy_block_values<W>;
    auto *matrix = static_cast<const char *>(p.w);
    begin_kernel(false);
    if (column >= p.columns) return;
    if (p.chosen) {
        of_x /= p.share;
        matrix += p.chosen[first] * p.matrix_bytes;
    }
    const T *x = static_cast<const T *>(p.x) + (int64_t)of_x * p.cols;
    const W *w[N_W];
    float sum[N_W][ROWS] = {};
#pragma unroll
    for (int j = 0; j < N_W; j++) { /* beyond the last column, that one once more */
        int of_w = GATED ? j * p.columns + column : min(column + j, p.columns - 1);
        w[j] = reinterpret_cast<const W *>(matrix) + of_w * row;
    }
#pragma unroll
    for (int j = 0; j < N_W; j += AT_ONCE) add_products<T, W, ROWS, AT_ONCE>(sum + j, x, n, w + j, p.cols);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        if (r >= n) break;
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            float total = lazy_warp_sum(sum[c][r]), up = GATED ? lazy_warp_sum(sum[N_W - 1][r]) : 0.0f;
            int of_y = column + c;
            if (threadIdx.x % 32 || of_y >= p.columns) continue;
            if (p.bias) total += p.bias[of_y];
            if (GATED) total = gated_value(total, up + (p.bias ? p.bias[p.columns + of_y] : 0.0f), p.gelu);
            int64_t at = (int64_t)(first + r) * p.stride + of_y;
            if (p.wide) put<float>(p.y, at, total, p.accumulate);
            else put<T>(p.y, at, total, p.accumulate);
        }
    }
}

template <class T, class W, int ROWS, bool GATED>
cudaError_t launch_gemv(const gemv_task &p, int groups, cudaStream_t queue)
{
    dim3 grid(lazy_blocks(p.columns, WARPS * columns_of_warp<ROWS, GATED>), groups);
    return lazy_launch(gemv<T, W, ROWS, GATED>, grid, dim3(32 * WARPS), 0, queue, p);
}

template <class T, class W, bool GATED> cudaError_t run_gemv(gemv_task p, cudaStream_t queue)
{
    if (p.n == 1 || p.chosen) return launch_gemv<T, W, 1, GATED>(p, p.n, queue);
    cudaError_t failed = cudaSuccess;
    for (; p.first < p.n && failed == cudaSuccess; p.first += GEMV_ROWS * MAX_GROUPS)
        failed = launch_gemv<T, W, GEMV_ROWS, GATED>(
            p, std::min(lazy_blocks(p.n - p.first, GEMV_ROWS), (int)MAX_GROUPS), queue);
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

/* The most rows of x that gemv multiplies unless cuBLASLt refuses: of plain weights one, since cuBLASLt takes half as
 * long for two to four. */
int most_few_rows(lazy_dtype dtype) { return lazy_is_quantized(dtype) ? GEMV_ROWS : 1; }

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
        code = n <= most_few_rows(part.dtype) ? run_gemv<false>(stream, "GEMV", part.dtype, p, err)
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
    if (gate_up->n_parts == 1 && n <= most_few_rows(part.dtype))
        return run_gemv<true>(stream, "gated GEMV", part.dtype,
                              { y, x, part.data, gate_up->bias, n, ffn, gate_up->cols, ffn, false, false, gelu }, err);
    void *product = lazy_cuda_scratch(stream)->gate_up;
    int code = multiply(stream, product, false, x, n, gate_up, false, err);
    if (code) return code;
    return lazy_cuda_with_type(stream, [&](auto type) {
        using T = decltype(type);
        return lazy_cuda_run(stream, "gate", err, apply_gate<T>, blocks_of(n, ffn, THREADS * 16 / sizeof(T)), THREADS,
                             (T *)y, (const T *)product, ffn, gelu);
    });
}

int lazy_cuda_multiply_pairs(lazy_stream *stream, void *y, const void *x, int n, int share, const int32_t *chosen,
                             const lazy_matrix *w, bool gated, lazy_error *err)
{
    int columns = gated ? w->rows / 2 : w->rows;
    const lazy_part &part = w->part[0];
    int64_t bytes = (int64_t)lazy_cuda_aligned(w->rows * lazy_row_bytes(part.dtype, w->cols));
    gemv_task p = { y,      x,     part.data, nullptr, n, columns, w->cols, columns, false, false, stream->config->gelu,
                    chosen, share, bytes };
    return gated ? run_gemv<true>(stream, "GEMV of experts", part.dtype, p, err)
                 : run_gemv<false>(stream, "GEMV of experts", part.dtype, p, err);
}
