#include "cache.h"

#include "memory.h"
#include "numeric.h"

int lazy_cache_open(lazy_cache *cache, const lazy_model *model, lazy_place *place, const lazy_pruning *pruning,
                    lazy_error *err)
{
    *cache = (lazy_cache){ .model = model, .place = place };
    int n = model->config.n_layers;
    int code = lazy_alloc_zeroed(&cache->kv, n, "the cache table", err);
    if (!code) code = lazy_alloc_zeroed(&cache->remembered, n, "the cache table", err);
    if (!code) code = lazy_alloc_zeroed(&cache->aux, n, "the cache table", err);
    if (!code) code = lazy_buffers_open(cache, pruning, err);
    if (!code) code = place->backend->ops->stream_open(place->backend, &model->config, &cache->stream, err);
    if (code) lazy_cache_close(cache);
    return code;
}

void lazy_cache_close(lazy_cache *cache)
{
    if (!cache->model) return;
    lazy_backend *backend = cache->place->backend;
    for (int i = cache->shared ? cache->n_with_rows : 0; i < cache->n_buffers; i++)
        (backend->ops->keep ? backend->ops->keep : backend->ops->free)(backend, *cache->buffers[i].slot);
    if (cache->shared) backend->ops->shared_close(cache->shared);
    backend->ops->stream_close(cache->stream);
    void *tables[] = { cache->shared_depths, cache->staging, cache->buffers, cache->kv, cache->remembered, cache->aux };
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++) lazy_free(tables[i]);
    *cache = (lazy_cache){ 0 };
}

static size_t staging_bytes(const lazy_config *c, int capacity)
{
    return (size_t)capacity * LAZY_LAID_OUT_BYTES + lazy_n_notes(c) * sizeof(int32_t);
}

uint64_t lazy_cache_bytes(const lazy_cache *cache, int capacity)
{
    uint64_t bytes = staging_bytes(&cache->model->config, capacity);
    for (const lazy_buffer *b = cache->buffers; b < cache->buffers + cache->n_buffers; b++)
        bytes += lazy_buffer_bytes(b, capacity);
    return bytes + cache->place->backend->ops->scratch_bytes(cache->stream, capacity, capacity) +
           lazy_rope_bytes(cache->place, &cache->model->config, capacity);
}

int lazy_cache_reserve(lazy_cache *cache, int capacity, bool sparse, const int32_t *depths, int length, lazy_error *err)
{
    char *staging;
    int code = lazy_alloc(&staging, staging_bytes(&cache->model->config, capacity), "the staging room", err);
    if (code) return code;
    lazy_free(cache->staging);
    cache->staging = staging;
    code = cache->place->backend->ops->reserve(cache->stream, capacity, capacity, err);
    if (!code) code = lazy_rope_find(&cache->rope, cache->place, cache->stream, capacity, err);
    if (!code) code = lazy_buffers_grow(cache, capacity, sparse, depths, length, err);
    if (!code) cache->capacity = capacity;
    return code;
}

void lazy_cache_lay_out(lazy_cache *cache, int length, int n)
{
    cache->notes = cache->gone + length;
    cache->depth = cache->notes + lazy_n_notes(&cache->model->config);
    cache->in_play[0] = cache->depth + length;
    cache->ids = cache->in_play[0] + length;
    cache->flags = (uint8_t *)(cache->ids + n);
}

void lazy_cache_truncate(lazy_cache *cache, int length)
{
    for (int l = 0; l < cache->model->config.n_layers; l++)
        cache->remembered[l].n = min_int(cache->remembered[l].n, length);
    cache->has_logits = false;
}

void lazy_cache_begin(lazy_cache *cache, bool generated)
{
    for (int l = 0; l < cache->model->config.n_layers; l++)
        cache->remembered[l].n_fresh = generated ? -1 : 0; /* prompts forget what earlier passes scored */
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
