/* kernels_template.h — the one source of all kernels; kernels.h says what each computes.
 *
 * The including file defines VARIANT, LANES (floats per vector), TILE_ROWS x TILE_VECTORS (the register tile, sized so that
 * sums, one row of b and a broadcast fit the registers), and where the instruction set
 * can do it, HALVES_AT(address) with WIDEN_F16 and WIDEN_BF16. */
#include <math.h>
#include <string.h>

#include "kernels.h"

#define INLINE      static inline __attribute__((always_inline))
#define JOIN_(a, b) a##b
#define JOIN(a, b)  JOIN_(a, b)

enum { TILE_COLS = TILE_VECTORS * LANES };

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float loose_vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias)); /* anywhere in memory */
typedef int32_t ints __attribute__((vector_size(4 * LANES)));

INLINE vec load(const float *p) { return *(const loose_vec *)p; }
INLINE void store(float *p, vec v) { *(loose_vec *)p = v; }
INLINE vec splat(float x) { return x - (vec){ 0 }; }
INLINE vec choose(ints mask, vec yes, vec no) { return (vec)(((ints)yes & mask) | ((ints)no & ~mask)); }

typedef float four __attribute__((vector_size(16)));
typedef float eight __attribute__((vector_size(32)));

INLINE float sum_lanes(vec v)
{
#if LANES == 16
    eight e = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
#elif LANES == 8
    eight e = v;
#endif
#if LANES > 4
    four f = __builtin_shufflevector(e, e, 0, 1, 2, 3) + __builtin_shufflevector(e, e, 4, 5, 6, 7);
#else
    four f = v;
#endif
    return (f[0] + f[2]) + (f[1] + f[3]);
}

/* ---- widening --------------------------------------------------------------------------- */

INLINE float widen_one(const void *p, lazy_dtype dtype, int i)
{
    if (dtype == LAZY_F32) return ((const float *)p)[i];
    uint32_t half = ((const uint16_t *)p)[i], word;
    float value;
    if (dtype == LAZY_BF16) {
        word = half << 16;
        memcpy(&value, &word, sizeof value);
        return value;
    }
    /* f16: its exponent and fraction, moved in place, are off by 2^112; that product also sets subnormals right */
    word = (half & 0x7fffu) << 13;
    memcpy(&value, &word, sizeof value);
    value *= 0x1p112f;
    if ((half & 0x7c00u) == 0x7c00u) value = half & 0x3ffu ? NAN : INFINITY;
    return half & 0x8000u ? -value : value;
}

INLINE vec widen(const void *p, lazy_dtype dtype, int i)
{
    if (dtype == LAZY_F32) return load((const float *)p + i);
    const uint16_t *at = (const uint16_t *)p + i;
#ifdef HALVES_AT
    return dtype == LAZY_BF16 ? WIDEN_BF16(at) : WIDEN_F16(at);
#else
    vec v;
    for (int lane = 0; lane < LANES; lane++) v[lane] = widen_one(at, dtype, lane);
    return v;
#endif
}

INLINE void widen_any(float *y, const void *x, lazy_dtype dtype, int n)
{
    int i = 0;
    for (; i + LANES <= n; i += LANES) store(y + i, widen(x, dtype, i));
    for (; i < n; i++) y[i] = widen_one(x, dtype, i);
}

static void widen_row(float *y, const void *x, lazy_dtype dtype, int n)
{
    switch (dtype) {
    case LAZY_F32: memcpy(y, x, (size_t)n * sizeof *y); break;
    case LAZY_F16: widen_any(y, x, LAZY_F16, n); break;
    case LAZY_BF16: widen_any(y, x, LAZY_BF16, n); break;
    }
}

/* ---- exp -------------------------------------------------------------------------------- */

/* Relative error below 2e-7 for -87.3 <= x <= 88; smaller x give 0, larger ones exp(88). */
INLINE vec vector_exp(vec x)
{
    const float log2_e = 0x1.715476p+0f, ln2_high = 0x1.62e400p-1f, ln2_low = 0x1.7f7d1cp-20f, round = 0x1.8p23f;
    ints tiny = x < -87.3f;
    x = choose(x > 88.0f, splat(88.0f), choose(tiny, splat(0.0f), x));
    vec n = (x * log2_e + round) - round;
    vec r = (x - n * ln2_high) - n * ln2_low;
    vec p = splat(1.0f / 5040);
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    vec power = (vec)((__builtin_convertvector(n, ints) + 127) << 23);
    return choose(tiny, splat(0.0f), p * power);
}

/* A vector of which only n lanes lie in memory, or a whole one where n >= LANES. */
INLINE vec load_part(const float *p, int n, float otherwise)
{
    if (n >= LANES) return load(p);
    float part[LANES];
    for (int i = 0; i < LANES; i++) part[i] = i < n ? p[i] : otherwise;
    return load(part);
}

INLINE void store_part(float *p, vec v, int n)
{
    if (n >= LANES) {
        store(p, v);
        return;
    }
    float part[LANES];
    store(part, v);
    memcpy(p, part, (size_t)n * sizeof *p);
}

static float soften(float *s, int n, float scale, float *max, float *sum)
{
    vec m = splat(-INFINITY), total = splat(0.0f);
    for (int i = 0; i < n; i += LANES) {
        vec v = load_part(s + i, n - i, -INFINITY);
        m = choose(v > m, v, m);
    }
    float top = *max;
    for (int lane = 0; lane < LANES; lane++) top = m[lane] > top ? m[lane] : top;
    for (int i = 0; i < n; i += LANES) {
        vec e = vector_exp((load_part(s + i, n - i, -INFINITY) - top) * scale);
        store_part(s + i, e, n - i);
        total += e;
    }
    float factor = *max == -INFINITY ? 0.0f : expf((*max - top) * scale);
    *sum = *sum * factor + sum_lanes(total);
    *max = top;
    return factor;
}

static void scale_row(float *y, int n, float factor)
{
    for (int i = 0; i < n; i++) y[i] *= factor;
}

static void swiglu_row(float *y, const float *gate, const float *up, int n)
{
    for (int i = 0; i < n; i += LANES) {
        vec g = load_part(gate + i, n - i, 0.0f), u = load_part(up + i, n - i, 0.0f);
        store_part(y + i, g / (1.0f + vector_exp(-g)) * u, n - i);
    }
}

static void norm_row(float *y, const float *x, const float *weight, int n, float eps)
{
    vec total = splat(0.0f);
    for (int i = 0; i < n; i += LANES) {
        vec v = load_part(x + i, n - i, 0.0f);
        total += v * v;
    }
    float factor = 1.0f / sqrtf(sum_lanes(total) / (float)n + eps);
    if (factor == 0.0f) { /* the squares overflowed */
        double wide = 0.0;
        for (int i = 0; i < n; i++) wide += (double)x[i] * x[i];
        factor = (float)(1.0 / sqrt(wide / n + eps));
    }
    for (int i = 0; i < n; i++) y[i] = x[i] * factor * weight[i];
}

/* ---- the register tile ------------------------------------------------------------------ */

INLINE void pack_any(float *panel, const void *const *row, int n, lazy_dtype dtype, int k)
{
    for (int j = 0; j < TILE_COLS; j++) {
        float *column = panel + j;
        if (j >= n) {
            for (int kk = 0; kk < k; kk++) column[(int64_t)kk * TILE_COLS] = 0.0f;
            continue;
        }
        for (int kk = 0; kk < k; kk++) column[(int64_t)kk * TILE_COLS] = widen_one(row[j], dtype, kk);
    }
}

static void pack(float *panel, const void *const *row, int n, lazy_dtype dtype, int k)
{
    switch (dtype) {
    case LAZY_F32: pack_any(panel, row, n, LAZY_F32, k); break;
    case LAZY_F16: pack_any(panel, row, n, LAZY_F16, k); break;
    case LAZY_BF16: pack_any(panel, row, n, LAZY_BF16, k); break;
    }
}

INLINE void tile_of(float *c, int64_t c_stride, const float *a, int64_t a_stride, const float *b, int64_t b_stride, int k, int cols,
                    bool accumulate, const int rows)
{
    vec sum[TILE_ROWS][TILE_VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < TILE_VECTORS; v++) sum[r][v] = splat(0.0f);

    for (int kk = 0; kk < k; kk++, b += b_stride) {
        vec column[TILE_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < TILE_VECTORS; v++) column[v] = load(b + v * LANES);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            float x = a[r * a_stride + kk];
#pragma GCC unroll 4
            for (int v = 0; v < TILE_VECTORS; v++) sum[r][v] += column[v] * x;
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        float *out = c + r * c_stride;
        if (cols == TILE_COLS) {
#pragma GCC unroll 4
            for (int v = 0; v < TILE_VECTORS; v++) store(out + v * LANES, accumulate ? load(out + v * LANES) + sum[r][v] : sum[r][v]);
            continue;
        }
        float part[TILE_COLS];
#pragma GCC unroll 4
        for (int v = 0; v < TILE_VECTORS; v++) store(part + v * LANES, sum[r][v]);
        for (int j = 0; j < cols; j++) out[j] = accumulate ? out[j] + part[j] : part[j];
    }
}

static void tile(float *c, int64_t c_stride, const float *a, int64_t a_stride, const float *b, int64_t b_stride, int k, int rows, int cols,
                 bool accumulate)
{
#define TILE(n)                                                                                                                            \
    case n: tile_of(c, c_stride, a, a_stride, b, b_stride, k, cols, accumulate, n); break;
    switch (rows) {
        TILE(1)
        TILE(2)
        TILE(3)
        TILE(4)
        TILE(5)
        TILE(6)
#if TILE_ROWS > 6
        TILE(7)
        TILE(8)
        TILE(9)
        TILE(10)
        TILE(11)
        TILE(12)
        TILE(13)
        TILE(14)
#endif
    }
#undef TILE
}

/* ---- few rows --------------------------------------------------------------------------- */

enum { DOT_ROWS = 4, DOT_COLS = 4 }; /* x rows and w rows whose sums stay in registers together */

INLINE void dots_of(float *y, int64_t y_stride, const float *x, int64_t x_stride, const void *w, lazy_dtype dtype, int n_cols, int k,
                    bool accumulate, const int rows, const int cols)
{
    const size_t width = dtype == LAZY_F32 ? 4 : 2;
    for (int j = 0; j + cols <= n_cols; j += cols) {
        const char *from = (const char *)w + (size_t)j * (size_t)k * width;
        vec sum[DOT_ROWS][DOT_COLS];
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int c = 0; c < cols; c++) sum[r][c] = splat(0.0f);
        int kk = 0;
        for (; kk + LANES <= k; kk += LANES) {
            vec wide[DOT_COLS];
#pragma GCC unroll 4
            for (int c = 0; c < cols; c++) {
                const char *at = from + (size_t)c * (size_t)k * width;
                wide[c] = widen(at, dtype, kk);
                __builtin_prefetch(at + (size_t)DOT_COLS * (size_t)k * width + (size_t)kk * width); /* the group after this one */
            }
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                vec v = load(x + r * x_stride + kk);
#pragma GCC unroll 4
                for (int c = 0; c < cols; c++) sum[r][c] += wide[c] * v;
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int c = 0; c < cols; c++) {
                float total = sum_lanes(sum[r][c]);
                for (int rest = kk; rest < k; rest++)
                    total += widen_one(from + (size_t)c * (size_t)k * width, dtype, rest) * x[r * x_stride + rest];
                float *out = y + r * y_stride + j + c;
                *out = accumulate ? *out + total : total;
            }
    }
}

INLINE void dots_rows(float *y, int64_t y_stride, const float *x, int64_t x_stride, const void *w, lazy_dtype dtype, int n_cols, int k,
                      bool accumulate, const int rows)
{
    int whole = n_cols / DOT_COLS * DOT_COLS;
    const size_t width = dtype == LAZY_F32 ? 4 : 2;
    dots_of(y, y_stride, x, x_stride, w, dtype, whole, k, accumulate, rows, DOT_COLS);
    dots_of(y + whole, y_stride, x, x_stride, (const char *)w + (size_t)whole * (size_t)k * width, dtype, n_cols - whole, k, accumulate,
            rows, 1);
}

INLINE void dots_any(float *y, int64_t y_stride, const float *x, int64_t x_stride, int n_rows, const void *w, lazy_dtype dtype, int n_cols,
                     int k, bool accumulate)
{
    for (; n_rows >= DOT_ROWS; n_rows -= DOT_ROWS, x += DOT_ROWS * x_stride, y += DOT_ROWS * y_stride)
        dots_rows(y, y_stride, x, x_stride, w, dtype, n_cols, k, accumulate, DOT_ROWS);
    switch (n_rows) {
    case 3: dots_rows(y, y_stride, x, x_stride, w, dtype, n_cols, k, accumulate, 3); break;
    case 2: dots_rows(y, y_stride, x, x_stride, w, dtype, n_cols, k, accumulate, 2); break;
    case 1: dots_rows(y, y_stride, x, x_stride, w, dtype, n_cols, k, accumulate, 1); break;
    }
}

static void dots(float *y, int64_t y_stride, const float *x, int64_t x_stride, int n_rows, const void *w, lazy_dtype dtype, int n_cols,
                 int k, bool accumulate)
{
    switch (dtype) {
    case LAZY_F32: dots_any(y, y_stride, x, x_stride, n_rows, w, LAZY_F32, n_cols, k, accumulate); break;
    case LAZY_F16: dots_any(y, y_stride, x, x_stride, n_rows, w, LAZY_F16, n_cols, k, accumulate); break;
    case LAZY_BF16: dots_any(y, y_stride, x, x_stride, n_rows, w, LAZY_BF16, n_cols, k, accumulate); break;
    }
}

/* ---- attention of few rows -------------------------------------------------------------- */

static void key_dots(float *s, int64_t s_stride, const float *q, int n_q, const float *key, int64_t key_stride, const int32_t *slot, int n,
                     int d)
{
    for (int j = 0; j < n; j++) {
        const float *k = key + slot[j] * key_stride;
        for (int h = 0; h < n_q; h++) {
            const float *row = q + (int64_t)h * d;
            vec total = splat(0.0f);
            int i = 0;
            for (; i + LANES <= d; i += LANES) total += load(k + i) * load(row + i);
            float sum = sum_lanes(total);
            for (; i < d; i++) sum += k[i] * row[i];
            s[h * s_stride + j] = sum;
        }
    }
}

static void value_sums(float *o, const float *p, int64_t p_stride, int n_q, const float *value, int64_t value_stride, const int32_t *slot,
                       int n, int d)
{
    for (int h = 0; h < n_q; h++) {
        float *out = o + (int64_t)h * d;
        const float *weight = p + h * p_stride;
        int i = 0;
        for (; i + 4 * LANES <= d; i += 4 * LANES) {
            vec sum[4] = { splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f) };
            for (int j = 0; j < n; j++) {
                const float *v = value + slot[j] * value_stride + i;
#pragma GCC unroll 4
                for (int part = 0; part < 4; part++) sum[part] += load(v + part * LANES) * weight[j];
            }
            for (int part = 0; part < 4; part++) store(out + i + part * LANES, sum[part]);
        }
        for (; i < d; i++) {
            float sum = 0.0f;
            for (int j = 0; j < n; j++) sum += value[slot[j] * value_stride + i] * weight[j];
            out[i] = sum;
        }
    }
}

/* ---- ceilings --------------------------------------------------------------------------- */

static float multiply_adds(const float *random, int steps, double *flops)
{
    enum { CHAINS = 12 }; /* enough to hide the latency, few enough for the registers */
    vec chain[CHAINS], factor[2];
#pragma GCC unroll 12
    for (int i = 0; i < CHAINS; i++) chain[i] = load(random + i);
    for (int i = 0; i < 2; i++) factor[i] = load(random + 16 + i);
    for (int step = 0; step < steps; step++) {
#pragma GCC unroll 12
        for (int i = 0; i < CHAINS; i++) chain[i] = chain[i] * factor[0] + factor[1];
#pragma GCC unroll 12
        for (int i = 0; i < CHAINS; i++) chain[i] = chain[i] * factor[1] + factor[0];
    }
    *flops = 2.0 * 2 * CHAINS * LANES * steps;
    vec total = splat(0.0f);
#pragma GCC unroll 12
    for (int i = 0; i < CHAINS; i++) total += chain[i];
    return sum_lanes(total);
}

/* In as many streams as the hardware prefetches well. */
static float read_all(const void *memory, size_t bytes)
{
    enum { STREAMS = 4 };
    size_t n = bytes / sizeof(float) / STREAMS / LANES * LANES;
    const float *from = memory;
    vec sum[STREAMS];
    for (int s = 0; s < STREAMS; s++) sum[s] = splat(0.0f);
    for (size_t i = 0; i < n; i += LANES)
#pragma GCC unroll 4
        for (int s = 0; s < STREAMS; s++) sum[s] += load(from + (size_t)s * n + i);
    return sum_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

#define STRING_(x) #x
#define STRING(x)  STRING_(x)

const lazy_kernels JOIN(lazy_kernels_, VARIANT) = {
    .name = STRING(VARIANT),
    .tile_rows = TILE_ROWS,
    .tile_cols = TILE_COLS,
    .pack = pack,
    .tile = tile,
    .dots = dots,
    .key_dots = key_dots,
    .value_sums = value_sums,
    .soften = soften,
    .scale_row = scale_row,
    .swiglu_row = swiglu_row,
    .norm_row = norm_row,
    .widen_row = widen_row,
    .multiply_adds = multiply_adds,
    .read = read_all,
};
