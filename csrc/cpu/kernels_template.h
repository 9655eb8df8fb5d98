/* kernels_template.h — the one source of all kernels; kernels.h says what each computes.
 *
 * The including file defines VARIANT, LANES (floats per vector), TILE_ROWS x TILE_VECTORS (the register tile, sized so that
 * sums, one row of b and a broadcast fit the registers), DOT_ROWS (2, 3 or 6, so that four times as many sums do), FEW_PRODUCTS, and where the
 * instruction set can do it, HALVES_AT(address) with WIDEN_F16 and WIDEN_BF16, and LARGER(a, b). */
#include <float.h>
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

/* The four sums of lanes, each in the very order of sum_lanes. */
INLINE four sum_lanes_of_four(vec a, vec b, vec c, vec d)
{
#if LANES == 16
    vec ab = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
             __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    vec cd = __builtin_shufflevector(c, d, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
             __builtin_shufflevector(c, d, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    vec all = __builtin_shufflevector(ab, cd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
              __builtin_shufflevector(ab, cd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    all += __builtin_shufflevector(all, all, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    all += __builtin_shufflevector(all, all, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    return __builtin_shufflevector(all, all, 0, 4, 8, 12);
#elif LANES == 8
    vec ab = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
    vec cd = __builtin_shufflevector(c, d, 0, 1, 2, 3, 8, 9, 10, 11) + __builtin_shufflevector(c, d, 4, 5, 6, 7, 12, 13, 14, 15);
    vec all = __builtin_shufflevector(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) + __builtin_shufflevector(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
    all += __builtin_shufflevector(all, all, 1, 0, 3, 2, 5, 4, 7, 6);
    return __builtin_shufflevector(all, all, 0, 4, 2, 6);
#else
    vec ab = __builtin_shufflevector(a, b, 0, 1, 4, 5) + __builtin_shufflevector(a, b, 2, 3, 6, 7);
    vec cd = __builtin_shufflevector(c, d, 0, 1, 4, 5) + __builtin_shufflevector(c, d, 2, 3, 6, 7);
    return __builtin_shufflevector(ab, cd, 0, 2, 4, 6) + __builtin_shufflevector(ab, cd, 1, 3, 5, 7);
#endif
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

#ifndef LARGER
#define LARGER(a, b) choose((a) > (b), a, b)
#endif

/* 2^x for x <= 127, relative error below 1.5e-7; 0 for x < -126.5. NaN stays NaN. */
INLINE vec exp2_of(vec x)
{
    const float to_integer = 0x1.8p23f; /* adding it leaves the rounded integer in the lowest bits */
    x = LARGER(splat(-127.0f), x);      /* x second: of a NaN and a number it gives the second */
    vec shifted = x + to_integer;
    vec r = x - (shifted - to_integer);
    vec p = splat(0x1.41fbbcp-13f);
    p = p * r + 0x1.5f3e52p-10f;
    p = p * r + 0x1.3b2d4cp-7f;
    p = p * r + 0x1.c6aee8p-5f;
    p = p * r + 0x1.ebfbdcp-3f;
    p = p * r + 0x1.62e430p-1f;
    p = p * r + 1.0f;
    return p * (vec)(((ints)shifted << 23) + 0x3f800000);
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

static float soften(float *s, int n, float *max, float *sum)
{
    vec m = splat(-INFINITY), total = splat(0.0f);
    int whole = n / LANES * LANES;
    for (int i = 0; i < whole; i += LANES) m = LARGER(load(s + i), m);
    if (whole < n) m = LARGER(load_part(s + whole, n - whole, -INFINITY), m);
    float top = *max;
    for (int lane = 0; lane < LANES; lane++) top = m[lane] > top ? m[lane] : top;
    for (int i = 0; i < whole; i += LANES) {
        vec e = exp2_of(load(s + i) - top);
        store(s + i, e);
        total += e;
    }
    if (whole < n) {
        vec e = exp2_of(load_part(s + whole, n - whole, -INFINITY) - top);
        store_part(s + whole, e, n - whole);
        total += e;
    }
    float factor = *max == top ? 1.0f : exp2f(*max - top);
    *sum = *sum * factor + sum_lanes(total);
    *max = top;
    return factor;
}

/* A vector of columns; `masked`: some of them do not see all n. */
INLINE void soften_lanes(float *s, int width, int n, const int32_t *visible, float *max, float *sum, float *factor, const bool masked)
{
    vec before = load(max), m = before, total = splat(0.0f);
    ints seen;
    memcpy(&seen, visible, sizeof seen);
    for (int j = 0; j < n; j++) {
        vec x = load(s + j * width);
        if (masked) store(s + j * width, x = choose(seen > j, x, splat(-INFINITY)));
        m = LARGER(x, m);
    }
    vec top = LARGER(m, splat(-FLT_MAX)); /* of a column that has seen nothing so far: its powers are 0, not NaN */
    for (int j = 0; j < n; j++) {
        vec e = exp2_of(load(s + j * width) - top);
        store(s + j * width, e);
        total += e;
    }
    vec shrink = choose(before == m, splat(1.0f), exp2_of(before - top));
    store(sum, load(sum) * shrink + total);
    store(max, m);
    store(factor, shrink);
}

static void soften_columns(float *s, int width, int n, const int32_t *visible, float *max, float *sum, float *factor)
{
    for (int c = 0; c < width; c += LANES) {
        bool masked = false;
        for (int lane = 0; lane < LANES; lane++) masked |= visible[c + lane] < n;
        if (masked) soften_lanes(s + c, width, n, visible + c, max + c, sum + c, factor + c, true);
        else soften_lanes(s + c, width, n, visible + c, max + c, sum + c, factor + c, false);
    }
}

static void scale_row(float *y, int n, float factor)
{
    for (int i = 0; i < n; i++) y[i] *= factor;
}

static void swiglu_row(float *y, const float *gate, const float *up, int n)
{
    for (int i = 0; i < n; i += LANES) {
        vec g = load_part(gate + i, n - i, 0.0f), u = load_part(up + i, n - i, 0.0f);
        vec power = choose(g < -88.0f, splat(127.0f), g * -0x1.715476p+0f); /* e^-g = 2^power */
        store_part(y + i, g / (1.0f + exp2_of(power)) * u, n - i);
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

/* Elements i … k-1, fewer than a vector of them, and zeros. */
INLINE vec widen_part(const void *p, lazy_dtype dtype, int i, int k)
{
    float part[LANES] = { 0 };
    for (int lane = 0; i + lane < k; lane++) part[lane] = widen_one(p, dtype, i + lane);
    return load(part);
}

/* ---- the register tile ------------------------------------------------------------------ */

/* Turns LANES rows of LANES values round: afterwards v[i] holds the i-th value of every row. */
INLINE void transpose(vec v[LANES])
{
#if LANES == 16
#define LOW  0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif LANES == 8
#define LOW  0, 8, 1, 9, 2, 10, 3, 11
#define HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define LOW  0, 4, 1, 5
#define HIGH 2, 6, 3, 7
#endif
    /* every round interleaves the first half of the rows with the second */
    vec from[LANES];
#pragma GCC unroll 4
    for (int round = 1; round < LANES; round *= 2) {
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) from[i] = v[i];
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; i++) {
            v[2 * i] = __builtin_shufflevector(from[i], from[i + LANES / 2], LOW);
            v[2 * i + 1] = __builtin_shufflevector(from[i], from[i + LANES / 2], HIGH);
        }
    }
#undef LOW
#undef HIGH
}

INLINE void pack_any(float *panel, const void *const *row, int n, lazy_dtype dtype, int k)
{
    for (int j = 0; j < TILE_COLS; j += LANES) {
        int kk = 0;
        for (; kk + LANES <= k && j + LANES <= n; kk += LANES) {
            vec v[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) v[i] = widen(row[j + i], dtype, kk);
            transpose(v);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) store(panel + (int64_t)(kk + i) * TILE_COLS + j, v[i]);
        }
        for (; kk < k; kk++)
            for (int i = j; i < j + LANES; i++) panel[(int64_t)kk * TILE_COLS + i] = i < n ? widen_one(row[i], dtype, kk) : 0.0f;
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

/* `rows` rows of a, at a[r * a_row + kk * a_step], by `vectors` vectors of b. What lies at either of `soon` is fetched meanwhile, as many
 * floats as TILE_ROWS rows of a hold. */
INLINE void tile_of(float *c, int64_t c_stride, const float *a, int64_t a_row, int64_t a_step, const float *b, int64_t b_stride, int k,
                    int cols, bool accumulate, const float *const soon[2], const int rows, const int vectors)
{
    vec sum[TILE_ROWS][TILE_VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) sum[r][v] = splat(0.0f);

    for (int kk = 0; kk < k; kk++, b += b_stride) {
        vec column[TILE_VECTORS];
        for (int i = 0; soon && i < 2; i++) __builtin_prefetch(soon[i] + kk * TILE_ROWS);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) column[v] = load(b + v * LANES);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            float x = a[r * a_row + kk * a_step];
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) sum[r][v] += column[v] * x;
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        float *out = c + r * c_stride;
        if (cols == vectors * LANES) {
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) store(out + v * LANES, accumulate ? load(out + v * LANES) + sum[r][v] : sum[r][v]);
            continue;
        }
        float part[TILE_COLS];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) store(part + v * LANES, sum[r][v]);
        for (int j = 0; j < cols; j++) out[j] = accumulate ? out[j] + part[j] : part[j];
    }
}

INLINE void tile_any(float *c, int64_t c_stride, const float *a, int64_t a_row, int64_t a_step, const float *b, int64_t b_stride, int k,
                     int rows, int cols, bool accumulate, const float *const soon[2], const int vectors)
{
#define TILE(n)                                                                                                                            \
    case n: tile_of(c, c_stride, a, a_row, a_step, b, b_stride, k, cols, accumulate, soon, n, vectors); break;
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

static void tile(float *c, int64_t c_stride, const float *a, int64_t a_stride, const float *b, int64_t b_stride, int k, int rows, int cols,
                 bool accumulate)
{
    tile_any(c, c_stride, a, a_stride, 1, b, b_stride, k, rows, cols, accumulate, NULL, TILE_VECTORS);
}

/* ---- few rows --------------------------------------------------------------------------- */

enum { FETCH_AHEAD = 1024 }; /* bytes: about what a stream passes in the time of a read from memory */

/* Four rows of w that lie `spacing` apart, or one: y[r, c * y_spacing] for `rows` rows of x. */
INLINE void dots_of(float *y, int64_t y_stride, int64_t y_spacing, const float *x, int64_t x_stride, const char *w, int64_t spacing,
                    lazy_dtype dtype, int k, bool accumulate, const int rows, const int cols)
{
    vec sum[DOT_ROWS][4];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < cols; c++) sum[r][c] = splat(0.0f);
    int kk = 0;
    for (; kk + LANES <= k; kk += LANES) {
        vec wide[4];
#pragma GCC unroll 4
        for (int c = 0; c < cols; c++) {
            const char *row = w + c * spacing;
            wide[c] = widen(row, dtype, kk);
            __builtin_prefetch(row + kk * (dtype == LAZY_F32 ? 4 : 2) + FETCH_AHEAD);
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            vec v = load(x + r * x_stride + kk);
#pragma GCC unroll 4
            for (int c = 0; c < cols; c++) sum[r][c] += wide[c] * v;
        }
    }
    if (kk < k) { /* as vectors too: a sum must not depend on whether its column comes with three others */
        vec wide[4];
        for (int c = 0; c < cols; c++) wide[c] = widen_part(w + c * spacing, dtype, kk, k);
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < cols; c++) sum[r][c] += wide[c] * load_part(x + r * x_stride + kk, k - kk, 0.0f);
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        four total = cols == 4 ? sum_lanes_of_four(sum[r][0], sum[r][1], sum[r][2], sum[r][3]) : (four){ sum_lanes(sum[r][0]) };
        float *out = y + r * y_stride;
        if (accumulate)
            for (int c = 0; c < cols; c++) out[c * y_spacing] += total[c];
        else
            for (int c = 0; c < cols; c++) out[c * y_spacing] = total[c];
    }
}

INLINE void dots_rows(float *y, int64_t y_stride, int64_t y_spacing, const float *x, int64_t x_stride, const char *w, int64_t spacing,
                      lazy_dtype dtype, int k, bool accumulate, const int rows, const int cols, int n_cols)
{
    int64_t row_bytes = (int64_t)k * (dtype == LAZY_F32 ? 4 : 2);
    for (int j = 0; j < n_cols; j++)
        dots_of(y + j, y_stride, y_spacing, x, x_stride, w + j * row_bytes, spacing, dtype, k, accumulate, rows, cols);
}

/* n_cols rows of w, or where cols is 4 as many in each of four streams: once for every few rows of x, which meanwhile stay in the
 * first cache. */
INLINE void dots_block(float *y, int64_t y_stride, int64_t y_spacing, const float *x, int64_t x_stride, int n_rows, const char *w,
                       int64_t spacing, lazy_dtype dtype, int k, bool accumulate, const int cols, int n_cols)
{
    int groups = (n_rows + DOT_ROWS - 1) / DOT_ROWS;
    for (int rows; n_rows > 0; n_rows -= rows, x += rows * x_stride, y += rows * y_stride) {
        rows = (n_rows + groups - 1) / groups;
        groups--;
        switch (rows) {
#define DOTS(n)                                                                                                                            \
    case n: dots_rows(y, y_stride, y_spacing, x, x_stride, w, spacing, dtype, k, accumulate, n, cols, n_cols); break;
            DOTS(1)
            DOTS(2)
#if DOT_ROWS >= 3
            DOTS(3)
#endif
#if DOT_ROWS >= 6
            DOTS(4)
            DOTS(5)
            DOTS(6)
#endif
#undef DOTS
        }
    }
}

/* The rows of w are read in four streams: the hardware fetches those ahead better than a single one. */
INLINE void dots_any(float *y, int64_t y_stride, const float *x, int64_t x_stride, int n_rows, const void *w, lazy_dtype dtype, int n_cols,
                     int k, bool accumulate)
{
    enum { BLOCK = 8 }; /* of each stream: they are read from memory once, then from the second cache */
    const char *from = w;
    int64_t row_bytes = (int64_t)k * (dtype == LAZY_F32 ? 4 : 2);
    int stream = n_cols / 4;
    for (int j = 0; j < stream; j += BLOCK)
        dots_block(y + j, y_stride, stream, x, x_stride, n_rows, from + j * row_bytes, stream * row_bytes, dtype, k, accumulate, 4,
                   stream - j < BLOCK ? stream - j : BLOCK);
    dots_block(y + 4 * stream, y_stride, 0, x, x_stride, n_rows, from + 4 * stream * row_bytes, 0, dtype, k, accumulate, 1,
               n_cols - 4 * stream);
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

/* ---- attention in columns --------------------------------------------------------------- */

/* Strips of a tile's rows, all about as high, that n rows need. */
INLINE int strips_of(int n) { return (n + TILE_ROWS - 1) / TILE_ROWS; }

/* The next strip's keys, and the values, are fetched meanwhile: a tile reads more rows at a time than the hardware foresees. */
INLINE void key_columns_of(float *s, const float *key, const float *q, const float *value, int n, int d, const int vectors)
{
    const int width = vectors * LANES;
    for (int strips = strips_of(n), rows; n > 0; n -= rows, s += rows * width, key += rows * d, value += rows * d) {
        rows = (n + strips - 1) / strips;
        strips--;
        const float *const soon[2] = { key + rows * d, value };
        tile_any(s, width, key, d, 1, q, TILE_COLS, d, rows, width, false, soon, vectors);
    }
}

static void key_columns(float *s, int width, const float *key, const float *q, const float *value, int n, int d)
{
    if (width == LANES) key_columns_of(s, key, q, value, n, d, 1);
    else key_columns_of(s, key, q, value, n, d, TILE_VECTORS);
}

INLINE void value_columns_of(float *o, const float *p, int width, int cols, const float *value, int64_t stride, int n, int d, int here,
                             const int vectors)
{
    for (int strips = strips_of(cols), rows; cols > 0; cols -= rows, o += rows * d, p += rows) {
        rows = (cols + strips - 1) / strips;
        strips--;
        tile_any(o, d, p, 1, width, value, stride, n, rows, here, true, NULL, vectors);
    }
}

static void value_columns(float *o, const float *p, int width, int cols, const float *value, int64_t stride, int n, int d)
{
    for (int i = 0; i < d; i += TILE_COLS) {
        int here = d - i < TILE_COLS ? d - i : TILE_COLS;
        if (here <= LANES) value_columns_of(o + i, p, width, cols, value + i, stride, n, d, here, 1);
        else value_columns_of(o + i, p, width, cols, value + i, stride, n, d, here, TILE_VECTORS);
    }
}

/* ---- attention row by row --------------------------------------------------------------- */

/* Four rows of a cache, and which of the n tokens they belong to. The tokens are gone through in four streams, like weights;
 * the few left over at the end come together. */
typedef struct four_rows {
    const float *row[4];
    int token[4], n;
} four_rows;

INLINE four_rows rows_at(const float *base, const int32_t *slot, int d, int turn, int n)
{
    int stream = n / 4, left = turn < stream ? 4 : n - 4 * stream;
    four_rows rows = { .n = left };
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        rows.token[i] = turn < stream ? i * stream + turn : 4 * stream + (i < left ? i : left - 1);
        rows.row[i] = base + (int64_t)slot[rows.token[i]] * d;
    }
    return rows;
}

/* A few heads at a time go over the same four rows, which are then loaded once. */
#define BY_HEADS(work)                                                                                                                     \
    for (int h = 0, heads; h < n_heads; h += heads) {                                                                                      \
        heads = n_heads - h < DOT_ROWS ? n_heads - h : DOT_ROWS;                                                                           \
        switch (heads) {                                                                                                                   \
            HEADS(work, 1)                                                                                                                 \
            HEADS(work, 2)                                                                                                                 \
            MORE_HEADS(work)                                                                                                               \
        }                                                                                                                                  \
    }
#define HEADS(work, n)                                                                                                                     \
    case n: work(n); break;
#if DOT_ROWS >= 6
#define MORE_HEADS(work) HEADS(work, 3) HEADS(work, 4) HEADS(work, 5) HEADS(work, 6)
#elif DOT_ROWS == 3
#define MORE_HEADS(work) HEADS(work, 3)
#else
#define MORE_HEADS(work)
#endif

INLINE void key_dots_of(float *s, int64_t s_stride, const float *q, const four_rows *keys, int d, const int heads)
{
    vec sum[DOT_ROWS][4];
#pragma GCC unroll 8
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) sum[h][c] = splat(0.0f);
    int i = 0;
    for (; i + LANES <= d; i += LANES) {
        vec key[4];
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) key[c] = load(keys->row[c] + i);
#pragma GCC unroll 8
        for (int h = 0; h < heads; h++) {
            vec v = load(q + h * d + i);
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) sum[h][c] += key[c] * v;
        }
    }
#pragma GCC unroll 8
    for (int h = 0; h < heads; h++) {
        four total = sum_lanes_of_four(sum[h][0], sum[h][1], sum[h][2], sum[h][3]);
        for (int rest = i; rest < d; rest++)
            for (int c = 0; c < 4; c++) total[c] += keys->row[c][rest] * q[h * d + rest];
        for (int c = 0; c < keys->n; c++) s[h * s_stride + keys->token[c]] = total[c];
    }
}

static void key_dots(float *s, int64_t s_stride, const float *q, int n_heads, const float *key, const int32_t *slot, int n, int d)
{
    for (int turn = 0; turn < (n + 3) / 4; turn++) {
        four_rows keys = rows_at(key, slot, d, turn, n);
#define WORK(heads) key_dots_of(s + h * s_stride, s_stride, q + h * d, &keys, d, heads)
        BY_HEADS(WORK)
#undef WORK
    }
}

INLINE void value_sums_of(float *o, const float *p, int64_t p_stride, const four_rows *values, int d, const int heads)
{
    float weight[DOT_ROWS][4] = { 0 };
#pragma GCC unroll 8
    for (int h = 0; h < heads; h++)
        for (int c = 0; c < values->n; c++) weight[h][c] = p[h * p_stride + values->token[c]];
    int i = 0;
    for (; i + LANES <= d; i += LANES) {
        vec value[4];
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) value[c] = load(values->row[c] + i);
#pragma GCC unroll 8
        for (int h = 0; h < heads; h++) {
            vec sum = load(o + h * d + i);
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) sum += value[c] * weight[h][c];
            store(o + h * d + i, sum);
        }
    }
    for (; i < d; i++)
        for (int h = 0; h < heads; h++)
            for (int c = 0; c < 4; c++) o[h * d + i] += values->row[c][i] * weight[h][c];
}

static void value_sums(float *o, const float *p, int64_t p_stride, int n_heads, const float *value, const int32_t *slot, int n, int d)
{
    for (int turn = 0; turn < (n + 3) / 4; turn++) {
        four_rows values = rows_at(value, slot, d, turn, n);
#define WORK(heads) value_sums_of(o + h * d, p + h * p_stride, p_stride, &values, d, heads)
        BY_HEADS(WORK)
#undef WORK
    }
}

/* ---- ceilings --------------------------------------------------------------------------- */

static float multiply_adds(const float *random, int steps, double *flops)
{
    enum { CHAINS = 12 }; /* enough to hide the latency, few enough for the registers */
    vec chain[CHAINS], mirror = splat(-0x1.fffffep-1f), addend = load(random + 16);
#pragma GCC unroll 12
    for (int i = 0; i < CHAINS; i++) chain[i] = load(random + i); /* from here to addend - chain, and back */
    for (int step = 0; step < steps; step++)
#pragma GCC unroll 12
        for (int i = 0; i < CHAINS; i++) chain[i] = chain[i] * mirror + addend;
    *flops = 2.0 * CHAINS * LANES * steps;
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
    .lanes = LANES,
    .few_rows = FEW_PRODUCTS,
    .pack = pack,
    .tile = tile,
    .dots = dots,
    .key_columns = key_columns,
    .soften_columns = soften_columns,
    .value_columns = value_columns,
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
