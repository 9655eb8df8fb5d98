/* attention.c — softmax(q k^T) v in one sweep over the keys, never a map of rows by keys; K and V are read where they lie.
 *
 * A task takes a block of rows, with all query heads that share one key head, through blocks of keys: each block of keys is
 * packed once in the worker's scratch, each block of scores softened there. Where the rows are few, the keys too are divided
 * among tasks, into chunks that are merged in order. One row alone is bound by reading: its keys are not packed.
 *
 * Exponents are to the base 2: q is scaled by log2(e) / sqrt(D) beforehand. */
#include <math.h>
#include <string.h>

#include "cpu.h"

enum {
    HEAD_ROWS = 196, /* rows x heads of one task, unless scratch is short */
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
    int key_block;             /* keys whose scores are held at a time; a multiple of every tile's columns */
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

/* What a task works on: `rows` rows of `heads` heads of one key head, row by row; all of it in the worker's scratch. */
typedef struct sweep {
    int first, rows, g, head, heads;
    float *q, *o;        /* (rows heads, D) */
    float *max, *sum;    /* (rows heads,) */
    float *s;            /* (rows heads, key_block) scores, then their powers */
    float *keys;         /* panels (D, tile_cols) of a block's keys */
    float *room;         /* (key_block, value_stride) for a block's values */
    const float *values; /* the same, or where they lie */
    int value_stride;
} sweep;

static int value_stride(const attending *t)
{
    int cols = t->kernels->tile_cols;
    return (t->c->head_dim + cols - 1) / cols * cols;
}

static sweep begin_sweep(const attending *t, float *scratch, int first, int g, int head_block)
{
    int d = t->c->head_dim;
    sweep w = { .first = first, .rows = least(t->row_block, t->n - first), .g = g, .head = g * t->group + head_block * t->heads };
    w.heads = least(t->heads, (g + 1) * t->group - w.head);
    int n = w.rows * w.heads;
    w.q = scratch;
    w.o = w.q + n * d;
    w.max = w.o + n * d;
    w.sum = w.max + n;
    w.s = w.sum + n;
    w.keys = w.s + n * t->key_block;
    w.room = w.keys + t->key_block * d;
    w.value_stride = value_stride(t);
    for (int r = 0; r < w.rows; r++) {
        const float *q = t->qkv + (int64_t)(first + r) * t->width + w.head * d;
        for (int i = 0; i < w.heads * d; i++) w.q[r * w.heads * d + i] = q[i] * t->scale;
    }
    memset(w.o, 0, (size_t)n * (size_t)d * sizeof *w.o);
    for (int i = 0; i < n; i++) {
        w.max[i] = -INFINITY;
        w.sum[i] = 0.0f;
    }
    return w;
}

/* A block's keys into panels, its values into rows: read once here, many times there. Values that lie one after the other, whole
 * tiles wide, stay where they are. */
static void pack_block(const attending *t, sweep *w, int key, int n)
{
    int d = t->c->head_dim, cols = t->kernels->tile_cols;
    const int32_t *slot = t->in_play + key;
    const float *k = t->k + w->g * t->head, *v = t->v + w->g * t->head;
    const void *row[MOST_TILE_COLS];
    for (int j = 0; j < n; j += cols) {
        int here = least(cols, n - j);
        for (int i = 0; i < here; i++) row[i] = k + (int64_t)slot[j + i] * d;
        t->kernels->pack(w->keys + j * d, row, here, LAZY_F32, d);
    }
    if (slot[n - 1] - slot[0] == n - 1 && w->value_stride == d) {
        w->values = v + (int64_t)slot[0] * d;
        return;
    }
    w->values = w->room;
    for (int j = 0; j < n; j++) memcpy(w->room + j * w->value_stride, v + (int64_t)slot[j] * d, (size_t)d * sizeof *v);
}

/* One block of keys for a strip of `rows` of the task's rows x heads from `top` on. */
static void sweep_strip(const attending *t, const sweep *w, int key, int n_keys, int top, int rows)
{
    const lazy_kernels *kernels = t->kernels;
    int d = t->c->head_dim, cols = kernels->tile_cols;
    const int32_t *limits = t->limits + w->first;
    int reach = between(limits[(top + rows - 1) / w->heads] - key, 0, n_keys);
    if (reach == 0) return;
    for (int j = 0; j < reach; j += cols)
        kernels->tile(w->s + top * t->key_block + j, t->key_block, w->q + top * d, d, w->keys + j * d, cols, d, rows, cols, false);
    for (int i = top; i < top + rows; i++) {
        float *s = w->s + i * t->key_block;
        int visible = between(limits[i / w->heads] - key, 0, reach);
        if (visible < reach) memset(s + visible, 0, (size_t)(reach - visible) * sizeof *s);
        if (visible == 0) continue;
        float factor = kernels->soften(s, visible, &w->max[i], &w->sum[i]);
        if (factor != 1.0f) kernels->scale_row(w->o + i * d, d, factor);
    }
    for (int i = 0; i < d; i += cols)
        kernels->tile(w->o + top * d + i, d, w->s + top * t->key_block, t->key_block, w->values + i, w->value_stride, reach, rows,
                      least(cols, d - i), true);
}

/* One block of keys for one row: all of its heads see all of them. */
static void sweep_row(const attending *t, const sweep *w, int key, int n_keys)
{
    const lazy_kernels *kernels = t->kernels;
    int d = t->c->head_dim;
    kernels->key_dots(w->s, t->key_block, w->q, w->heads, t->k + w->g * t->head, t->in_play + key, n_keys, d);
    for (int h = 0; h < w->heads; h++) {
        float factor = kernels->soften(w->s + h * t->key_block, n_keys, &w->max[h], &w->sum[h]);
        if (factor != 1.0f) kernels->scale_row(w->o + h * d, d, factor);
    }
    kernels->value_sums(w->o, w->s, t->key_block, w->heads, t->v + w->g * t->head, t->in_play + key, n_keys, d);
}

static void attend(void *job, int task, int worker)
{
    const attending *t = job;
    int blocks = t->c->n_kv_heads * t->head_blocks, d = t->c->head_dim;
    int chunk = task % t->chunks, block = task / t->chunks % blocks;
    int first = (t->row_blocks - 1 - task / t->chunks / blocks) * t->row_block; /* long ones first */
    sweep w = begin_sweep(t, scratch_of(t->stream, worker), first, block / t->head_blocks, block % t->head_blocks);
    int n = w.rows * w.heads, end = least((chunk + 1) * t->chunk, t->limits[first + w.rows - 1]);
    for (int key = chunk * t->chunk; key < end; key += t->key_block) {
        int n_keys = least(t->key_block, end - key), strips = (n + t->kernels->tile_rows - 1) / t->kernels->tile_rows;
        if (t->n == 1) {
            sweep_row(t, &w, key, n_keys);
            continue;
        }
        pack_block(t, &w, key, n_keys);
        for (int top = 0, rows; top < n; top += rows, strips--) {
            rows = (n - top + strips - 1) / strips;
            sweep_strip(t, &w, key, n_keys, top, rows);
        }
    }
    for (int i = 0; i < n; i++) deliver(t, first + i / w.heads, w.head + i % w.heads, chunk, w.o + i * d, w.max[i], w.sum[i]);
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
    int d = t->c->head_dim;
    t->key_block = t->n == 1 ? 1024 : 256;
    while (t->key_block * (d + value_stride(t)) > WORKER_SCRATCH / 2) t->key_block /= 2;
    int room = (WORKER_SCRATCH - t->key_block * (d + value_stride(t))) / (2 * d + 2 + t->key_block), most = least(HEAD_ROWS, room);
    t->head_blocks = (t->group + most - 1) / most;
    t->heads = (t->group + t->head_blocks - 1) / t->head_blocks;
    t->row_block = most / t->heads;
    t->row_blocks = (t->n + t->row_block - 1) / t->row_block;
    t->chunk = t->m;
    t->chunks = 1;
    if (t->n > FEW_ROWS) return;
    t->chunk = (t->m + MOST_CHUNKS - 1) / MOST_CHUNKS;
    int smallest = t->n == 1 ? KEY_CHUNK : 2 * KEY_CHUNK;
    t->chunk = t->chunk < smallest ? smallest : (t->chunk + KEY_CHUNK - 1) / KEY_CHUNK * KEY_CHUNK;
    t->chunks = (t->m + t->chunk - 1) / t->chunk;
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
