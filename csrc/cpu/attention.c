/* attention.c — softmax(q k^T) v with an online softmax over blocks of keys; the (rows, keys) matrix is never stored.
 *
 * A task computes a block of rows for the query heads that share one key head. Scores are stored transposed: a row for
 * each key, a column for each query (one head of one row). The register tile can then read keys and values without
 * packing them, and each vector lane holds the softmax of one query. Up to SPLIT_KEYS_ROWS rows, the keys too are
 * divided among tasks, into chunks whose results are merged in order. A single row, and queries that fill at most half
 * a vector, are limited by memory bandwidth and use the kernels for attention row by row.
 *
 * In a layer with a window, keys that no row of a task sees are skipped.
 *
 * Exponents are to the base 2: q is scaled by log2(e) / sqrt(query_scalar). A soft cap is applied to each
 * block of products before its softmax. */
#include <string.h>

#include "cpu.h"

enum {
    TASK_QUERIES = 192, /* queries (rows x heads) of one task if scratch suffices; a multiple of every tile_cols */
    KEY_BLOCK = 256,    /* keys in one block of the online softmax if scratch suffices */
    KEY_CHUNK = 256,    /* fewest keys in a chunk */
};

void lazy_cpu_see(lazy_seen *seen, const lazy_attending *a)
{
    for (int r = 0, begin = 0, end = 0; r < a->n; r++) {
        while (end < a->m && a->in_play[end] <= a->rows[r]) end++;
        while (begin < end && a->rows[r] - a->in_play[begin] >= a->window) begin++;
        seen[r] = (lazy_seen){ begin, end };
    }
}

typedef struct attending {
    lazy_stream *stream;
    const lazy_config *c;
    const lazy_kernels *kernels;
    float *y; /* (n, H D) */
    lazy_attending a;
    lazy_dtype kv_type;
    const lazy_seen *seen; /* (n,) tokens of in_play that each row sees */
    int first_key, n_keys; /* from a multiple of key_unit on, all that some row sees: in_play[first_key … +n_keys-1] */
    float *partial;        /* (n, H, chunks, D + 2) output, maximum, sum; unused if chunks is 1 */
    float *raw_scores;     /* (H, m) scaled and capped q k^T of the last row, for its scores; NULL if there are none */
    float scale, cap;
    int heads_per_key;         /* query heads that read the same key head */
    int heads, head_blocks;    /* query heads in one task; tasks for each key head */
    int row_block, row_blocks; /* rows in one task; number of such blocks */
    int chunk, chunks;         /* keys in one task; number of chunks */
    bool by_rows;              /* use the kernels for attention row by row */
    int key_block;             /* keys in one block of the online softmax */
} attending;

static float *partial_of(const attending *t, int row, int head, int chunk)
{
    return t->partial + (((int64_t)row * t->c->n_heads + head) * t->chunks + chunk) * (t->c->head_dim + 2);
}

/* Writes the output of one query: normalised to y, or, where keys are divided, as it is to `partial`. */
static void write_output(const attending *t, int row, int head, int chunk, const float *o, float max, float sum)
{
    int d = t->c->head_dim;
    if (t->chunks == 1) {
        float *y = t->y + ((int64_t)row * t->c->n_heads + head) * d, factor = 1.0f / sum;
        for (int i = 0; i < d; i++) y[i] = o[i] * factor;
        return;
    }
    float *partial = partial_of(t, row, head, chunk);
    memcpy(partial, o, (size_t)d * sizeof *o);
    partial[d] = max;
    partial[d + 1] = sum;
}

/* ---- one task --------------------------------------------------------------------------- */

/* The state of one task: n = rows heads queries, in row order; all arrays are in the worker's scratch. In columns,
 * queries are grouped into panels of tile_cols. */
typedef struct sweep {
    int first, rows, g, head, heads;
    int n;
    float *q;         /* (panels, D, tile_cols) operands; by rows (n, D) */
    float *o;         /* (n, D) */
    float *max, *sum; /* (n,), whole panels */
    float *s;         /* scores, then powers of 2: of one panel (key_block, tile_cols); by rows (n, key_block) */
    float *factor;    /* (tile_cols,) factors on the outputs of earlier blocks */
    float *key_room, *value_room; /* (key_block, D) and (key_block, value_stride) for operands */
    const float *keys, *values;   /* operands of the current block: in the cache, or copies */
} sweep;

static int value_stride(const attending *t) { return ceil_div(t->c->head_dim, t->kernels->lanes) * t->kernels->lanes; }

/* Copies q, scaled, in row order to (n, D). */
static void copy_queries(const attending *t, const sweep *w, float *to)
{
    int size = w->heads * t->c->head_dim;
    for (int r = 0; r < w->rows; r++) {
        const float *q = (const float *)t->a.q + (int64_t)(w->first + r) * t->a.q_stride + w->head * t->c->head_dim;
        for (int i = 0; i < size; i++) to[r * size + i] = q[i] * t->scale;
    }
}

/* Packs q, scaled, into panels. Repeats the last query to fill the last panel. */
static void pack_queries(const attending *t, const sweep *w)
{
    int d = t->c->head_dim, cols = t->kernels->products.tile_cols;
    float *scaled = w->o; /* not yet in use */
    copy_queries(t, w, scaled);
    const void *row[MAX_TILE_COLS];
    for (int top = 0; top < w->n; top += cols) {
        for (int i = 0; i < cols; i++) row[i] = scaled + min_int(top + i, w->n - 1) * d;
        t->kernels->products.pack(w->q + top * d, row, cols, LAZY_F32, d);
    }
}

static sweep begin_sweep(const attending *t, float *scratch, int first, int g, int head_block)
{
    int d = t->c->head_dim, cols = t->kernels->products.tile_cols;
    sweep w = { .first = first,
                .rows = min_int(t->row_block, t->a.n - first),
                .g = g,
                .head = g * t->heads_per_key + head_block * t->heads };
    w.heads = min_int(t->heads, (g + 1) * t->heads_per_key - w.head);
    w.n = w.rows * w.heads;
    int padded = t->by_rows ? w.n : ceil_div(w.n, cols) * cols;
    w.s = scratch;
    w.q = w.s + t->key_block * (t->by_rows ? w.n : cols);
    w.o = w.q + padded * d;
    w.max = w.o + padded * d;
    w.sum = w.max + padded;
    w.factor = w.sum + padded;
    w.key_room = w.factor + cols;
    w.value_room = w.key_room + t->key_block * d;
    if (t->by_rows) copy_queries(t, &w, w.q);
    else pack_queries(t, &w);
    memset(w.o, 0, (size_t)w.n * (size_t)d * sizeof *w.o);
    for (int i = 0; i < padded; i++) {
        w.max[i] = -INFINITY;
        w.sum[i] = 0.0f;
    }
    return w;
}

/* Keys in the cache serve as operands where they are of the operands' type and the slots consecutive. So do values in
 * f32; in bf16 two tokens share an operand. */
static bool are_operands(const attending *t, const int32_t *slot, int n)
{
    return t->kv_type == (t->kernels->products.unit == 1 ? LAZY_F32 : LAZY_BF16) && slot[n - 1] - slot[0] == n - 1;
}

/* Copies run in several streams, which the hardware prefetches. */
enum { COPY_STREAMS = 4 };

/* n keys of key head g as (n, D) operands. */
static const float *key_operands(const attending *t, int g, const int32_t *slot, int n, float *room)
{
    int d = t->c->head_dim, stride = (int)lazy_row_operands(&t->kernels->products, d),
        stream = ceil_div(n, COPY_STREAMS);
    if (are_operands(t, slot, n)) return (const float *)kv_row(t->stream, t->a.kv, t->a.kv.k, g, slot[0]);
    for (int i = 0; i < stream; i++)
        for (int j = i; j < n; j += stream)
            t->kernels->convert_key(room + j * stride, kv_row(t->stream, t->a.kv, t->a.kv.k, g, slot[j]), t->kv_type,
                                    d);
    return room;
}

/* n values of key head g as operands of neighbouring tokens, rows of value_stride. */
static const float *value_operands(const attending *t, int g, const int32_t *slot, int n, float *room)
{
    int d = t->c->head_dim, stride = value_stride(t), per = t->kernels->products.unit, rows = ceil_div(n, per),
        stream = ceil_div(rows, COPY_STREAMS);
    if (per == 1 && stride == d && are_operands(t, slot, n))
        return (const float *)kv_row(t->stream, t->a.kv, t->a.kv.v, g, slot[0]);
    for (int i = 0; i < stream; i++)
        for (int j = i; j < rows; j += stream) {
            const char *first = kv_row(t->stream, t->a.kv, t->a.kv.v, g, slot[j * per]);
            const char *second = j * per + 1 < n ? kv_row(t->stream, t->a.kv, t->a.kv.v, g, slot[j * per + 1]) : NULL;
            t->kernels->pair_values(room + j * stride, first, second, t->kv_type, d);
        }
    return room;
}

/* (m,) room for a query's products with the keys; NULL unless it is of the last row and scores follow. */
static float *room_for_raw_scores(const attending *t, const sweep *w, int query)
{
    if (!t->raw_scores || w->first + query / w->heads < t->a.n - 1) return NULL;
    return t->raw_scores + (int64_t)(w->head + query % w->heads) * t->a.m;
}

/* One block of keys for the panel that begins at query `top`. */
static void sweep_panel(const attending *t, const sweep *w, int key, int n_keys, int top)
{
    const lazy_kernels *kernels = t->kernels;
    int d = t->c->head_dim, cols = min_int(kernels->products.tile_cols, w->n - top),
        width = cols <= kernels->lanes ? kernels->lanes : kernels->products.tile_cols;
    const lazy_seen *first = &t->seen[w->first + top / w->heads],
                    *last = &t->seen[w->first + (top + cols - 1) / w->heads];
    int begin = clamp_int(first->begin - key, 0, n_keys);
    begin -= begin % kernels->key_unit;
    int n = clamp_int(last->end - key, 0, n_keys) - begin;
    if (n <= 0) return;
    int32_t hidden[MAX_TILE_COLS], visible[MAX_TILE_COLS];
    for (int c = 0; c < width; c++) {
        const lazy_seen *seen = &t->seen[w->first + (top + min_int(c, cols - 1)) / w->heads];
        hidden[c] = seen->begin - key - begin;
        visible[c] = seen->end - key - begin;
    }
    const float *keys = w->keys + begin * (int)lazy_row_operands(&t->kernels->products, d),
                *values = w->values + begin / kernels->products.unit * value_stride(t);
    kernels->key_columns(w->s, width, keys, w->q + top * d, values, n, d);
    if (t->cap) kernels->rows->cap_row(w->s, n * width, t->cap);
    for (int c = 0; c < cols; c++) {
        float *raw = room_for_raw_scores(t, w, top + c);
        for (int j = 0; j < n && raw; j++) raw[key + begin + j] = w->s[j * width + c];
    }
    kernels->rows->online_softmax_columns(w->s, width, n, hidden, visible, w->max + top, w->sum + top, w->factor);
    for (int c = 0; c < cols; c++)
        if (w->factor[c] != 1.0f) kernels->rows->scale_row(w->o + (top + c) * d, d, w->factor[c]);
    kernels->value_columns(w->o + top * d, w->s, width, cols, values, value_stride(t), n, d);
}

/* One block of keys for all queries of a task, row by row. */
static void sweep_rows(const attending *t, const sweep *w, int key, int n_keys)
{
    const lazy_kernels *kernels = t->kernels;
    int d = t->c->head_dim;
    const char *keys = kv_row(t->stream, t->a.kv, t->a.kv.k, w->g, 0),
               *values = kv_row(t->stream, t->a.kv, t->a.kv.v, w->g, 0);
    kernels->rows->key_dots(w->s, t->key_block, w->q, w->n, keys, t->kv_type, t->a.in_play + key, n_keys, d);
    for (int i = 0; i < w->n; i++) {
        float *s = w->s + i * t->key_block, *raw = room_for_raw_scores(t, w, i);
        if (t->cap) kernels->rows->cap_row(s, n_keys, t->cap);
        if (raw) memcpy(raw + key, s, (size_t)n_keys * sizeof *s);
        const lazy_seen *seen = &t->seen[w->first + i / w->heads];
        int begin = clamp_int(seen->begin - key, 0, n_keys), end = clamp_int(seen->end - key, 0, n_keys);
        memset(s, 0, (size_t)begin * sizeof *s);
        memset(s + end, 0, (size_t)(n_keys - end) * sizeof *s);
        if (begin == end) continue;
        float factor = kernels->rows->online_softmax(s + begin, end - begin, &w->max[i], &w->sum[i]);
        if (factor != 1.0f) kernels->rows->scale_row(w->o + i * d, d, factor);
    }
    kernels->rows->value_sums(w->o, w->s, t->key_block, w->n, values, t->kv_type, t->a.in_play + key, n_keys, d);
}

static void attend(void *job, int task, int worker)
{
    const attending *t = job;
    int blocks = t->c->n_kv_heads * t->head_blocks, d = t->c->head_dim;
    int chunk = task % t->chunks, block = task / t->chunks % blocks;
    int first = (t->row_blocks - 1 - task / t->chunks / blocks) * t->row_block; /* tasks with the most keys first */
    sweep w = begin_sweep(t, scratch_of(t->stream, worker), first, block / t->head_blocks, block % t->head_blocks);
    int end = min_int(t->first_key + (chunk + 1) * t->chunk, t->seen[first + w.rows - 1].end);
    int key = max_int(t->first_key + chunk * t->chunk, t->seen[first].begin), n_keys;
    for (key -= key % t->kernels->key_unit; key < end; key += n_keys) {
        n_keys = min_int(t->key_block - key % t->key_block, end - key); /* blocks depend on no rows beside these */
        if (t->by_rows) {
            sweep_rows(t, &w, key, n_keys);
            continue;
        }
        w.keys = key_operands(t, w.g, t->a.in_play + key, n_keys, w.key_room);
        w.values = value_operands(t, w.g, t->a.in_play + key, n_keys, w.value_room);
        for (int top = 0; top < w.n; top += t->kernels->products.tile_cols) sweep_panel(t, &w, key, n_keys, top);
    }
    for (int i = 0; i < w.n; i++)
        write_output(t, first + i / w.heads, w.head + i % w.heads, chunk, w.o + i * d, w.max[i], w.sum[i]);
}

/* ---- tasks, merging --------------------------------------------------------------------- */

/* Merges the chunks of one row, all heads, in order. */
static void merge_row(void *job, int row, int worker)
{
    const attending *t = job;
    int d = t->c->head_dim;
    for (int h = 0; h < t->c->n_heads; h++) {
        float *y = t->y + ((int64_t)row * t->c->n_heads + h) * d, max = -INFINITY, sum = 0.0f;
        for (int chunk = 0; chunk < t->chunks; chunk++) max = fmaxf(max, partial_of(t, row, h, chunk)[d]);
        memset(y, 0, (size_t)d * sizeof *y);
        for (int chunk = 0; chunk < t->chunks; chunk++) {
            const float *partial = partial_of(t, row, h, chunk);
            float factor = exp2f(partial[d] - max);
            sum += partial[d + 1] * factor;
            for (int i = 0; i < d; i++) y[i] += partial[i] * factor;
        }
        for (int i = 0; i < d; i++) y[i] /= sum;
    }
}

/* Chooses the tasks by the shapes alone, not by the number of threads, so that sums always have the same order. */
static void divide(attending *t)
{
    int d = t->c->head_dim, cols = t->kernels->products.tile_cols, per_key = d + value_stride(t) + cols,
        per_head = 2 * d + 2, max_queries = TASK_QUERIES;
    bool many_rows = t->stream->many_rows || t->a.n > SPLIT_KEYS_ROWS;
    t->by_rows = !many_rows && (t->a.n == 1 || t->a.n * t->heads_per_key <= t->kernels->lanes / 2);
    if (t->by_rows) {
        t->key_block = 1024;
        max_queries = min_int(max_queries, WORKER_SCRATCH / (per_head + t->key_block));
    } else {
        t->key_block = KEY_BLOCK;
        while (t->key_block * per_key > WORKER_SCRATCH / 2) t->key_block /= 2;
        max_queries = min_int(max_queries, (WORKER_SCRATCH - cols - t->key_block * per_key) / (cols * per_head) * cols);
    }
    t->head_blocks = ceil_div(t->heads_per_key, max_queries);
    t->heads = ceil_div(t->heads_per_key, t->head_blocks);
    t->row_block = max_queries / t->heads;
    t->row_blocks = ceil_div(t->a.n, t->row_block);
    t->row_block = ceil_div(t->a.n, t->row_blocks);
    int smallest = t->a.n == 1 ? KEY_CHUNK : 2 * KEY_CHUNK, even = ceil_div(t->n_keys, MAX_CHUNKS);
    t->chunk = many_rows ? t->n_keys : max_int(smallest, ceil_div(even, KEY_CHUNK) * KEY_CHUNK);
    t->chunks = ceil_div(t->n_keys, t->chunk);
}

int lazy_cpu_attention(lazy_stream *stream, void *y, const lazy_attending *a, lazy_error *err)
{
    const lazy_config *c = stream->config;
    lazy_cpu_stream *scratch = (lazy_cpu_stream *)stream;
    attending t = {
        .stream = stream,
        .c = c,
        .kernels = kernels_of(stream),
        .y = y,
        .a = *a,
        .kv_type = stream->backend->kv,
        .seen = scratch->seen,
        .partial = scratch->partial,
        .raw_scores = stream->scores_follow ? scratch->probabilities : NULL,
        .scale = lazy_attention_scale(c),
        .cap = lazy_attention_cap(c),
        .heads_per_key = c->n_heads / c->n_kv_heads,
    };
    lazy_cpu_see(scratch->seen, a);
    t.first_key = t.seen[0].begin - t.seen[0].begin % t.kernels->key_unit;
    t.n_keys = a->m - t.first_key;
    divide(&t);
    scratch->has_raw_scores = t.raw_scores;
    int code = lazy_cpu_run(stream, attend, &t, t.row_blocks * c->n_kv_heads * t.head_blocks * t.chunks, err);
    if (code || t.chunks == 1) return code;
    return lazy_cpu_run(stream, merge_row, &t, a->n, err);
}
