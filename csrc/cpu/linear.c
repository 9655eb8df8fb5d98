/* linear.c — products with weights. Many rows go through panels of widened weights that stay in a core's cache; few rows
 * read each weight once, where it lies. */
#include <string.h>

#include "cpu.h"

enum {
    STREAMS = 4,                                            /* in which few rows read the weights */
    PANEL_K = 1024,                                         /* longest stretch of a panel */
    PANELS_SIZE = 160 * 1024,                               /* floats of scratch for panels, ... */
    STRIP_SIZE = 16 * 1024,                                 /* ... for one strip of rows of x, ... */
    BLOCK_SIZE = WORKER_SCRATCH - PANELS_SIZE - STRIP_SIZE, /* ... and for gate and up of a block, before they become one */
};

typedef struct product {
    lazy_stream *stream;
    float *y;       /* (n, w->rows), or where gated (n, columns) */
    const float *x; /* (n, cols) */
    const lazy_matrix *w;
    int n;
    bool accumulate;
    bool gated;  /* y = silu(first half of the columns) * second half */
    int columns; /* that tasks divide among them: all, or where gated those of the first half, with their fellows */
    int col_blocks, row_blocks;
    int stretch; /* elements of a column that a panel holds */
} product;

/* The part of w that holds output column `column`; *first is the part's first column. */
static const lazy_part *part_of(const lazy_matrix *w, int column, int *first)
{
    *first = 0;
    const lazy_part *part = w->part;
    while (column >= *first + part->rows) *first += part++->rows;
    return part;
}

static const char *weight_row(const lazy_part *part, int row, int cols)
{
    return (const char *)part->data + (size_t)row * (size_t)cols * lazy_dtype_width(part->dtype);
}

static void add_bias(const product *p, int row, int n_rows, int col, int n_cols)
{
    if (!p->w->bias) return;
    for (int r = row; r < row + n_rows; r++) {
        float *y = p->y + (int64_t)r * p->w->rows;
        for (int j = col; j < col + n_cols; j++) y[j] += p->w->bias[j];
    }
}

static int most(int a, int b) { return a > b ? a : b; }

/* Where block i of `blocks` begins, all of them made of whole units and as even as can be. */
static int edge(int i, int blocks, int size, int unit) { return least(size, (int)((int64_t)quotient_up(size, unit) * i / blocks) * unit); }

/* ---- few rows --------------------------------------------------------------------------- */

/* Columns begin … end-1 of all rows; y is that of column 0. */
static void multiply_columns(const product *p, float *y, int begin, int end)
{
    const lazy_matrix *w = p->w;
    for (int col = begin, first; col < end;) {
        const lazy_part *part = part_of(w, col, &first);
        int here = least(first + part->rows, end) - col;
        kernels_of(p->stream)->dots(y + col, w->rows, p->x, w->cols, p->n, weight_row(part, col - first, w->cols), part->dtype, here,
                                    w->cols, p->accumulate);
        col += here;
    }
}

static void multiply_few(void *job, int task, int worker)
{
    (void)worker;
    const product *p = job;
    int begin = edge(task, p->col_blocks, p->columns, STREAMS), end = edge(task + 1, p->col_blocks, p->columns, STREAMS);
    if (!p->gated) {
        multiply_columns(p, p->y, begin, end);
        add_bias(p, 0, p->n, begin, end - begin);
        return;
    }
    float *both = ((lazy_cpu_stream *)p->stream)->gate_up; /* (n, 2 columns) */
    multiply_columns(p, both, begin, end);
    multiply_columns(p, both, p->columns + begin, p->columns + end);
    for (int r = 0; r < p->n; r++) {
        const float *gate = both + (int64_t)r * 2 * p->columns + begin;
        kernels_of(p->stream)->swiglu_row(p->y + (int64_t)r * p->columns + begin, gate, gate + p->columns, end - begin);
    }
}

/* ---- many rows -------------------------------------------------------------------------- */

/* Widens output columns col … col+n-1, elements k … k+len-1 of each, into one panel. All columns of a panel are of one dtype,
 * or it is packed part by part. */
static void pack_panel(const product *p, float *panel, int col, int n, int k, int len)
{
    const lazy_kernels *kernels = kernels_of(p->stream);
    const void *row[MOST_TILE_COLS];
    lazy_dtype dtype[MOST_TILE_COLS];
    bool uniform = true;
    for (int j = 0; j < n; j++) {
        int first;
        const lazy_part *part = part_of(p->w, col + j, &first);
        dtype[j] = part->dtype;
        row[j] = weight_row(part, col + j - first, p->w->cols) + (size_t)k * lazy_dtype_width(part->dtype);
        uniform = uniform && dtype[j] == dtype[0];
    }
    if (uniform) {
        kernels->pack(panel, row, n, dtype[0], len);
        return;
    }
    /* q, k and v of different dtypes in one panel: rare enough to go element by element */
    memset(panel, 0, (size_t)len * (size_t)kernels->tile_cols * sizeof *panel);
    for (int j = 0; j < n; j++) {
        for (int kk = 0; kk < len; kk++)
            kernels->widen_row(&panel[(size_t)kk * (size_t)kernels->tile_cols + (size_t)j],
                               (const char *)row[j] + (size_t)kk * lazy_dtype_width(dtype[j]), dtype[j], 1);
    }
}

/* A block of the output: rows row … row+n_rows-1, columns col … col+n_cols-1 and, where gated, their fellows beside them. */
typedef struct block {
    float *out; /* of its first row and column */
    int64_t out_stride;
    int row, n_rows, col, n_cols, halves;
} block;

/* Rows of x, elements k … k+len-1. Rows a multiple of 4 KiB apart would all lie in the same few sets of the first cache: those
 * are copied. */
static const float *strip_of(const product *p, float *copy, int row, int rows, int k, int len, int64_t *stride)
{
    const float *x = p->x + (int64_t)row * p->w->cols + k;
    *stride = p->w->cols;
    if (*stride % 1024) return x;
    *stride = len + 16;
    for (int r = 0; r < rows; r++) memcpy(copy + r * *stride, x + (int64_t)r * p->w->cols, (size_t)len * sizeof *x);
    return copy;
}

static void multiply_stretch(const product *p, const block *b, float *panels, float *copy, int k, int len)
{
    const lazy_kernels *kernels = kernels_of(p->stream);
    int width = kernels->tile_cols, per_half = (b->n_cols + width - 1) / width;
    size_t panel_size = (size_t)len * (size_t)width;
    for (int i = 0; i < b->halves * per_half; i++) {
        int j = i % per_half * width;
        pack_panel(p, panels + (size_t)i * panel_size, i / per_half * p->columns + b->col + j, least(width, b->n_cols - j), k, len);
    }
    int strips = (b->n_rows + kernels->tile_rows - 1) / kernels->tile_rows;
    for (int r = 0, rows; r < b->n_rows; r += rows, strips--) {
        rows = (b->n_rows - r + strips - 1) / strips;
        int64_t stride;
        const float *strip = strip_of(p, copy, b->row + r, rows, k, len, &stride);
        for (int i = 0; i < b->halves * per_half; i++) {
            int j = i % per_half * width;
            kernels->tile(b->out + r * b->out_stride + i / per_half * b->n_cols + j, b->out_stride, strip, stride,
                          panels + (size_t)i * panel_size, width, len, rows, least(width, b->n_cols - j), p->accumulate || k);
        }
    }
}

static void multiply_block(void *job, int task, int worker)
{
    const product *p = job;
    float *panels = scratch_of(p->stream, worker), *copy = panels + PANELS_SIZE;
    int row = task / p->col_blocks, col = task % p->col_blocks;
    int tile_rows = kernels_of(p->stream)->tile_rows, tile_cols = kernels_of(p->stream)->tile_cols;
    block b = { .row = edge(row, p->row_blocks, p->n, tile_rows),
                .col = edge(col, p->col_blocks, p->columns, tile_cols),
                .halves = p->gated ? 2 : 1 };
    b.n_rows = edge(row + 1, p->row_blocks, p->n, tile_rows) - b.row;
    b.n_cols = edge(col + 1, p->col_blocks, p->columns, tile_cols) - b.col;
    b.out = p->gated ? copy + STRIP_SIZE : p->y + (int64_t)b.row * p->columns + b.col;
    b.out_stride = p->gated ? 2 * b.n_cols : p->columns;
    for (int k = 0; k < p->w->cols; k += p->stretch) multiply_stretch(p, &b, panels, copy, k, least(p->stretch, p->w->cols - k));
    if (!p->gated) {
        add_bias(p, b.row, b.n_rows, b.col, b.n_cols);
        return;
    }
    for (int r = 0; r < b.n_rows; r++) {
        const float *gate = b.out + r * b.out_stride;
        kernels_of(p->stream)->swiglu_row(p->y + (int64_t)(b.row + r) * p->columns + b.col, gate, gate + b.n_cols, b.n_cols);
    }
}

/* Few rows: where reading the weights is the limit, long streams matter more than even shares. */
static void divide_few(product *p)
{
    enum { BOUND_BY_READING = 4, LEAST_COLS = 64 };
    int tasks_per_thread = p->n <= BOUND_BY_READING ? 2 : 3;
    p->col_blocks = least(tasks_per_thread * p->stream->backend->threads, quotient_up(p->columns, LEAST_COLS));
    p->row_blocks = 1;
}

/* Many rows: enough tasks that no thread waits long for the last one, each with enough rows to be worth its panels. */
static void divide_many(product *p)
{
    enum { TASKS_PER_THREAD = 6, LEAST_ROWS = 224 };
    const lazy_kernels *kernels = kernels_of(p->stream);
    int threads = p->stream->backend->threads, wanted = TASKS_PER_THREAD * threads, most_row_blocks = most(1, p->n / LEAST_ROWS);
    p->stretch = quotient_up(p->w->cols, quotient_up(p->w->cols, PANEL_K));
    int panels = quotient_up(p->columns, kernels->tile_cols); /* of one half, where gated */
    int room = PANELS_SIZE / (p->stretch * kernels->tile_cols * (p->gated ? 2 : 1));
    if (p->gated) /* a block of at least two strips must fit beside the panels */
        room = least(room, BLOCK_SIZE / (4 * kernels->tile_rows * kernels->tile_cols));
    p->col_blocks = least(panels, most(quotient_up(panels, room), quotient_up(wanted, most_row_blocks)));
    p->row_blocks = least(most_row_blocks, quotient_up(wanted, p->col_blocks));
    while (p->row_blocks < most_row_blocks && p->col_blocks * p->row_blocks % threads) p->row_blocks++;
    if (p->gated) {
        int most_rows = BLOCK_SIZE / (2 * quotient_up(panels, p->col_blocks) * kernels->tile_cols) - kernels->tile_rows;
        p->row_blocks = most(p->row_blocks, quotient_up(p->n, most_rows));
    }
}

static int multiply(product p, lazy_error *err)
{
    bool few = p.n <= kernels_of(p.stream)->few_rows;
    p.columns = p.gated ? p.w->rows / 2 : p.w->rows;
    if (few) divide_few(&p);
    else divide_many(&p);
    return lazy_cpu_run(p.stream, few ? multiply_few : multiply_block, &p, p.col_blocks * p.row_blocks, err);
}

/* ---- the ops ---------------------------------------------------------------------------- */

int lazy_cpu_matmul(lazy_stream *stream, void *y, const void *x, int n, const lazy_matrix *w, bool accumulate, lazy_error *err)
{
    return multiply((product){ .stream = stream, .y = y, .x = x, .w = w, .n = n, .accumulate = accumulate }, err);
}

int lazy_cpu_logits(lazy_stream *stream, float *y, const void *x, int n, const lazy_matrix *w, lazy_error *err)
{
    return multiply((product){ .stream = stream, .y = y, .x = x, .w = w, .n = n }, err);
}

int lazy_cpu_gated(lazy_stream *stream, void *y, const void *x, int n, const lazy_matrix *gate_up, lazy_error *err)
{
    return multiply((product){ .stream = stream, .y = y, .x = x, .w = gate_up, .n = n, .gated = true }, err);
}

int lazy_cpu_embed(lazy_stream *stream, void *x, const int32_t *ids, int n, const lazy_matrix *table, lazy_error *err)
{
    (void)err;
    const lazy_part *part = table->part;
    for (int r = 0; r < n; r++)
        kernels_of(stream)->widen_row((float *)x + (int64_t)r * table->cols, weight_row(part, ids[r], table->cols), part->dtype,
                                      table->cols);
    return LAZY_OK;
}
