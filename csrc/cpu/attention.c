/* attention.c — softmax(q k^T) v in one sweep over the keys, never a map of rows by keys.
 *
 * Many rows: the keys in play are packed once per layer, then each task takes a block of rows of one head through blocks of
 * keys. Few rows (a decode step and what it revives): keys are read where they lie, in fixed chunks that are merged in order. */
#include <math.h>
#include <string.h>

#include "cpu.h"

void lazy_cpu_limits(int32_t *limits, const int32_t *rows, int n, const int32_t *in_play, int m)
{
    for (int r = 0, j = 0; r < n; r++) {
        while (j < m && in_play[j] <= rows[r]) j++;
        limits[r] = j;
    }
}

typedef struct attending {
    lazy_stream *stream;
    const lazy_cpu_stream *scratch;
    const lazy_config *c;
    const lazy_kernels *kernels;
    float *y;         /* (n, H D) */
    const float *qkv; /* (n, width) */
    int n;
    lazy_kv kv;
    const int32_t *in_play; /* (m,) */
    int m;
    float scale;
    int width;                 /* (H + 2G) D */
    int group;                 /* query heads that share a key head */
    int chunks;                /* few rows: of keys */
    int row_block, row_blocks; /* many rows */
} attending;

static int least(int a, int b) { return a < b ? a : b; }
static int between(int x, int low, int high) { return x < low ? low : x > high ? high : x; }

/* ---- few rows --------------------------------------------------------------------------- */

enum { MOST_SHARED = 32 }; /* query heads that go over the keys together */

/* Outputs, maximum and sum of one row's head over one chunk. */
static float *partial_of(const attending *t, int row, int head, int chunk)
{
    return t->scratch->partial + (((int64_t)row * t->c->n_heads + head) * t->chunks + chunk) * (t->c->head_dim + 2);
}

static void attend_chunk(void *job, int task, int worker)
{
    const attending *t = job;
    int d = t->c->head_dim, kv_width = t->c->n_kv_heads * d;
    int chunk = task % t->chunks, g = task / t->chunks % t->c->n_kv_heads, row = task / t->chunks / t->c->n_kv_heads;
    int first = chunk * KEY_CHUNK, n = least(KEY_CHUNK, t->scratch->limits[row] - first);
    float *s = scratch_of(t->stream, worker), *o = s + MOST_SHARED * KEY_CHUNK;
    for (int h = g * t->group, end = h + t->group; h < end && n > 0; h += MOST_SHARED) {
        int shared = least(MOST_SHARED, end - h);
        t->kernels->key_dots(s, KEY_CHUNK, t->qkv + (int64_t)row * t->width + h * d, shared, (const float *)t->kv.k + g * d, kv_width,
                             t->in_play + first, n, d);
        for (int i = 0; i < shared; i++) {
            float *partial = partial_of(t, row, h + i, chunk);
            partial[d] = -INFINITY;
            partial[d + 1] = 0.0f;
            t->kernels->soften(s + i * KEY_CHUNK, n, t->scale, &partial[d], &partial[d + 1]);
        }
        t->kernels->value_sums(o, s, KEY_CHUNK, shared, (const float *)t->kv.v + g * d, kv_width, t->in_play + first, n, d);
        for (int i = 0; i < shared; i++) memcpy(partial_of(t, row, h + i, chunk), o + i * d, (size_t)d * sizeof *o);
    }
}

/* Merges the chunks of one row, all heads. */
static void merge_row(const attending *t, int row)
{
    int d = t->c->head_dim, seen = (t->scratch->limits[row] + KEY_CHUNK - 1) / KEY_CHUNK;
    for (int h = 0; h < t->c->n_heads; h++) {
        float *y = t->y + ((int64_t)row * t->c->n_heads + h) * d, max = -INFINITY, sum = 0.0f;
        for (int chunk = 0; chunk < seen; chunk++) max = fmaxf(max, partial_of(t, row, h, chunk)[d]);
        memset(y, 0, (size_t)d * sizeof *y);
        for (int chunk = 0; chunk < seen; chunk++) {
            const float *partial = partial_of(t, row, h, chunk);
            float factor = expf((partial[d] - max) * t->scale);
            sum += partial[d + 1] * factor;
            for (int i = 0; i < d; i++) y[i] += partial[i] * factor;
        }
        for (int i = 0; i < d; i++) y[i] /= sum;
    }
}

/* ---- many rows -------------------------------------------------------------------------- */

enum { KEY_BLOCK = 256, ROW_BLOCK = 56 }; /* of the scores that a task holds in cache; a multiple of every tile's columns */

static int panels_of(const attending *t) { return (t->m + t->kernels->tile_cols - 1) / t->kernels->tile_cols; }

/* Packs tile_cols keys of one head into a panel (D, tile_cols), and their values into rows. */
static void pack_keys(void *job, int task, int worker)
{
    (void)worker;
    const attending *t = job;
    int d = t->c->head_dim, kv_width = t->c->n_kv_heads * d, cols = t->kernels->tile_cols, panels = panels_of(t);
    int g = task / panels, first = task % panels * cols, n = least(cols, t->m - first);
    const void *row[64];
    for (int j = 0; j < n; j++) {
        int64_t slot = (int64_t)t->in_play[first + j] * kv_width + g * d;
        row[j] = (const float *)t->kv.k + slot;
        memcpy(t->scratch->values + ((int64_t)g * t->m + first + j) * d, (const float *)t->kv.v + slot, (size_t)d * sizeof(float));
    }
    t->kernels->pack(t->scratch->keys + (int64_t)task * cols * d, row, n, LAZY_F32, d);
}

static void attend_block(void *job, int task, int worker)
{
    const attending *t = job;
    const lazy_kernels *kernels = t->kernels;
    int d = t->c->head_dim, cols = kernels->tile_cols, tile_rows = kernels->tile_rows, panels = panels_of(t);
    int h = task % t->c->n_heads, g = h / t->group;
    int first = (t->row_blocks - 1 - task / t->c->n_heads) * t->row_block, n = least(t->row_block, t->n - first); /* long ones first */
    const int32_t *limits = t->scratch->limits + first;
    const float *q = t->qkv + (int64_t)first * t->width + h * d, *values = t->scratch->values + (int64_t)g * t->m * d;
    float *s = scratch_of(t->stream, worker), *o = s + ROW_BLOCK * KEY_BLOCK, max[ROW_BLOCK], sum[ROW_BLOCK];
    for (int r = 0; r < n; r++) {
        max[r] = -INFINITY;
        sum[r] = 0.0f;
    }
    memset(o, 0, (size_t)n * (size_t)d * sizeof *o);

    for (int key = 0; key < limits[n - 1]; key += KEY_BLOCK) {
        for (int top = 0; top < n; top += tile_rows) {
            int rows = least(tile_rows, n - top), reach = between(limits[top + rows - 1] - key, 0, KEY_BLOCK);
            for (int j = 0; j < reach; j += cols)
                kernels->tile(s + top * KEY_BLOCK + j, KEY_BLOCK, q + (int64_t)top * t->width, t->width,
                              t->scratch->keys + ((int64_t)g * panels + (key + j) / cols) * cols * d, cols, d, rows, cols, false);
            for (int r = top; r < top + rows && reach; r++) {
                float *row = s + r * KEY_BLOCK;
                int visible = between(limits[r] - key, 0, KEY_BLOCK);
                memset(row + visible, 0, (size_t)(reach - visible) * sizeof *row);
                if (visible) kernels->scale_row(o + r * d, d, kernels->soften(row, visible, t->scale, &max[r], &sum[r]));
            }
            for (int i = 0; i < d && reach; i += cols)
                kernels->tile(o + top * d + i, d, s + top * KEY_BLOCK, KEY_BLOCK, values + (int64_t)key * d + i, d, reach, rows,
                              least(cols, d - i), true);
        }
    }
    for (int r = 0; r < n; r++) {
        float *y = t->y + ((int64_t)(first + r) * t->c->n_heads + h) * d;
        for (int i = 0; i < d; i++) y[i] = o[r * d + i] / sum[r];
    }
}

int lazy_cpu_attention(lazy_stream *stream, void *y, const void *qkv, const int32_t *rows, int n, lazy_kv kv, const int32_t *in_play, int m,
                       lazy_error *err)
{
    const lazy_config *c = stream->config;
    const lazy_cpu_stream *scratch = (lazy_cpu_stream *)stream;
    attending t = {
        .stream = stream,
        .scratch = scratch,
        .c = c,
        .kernels = kernels_of(stream),
        .y = y,
        .qkv = qkv,
        .n = n,
        .kv = kv,
        .in_play = in_play,
        .m = m,
        .scale = 1.0f / sqrtf((float)c->head_dim),
        .width = (c->n_heads + 2 * c->n_kv_heads) * c->head_dim,
        .group = c->n_heads / c->n_kv_heads,
    };
    lazy_cpu_limits(scratch->limits, rows, n, in_play, m);
    int code;
    if (n <= FEW_ROWS) {
        t.chunks = (m + KEY_CHUNK - 1) / KEY_CHUNK;
        if ((code = lazy_cpu_run(stream, attend_chunk, &t, n * c->n_kv_heads * t.chunks, err))) return code;
        for (int r = 0; r < n; r++) merge_row(&t, r);
        return LAZY_OK;
    }
    t.row_block = ROW_BLOCK / t.kernels->tile_rows * t.kernels->tile_rows;
    t.row_blocks = (n + t.row_block - 1) / t.row_block;
    if ((code = lazy_cpu_run(stream, pack_keys, &t, c->n_kv_heads * panels_of(&t), err))) return code;
    return lazy_cpu_run(stream, attend_block, &t, c->n_heads * t.row_blocks, err);
}
