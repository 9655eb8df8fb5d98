/* dots.h — products with weights where they are stored, for few rows of x: which rows and columns come together. The including file defines
 * `operand`, DOT_ROWS, EACH_FORMAT unless it takes all formats and, after this file, dots_of. */

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

/* One function for each format and number of rows: in a larger one, compilers keep sums in memory. */
typedef void dots_function(dot_products t, int n_cols);

#define DOTS(format, rows, cols)                                                                                                           \
    static __attribute__((noinline)) void dots_##format##_##rows##_##cols(dot_products t, int n_cols)                                      \
    {                                                                                                                                      \
        t.dtype = LAZY_##format;                                                                                                           \
        dots_rows(t, rows, cols, n_cols);                                                                                                  \
    }
#define NAME(format, rows, cols) dots_##format##_##rows##_##cols,
#if DOT_ROWS == 6
#define BY_ROWS(work, format)                                                                                                              \
    work(format, 1, 4) work(format, 2, 4) work(format, 3, 4) work(format, 4, 4) work(format, 5, 4) work(format, 6, 4)
#elif DOT_ROWS == 4
#define BY_ROWS(work, format) work(format, 1, 4) work(format, 2, 4) work(format, 3, 4) work(format, 4, 4)
#elif DOT_ROWS == 3
#define BY_ROWS(work, format) work(format, 1, 4) work(format, 2, 4) work(format, 3, 4)
#else
#define BY_ROWS(work, format) work(format, 1, 4) work(format, 2, 4)
#endif
#ifndef EACH_FORMAT
#define EACH_FORMAT(work)                                                                                                                  \
    work(F32) work(F16) work(BF16) work(Q8_0) work(Q4_0) work(Q4_1) work(Q5_0) work(Q5_1) work(Q4_K) work(Q5_K) work(Q6_K)
#endif

#define DEFINE(format) DOTS(format, 1, 1) BY_ROWS(DOTS, format)
EACH_FORMAT(DEFINE)
#undef DEFINE

#define ENTRY(format) [LAZY_##format] = { BY_ROWS(NAME, format) },
static dots_function *const four_columns[LAZY_N_DTYPES][DOT_ROWS] = { EACH_FORMAT(ENTRY) };
#undef ENTRY
#define ENTRY(format) [LAZY_##format] = dots_##format##_1_1,
static dots_function *const one_column[LAZY_N_DTYPES] = { EACH_FORMAT(ENTRY) };
#undef ENTRY

/* Reads the rows of w in four streams, n_cols / 4 rows apart: hardware prefetches these better than a single one. Rows of w are read once
 * for every DOT_ROWS rows of x, which meanwhile stay in the L1 cache. */
static void dots(float *y, int64_t y_stride, const void *x, int64_t x_stride, int n_rows, const void *w, lazy_dtype dtype, int n_cols,
                 int k, bool accumulate)
{
    enum { BLOCK = 8 }; /* rows of each stream that are read from memory once, then from the L2 cache */
    const char *from = w;
    int64_t row_bytes = (int64_t)lazy_row_bytes(dtype, k);
    int stream = n_cols / 4;
    for (int j = 0; j < stream; j += BLOCK) {
        dot_products t = { y + j, y_stride, stream, x, x_stride, from + j * row_bytes, stream * row_bytes, dtype, k, accumulate };
        for (int left = n_rows, groups = ceil_div(n_rows, DOT_ROWS), rows; left > 0; left -= rows) {
            rows = ceil_div(left, groups--);
            four_columns[dtype][rows - 1](t, min_int(stream - j, BLOCK));
            t.x += rows * x_stride;
            t.y += rows * y_stride;
        }
    }
    dot_products rest = { y + 4 * stream, y_stride, 0, x, x_stride, from + 4 * stream * row_bytes, 0, dtype, k, accumulate };
    for (int r = 0; r < n_rows; r++, rest.x += x_stride, rest.y += y_stride) one_column[dtype](rest, n_cols - 4 * stream);
}
