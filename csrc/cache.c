#include "cache.h"

#include <math.h>
#include <string.h>

#include "memory.h"
#include "numeric.h"

enum { MAX_PER_SESSION = 18 };

static int list_growing(lazy_cache *cache, const lazy_rules *rules, lazy_error *err)
{
    const lazy_config *c = &cache->model->config;
    size_t a = lazy_activation_bytes(cache->model->backend);
    size_t d = (size_t)c->hidden * a, head = (size_t)c->head_dim * lazy_dtype_width(cache->model->backend->kv);
    const int any = c->n_layers;
    int code = lazy_alloc_zeroed((void **)&cache->growing, 5 * (size_t)c->n_layers + MAX_PER_SESSION, sizeof *cache->growing,
                                 "the buffer list", err);
    if (code) return code;

    lazy_growing *list = cache->growing;
    int n = 0;
    for (int l = 0; l < c->n_layers; l++) {
        bool sparse = !lazy_rules_whole_layer(rules, l);
        list[n++] = (lazy_growing){ &cache->kv[l].k, c->n_kv_heads, head, true, sparse, l + 1, any, "the key cache", NULL };
        list[n++] = (lazy_growing){ &cache->kv[l].v, c->n_kv_heads, head, true, sparse, l + 1, any, "the value cache", NULL };
    }
    for (int l = 0; l < c->n_layers; l++)
        if (lazy_rules_revive_at(rules, l)) list[n++] = (lazy_growing){ &cache->aux[l], 1, d, true, true, l, l, "the Aux cache", NULL };
    for (int l = 0; l < c->n_layers && rules->pruning.memory > 0; l++)
        if (lazy_rules_stage_at(rules, l)) {
            lazy_remembered *r = &cache->remembered[l];
            list[n++] = (lazy_growing){ (void **)&r->scores, 1, sizeof(float), true, false, 0, any, "remembered scores", NULL };
            list[n++] = (lazy_growing){ (void **)&r->fresh, 1, sizeof(float), false, false, 0, any, "remembered scores", NULL };
        }
    if (rules->pruning.layers > 1 && !rules->pruning.policy.call)
        list[n++] = (lazy_growing){
            (void **)&cache->shares, min_int(rules->pruning.layers, c->n_layers), sizeof(float), false, false, 0, any, "shares", NULL
        };
    if (lazy_rules_drop_for_good(rules))
        list[n++] = (lazy_growing){ (void **)&cache->gone, 1, sizeof(int32_t), false, false, 0, any, "tokens dropped for good", NULL };
    const size_t angles = (size_t)c->head_dim * sizeof(float);
    if (c->local_inv_freq) list[n++] = (lazy_growing){ (void **)&cache->rope[1], 1, angles, true, false, 0, any, "the RoPE table", NULL };
    const lazy_growing others[] = {
        { (void **)&cache->depth, 1, sizeof(int32_t), false, false, 0, any, "the depths", NULL },
        { (void **)&cache->rope[0], 1, angles, true, false, 0, any, "the RoPE table", NULL },
        { (void **)&cache->ids, 1, sizeof(int32_t), false, false, 0, any, "the token ids", NULL },
        { (void **)&cache->flags, 1, sizeof(uint8_t), false, false, 0, any, "the token flags", NULL },
        { (void **)&cache->in_play[0], 1, sizeof(int32_t), false, false, 0, any, "the tokens in play", NULL },
        { (void **)&cache->in_play[1], 1, sizeof(int32_t), false, false, 0, any, "the tokens in play", NULL },
        { (void **)&cache->rows[0], 1, sizeof(int32_t), false, false, 0, any, "the rows", NULL },
        { (void **)&cache->rows[1], 1, sizeof(int32_t), false, false, 0, any, "the rows", NULL },
        { (void **)&cache->scores[0], 1, sizeof(float), false, false, 0, any, "the scores", NULL },
        { (void **)&cache->scores[1], 1, sizeof(float), false, false, 0, any, "the scores", NULL },
        { &cache->x[0], 1, d, false, false, 0, any, "the hidden states", NULL },
        { &cache->x[1], 1, d, false, false, 0, any, "the hidden states", NULL },
        { &cache->qkv, 1, (size_t)lazy_qkv_width(c) * a, false, false, 0, any, "q, k and v", NULL },
        { &cache->attention, 1, (size_t)lazy_q_width(c) * a, false, false, 0, any, "the attention's output", NULL },
    };
    memcpy(list + n, others, sizeof others);
    cache->n_growing = n + (int)(sizeof others / sizeof *others);
    return LAZY_OK;
}

int lazy_cache_open(lazy_cache *cache, lazy_model *model, const lazy_rules *rules, lazy_error *err)
{
    *cache = (lazy_cache){ .model = model };
    lazy_backend *backend = model->backend;
    const lazy_config *c = &model->config;
    size_t chunk = (size_t)backend->row_chunk * lazy_activation_bytes(backend);
    int code = lazy_alloc_zeroed((void **)&cache->kv, (size_t)c->n_layers, sizeof *cache->kv, "the cache table", err);
    if (!code)
        code = lazy_alloc_zeroed((void **)&cache->remembered, (size_t)c->n_layers, sizeof *cache->remembered, "the cache table", err);
    if (!code) code = lazy_alloc_zeroed((void **)&cache->aux, (size_t)c->n_layers, sizeof *cache->aux, "the cache table", err);
    if (!code) code = list_growing(cache, rules, err);
    if (!code) code = backend->ops->stream_open(backend, c, &cache->stream, err);
    if (!code) code = backend->ops->alloc(backend, &cache->normed, chunk * (size_t)c->hidden, "normed rows", err);
    if (!code) code = backend->ops->alloc(backend, &cache->ffn, chunk * (size_t)c->ffn, "FFN rows", err);
    if (!code) code = backend->ops->alloc(backend, (void **)&cache->logits, (size_t)c->vocab * sizeof(float), "the logits", err);
    if (!code) code = backend->ops->alloc(backend, (void **)&cache->fresh_logits, (size_t)c->vocab * sizeof(float), "the logits", err);
    if (!code) code = backend->ops->alloc(backend, (void **)&cache->notes, lazy_n_notes(c) * sizeof(int32_t), "a pass's notes", err);
    if (code) lazy_cache_close(cache);
    return code;
}

void lazy_cache_close(lazy_cache *cache)
{
    if (!cache->model) return;
    lazy_backend *backend = cache->model->backend;
    void *fixed[] = { cache->normed, cache->ffn, cache->logits, cache->fresh_logits, cache->notes };
    for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++) backend->ops->free(backend, fixed[i]);
    for (int i = 0; i < cache->n_growing; i++) backend->ops->free(backend, *cache->growing[i].slot);
    backend->ops->stream_close(cache->stream);
    lazy_free(cache->staging);
    lazy_free(cache->growing);
    lazy_free(cache->kv);
    lazy_free(cache->remembered);
    lazy_free(cache->aux);
    *cache = (lazy_cache){ 0 };
}

static size_t staging_words(const lazy_config *c, int capacity)
{
    size_t words = (size_t)capacity;
    if (words < lazy_n_notes(c)) words = lazy_n_notes(c);
    return words < (size_t)c->head_dim ? (size_t)c->head_dim : words;
}

uint64_t lazy_cache_bytes(const lazy_cache *cache, int capacity)
{
    const lazy_backend *backend = cache->model->backend;
    const lazy_config *c = &cache->model->config;
    uint64_t per_token = 0, chunk = (uint64_t)backend->row_chunk * lazy_activation_bytes(backend);
    for (const lazy_growing *g = cache->growing; g < cache->growing + cache->n_growing; g++)
        per_token += g->per_token * (uint64_t)g->pieces;
    uint64_t fixed = chunk * (uint64_t)(c->hidden + c->ffn) + 2 * (uint64_t)c->vocab * sizeof(float) + lazy_n_notes(c) * sizeof(int32_t);
    uint64_t scratch = backend->ops->scratch_bytes ? backend->ops->scratch_bytes(cache->stream, capacity, capacity) : 0;
    return per_token * (uint64_t)capacity + staging_words(c, capacity) * sizeof(int32_t) + fixed + scratch;
}

/* A buffer of `capacity` tokens. */
typedef struct buffer {
    void *data;
    int capacity;
} buffer;

static bool holds(const lazy_growing *g, int depth) { return g->least <= depth && depth <= g->most; }

/* Copies the first `length` tokens from one buffer to another; of sparse ones those alone that have rows, so that the others go on
 * taking no physical memory. */
static int copy_rows(lazy_stream *stream, const lazy_growing *g, buffer to, buffer from, const int32_t *depths, int length, lazy_error *err)
{
    const lazy_ops *ops = stream->backend->ops;
    bool all = !g->sparse || !ops->expect_sparse;
    int code = LAZY_OK;
    for (int first = 0, end; first < length && !code; first = end) {
        bool held = all || holds(g, depths[first]);
        for (end = all ? length : first + 1; end < length && holds(g, depths[end]) == held;) end++;
        for (size_t i = 0; i < (size_t)g->pieces && held && !code; i++)
            code = ops->copy(stream, (char *)to.data + (i * (size_t)to.capacity + (size_t)first) * g->per_token,
                             (char *)from.data + (i * (size_t)from.capacity + (size_t)first) * g->per_token,
                             (size_t)(end - first) * g->per_token, err);
    }
    return code;
}

int lazy_cache_reserve(lazy_cache *cache, int capacity, const int32_t *depths, int length, lazy_error *err)
{
    lazy_backend *backend = cache->model->backend;
    lazy_growing *end = cache->growing + cache->n_growing;
    const lazy_config *c = &cache->model->config;
    size_t words = staging_words(c, capacity);
    int32_t *staging;
    int code = lazy_alloc((void **)&staging, words, sizeof *staging, "the staging room", err);
    if (!code) code = backend->ops->reserve(cache->stream, capacity, capacity, err);
    for (lazy_growing *g = cache->growing; g < end && !code; g++) {
        size_t bytes = g->per_token * (size_t)capacity * (size_t)g->pieces;
        code = backend->ops->alloc(backend, &g->fresh, bytes, g->what, err);
        if (!code && g->sparse && backend->ops->expect_sparse) backend->ops->expect_sparse(backend, g->fresh, bytes);
        if (!code && g->remembered) {
            buffer to = { g->fresh, capacity }, from = { *g->slot, cache->capacity };
            code = copy_rows(cache->stream, g, to, from, depths, length, err);
        }
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

int lazy_cache_copy(lazy_cache *to, const lazy_cache *from, const int32_t *depths, int length, lazy_error *err)
{
    const lazy_config *c = &to->model->config;
    const lazy_ops *ops = to->model->backend->ops;
    int code = LAZY_OK;
    for (int i = 0; i < to->n_growing && !code; i++) {
        const lazy_growing *g = &to->growing[i];
        buffer target = { *g->slot, to->capacity }, source = { *from->growing[i].slot, from->capacity };
        if (g->remembered) code = copy_rows(to->stream, g, target, source, depths, length, err);
    }
    if (!code) code = ops->copy(to->stream, to->logits, from->logits, (size_t)c->vocab * sizeof *to->logits, err);
    if (!code) code = ops->download(to->stream, to->staging, to->logits, sizeof *to->logits, err); /* waits: `from` may change then */
    for (int l = 0; l < c->n_layers; l++) to->remembered[l].n = from->remembered[l].n;
    to->has_logits = from->has_logits;
    to->rope_length = min_int(from->rope_length, length);
    return code;
}

const lazy_growing *lazy_cache_find(const lazy_cache *cache, const void *slot)
{
    for (const lazy_growing *g = cache->growing; g < cache->growing + cache->n_growing; g++)
        if (g->slot == slot) return g;
    return NULL;
}

static int move_rows(lazy_cache *cache, const lazy_growing *g, lazy_rows rows, bool writes, lazy_error *err)
{
    const lazy_ops *ops = cache->model->backend->ops;
    int code = LAZY_OK, done = 0;
    for (int first = 0, end; first < rows.length && !code; first = end) {
        for (end = first + 1; end < rows.length && rows.has[end] == rows.has[first];) end++;
        if (!rows.has[first]) continue;
        size_t bytes = (size_t)(end - first) * g->per_token;
        for (size_t i = 0; i < (size_t)g->pieces && !code; i++) {
            char *here = rows.data + (i * (size_t)rows.n + (size_t)done) * g->per_token;
            char *there = (char *)*g->slot + (i * (size_t)cache->capacity + (size_t)first) * g->per_token;
            code = writes ? ops->upload(cache->stream, there, here, bytes, err) : ops->download(cache->stream, here, there, bytes, err);
        }
        done += end - first;
    }
    return code;
}

int lazy_cache_read(lazy_cache *cache, const lazy_growing *g, lazy_rows rows, lazy_error *err)
{
    return move_rows(cache, g, rows, false, err);
}

int lazy_cache_write(lazy_cache *cache, const lazy_growing *g, lazy_rows rows, lazy_error *err)
{
    return move_rows(cache, g, rows, true, err);
}

void lazy_cache_truncate(lazy_cache *cache, int length)
{
    for (int l = 0; l < cache->model->config.n_layers; l++) cache->remembered[l].n = min_int(cache->remembered[l].n, length);
    cache->has_logits = false;
}

void lazy_cache_begin(lazy_cache *cache, bool generated)
{
    for (int l = 0; l < cache->model->config.n_layers; l++) {
        lazy_remembered *r = &cache->remembered[l];
        r->n_fresh = generated ? -1 : 0; /* prompts forget what earlier passes scored */
    }
}

void lazy_cache_commit(lazy_cache *cache)
{
    for (int l = 0; l < cache->model->config.n_layers; l++) {
        lazy_remembered *r = &cache->remembered[l];
        if (r->n_fresh < 0) continue;
        float *outdated = r->scores;
        r->scores = r->fresh;
        r->n = r->n_fresh;
        r->fresh = outdated;
    }
    float *outdated = cache->logits;
    cache->logits = cache->fresh_logits;
    cache->fresh_logits = outdated;
    cache->has_logits = true;
}

/* Rows first … first+n-1 of a RoPE table, by way of the staging buffer. */
static int fill_rows(lazy_cache *cache, float *rope, const float *inv_freq, float scale, int first, int n, lazy_error *err)
{
    const lazy_config *c = &cache->model->config;
    size_t d = (size_t)c->head_dim, half = d / 2;
    float *table = (float *)cache->staging;
    for (int i = 0; i < n; i++) {
        float *row = table + (size_t)i * d;
        for (size_t j = 0; j < half; j++) {
            float angle = (float)(first + i) * inv_freq[j]; /* in f32, as in training */
            row[j] = (float)cos((double)angle) * scale;
            row[half + j] = (float)sin((double)angle) * scale;
        }
    }
    return cache->model->backend->ops->upload(cache->stream, rope + (size_t)first * d, table, (size_t)n * d * sizeof *table, err);
}

int lazy_cache_fill_rope(lazy_cache *cache, int length, lazy_error *err)
{
    const lazy_config *c = &cache->model->config;
    int at_once = (int)(cache->staging_words / (size_t)c->head_dim), code = LAZY_OK;
    while (cache->rope_length < length && !code) {
        int first = cache->rope_length, n = length - first < at_once ? length - first : at_once;
        code = fill_rows(cache, cache->rope[0], c->inv_freq, c->rope_scale, first, n, err);
        if (!code && c->local_inv_freq) code = fill_rows(cache, cache->rope[1], c->local_inv_freq, 1.0f, first, n, err);
        if (!code) cache->rope_length = first + n;
    }
    return code;
}
