/* linear_template.h — the source of products in f32 or bf16; lazy_products in kernels.h specifies each function.
 *
 * The including file defines what operands.h and quantized.h ask for; VARIANT and ISA; TILE_ROWS and TILE_VECTORS, the
 * size of the register tile (its sums, one row of b and a broadcast must fit the registers); DOT_ROWS, 2, 3 or 6 (4
 * DOT_ROWS sums must fit the registers); MAX_UNPACKED_HALVES and MAX_UNPACKED_OTHERS. */
#include "operands.h"
#include "quantized.h"

enum { TILE_COLS = TILE_VECTORS * LANES };

/* ---- weights as operands ---------------------------------------------------------------- */

/* The format of operands, and those that few rows of x read as stored; others become operands first. */
#ifdef OPERANDS_BF16
#define FORM            LAZY_BF16
#define AS_STORED(work) work(BF16)
#else
#define FORM            LAZY_F32
#define AS_STORED(work) work(F32) work(F16) work(BF16)
#endif

/* to[:] = the k values of a row of weights as operands; in bf16 prefetches blocks from `ahead` bytes further on. */
static void form_and_prefetch(void *to, const char *row, lazy_dtype dtype, int k, int64_t ahead)
{
#ifdef OPERANDS_BF16
    BY_FLOAT_TYPE(convert_any(to, row, type, k));
    form_quantized(to, row, dtype, k, ahead);
#else
    JOIN(lazy_rows_, ISA).widen_row(to, row, dtype, k);
#endif
}

static void form_row(void *to, const char *row, lazy_dtype dtype, int k)
{
    form_and_prefetch(to, row, dtype, k, FETCH_AHEAD);
}

/* ---- the register tile ------------------------------------------------------------------ */

/* Prefetches the rows LANES further down, as a short row ends before memory answers. Rows are evenly spaced. */
INLINE void pack_any(operand *panel, const void *const *row, int n, lazy_dtype dtype, int k)
{
    const int64_t next = n > 1 ? LANES * ((const char *)row[1] - (const char *)row[0]) : 0;
    for (int j = 0; j < TILE_COLS; j += LANES) {
        operand *to = panel + j;
        int kk = 0;
        for (; kk + STEP <= k && j + LANES <= n; kk += STEP) {
            vec v[LANES];
            EACH(i, LANES) {
                v[i] = operands(row[j + i], dtype, kk);
                __builtin_prefetch((const char *)row[j + i] + lazy_row_bytes(dtype, kk) + next, 0, 2); /* into L2 */
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

/* The rows become operands first, so many values at a time that these stay in the L1 cache. */
static void pack_quantized(operand *panel, const void *const *row, int n, lazy_dtype dtype, int k)
{
    operand formed[TILE_COLS][LAZY_LONGEST_BLOCK / PER_OPERAND];
    const void *from[TILE_COLS];
    const int64_t next = n > 1 ? TILE_COLS * ((const char *)row[1] - (const char *)row[0]) : 0;
    for (int kk = 0; kk < k; kk += LAZY_LONGEST_BLOCK) {
        int len = min_int(LAZY_LONGEST_BLOCK, k - kk);
        for (int j = 0; j < n; j++) {
            form_and_prefetch(formed[j], (const char *)row[j] + lazy_row_bytes(dtype, kk), dtype, len, next);
            from[j] = formed[j];
        }
        pack_any(panel + (int64_t)kk / PER_OPERAND * TILE_COLS, from, n, FORM, len);
    }
}

static void pack(void *panel, const void *const *row, int n, lazy_dtype dtype, int k)
{
    BY_FLOAT_TYPE(pack_any(panel, row, n, type, k));
    if (lazy_is_quantized(dtype)) pack_quantized(panel, row, n, dtype, k);
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
    const operand *prefetch[2]; /* NULL, or k TILE_ROWS operands each to prefetch, nearly */
} tile_product;

/* The sums of an incomplete tile. */
static __attribute__((noinline)) void store_part_of_tile(const tile_product *t, const float *sums, int rows, int width)
{
    for (int r = 0; r < rows; r++, sums += width) {
        float *out = t->c + r * t->c_stride;
        for (int j = 0; j < t->cols; j++) out[j] = t->accumulate ? out[j] + sums[j] : sums[j];
    }
}

/* Adds the products of one operand of each row and column. */
INLINE void tile_step(vec sum[][TILE_VECTORS], const operand *a, int64_t a_row, const operand *b, const int rows,
                      const int vectors)
{
    vec column[TILE_VECTORS];
    EACH(v, vectors) column[v] = load((const float *)b + v * LANES);
    EACH(r, rows) {
        vec x = splat_operand(a[r * a_row]);
        EACH(v, vectors) sum[r][v] = multiply_add(sum[r][v], column[v], x);
    }
}

INLINE void tile_of(const tile_product *t, int64_t a_row, int64_t a_step, const int rows, const int vectors)
{
    vec sum[TILE_ROWS][TILE_VECTORS];
    EACH(r, rows)
        EACH(v, vectors) sum[r][v] = splat(0.0f);

    const operand *a = t->a, *b = t->b;
    int kk = 0;
    for (; kk + UNROLLED <= t->k; kk += UNROLLED) {
        for (int i = 0; i < 2 && t->prefetch[i]; i++)
            EACH(u, UNROLLED) __builtin_prefetch(t->prefetch[i] + (kk + u) * TILE_ROWS);
        EACH(u, UNROLLED) {
            tile_step(sum, a, a_row, b, rows, vectors);
            a += a_step;
            b += t->b_stride;
        }
    }
    for (; UNROLLED > 1 && kk < t->k; kk++, a += a_step, b += t->b_stride) tile_step(sum, a, a_row, b, rows, vectors);
    const bool whole = t->cols == vectors * LANES;
    float part[TILE_ROWS * TILE_COLS], *out = whole ? t->c : part;
    int64_t stride = whole ? t->c_stride : vectors * LANES;
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++, out += stride)
        EACH(v, vectors) store(out + v * LANES, whole && t->accumulate ? load(out + v * LANES) + sum[r][v] : sum[r][v]);
    if (!whole) store_part_of_tile(t, part, rows, vectors * LANES);
}

/* One function for each number of rows and vectors; the rows of a lie under each other, or across. */
typedef void tile_function(const tile_product *t);

#define TILE(rows, name, vectors, a_row, a_step)                                                                       \
    static __attribute__((noinline)) void name##_##rows##_##vectors(const tile_product *t)                             \
    {                                                                                                                  \
        tile_of(t, a_row, a_step, rows, vectors);                                                                      \
    }
#define TILE_NAME(rows, name, vectors) name##_##rows##_##vectors,
EACH_NUMBER(TILE_ROWS, TILE, down, 1, t->a_row, 1)
EACH_NUMBER(TILE_ROWS, TILE, down, 2, t->a_row, 1)
EACH_NUMBER(TILE_ROWS, TILE, across, 1, 1, t->a_step)
EACH_NUMBER(TILE_ROWS, TILE, across, 2, 1, t->a_step)
static tile_function *const down_rows[TILE_VECTORS][TILE_ROWS] = { { EACH_NUMBER(TILE_ROWS, TILE_NAME, down, 1) },
                                                                   { EACH_NUMBER(TILE_ROWS, TILE_NAME, down, 2) } };
static tile_function *const across_columns[TILE_VECTORS][TILE_ROWS] = {
    { EACH_NUMBER(TILE_ROWS, TILE_NAME, across, 1) }, { EACH_NUMBER(TILE_ROWS, TILE_NAME, across, 2) }
};

static void tile(float *c, int64_t c_stride, const void *a, int64_t a_stride, const void *b, lazy_dtype dtype, int k,
                 int rows, int cols, bool accumulate)
{
    tile_product t = {
        c, c_stride, a, a_stride, 1, b, TILE_COLS, ceil_div(k, PER_OPERAND), cols, accumulate, { NULL }
    };
    down_rows[TILE_VECTORS - 1][rows - 1](&t);
}

/* ---- unpacked --------------------------------------------------------------------------- */

#include "dots.h"

INLINE void dots_of(dot_products t, const int rows, const int cols)
{
    vec sum[DOT_ROWS][4];
    EACH(r, rows)
        EACH(c, cols) sum[r][c] = splat(0.0f);
    const operand *x = t.x;
    int kk = 0;
    for (; kk + STEP <= t.k; kk += STEP, x += LANES) {
        vec wide[4];
        EACH(c, cols) {
            const char *row = t.w + c * t.spacing;
            wide[c] = operands(row, t.dtype, kk);
            const char *here = row + kk * (t.dtype == LAZY_F32 ? 4 : 2);
            if (rows == 1) __builtin_prefetch(here + FETCH_AHEAD);
            else __builtin_prefetch(here + 2 * FETCH_AHEAD, 0, 2); /* into L2: loads are too few for L1's misses */
        }
        EACH(r, rows) {
            vec v = load((const float *)x + r * t.x_stride);
            EACH(c, cols) sum[r][c] = multiply_add(sum[r][c], wide[c], v);
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
    EACH(r, rows) write_dots(t.y + r * t.y_stride, &t, sum[r], cols);
}
