#include <math.h>

#include "memory.h"
#include "model.h"
#include "numeric.h"

static const lazy_rope *find(const lazy_place *place, int length)
{
    const lazy_rope *rope = atomic_load(&place->ropes);
    while (rope && rope->length < length) rope = rope->next;
    return rope;
}

/* Twice the last one, so that growing contexts make few tables. */
static int next_length(const lazy_place *place, const lazy_config *c, int length)
{
    const lazy_rope *last = atomic_load(&place->ropes);
    return min_int(max_int(length, last ? 2 * last->length : 0), c->context);
}

static size_t table_bytes(const lazy_config *c, int length)
{
    return (size_t)length * (size_t)c->head_dim * sizeof(float);
}

/* Allocates and fills the table of one rope: (length, D). growth: of q, 0 for k. */
static int make_table(float **out, lazy_stream *stream, int rope, float growth, int length, lazy_error *err)
{
    enum { AT_ONCE = 1024 }; /* rows that are uploaded together */
    const lazy_config *c = stream->config;
    const lazy_ops *ops = stream->backend->ops;
    size_t d = (size_t)c->head_dim, half = d / 2;
    const float *inv_freq = c->inv_freq + (size_t)rope * half;
    float *rows;
    int code = lazy_alloc(&rows, AT_ONCE * d, "the RoPE table", err);
    if (code) return code;
    code = ops->alloc(stream->backend, (void **)out, table_bytes(c, length), "the RoPE table", err);
    for (int first = 0, n; first < length && !code; first += n) {
        n = min_int(AT_ONCE, length - first);
        for (int i = 0; i < n; i++) {
            float scale = growth != 0 ? 1 + growth * logf(1 + (float)((first + i) / c->query_step)) : 1;
            float *row = rows + (size_t)i * d;
            for (size_t j = 0; j < half; j++) {
                float angle = (float)(first + i) * inv_freq[j]; /* in f32, as in training */
                float factor = inv_freq[j] != 0 ? c->rope_scale[rope] * scale : scale;
                row[j] = (float)cos((double)angle) * factor;
                row[half + j] = (float)sin((double)angle) * factor;
            }
        }
        code = ops->upload(stream, *out + (size_t)first * d, rows, (size_t)n * d * sizeof *rows, err);
    }
    if (!code) code = ops->download(stream, rows, *out, sizeof *rows, err); /* waits: other streams will read it */
    lazy_free(rows);
    return code;
}

static void close_rope(lazy_rope *rope, lazy_backend *backend)
{
    for (int i = 0; i < LAZY_MAX_ROPES; i++) {
        if (rope->of_q[i] != rope->of_k[i]) backend->ops->free(backend, rope->of_q[i]);
        backend->ops->free(backend, rope->of_k[i]);
    }
    lazy_free(rope);
}

/* No lock: a process may fork while another thread makes a table. Two threads may make one each; both stay. */
int lazy_rope_find(const lazy_rope **out, lazy_place *place, lazy_stream *stream, int length, lazy_error *err)
{
    const lazy_config *c = stream->config;
    const lazy_rope *known = find(place, length);
    if (known) {
        *out = known;
        return LAZY_OK;
    }
    lazy_rope *rope;
    int code = lazy_alloc_zeroed(&rope, 1, "the RoPE table", err);
    if (code) return code;
    rope->length = next_length(place, c, length);
    for (int i = 0; i < c->n_ropes && !code; i++) {
        code = make_table(&rope->of_k[i], stream, i, 0, rope->length, err);
        rope->of_q[i] = rope->of_k[i];
        if (!code && c->query_growth != 0)
            code = make_table(&rope->of_q[i], stream, i, c->query_growth, rope->length, err);
    }
    if (code) {
        close_rope(rope, place->backend);
        return code;
    }
    rope->next = atomic_load(&place->ropes);
    while (!atomic_compare_exchange_weak(&place->ropes, &rope->next, rope)) continue;
    *out = rope;
    return LAZY_OK;
}

uint64_t lazy_rope_bytes(const lazy_place *place, const lazy_config *c, int length)
{
    uint64_t n_tables = (uint64_t)(c->query_growth != 0 ? 2 : 1) * (uint64_t)c->n_ropes;
    return find(place, length) ? 0 : n_tables * table_bytes(c, next_length(place, c, length));
}

void lazy_rope_close(lazy_place *place)
{
    for (lazy_rope *rope = atomic_load(&place->ropes), *next; rope; rope = next) {
        next = rope->next;
        close_rope(rope, place->backend);
    }
}
