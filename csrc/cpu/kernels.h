/* kernels.h — the inner loops of the CPU backend, one table per instruction set.
 *
 * kernels_template.h is compiled once per instruction set, and the best set that the machine runs is chosen when a backend
 * opens. All sums are f32. The order of a sum depends on its length alone, so that results do not depend on how work is
 * divided. */
#ifndef LAZY_KERNELS_H
#define LAZY_KERNELS_H

#include "../lazyllm.h"

/* The largest max_unpacked_rows of any instruction set. */
enum { UNPACKED_ROWS_LIMIT = 160 };

typedef struct lazy_kernels {
    const char *name;
    int tile_rows, tile_cols; /* size of the register tile */
    int lanes;                /* floats in a vector; tile_cols is a multiple */
    int max_unpacked_rows;    /* for up to so many rows of x, dots is faster than pack and tile */

    /* panel[kk, j] = row[j][kk], widened to f32; kk < k, j < tile_cols, columns n … tile_cols-1 are 0. Here and below, rows of weights are
     * whole blocks. */
    void (*pack)(float *panel, const void *const *row, int n, lazy_dtype dtype, int k);
    /* c[r, j] (+)= sum over kk of a[r, kk] * b[kk, j]; rows <= tile_rows, cols <= tile_cols. Reads tile_cols columns of
     * b even where cols is less. Strides in elements. */
    void (*tile)(float *c, int64_t c_stride, const float *a, int64_t a_stride, const float *b, int64_t b_stride, int k, int rows, int cols,
                 bool accumulate);
    /* y[r, j] (+)= x[r, :k] . w[j, :k]; reads w once for every few rows of x */
    void (*dots)(float *y, int64_t y_stride, const float *x, int64_t x_stride, int n_rows, const void *w, lazy_dtype dtype, int n_cols,
                 int k, bool accumulate);

    /* Attention in columns: up to tile_cols columns, each a query head of a row, over n contiguous keys. Scores are (n, width); width is
     * lanes if the columns fit into one vector, else tile_cols.
     * s[j, :width] = key[j, :d] . q[:d, :width], with q (d, tile_cols). Prefetches value (n, d). */
    void (*key_columns)(float *s, int width, const float *key, const float *q, const float *value, int n, int d);
    /* online_softmax for every column of s (n, width). Column c sees keys hidden[c] … visible[c]-1; other entries become 0. */
    void (*online_softmax_columns)(float *s, int width, int n, const int32_t *hidden, const int32_t *visible, float *max, float *sum,
                                   float *factor);
    /* o[c, :d] += sum over j of p[j, c] * value[j, :d] for c < cols; reads rows of value up to a multiple of lanes */
    void (*value_columns)(float *o, const float *p, int width, int cols, const float *value, int64_t stride, int n, int d);

    /* Attention row by row: query heads that share a key head, over n keys and values at slots of the cache.
     * s[h, j] = q[h, :d] . key[slot[j], :d] */
    void (*key_dots)(float *s, int64_t s_stride, const float *q, int n_heads, const float *key, const int32_t *slot, int n, int d);
    /* o[h, :d] += sum over j of p[h, j] * value[slot[j], :d] */
    void (*value_sums)(float *o, const float *p, int64_t p_stride, int n_heads, const float *value, const int32_t *slot, int n, int d);
    /* One block of a softmax to the base 2. With m = max(s[:n], *max) and f = 2^(*max - m): s[j] = 2^(s[j] - m),
     * *sum = *sum * f + sum of s, *max = m. Returns f, by which sums of earlier blocks must be scaled. n > 0; *max may be -INFINITY. */
    float (*online_softmax)(float *s, int n, float *max, float *sum);
    void (*scale_row)(float *y, int n, float factor);                        /* y *= factor */
    void (*swiglu_row)(float *y, const float *gate, const float *up, int n); /* y = silu(gate) * up */
    void (*geglu_row)(float *y, const float *gate, const float *up, int n);  /* y = gelu(gate) * up, GELU in its tanh form */
    /* RMS norm. False if a value of x is NaN or Inf. */
    bool (*norm_row)(float *y, const float *x, const float *weight, int n, float eps, bool accumulate);
    void (*widen_row)(float *y, const void *x, lazy_dtype dtype, int n);

    /* Peak rates of one core, for benchmarks. The results are of no use but to keep the compiler from removing the work. */
    float (*multiply_adds)(const float *random, int steps, double *flops); /* random: (64,) in [-1, 1] */
    float (*read)(const void *memory, size_t bytes);
} lazy_kernels;

extern const lazy_kernels lazy_kernels_generic;
#if defined(__x86_64__)
extern const lazy_kernels lazy_kernels_avx2;
extern const lazy_kernels lazy_kernels_avx512;
#endif

/* The kernels called `name`, or the best ones if name is NULL; NULL if this machine cannot run them. */
const lazy_kernels *lazy_kernels_find(const char *name);

#endif
