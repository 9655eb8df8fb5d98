/* dots.h — products with weights where they are stored, for few rows of x: which rows and columns come together. The including file defines
 * `operand`, DOT_ROWS and, after this file, dots_of. */

enum { FETCH_AHEAD = 1024 }; /* bytes; about what a stream reads during the latency of memory */

/* y[r * y_stride + c * y_spacing] (+)= x[r * x_stride + (0 … k-1)] . row c of w; its rows lie `spacing` bytes apart. */
typedef struct dot_products {
    float *y;
    int64_t y_stride, y_spacing;
    const operand *x;
    int64_t x_stride;
    const char *w;
    int64_t spacing;
    lazy_dtype dtype;
    int k;
    bool accumulate;
} dot_products;

/* The sums of `rows` <= DOT_ROWS rows of x and `cols` columns, 4 or 1. */
INLINE void dots_of(dot_products t, const int rows, const int cols);

/* `cols` columns at a time, n_cols times; they begin at consecutive rows of w. */
INLINE void dots_rows(dot_products t, const int rows, const int cols, int n_cols)
{
    int64_t row_bytes = (int64_t)lazy_row_bytes(t.dtype, t.k);
    for (; n_cols > 0; n_cols--, t.y++, t.w += row_bytes) dots_of(t, rows, cols);
}

/* Reads these rows of w once for every DOT_ROWS rows of x, which meanwhile stay in the L1 cache. */
INLINE void dots_block(dot_products t, int n_rows, const int cols, int n_cols)
{
    int groups = ceil_div(n_rows, DOT_ROWS);
    for (int rows; n_rows > 0; n_rows -= rows, t.x += rows * t.x_stride, t.y += rows * t.y_stride) {
        rows = ceil_div(n_rows, groups);
        groups--;
        switch (rows) {
#define DOTS(n)                                                                                                                            \
    case n: dots_rows(t, n, cols, n_cols); break;
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

/* Reads the rows of w in four streams, n_cols / 4 rows apart: hardware prefetches these better than a single one. */
INLINE void dots_any(float *y, int64_t y_stride, const operand *x, int64_t x_stride, int n_rows, const void *w, lazy_dtype dtype,
                     int n_cols, int k, bool accumulate)
{
    enum { BLOCK = 8 }; /* rows of each stream that are read from memory once, then from the L2 cache */
    const char *from = w;
    int64_t row_bytes = (int64_t)lazy_row_bytes(dtype, k);
    int stream = n_cols / 4;
    for (int j = 0; j < stream; j += BLOCK)
        dots_block((dot_products){ y + j, y_stride, stream, x, x_stride, from + j * row_bytes, stream * row_bytes, dtype, k, accumulate },
                   n_rows, 4, min_int(stream - j, BLOCK));
    dot_products rest = { y + 4 * stream, y_stride, 0, x, x_stride, from + 4 * stream * row_bytes, 0, dtype, k, accumulate };
    if (lazy_is_quantized(dtype)) /* few columns: not worth the code for several rows at a time */
        for (; n_rows > 0; n_rows--, rest.x += x_stride, rest.y += y_stride) dots_rows(rest, 1, 1, n_cols - 4 * stream);
    else dots_block(rest, n_rows, 1, n_cols - 4 * stream);
}

static void dots(float *y, int64_t y_stride, const void *x, int64_t x_stride, int n_rows, const void *w, lazy_dtype dtype, int n_cols,
                 int k, bool accumulate)
{
    switch (dtype) {
    case LAZY_F32: dots_any(y, y_stride, x, x_stride, n_rows, w, LAZY_F32, n_cols, k, accumulate); break;
    case LAZY_F16: dots_any(y, y_stride, x, x_stride, n_rows, w, LAZY_F16, n_cols, k, accumulate); break;
    case LAZY_BF16: dots_any(y, y_stride, x, x_stride, n_rows, w, LAZY_BF16, n_cols, k, accumulate); break;
    case LAZY_Q8_0: dots_any(y, y_stride, x, x_stride, n_rows, w, LAZY_Q8_0, n_cols, k, accumulate); break;
    case LAZY_Q4_0: dots_any(y, y_stride, x, x_stride, n_rows, w, LAZY_Q4_0, n_cols, k, accumulate); break;
    case LAZY_Q4_1: dots_any(y, y_stride, x, x_stride, n_rows, w, LAZY_Q4_1, n_cols, k, accumulate); break;
    case LAZY_Q5_0: dots_any(y, y_stride, x, x_stride, n_rows, w, LAZY_Q5_0, n_cols, k, accumulate); break;
    case LAZY_Q5_1: dots_any(y, y_stride, x, x_stride, n_rows, w, LAZY_Q5_1, n_cols, k, accumulate); break;
    case LAZY_Q4_K: dots_any(y, y_stride, x, x_stride, n_rows, w, LAZY_Q4_K, n_cols, k, accumulate); break;
    case LAZY_Q5_K: dots_any(y, y_stride, x, x_stride, n_rows, w, LAZY_Q5_K, n_cols, k, accumulate); break;
    case LAZY_Q6_K: dots_any(y, y_stride, x, x_stride, n_rows, w, LAZY_Q6_K, n_cols, k, accumulate); break;
    }
}
