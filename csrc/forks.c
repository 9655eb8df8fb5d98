/* forks.c — copies of a cache, and the memory of K, V and Aux that they share. */
#include "cache.h"
#include "memory.h"
#include "numeric.h"

/* The memory of a buffer, one of K, V and Aux, in shared memory. */
static lazy_room shared_room(const lazy_cache *cache, const lazy_shared *shared, const lazy_buffer *b)
{
    return (lazy_room){ shared->data + b->shared_offset, cache->model->config.context };
}

static void place_rows(lazy_cache *cache)
{
    for (lazy_buffer *b = cache->buffers; b < cache->buffers + cache->n_with_rows; b++)
        lazy_buffer_place(cache, b, shared_room(cache, cache->shared, b));
}

/* Moves K, V and Aux into shared memory as its owner, if the backend has such memory. */
static int move_to_shared(lazy_cache *cache, const int32_t *depths, int length, lazy_error *err)
{
    lazy_backend *backend = cache->place->backend;
    const lazy_ops *ops = backend->ops;
    const lazy_buffer *end = cache->buffers + cache->n_with_rows;
    lazy_shared *shared;
    if (cache->shared || !ops->shared_open) return LAZY_OK;
    if (ops->shared_open(backend, &shared, cache->shared_bytes, NULL)) return LAZY_OK;
    int code = LAZY_OK;
    for (const lazy_buffer *b = cache->buffers; b < end && !code; b++)
        code = lazy_buffer_copy(cache, b, shared_room(cache, shared, b), lazy_room_of(b), depths, length, err);
    if (code) {
        ops->shared_close(shared);
        return code;
    }
    for (const lazy_buffer *b = cache->buffers; b < end; b++) ops->free(backend, *b->slot);
    cache->shared = shared;
    cache->written = length;
    place_rows(cache);
    return LAZY_OK;
}

/* Notes that rows of the first n tokens up to these depths are the owner's. */
static int note_shared(lazy_cache *cache, const int32_t *depths, int n, lazy_error *err)
{
    int code = lazy_alloc_copy(&cache->shared_depths, depths, n, "the shared tokens", err);
    if (!code) cache->n_shared = n;
    return code;
}

/* Lists where the rows of the first `length` tokens lie in shared memory. out: *parts (*n,), of the caller */
static int list_parts(const lazy_cache *cache, int length, lazy_stretch **parts, int *n, lazy_error *err)
{
    const lazy_buffer *end = cache->buffers + cache->n_with_rows;
    size_t n_pieces = 0, context = (size_t)cache->model->config.context;
    for (const lazy_buffer *b = cache->buffers; b < end; b++) n_pieces += (size_t)b->pieces;
    int code = lazy_alloc(parts, n_pieces, "the parts of shared memory", err);
    *n = 0;
    for (const lazy_buffer *b = cache->buffers; b < end && !code; b++)
        for (size_t i = 0; i < (size_t)b->pieces; i++) {
            size_t begin = b->shared_offset + i * context * b->per_token;
            (*parts)[(*n)++] = (lazy_stretch){ begin, begin + (size_t)length * b->per_token };
        }
    return code;
}

/* Joins the memory of `from`, if it has any and the address space suffices. */
static int join_shared(lazy_cache *to, const lazy_cache *from, const int32_t *depths, int length, lazy_error *err)
{
    if (!from->shared) return LAZY_OK;
    bool owned = from->shared->owner;
    int n = owned ? length : min_int(from->n_shared, length), n_parts;
    lazy_stretch *parts;
    int code = list_parts(to, n, &parts, &n_parts, err);
    if (code) return code;
    bool joined = to->place->backend->ops->shared_join(&to->shared, from->shared, parts, n_parts, NULL) == LAZY_OK;
    lazy_free(parts);
    if (!joined) return LAZY_OK;
    place_rows(to);
    return note_shared(to, owned ? depths : from->shared_depths, n, err);
}

int lazy_cache_fork(lazy_cache *to, lazy_cache *from, const int32_t *depths, int length, lazy_error *err)
{
    const lazy_config *c = &to->model->config;
    const lazy_ops *ops = to->place->backend->ops;
    /* downloads wait: first for uploads of rows of `from`, in the end so that `from` may change */
    int code = ops->download(from->stream, from->staging, from->logits, sizeof *from->logits, err);
    if (!code) code = move_to_shared(from, depths, length, err);
    if (!code) code = join_shared(to, from, depths, length, err);
    if (!code) code = lazy_cache_reserve(to, from->capacity, false, NULL, 0, err);
    bool all_shared = to->shared && from->shared->owner;
    for (int i = all_shared ? to->n_with_rows : 0; i < to->n_buffers && !code; i++) {
        const lazy_buffer *b = &to->buffers[i];
        if (b->kept)
            code = lazy_buffer_copy(to, b, lazy_room_of(b), lazy_room_of(&from->buffers[i]), depths, length, err);
    }
    if (!code) code = ops->copy(to->stream, to->logits, from->logits, (size_t)c->vocab * sizeof *to->logits, err);
    if (!code) code = ops->download(to->stream, to->staging, to->logits, sizeof *to->logits, err);
    for (int l = 0; l < c->n_layers; l++) to->remembered[l].n = from->remembered[l].n;
    to->has_logits = from->has_logits;
    return code;
}

int lazy_cache_write_from(lazy_cache *cache, int first, int end, const int32_t *depths, lazy_error *err)
{
    if (first < cache->written && cache->shared && cache->shared->owner) {
        int code = cache->place->backend->ops->shared_leave(cache->shared, err);
        if (!code && !cache->shared->owner) code = note_shared(cache, depths, first, err);
        if (code) return code;
    }
    cache->n_shared = min_int(cache->n_shared, first);
    cache->written = max_int(cache->written, end);
    return LAZY_OK;
}

uint64_t lazy_cache_shared_bytes(const lazy_cache *cache, int length)
{
    uint64_t per_token = 0;
    for (int i = 0; cache->shared && i < cache->n_with_rows; i++)
        per_token += cache->buffers[i].per_token * (uint64_t)cache->buffers[i].pieces;
    return per_token * (uint64_t)length;
}
