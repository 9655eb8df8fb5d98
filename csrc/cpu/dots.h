/* dots.h — products with weights for few rows of x: which rows and columns come together. Weights are read as they are stored, or are
 * brought into a form of the including file first, once for all rows of x.
 *
 * The including file defines `operand` and DOT_ROWS; AS_STORED(work), the formats and forms that dots_of takes with any number of rows,
 * ONE_ROW_AS_STORED(work), those that it takes with one; form_of(format), form_bytes(form, k) and form_row(to, row, format, k); and after
 * this file dots_of. */

/* y[r * y_stride + c * y_spacing] (+)= x[r * x_stride + (0 … k-1)] . row c of w; its rows lie `spacing` bytes apart. */
typedef struct dot_products {
    float *y;
    int64_t y_stride, y_spacing;
    const operand *x;
    int64_t x_stride;
    const char *w;
    int64_t spacing;
    lazy_dtype dtype; /* a format or a form */
    int k;
    bool accumulate;
    int64_t row_bytes; /* from one row of w to the next */
} dot_products;

/* The sums of `rows` <= DOT_ROWS rows of x and `cols` columns, 4 or 1. */
INLINE void dots_of(dot_products t, const int rows, const int cols);

/* One function for each format and number of rows: in a larger one, compilers keep sums in memory. `cols` columns at a time, n_cols times;
 * they begin at consecutive rows of w. */
typedef void dots_function(dot_products t, int n_cols);

#define DOTS(format, rows, cols)                                                                                                           \
    static __attribute__((noinline)) void dots_##format##_##rows##_##cols(dot_products t, int n_cols)                                      \
    {                                                                                                                                      \
        t.dtype = (lazy_dtype)LAZY_##format;                                                                                               \
        for (; n_cols > 0; n_cols--, t.y++, t.w += t.row_bytes) dots_of(t, rows, cols);                                                    \
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

#define DEFINE(format)     DOTS(format, 1, 1) BY_ROWS(DOTS, format)
#define DEFINE_ONE(format) DOTS(format, 1, 1) DOTS(format, 1, 4)
AS_STORED(DEFINE)
ONE_ROW_AS_STORED(DEFINE_ONE)

enum { N_FORMS = LAZY_N_DTYPES + 3 };
#define ENTRY(format)     [LAZY_##format] = { BY_ROWS(NAME, format) },
#define ENTRY_ONE(format) [LAZY_##format] = { NAME(format, 1, 4) },
static dots_function *const four_columns[N_FORMS][DOT_ROWS] = { AS_STORED(ENTRY) ONE_ROW_AS_STORED(ENTRY_ONE) };
#define ENTRY_OF_COLUMN(format) [LAZY_##format] = NAME(format, 1, 1)
static dots_function *const one_column[N_FORMS] = { AS_STORED(ENTRY_OF_COLUMN) ONE_ROW_AS_STORED(ENTRY_OF_COLUMN) };

/* Reads the rows of w in four streams, n_cols / 4 rows apart: hardware prefetches these better than a single one. Rows of w are read once
 * for every DOT_ROWS rows of x, which meanwhile stay in the L1 cache. */
static void dots(float *y, int64_t y_stride, const void *x, int64_t x_stride, int n_rows, const void *w, lazy_dtype dtype, int n_cols,
                 int k, bool accumulate, void *room)
{
    enum { BLOCK = 8, ROOM = 256 * 1024 }; /* rows of each stream that are read from memory once, then from the L2 cache; bytes of it */
    const bool stored = four_columns[dtype][n_rows == 1 ? 0 : DOT_ROWS - 1];
    const lazy_dtype form = stored ? dtype : form_of(dtype);
    const int64_t stored_bytes = (int64_t)lazy_row_bytes(dtype, k), bytes = stored ? stored_bytes : (int64_t)form_bytes(form, k);
    const int stream = n_cols / 4, block = stored ? BLOCK : (int)clamp_int((int)(ROOM / (4 * bytes)), 1, BLOCK);
    for (int j = 0; j < stream; j += block) {
        int here = min_int(stream - j, block);
        const char *from = (const char *)w + j * stored_bytes;
        dot_products t = { y + j, y_stride, stream, x, x_stride, from, stream * bytes, form, k, accumulate, bytes };
        if (!stored) {
            t.w = room;
            t.spacing = here * bytes;
            for (int i = 0; i < 4 * here; i++)
                form_row((char *)room + i * bytes, from + (i / here * stream + i % here) * stored_bytes, dtype, k);
        }
        for (int left = n_rows, groups = ceil_div(n_rows, DOT_ROWS), rows; left > 0; left -= rows) {
            rows = ceil_div(left, groups--);
            four_columns[form][rows - 1](t, here);
            t.x += rows * x_stride;
            t.y += rows * y_stride;
        }
    }
    for (int j = 4 * stream; j < n_cols; j++) {
        const char *from = (const char *)w + j * stored_bytes;
        if (!stored) form_row(room, from, dtype, k);
        dot_products t = { y + j, y_stride, 0, x, x_stride, stored ? from : room, 0, form, k, accumulate, bytes };
        for (int r = 0; r < n_rows; r++, t.x += x_stride, t.y += y_stride) one_column[form](t, 1);
    }
}
