#include "cache.h"

#include <math.h>
#include <string.h>

#include "memory.h"

enum { MOST_PER_SESSION = 16 };

static int list_growing(lazy_cache *cache, bool keeps_aux, lazy_error *err)
{
    const lazy_config *c = &cache->model->config;
    size_t a = cache->model->backend->activation_bytes;
    size_t d = (size_t)c->hidden * a, head = (size_t)c->head_dim * a;
    int code = lazy_alloc_zeroed((void **)&cache->growing, 2 * (size_t)c->n_layers + MOST_PER_SESSION, sizeof *cache->growing,
                                 "the buffer list", err);
    if (code) return code;

    lazy_growing *list = cache->growing;
    int n = 0;
    for (int l = 0; l < c->n_layers; l++) {
        list[n++] = (lazy_growing){ &cache->kv[l].k, c->n_kv_heads, head, true, "the key cache", NULL };
        list[n++] = (lazy_growing){ &cache->kv[l].v, c->n_kv_heads, head, true, "the value cache", NULL };
    }
    if (keeps_aux) list[n++] = (lazy_growing){ &cache->aux, 1, d, true, "the Aux cache", NULL };
    const lazy_growing others[] = {
        { (void **)&cache->depth, 1, sizeof(int32_t), true, "the depths", NULL },
        { (void **)&cache->rope, 1, (size_t)c->head_dim * sizeof(float), true, "the RoPE table", NULL },
        { (void **)&cache->ids, 1, sizeof(int32_t), false, "the token ids", NULL },
        { (void **)&cache->flags, 1, sizeof(uint8_t), false, "the token flags", NULL },
        { (void **)&cache->in_play[0], 1, sizeof(int32_t), false, "the tokens in play", NULL },
        { (void **)&cache->in_play[1], 1, sizeof(int32_t), false, "the tokens in play", NULL },
        { (void **)&cache->rows[0], 1, sizeof(int32_t), false, "the rows", NULL },
        { (void **)&cache->rows[1], 1, sizeof(int32_t), false, "the rows", NULL },
        { (void **)&cache->scores[0], 1, sizeof(float), false, "the scores", NULL },
        { (void **)&cache->scores[1], 1, sizeof(float), false, "the scores", NULL },
        { &cache->x[0], 1, d, false, "the hidden states", NULL },
        { &cache->x[1], 1, d, false, "the hidden states", NULL },
        { &cache->qkv, 1, (size_t)lazy_qkv_width(c) * a, false, "q, k and v", NULL },
        { &cache->attention, 1, (size_t)lazy_q_width(c) * a, false, "the attention's output", NULL },
    };
    memcpy(list + n, others, sizeof others);
    cache->n_growing = n + (int)(sizeof others / sizeof *others);
    return LAZY_OK;
}

int lazy_cache_open(lazy_cache *cache, lazy_model *model, bool keeps_aux, lazy_error *err)
{
    *cache = (lazy_cache){ .model = model };
    lazy_backend *backend = model->backend;
    const lazy_config *c = &model->config;
    size_t chunk = (size_t)backend->row_chunk * backend->activation_bytes;
    int code = lazy_alloc_zeroed((void **)&cache->kv, (size_t)c->n_layers, sizeof *cache->kv, "the cache table", err);
    if (!code) code = list_growing(cache, keeps_aux, err);
    if (!code) code = backend->ops->stream_open(backend, c, &cache->stream, err);
    if (!code) code = backend->ops->alloc(backend, &cache->normed, chunk * (size_t)c->hidden, "normed rows", err);
    if (!code) code = backend->ops->alloc(backend, &cache->ffn, chunk * (size_t)c->ffn, "FFN rows", err);
    if (!code) code = backend->ops->alloc(backend, (void **)&cache->logits, (size_t)c->vocab * sizeof(float), "the logits", err);
    if (!code) code = backend->ops->alloc(backend, (void **)&cache->notes, lazy_n_notes(c) * sizeof(int32_t), "a pass's notes", err);
    if (code) lazy_cache_close(cache);
    return code;
}

void lazy_cache_close(lazy_cache *cache)
{
    if (!cache->model) return;
    lazy_backend *backend = cache->model->backend;
    void *fixed[] = { cache->normed, cache->ffn, cache->logits, cache->notes };
    for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++) backend->ops->free(backend, fixed[i]);
    for (int i = 0; i < cache->n_growing; i++) backend->ops->free(backend, *cache->growing[i].slot);
    backend->ops->stream_close(cache->stream);
    lazy_free(cache->staging);
    lazy_free(cache->growing);
    lazy_free(cache->kv);
    *cache = (lazy_cache){ 0 };
}

int lazy_cache_reserve(lazy_cache *cache, int capacity, int length, lazy_error *err)
{
    lazy_backend *backend = cache->model->backend;
    lazy_growing *end = cache->growing + cache->n_growing;
    const lazy_config *c = &cache->model->config;
    size_t words = (size_t)capacity;
    if (words < lazy_n_notes(c)) words = lazy_n_notes(c);
    if (words < (size_t)c->head_dim) words = (size_t)c->head_dim;
    int32_t *staging;
    int code = lazy_alloc((void **)&staging, words, sizeof *staging, "the staging room", err);
    if (!code) code = backend->ops->reserve(cache->stream, capacity, capacity, err);
    for (lazy_growing *g = cache->growing; g < end && !code; g++) {
        size_t piece = g->per_token * (size_t)capacity, before = g->per_token * (size_t)cache->capacity;
        code = backend->ops->alloc(backend, &g->fresh, piece * (size_t)g->pieces, g->what, err);
        for (int i = 0; i < g->pieces && !code && g->remembered && length; i++)
            code = backend->ops->copy(cache->stream, (char *)g->fresh + (size_t)i * piece, (char *)*g->slot + (size_t)i * before,
                                      g->per_token * (size_t)length, err);
    }
    for (lazy_growing *g = cache->growing; g < end; g++) {
        void *outdated = code ? g->fresh : *g->slot;
        if (!code) *g->slot = g->fresh;
        backend->ops->free(backend, outdated);
        g->fresh = NULL;
    }
    lazy_free(code ? staging : cache->staging);
    if (code) return code;
    cache->staging = staging;
    cache->staging_words = words;
    cache->capacity = capacity;
    for (int l = 0; l < c->n_layers; l++) cache->kv[l].capacity = capacity;
    if (cache->rope_length > length) cache->rope_length = length;
    return LAZY_OK;
}

int lazy_cache_fill_rope(lazy_cache *cache, int length, lazy_error *err)
{
    const lazy_config *c = &cache->model->config;
    const lazy_ops *ops = cache->model->backend->ops;
    int half = c->head_dim / 2, at_once = (int)(cache->staging_words / (size_t)c->head_dim), code = LAZY_OK;
    float *table = (float *)cache->staging;
    while (cache->rope_length < length && !code) {
        int first = cache->rope_length, n = length - first < at_once ? length - first : at_once;
        for (int i = 0; i < n; i++) {
            float *row = table + (size_t)i * (size_t)c->head_dim;
            for (int j = 0; j < half; j++) {
                float angle = (float)(first + i) * c->inv_freq[j]; /* in f32, as checkpoints were trained */
                row[j] = (float)cos((double)angle) * c->rope_scale;
                row[half + j] = (float)sin((double)angle) * c->rope_scale;
            }
        }
        code = ops->upload(cache->stream, cache->rope + (size_t)first * (size_t)c->head_dim, table,
                           (size_t)n * (size_t)c->head_dim * sizeof *table, err);
        if (!code) cache->rope_length = first + n;
    }
    return code;
}
