#include "policy.h"

#include "error.h"

int lazy_policy_ask(const lazy_policy *policy, const lazy_view *view, float *scores, int *n_free, lazy_error *err)
{
    const lazy_cache *cache = view->state->cache;
    float *staging = (float *)cache->staging; /* room for a word of every token; nothing else uses it during the call */
    if (policy->call(policy->context, view, staging, n_free)) return lazy_fail(err, LAZY_CANCELLED, "the policy stopped the pass");
    if (view->observes) return LAZY_OK;
    if (*n_free < -1) return lazy_fail(err, LAZY_INVALID, "the policy keeps %d tokens; it must be -1 or more", *n_free);
    return cache->model->backend->ops->upload(cache->stream, scores, staging, (size_t)view->n_in_play * sizeof *scores, err);
}

/* Rows of one axis in backend memory: n of them, from `first` on. */
static int download_rows(const lazy_view *view, void *out, const void *from, size_t row_bytes, int first, int n, lazy_error *err)
{
    const lazy_cache *cache = view->state->cache;
    return cache->model->backend->ops->download(cache->stream, out, (const char *)from + (size_t)first * row_bytes, (size_t)n * row_bytes,
                                                err);
}

/* (G, n, D) of a cache (G, capacity, D) */
static int download_heads(const lazy_view *view, char *out, const char *from, int first, int n, lazy_error *err)
{
    size_t row = (size_t)view->config->head_dim * lazy_dtype_width(view->kv);
    size_t capacity = (size_t)view->state->cache->kv[view->state->layer].capacity;
    int code = LAZY_OK;
    for (int g = 0; g < view->config->n_kv_heads && !code; g++)
        code = download_rows(view, out + (size_t)g * (size_t)n * row, from + (size_t)g * capacity * row, row, first, n, err);
    return code;
}

static int download_protected(const lazy_view *view, uint8_t *out, int first, int n, lazy_error *err)
{
    int code = download_rows(view, out, view->state->cache->flags, sizeof *out, first, n, err);
    for (int i = 0; i < n && !code; i++) out[i] = out[i] != LAZY_PRUNABLE;
    return code;
}

int lazy_view_copy(const lazy_view *view, lazy_view_part part, int first, int n, void *out, lazy_error *err)
{
    const lazy_layer_state *state = view->state;
    const lazy_config *c = view->config;
    size_t width = lazy_dtype_width(view->activations);
    int size = part == LAZY_VIEW_IN_PLAY                                                           ? view->n_in_play
               : part == LAZY_VIEW_PROTECTED || part == LAZY_VIEW_KEYS || part == LAZY_VIEW_VALUES ? view->length
                                                                                                   : view->n_rows;
    if (first < 0 || n < 0 || first > size - n)
        return lazy_fail(err, LAZY_INVALID, "%d entries of a view from %d on; this part has %d", n, first, size);
    switch (part) {
    case LAZY_VIEW_IN_PLAY: return download_rows(view, out, state->in_play, sizeof *state->in_play, first, n, err);
    case LAZY_VIEW_ROWS: return download_rows(view, out, state->rows, sizeof *state->rows, first, n, err);
    case LAZY_VIEW_PROTECTED: return download_protected(view, out, first, n, err);
    case LAZY_VIEW_PROJECTIONS: return download_rows(view, out, state->cache->qkv, (size_t)lazy_qkv_width(c) * width, first, n, err);
    case LAZY_VIEW_KEYS: return download_heads(view, out, state->cache->kv[state->layer].k, first, n, err);
    case LAZY_VIEW_VALUES: return download_heads(view, out, state->cache->kv[state->layer].v, first, n, err);
    case LAZY_VIEW_HIDDEN: return download_rows(view, out, state->x, (size_t)c->hidden * width, first, n, err);
    }
    return lazy_fail(err, LAZY_INVALID, "a view has no part %d", (int)part);
}
