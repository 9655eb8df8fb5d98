/* int8_template.h — the source of products of 8-bit integers with many rows of x; kernels.h specifies each function.
 *
 * A row of x is rounded by groups of 32 values to integers of 8 bits with a scale in f32. Weights are read as unsigned
 * integers less a zero point, times a scale, plus an offset in some formats; those in F32, F16 and BF16 are rounded as
 * by lazy_quantize to LAZY_Q8_0. Sums of products are exact within a group, and groups are added in f32 in order. A NaN
 * or an Inf makes the scale of its group NaN.
 *
 * The including file defines what vectors.h, quantized.h and integers.h ask for; VARIANT and ISA; TILE_ROWS and
 * TILE_VECTORS (the sums of one group, one row of the panel and a broadcast must fit the registers); VALUES_PER_WORD, 4
 * of 8 bits or 2 of 16; and DOT_WORDS(sum, unsigned, signed): sum plus their products, in vectors of LANES words. */
#include <stddef.h>

#include "vectors.h"
#include "integers.h"

enum { TILE_COLS = TILE_VECTORS * LANES };

enum { GROUP_WORDS = LAZY_GROUP / VALUES_PER_WORD };
#if VALUES_PER_WORD == 4
typedef int8_t signed_integer;
typedef uint8_t unsigned_integer;
#else
typedef int16_t signed_integer;
typedef uint16_t unsigned_integer;
#endif

/* A group of a row of x. */
typedef struct group {
    int32_t values[GROUP_WORDS]; /* signed integers */
    float scale;
    int32_t sum, half_sum[2]; /* of the integers and of each half of them, times -ZERO_POINT */
} group;

/* A column's group in a panel: integers with ZERO_POINT added, then a scale, and an offset / -ZERO_POINT; or where a
 * group has two scales, a scale of each half. Rows of TILE_COLS. */
enum {
    SCALE_ROW = GROUP_WORDS,
    OTHER_ROW = GROUP_WORDS + 1,
    PANEL_ROWS = GROUP_WORDS + 2,
    GROUP_OPERANDS = sizeof(group) / 4
};

typedef int32_t operand;

typedef int8_t signed_bytes __attribute__((vector_size(LAZY_GROUP)));
typedef uint8_t unsigned_bytes __attribute__((vector_size(LAZY_GROUP)));
typedef signed_integer signed_integers __attribute__((vector_size(4 * GROUP_WORDS), aligned(1), may_alias));
typedef unsigned_integer unsigned_integers __attribute__((vector_size(4 * GROUP_WORDS), aligned(1), may_alias));

static void convert(void *to, const float *from, int k)
{
    for (group *out = to; k > 0; k -= LAZY_GROUP, from += LAZY_GROUP, out++) {
        vec value[GROUP_VECTORS];
        EACH(v, GROUP_VECTORS) value[v] = load_part(from + v * LANES, k - v * LANES, 0.0f);
        words rounded = round_group(&out->scale, value),
              sums = -DOT_GROUP((words){ 0 }, splat_bytes(ZERO_POINT), rounded);
        sums += SHUFFLE(words, sums, sums, 2, 3, 0, 1, 6, 7, 4, 5);
        sums += SHUFFLE(words, sums, sums, 1, 0, 3, 2, 5, 4, 7, 6);
        *(signed_integers *)out->values = __builtin_convertvector((signed_bytes)rounded, signed_integers);
        out->half_sum[0] = sums[0];
        out->half_sum[1] = sums[4];
        out->sum = sums[0] + sums[4];
    }
}

/* ---- the register tile ------------------------------------------------------------------ */

/* Writes the integers of k values, whole blocks, and the scales of a panel's column. */
INLINE void read_column_of(unsigned_integer *integers, float *column, const char *block, lazy_dtype dtype, int k)
{
    const lazy_format *format = &lazy_formats[dtype];
    const int groups = format->values / LAZY_GROUP;
    for (; k > 0; k -= format->values, block += format->bytes) {
        scales s;
        read_scales(s, block, dtype);
        for (int g = 0; g < groups; g++, integers += LAZY_GROUP, column += PANEL_ROWS * TILE_COLS) {
            __builtin_prefetch(block + g * format->bytes / groups + FETCH_AHEAD);
            unsigned_words q = (unsigned_words)integers_of(block, dtype, g) +
                               (unsigned_words)splat_bytes(ZERO_POINT - format->zero_point);
            *(unsigned_integers *)integers = __builtin_convertvector((unsigned_bytes)q, unsigned_integers);
            column[SCALE_ROW * TILE_COLS] = s[dtype == LAZY_Q6_K ? 2 * g : g];
            if (dtype == LAZY_Q6_K) column[OTHER_ROW * TILE_COLS] = s[2 * g + 1];
            if (format->has_offset) column[OTHER_ROW * TILE_COLS] = s[OFFSETS + g] * (-1.0f / ZERO_POINT);
        }
    }
}

static void read_column(unsigned_integer *integers, float *column, const char *row, lazy_dtype dtype, int k)
{
    lazy_q8_0 rounded[LAZY_LONGEST_BLOCK / LAZY_GROUP];
#define READ_COLUMN(format)                                                                                            \
    case LAZY_##format: read_column_of(integers, column, row, LAZY_##format, k); break;
    switch (dtype) {
        LAZY_BELOW_8_BITS(READ_COLUMN)
        READ_COLUMN(Q8_0)
    default: round_row(rounded, row, dtype, k); read_column_of(integers, column, (const char *)rounded, LAZY_Q8_0, k);
    }
#undef READ_COLUMN
}

/* Packs up to LAZY_LONGEST_BLOCK values of LANES rows, transposed. */
static void pack_stretch(float *panel, const void *const *row, int n, lazy_dtype dtype, int first, int k)
{
    static const char zeros[LAZY_LONGEST_BLOCK * sizeof(float)]; /* of any format */
    int n_words = ceil_div(k, LAZY_GROUP) * GROUP_WORDS;
    unsigned_integer integers[LANES][LAZY_LONGEST_BLOCK];
    for (int j = 0; j < LANES; j++)
        read_column(integers[j], panel + j, j < n ? (const char *)row[j] + lazy_row_bytes(dtype, first) : zeros, dtype,
                    k);
    for (int word = 0; word < n_words; word += LANES) {
        vec v[LANES];
        EACH(i, LANES) v[i] = load((const float *)integers[i] + word);
        transpose(v);
        EACH(i, LANES)
            if (word + i < n_words)
                store(panel + ((word + i) / GROUP_WORDS * PANEL_ROWS + (word + i) % GROUP_WORDS) * TILE_COLS, v[i]);
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

/* Adds the products of words first … first + n_words - 1 of one group. start: the word of x's group that the integers'
 * sums begin with; scale: the row of the panel that they are multiplied by. */
INLINE void tile_words(vec sum[][TILE_VECTORS], const operand *a, int64_t a_stride, const float *panel, const int rows,
                       const int first, const int n_words, const int start, const int scale)
{
    ints total[TILE_ROWS][TILE_VECTORS];
    EACH(r, rows)
        EACH(v, TILE_VECTORS) total[r][v] = a[r * a_stride + start] - (ints){ 0 };
#pragma GCC unroll UNROLLED
    for (int i = first; i < first + n_words; i++) {
        ints column[TILE_VECTORS];
        EACH(v, TILE_VECTORS) column[v] = (ints)load(panel + i * TILE_COLS + v * LANES);
        EACH(r, rows) {
            ints value = a[r * a_stride + i] - (ints){ 0 };
            EACH(v, TILE_VECTORS) total[r][v] = DOT_WORDS(total[r][v], column[v], value);
        }
    }
    EACH(r, rows) {
        vec x_scale = splat(((const group *)(a + r * a_stride))->scale);
        EACH(v, TILE_VECTORS) {
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
    EACH(r, rows)
        EACH(v, TILE_VECTORS) sum[r][v] = splat(0.0f);
    const operand *a = t->a;
    const float *panel = t->panel;
    for (int g = 0; g < t->groups; g++, panel += PANEL_ROWS * TILE_COLS, a += GROUP_OPERANDS) {
        if (halves) {
            tile_words(sum, a, t->a_stride, panel, rows, 0, GROUP_WORDS / 2, HALF_SUMS, SCALE_ROW);
            tile_words(sum, a, t->a_stride, panel, rows, GROUP_WORDS / 2, GROUP_WORDS / 2, HALF_SUMS + 1, OTHER_ROW);
        } else tile_words(sum, a, t->a_stride, panel, rows, 0, GROUP_WORDS, SUM, SCALE_ROW);
        if (!offsets) continue;
        EACH(r, rows) {
            const group *x = (const group *)(a + r * t->a_stride);
            vec whole = splat((float)x->sum * x->scale);
            EACH(v, TILE_VECTORS) sum[r][v] += whole * load(panel + OTHER_ROW * TILE_COLS + v * LANES);
        }
    }
    EACH(r, rows) {
        float *out = t->c + r * t->c_stride;
        if (t->cols == TILE_COLS) {
            EACH(v, TILE_VECTORS) store(out + v * LANES, t->accumulate ? load(out + v * LANES) + sum[r][v] : sum[r][v]);
            continue;
        }
        float part[TILE_COLS];
        EACH(v, TILE_VECTORS) store(part + v * LANES, sum[r][v]);
        for (int j = 0; j < t->cols; j++) out[j] = t->accumulate ? out[j] + part[j] : part[j];
    }
}

#define TILES(name, halves, offsets)                                                                                   \
    static void name(const tile_product *t, int rows)                                                                  \
    {                                                                                                                  \
        switch (rows) {                                                                                                \
            EACH_NUMBER(TILE_ROWS, CASE, n, tile_of(t, n, halves, offsets))                                            \
        }                                                                                                              \
    }
TILES(tile_plain, false, false)
TILES(tile_with_halves, true, false)
TILES(tile_with_offsets, false, true)

static void tile(float *c, int64_t c_stride, const void *a, int64_t a_stride, const void *panel, lazy_dtype dtype,
                 int k, int rows, int cols, bool accumulate)
{
    tile_product t = { c, c_stride, a, a_stride, panel, ceil_div(k, LAZY_GROUP), cols, accumulate };
    (dtype == LAZY_Q6_K ? tile_with_halves : lazy_formats[dtype].has_offset ? tile_with_offsets : tile_plain)(&t, rows);
}

const lazy_products JOIN(lazy_products_, VARIANT) = {
    .name = STRING(VARIANT),
    .unit = LAZY_GROUP,
    .row_operands = GROUP_OPERANDS,
    .panel_operands = PANEL_ROWS,
    .tile_rows = TILE_ROWS,
    .tile_cols = TILE_COLS,
    .packing = 48,
    .convert = convert,
    .pack = pack,
    .tile = tile,
};
