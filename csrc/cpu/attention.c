/* attention.c — softmax(q k^T) v in one sweep over the keys, never a map of rows by keys; K and V are read where they lie.
 *
 * A task takes a block of rows, with all query heads that share one key head, through blocks of keys. Scores are held turned round, a
 * row for each key and a column for each row's head: the register tile then takes keys and values as they lie, and a softmax runs down
 * the lanes of a vector. Where the rows are few, the keys too are divided among tasks, into chunks that are merged in order. Columns
 * that would fill no more than half a vector go row by row instead, as does one row alone: that is bound by reading.
 *
 * Exponents are to the base 2: q is scaled by log2(e) / sqrt(D) beforehand. */
#include <math.h>
#include <string.h>

#include "cpu.h"

enum {
    HEAD_ROWS = 192, /* rows x heads of one task, unless scratch is short; a multiple of every tile's columns */
    KEY_BLOCK = 256, /* keys whose scores are held at a time, unless scratch is short */
    KEY_CHUNK = 256, /* least keys of a chunk, where keys are divided */
};

void lazy_cpu_limits(int32_t *limits, const int32_t *rows, int n, const int32_t *in_play, int m)
{
    for (int r = 0, j = 0; r < n; r++) {
        while (j < m && in_play[j] <= rows[r]) j++;
        limits[r] = j;
    }
}

typedef struct attending {
    lazy_stream *stream;
    const lazy_config *c;
    const lazy_kernels *kernels;
    float *y;         /* (n, H D) */
    const float *qkv; /* (n, width) */
    int n, m;
    const float *k, *v;     /* (G, capacity, D) */
    const int32_t *in_play; /* (m,) */
    const int32_t *limits;  /* (n,) how many of in_play each row sees */
    float *partial;         /* (n, H, chunks, D + 2) outputs, maxima, sums; where there are chunks */
    float scale;
    int width;                 /* (H + 2G) D */
    int64_t head;              /* capacity D, from one head of k or v to the next */
    int group;                 /* query heads that share a key head */
    int heads, head_blocks;    /* of them in one task */
    int row_block, row_blocks; /* rows in one task */
    int chunk, chunks;         /* keys in one task; one chunk means all of them */
    bool by_rows;              /* so few that they are not held in columns */
    int key_block;             /* keys whose scores are held at a time */
} attending;

static int between(int x, int low, int high) { return x < low ? low : x > high ? high : x; }

static float *partial_of(const attending *t, int row, int head, int chunk)
{
    return t->partial + (((int64_t)row * t->c->n_heads + head) * t->chunks + chunk) * (t->c->head_dim + 2);
}

/* Where the output of one row's head goes: finished, or as a chunk's part. */
static void deliver(const attending *t, int row, int head, int chunk, const float *o, float max, float sum)
{
    int d = t->c->head_dim;
    if (t->chunks == 1) {
        float *y = t->y + ((int64_t)row * t->c->n_heads + head) * d, share = 1.0f / sum;
        for (int i = 0; i < d; i++) y[i] = o[i] * share;
        return;
    }
    float *partial = partial_of(t, row, head, chunk);
    memcpy(partial, o, (size_t)d * sizeof *o);
    partial[d] = max;
    partial[d + 1] = sum;
}

/* ---- a block of rows -------------------------------------------------------------------- */

/* What a task works on: `rows` rows of `heads` heads of one key head, row by row; all of it in the worker's scratch. Where not by rows,
 * each row's head is a column; panels are of tile_cols columns. */
typedef struct sweep {
    int first, rows, g, head, heads;
    int n;                        /* rows heads */
    float *q;                     /* panels (D, tile_cols); by rows (n, D) */
    float *o;                     /* (n, D) */
    float *max, *sum;             /* (n,), whole panels */
    float *s;                     /* a panel's scores, then their powers (key_block, tile_cols); by rows (n, key_block) */
    float *factor;                /* (tile_cols,) by which a panel's outputs shrink */
    float *key_room, *value_room; /* (key_block, D) and (key_block, value_stride) for scattered ones */
    const float *keys, *values;   /* of a block: there, or where they lie */
} sweep;

static int value_stride(const attending *t) { return quotient_up(t->c->head_dim, t->kernels->lanes) * t->kernels->lanes; }

/* q row by row, scaled. */
static void take_rows(const attending *t, const sweep *w)
{
    int size = w->heads * t->c->head_dim;
    for (int r = 0; r < w->rows; r++) {
        const float *q = t->qkv + (int64_t)(w->first + r) * t->width + w->head * t->c->head_dim;
        for (int i = 0; i < size; i++) w->q[r * size + i] = q[i] * t->scale;
    }
}

/* q into panels, scaled; the last panel filled up with its last column. */
static void pack_rows(const attending *t, const sweep *w)
{
    int d = t->c->head_dim, cols = t->kernels->tile_cols;
    const void *row[MOST_TILE_COLS];
    for (int top = 0; top < w->n; top += cols) {
        for (int i = 0; i < cols; i++) {
            int at = least(top + i, w->n - 1);
            row[i] = t->qkv + (int64_t)(w->first + at / w->heads) * t->width + (w->head + at % w->heads) * d;
        }
        t->kernels->pack(w->q + top * d, row, cols, LAZY_F32, d);
        t->kernels->scale_row(w->q + top * d, cols * d, t->scale);
    }
}

static sweep begin_sweep(const attending *t, float *scratch, int first, int g, int head_block)
{
    int d = t->c->head_dim, cols = t->kernels->tile_cols;
    sweep w = { .first = first, .rows = least(t->row_block, t->n - first), .g = g, .head = g * t->group + head_block * t->heads };
    w.heads = least(t->heads, (g + 1) * t->group - w.head);
    w.n = w.rows * w.heads;
    int padded = t->by_rows ? w.n : quotient_up(w.n, cols) * cols;
    w.s = scratch;
    w.q = w.s + t->key_block * (t->by_rows ? w.n : cols);
    w.o = w.q + padded * d;
    w.max = w.o + padded * d;
    w.sum = w.max + padded;
    w.factor = w.sum + padded;
    w.key_room = w.factor + cols;
    w.value_room = w.key_room + t->key_block * d;
    if (t->by_rows) take_rows(t, &w);
    else pack_rows(t, &w);
    memset(w.o, 0, (size_t)w.n * (size_t)d * sizeof *w.o);
    for (int i = 0; i < padded; i++) {
        w.max[i] = -INFINITY;
        w.sum[i] = 0.0f;
    }
    return w;
}

/* Where n rows of a cache's head lie one after the other; elsewhere they are copied to room, in streams that hardware fetches ahead. */
static const float *in_order(const attending *t, const float *head, const int32_t *slot, int n, float *room, int stride)
{
    enum { STREAMS = 4 };
    int d = t->c->head_dim, stream = quotient_up(n, STREAMS);
    if (slot[n - 1] - slot[0] == n - 1 && stride == d) return head + (int64_t)slot[0] * d;
    for (int i = 0; i < stream; i++)
        for (int j = i; j < n; j += stream) memcpy(room + j * stride, head + (int64_t)slot[j] * d, (size_t)d * sizeof *room);
    return room;
}

/* One block of keys for the panel of columns from `top` on. */
static void sweep_panel(const attending *t, const sweep *w, int key, int n_keys, int top)
{
    const lazy_kernels *kernels = t->kernels;
    int d = t->c->head_dim, cols = least(kernels->tile_cols, w->n - top),
        width = cols <= kernels->lanes ? kernels->lanes : kernels->tile_cols;
    int32_t visible[MOST_TILE_COLS];
    for (int c = 0; c < width; c++) visible[c] = t->limits[w->first + (top + least(c, cols - 1)) / w->heads] - key;
    int reach = between(visible[cols - 1], 0, n_keys);
    if (reach == 0) return;
    kernels->key_columns(w->s, width, w->keys, w->q + top * d, w->values, reach, d);
    kernels->soften_columns(w->s, width, reach, visible, w->max + top, w->sum + top, w->factor);
    for (int c = 0; c < cols; c++)
        if (w->factor[c] != 1.0f) kernels->scale_row(w->o + (top + c) * d, d, w->factor[c]);
    kernels->value_columns(w->o + top * d, w->s, width, cols, w->values, value_stride(t), reach, d);
}

/* One block of keys for all of a task's rows. */
static void sweep_rows(const attending *t, const sweep *w, int key, int n_keys)
{
    const lazy_kernels *kernels = t->kernels;
    int d = t->c->head_dim;
    kernels->key_dots(w->s, t->key_block, w->q, w->n, t->k + w->g * t->head, t->in_play + key, n_keys, d);
    for (int i = 0; i < w->n; i++) {
        float *s = w->s + i * t->key_block;
        int visible = between(t->limits[w->first + i / w->heads] - key, 0, n_keys);
        memset(s + visible, 0, (size_t)(n_keys - visible) * sizeof *s);
        if (visible == 0) continue;
        float factor = kernels->soften(s, visible, &w->max[i], &w->sum[i]);
        if (factor != 1.0f) kernels->scale_row(w->o + i * d, d, factor);
    }
    kernels->value_sums(w->o, w->s, t->key_block, w->n, t->v + w->g * t->head, t->in_play + key, n_keys, d);
}

static void attend(void *job, int task, int worker)
{
    const attending *t = job;
    int blocks = t->c->n_kv_heads * t->head_blocks, d = t->c->head_dim;
    int chunk = task % t->chunks, block = task / t->chunks % blocks;
    int first = (t->row_blocks - 1 - task / t->chunks / blocks) * t->row_block; /* long ones first */
    sweep w = begin_sweep(t, scratch_of(t->stream, worker), first, block / t->head_blocks, block % t->head_blocks);
    int end = least((chunk + 1) * t->chunk, t->limits[first + w.rows - 1]);
    for (int key = chunk * t->chunk; key < end; key += t->key_block) {
        int n_keys = least(t->key_block, end - key);
        if (t->by_rows) {
            sweep_rows(t, &w, key, n_keys);
            continue;
        }
        w.keys = in_order(t, t->k + w.g * t->head, t->in_play + key, n_keys, w.key_room, d);
        w.values = in_order(t, t->v + w.g * t->head, t->in_play + key, n_keys, w.value_room, value_stride(t));
        for (int top = 0; top < w.n; top += t->kernels->tile_cols) sweep_panel(t, &w, key, n_keys, top);
    }
    for (int i = 0; i < w.n; i++) deliver(t, first + i / w.heads, w.head + i % w.heads, chunk, w.o + i * d, w.max[i], w.sum[i]);
}

/* ---- dividing, merging ------------------------------------------------------------------ */

/* Puts one row's chunks together, all heads, in order. */
static void merge_row(void *job, int row, int worker)
{
    (void)worker;
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

/* Fixed by the shapes alone, never by the number of threads, so that sums always run in the same order. */
static void divide(attending *t)
{
    int d = t->c->head_dim, cols = t->kernels->tile_cols, per_key = d + value_stride(t) + cols, per_head = 2 * d + 2, most = HEAD_ROWS;
    t->by_rows = t->n == 1 || t->n * t->group <= t->kernels->lanes / 2;
    if (t->by_rows) {
        t->key_block = 1024;
        most = least(most, WORKER_SCRATCH / (per_head + t->key_block));
    } else {
        t->key_block = KEY_BLOCK;
        while (t->key_block * per_key > WORKER_SCRATCH / 2) t->key_block /= 2;
        most = least(most, (WORKER_SCRATCH - cols - t->key_block * per_key) / (cols * per_head) * cols);
    }
    t->head_blocks = quotient_up(t->group, most);
    t->heads = quotient_up(t->group, t->head_blocks);
    t->row_block = most / t->heads;
    t->row_blocks = quotient_up(t->n, t->row_block);
    t->row_block = quotient_up(t->n, t->row_blocks);
    t->chunk = t->m;
    t->chunks = 1;
    if (t->n > FEW_ROWS) return;
    t->chunk = quotient_up(t->m, MOST_CHUNKS);
    int smallest = t->n == 1 ? KEY_CHUNK : 2 * KEY_CHUNK;
    t->chunk = t->chunk < smallest ? smallest : quotient_up(t->chunk, KEY_CHUNK) * KEY_CHUNK;
    t->chunks = quotient_up(t->m, t->chunk);
}

int lazy_cpu_attention(lazy_stream *stream, void *y, const void *qkv, const int32_t *rows, int n, lazy_kv kv, const int32_t *in_play, int m,
                       lazy_error *err)
{
    const lazy_config *c = stream->config;
    const lazy_cpu_stream *scratch = (lazy_cpu_stream *)stream;
    attending t = {
        .stream = stream,
        .c = c,
        .kernels = kernels_of(stream),
        .y = y,
        .qkv = qkv,
        .n = n,
        .m = m,
        .k = kv.k,
        .v = kv.v,
        .in_play = in_play,
        .limits = scratch->limits,
        .partial = scratch->partial,
        .scale = (float)(M_LOG2E / sqrt(c->head_dim)),
        .width = (c->n_heads + 2 * c->n_kv_heads) * c->head_dim,
        .head = (int64_t)kv.capacity * c->head_dim,
        .group = c->n_heads / c->n_kv_heads,
    };
    lazy_cpu_limits(scratch->limits, rows, n, in_play, m);
    divide(&t);
    int code = lazy_cpu_run(stream, attend, &t, t.row_blocks * c->n_kv_heads * t.head_blocks * t.chunks, err);
    if (code || t.chunks == 1) return code;
    return lazy_cpu_run(stream, merge_row, &t, n, err);
}
