/* kernels.h — the inner loops of the CPU backend, one table per instruction set.
 *
 * kernels_template.h is their one source; it is compiled once per instruction set, and the best set that the machine
 * runs is chosen when a backend opens. All sums are f32; the order of every sum is fixed by its own length, so that no
 * result depends on how work was split. */
#ifndef LAZY_KERNELS_H
#define LAZY_KERNELS_H

#include "../lazyllm.h"

enum { FEW_PRODUCT_ROWS = 160 };

typedef struct lazy_kernels {
    const char *name;
    int tile_rows, tile_cols; /* of the register tile */
    int lanes;                /* floats of a vector; tile_cols is a multiple of them */
    int few_rows;             /* up to here dots beat packing and tiles; at most FEW_PRODUCT_ROWS */

    /* panel[kk, j] = row[j][kk], widened to f32; kk < k, j < tile_cols, columns from n on are 0 */
    void (*pack)(float *panel, const void *const *row, int n, lazy_dtype dtype, int k);
    /* c[r, j] (+)= sum over kk of a[r, kk] * b[kk, j]; rows <= tile_rows, cols <= tile_cols. Reads b to tile_cols whatever
     * cols is. Strides in elements. */
    void (*tile)(float *c, int64_t c_stride, const float *a, int64_t a_stride, const float *b, int64_t b_stride, int k, int rows, int cols,
                 bool accumulate);
    /* y[r, j] (+)= x[r, :k] . w[j, :k]; for few rows */
    void (*dots)(float *y, int64_t y_stride, const float *x, int64_t x_stride, int n_rows, const void *w, lazy_dtype dtype, int n_cols,
                 int k, bool accumulate);

    /* A panel of up to tile_cols columns, each some row's query head, over n keys that lie one after the other. Its scores have a row
     * of `width` for each key: lanes where that holds the columns, else tile_cols.
     * s[j, :width] = key[j, :d] . q[:d, :width], of q (d, tile_cols); has value (n, d) fetched meanwhile */
    void (*key_columns)(float *s, int width, const float *key, const float *q, const float *value, int n, int d);
    /* soften() for every column of s (n, width); column c sees the first visible[c] keys, the powers of others are 0 */
    void (*soften_columns)(float *s, int width, int n, const int32_t *visible, float *max, float *sum, float *factor);
    /* o[c, :d] += sum over j of p[j, c] * value[j, :d] for c < cols; value is read to a multiple of lanes */
    void (*value_columns)(float *o, const float *p, int width, int cols, const float *value, int64_t stride, int n, int d);

    /* A few rows' heads that share a key head, over n keys and values.
     * s[h, j] = q[h, :d] . key[slot[j], :d] */
    void (*key_dots)(float *s, int64_t s_stride, const float *q, int n_heads, const float *key, const int32_t *slot, int n, int d);
    /* o[h, :d] += sum over j of p[h, j] * value[slot[j], :d] */
    void (*value_sums)(float *o, const float *p, int64_t p_stride, int n_heads, const float *value, const int32_t *slot, int n, int d);
    /* s[j] = 2^(s[j] - m) with m = max(s[:n], *max); adds them to *sum * f and returns f = 2^(*max - m), the factor by which
     * what was summed before must shrink. *max = m. n > 0; *max may be -INFINITY. */
    float (*soften)(float *s, int n, float *max, float *sum);
    void (*scale_row)(float *y, int n, float factor);                        /* y *= factor */
    void (*swiglu_row)(float *y, const float *gate, const float *up, int n); /* y = silu(gate) * up */
    void (*norm_row)(float *y, const float *x, const float *weight, int n, float eps);
    void (*widen_row)(float *y, const void *x, lazy_dtype dtype, int n);

    /* what the core can do at most, for benchmarks; the results only keep the work from being left out */
    float (*multiply_adds)(const float *random, int steps, double *flops); /* random: (64,) within -1 … 1 */
    float (*read)(const void *memory, size_t bytes);
} lazy_kernels;

extern const lazy_kernels lazy_kernels_generic;
#if defined(__x86_64__)
extern const lazy_kernels lazy_kernels_avx2;
extern const lazy_kernels lazy_kernels_avx512;
#endif

/* The kernels called `name`, or the best ones where name is NULL; NULL if this machine cannot run them. */
const lazy_kernels *lazy_kernels_find(const char *name);

#endif
