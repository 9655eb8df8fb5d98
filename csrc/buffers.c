/* buffers.c — a cache's buffers on its backend: their list, their growth, copies of their tokens. */
#include "cache.h"
#include "memory.h"
#include "numeric.h"

/* Adds a buffer of the working memory. slot: the address of its pointer in the cache. */
static lazy_buffer *add(lazy_cache *cache, void *slot, int pieces, size_t per_token, const char *what)
{
    lazy_buffer *b = &cache->buffers[cache->n_buffers++];
    *b = (lazy_buffer){ .slot = slot,
                        .pieces = pieces,
                        .per_token = per_token,
                        .most = cache->model->config.n_layers,
                        .what = what,
                        .limit = INT32_MAX };
    return b;
}

enum { PAGE = 4096 };

/* Adds one of K, V and Aux, which lie in shared memory one after the other, in whole pages. */
static void add_rows(lazy_cache *cache, void *slot, int pieces, size_t per_token, bool sparse, int least, int most,
                     const char *what)
{
    lazy_buffer *b = add(cache, slot, pieces, per_token, what);
    b->kept = true;
    b->sparse = sparse;
    b->least = least;
    b->most = most;
    b->shared_offset = cache->shared_bytes;
    cache->shared_bytes += (per_token * (size_t)cache->model->config.context * (size_t)pieces + PAGE - 1) / PAGE * PAGE;
}

int lazy_buffers_open(lazy_cache *cache, const lazy_pruning *pruning, lazy_error *err)
{
    enum { MAX_PER_LAYER = 5, MAX_OTHERS = 20 };
    const lazy_config *c = &cache->model->config;
    const lazy_place *place = cache->place;
    const lazy_backend *backend = place->backend;
    size_t a = lazy_activation_bytes(backend), d = (size_t)c->hidden * a,
           head = (size_t)c->head_dim * lazy_float_bytes(backend->kv);
    int chunk = backend->row_chunk, n = c->n_layers, ffn = 0, /* of layers without experts */
        code = lazy_alloc_zeroed(&cache->buffers, MAX_PER_LAYER * (size_t)n + MAX_OTHERS, "the buffer list", err);
    if (code) return code;

    for (int l = place->first; l < place->end; l++) { /* K and V of each layer are the first buffers */
        bool sparse = !lazy_rules_whole_layer(pruning, l);
        add_rows(cache, &cache->kv[l].k, c->n_kv_heads, head, sparse, l + 1, n, "the key cache");
        add_rows(cache, &cache->kv[l].v, c->n_kv_heads, head, sparse, l + 1, n, "the value cache");
        if (!c->expert_layers[l]) ffn = c->ffn;
    }
    for (int l = place->first + 1; l <= min_int(place->end, n - 1); l++)
        if (lazy_rules_revive_at(pruning, l)) add_rows(cache, &cache->aux[l], 1, d, true, l, l, "the Aux cache");
    cache->n_with_rows = cache->n_buffers;
    for (int l = place->first; l < place->end; l++) {
        if (pruning->memory <= 0 || !lazy_rules_stage_at(pruning, l)) continue;
        add(cache, &cache->remembered[l].scores, 1, sizeof(float), "remembered scores")->kept = true;
        add(cache, &cache->remembered[l].fresh, 1, sizeof(float), "remembered scores");
    }
    if (pruning->layers > 1 && !pruning->policy.call)
        add(cache, &cache->layer_scores, min_int(pruning->layers, n), sizeof(float), "scores of layers");
    lazy_buffer *laid_out = add(cache, &cache->gone, 1, LAZY_LAID_OUT_BYTES, "the tokens' ids, depths and flags");
    laid_out->extra = lazy_n_notes(c) * sizeof(int32_t);
    add(cache, &cache->in_play[1], 1, sizeof(int32_t), "the tokens in play");
    for (int i = 0; i < 2; i++) {
        add(cache, &cache->rows[i], 1, sizeof(int32_t), "the rows");
        add(cache, &cache->scores[i], 1, sizeof(float), "the scores");
        add(cache, &cache->x[i], 1, d, "the hidden states");
    }
    /* a policy may read the queries of all rows */
    cache->qkv_rows = pruning->policy.call || pruning->queries > LAZY_PART_ROWS ? INT32_MAX : LAZY_PART_ROWS;
    add(cache, &cache->qkv, 1, (size_t)lazy_qkv_width(c) * a, "q, k and v")->limit = cache->qkv_rows;
    add(cache, &cache->attention, 1, (size_t)lazy_q_width(c) * a, "the attention's output")->limit = LAZY_PART_ROWS;
    add(cache, &cache->normed, 1, d, "normed rows")->limit = chunk;
    add(cache, &cache->ffn, 1, (size_t)ffn * a, "FFN rows")->limit = chunk;
    add(cache, &cache->logits, 1, (size_t)c->vocab * sizeof(float), "the logits")->limit = 1;
    add(cache, &cache->fresh_logits, 1, (size_t)c->vocab * sizeof(float), "the logits")->limit = 1;
    return LAZY_OK;
}

/* True if the token at position i has a row in the buffer, and not one that the cache shares with the owner. */
static bool is_own(const lazy_cache *cache, const lazy_buffer *b, const int32_t *depths, int i)
{
    bool has_rows = b < cache->buffers + cache->n_with_rows;
    return lazy_buffer_holds(b, depths[i]) &&
           !(has_rows && i < cache->n_shared && lazy_buffer_holds(b, cache->shared_depths[i]));
}

static int copy_tokens(lazy_stream *stream, const lazy_buffer *b, lazy_room to, lazy_room from, int first, int end,
                       lazy_error *err)
{
    size_t at = (size_t)first, bytes = (size_t)(end - first) * b->per_token;
    int code = LAZY_OK;
    for (size_t i = 0; i < (size_t)b->pieces && !code; i++)
        code =
            stream->backend->ops->copy(stream, (char *)to.data + (i * (size_t)to.capacity + at) * b->per_token,
                                       (char *)from.data + (i * (size_t)from.capacity + at) * b->per_token, bytes, err);
    return code;
}

int lazy_buffer_copy(const lazy_cache *cache, const lazy_buffer *b, lazy_room to, lazy_room from, const int32_t *depths,
                     int length, lazy_error *err)
{
    bool all = !cache->place->backend->ops->alloc_sparse;
    int code = LAZY_OK;
    for (int first = 0, end; first < length && !code; first = end) {
        bool own = all || is_own(cache, b, depths, first);
        for (end = all ? length : first + 1; end < length && is_own(cache, b, depths, end) == own;) end++;
        if (own) code = copy_tokens(cache->stream, b, to, from, first, end, err);
    }
    return code;
}

void lazy_buffer_place(lazy_cache *cache, lazy_buffer *b, lazy_room room)
{
    int layer = cache->place->first + (int)(b - cache->buffers) / 2;
    *b->slot = room.data;
    b->capacity = room.capacity;
    if (layer < cache->place->end) cache->kv[layer].capacity = room.capacity;
}

/* Gives n buffers from b on the same greater capacity, or none of them. */
static int grow(lazy_cache *cache, lazy_buffer *b, int n, int capacity, bool sparse, const int32_t *depths, int length,
                lazy_error *err)
{
    lazy_backend *backend = cache->place->backend;
    const lazy_ops *ops = backend->ops;
    lazy_room larger[] = { { NULL, capacity }, { NULL, capacity } };
    int code = LAZY_OK;
    for (int i = 0; i < n && !code; i++) {
        size_t bytes = lazy_buffer_bytes(&b[i], capacity);
        bool in_parts = sparse || b[i].sparse || cache->shared; /* a fork's passes are short */
        code = (in_parts && ops->alloc_sparse ? ops->alloc_sparse : ops->alloc)(backend, &larger[i].data, bytes,
                                                                                b[i].what, err);
        if (!code && b[i].kept)
            code = lazy_buffer_copy(cache, &b[i], larger[i], lazy_room_of(&b[i]), depths, length, err);
    }
    for (int i = 0; i < n; i++) {
        ops->free(backend, code ? larger[i].data : *b[i].slot);
        if (!code) lazy_buffer_place(cache, &b[i], larger[i]);
    }
    return code;
}

int lazy_buffers_grow(lazy_cache *cache, int capacity, bool sparse, const int32_t *depths, int length, lazy_error *err)
{
    int code = LAZY_OK;
    for (int i = 0, n; i < cache->n_buffers && !code; i += n) {
        lazy_buffer *b = &cache->buffers[i];
        int wanted = min_int(capacity, b->limit);
        n = i < 2 * (cache->place->end - cache->place->first) ? 2 : 1; /* K and V of a layer have one capacity */
        if (b->capacity < wanted) code = grow(cache, b, n, wanted, sparse, depths, length, err);
    }
    return code;
}
