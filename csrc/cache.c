#include "cache.h"

#include <string.h>

#include "memory.h"
#include "numeric.h"

enum { MAX_PER_SESSION = 16, PAGE = 4096 };

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
        list[n++] = (lazy_growing){ &cache->kv[l].k, c->n_kv_heads, head, true, sparse, l + 1, any, "the key cache", 0 };
        list[n++] = (lazy_growing){ &cache->kv[l].v, c->n_kv_heads, head, true, sparse, l + 1, any, "the value cache", 0 };
    }
    for (int l = 0; l < c->n_layers; l++)
        if (lazy_rules_revive_at(rules, l)) list[n++] = (lazy_growing){ &cache->aux[l], 1, d, true, true, l, l, "the Aux cache", 0 };
    for (int l = 0; l < c->n_layers && rules->pruning.memory > 0; l++)
        if (lazy_rules_stage_at(rules, l)) {
            lazy_remembered *r = &cache->remembered[l];
            list[n++] = (lazy_growing){ (void **)&r->scores, 1, sizeof(float), true, false, 0, any, "remembered scores", 0 };
            list[n++] = (lazy_growing){ (void **)&r->fresh, 1, sizeof(float), false, false, 0, any, "remembered scores", 0 };
        }
    if (rules->pruning.layers > 1 && !rules->pruning.policy.call)
        list[n++] = (lazy_growing){
            (void **)&cache->shares, min_int(rules->pruning.layers, c->n_layers), sizeof(float), false, false, 0, any, "shares", 0
        };
    if (lazy_rules_drop_for_good(rules, c->n_layers))
        list[n++] = (lazy_growing){ (void **)&cache->gone, 1, sizeof(int32_t), false, false, 0, any, "tokens dropped for good", 0 };
    const lazy_growing others[] = {
        { (void **)&cache->depth, 1, sizeof(int32_t), false, false, 0, any, "the depths", 0 },
        { (void **)&cache->ids, 1, sizeof(int32_t), false, false, 0, any, "the token ids", 0 },
        { (void **)&cache->flags, 1, sizeof(uint8_t), false, false, 0, any, "the token flags", 0 },
        { (void **)&cache->in_play[0], 1, sizeof(int32_t), false, false, 0, any, "the tokens in play", 0 },
        { (void **)&cache->in_play[1], 1, sizeof(int32_t), false, false, 0, any, "the tokens in play", 0 },
        { (void **)&cache->rows[0], 1, sizeof(int32_t), false, false, 0, any, "the rows", 0 },
        { (void **)&cache->rows[1], 1, sizeof(int32_t), false, false, 0, any, "the rows", 0 },
        { (void **)&cache->scores[0], 1, sizeof(float), false, false, 0, any, "the scores", 0 },
        { (void **)&cache->scores[1], 1, sizeof(float), false, false, 0, any, "the scores", 0 },
        { &cache->x[0], 1, d, false, false, 0, any, "the hidden states", 0 },
        { &cache->x[1], 1, d, false, false, 0, any, "the hidden states", 0 },
        { &cache->qkv, 1, (size_t)lazy_qkv_width(c) * a, false, false, 0, any, "q, k and v", 0 },
        { &cache->attention, 1, (size_t)lazy_q_width(c) * a, false, false, 0, any, "the attention's output", 0 },
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

/* K,V and Aux: their rows are of tokens that some layer has computed. */
static bool has_rows(const lazy_growing *g) { return g->least > 0; }
static bool in_shared(const lazy_cache *cache, const lazy_growing *g) { return has_rows(g) && cache->shared; }

void lazy_cache_close(lazy_cache *cache)
{
    if (!cache->model) return;
    lazy_backend *backend = cache->model->backend;
    void *fixed[] = { cache->normed, cache->ffn, cache->logits, cache->fresh_logits, cache->notes };
    for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++) backend->ops->free(backend, fixed[i]);
    for (int i = 0; i < cache->n_growing; i++)
        if (!in_shared(cache, &cache->growing[i])) backend->ops->free(backend, *cache->growing[i].slot);
    if (cache->shared) backend->ops->share_close(cache->shared);
    backend->ops->stream_close(cache->stream);
    lazy_free(cache->shared_depths);
    lazy_free(cache->staging);
    lazy_free(cache->growing);
    lazy_free(cache->kv);
    lazy_free(cache->remembered);
    lazy_free(cache->aux);
    *cache = (lazy_cache){ 0 };
}

static size_t staging_words(const lazy_config *c, int capacity)
{
    size_t words = (size_t)capacity, notes = lazy_n_notes(c);
    return words < notes ? notes : words;
}

uint64_t lazy_cache_bytes(const lazy_cache *cache, int capacity)
{
    const lazy_backend *backend = cache->model->backend;
    const lazy_config *c = &cache->model->config;
    uint64_t per_token = 0, chunk = (uint64_t)backend->row_chunk * lazy_activation_bytes(backend);
    for (const lazy_growing *g = cache->growing; g < cache->growing + cache->n_growing; g++)
        per_token += g->per_token * (uint64_t)g->pieces;
    uint64_t fixed = chunk * (uint64_t)(c->hidden + c->ffn) + 2 * (uint64_t)c->vocab * sizeof(float) + lazy_n_notes(c) * sizeof(int32_t);
    uint64_t scratch = backend->ops->scratch_bytes(cache->stream, capacity, capacity);
    return per_token * (uint64_t)capacity + staging_words(c, capacity) * sizeof(int32_t) + fixed + scratch +
           lazy_rope_bytes(cache->model, capacity);
}

uint64_t lazy_cache_shared_bytes(const lazy_cache *cache, int length)
{
    uint64_t per_token = 0;
    for (const lazy_growing *g = cache->growing; g < cache->growing + cache->n_growing; g++)
        if (in_shared(cache, g)) per_token += g->per_token * (uint64_t)g->pieces;
    return per_token * (uint64_t)length;
}

/* ---- room ------------------------------------------------------------------------------- */

/* Data of a buffer, and the tokens that it has room for. */
typedef struct room {
    void *data;
    int capacity;
} room;

static room room_of(const lazy_growing *g) { return (room){ *g->slot, g->capacity }; }
static bool holds(const lazy_growing *g, int depth) { return g->least <= depth && depth <= g->most; }

/* True if the buffer has the token at position i, and not because the cache shares its row with the owner. */
static bool is_own(const lazy_cache *cache, const lazy_growing *g, const int32_t *depths, int i)
{
    return holds(g, depths[i]) && !(has_rows(g) && i < cache->n_shared && holds(g, cache->shared_depths[i]));
}

static int copy_tokens(lazy_stream *stream, const lazy_growing *g, room to, room from, int first, int end, lazy_error *err)
{
    int code = LAZY_OK;
    for (size_t i = 0; i < (size_t)g->pieces && !code; i++)
        code = stream->backend->ops->copy(stream, (char *)to.data + (i * (size_t)to.capacity + (size_t)first) * g->per_token,
                                          (char *)from.data + (i * (size_t)from.capacity + (size_t)first) * g->per_token,
                                          (size_t)(end - first) * g->per_token, err);
    return code;
}

/* Copies what the cache does not share of the first `length` tokens from one buffer to another. Where memory may be sparse, only rows that
 * are there, so that the others go on taking none. */
static int copy_own(const lazy_cache *cache, const lazy_growing *g, room to, room from, const int32_t *depths, int length, lazy_error *err)
{
    bool all = !cache->model->backend->ops->expect_sparse;
    int code = LAZY_OK;
    for (int first = 0, end; first < length && !code; first = end) {
        bool own = all || is_own(cache, g, depths, first);
        for (end = all ? length : first + 1; end < length && is_own(cache, g, depths, end) == own;) end++;
        if (own) code = copy_tokens(cache->stream, g, to, from, first, end, err);
    }
    return code;
}

static void place(lazy_growing *g, room fresh)
{
    *g->slot = fresh.data;
    g->capacity = fresh.capacity;
}

/* Sets the capacity of each layer's K and V from that of its buffers. */
static void note_capacities(lazy_cache *cache)
{
    for (int l = 0; l < cache->model->config.n_layers; l++) cache->kv[l].capacity = cache->growing[2 * l].capacity;
}

/* Gives the n buffers that begin at g the same greater capacity, or none of them. */
static int grow(lazy_cache *cache, lazy_growing *g, int n, int capacity, const int32_t *depths, int length, lazy_error *err)
{
    lazy_backend *backend = cache->model->backend;
    room fresh[] = { { NULL, capacity }, { NULL, capacity } };
    int code = LAZY_OK;
    for (int i = 0; i < n && !code; i++) {
        size_t bytes = g[i].per_token * (size_t)capacity * (size_t)g[i].pieces;
        code = backend->ops->alloc(backend, &fresh[i].data, bytes, g[i].what, err);
        bool sparse = g[i].sparse || cache->shared; /* a fork's passes are short, as a rule: most of its working memory is never written */
        if (!code && sparse && backend->ops->expect_sparse) backend->ops->expect_sparse(backend, fresh[i].data, bytes);
        if (!code && g[i].remembered) code = copy_own(cache, &g[i], fresh[i], room_of(&g[i]), depths, length, err);
    }
    for (int i = 0; i < n; i++) {
        backend->ops->free(backend, code ? fresh[i].data : *g[i].slot);
        if (!code) place(&g[i], fresh[i]);
    }
    return code;
}

/* Each buffer is freed before the next one grows, so that the memory is not needed twice. Those that have grown when another cannot are
 * merely larger than cache->capacity. */
int lazy_cache_reserve(lazy_cache *cache, int capacity, const int32_t *depths, int length, lazy_error *err)
{
    const lazy_config *c = &cache->model->config;
    int32_t *staging;
    int code = lazy_alloc((void **)&staging, staging_words(c, capacity), sizeof *staging, "the staging room", err);
    if (code) return code;
    lazy_free(cache->staging);
    cache->staging = staging;
    code = cache->model->backend->ops->reserve(cache->stream, capacity, capacity, err);
    if (!code) code = lazy_rope_find(&cache->rope, cache->model, cache->stream, capacity, err);
    for (int i = 0, n; i < cache->n_growing && !code; i += n) {
        n = i < 2 * c->n_layers ? 2 : 1; /* K and V of a layer have one capacity */
        if (cache->growing[i].capacity < capacity) code = grow(cache, &cache->growing[i], n, capacity, depths, length, err);
    }
    note_capacities(cache);
    if (!code) cache->capacity = capacity;
    return code;
}

/* ---- forks ------------------------------------------------------------------------------ */

/* Bytes of a buffer with room for the model's context, in whole pages. */
static size_t shared_bytes(const lazy_cache *cache, const lazy_growing *g)
{
    return (g->per_token * (size_t)cache->model->config.context * (size_t)g->pieces + PAGE - 1) / PAGE * PAGE;
}

/* K,V and Aux lie in the shared memory one after the other. */
static void place_rows(lazy_cache *cache)
{
    char *data = cache->shared->data;
    for (lazy_growing *g = cache->growing; g < cache->growing + cache->n_growing; g++) {
        if (!has_rows(g)) continue;
        place(g, (room){ data, cache->model->config.context });
        data += shared_bytes(cache, g);
    }
    note_capacities(cache);
}

/* Moves K,V and Aux into shared memory as its owner, if there is any to be had. */
static int move_to_shared(lazy_cache *cache, const int32_t *depths, int length, lazy_error *err)
{
    lazy_backend *backend = cache->model->backend;
    const lazy_growing *end = cache->growing + cache->n_growing;
    lazy_shared *shared;
    size_t bytes = 0;
    for (const lazy_growing *g = cache->growing; g < end; g++)
        if (has_rows(g)) bytes += shared_bytes(cache, g);
    if (cache->shared || !backend->ops->share_open || backend->ops->share_open(backend, &shared, bytes, NULL)) return LAZY_OK;
    int code = LAZY_OK;
    char *data = shared->data;
    for (const lazy_growing *g = cache->growing; g < end && !code; g++) {
        if (!has_rows(g)) continue;
        code = copy_own(cache, g, (room){ data, cache->model->config.context }, room_of(g), depths, length, err);
        data += shared_bytes(cache, g);
    }
    if (code) {
        backend->ops->share_close(shared);
        return code;
    }
    for (const lazy_growing *g = cache->growing; g < end; g++)
        if (has_rows(g)) backend->ops->free(backend, *g->slot);
    cache->shared = shared;
    cache->written = length;
    place_rows(cache);
    return LAZY_OK;
}

/* Lists where the rows of the first `length` tokens lie in shared memory. out: *parts (*n,), of the caller */
static int list_parts(const lazy_cache *cache, int length, lazy_stretch **parts, int *n, lazy_error *err)
{
    const lazy_growing *end = cache->growing + cache->n_growing;
    size_t n_pieces = 0, offset = 0;
    for (const lazy_growing *g = cache->growing; g < end; g++)
        if (has_rows(g)) n_pieces += (size_t)g->pieces;
    int code = lazy_alloc((void **)parts, n_pieces, sizeof **parts, "the parts of shared memory", err);
    *n = 0;
    for (const lazy_growing *g = cache->growing; g < end && !code; g++) {
        if (!has_rows(g)) continue;
        for (size_t i = 0; i < (size_t)g->pieces; i++) {
            size_t begin = offset + i * (size_t)cache->model->config.context * g->per_token;
            (*parts)[(*n)++] = (lazy_stretch){ begin, begin + (size_t)length * g->per_token };
        }
        offset += shared_bytes(cache, g);
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
    bool joined = to->model->backend->ops->share_join(&to->shared, from->shared, parts, n_parts, NULL) == LAZY_OK;
    lazy_free(parts);
    if (!joined) return LAZY_OK;
    place_rows(to);
    code = lazy_alloc_copy((void **)&to->shared_depths, owned ? depths : from->shared_depths, (size_t)n, sizeof *depths,
                           "the shared tokens", err);
    if (!code) to->n_shared = n;
    return code;
}

int lazy_cache_fork(lazy_cache *to, lazy_cache *from, const int32_t *depths, int length, lazy_error *err)
{
    const lazy_config *c = &to->model->config;
    const lazy_ops *ops = to->model->backend->ops;
    int code = ops->download(from->stream, from->staging, from->logits, sizeof *from->logits, err); /* waits for uploads of its rows */
    if (!code) code = move_to_shared(from, depths, length, err);
    if (!code) code = join_shared(to, from, depths, length, err);
    if (!code) code = lazy_cache_reserve(to, from->capacity, NULL, 0, err);
    bool all_shared = to->shared && from->shared->owner;
    for (int i = 0; i < to->n_growing && !code; i++) {
        const lazy_growing *g = &to->growing[i];
        if (g->remembered && !(has_rows(g) && all_shared))
            code = copy_own(to, g, room_of(g), room_of(&from->growing[i]), depths, length, err);
    }
    if (!code) code = ops->copy(to->stream, to->logits, from->logits, (size_t)c->vocab * sizeof *to->logits, err);
    if (!code) code = ops->download(to->stream, to->staging, to->logits, sizeof *to->logits, err); /* waits: `from` may change then */
    for (int l = 0; l < c->n_layers; l++) to->remembered[l].n = from->remembered[l].n;
    to->has_logits = from->has_logits;
    return code;
}

int lazy_cache_write_from(lazy_cache *cache, int first, int end, const int32_t *depths, lazy_error *err)
{
    if (first < cache->written && cache->shared && cache->shared->owner) {
        int code = cache->model->backend->ops->share_leave(cache->shared, err);
        if (!code && !cache->shared->owner) {
            code = lazy_alloc_copy((void **)&cache->shared_depths, depths, (size_t)first, sizeof *depths, "the shared tokens", err);
            if (!code) cache->n_shared = first;
        }
        if (code) return code;
    }
    cache->n_shared = min_int(cache->n_shared, first);
    cache->written = max_int(cache->written, end);
    return LAZY_OK;
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
            char *there = (char *)*g->slot + (i * (size_t)g->capacity + (size_t)first) * g->per_token;
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
