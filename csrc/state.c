/* state.c — the parts of a session's state, read to be saved and written to be restored. */
#include "error.h"
#include "session.h"

/* The cache that has the rows of this part of a layer: those that wait for the layer are where the one below is. */
static lazy_cache *cache_of(const lazy_session *s, lazy_state_part part, int layer)
{
    return lazy_cache_of(s, part == LAZY_STATE_AUX ? layer - 1 : layer);
}

/* The buffer of a part, or NULL if the session has none. */
static const lazy_buffer *find_buffer(const lazy_session *s, lazy_state_part part, int layer)
{
    if (part == LAZY_STATE_LOGITS || layer < 0 || layer >= s->model->config.n_layers) return NULL;
    const lazy_cache *cache = cache_of(s, part, layer);
    const void *slot = part == LAZY_STATE_KEYS     ? (void *)&cache->kv[layer].k
                       : part == LAZY_STATE_VALUES ? (void *)&cache->kv[layer].v
                       : part == LAZY_STATE_AUX    ? (void *)&cache->aux[layer]
                                                   : (void *)&cache->remembered[layer].scores;
    for (const lazy_buffer *b = cache->buffers; b < cache->buffers + cache->n_buffers; b++)
        if (b->slot == slot) return b;
    return NULL;
}

/* True if the token at position i has a row in the buffer of this part. */
static bool has_row(const lazy_session *s, const lazy_buffer *b, lazy_state_part part, int i)
{
    const lazy_tokens *tokens = &s->tokens;
    return part == LAZY_STATE_REMEMBERED || (!tokens->gone[i] && lazy_buffer_holds(b, tokens->depths[i]));
}

static int count_rows(const lazy_session *s, const lazy_buffer *b, lazy_state_part part, int length)
{
    int n = 0;
    for (int i = 0; i < length; i++) n += has_row(s, b, part, i);
    return n;
}

int lazy_session_state_length(const lazy_session *s, lazy_state_part part, int layer)
{
    if (part == LAZY_STATE_LOGITS)
        return lazy_last_cache(s)->has_logits && !lazy_rules_prune(&s->pruning) ? s->model->config.vocab : 0;
    const lazy_buffer *b = find_buffer(s, part, layer);
    if (!b) return -1;
    return count_rows(s, b, part,
                      part == LAZY_STATE_REMEMBERED ? cache_of(s, part, layer)->remembered[layer].n : s->tokens.length);
}

/* Reads or writes a part, the rows of n tokens. data: (pieces, n, per_token) (host) */
static int move_part(lazy_session *s, lazy_state_part part, int layer, int n, char *data, bool writes, lazy_error *err)
{
    const lazy_ops *ops = s->model->backend->ops;
    const lazy_buffer *b = find_buffer(s, part, layer);
    int length = part == LAZY_STATE_REMEMBERED ? n : s->tokens.length, code = LAZY_OK, done = 0;
    if (!b) return lazy_invalid(err, "the session has no part %d of layer %d", (int)part, layer);
    if (n < 0 || length > s->tokens.length || count_rows(s, b, part, length) != n)
        return lazy_invalid(err, "part %d of layer %d has %d tokens; the session has rows of %d", (int)part, layer, n,
                            count_rows(s, b, part, s->tokens.length));
    lazy_stream *stream = cache_of(s, part, layer)->stream;
    for (int first = 0, end; first < length && !code; first = end) {
        bool has = has_row(s, b, part, first);
        for (end = first + 1; end < length && has_row(s, b, part, end) == has;) end++;
        if (!has) continue;
        size_t bytes = (size_t)(end - first) * b->per_token;
        for (size_t i = 0; i < (size_t)b->pieces && !code; i++) {
            char *host = data + (i * (size_t)n + (size_t)done) * b->per_token;
            char *row = (char *)*b->slot + (i * (size_t)b->capacity + (size_t)first) * b->per_token;
            code = writes ? ops->upload(stream, row, host, bytes, err) : ops->download(stream, host, row, bytes, err);
        }
        done += end - first;
    }
    return code;
}

int lazy_session_get_state(lazy_session *s, lazy_state_part part, int layer, void *data, lazy_error *err)
{
    if (part == LAZY_STATE_LOGITS) return lazy_session_logits(s, data, err);
    return move_part(s, part, layer, lazy_session_state_length(s, part, layer), data, false, err);
}

int lazy_session_set_state(lazy_session *s, lazy_state_part part, int layer, int n, const void *data, lazy_error *err)
{
    lazy_cache *cache = lazy_last_cache(s);
    int code = LAZY_OK;
    for (int i = 0; i < s->model->n_places && !code; i++)
        code = lazy_cache_write_from(&s->caches[i], 0, s->tokens.length, s->tokens.depths, err);
    if (!code && part != LAZY_STATE_LOGITS) {
        code = move_part(s, part, layer, n, (void *)data, true, err);
        if (!code && part == LAZY_STATE_REMEMBERED) cache_of(s, part, layer)->remembered[layer].n = n;
        return code;
    }
    if (code) return code;
    if (!s->tokens.length) return lazy_invalid(err, "there are no tokens that the logits could be of");
    if (n != s->model->config.vocab)
        return lazy_invalid(err, "%d logits; the model has a vocabulary of %d", n, s->model->config.vocab);
    code = s->model->backend->ops->upload(cache->stream, cache->logits, data, (size_t)n * sizeof *cache->logits, err);
    cache->has_logits = !code;
    return code;
}

/* Checks all that memory safety depends on, not that calls can lead to these tokens: K and V could be any, too. */
static int check_tokens(const lazy_session *s, const int32_t *ids, const uint8_t *kinds, const int32_t *depths,
                        const uint8_t *gone, int n, lazy_error *err)
{
    const lazy_config *c = &s->model->config;
    for (int i = 0; i < n; i++) {
        if (ids[i] < 0 || ids[i] >= c->vocab)
            return lazy_invalid(err, "token id %d at position %d; ids go from 0 to %d", ids[i], i, c->vocab - 1);
        if (kinds[i] > LAZY_READ) return lazy_invalid(err, "kind %d at position %d; it must be 0, 1 or 2", kinds[i], i);
        if (gone[i] > 1) return lazy_invalid(err, "gone is %d at position %d; it must be 0 or 1", gone[i], i);
        if (depths[i] < 0 || depths[i] > c->n_layers)
            return lazy_invalid(err, "depth %d at position %d; it must be 0 to %d", depths[i], i, c->n_layers);
        if (!gone[i] && depths[i] < c->n_layers && !cache_of(s, LAZY_STATE_AUX, depths[i])->aux[depths[i]])
            return lazy_invalid(err, "the token at position %d waits for layer %d, where the pruning drops none", i,
                                depths[i]);
    }
    return LAZY_OK;
}

int lazy_session_set_tokens(lazy_session *s, const int32_t *ids, const uint8_t *kinds, const int32_t *depths,
                            const uint8_t *gone, int n, lazy_error *err)
{
    if (n < 1) return lazy_invalid(err, "no tokens were given");
    lazy_tokens *tokens = &s->tokens;
    if (tokens->length) return lazy_invalid(err, "the session has %d tokens; it must be empty", tokens->length);
    int code = lazy_session_reserve(s, n, n, err);
    if (!code) code = check_tokens(s, ids, kinds, depths, gone, n, err);
    for (int i = 0; i < n && !code; i++) {
        lazy_tokens_append(tokens, ids + i, 1, kinds[i]);
        tokens->depths[i] = depths[i];
        tokens->gone[i] = gone[i];
        tokens->n_gone += gone[i];
    }
    return code;
}
