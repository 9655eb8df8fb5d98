#include "rope.h"

#include <math.h>

#include "memory.h"
#include "model.h"
#include "numeric.h"

static const lazy_rope *find(const lazy_model *model, int length)
{
    const lazy_rope *rope = atomic_load(&model->ropes);
    while (rope && rope->length < length) rope = rope->next;
    return rope;
}

/* Twice the last one, so that growing contexts make few tables. */
static int next_length(const lazy_model *model, int length)
{
    const lazy_rope *last = atomic_load(&model->ropes);
    return min_int(max_int(length, last ? 2 * last->length : 0), model->config.context);
}

static size_t table_bytes(const lazy_config *c, int length)
{
    return (size_t)length * (size_t)c->head_dim * sizeof(float);
}

/* row: (D,) */
static void fill_row(float *row, int position, const float *inv_freq, float scale, int half)
{
    for (int j = 0; j < half; j++) {
        float angle = (float)position * inv_freq[j]; /* in f32, as in training */
        row[j] = (float)cos((double)angle) * scale;
        row[half + j] = (float)sin((double)angle) * scale;
    }
}

/* Allocates and fills one table: (length, D). */
static int make_table(float **out, lazy_stream *stream, const float *inv_freq, float scale, int length, lazy_error *err)
{
    enum { AT_ONCE = 1024 }; /* rows that are uploaded together */
    const lazy_ops *ops = stream->backend->ops;
    size_t d = (size_t)stream->config->head_dim;
    float *rows;
    int code = lazy_alloc((void **)&rows, AT_ONCE * d, sizeof *rows, "the RoPE table", err);
    if (code) return code;
    code = ops->alloc(stream->backend, (void **)out, table_bytes(stream->config, length), "the RoPE table", err);
    for (int first = 0, n; first < length && !code; first += n) {
        n = min_int(AT_ONCE, length - first);
        for (int i = 0; i < n; i++) fill_row(rows + (size_t)i * d, first + i, inv_freq, scale, (int)d / 2);
        code = ops->upload(stream, *out + (size_t)first * d, rows, (size_t)n * d * sizeof *rows, err);
    }
    if (!code) code = ops->download(stream, rows, *out, sizeof *rows, err); /* waits: other streams will read it */
    lazy_free(rows);
    return code;
}

static void close_rope(lazy_rope *rope, lazy_backend *backend)
{
    for (int i = 0; i < 2; i++) backend->ops->free(backend, rope->angles[i]);
    lazy_free(rope);
}

/* No lock: a process may fork while another thread makes a table. Two threads may make one each; both stay. */
int lazy_rope_find(const lazy_rope **out, lazy_model *model, lazy_stream *stream, int length, lazy_error *err)
{
    const lazy_config *c = &model->config;
    if ((*out = find(model, length))) return LAZY_OK;
    lazy_rope *rope;
    int code = lazy_alloc_zeroed((void **)&rope, 1, sizeof *rope, "the RoPE table", err);
    if (code) return code;
    rope->length = next_length(model, length);
    code = make_table(&rope->angles[0], stream, c->inv_freq, c->rope_scale, rope->length, err);
    if (!code && c->local_inv_freq)
        code = make_table(&rope->angles[1], stream, c->local_inv_freq, 1.0f, rope->length, err);
    if (code) {
        close_rope(rope, model->backend);
        return code;
    }
    rope->next = atomic_load(&model->ropes);
    while (!atomic_compare_exchange_weak(&model->ropes, &rope->next, rope)) continue;
    *out = rope;
    return LAZY_OK;
}

uint64_t lazy_rope_bytes(const lazy_model *model, int length)
{
    const lazy_config *c = &model->config;
    return find(model, length) ? 0 : (c->local_inv_freq ? 2 : 1) * (uint64_t)table_bytes(c, next_length(model, length));
}

void lazy_rope_close(lazy_model *model)
{
    for (lazy_rope *rope = atomic_load(&model->ropes), *next; rope; rope = next) {
        next = rope->next;
        close_rope(rope, model->backend);
    }
}
