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

#ifndef ROUND_F16
#define ROUND_F16(v) splat(lazy_widen_f16(lazy_narrow_f16((v)[0])))
#endif
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

INLINE int group_values(lazy_dtype dtype) { return lazy_is_quantized(dtype) ? lazy_formats[dtype].values : LAZY_GROUP; }

/* Rounds the next n values, fewer than 32 at the end of a row, and notes their scale. */
INLINE words group_integers(const void *block, lazy_dtype dtype, scales *s, int g, int n)
{
    if (lazy_is_quantized(dtype)) return integers_of(block, dtype, g);
    vec value[GROUP_VECTORS];
    float part[LAZY_GROUP];
    if (n < LAZY_GROUP) {
        for (int i = 0; i < LAZY_GROUP; i++) part[i] = i < n ? widen_one(block, dtype, i) : 0.0f;
        block = part;
        dtype = LAZY_F32;
    }
#pragma GCC unroll 8
    for (int v = 0; v < GROUP_VECTORS; v++) value[v] = widen(block, dtype, v * LANES);
    float scale;
    words rounded = round_group(&scale, value);
    s->factor = ROUND_F16(splat(scale));
    return rounded ^ splat_bytes(ZERO_POINT);
}

INLINE void read_block_scales(scales *s, const void *block, lazy_dtype dtype)
{
    if (lazy_is_quantized(dtype)) read_scales(s, block, dtype);
}

INLINE float offset_of(const scales *s, lazy_dtype dtype, int g)
{
    return dtype == LAZY_Q4_1 || dtype == LAZY_Q5_1 ? s->offset[0] : s->factors[8 + g];
}

/* The scale of each half of group g. */
INLINE float scale_of_half(const scales *s, lazy_dtype dtype, int g, int half)
{
    if (dtype == LAZY_Q6_K) return s->factors[2 * g + half];
    return dtype == LAZY_Q4_K || dtype == LAZY_Q5_K ? s->factors[g] : s->factor[0];
}

/* ---- the register tile ------------------------------------------------------------------ */

/* Packs up to LAZY_LONGEST_BLOCK values of LANES rows: their integers row by row, then transposed. */
INLINE void pack_stretch(float *panel, const char *const *block, int n, lazy_dtype dtype, int k)
{
    const int in_block = group_values(dtype), groups = in_block / LAZY_GROUP, bytes = (int)lazy_row_bytes(dtype, in_block);
    int n_groups = ceil_div(k, LAZY_GROUP);
    uint8_t integers[LANES][LAZY_LONGEST_BLOCK];
    for (int j = 0; j < LANES; j++) {
        if (j >= n) {
            for (int g = 0; g < n_groups; g++)
                panel[(g * PANEL_ROWS + SCALES) * TILE_COLS + j] = panel[(g * PANEL_ROWS + OFFSETS) * TILE_COLS + j] = 0.0f;
            memset(integers[j], 0, sizeof integers[j]);
            continue;
        }
        for (int first = 0; first < k; first += in_block) {
            const char *from = block[j] + lazy_row_bytes(dtype, first);
            scales s;
            read_block_scales(&s, from, dtype);
            for (int g = 0; g < groups; g++) {
                __builtin_prefetch(from + g * bytes / groups + FETCH_AHEAD);
                unsigned_words q = (unsigned_words)group_integers(from, dtype, &s, g, k - first) +
                                   (unsigned_words)splat_bytes(ZERO_POINT - zero_point(dtype));
                memcpy(integers[j] + first + g * LAZY_GROUP, &q, sizeof q);
                float *scale = panel + (first / LAZY_GROUP + g) * PANEL_ROWS * TILE_COLS + SCALES * TILE_COLS + j;
                scale[0] = scale_of_half(&s, dtype, g, 0);
                if (dtype == LAZY_Q6_K) scale[TILE_COLS] = scale_of_half(&s, dtype, g, 1);
                if (has_offset(dtype)) scale[TILE_COLS] = offset_of(&s, dtype, g) * (-1.0f / ZERO_POINT);
            }
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

INLINE void pack_any(float *panel, const void *const *row, int n, lazy_dtype dtype, int k)
{
    for (int kk = 0; kk < k; kk += LAZY_LONGEST_BLOCK)
        for (int j = 0; j < TILE_COLS; j += LANES) {
            const char *block[LANES];
            for (int i = 0; i < LANES && i + j < n; i++) block[i] = (const char *)row[i + j] + lazy_row_bytes(dtype, kk);
            pack_stretch(panel + kk / LAZY_GROUP * PANEL_ROWS * TILE_COLS + j, block, n - j, dtype, min_int(LAZY_LONGEST_BLOCK, k - kk));
        }
}

#define BY_DTYPE(dtype, work)                                                                                                              \
    switch (dtype) {                                                                                                                       \
    case LAZY_F32: work(LAZY_F32); break;                                                                                                  \
    case LAZY_F16: work(LAZY_F16); break;                                                                                                  \
    case LAZY_BF16: work(LAZY_BF16); break;                                                                                                \
    case LAZY_Q8_0: work(LAZY_Q8_0); break;                                                                                                \
    case LAZY_Q4_0: work(LAZY_Q4_0); break;                                                                                                \
    case LAZY_Q4_1: work(LAZY_Q4_1); break;                                                                                                \
    case LAZY_Q5_0: work(LAZY_Q5_0); break;                                                                                                \
    case LAZY_Q5_1: work(LAZY_Q5_1); break;                                                                                                \
    case LAZY_Q4_K: work(LAZY_Q4_K); break;                                                                                                \
    case LAZY_Q5_K: work(LAZY_Q5_K); break;                                                                                                \
    case LAZY_Q6_K: work(LAZY_Q6_K); break;                                                                                                \
    }

static void pack(void *panel, const void *const *row, int n, lazy_dtype dtype, int k)
{
#define WORK(type) pack_any(panel, row, n, type, k)
    BY_DTYPE(dtype, WORK)
#undef WORK
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
#if TILE_ROWS > 6
        TILE(7)
#endif
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

#include "dots.h"

/* The start of the sums of a group's products: minus the zero point times the sum of x's integers, of each half in its first lane. */
INLINE words sums_at_zero_point(const group *x, lazy_dtype dtype)
{
    if (dtype == LAZY_Q6_K) return (words){ x->half_sum[0], 0, 0, 0, x->half_sum[1] } / (ZERO_POINT / zero_point(dtype));
    return (words){ zero_point(dtype) ? x->sum / (ZERO_POINT / zero_point(dtype)) : 0 };
}

INLINE eight halves(float low, float high) { return SHUFFLE(eight, splat_eight(low), splat_eight(high), 0, 1, 2, 3, 8, 9, 10, 11); }

INLINE void dots_of(dot_products t, const int rows, const int cols)
{
    eight sum[DOT_ROWS][4];
    four offsets[DOT_ROWS]; /* the sums of the columns' offsets */
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        offsets[r] = (four){ 0 };
#pragma GCC unroll 4
        for (int c = 0; c < cols; c++) sum[r][c] = (eight){ 0 };
    }
    const int in_block = group_values(t.dtype), groups = in_block / LAZY_GROUP, bytes = (int)lazy_row_bytes(t.dtype, in_block);
    const group *x = (const group *)t.x;
    const char *block = t.w;
    for (int left = t.k; left > 0; left -= in_block, block += bytes) {
        scales s[4];
#pragma GCC unroll 4
        for (int c = 0; c < cols; c++) read_block_scales(&s[c], block + c * t.spacing, t.dtype);
        for (int g = 0; g < groups; g++, x++) {
            words integers[4];
            float scale[4] = { 0 }, offset[4] = { 0 };
            eight scale_of_halves[4];
#pragma GCC unroll 4
            for (int c = 0; c < cols; c++) {
                __builtin_prefetch(block + c * t.spacing + g * bytes / groups + FETCH_AHEAD);
                integers[c] = group_integers(block + c * t.spacing, t.dtype, &s[c], g, left);
                scale[c] = scale_of_half(&s[c], t.dtype, g, 0);
                if (t.dtype == LAZY_Q6_K) scale_of_halves[c] = halves(scale[c], scale_of_half(&s[c], t.dtype, g, 1));
                if (has_offset(t.dtype)) offset[c] = offset_of(&s[c], t.dtype, g);
            }
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                const group *row = (const group *)((const operand *)x + r * t.x_stride);
                words value = words_at(row->values), start = sums_at_zero_point(row, t.dtype);
                four factor = four_at(scale) * row->scale;
                __asm__("" : "+m"(factor)); /* broadcasts from memory cost less than from a register */
#pragma GCC unroll 4
                for (int c = 0; c < cols; c++) {
                    eight product = __builtin_convertvector(DOT_GROUP(start, integers[c], value), eight);
                    sum[r][c] += product * (t.dtype == LAZY_Q6_K ? scale_of_halves[c] * row->scale : splat_eight(factor[c]));
                }
                if (has_offset(t.dtype)) offsets[r] += four_at(offset) * ((float)row->sum * row->scale * (-1.0f / ZERO_POINT));
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < cols; c++) {
            float *out = t.y + r * t.y_stride + c * t.y_spacing, total = sum_eight(&sum[r][c]);
            if (has_offset(t.dtype)) total += offsets[r][c];
            *out = t.accumulate ? *out + total : total;
        }
}

/* ---- ceilings --------------------------------------------------------------------------- */

static float multiply_adds(const float *random, int steps, double *flops)
{
    enum { CHAINS = 12 }; /* enough to hide the latency, and they fit the registers */
    ints chain[CHAINS], a = (ints)load(random), b = (ints)load(random + 32);
#pragma GCC unroll 12
    for (int i = 0; i < CHAINS; i++) chain[i] = (ints)load(random + i);
    for (int step = 0; step < steps; step++)
#pragma GCC unroll 12
        for (int i = 0; i < CHAINS; i++) chain[i] = DOT_BYTES(chain[i], a, b);
    *flops = 2.0 * CHAINS * 4 * LANES * steps;
    ints total = { 0 };
#pragma GCC unroll 12
    for (int i = 0; i < CHAINS; i++) total += chain[i];
    return (float)total[0];
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
    .multiply_adds = multiply_adds,
};
