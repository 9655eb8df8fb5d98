/* kernels_template.h — the source of all kernels; kernels.h specifies each.
 *
 * The including file defines VARIANT and ISA; LANES, the floats in a vector; TILE_ROWS and TILE_VECTORS, the size of the register tile (its
 * sums, one row of b and a broadcast must fit the registers); DOT_ROWS, 2, 3 or 6 (4 DOT_ROWS sums must fit the registers);
 * MAX_UNPACKED_HALVES and MAX_UNPACKED_OTHERS; and where the instruction set has them, LARGER(a, b), and HALVES_AT(address) with WIDEN_F16 and WIDEN_BF16;
 * BYTES_AT and SIGNED_BYTES_AT, as many integers as a vector has; LOOK_UP(table, ints), by the low 4 bits of each.
 *
 * With OPERANDS_BF16, products are of bf16, and PAIR_PRODUCTS, NEIGHBOURS and INTERLEAVED may be defined by instructions. */
#include <float.h>
#include <math.h>

#include "vectors.h"
#include "kernels_quantized.h"

enum { TILE_COLS = TILE_VECTORS * LANES };

static void widen_row(float *y, const void *x, lazy_dtype dtype, int n)
{
    switch (dtype) {
    case LAZY_F32: memcpy(y, x, (size_t)n * sizeof *y); break;
    case LAZY_F16: widen_any(y, x, LAZY_F16, n); break;
    case LAZY_BF16: widen_any(y, x, LAZY_BF16, n); break;
    case LAZY_Q8_0: widen_blocks(y, x, LAZY_Q8_0, n); break;
    case LAZY_Q4_0: widen_blocks(y, x, LAZY_Q4_0, n); break;
    case LAZY_Q4_1: widen_blocks(y, x, LAZY_Q4_1, n); break;
    case LAZY_Q5_0: widen_blocks(y, x, LAZY_Q5_0, n); break;
    case LAZY_Q5_1: widen_blocks(y, x, LAZY_Q5_1, n); break;
    case LAZY_Q4_K: widen_blocks(y, x, LAZY_Q4_K, n); break;
    case LAZY_Q5_K: widen_blocks(y, x, LAZY_Q5_K, n); break;
    case LAZY_Q6_K: widen_blocks(y, x, LAZY_Q6_K, n); break;
    }
}

/* ---- exp -------------------------------------------------------------------------------- */

/* 2^x for x <= 127 with a relative error below 1.5e-7; 0 for x < -126.5; NaN for NaN. */
INLINE vec exp2_of(vec x)
{
    const float to_integer = 0x1.8p23f; /* adding it leaves the rounded integer in the lowest bits */
    x = LARGER(splat(-127.0f), x);      /* x is the second operand: LARGER returns that one if either is NaN */
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

static float online_softmax(float *s, int n, float *max, float *sum)
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

/* One vector of columns; masked: some columns see fewer than n keys. A column may see none. */
INLINE void online_softmax_lanes(float *s, int width, int n, const int32_t *hidden, const int32_t *visible, float *max, float *sum,
                                 float *factor, const bool masked)
{
    vec before = load(max), m = before, total = splat(0.0f);
    ints begin, end;
    memcpy(&begin, hidden, sizeof begin);
    memcpy(&end, visible, sizeof end);
    for (int j = 0; j < n; j++) {
        vec x = load(s + j * width);
        if (masked) store(s + j * width, x = choose((begin <= j) & (end > j), x, splat(-INFINITY)));
        m = LARGER(x, m);
    }
    vec top = LARGER(m, splat(-FLT_MAX)); /* finite for a column that has seen no key yet, so that its powers are 0 and not NaN */
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

static void online_softmax_columns(float *s, int width, int n, const int32_t *hidden, const int32_t *visible, float *max, float *sum,
                                   float *factor)
{
    for (int c = 0; c < width; c += LANES) {
        bool masked = false;
        for (int lane = 0; lane < LANES; lane++) masked |= hidden[c + lane] > 0 || visible[c + lane] < n;
        if (masked) online_softmax_lanes(s + c, width, n, hidden + c, visible + c, max + c, sum + c, factor + c, true);
        else online_softmax_lanes(s + c, width, n, hidden + c, visible + c, max + c, sum + c, factor + c, false);
    }
}

static void scale_row(float *y, int n, float factor)
{
    for (int i = 0; i < n; i++) y[i] *= factor;
}

/* y = gate * sigmoid(x) * up, with x = gate for SiLU and x = 2 sqrt(2/pi) (gate + 0.044715 gate^3) for GELU */
INLINE void gate_row(float *y, const float *gate, const float *up, int n, const bool gelu)
{
    for (int i = 0; i < n; i += LANES) {
        vec g = load_part(gate + i, n - i, 0.0f), u = load_part(up + i, n - i, 0.0f);
        vec x = gelu ? g * (0x1.988454p+0f + 0x1.2444f2p-4f * (g * g)) : g;
        vec power = choose(x < -88.0f, splat(127.0f), x * -0x1.715476p+0f); /* e^-x = 2^power */
        store_part(y + i, g / (1.0f + exp2_of(power)) * u, n - i);
    }
}

static void swiglu_row(float *y, const float *gate, const float *up, int n) { gate_row(y, gate, up, n, false); }
static void geglu_row(float *y, const float *gate, const float *up, int n) { gate_row(y, gate, up, n, true); }

static bool norm_row(float *y, const float *x, const float *weight, int n, float eps, bool accumulate)
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
    if (accumulate)
        for (int i = 0; i < n; i++) y[i] += x[i] * factor * weight[i];
    else
        for (int i = 0; i < n; i++) y[i] = x[i] * factor * weight[i];
    return factor > 0.0f; /* NaN beside a NaN, 0 beside an Inf */
}

/* ---- operands of products --------------------------------------------------------------- */

/* 4 bytes: one f32, or two neighbouring values in bf16, the first in the low half. */
#ifdef OPERANDS_BF16
typedef int32_t operand;
enum { PER_OPERAND = 2 };

#ifndef PAIR_PRODUCTS
/* To the nearest, ties to even; NaN stays NaN. */
INLINE ints rounded(vec v)
{
    ints bits = (ints)v, even = (bits >> 16) & 1;
    return choose_ints(v == v, (bits + 0x7fff + even) >> 16, (bits >> 16) | 0x40) & 0xffff;
}
INLINE vec interleaved(vec low, vec high) { return (vec)(rounded(low) | rounded(high) << 16); }
INLINE vec neighbours(vec first, vec second)
{
    float values[2 * LANES], low[LANES], high[LANES];
    store(values, first);
    store(values + LANES, second);
    for (int lane = 0; lane < LANES; lane++) {
        low[lane] = values[2 * lane];
        high[lane] = values[2 * lane + 1];
    }
    return interleaved(load(low), load(high));
}
#define PAIR_PRODUCTS(sum, a, b)                                                                                                           \
    (sum + (vec)((ints)(a) << 16) * (vec)((ints)(b) << 16) + (vec)((ints)(a) & -0x10000) * (vec)((ints)(b) & -0x10000))
#define NEIGHBOURS(first, second) neighbours(first, second) /* (first[0], first[1]), (first[2], first[3]), … */
#define INTERLEAVED(low, high)    interleaved(low, high)    /* (low[0], high[0]), (low[1], high[1]), … */
#endif

INLINE vec multiply_add(vec sum, vec a, vec b) { return PAIR_PRODUCTS(sum, a, b); }
INLINE vec splat_operand(operand x) { return (vec)(x - (ints){ 0 }); }

/* LANES operands: values i … i + 2 LANES - 1. */
INLINE vec operands(const void *p, lazy_dtype dtype, int i)
{
    if (dtype == LAZY_BF16) return load((const uint16_t *)p + i);
    return NEIGHBOURS(widen(p, dtype, i), widen(p, dtype, i + LANES));
}

/* The v-th LANES operands of a group. */
INLINE vec group_operands(const uint8_t *q, lazy_dtype dtype, const scales *s, int g, int v)
{
    return NEIGHBOURS(widen_group(q, dtype, s, g, 2 * v), widen_group(q, dtype, s, g, 2 * v + 1));
}
#else
typedef float operand;
enum { PER_OPERAND = 1 };
INLINE vec multiply_add(vec sum, vec a, vec b) { return sum + a * b; }
INLINE vec splat_operand(operand x) { return splat(x); }
INLINE vec operands(const void *p, lazy_dtype dtype, int i) { return widen(p, dtype, i); }
INLINE vec group_operands(const uint8_t *q, lazy_dtype dtype, const scales *s, int g, int v) { return widen_group(q, dtype, s, g, v); }
#endif

enum { STEP = PER_OPERAND * LANES }; /* values in a vector of operands */

/* Values i … k-1, fewer than STEP, then zeros. */
INLINE vec operands_part(const void *p, lazy_dtype dtype, int i, int k)
{
    float part[STEP] = { 0 };
    for (int j = 0; i + j < k; j++) part[j] = widen_one(p, dtype, i + j);
    return operands(part, LAZY_F32, 0);
}

INLINE void convert_any(void *to, const void *from, lazy_dtype dtype, int k)
{
    int i = 0;
    for (operand *out = to; i < k; i += STEP, out += LANES) {
        if (i + STEP <= k) {
            store((float *)out, operands(from, dtype, i));
            continue;
        }
        vec part = operands_part(from, dtype, i, k);
        memcpy(out, &part, (size_t)ceil_div(k - i, PER_OPERAND) * sizeof *out);
    }
}

static void convert(void *to, const float *from, int k) { convert_any(to, from, LAZY_F32, k); }

/* Calls work(type of K and V), a constant. */
#define BY_KV_TYPE(work)                                                                                                                   \
    switch (dtype) {                                                                                                                       \
    case LAZY_F32: work(LAZY_F32); break;                                                                                                  \
    case LAZY_F16: work(LAZY_F16); break;                                                                                                  \
    default: work(LAZY_BF16);                                                                                                              \
    }

static void convert_key(void *to, const void *key, lazy_dtype dtype, int d){
#define WORK(type) convert_any(to, key, type, d)
    BY_KV_TYPE(WORK)
#undef WORK
}

/* ---- the register tile ------------------------------------------------------------------ */

INLINE void pack_any(operand *panel, const void *const *row, int n, lazy_dtype dtype, int k)
{
    for (int j = 0; j < TILE_COLS; j += LANES) {
        operand *to = panel + j;
        int kk = 0;
        for (; kk + STEP <= k && j + LANES <= n; kk += STEP) {
            vec v[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) {
                v[i] = operands(row[j + i], dtype, kk);
                __builtin_prefetch((const char *)row[j + i] + lazy_row_bytes(dtype, kk) + FETCH_AHEAD);
            }
            transpose(v);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++, to += TILE_COLS) store((float *)to, v[i]);
        }
        for (int rest; kk < k; kk += STEP) {
            operand column[LANES];
            rest = ceil_div(min_int(STEP, k - kk), PER_OPERAND);
            for (int i = 0; i < LANES; i++) {
                vec v = i + j < n ? operands_part(row[i + j], dtype, kk, min_int(k, kk + STEP)) : splat(0.0f);
                memcpy(column, &v, sizeof column);
                for (int at = 0; at < rest; at++) to[at * TILE_COLS + i] = column[at];
            }
            to += rest * TILE_COLS;
        }
    }
}

/* Widens the rows' blocks into f32 rows first, so many elements at a time that these stay in the L1 cache. */
static void pack_quantized(operand *panel, const void *const *row, int n, lazy_dtype dtype, int k)
{
    float wide[TILE_COLS][LAZY_LONGEST_BLOCK];
    const void *from[TILE_COLS];
    for (int kk = 0; kk < k; kk += LAZY_LONGEST_BLOCK) {
        int len = min_int(LAZY_LONGEST_BLOCK, k - kk);
        for (int j = 0; j < n; j++) {
            widen_row(wide[j], (const char *)row[j] + lazy_row_bytes(dtype, kk), dtype, len);
            from[j] = wide[j];
        }
        pack_any(panel + (int64_t)kk / PER_OPERAND * TILE_COLS, from, n, LAZY_F32, len);
    }
}

static void pack(void *panel, const void *const *row, int n, lazy_dtype dtype, int k)
{
    switch (dtype) {
    case LAZY_F32: pack_any(panel, row, n, LAZY_F32, k); break;
    case LAZY_F16: pack_any(panel, row, n, LAZY_F16, k); break;
    case LAZY_BF16: pack_any(panel, row, n, LAZY_BF16, k); break;
    default: pack_quantized(panel, row, n, dtype, k);
    }
}

/* c[r, j] (+)= sum over kk of a[r * a_row + kk * a_step] * b[kk * b_stride + j]; k operands */
typedef struct tile_product {
    float *c;
    int64_t c_stride;
    const operand *a;
    int64_t a_row, a_step;
    const operand *b;
    int64_t b_stride;
    int k, cols;
    bool accumulate;
    const operand *prefetch[2]; /* NULL, or k TILE_ROWS operands each to prefetch */
} tile_product;

INLINE void tile_of(const tile_product *t, const int rows, const int vectors)
{
    vec sum[TILE_ROWS][TILE_VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) sum[r][v] = splat(0.0f);

    const operand *a = t->a, *b = t->b;
    for (int kk = 0; kk < t->k; kk++, a += t->a_step, b += t->b_stride) {
        vec column[TILE_VECTORS];
        for (int i = 0; i < 2 && t->prefetch[i]; i++) __builtin_prefetch(t->prefetch[i] + kk * TILE_ROWS);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) column[v] = load((const float *)b + v * LANES);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            vec x = splat_operand(a[r * t->a_row]);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) sum[r][v] = multiply_add(sum[r][v], column[v], x);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        float *out = t->c + r * t->c_stride;
        if (t->cols == vectors * LANES) {
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) store(out + v * LANES, t->accumulate ? load(out + v * LANES) + sum[r][v] : sum[r][v]);
            continue;
        }
        float part[TILE_COLS] = { 0 };
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) store(part + v * LANES, sum[r][v]);
        for (int j = 0; j < t->cols; j++) out[j] = t->accumulate ? out[j] + part[j] : part[j];
    }
}

INLINE void tile_any(tile_product t, int rows, const int vectors)
{
#define TILE(n)                                                                                                                            \
    case n: tile_of(&t, n, vectors); break;
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

static void tile(float *c, int64_t c_stride, const void *a, int64_t a_stride, const void *b, lazy_dtype dtype, int k, int rows, int cols,
                 bool accumulate)
{
    (void)dtype;
    tile_any((tile_product){ c, c_stride, a, a_stride, 1, b, TILE_COLS, ceil_div(k, PER_OPERAND), cols, accumulate, { NULL } }, rows,
             TILE_VECTORS);
}

/* ---- unpacked --------------------------------------------------------------------------- */

#include "dots.h"

INLINE void dots_of(dot_products t, const int rows, const int cols)
{
    vec sum[DOT_ROWS][4];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < cols; c++) sum[r][c] = splat(0.0f);
    int kk = 0;
    const operand *x = t.x;
    for (; lazy_is_quantized(t.dtype) && kk < t.k; kk += lazy_formats[t.dtype].values) {
        const char *block = t.w + lazy_row_bytes(t.dtype, kk);
        const int groups = lazy_formats[t.dtype].values / LAZY_GROUP;
        scales s[4];
#pragma GCC unroll 4
        for (int c = 0; c < cols; c++) read_scales(&s[c], block + c * t.spacing, t.dtype);
#pragma GCC unroll 8
        for (int g = 0; g < groups; g++) {
            uint8_t room[4][LAZY_GROUP];
            const uint8_t *q[4];
#pragma GCC unroll 4
            for (int c = 0; c < cols; c++) {
                const char *here = block + c * t.spacing;
                q[c] = group_at(room[c], here, t.dtype, g);
                __builtin_prefetch(here + g * lazy_formats[t.dtype].bytes / groups + FETCH_AHEAD / 2); /* these bytes take longer */
            }
#pragma GCC unroll 8
            for (int v = 0; v < GROUP_VECTORS / PER_OPERAND; v++, x += LANES) {
                vec wide[4];
#pragma GCC unroll 4
                for (int c = 0; c < cols; c++) wide[c] = group_operands(q[c], t.dtype, &s[c], g, v);
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++) {
                    vec values = load((const float *)x + r * t.x_stride);
#pragma GCC unroll 4
                    for (int c = 0; c < cols; c++) sum[r][c] = multiply_add(sum[r][c], wide[c], values);
                }
            }
        }
    }
    for (; kk + STEP <= t.k; kk += STEP, x += LANES) {
        vec wide[4];
#pragma GCC unroll 4
        for (int c = 0; c < cols; c++) {
            const char *row = t.w + c * t.spacing;
            wide[c] = operands(row, t.dtype, kk);
            const char *here = row + kk * (t.dtype == LAZY_F32 ? 4 : 2);
            if (rows == 1) __builtin_prefetch(here + FETCH_AHEAD);
            else __builtin_prefetch(here + 2 * FETCH_AHEAD, 0, 2); /* into the L2 cache: loads are too few to keep the L1's misses going */
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            vec v = load((const float *)x + r * t.x_stride);
#pragma GCC unroll 4
            for (int c = 0; c < cols; c++) sum[r][c] = multiply_add(sum[r][c], wide[c], v);
        }
    }
    if (kk < t.k) { /* by vectors too: a sum must not depend on whether its column is computed with three others */
        vec wide[4];
        for (int c = 0; c < cols; c++) wide[c] = operands_part(t.w + c * t.spacing, t.dtype, kk, t.k);
        for (int r = 0; r < rows; r++) {
            vec v = splat(0.0f);
            memcpy(&v, x + r * t.x_stride, (size_t)ceil_div(t.k - kk, PER_OPERAND) * sizeof *x);
            for (int c = 0; c < cols; c++) sum[r][c] = multiply_add(sum[r][c], wide[c], v);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        four total = cols == 4 ? sum_lanes_of_four(sum[r][0], sum[r][1], sum[r][2], sum[r][3]) : (four){ sum_lanes(sum[r][0]) };
        float *out = t.y + r * t.y_stride;
        if (t.accumulate)
            for (int c = 0; c < cols; c++) out[c * t.y_spacing] += total[c];
        else
            for (int c = 0; c < cols; c++) out[c * t.y_spacing] = total[c];
    }
}

/* ---- attention in columns --------------------------------------------------------------- */

/* Prefetches the keys of the next strip and the values: a tile reads more rows at a time than the hardware prefetches. */
INLINE void key_columns_of(float *s, const operand *key, const operand *q, const operand *value, int n, int d, const int vectors)
{
    const int width = vectors * LANES, k = ceil_div(d, PER_OPERAND);
    for (int strips = ceil_div(n, TILE_ROWS), rows; n > 0; n -= rows, s += rows * width, key += rows * k, value += rows * k) {
        rows = ceil_div(n, strips);
        strips--;
        tile_any((tile_product){ s, width, key, k, 1, q, TILE_COLS, k, width, false, { key + rows * k, value } }, rows, vectors);
    }
}

static void key_columns(float *s, int width, const void *key, const void *q, const void *value, int n, int d)
{
    if (width == LANES) key_columns_of(s, key, q, value, n, d, 1);
    else key_columns_of(s, key, q, value, n, d, TILE_VECTORS);
}

/* Values of neighbouring tokens come together in an operand, and so must the powers that they are multiplied by. */
INLINE void pair_values_of(float *to, const void *first, const void *second, lazy_dtype dtype, int d)
{
#ifdef OPERANDS_BF16
    for (int i = 0; i < d; i += LANES) {
        vec high = second ? widen_part(second, dtype, i, d) : splat(0.0f);
        store_part(to + i, INTERLEAVED(widen_part(first, dtype, i, d), high), d - i);
    }
#else
    (void)second;
    widen_any(to, first, dtype, d);
#endif
}

static void pair_values(void *to, const void *first, const void *second, lazy_dtype dtype, int d){
#define WORK(type) pair_values_of(to, first, second, type, d)
    BY_KV_TYPE(WORK)
#undef WORK
}

/* (n, width) powers as operands, in place. */
INLINE const operand *pair_powers(float *p, int width, int n)
{
#ifdef OPERANDS_BF16
    for (int j = 0; j < n; j += 2)
        for (int c = 0; c < width; c += LANES) {
            vec high = j + 1 < n ? load(p + (j + 1) * width + c) : splat(0.0f);
            store(p + j / 2 * width + c, INTERLEAVED(load(p + j * width + c), high));
        }
#else
    (void)width, (void)n;
#endif
    return (const operand *)p;
}

INLINE void value_columns_of(float *o, const operand *p, int width, int cols, const operand *value, int64_t stride, int n, int d, int here,
                             const int vectors)
{
    for (int strips = ceil_div(cols, TILE_ROWS), rows; cols > 0; cols -= rows, o += rows * d, p += rows) {
        rows = ceil_div(cols, strips);
        strips--;
        tile_any((tile_product){ o, d, p, 1, width, value, stride, n, here, true, { NULL } }, rows, vectors);
    }
}

static void value_columns(float *o, float *powers, int width, int cols, const void *values, int64_t stride, int n, int d)
{
    const operand *p = pair_powers(powers, width, n), *value = values;
    int steps = ceil_div(n, PER_OPERAND);
    for (int i = 0; i < d; i += TILE_COLS) {
        int here = d - i < TILE_COLS ? d - i : TILE_COLS;
        if (here <= LANES) value_columns_of(o + i, p, width, cols, value + i, stride, steps, d, here, 1);
        else value_columns_of(o + i, p, width, cols, value + i, stride, steps, d, here, TILE_VECTORS);
    }
}

/* ---- attention row by row --------------------------------------------------------------- */

/* Four rows of K or V and the tokens that they belong to. The n tokens are read in four streams, like weights; the last n % 4 come
 * together in one step, padded with the last one. */
typedef struct four_rows {
    const char *row[4];
    int token[4], n;
} four_rows;

INLINE four_rows rows_at(const void *base, size_t row_bytes, const int32_t *slot, int step, int n)
{
    int stream = n / 4, left = step < stream ? 4 : n - 4 * stream;
    four_rows rows = { .n = left };
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        rows.token[i] = step < stream ? i * stream + step : 4 * stream + (i < left ? i : left - 1);
        rows.row[i] = (const char *)base + (size_t)slot[rows.token[i]] * row_bytes;
    }
    return rows;
}

/* Calls work(number of heads) for groups of up to DOT_ROWS heads, which share the loads of four rows. */
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

INLINE void key_dots_of(float *s, int64_t s_stride, const float *q, const four_rows *keys, lazy_dtype dtype, int d, const int heads)
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
        for (int c = 0; c < 4; c++) key[c] = widen(keys->row[c], dtype, i);
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
            for (int c = 0; c < 4; c++) total[c] += widen_one(keys->row[c], dtype, rest) * q[h * d + rest];
        for (int c = 0; c < keys->n; c++) s[h * s_stride + keys->token[c]] = total[c];
    }
}

INLINE void key_dots_any(float *s, int64_t s_stride, const float *q, int n_heads, const void *key, lazy_dtype dtype, const int32_t *slot,
                         int n, int d)
{
    for (int step = 0; step < ceil_div(n, 4); step++) {
        four_rows keys = rows_at(key, lazy_row_bytes(dtype, d), slot, step, n);
#define WORK(heads) key_dots_of(s + h * s_stride, s_stride, q + h * d, &keys, dtype, d, heads)
        BY_HEADS(WORK)
#undef WORK
    }
}

static void key_dots(float *s, int64_t s_stride, const float *q, int n_heads, const void *key, lazy_dtype dtype, const int32_t *slot, int n,
                     int d){
#define WORK(type) key_dots_any(s, s_stride, q, n_heads, key, type, slot, n, d)
    BY_KV_TYPE(WORK)
#undef WORK
}

INLINE void value_sums_of(float *o, const float *p, int64_t p_stride, const four_rows *values, lazy_dtype dtype, int d, const int heads)
{
    float weight[DOT_ROWS][4] = { 0 };
#pragma GCC unroll 8
    for (int h = 0; h < heads; h++)
        for (int c = 0; c < values->n; c++) weight[h][c] = p[h * p_stride + values->token[c]];
    int i = 0;
    for (; i + LANES <= d; i += LANES) {
        vec value[4];
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) value[c] = widen(values->row[c], dtype, i);
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
            for (int c = 0; c < 4; c++) o[h * d + i] += widen_one(values->row[c], dtype, i) * weight[h][c];
}

INLINE void value_sums_any(float *o, const float *p, int64_t p_stride, int n_heads, const void *value, lazy_dtype dtype,
                           const int32_t *slot, int n, int d)
{
    for (int step = 0; step < ceil_div(n, 4); step++) {
        four_rows values = rows_at(value, lazy_row_bytes(dtype, d), slot, step, n);
#define WORK(heads) value_sums_of(o + h * d, p + h * p_stride, p_stride, &values, dtype, d, heads)
        BY_HEADS(WORK)
#undef WORK
    }
}

static void value_sums(float *o, const float *p, int64_t p_stride, int n_heads, const void *value, lazy_dtype dtype, const int32_t *slot,
                       int n, int d)
{
#define WORK(type) value_sums_any(o, p, p_stride, n_heads, value, type, slot, n, d)
    BY_KV_TYPE(WORK)
#undef WORK
}

/* ---- ceilings --------------------------------------------------------------------------- */

static float multiply_adds(const float *random, int steps, double *flops)
{
    enum { CHAINS = 12 }; /* enough to hide the latency, and they fit the registers */
#ifdef OPERANDS_BF16
    vec chain[CHAINS], a = operands(random, LAZY_F32, 0), b = operands(random + 64 - STEP, LAZY_F32, 0);
#pragma GCC unroll 12
    for (int i = 0; i < CHAINS; i++) chain[i] = load(random + i);
    for (int step = 0; step < steps; step++)
#pragma GCC unroll 12
        for (int i = 0; i < CHAINS; i++) chain[i] = multiply_add(chain[i], a, b);
#else
    vec chain[CHAINS], mirror = splat(-0x1.fffffep-1f), addend = load(random + 16);
#pragma GCC unroll 12
    for (int i = 0; i < CHAINS; i++) chain[i] = load(random + i); /* alternates between this value and addend - value */
    for (int step = 0; step < steps; step++)
#pragma GCC unroll 12
        for (int i = 0; i < CHAINS; i++) chain[i] = chain[i] * mirror + addend;
#endif
    *flops = 2.0 * CHAINS * STEP * steps;
    vec total = splat(0.0f);
#pragma GCC unroll 12
    for (int i = 0; i < CHAINS; i++) total += chain[i];
    return sum_lanes(total);
}

/* Reads in four streams, which the hardware prefetches well. */
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

const lazy_kernels JOIN(lazy_kernels_, VARIANT) = {
    .products = {
        .name = STRING(VARIANT),
        .isa = STRING(ISA),
        .group = PER_OPERAND,
        .row_operands = 1,
        .panel_operands = 1,
        .tile_rows = TILE_ROWS,
        .tile_cols = TILE_COLS,
        .max_unpacked_halves = MAX_UNPACKED_HALVES,
        .max_unpacked_others = MAX_UNPACKED_OTHERS,
        .convert = convert,
        .pack = pack,
        .tile = tile,
        .dots = dots,
        .multiply_adds = multiply_adds,
    },
    .lanes = LANES,
    .convert_key = convert_key,
    .pair_values = pair_values,
    .key_columns = key_columns,
    .online_softmax_columns = online_softmax_columns,
    .value_columns = value_columns,
    .key_dots = key_dots,
    .value_sums = value_sums,
    .online_softmax = online_softmax,
    .scale_row = scale_row,
    .swiglu_row = swiglu_row,
    .geglu_row = geglu_row,
    .norm_row = norm_row,
    .widen_row = widen_row,
    .read = read_all,
};
