/* int8_template.h — the source of products of 8-bit integers; kernels.h specifies each function.
 *
 * A row of x is rounded by groups of 32 values to integers of 8 bits with a scale in f32. Weights are read as unsigned integers less a zero
 * point, times a scale, plus an offset in some formats; those in F32, F16 and BF16 are rounded as by lazy_quantize to LAZY_Q8_0. Sums of
 * products are exact within a group, and groups are added in f32 in order. A NaN or an Inf makes the scale of its group NaN.
 *
 * The including file defines what vectors.h and kernels_quantized.h ask for; VARIANT and ISA; TILE_ROWS and TILE_VECTORS (the sums of one
 * group, one row of the panel and a broadcast must fit the registers); DOT_ROWS, MAX_UNPACKED_HALVES and MAX_UNPACKED_OTHERS; and where the instruction set has
 * them, DOT_BYTES and DOT_GROUP(sum, unsigned, signed): sum plus the products of four bytes, in vectors of LANES words and of 8;
 * LARGER_INTS(a, b) and LARGEST_LANE(ints); LOW_BYTES(the ints of a group); ROUND_F16(vector); TWICE(address), 16 bytes in both halves
 * of 8 words; BYTES_OF_BITS(word), 32 bytes of 0 or 1. */
#include <float.h>
#include <math.h>
#include <stddef.h>

#include "vectors.h"
#include "kernels_quantized.h"
#include "integers.h"

enum { TILE_COLS = TILE_VECTORS * LANES };

/* A group of a row of x. */
typedef struct group {
    int32_t values[8]; /* four signed bytes each */
    float scale;
    int32_t sum, half_sum[2]; /* of the integers and of each half of them, times -ZERO_POINT */
} group;

/* A column's group in a panel: bytes with ZERO_POINT added, then a scale, and an offset / -ZERO_POINT; or where a group has two scales, a
 * scale of each half. Rows of TILE_COLS. */
enum { SCALES = WORDS, OFFSETS = WORDS + 1, PANEL_ROWS = WORDS + 2, GROUP_OPERANDS = sizeof(group) / 4 };

typedef int32_t operand;

INLINE four four_at(const float *p) { return (four){ p[0], p[1], p[2], p[3] }; }
static void convert(void *to, const float *from, int k)
{
    for (group *out = to; k > 0; k -= LAZY_GROUP, from += LAZY_GROUP, out++) {
        vec value[GROUP_VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < GROUP_VECTORS; v++) value[v] = load_part(from + v * LANES, k - v * LANES, 0.0f);
        words rounded = round_group(&out->scale, value), sums = -DOT_GROUP((words){ 0 }, splat_bytes(ZERO_POINT), rounded);
        sums += SHUFFLE(words, sums, sums, 2, 3, 0, 1, 6, 7, 4, 5);
        sums += SHUFFLE(words, sums, sums, 1, 0, 3, 2, 5, 4, 7, 6);
        memcpy(out->values, &rounded, sizeof rounded);
        out->half_sum[0] = sums[0];
        out->half_sum[1] = sums[4];
        out->sum = sums[0] + sums[4];
    }
}

/* ---- groups of weights ------------------------------------------------------------------ */

/* What products read of a group of weights in any format. */
typedef struct weight_group {
    words values;       /* unsigned bytes */
    int32_t zero_shift; /* ZERO_POINT >> zero_shift is what they are less */
    float scale, other; /* other: the offset, or the scale of the second half; unused where there is neither */
} __attribute__((packed, aligned(4))) weight_group;

/* Rounds 32 values, of which fewer than n are given at the end of a row, and notes their scale. */
INLINE words round_weights(const void *from, lazy_dtype dtype, float *factor, int n)
{
    vec value[GROUP_VECTORS];
    float part[LAZY_GROUP];
    if (n < LAZY_GROUP) {
        for (int i = 0; i < LAZY_GROUP; i++) part[i] = i < n ? widen_one(from, dtype, i) : 0.0f;
        from = part;
        dtype = LAZY_F32;
    }
#pragma GCC unroll 8
    for (int v = 0; v < GROUP_VECTORS; v++) value[v] = widen(from, dtype, v * LANES);
    float scale;
    words rounded = round_group(&scale, value);
    *factor = ROUND_F16(splat(scale))[0];
    return rounded ^ splat_bytes(ZERO_POINT);
}

INLINE void read_weights(weight_group *to, const char *row, lazy_dtype dtype, int k)
{
    const int in_block = lazy_is_quantized(dtype) ? lazy_formats[dtype].values : LAZY_GROUP, bytes = (int)lazy_row_bytes(dtype, in_block);
    const bool long_block = in_block > LAZY_GROUP;
    for (int left = k; left > 0; left -= in_block, row += bytes) {
        scales s;
        if (lazy_is_quantized(dtype)) read_scales(&s, row, dtype);
        for (int g = 0; g < in_block / LAZY_GROUP; g++, to++) {
            __builtin_prefetch(row + g * bytes / (in_block / LAZY_GROUP) + FETCH_AHEAD);
            to->zero_shift = zero_point(dtype) ? __builtin_ctz(ZERO_POINT / zero_point(dtype)) : 8;
            if (!lazy_is_quantized(dtype)) {
                to->values = round_weights(row, dtype, &to->scale, left);
                continue;
            }
            to->values = integers_of(row, dtype, g);
            to->scale = !long_block ? s.factor[0] : s.factors[dtype == LAZY_Q6_K ? 2 * g : g];
            if (dtype == LAZY_Q6_K) to->other = s.factors[2 * g + 1];
            if (has_offset(dtype)) to->other = long_block ? s.factors[8 + g] : s.offset[0];
        }
    }
}

/* to[:] = the groups of k values of a row of weights */
static void form_row(void *to, const char *row, lazy_dtype dtype, int k)
{
    switch (dtype) {
    case LAZY_F32: read_weights(to, row, LAZY_F32, k); break;
    case LAZY_F16: read_weights(to, row, LAZY_F16, k); break;
    case LAZY_BF16: read_weights(to, row, LAZY_BF16, k); break;
    case LAZY_Q8_0: read_weights(to, row, LAZY_Q8_0, k); break;
    case LAZY_Q4_0: read_weights(to, row, LAZY_Q4_0, k); break;
    case LAZY_Q4_1: read_weights(to, row, LAZY_Q4_1, k); break;
    case LAZY_Q5_0: read_weights(to, row, LAZY_Q5_0, k); break;
    case LAZY_Q5_1: read_weights(to, row, LAZY_Q5_1, k); break;
    case LAZY_Q4_K: read_weights(to, row, LAZY_Q4_K, k); break;
    case LAZY_Q5_K: read_weights(to, row, LAZY_Q5_K, k); break;
    case LAZY_Q6_K: read_weights(to, row, LAZY_Q6_K, k); break;
    }
}

/* ---- the register tile ------------------------------------------------------------------ */

/* Packs up to LAZY_LONGEST_BLOCK values of LANES rows, transposed. */
static void pack_stretch(float *panel, const void *const *row, int n, lazy_dtype dtype, int first, int k)
{
    int n_groups = ceil_div(k, LAZY_GROUP);
    weight_group groups[LANES][LAZY_LONGEST_BLOCK / LAZY_GROUP];
    uint8_t integers[LANES][LAZY_LONGEST_BLOCK];
    for (int j = 0; j < LANES; j++) {
        if (j < n) form_row(groups[j], (const char *)row[j] + lazy_row_bytes(dtype, first), dtype, k);
        else memset(groups[j], 0, sizeof groups[j]);
        for (int g = 0; g < n_groups; g++) {
            const weight_group *from = &groups[j][g];
            float *scale = panel + (g * PANEL_ROWS + SCALES) * TILE_COLS + j;
            unsigned_words q = (unsigned_words)from->values + (unsigned_words)splat_bytes(ZERO_POINT - (ZERO_POINT >> from->zero_shift));
            memcpy(integers[j] + g * LAZY_GROUP, &q, sizeof q);
            scale[0] = from->scale;
            scale[TILE_COLS] = has_offset(dtype) ? from->other * (-1.0f / ZERO_POINT) : from->other;
        }
    }
    for (int word = 0; word < n_groups * WORDS; word += LANES) {
        vec v[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) v[i] = load((const float *)integers[i] + word);
        transpose(v);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            if (word + i < n_groups * WORDS) store(panel + ((word + i) / WORDS * PANEL_ROWS + (word + i) % WORDS) * TILE_COLS, v[i]);
    }
}

static void pack(void *panel, const void *const *row, int n, lazy_dtype dtype, int k)
{
    for (int kk = 0; kk < k; kk += LAZY_LONGEST_BLOCK)
        for (int j = 0; j < TILE_COLS; j += LANES)
            pack_stretch((float *)panel + kk / LAZY_GROUP * PANEL_ROWS * TILE_COLS + j, row + j, n - j, dtype, kk,
                         min_int(LAZY_LONGEST_BLOCK, k - kk));
}

typedef struct tile_product {
    float *c;
    int64_t c_stride;
    const operand *a;
    int64_t a_stride;
    const float *panel;
    int groups, cols;
    bool accumulate;
} tile_product;

/* Adds the products of words first … first + n_words - 1 of one group; start and scale: what the integers' sums begin with, a word of x's
 * group, and the row of the panel that they are multiplied by. */
INLINE void tile_words(vec sum[][TILE_VECTORS], const operand *a, int64_t a_stride, const float *panel, const int rows, const int first,
                       const int n_words, const int start, const int scale)
{
    ints total[TILE_ROWS][TILE_VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < TILE_VECTORS; v++) total[r][v] = a[r * a_stride + start] - (ints){ 0 };
#pragma GCC unroll 1
    for (int i = first; i < first + n_words; i++) {
        ints column[TILE_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < TILE_VECTORS; v++) column[v] = (ints)load(panel + i * TILE_COLS + v * LANES);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            ints value = a[r * a_stride + i] - (ints){ 0 };
#pragma GCC unroll 4
            for (int v = 0; v < TILE_VECTORS; v++) total[r][v] = DOT_BYTES(total[r][v], column[v], value);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        vec x_scale = splat(((const group *)(a + r * a_stride))->scale);
#pragma GCC unroll 4
        for (int v = 0; v < TILE_VECTORS; v++) {
            vec scaled = __builtin_convertvector(total[r][v], vec) * load(panel + scale * TILE_COLS + v * LANES);
            sum[r][v] += scaled * x_scale;
        }
    }
}

/* halves: each half of a group has a scale of its own. */
INLINE void tile_of(const tile_product *t, const int rows, const bool halves, const bool offsets)
{
    enum { SUM = offsetof(group, sum) / 4, HALF_SUMS = offsetof(group, half_sum) / 4 };
    vec sum[TILE_ROWS][TILE_VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < TILE_VECTORS; v++) sum[r][v] = splat(0.0f);
    const operand *a = t->a;
    const float *panel = t->panel;
    for (int g = 0; g < t->groups; g++, panel += PANEL_ROWS * TILE_COLS, a += GROUP_OPERANDS) {
        if (halves) {
            tile_words(sum, a, t->a_stride, panel, rows, 0, WORDS / 2, HALF_SUMS, SCALES);
            tile_words(sum, a, t->a_stride, panel, rows, WORDS / 2, WORDS / 2, HALF_SUMS + 1, SCALES + 1);
        } else tile_words(sum, a, t->a_stride, panel, rows, 0, WORDS, SUM, SCALES);
        if (!offsets) continue;
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            const group *x = (const group *)(a + r * t->a_stride);
            vec whole = splat((float)x->sum * x->scale);
#pragma GCC unroll 4
            for (int v = 0; v < TILE_VECTORS; v++) sum[r][v] += whole * load(panel + OFFSETS * TILE_COLS + v * LANES);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        float *out = t->c + r * t->c_stride;
        if (t->cols == TILE_COLS) {
#pragma GCC unroll 4
            for (int v = 0; v < TILE_VECTORS; v++) store(out + v * LANES, t->accumulate ? load(out + v * LANES) + sum[r][v] : sum[r][v]);
            continue;
        }
        float part[TILE_COLS];
#pragma GCC unroll 4
        for (int v = 0; v < TILE_VECTORS; v++) store(part + v * LANES, sum[r][v]);
        for (int j = 0; j < t->cols; j++) out[j] = t->accumulate ? out[j] + part[j] : part[j];
    }
}

INLINE void tile_any(tile_product t, int rows, const bool halves, const bool offsets)
{
#define TILE(n)                                                                                                                            \
    case n: tile_of(&t, n, halves, offsets); break;
    switch (rows) {
        TILE(1)
        TILE(2)
        TILE(3)
        TILE(4)
        TILE(5)
        TILE(6)
        TILE(7)
    }
#undef TILE
}

static void tile(float *c, int64_t c_stride, const void *a, int64_t a_stride, const void *panel, lazy_dtype dtype, int k, int rows,
                 int cols, bool accumulate)
{
    tile_product t = { c, c_stride, a, a_stride, panel, ceil_div(k, LAZY_GROUP), cols, accumulate };
    if (dtype == LAZY_Q6_K) tile_any(t, rows, true, false);
    else if (has_offset(dtype)) tile_any(t, rows, false, true);
    else tile_any(t, rows, false, false);
}

/* ---- unpacked --------------------------------------------------------------------------- */

/* Forms of weights: one scale for each group, one for each half of it, or a scale and an offset. Q8_0 has the first kind of groups, and
 * reading it twice costs more than it saves. */
enum { LAZY_PLAIN = LAZY_N_DTYPES, LAZY_HALVES, LAZY_OFFSETS };
#define AS_STORED(work) work(Q8_0) work(PLAIN) work(HALVES) work(OFFSETS)
#define ONE_ROW_AS_STORED(work)

INLINE lazy_dtype form_of(lazy_dtype dtype)
{
    return (lazy_dtype)(dtype == LAZY_Q6_K ? LAZY_HALVES : has_offset(dtype) ? LAZY_OFFSETS : LAZY_PLAIN);
}

INLINE size_t form_bytes(lazy_dtype form, int k)
{
    (void)form;
    return (size_t)ceil_div(k, LAZY_GROUP) * sizeof(weight_group);
}

#include "dots.h"

/* The start of the sums of a group's products: minus the zero point times the sum of x's integers, of each half in its first lane. */
INLINE words sums_at_zero_point(const group *x, int form, int zero_shift)
{
    if (form == LAZY_OFFSETS) return (words){ 0 };
    if (form == LAZY_HALVES) return (words){ x->half_sum[0], 0, 0, 0, x->half_sum[1] } / (ZERO_POINT / zero_point(LAZY_Q6_K));
    return (words){ x->sum >> zero_shift };
}

INLINE eight halves(float low, float high) { return SHUFFLE(eight, splat_eight(low), splat_eight(high), 0, 1, 2, 3, 8, 9, 10, 11); }

INLINE void dots_of(dot_products t, const int rows, const int cols)
{
    const int form = (int)t.dtype;
    eight sum[DOT_ROWS][4];
    four offsets[DOT_ROWS]; /* the sums of the columns' offsets */
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        offsets[r] = (four){ 0 };
#pragma GCC unroll 4
        for (int c = 0; c < cols; c++) sum[r][c] = (eight){ 0 };
    }
    const group *x = (const group *)t.x;
    const int bytes = form == LAZY_Q8_0 ? (int)sizeof(lazy_q8_0) : (int)sizeof(weight_group);
    for (int left = ceil_div(t.k, LAZY_GROUP); left > 0; left--, x++, t.w += bytes) {
        words integers[4];
        float scale[4] = { 0 }, other[4] = { 0 };
        eight scale_of_halves[4];
        int zero_shift = 0;
#pragma GCC unroll 4
        for (int c = 0; c < cols; c++) {
            const char *from = t.w + c * t.spacing;
            if (form == LAZY_Q8_0) {
                __builtin_prefetch(from + FETCH_AHEAD);
                integers[c] = integers_of(from, LAZY_Q8_0, 0);
                scale[c] = lazy_f16[((const lazy_q8_0 *)from)->scale];
                continue;
            }
            const weight_group *w = (const weight_group *)from;
            integers[c] = words_at(&w->values);
            scale[c] = w->scale;
            other[c] = w->other;
            zero_shift = w->zero_shift;
            if (form == LAZY_HALVES) scale_of_halves[c] = halves(scale[c], other[c]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const group *row = (const group *)((const operand *)x + r * t.x_stride);
            words value = words_at(row->values), start = sums_at_zero_point(row, form, zero_shift);
            four factor = four_at(scale) * row->scale;
            __asm__("" : "+m"(factor)); /* broadcasts from memory cost less than from a register */
#pragma GCC unroll 4
            for (int c = 0; c < cols; c++) {
                eight product = __builtin_convertvector(DOT_GROUP(start, integers[c], value), eight);
                sum[r][c] += product * (form == LAZY_HALVES ? scale_of_halves[c] * row->scale : splat_eight(factor[c]));
            }
            if (form == LAZY_OFFSETS) offsets[r] += four_at(other) * ((float)row->sum * row->scale * (-1.0f / ZERO_POINT));
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < cols; c++) {
            float *out = t.y + r * t.y_stride + c * t.y_spacing, total = sum_eight(&sum[r][c]);
            if (form == LAZY_OFFSETS) total += offsets[r][c];
            *out = t.accumulate ? *out + total : total;
        }
}

const lazy_products JOIN(lazy_products_, VARIANT) = {
    .name = STRING(VARIANT),
    .isa = STRING(ISA),
    .group = LAZY_GROUP,
    .row_operands = GROUP_OPERANDS,
    .panel_operands = PANEL_ROWS,
    .tile_rows = TILE_ROWS,
    .tile_cols = TILE_COLS,
    .max_unpacked_halves = MAX_UNPACKED_HALVES,
    .max_unpacked_others = MAX_UNPACKED_OTHERS,
    .convert = convert,
    .pack = pack,
    .tile = tile,
    .dots = dots,
};
