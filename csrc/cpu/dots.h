/* dots.h — products with weights for few rows of x: which rows and columns come together. Weights are read as they are
 * stored, or are brought into a form of the including file first, once for all rows of x.
 *
 * The including file defines `operand` and DOT_ROWS; AS_STORED(work), the formats that dots_of takes; FORM, the format
 * that others are brought into, and form_row(to, row, format, k), which does so; and after this file dots_of. */

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
    int64_t row_bytes; /* from one row of w to the next */
} dot_products;

/* Writes the sums of one row of x and `cols` columns. */
INLINE void write_dots(float *y, const dot_products *t, const vec sum[4], const int cols)
{
    four total = cols == 4 ? sum_lanes_of_four(sum[0], sum[1], sum[2], sum[3]) : (four){ sum_lanes(sum[0]) };
    if (t->accumulate)
        for (int c = 0; c < cols; c++) y[c * t->y_spacing] += total[c];
    else
        for (int c = 0; c < cols; c++) y[c * t->y_spacing] = total[c];
}

/* The sums of `rows` <= DOT_ROWS rows of x and `cols` columns, 4 or 1. */
INLINE void dots_of(dot_products t, const int rows, const int cols);

/* One function for each format and number of rows: in a larger one, compilers keep sums in memory. `cols` columns at a
 * time, n_cols times; they begin at consecutive rows of w. */
typedef void dots_function(dot_products t, int n_cols);

#define DOTS(rows, format, cols)                                                                                       \
    static __attribute__((noinline)) void dots_##format##_##rows##_##cols(dot_products t, int n_cols)                  \
    {                                                                                                                  \
        t.dtype = LAZY_##format;                                                                                       \
        for (; n_cols > 0; n_cols--, t.y++, t.w += t.row_bytes) dots_of(t, rows, cols);                                \
    }
#define DEFINE(format) DOTS(1, format, 1) EACH_NUMBER(DOT_ROWS, DOTS, format, 4)
AS_STORED(DEFINE)

#define NAME(rows, format, cols) dots_##format##_##rows##_##cols,
#define ENTRY(format)            [LAZY_##format] = { EACH_NUMBER(DOT_ROWS, NAME, format, 4) },
#define ENTRY_OF_COLUMN(format)  [LAZY_##format] = NAME(1, format, 1)
static dots_function *const four_columns[LAZY_N_DTYPES][DOT_ROWS] = { AS_STORED(ENTRY) };
static dots_function *const one_column[LAZY_N_DTYPES] = { AS_STORED(ENTRY_OF_COLUMN) };

/* Reads the rows of w in four streams, n_cols / 4 rows apart: hardware prefetches these better than a single one. Rows
 * of w are read once for every DOT_ROWS rows of x, which meanwhile stay in the L1 cache. */
static void dots(float *y, int64_t y_stride, const void *x, int64_t x_stride, int n_rows, const void *w,
                 lazy_dtype dtype, int n_cols, int k, bool accumulate, void *room)
{
    /* rows of each stream that are read from memory once, then from the L2 cache; bytes of it */
    enum { BLOCK = 8, ROOM = 256 * 1024 };
    const bool stored = four_columns[dtype][0];
    const lazy_dtype form = stored ? dtype : FORM;
    const int block_values = lazy_formats[form].values;
    const int64_t stored_bytes = (int64_t)lazy_row_bytes(dtype, k),
                  bytes = (int64_t)lazy_row_bytes(form, ceil_div(k, block_values) * block_values);
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

#define TAKEN(format) [LAZY_##format] = true,

/* The table of products with up to `most` rows of x; behind it the formats that they take. */
#define DEFINE_FEW_ROWS(variant, unit_, row_operands_, most, ...)                                                      \
    const lazy_products JOIN(lazy_products_, variant) = {                                                              \
        .name = STRING(variant),                                                                                       \
        .unit = unit_,                                                                                                 \
        .row_operands = row_operands_,                                                                                 \
        .max_unpacked_halves = most,                                                                                   \
        .max_unpacked_others = most,                                                                                   \
        .convert = convert,                                                                                            \
        .dots = dots,                                                                                                  \
        .formats = { __VA_ARGS__ },                                                                                    \
    }
