/* kernels.h — the inner loops of the CPU backend, one table per instruction set and arithmetic.
 *
 * The files *_template.h are compiled once for each, and the best set that the machine runs is chosen when a backend
 * opens. All sums are f32. The order of a sum depends on its length alone, so that results do not depend on how work is
 * divided.
 *
 * Operands of products are 4 bytes: an f32, a pair of bf16, four integers of 8 bits or two of 16. Rows are converted by
 * `unit` values that are neighbours along the sum, the last unit filled up with zeros; a unit takes row_operands
 * operands in a row of x and panel_operands in a column of a panel. These are 1 for f32 (units of 1) and bf16 (units of
 * 2). In int8 (units of 32) the integers' scale comes with them. */
#pragma once

#include "../format.h"
#include "../lazyllm.h"

typedef struct lazy_products {
    const char *name; /* of a backend that computes with them */
    int unit, row_operands, panel_operands;
    int tile_rows, tile_cols; /* that tile multiplies at once */
    int packing;              /* rows that are multiplied by a panel in the time in which it is packed, nearly */
    /* Most rows of x for which dots is faster than pack and tile: with weights of 16 bits, and with slower ones. */
    int max_unpacked_halves, max_unpacked_others;

    /* to[:] = the k values as operands */
    void (*convert)(void *to, const float *from, int k);
    /* panel[:, j] = the k values, whole blocks as in all rows of weights, of row[j] as operands; 0 for columns n … */
    void (*pack)(void *panel, const void *const *row, int n, lazy_dtype dtype, int k);
    /* c[r, j] (+)= a[r, :] . panel[:, j], k values packed from dtype; at most tile_rows rows and tile_cols columns.
     * a_stride: operands */
    void (*tile)(float *c, int64_t c_stride, const void *a, int64_t a_stride, const void *panel, lazy_dtype dtype,
                 int k, int rows, int cols, bool accumulate);
    /* y[r, j] (+)= x[r, :] . w[j, :k], x in operands and x_stride too; reads w once for every few rows of x. room: 4
     * rows of w as operands of 4 bytes, or 256 KiB if that is more */
    void (*dots)(float *y, int64_t y_stride, const void *x, int64_t x_stride, int n_rows, const void *w,
                 lazy_dtype dtype, int n_cols, int k, bool accumulate, void *room);
    bool formats[LAZY_N_DTYPES]; /* that dots takes; of products for few rows alone, else unused */
} lazy_products;

/* Kernels of single rows, in f32: one table per instruction set. */
typedef struct lazy_row_kernels {
    void (*widen_row)(float *y, const void *x, lazy_dtype dtype, int n);
    void (*scale_row)(float *y, int n, float factor); /* y *= factor */
    /* y = cap tanh(y / cap), or NaN where y is infinite */
    void (*cap_row)(float *y, int n, float cap);
    /* y = silu(gate) * up, or gelu(gate) * up with GELU in its tanh form */
    void (*swiglu_row)(float *y, const float *gate, const float *up, int n);
    void (*geglu_row)(float *y, const float *gate, const float *up, int n);
    void (*center_row)(float *y, const float *x, int n); /* y = x - mean(x) */
    /* RMS norm. False if a value of x is NaN or Inf. */
    bool (*norm_row)(float *y, const float *x, const float *weight, int n, float eps, bool accumulate);
    /* One block of a softmax to the base 2. With m = max(s[:n], *max) and f = 2^(*max - m): s[j] = 2^(s[j] - m),
     * *sum = *sum * f + sum of s, *max = m. Returns f, by which sums of earlier blocks must be scaled. n > 0; *max may
     * be -INFINITY. */
    float (*online_softmax)(float *s, int n, float *max, float *sum);
    /* The same for every column of s (n, width). Column c sees keys hidden[c] … visible[c]-1; others become 0. */
    void (*online_softmax_columns)(float *s, int width, int n, const int32_t *hidden, const int32_t *visible,
                                   float *max, float *sum, float *factor);

    /* Attention row by row: query heads that share a key head, over n keys and values at slots of the cache, of a type
     * up to LAZY_BF16. s[h, j] = q[h, :d] . key[slot[j], :d] */
    void (*key_dots)(float *s, int64_t s_stride, const float *q, int n_heads, const void *key, lazy_dtype dtype,
                     const int32_t *slot, int n, int d);
    /* o[h, :d] += sum over j of p[h, j] * value[slot[j], :d] */
    void (*value_sums)(float *o, const float *p, int64_t p_stride, int n_heads, const void *value, lazy_dtype dtype,
                       const int32_t *slot, int n, int d);
} lazy_row_kernels;

typedef struct lazy_kernels {
    const lazy_row_kernels *rows;
    lazy_products products; /* in f32 or bf16, with weights and in attention */
    int lanes;              /* floats in a vector; tile_cols is a multiple */
    int key_unit;           /* values of so many keys are added to a sum at once; a multiple of products.unit */

    /* Attention in columns: up to tile_cols columns, each a query head of a row, over n contiguous keys. Scores are (n,
     * width); width is lanes if the columns fit into one vector, else tile_cols. Keys are operands (n, d / unit),
     * queries a panel of d values, and values operands of neighbouring tokens (n / unit, stride). to[:] = the d values
     * of a key in the cache as operands */
    void (*convert_key)(void *to, const void *key, lazy_dtype dtype, int d);
    /* to[:d] = operands of two tokens' values; second: NULL behind the last, unused where one makes an operand. */
    void (*pair_values)(void *to, const void *first, const void *second, lazy_dtype dtype, int d);
    /* s[j, :width] = key[j, :] . q[:, :width]. Prefetches as many operands of value as there are of key. */
    void (*key_columns)(float *s, int width, const void *key, const void *q, const void *value, int n, int d);
    /* o[c, :d] += sum over j of p[j, c] * value[j, :d], c < cols; reads whole vectors of value, and may overwrite p. */
    void (*value_columns)(float *o, float *p, int width, int cols, const void *value, int64_t stride, int n, int d);
} lazy_kernels;

extern const lazy_row_kernels lazy_rows_generic;
extern const lazy_kernels lazy_kernels_generic;
extern const lazy_products lazy_products_generic_stored;
#if defined(__x86_64__)
extern const lazy_row_kernels lazy_rows_avx2, lazy_rows_avx512;
extern const lazy_kernels lazy_kernels_avx2;
extern const lazy_kernels lazy_kernels_avx512, lazy_kernels_avx512_bf16, lazy_kernels_avx512_amx;
extern const lazy_products lazy_products_avx2_int8, lazy_products_avx512_int8;
extern const lazy_products lazy_products_avx2_stored, lazy_products_avx512_stored, lazy_products_avx512_bf16_stored;
extern const lazy_products lazy_products_avx512_bf16_halves, lazy_products_avx512_stored_5;
extern const lazy_products lazy_products_avx2_fixed8, lazy_products_avx2_fixed24;
extern const lazy_products lazy_products_avxvnni_int8, lazy_products_avxvnni_fixed8, lazy_products_avxvnni_fixed24;
extern const lazy_products lazy_products_avx512_fixed8, lazy_products_avx512_fixed16, lazy_products_avx512_fixed24;
#elif defined(__aarch64__)
extern const lazy_row_kernels lazy_rows_neon;
extern const lazy_kernels lazy_kernels_neon, lazy_kernels_neon_bf16;
extern const lazy_products lazy_products_neon_int8, lazy_products_neon_stored;
extern const lazy_products lazy_products_neon_fixed8, lazy_products_neon_fixed16, lazy_products_neon_fixed24;
#endif

/* An instruction set's kernels for one arithmetic. */
typedef struct lazy_arithmetic {
    const char *isa; /* by its name in LAZYLLM_CPU */
    lazy_compute compute;
    const lazy_kernels *kernels;   /* of rows and attention; in int8 those in bf16, or f32 where there are none */
    const lazy_products *products; /* with weights; in int8 they have no dots */
    /* With few rows of x, of some formats of weights, without panels, or NULL; `few` serves what `fewest` does not. In
     * fixed point, in int8 of all formats; or as weights are stored. */
    const lazy_products *fewest, *few;
} lazy_arithmetic;

/* The arithmetic with the instruction set `isa`, or with the best one if isa is NULL; NULL if this machine has none. */
const lazy_arithmetic *lazy_arithmetic_find(const char *isa, lazy_compute compute);

/* Operands that k values take in a row of x. */
static inline size_t lazy_row_operands(const lazy_products *p, int k)
{
    return (size_t)((k + p->unit - 1) / p->unit * p->row_operands);
}
