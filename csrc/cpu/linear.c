/* linear.c — products with weights. Rows of x are converted to operands once. Up to some number of rows, each weight is
 * read once, where it is stored; for more, weights are packed into panels of operands that stay in a core's cache. */
#include "cpu.h"

enum {
    STREAMS = 4,                               /* in which dots reads the weights */
    HALF_SCRATCH = WORKER_SCRATCH / 2,         /* for dots, and for gate and up */
    PANEL_K = 1024,                            /* most operands of a column in a panel */
    PANELS_SIZE = 160 * 1024,                  /* operands of scratch for panels, */
    BLOCK_SIZE = WORKER_SCRATCH - PANELS_SIZE, /* and for gate and up of one block */
    BOUND_BY_READING = 4,                      /* most rows of a product that waits for its weights */
    MIN_COLS = 64,                             /* in a task that multiplies unpacked, while every thread has one */
};

typedef struct product {
    lazy_stream *stream;
    const lazy_products *kernels;
    float *y;              /* (n, w->rows), or where gated (n, columns) */
    const float *x;        /* (n, cols) */
    const float *operands; /* (n, stride) of x */
    int64_t stride;
    const lazy_matrix *w;
    const int32_t *rows; /* (n,) of x that are multiplied; NULL: all in turn */
    int n;
    bool accumulate;
    bool gated;  /* y = act(first half of the columns) * second half */
    int columns; /* of y; where gated, column j needs columns j and columns + j of the product */
    int col_blocks, row_blocks;
    int k_block;    /* elements of a column in a panel */
    int panel_size; /* in operands */
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
    return (const char *)part->data + (size_t)row * lazy_row_bytes(part->dtype, cols);
}

static void add_bias(const product *p, int row, int n_rows, int col, int n_cols)
{
    if (!p->w->bias) return;
    for (int r = row; r < row + n_rows; r++) {
        float *y = p->y + (int64_t)r * p->w->rows;
        for (int j = col; j < col + n_cols; j++) y[j] += p->w->bias[j];
    }
}

/* The first item of block i if `size` items are divided into `blocks` blocks of nearly equal numbers of whole units. */
static int block_start(int i, int blocks, int size, int unit)
{
    return min_int(size, (int)((int64_t)ceil_div(size, unit) * i / blocks) * unit);
}

static void gate_row(const product *p, float *y, const float *gate, const float *up, int n)
{
    const lazy_row_kernels *kernels = kernels_of(p->stream)->rows;
    (p->stream->config->gelu ? kernels->geglu_row : kernels->swiglu_row)(y, gate, up, n);
}

/* ---- operands --------------------------------------------------------------------------- */

static void convert_rows(void *job, int first, int end, int worker)
{
    const product *p = job;
    float *to = ((lazy_cpu_stream *)p->stream)->operands;
    for (int r = first; r < end; r++) {
        int64_t row = p->rows ? p->rows[r] : r;
        p->kernels->convert(to + r * p->stride, p->x + row * p->w->cols, p->w->cols);
    }
}

static int convert(product *p, bool unpacked, lazy_error *err)
{
    p->operands = p->x;
    p->stride = p->w->cols;
    if (p->kernels->unit == 1 && !p->rows && (unpacked || !is_converted(p->stream, p->w->cols))) return LAZY_OK;
    p->operands = ((lazy_cpu_stream *)p->stream)->operands;
    p->stride = operand_stride(p->kernels, p->w->cols);
    return lazy_cpu_run_rows(p->stream, convert_rows, p, p->n, err);
}

/* ---- unpacked --------------------------------------------------------------------------- */

/* y[:, 0 … end-begin-1] = columns begin … end-1 of the product, for all rows. */
static void multiply_columns(const product *p, float *y, int64_t y_stride, int begin, int end, float *room)
{
    const lazy_matrix *w = p->w;
    for (int col = begin, first; col < end;) {
        const lazy_part *part = part_of(w, col, &first);
        int here = min_int(first + part->rows, end) - col;
        p->kernels->dots(y + (col - begin), y_stride, p->operands, p->stride, p->n,
                         weight_row(part, col - first, w->cols), part->dtype, here, w->cols, p->accumulate, room);
        col += here;
    }
}

static void multiply_unpacked(void *job, int task, int worker)
{
    const product *p = job;
    float *room = scratch_of(p->stream, worker), *gate = room + HALF_SCRATCH;
    int begin = block_start(task, p->col_blocks, p->columns, STREAMS),
        end = block_start(task + 1, p->col_blocks, p->columns, STREAMS), width = end - begin;
    if (!p->gated) {
        multiply_columns(p, p->y + begin, p->columns, begin, end, room);
        add_bias(p, 0, p->n, begin, width);
        return;
    }
    multiply_columns(p, gate, 2 * width, begin, end, room);
    multiply_columns(p, gate + width, 2 * width, p->columns + begin, p->columns + end, room);
    for (int r = 0; r < p->n; r++, gate += 2 * width)
        gate_row(p, p->y + (int64_t)r * p->columns + begin, gate, gate + width, width);
}

/* Enough tasks that gate and up of one fit into the scratch. */
static void fit_gates(product *p)
{
    enum { UNEVEN = 8 };
    if (p->gated) p->col_blocks = max_int(p->col_blocks, ceil_div(p->columns, HALF_SCRATCH / (2 * p->n) - UNEVEN));
}

/* ---- packed ----------------------------------------------------------------------------- */

/* A block of the output. Where gated (halves is 2), gate and up lie side by side. */
typedef struct block {
    float *out; /* first row and column of the block */
    int64_t out_stride;
    int row, n_rows, col, n_cols, halves;
} block;

/* Columns that are packed together: all of one part. */
typedef struct panel {
    const lazy_part *part;
    int row, n; /* rows row … row+n-1 of the part */
    int out;    /* its first column in the block's output */
} panel;

/* The panel whose first column is `out`. */
static panel panel_at(const product *p, const block *b, int out)
{
    int half = out / b->n_cols, column = half * p->columns + b->col + out % b->n_cols, first;
    const lazy_part *part = part_of(p->w, column, &first);
    int end = min_int((half + 1) * b->n_cols, out + first + part->rows - column);
    return (panel){ part, column - first, min_int(p->kernels->tile_cols, end - out), out };
}

/* Packs elements k … k+len-1 of the block's columns. */
static void pack_k_block(const product *p, const block *b, float *to, int k, int len)
{
    const void *row[MAX_TILE_COLS];
    for (panel columns = { 0 }; columns.out < b->halves * b->n_cols; columns.out += columns.n, to += p->panel_size) {
        columns = panel_at(p, b, columns.out);
        const lazy_part *part = columns.part;
        for (int j = 0; j < columns.n; j++)
            row[j] = weight_row(part, columns.row + j, p->w->cols) + lazy_row_bytes(part->dtype, k);
        p->kernels->pack(to, row, columns.n, part->dtype, len);
    }
}

static void multiply_k_block(const product *p, const block *b, const float *panels, int k, int len)
{
    int width = b->halves * b->n_cols, strips = ceil_div(b->n_rows, p->kernels->tile_rows);
    for (int r = 0, rows; r < b->n_rows; r += rows, strips--) {
        rows = ceil_div(b->n_rows - r, strips);
        const float *strip = p->operands + (b->row + r) * p->stride + lazy_row_operands(p->kernels, k), *from = panels;
        for (panel columns = { 0 }; columns.out < width; columns.out += columns.n, from += p->panel_size) {
            columns = panel_at(p, b, columns.out);
            p->kernels->tile(b->out + r * b->out_stride + columns.out, b->out_stride, strip, p->stride, from,
                             columns.part->dtype, len, rows, columns.n, p->accumulate || k);
        }
    }
}

/* Unless it `packs`, the panels hold the block's columns. */
static void multiply_block(const product *p, block b, float *panels, bool packs)
{
    b.out = p->gated ? panels + PANELS_SIZE : p->y + (int64_t)b.row * p->columns + b.col;
    b.out_stride = p->gated ? 2 * b.n_cols : p->columns;
    for (int k = 0; k < p->w->cols; k += p->k_block) {
        int len = min_int(p->k_block, p->w->cols - k);
        if (packs) pack_k_block(p, &b, panels, k, len);
        multiply_k_block(p, &b, panels, k, len);
    }
    if (!p->gated) {
        add_bias(p, b.row, b.n_rows, b.col, b.n_cols);
        return;
    }
    for (int r = 0; r < b.n_rows; r++) {
        const float *gate = b.out + r * b.out_stride;
        gate_row(p, p->y + (int64_t)(b.row + r) * p->columns + b.col, gate, gate + b.n_cols, b.n_cols);
    }
}

static void multiply_packed(void *job, int task, int worker)
{
    const product *p = job;
    int row = task / p->col_blocks, col = task % p->col_blocks, tile_rows = p->kernels->tile_rows,
        tile_cols = p->kernels->tile_cols, begin = block_start(row, p->row_blocks, p->n, tile_rows),
        end = block_start(row + 1, p->row_blocks, p->n, tile_rows);
    block b = { .row = begin,
                .col = block_start(col, p->col_blocks, p->columns, tile_cols),
                .halves = p->gated ? 2 : 1 };
    b.n_cols = block_start(col + 1, p->col_blocks, p->columns, tile_cols) - b.col;
    const bool whole = p->k_block >= p->w->cols; /* panels hold whole columns, and serve all rows */
    /* Gate and up of a strip are used while they are in cache, unless they add up in scratch from panel to panel. */
    int most = !p->gated ? end - begin : whole ? tile_rows : BLOCK_SIZE / (2 * b.n_cols);
    for (; b.row < end; b.row += b.n_rows) {
        b.n_rows = even_part(end - b.row, most);
        multiply_block(p, b, scratch_of(p->stream, worker), !whole || b.row == begin);
    }
}

/* Limited by bandwidth: long streams matter more than an even division, but no thread should be without a task. */
static void divide_unpacked(product *p)
{
    enum { LEAST_COLS = 16 };
    int threads = p->stream->backend->threads, tasks_per_thread = p->n <= BOUND_BY_READING ? 2 : 3,
        most = min_int(tasks_per_thread * threads, ceil_div(p->columns, MIN_COLS));
    p->col_blocks = most < threads ? min_int(threads, ceil_div(p->columns, LEAST_COLS)) : most - most % threads;
    p->row_blocks = 1;
    fit_gates(p);
}

/* The blocks of columns and rows that take the least time if a panel is packed in the time in which `packing` rows are
 * multiplied by it, and READ_ROWS rows of x are read in, and if threads wait for half of the last task. */
static void divide_evenly(product *p, int panels, int most_panels)
{
    enum { LEAST_ROWS = 28, READ_ROWS = 180 };
    const lazy_products *kernels = p->kernels;
    int threads = p->stream->backend->threads,
        most = max_int(1, min_int(p->n / LEAST_ROWS, ceil_div(p->n, kernels->tile_rows)));
    int64_t least = INT64_MAX;
    for (int width = min_int(panels, most_panels); width > 0; width--) {
        const int cols = ceil_div(panels, width);
        for (int rows = 1; rows <= most; rows++) {
            int64_t height = ceil_div(p->n, rows),
                    task = READ_ROWS * width * (height + kernels->packing) + kernels->packing * height,
                    time = (2 * ceil_div(cols * rows, threads) + 1) * task;
            if (time >= least) continue;
            least = time;
            p->col_blocks = cols;
            p->row_blocks = rows;
        }
    }
}

static void divide_packed(product *p)
{
    const lazy_products *kernels = p->kernels;
    int unit = kernels->unit, cut = 0;
    for (int i = 0, first = 0; i < p->w->n_parts; first += p->w->part[i++].rows) {
        if (lazy_is_quantized(p->w->part[i].dtype)) unit = LAZY_LONGEST_BLOCK; /* ends of panels are ends of blocks */
        cut += first % p->columns % kernels->tile_cols != 0;
    }
    int most = PANEL_K / kernels->panel_operands * kernels->unit / LAZY_LONGEST_BLOCK * LAZY_LONGEST_BLOCK,
        k_blocks = ceil_div(p->w->cols, most);
    p->k_block = ceil_div(ceil_div(p->w->cols, k_blocks), unit) * unit;
    p->panel_size = ceil_div(p->k_block, kernels->unit) * kernels->panel_operands * kernels->tile_cols;
    int panels = ceil_div(p->columns, kernels->tile_cols); /* where gated, of one half */
    int max_panels = (PANELS_SIZE / p->panel_size - cut) / (p->gated ? 2 : 1);
    if (p->gated) /* gate and up of at least two strips must fit into the block */
        max_panels = min_int(max_panels, BLOCK_SIZE / (4 * kernels->tile_rows * kernels->tile_cols));
    divide_evenly(p, panels, max_panels);
}

/* Four rows of weights, and gate and up, must fit into the scratch. */
static bool fits_unpacked(const product *p) { return 4 * p->w->cols <= (p->gated ? HALF_SCRATCH : WORKER_SCRATCH); }

static int max_unpacked_rows(const product *p)
{
    lazy_dtype dtype = p->w->part[0].dtype;
    if (p->stream->many_rows || !fits_unpacked(p)) return 0;
    bool halves = dtype == LAZY_F16 || dtype == LAZY_BF16;
    return halves ? p->kernels->max_unpacked_halves : p->kernels->max_unpacked_others;
}

static bool takes(const lazy_products *few, const product *p)
{
    if (!few || p->stream->many_rows || p->n > few->max_unpacked_others || !fits_unpacked(p)) return false;
    for (int i = 0; i < p->w->n_parts; i++)
        if (!few->formats[p->w->part[i].dtype]) return false;
    return true;
}

static const lazy_products *best_products(const product *p)
{
    const lazy_arithmetic *a = cpu_of(p->stream)->arithmetic;
    return takes(a->fewest, p) ? a->fewest : takes(a->few, p) ? a->few : a->products;
}

/* At most ROW_CHUNK rows. Few rows are summed in another order than many. */
static int multiply_chunk(product p, lazy_error *err)
{
    p.kernels = best_products(&p);
    bool unpacked = p.n <= max_unpacked_rows(&p);
    int code = convert(&p, unpacked, err);
    if (code) return code;
    if (unpacked) divide_unpacked(&p);
    else divide_packed(&p);
    return lazy_cpu_run(p.stream, unpacked ? multiply_unpacked : multiply_packed, &p, p.col_blocks * p.row_blocks, err);
}

/* In parts of about equal size: a remainder of few rows would have other sums than the same rows among many. */
static int multiply(product p, lazy_error *err)
{
    p.columns = p.gated ? p.w->rows / 2 : p.w->rows;
    int code = LAZY_OK, left = p.n;
    for (; left > 0 && !code; left -= p.n, p.x += (int64_t)p.n * p.w->cols, p.y += (int64_t)p.n * p.columns) {
        p.n = even_part(left, ROW_CHUNK);
        code = multiply_chunk(p, err);
    }
    return code;
}

/* ---- rows sorted by expert --------------------------------------------------------------- */

/* The products of all experts as one job. */
typedef struct by_expert {
    product all; /* of the rows of all experts; its w is the first expert's */
    const lazy_sorted_rows *sorted;
    bool unpacked;
    int wanted;                           /* tasks of an unpacked product */
    int first_task[LAZY_MAX_EXPERTS + 1]; /* of each expert */
} by_expert;

/* The product of one expert, divided into tasks. */
static product product_of(const by_expert *b, int expert)
{
    product p = b->all;
    int first = b->sorted->begin[expert];
    p.n = b->sorted->begin[expert + 1] - first;
    p.w += expert;
    p.y += (int64_t)first * p.columns;
    p.operands += first * p.stride;
    p.row_blocks = 1;
    if (!b->unpacked) {
        divide_packed(&p);
        return p;
    }
    p.col_blocks = min_int(b->wanted, ceil_div(p.columns, MIN_COLS));
    fit_gates(&p);
    return p;
}

static void multiply_for_expert(void *job, int task, int worker)
{
    const by_expert *b = job;
    int low = 0, high = b->sorted->n_experts; /* the expert is in low … high-1 */
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (b->first_task[middle] <= task) low = middle;
        else high = middle;
    }
    product p = product_of(b, low);
    task -= b->first_task[low];
    (b->unpacked ? multiply_unpacked : multiply_packed)(&p, task, worker);
}

/* Most experts have few rows: they are packed only where panels are worth it for few, and the pass has many or enough
 * for each of n experts. */
static bool packs_experts(const product *p, int n)
{
    enum { MANY_ROWS = 160, FEW_ROWS = 64 };
    int unpacked = p->kernels->max_unpacked_halves, of_expert = p->n * p->stream->config->experts_per_token / n;
    return !p->kernels->dots || !fits_unpacked(p) ||
           (unpacked < FEW_ROWS && (p->stream->many_rows || p->n > MANY_ROWS || 2 * of_expert > 3 * unpacked));
}

int lazy_cpu_multiply_experts(lazy_stream *stream, float *y, const float *x, const lazy_sorted_rows *sorted,
                              const lazy_matrix *w, lazy_error *err)
{
    by_expert b = { .sorted = sorted };
    b.all = (product){ .stream = stream, .y = y, .x = x, .rows = sorted->rows, .w = w, .n = sorted->n };
    b.all.gated = w->n_parts == 2;
    b.all.columns = w->rows / w->n_parts;
    b.all.kernels = best_products(&b.all);
    for (int e = 1; e < sorted->n_experts; e++) {
        product p = b.all;
        p.w += e;
        if (best_products(&p) != b.all.kernels) b.all.kernels = products_of(stream); /* for experts of any format */
    }
    b.unpacked = !packs_experts(&b.all, sorted->n_experts);
    b.all.n = sorted->begin[sorted->n_experts];
    int code = convert(&b.all, b.unpacked, err), n_active = 0, n_tasks = 0;
    if (code) return code;
    for (int e = 0; e < sorted->n_experts; e++) n_active += sorted->begin[e] < sorted->begin[e + 1];
    b.wanted = ceil_div(stream->backend->threads * (sorted->n <= BOUND_BY_READING ? 2 : 8), n_active);
    for (int e = 0; e < sorted->n_experts; e++) {
        b.first_task[e] = n_tasks;
        if (sorted->begin[e] == sorted->begin[e + 1]) continue;
        product p = product_of(&b, e);
        n_tasks += p.col_blocks * p.row_blocks;
    }
    b.first_task[sorted->n_experts] = n_tasks;
    return lazy_cpu_run(stream, multiply_for_expert, &b, n_tasks, err);
}

int lazy_cpu_multiply_router(lazy_stream *stream, float *y, const float *x, int n, const lazy_matrix *w,
                             lazy_error *err)
{
    product p = { .stream = stream, .y = y, .operands = x, .stride = w->cols, .w = w, .n = n, .columns = w->rows };
    p.kernels = cpu_of(stream)->in_f32;
    if (!fits_unpacked(&p)) return lazy_cpu_logits(stream, y, x, n, w, err);
    divide_unpacked(&p);
    return lazy_cpu_run(stream, multiply_unpacked, &p, p.col_blocks, err);
}

/* ---- the ops ---------------------------------------------------------------------------- */

int lazy_cpu_matmul(lazy_stream *stream, void *y, const void *x, int n, const lazy_matrix *w, bool accumulate,
                    lazy_error *err)
{
    return multiply((product){ .stream = stream, .y = y, .x = x, .w = w, .n = n, .accumulate = accumulate }, err);
}

static void cap_logits(void *job, int row, int worker)
{
    const product *p = job;
    kernels_of(p->stream)->rows->cap_row(p->y + (int64_t)row * p->w->rows, p->w->rows, p->stream->config->logit_cap);
}

int lazy_cpu_logits(lazy_stream *stream, float *y, const void *x, int n, const lazy_matrix *w, lazy_error *err)
{
    product p = { .stream = stream, .y = y, .x = x, .w = w, .n = n };
    int code = multiply(p, err);
    return code || !stream->config->logit_cap ? code : lazy_cpu_run(stream, cap_logits, &p, n, err);
}

int lazy_cpu_gated(lazy_stream *stream, void *y, const void *x, int n, const lazy_matrix *gate_up, lazy_error *err)
{
    return multiply((product){ .stream = stream, .y = y, .x = x, .w = gate_up, .n = n, .gated = true }, err);
}

int lazy_cpu_embed(lazy_stream *stream, void *x, const int32_t *ids, int n, const lazy_matrix *table, lazy_error *err)
{
    const lazy_part *part = table->part;
    for (int r = 0; r < n; r++) {
        float *row = (float *)x + (int64_t)r * table->cols, scale = stream->config->embedding_scale;
        kernels_of(stream)->rows->widen_row(row, weight_row(part, ids[r], table->cols), part->dtype, table->cols);
        if (scale != 1.0f) kernels_of(stream)->rows->scale_row(row, table->cols, scale);
    }
    return LAZY_OK;
}

/* ---- rounding weights ------------------------------------------------------------------- */

typedef struct rounding {
    lazy_stream *stream;
    char *to;
    lazy_dtype dtype;
    const lazy_part *from;
    int cols;
} rounding;

static void quantize_rows(void *job, int first, int end, int worker)
{
    const rounding *r = job;
    float *wide = scratch_of(r->stream, worker);
    for (int row = first; row < end; row++) {
        for (int col = 0; col < r->cols; col += WORKER_SCRATCH) {
            int n = min_int(WORKER_SCRATCH, r->cols - col);
            char *to = r->to + (size_t)row * lazy_row_bytes(r->dtype, r->cols) + lazy_row_bytes(r->dtype, col);
            const char *from = weight_row(r->from, row, r->cols) + lazy_row_bytes(r->from->dtype, col);
            kernels_of(r->stream)->rows->widen_row(wide, from, r->from->dtype, n);
            lazy_quantize(to, wide, r->dtype, n);
        }
    }
}

int lazy_cpu_quantize(lazy_stream *stream, void *to, lazy_dtype dtype, const lazy_part *from, int cols, lazy_error *err)
{
    rounding r = { .stream = stream, .to = to, .dtype = dtype, .from = from, .cols = cols };
    return lazy_cpu_run_rows(stream, quantize_rows, &r, from->rows, err);
}
