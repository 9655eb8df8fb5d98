/* rows.cu — ops on single rows: embedding, RMSNorm, RoPE, surprisal, argmax. */
#include <algorithm>
#include <cfloat>

#include "blocks.h"

namespace
{
enum {
    THREADS = 256,
    NORM_THREADS = 512,
    PACKS = 2 /* of 16 bytes, in one thread's registers */,
    LOGIT_THREADS = 1024
};

/* Transformers rounds the scale to the type of the embeddings before it multiplies. */
template <class T>
__global__ void __launch_bounds__(THREADS)
    embed_rows(T *__restrict__ x, const int32_t *ids, const T *__restrict__ table, int d, float scale)
{
    begin_kernel();
    T rounded;
    lazy_narrow(&rounded, scale);
    T *to = x + (int64_t)blockIdx.x * d;
    const T *from = table + (int64_t)ids[blockIdx.x] * d;
    for (int i = threadIdx.x; i < d; i += THREADS) lazy_narrow(&to[i], lazy_wide(from[i]) * lazy_wide(rounded));
}

/* to[r, :] = scale * row ids[r] of w, or row r if ids is NULL; a thread widens a unit. to: (n, cols) */
template <class T, class B>
__global__ void __launch_bounds__(THREADS)
    widen_rows(T *to, const B *w, const int32_t *ids, int n, int cols, float scale)
{
    begin_kernel();
    constexpr int WIDE = 16 / sizeof(T), N_PACKS = LAZY_UNIT / WIDE;
    int i = blockIdx.x * THREADS + threadIdx.x, units = cols / LAZY_UNIT, r = i / units;
    if (r >= n) return;
    float values[LAZY_UNIT];
    T rounded;
    lazy_narrow(&rounded, scale);
    to += (int64_t)r * cols +
          lazy_widen_unit(values, w + (int64_t)(ids ? ids[r] : r) * (cols / lazy_block_values<B>), i % units);
#pragma unroll
    for (int k = 0; k < N_PACKS; k++) {
        lazy_pack<T> pack;
#pragma unroll
        for (int j = 0; j < WIDE; j++) lazy_narrow(&pack.value[j], values[k * WIDE + j] * lazy_wide(rounded));
        *reinterpret_cast<lazy_pack<T> *>(to + lazy_place_in_unit<B>(k * WIDE)) = pack;
    }
}

/* 1 / sqrt(mean of squares + eps), from each thread's sum of squares. wide_squares(): the same sum in double, for
 * squares that overflow. */
template <class F> __device__ __forceinline__ float norm_factor(float squares, int d, float eps, F wide_squares)
{
    __shared__ float scratch[32];
    __shared__ double wide_scratch[32];
    float factor = 1.0f / sqrtf(lazy_block_sum(squares, scratch) / (float)d + eps);
    return factor != 0.0f ? factor : (float)(1.0 / sqrt(lazy_block_sum(wide_squares(), wide_scratch) / d + eps));
}

/* Where a layer with a NaN or Inf is noted. */
struct layer_check {
    int layer;
    int32_t *first_bad; /* NULL: not noted */
};

/* The factor of a row is NaN beside a NaN, and 0 beside an Inf. */
__device__ __forceinline__ void note(layer_check check, float factor)
{
    if (check.first_bad && threadIdx.x == 0 && !(factor > 0.0f)) atomicMin(check.first_bad, check.layer);
}

/* y (+)= norm(x), of x less its mean with layer_norm; y, x: (n, d), of rows `stride` apart; one block per row; sums in
 * f32 */
template <class T>
__global__ void __launch_bounds__(THREADS) norm_rows(T *y, const T *x, int d, int stride, const float *weight,
                                                     float eps, bool accumulate, bool layer_norm, layer_check check)
{
    begin_kernel();
    __shared__ float scratch[32];
    const T *from = x + (int64_t)blockIdx.x * stride;
    T *to = y + (int64_t)blockIdx.x * stride;
    float mean = 0.0f, squares = 0.0f;
    if (layer_norm) {
        for (int i = threadIdx.x; i < d; i += THREADS) mean += lazy_wide(from[i]);
        mean = lazy_block_sum(mean, scratch) / (float)d;
    }
    auto value_of = [&](int i) { return lazy_wide(from[i]) - mean; };
    for (int i = threadIdx.x; i < d; i += THREADS) squares += value_of(i) * value_of(i);
    float factor = norm_factor(squares, d, eps, [&] {
        double wide = 0.0;
        for (int i = threadIdx.x; i < d; i += THREADS) wide += (double)value_of(i) * value_of(i);
        return wide;
    });
    note(check, factor);
    for (int i = threadIdx.x; i < d; i += THREADS) {
        float value = value_of(i) * factor * weight[i];
        lazy_narrow(&to[i], accumulate ? lazy_wide(to[i]) + value : value);
    }
}

/* The same for rows of whole packs, up to PACKS for each thread. All of a row is loaded into registers before the
 * reduction: in a decode step there is one row, whose time is that of its loads one after the other. In a prefill, a
 * block has several rows, and loads the weights once. */
template <class T>
__global__ void __launch_bounds__(NORM_THREADS, 2)
    norm_in_registers(T *y, const T *x, int n, int d, int stride, const float *weight, float eps, bool accumulate,
                      layer_check check)
{
    constexpr int WIDE = 16 / sizeof(T);
    struct alignas(16) factors {
        float value[WIDE];
    };
    factors weights[PACKS] = {};
    auto for_packs = [&](auto f) {
#pragma unroll
        for (int p = 0, at = threadIdx.x; p < PACKS; p++, at += blockDim.x)
            if (at < d / WIDE) f(p, at);
    };
    for_packs([&](int p, int at) { weights[p] = reinterpret_cast<const factors *>(weight)[at]; });
    begin_kernel();
    for (int row = blockIdx.x; row < n; row += gridDim.x) {
        auto *from = reinterpret_cast<const lazy_pack<T> *>(x + (int64_t)row * stride);
        auto *to = reinterpret_cast<lazy_pack<T> *>(y + (int64_t)row * stride);
        lazy_pack<T> values[PACKS] = {};
        for_packs([&](int p, int at) { values[p] = from[at]; });
        auto add_squares = [&](auto sum) {
#pragma unroll
            for (int p = 0; p < PACKS; p++)
#pragma unroll
                for (int i = 0; i < WIDE; i++) {
                    decltype(sum) value = lazy_wide(values[p].value[i]);
                    sum += value * value;
                }
            return sum;
        };
        float factor = norm_factor(add_squares(0.0f), d, eps, [&] { return add_squares(0.0); });
        note(check, factor);
        for_packs([&](int p, int at) {
            lazy_pack<T> sum = accumulate ? to[at] : lazy_pack<T>{};
#pragma unroll
            for (int i = 0; i < WIDE; i++) {
                float value = lazy_wide(values[p].value[i]) * factor * weights[p].value[i];
                lazy_narrow(&sum.value[i], accumulate ? lazy_wide(sum.value[i]) + value : value);
            }
            to[at] = sum;
        });
    }
}

struct rotation {
    const int32_t *rows;                          /* (n,) positions */
    int n_heads, n_kv_heads, d, stride, capacity; /* stride: from one row of q and of k_v to the next */
    const float *q_rope, *k_rope, *q_norm, *k_norm;
    float eps;
    bool late;       /* the norms follow RoPE */
    bool layer_norm; /* they subtract the mean, and have weights for each head */
    int lanes;       /* a power of 2 that a head is divided among */
};

/* W values next to each other, loaded and stored at once. */
template <class T, int W> struct alignas(sizeof(T) * W < 16 ? sizeof(T) * W : 16) values_of {
    T value[W];
};

/* RMSNorm of one head (unless weight is NULL), then RoPE on its pairs (i, i + D/2); t.late: RoPE first. `to` may be
 * `from`, and is NULL in lanes that have no head and only take part in the sums. rope: (D,) cosines, then sines, of the
 * row's position. A lane has W pairs of every W t.lanes. */
template <int W, class T>
__device__ __forceinline__ void rotate_head(T *to, const T *from, const float *rope, const float *weight,
                                            const rotation &t)
{
    using pack = values_of<T, W>;
    using factors = values_of<float, W>;
    int half = t.d / 2, first = threadIdx.x % t.lanes * W, step = t.lanes * W;
    float mean = 0.0f, factor = 1.0f;
    /* calls f(a, b, cosine, sine) for each pair of the lane */
    auto for_pairs = [&](auto f) {
        for (int i = first; to && i < half; i += step) {
            pack a = *(const pack *)(from + i), b = *(const pack *)(from + half + i);
            factors c = *(const factors *)(rope + i), s = *(const factors *)(rope + half + i);
#pragma unroll
            for (int e = 0; e < W; e++)
                f(lazy_wide(a.value[e]) - mean, lazy_wide(b.value[e]) - mean, c.value[e], s.value[e]);
        }
    };
    auto squares = [&](auto sum) {
        for_pairs([&](float a, float b, float c, float s) {
            decltype(sum) x = t.late ? a * c - b * s : a, y = t.late ? b * c + a * s : b;
            sum += x * x + y * y;
        });
        return lazy_warp_reduce(sum, lazy_add(), t.lanes);
    };
    if (weight) {
        if (t.layer_norm) {
            float sum = 0.0f;
            for_pairs([&](float a, float b, float, float) { sum += a + b; });
            mean = lazy_warp_reduce(sum, lazy_add(), t.lanes) / (float)t.d;
        }
        factor = 1.0f / sqrtf(squares(0.0f) / (float)t.d + t.eps);
        if (__ballot_sync(~0u, factor == 0.0f)) { /* the squares overflowed */
            float exact = (float)(1.0 / sqrt(squares(0.0) / t.d + t.eps));
            if (factor == 0.0f) factor = exact;
        }
    }
    for (int i = first; to && i < half; i += step) {
        pack a = *(const pack *)(from + i), b = *(const pack *)(from + half + i);
        factors c = *(const factors *)(rope + i), s = *(const factors *)(rope + half + i), u = {}, v = {};
        if (weight) {
            u = *(const factors *)(weight + i);
            v = *(const factors *)(weight + half + i);
        }
#pragma unroll
        for (int e = 0; e < W; e++) {
            float x = (lazy_wide(a.value[e]) - mean) * factor, y = (lazy_wide(b.value[e]) - mean) * factor;
            if (weight && !t.late) {
                x *= u.value[e];
                y *= v.value[e];
            }
            float turned_x = x * c.value[e] - y * s.value[e], turned_y = y * c.value[e] + x * s.value[e];
            lazy_narrow(&a.value[e], weight && t.late ? turned_x * u.value[e] : turned_x);
            lazy_narrow(&b.value[e], weight && t.late ? turned_y * v.value[e] : turned_y);
        }
        *(pack *)(to + i) = a;
        *(pack *)(to + half + i) = b;
    }
}

/* q: (n, H D), k_v: (n, 2 G D), or no heads of one of them; k, v: (G, capacity, D). Grid: (n, blocks of heads). */
template <int W, class T> __global__ void __launch_bounds__(THREADS) rotate_rows(T *q, T *k_v, T *k, T *v, rotation t)
{
    begin_kernel();
    int h = blockIdx.y * (THREADS / t.lanes) + threadIdx.x / t.lanes, position = t.rows[blockIdx.x],
        all = t.n_heads + 2 * t.n_kv_heads, g = h < t.n_heads ? 0 : (h - t.n_heads) % max(t.n_kv_heads, 1);
    bool is_q = h < t.n_heads, is_k = !is_q && h < t.n_heads + t.n_kv_heads, is_v = !is_q && !is_k && h < all;
    int at = min(h, all - 1);
    T *from = (at < t.n_heads ? q + at * t.d : k_v + (at - t.n_heads) * t.d) + (int64_t)blockIdx.x * t.stride;
    int64_t slot = ((int64_t)g * t.capacity + position) * t.d;
    const float *weight = is_q ? t.q_norm : t.k_norm, *rope = is_q ? t.q_rope : t.k_rope;
    if (weight && t.layer_norm) weight += (is_q ? h : g) * t.d;
    rotate_head<W>(is_q ? from : is_k ? k + slot : nullptr, from, rope + (int64_t)position * t.d, weight, t);
    for (int i = threadIdx.x % t.lanes * W; is_v && i < t.d; i += t.lanes * W)
        *(values_of<T, W> *)(v + slot + i) = *(const values_of<T, W> *)(from + i);
}

/* logits: (n, vocab); one block per row */
__global__ void __launch_bounds__(THREADS)
    surprisal_of_rows(float *surprisal, const float *logits, int vocab, const int32_t *ids)
{
    begin_kernel();
    __shared__ float scratch[32];
    const float *row = logits + (int64_t)blockIdx.x * vocab;
    float max_logit = -INFINITY, sum = 0.0f;
    for (int v = threadIdx.x; v < vocab; v += THREADS)
        max_logit = fmaxf(max_logit, row[v]); /* fmaxf ignores NaN; the sum keeps it */
    max_logit = lazy_block_reduce(max_logit, scratch, lazy_max());
    for (int v = threadIdx.x; v < vocab; v += THREADS) sum += expf(row[v] - max_logit);
    sum = lazy_block_sum(sum, scratch);
    if (threadIdx.x == 0) surprisal[blockIdx.x] = logf(sum) + (max_logit - row[ids[blockIdx.x]]);
}

/* A key whose minimum is the argmax: smaller for greater logits, then for smaller ids; smallest for logits that are not
 * finite. */
__device__ __forceinline__ unsigned long long key_of(float logit, int id)
{
    unsigned bits = __float_as_uint(logit + 0.0f); /* -0 becomes 0 */
    unsigned falling = bits >> 31 ? bits : ~bits & INT32_MAX;
    return (unsigned long long)(fabsf(logit) <= FLT_MAX ? falling : 0) << 32 | (unsigned)id;
}

/* *id as defined for `argmax` in backend.h. Launched with one block. */
__global__ void __launch_bounds__(LOGIT_THREADS) find_argmax(int32_t *id, const float *logits, int vocab)
{
    begin_kernel();
    __shared__ unsigned long long min_key;
    if (threadIdx.x == 0) min_key = ~0ull;
    __syncthreads();
    unsigned long long own_key = ~0ull;
#pragma unroll 4
    for (int v = threadIdx.x; v < vocab; v += LOGIT_THREADS) own_key = min(own_key, key_of(logits[v], v));
    for (int step = 16; step; step /= 2) own_key = min(own_key, __shfl_xor_sync(~0u, own_key, step));
    if (threadIdx.x % 32 == 0) atomicMin(&min_key, own_key);
    __syncthreads();
    if (threadIdx.x == 0) *id = min_key >> 32 ? (int)(unsigned)min_key : -1 - (int)(unsigned)min_key;
}

template <class T>
int launch_norm(lazy_stream *stream, T *y, const T *x, int n, int d, int stride, const float *weight, float eps,
                bool accumulate, bool layer_norm, layer_check check, lazy_error *err)
{
    constexpr int WIDE = 16 / sizeof(T), BLOCKS = 4 /* of a multiprocessor */;
    bool fits = d % WIDE == 0 && stride % WIDE == 0 && d / WIDE <= PACKS * NORM_THREADS;
    if (!fits || layer_norm)
        return lazy_cuda_run(stream, "norm", err, norm_rows<T>, n, THREADS, y, x, d, stride, weight, eps, accumulate,
                             layer_norm, check);
    int threads = std::min(lazy_blocks(d / WIDE, 32) * 32, (int)NORM_THREADS); /* no more than packs, in whole warps */
    return lazy_cuda_run(stream, "norm", err, norm_in_registers<T>,
                         std::min(n, BLOCKS * lazy_cuda_of(stream)->processors), threads, y, x, n, d, stride, weight,
                         eps, accumulate, check);
}

int norm(lazy_stream *stream, void *y, const void *x, int n, int d, const float *weight, float eps, bool accumulate,
         layer_check check, lazy_error *err)
{
    return lazy_cuda_with_type(stream, [&](auto type) {
        using T = decltype(type);
        return launch_norm(stream, (T *)y, (const T *)x, n, d, d, weight, eps, accumulate, stream->config->layer_norm,
                           check, err);
    });
}
} // namespace

int lazy_cuda_widen(lazy_stream *stream, void *to, const void *w, lazy_dtype dtype, const int32_t *ids, int n, int cols,
                    float scale, lazy_error *err)
{
    return lazy_cuda_with_type(stream, [&](auto type) {
        using T = decltype(type);
        return lazy_with_format<T>(dtype, [&](auto format) -> int {
            using B = decltype(format);
            if constexpr (lazy_block_values<B> == 1)
                return lazy_cuda_run(stream, "embedding", err, embed_rows<T>, n, THREADS, (T *)to, ids, (const T *)w,
                                     cols, scale);
            else
                return lazy_cuda_run(stream, "widening weights", err, widen_rows<T, B>,
                                     lazy_blocks(n * (cols / LAZY_UNIT), THREADS), THREADS, (T *)to, (const B *)w, ids,
                                     n, cols, scale);
        });
    });
}

int lazy_cuda_embed(lazy_stream *stream, void *x, const int32_t *ids, int n, const lazy_matrix *table, lazy_error *err)
{
    const lazy_part &part = table->part[0];
    return lazy_cuda_widen(stream, x, part.data, part.dtype, ids, n, table->cols, stream->config->embedding_scale, err);
}

int lazy_cuda_rmsnorm(lazy_stream *stream, void *y, const void *x, int n, int d, const float *weight, float eps,
                      bool accumulate, lazy_error *err)
{
    return norm(stream, y, x, n, d, weight, eps, accumulate, {}, err);
}

int lazy_cuda_checked_rmsnorm(lazy_stream *stream, void *y, const void *x, int n, int d, const float *weight, float eps,
                              int layer, int32_t *first_bad, lazy_error *err)
{
    return norm(stream, y, x, n, d, weight, eps, false, { layer, first_bad }, err);
}

int lazy_cuda_rotate(lazy_stream *stream, void *q_of_rows, void *k_v_of_rows, int stride, const int32_t *rows, int n,
                     lazy_kv kv, const float *q_rope, const float *k_rope, const float *q_norm, const float *k_norm,
                     float eps, lazy_error *err)
{
    const lazy_config *c = stream->config;
    bool wide = q_norm && c->wide_qk_norm;
    rotation t = { rows,
                   q_of_rows ? c->n_heads : 0,
                   k_v_of_rows ? c->n_kv_heads : 0,
                   c->head_dim,
                   stride,
                   kv.capacity,
                   q_rope,
                   k_rope,
                   wide ? NULL : q_norm,
                   wide ? NULL : k_norm,
                   eps,
                   c->late_qk_norm,
                   c->layer_norm,
                   1 };
    return lazy_cuda_with_type(stream, [&](auto type) -> int {
        using T = decltype(type);
        T *q = (T *)q_of_rows, *k_v = (T *)k_v_of_rows;
        int code = LAZY_OK;
        if (wide && q) code = launch_norm(stream, q, q, n, lazy_q_width(c), stride, q_norm, eps, false, false, {}, err);
        if (wide && k_v && !code)
            code = launch_norm(stream, k_v, k_v, n, lazy_kv_width(c), stride, k_norm, eps, false, false, {}, err);
        if (code) return code;
        constexpr int WIDE = 16 / sizeof(T);
        int half = t.d / 2, w = half % WIDE ? 1 : WIDE;
        while (t.lanes < 32 && t.lanes * w < half) t.lanes *= 2;
        dim3 grid(n, (t.n_heads + 2 * t.n_kv_heads) * t.lanes / THREADS + 1);
        return lazy_cuda_run(stream, "rotation", err, w == 1 ? rotate_rows<1, T> : rotate_rows<WIDE, T>, grid, THREADS,
                             q, k_v, (T *)kv.k, (T *)kv.v, t);
    });
}

int lazy_cuda_surprisal(lazy_stream *stream, float *surprisal, float *logits, int n, int vocab, const int32_t *ids,
                        lazy_error *err)
{
    return lazy_cuda_run(stream, "surprisal", err, surprisal_of_rows, n, THREADS, surprisal, logits, vocab, ids);
}

int lazy_cuda_argmax(lazy_stream *stream, int32_t *id, const float *logits, int vocab, lazy_error *err)
{
    return lazy_cuda_run(stream, "argmax", err, find_argmax, 1, LOGIT_THREADS, id, logits, vocab);
}
