/* linear.c — products with weights. Many rows go through panels of widened weights that stay in a core's cache; few rows
 * read each weight once, where it lies. */
#include <string.h>

#include "cpu.h"

enum {
    FEW_PRODUCT_ROWS = 16, /* up to here a product is bound by reading the weights */
    DOT_BLOCK = 64,        /* output columns of one task of few rows */
    MOST_TILE_COLS = 64,
    PANEL_K = 2048, /* longest stretch of a panel */
};

typedef struct product {
    lazy_stream *stream;
    float *y;       /* (n, y_stride) */
    const float *x; /* (n, cols) */
    const lazy_matrix *w;
    int n;
    bool accumulate;
    int col_block; /* output columns of one task */
    int row_block; /* rows of one task */
    int n_col_blocks;
} product;

static size_t dtype_width(lazy_dtype dtype) { return dtype == LAZY_F32 ? 4 : 2; }

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
    return (const char *)part->data + (size_t)row * (size_t)cols * dtype_width(part->dtype);
}

static void add_bias(const product *p, int row, int n_rows, int col, int n_cols)
{
    if (!p->w->bias) return;
    for (int r = row; r < row + n_rows; r++) {
        float *y = p->y + (int64_t)r * p->w->rows;
        for (int j = col; j < col + n_cols; j++) y[j] += p->w->bias[j];
    }
}

/* ---- few rows --------------------------------------------------------------------------- */

static void multiply_few(void *job, int task, int worker)
{
    (void)worker;
    const product *p = job;
    const lazy_matrix *w = p->w;
    int begin = task * DOT_BLOCK, end = begin + DOT_BLOCK < w->rows ? begin + DOT_BLOCK : w->rows;
    for (int col = begin, first; col < end;) {
        const lazy_part *part = part_of(w, col, &first);
        int here = first + part->rows < end ? first + part->rows - col : end - col;
        kernels_of(p->stream)->dots(p->y + col, w->rows, p->x, w->cols, p->n, weight_row(part, col - first, w->cols), part->dtype, here,
                                    w->cols, p->accumulate);
        col += here;
    }
    add_bias(p, 0, p->n, begin, end - begin);
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
        row[j] = weight_row(part, col + j - first, p->w->cols) + (size_t)k * dtype_width(part->dtype);
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
                               (const char *)row[j] + (size_t)kk * dtype_width(dtype[j]), dtype[j], 1);
    }
}

static void multiply_block(void *job, int task, int worker)
{
    const product *p = job;
    const lazy_kernels *kernels = kernels_of(p->stream);
    const lazy_matrix *w = p->w;
    float *panels = scratch_of(p->stream, worker);
    int col = task % p->n_col_blocks * p->col_block, row = task / p->n_col_blocks * p->row_block;
    int n_cols = w->rows - col < p->col_block ? w->rows - col : p->col_block;
    int n_rows = p->n - row < p->row_block ? p->n - row : p->row_block;

    for (int k = 0; k < w->cols; k += PANEL_K) {
        int len = w->cols - k < PANEL_K ? w->cols - k : PANEL_K;
        size_t panel_size = (size_t)len * (size_t)kernels->tile_cols;
        for (int j = 0; j < n_cols; j += kernels->tile_cols) {
            int cols = n_cols - j < kernels->tile_cols ? n_cols - j : kernels->tile_cols;
            pack_panel(p, panels + (size_t)(j / kernels->tile_cols) * panel_size, col + j, cols, k, len);
        }
        for (int r = row; r < row + n_rows; r += kernels->tile_rows) {
            int rows = row + n_rows - r < kernels->tile_rows ? row + n_rows - r : kernels->tile_rows;
            for (int j = 0; j < n_cols; j += kernels->tile_cols) {
                int cols = n_cols - j < kernels->tile_cols ? n_cols - j : kernels->tile_cols;
                kernels->tile(p->y + (int64_t)r * w->rows + col + j, w->rows, p->x + (int64_t)r * w->cols + k, w->cols,
                              panels + (size_t)(j / kernels->tile_cols) * panel_size, kernels->tile_cols, len, rows, cols,
                              p->accumulate || k);
            }
        }
    }
    add_bias(p, row, n_rows, col, n_cols);
}

static int multiply(lazy_stream *stream, float *y, const float *x, int n, const lazy_matrix *w, bool accumulate, lazy_error *err)
{
    product p = { .stream = stream, .y = y, .x = x, .w = w, .n = n, .accumulate = accumulate };
    if (n <= FEW_PRODUCT_ROWS) return lazy_cpu_run(stream, multiply_few, &p, (w->rows + DOT_BLOCK - 1) / DOT_BLOCK, err);

    int k = w->cols < PANEL_K ? w->cols : PANEL_K, tile_cols = kernels_of(stream)->tile_cols;
    p.col_block = WORKER_SCRATCH / (k * tile_cols) * tile_cols;
    if (p.col_block > w->rows) p.col_block = w->rows;
    p.n_col_blocks = (w->rows + p.col_block - 1) / p.col_block;
    /* enough tasks that no thread waits long for the last one, each with enough rows to be worth its panels */
    enum { TASKS_PER_THREAD = 6, LEAST_ROWS = 224 };
    int wanted = (TASKS_PER_THREAD * stream->backend->threads + p.n_col_blocks - 1) / p.n_col_blocks;
    int n_row_blocks = n / LEAST_ROWS < wanted ? n / LEAST_ROWS : wanted;
    if (n_row_blocks < 1) n_row_blocks = 1;
    p.row_block = (n + n_row_blocks - 1) / n_row_blocks;
    n_row_blocks = (n + p.row_block - 1) / p.row_block;
    return lazy_cpu_run(stream, multiply_block, &p, p.n_col_blocks * n_row_blocks, err);
}

/* ---- the ops ---------------------------------------------------------------------------- */

int lazy_cpu_matmul(lazy_stream *stream, void *y, const void *x, int n, const lazy_matrix *w, bool accumulate, lazy_error *err)
{
    return multiply(stream, y, x, n, w, accumulate, err);
}

int lazy_cpu_logits(lazy_stream *stream, float *y, const void *x, int n, const lazy_matrix *w, lazy_error *err)
{
    return multiply(stream, y, x, n, w, false, err);
}

typedef struct gating {
    lazy_stream *stream;
    float *y;             /* (n, F) */
    const float *gate_up; /* (n, 2 F) */
    int ffn;
} gating;

static void gate_row(void *job, int task, int worker)
{
    (void)worker;
    const gating *g = job;
    const float *gate = g->gate_up + (int64_t)task * 2 * g->ffn;
    kernels_of(g->stream)->swiglu_row(g->y + (int64_t)task * g->ffn, gate, gate + g->ffn, g->ffn);
}

int lazy_cpu_gated(lazy_stream *stream, void *y, const void *x, int n, const lazy_matrix *gate_up, lazy_error *err)
{
    gating g = { .stream = stream, .y = y, .gate_up = ((lazy_cpu_stream *)stream)->gate_up, .ffn = gate_up->rows / 2 };
    int code = multiply(stream, ((lazy_cpu_stream *)stream)->gate_up, x, n, gate_up, false, err);
    return code ? code : lazy_cpu_run(stream, gate_row, &g, n, err);
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
