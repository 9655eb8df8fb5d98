/* rows_template.h — the source of the kernels of single rows in f32; lazy_row_kernels in kernels.h specifies each.
 *
 * The including file defines ISA; what vectors.h and quantized.h ask for; and DOT_ROWS, 2, 3 or 6 (4 DOT_ROWS sums must
 * fit the registers). */
#include <float.h>
#include <math.h>

#include "vectors.h"
#include "quantized.h"

static void widen_row(float *y, const void *x, lazy_dtype dtype, int n)
{
    BY_FLOAT_TYPE(widen_any(y, x, type, n));
    form_quantized(y, x, dtype, n, FETCH_AHEAD);
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
INLINE void online_softmax_lanes(float *s, int width, int n, const int32_t *hidden, const int32_t *visible, float *max,
                                 float *sum, float *factor, const bool masked)
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
    vec top = LARGER(m, splat(-FLT_MAX)); /* finite where no key was seen, so that powers are 0 and not NaN */
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

static void online_softmax_columns(float *s, int width, int n, const int32_t *hidden, const int32_t *visible,
                                   float *max, float *sum, float *factor)
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

/* tanh(x) with a relative error below 2e-7, for finite x: e / (e + 2) with e = exp(2 |x|) - 1 */
INLINE vec tanh_of(vec x)
{
    const float to_integer = 0x1.8p23f; /* as in exp2_of */
    ints sign = (ints)x & INT32_MIN;
    vec y = (vec)((ints)x & INT32_MAX);
    y = choose(y > 20.0f, splat(40.0f), 2.0f * y);
    vec shifted = y * 0x1.715476p+0f + to_integer, n = shifted - to_integer;
    vec r = y - n * 0x1.62e4p-1f - n * 0x1.7f7d1cp-20f; /* y - n ln 2; the first product is exact */
    vec p = splat(1.0f / 5040);
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    vec power = (vec)(((ints)shifted << 23) + 0x3f800000); /* 2^n */
    vec e = power * (r + r * r * p) + (power - 1.0f);
    return (vec)((ints)(e / (e + 2.0f)) | sign);
}

static void cap_row(float *y, int n, float cap)
{
    float factor = 1.0f / cap;
    for (int i = 0; i < n; i += LANES) {
        vec x = load_part(y + i, n - i, 0.0f);
        store_part(y + i, cap * tanh_of(x * factor) + (x - x), n - i);
    }
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

static void center_row(float *y, const float *x, int n)
{
    vec total = splat(0.0f);
    for (int i = 0; i < n; i += LANES) total += load_part(x + i, n - i, 0.0f);
    float mean = sum_lanes(total) / (float)n;
    for (int i = 0; i < n; i++) y[i] = x[i] - mean;
}

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

/* ---- attention row by row --------------------------------------------------------------- */

/* Four rows of K or V and the tokens that they belong to. The n tokens are read in four streams, like weights; the last
 * n % 4 come together in one step, padded with the last one. */
typedef struct four_rows {
    const char *row[4];
    int token[4], n;
} four_rows;

INLINE four_rows rows_at(const void *base, size_t row_bytes, const int32_t *slot, int step, int n)
{
    int stream = n / 4, left = step < stream ? 4 : n - 4 * stream;
    four_rows rows = { .n = left };
    EACH(i, 4) {
        rows.token[i] = step < stream ? i * stream + step : 4 * stream + (i < left ? i : left - 1);
        rows.row[i] = (const char *)base + (size_t)slot[rows.token[i]] * row_bytes;
    }
    return rows;
}

/* Makes the call for up to DOT_ROWS heads from `h` on, a constant number `heads`; they share loads of four rows. */
#define BY_HEADS(call)                                                                                                 \
    for (int h = 0; h < n_heads; h += DOT_ROWS) {                                                                      \
        switch (min_int(n_heads - h, DOT_ROWS)) {                                                                      \
            EACH_NUMBER(DOT_ROWS, CASE, heads, call)                                                                   \
        }                                                                                                              \
    }

/* total[c] += products of values i … d-1 of four rows. Apart, of any type: few models' heads are no whole vectors. */
static __attribute__((noinline)) void add_rest_of_keys(float total[4], const float *q, const four_rows *keys,
                                                       lazy_dtype dtype, int i, int d)
{
    for (; i < d; i++)
        for (int c = 0; c < 4; c++) total[c] += widen_one(keys->row[c], dtype, i) * q[i];
}

INLINE void key_dots_of(float *s, int64_t s_stride, const float *q, const four_rows *keys, lazy_dtype dtype, int d,
                        const int heads)
{
    vec sum[DOT_ROWS][4];
    EACH(h, heads)
        EACH(c, 4) sum[h][c] = splat(0.0f);
    int i = 0;
    for (; i + LANES <= d; i += LANES) {
        vec key[4];
        EACH(c, 4) key[c] = widen(keys->row[c], dtype, i);
        EACH(h, heads) {
            vec v = load(q + h * d + i);
            EACH(c, 4) sum[h][c] += key[c] * v;
        }
    }
    EACH(h, heads) {
        four total = sum_lanes_of_four(sum[h][0], sum[h][1], sum[h][2], sum[h][3]);
        float sums[4];
        memcpy(sums, &total, sizeof sums);
        if (i < d) add_rest_of_keys(sums, q + h * d, keys, dtype, i, d);
        for (int c = 0; c < keys->n; c++) s[h * s_stride + keys->token[c]] = sums[c];
    }
}

INLINE void key_dots_any(float *s, int64_t s_stride, const float *q, int n_heads, const void *key, lazy_dtype dtype,
                         const int32_t *slot, int n, int d)
{
    for (int step = 0; step < ceil_div(n, 4); step++) {
        four_rows keys = rows_at(key, lazy_row_bytes(dtype, d), slot, step, n);
        BY_HEADS(key_dots_of(s + h * s_stride, s_stride, q + h * d, &keys, dtype, d, heads));
    }
}

static void key_dots(float *s, int64_t s_stride, const float *q, int n_heads, const void *key, lazy_dtype dtype,
                     const int32_t *slot, int n, int d)
{
    BY_FLOAT_TYPE(key_dots_any(s, s_stride, q, n_heads, key, type, slot, n, d));
}

static __attribute__((noinline)) void add_rest_of_values(float *o, const float weight[4], const four_rows *values,
                                                         lazy_dtype dtype, int i, int d)
{
    for (; i < d; i++)
        for (int c = 0; c < 4; c++) o[i] += widen_one(values->row[c], dtype, i) * weight[c];
}

INLINE void value_sums_of(float *o, const float *p, int64_t p_stride, const four_rows *values, lazy_dtype dtype, int d,
                          const int heads)
{
    float weight[DOT_ROWS][4] = { 0 };
    EACH(h, heads)
        for (int c = 0; c < values->n; c++) weight[h][c] = p[h * p_stride + values->token[c]];
    int i = 0;
    for (; i + LANES <= d; i += LANES) {
        vec value[4];
        EACH(c, 4) value[c] = widen(values->row[c], dtype, i);
        EACH(h, heads) {
            vec sum = load(o + h * d + i);
            EACH(c, 4) sum += value[c] * weight[h][c];
            store(o + h * d + i, sum);
        }
    }
    if (i == d) return;
    for (int h = 0; h < heads; h++) add_rest_of_values(o + h * d, weight[h], values, dtype, i, d);
}

INLINE void value_sums_any(float *o, const float *p, int64_t p_stride, int n_heads, const void *value, lazy_dtype dtype,
                           const int32_t *slot, int n, int d)
{
    for (int step = 0; step < ceil_div(n, 4); step++) {
        four_rows values = rows_at(value, lazy_row_bytes(dtype, d), slot, step, n);
        BY_HEADS(value_sums_of(o + h * d, p + h * p_stride, p_stride, &values, dtype, d, heads));
    }
}

static void value_sums(float *o, const float *p, int64_t p_stride, int n_heads, const void *value, lazy_dtype dtype,
                       const int32_t *slot, int n, int d)
{
    BY_FLOAT_TYPE(value_sums_any(o, p, p_stride, n_heads, value, type, slot, n, d));
}

const lazy_row_kernels JOIN(lazy_rows_, ISA) = {
    .widen_row = widen_row,
    .scale_row = scale_row,
    .cap_row = cap_row,
    .swiglu_row = swiglu_row,
    .geglu_row = geglu_row,
    .center_row = center_row,
    .norm_row = norm_row,
    .online_softmax = online_softmax,
    .online_softmax_columns = online_softmax_columns,
    .key_dots = key_dots,
    .value_sums = value_sums,
};
