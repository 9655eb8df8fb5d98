/* state.c — the parts of a session's state, read to be saved and written to be restored. */
#include <string.h>

#include "error.h"
#include "memory.h"
#include "session.h"

/* The buffer of a part, or NULL if the session has none. */
static const lazy_buffer *find_buffer(const lazy_session *s, lazy_state_part part, int layer)
{
    const lazy_cache *cache = &s->cache;
    if (part == LAZY_STATE_LOGITS || layer < 0 || layer >= s->model->config.n_layers) return NULL;
    const void *slot = part == LAZY_STATE_KEYS     ? (void *)&cache->kv[layer].k
                       : part == LAZY_STATE_VALUES ? (void *)&cache->kv[layer].v
                       : part == LAZY_STATE_AUX    ? (void *)&cache->aux[layer]
                                                   : (void *)&cache->remembered[layer].scores;
    for (const lazy_buffer *b = cache->buffers; b < cache->buffers + cache->n_buffers; b++)
        if (b->slot == slot) return b;
    return NULL;
}

/* has: (length,) or NULL. Returns how many of the first `length` tokens have a row. */
static int mark_rows(const lazy_session *s, const lazy_buffer *b, lazy_state_part part, int length, uint8_t *has)
{
    const lazy_tokens *tokens = &s->tokens;
    int n = 0;
    for (int i = 0; i < length; i++) {
        bool row = part == LAZY_STATE_REMEMBERED || (!tokens->evicted[i] && b->least <= tokens->depths[i] && tokens->depths[i] <= b->most);
        if (has) has[i] = row;
        n += row;
    }
    return n;
}

int lazy_session_state_length(const lazy_session *s, lazy_state_part part, int layer)
{
    if (part == LAZY_STATE_LOGITS) return s->cache.has_logits && !lazy_rules_prune(&s->rules) ? s->model->config.vocab : 0;
    const lazy_buffer *b = find_buffer(s, part, layer);
    if (!b) return -1;
    return mark_rows(s, b, part, part == LAZY_STATE_REMEMBERED ? s->cache.remembered[layer].n : s->tokens.length, NULL);
}

/* Reads or writes rows of a buffer. data: (pieces, n, per_token) (host), the rows of the n tokens that has[0 … length-1] marks. */
static int move_rows(lazy_cache *cache, const lazy_buffer *b, const uint8_t *has, int length, int n, char *data, bool writes,
                     lazy_error *err)
{
    const lazy_ops *ops = cache->model->backend->ops;
    int code = LAZY_OK, done = 0;
    for (int first = 0, end; first < length && !code; first = end) {
        for (end = first + 1; end < length && has[end] == has[first];) end++;
        if (!has[first]) continue;
        size_t bytes = (size_t)(end - first) * b->per_token;
        for (size_t i = 0; i < (size_t)b->pieces && !code; i++) {
            char *host = data + (i * (size_t)n + (size_t)done) * b->per_token;
            char *row = (char *)*b->slot + (i * (size_t)b->capacity + (size_t)first) * b->per_token;
            code = writes ? ops->upload(cache->stream, row, host, bytes, err) : ops->download(cache->stream, host, row, bytes, err);
        }
        done += end - first;
    }
    return code;
}

static int move_part(lazy_session *s, lazy_state_part part, int layer, int n, void *data, bool writes, lazy_error *err)
{
    const lazy_buffer *b = find_buffer(s, part, layer);
    int length = part == LAZY_STATE_REMEMBERED ? n : s->tokens.length;
    if (!b) return lazy_fail(err, LAZY_INVALID, "the session has no part %d of layer %d", (int)part, layer);
    if (n < 0 || length > s->tokens.length || mark_rows(s, b, part, length, NULL) != n)
        return lazy_fail(err, LAZY_INVALID, "part %d of layer %d has %d tokens; the session has rows of %d", (int)part, layer, n,
                         mark_rows(s, b, part, s->tokens.length, NULL));
    uint8_t *has;
    int code = lazy_alloc((void **)&has, (size_t)length + 1, sizeof *has, "marks of tokens", err);
    if (code) return code;
    mark_rows(s, b, part, length, has);
    code = move_rows(&s->cache, b, has, length, n, data, writes, err);
    lazy_free(has);
    return code;
}

int lazy_session_read_state(lazy_session *s, lazy_state_part part, int layer, void *data, lazy_error *err)
{
    if (part == LAZY_STATE_LOGITS) return lazy_session_logits(s, data, err);
    int code = lazy_session_enter(s, err);
    if (code) return code;
    code = move_part(s, part, layer, lazy_session_state_length(s, part, layer), data, false, err);
    lazy_session_leave(s);
    return code;
}

int lazy_session_write_state(lazy_session *s, lazy_state_part part, int layer, int n, const void *data, lazy_error *err)
{
    lazy_cache *cache = &s->cache;
    int code = lazy_session_enter(s, err);
    if (code) return code;
    code = lazy_cache_write_from(cache, 0, s->tokens.length, s->tokens.depths, err);
    if (!code && part != LAZY_STATE_LOGITS) {
        code = move_part(s, part, layer, n, (void *)data, true, err);
        if (!code && part == LAZY_STATE_REMEMBERED) cache->remembered[layer].n = n;
    } else if (!code && n != s->model->config.vocab) {
        code = lazy_fail(err, LAZY_INVALID, "%d logits; the model has a vocabulary of %d", n, s->model->config.vocab);
    } else if (!code) {
        code = s->model->backend->ops->upload(cache->stream, cache->logits, data, (size_t)n * sizeof *cache->logits, err);
        cache->has_logits = !code;
    }
    lazy_session_leave(s);
    return code;
}

/* Refuses a token that cannot be in a session of this pruning. */
static int check_token(const lazy_session *s, int i, int32_t id, uint8_t kind, int32_t depth, bool gone, lazy_error *err)
{
    const lazy_config *c = &s->model->config;
    if (id < 0 || id >= c->vocab)
        return lazy_fail(err, LAZY_INVALID, "token id %d at position %d; ids go from 0 to %d", id, i, c->vocab - 1);
    if (kind > LAZY_READ) return lazy_fail(err, LAZY_INVALID, "kind %d at position %d; it must be 0, 1 or 2", kind, i);
    if (depth < 0 || depth > c->n_layers)
        return lazy_fail(err, LAZY_INVALID, "depth %d at position %d; it must be 0 to %d", depth, i, c->n_layers);
    if (depth < c->n_layers && !gone && !s->cache.aux[depth])
        return lazy_fail(err, LAZY_INVALID, "the token at position %d waits for layer %d, where the pruning drops none", i, depth);
    return LAZY_OK;
}

int lazy_session_write_tokens(lazy_session *s, const int32_t *ids, const uint8_t *kinds, const int32_t *depths, const uint8_t *gone, int n,
                              lazy_error *err)
{
    int code = n < 1 ? lazy_fail(err, LAZY_INVALID, "no tokens were given") : lazy_session_reserve(s, n, err);
    if (!code) code = lazy_session_enter(s, err);
    if (code) return code;
    lazy_tokens *tokens = &s->tokens;
    if (tokens->length) code = lazy_fail(err, LAZY_INVALID, "the session has %d tokens; it must be empty", tokens->length);
    for (int i = 0; i < n && !code; i++) code = check_token(s, i, ids[i], kinds[i], depths[i], gone[i], err);
    for (int i = 0; i < n && !code; i++) {
        lazy_tokens_append(tokens, ids + i, 1, kinds[i]);
        tokens->depths[i] = depths[i];
        tokens->evicted[i] = gone[i] != 0;
        tokens->n_evicted += gone[i] != 0;
        if (depths[i] < s->model->config.n_layers && !gone[i]) s->waiting[depths[i]] = 1;
    }
    lazy_session_leave(s);
    return code;
}
