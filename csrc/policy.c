#include "error.h"
#include "session.h"

int lazy_policy_ask(const lazy_policy *policy, const lazy_view *view, float *scores, int *n_free, lazy_error *err)
{
    const lazy_cache *cache = view->state->cache;
    float *staging = (float *)cache->staging; /* room for a word of every token; nothing else uses it during the call */
    if (policy->call(policy->context, view, staging, n_free))
        return lazy_fail(err, LAZY_CANCELLED, "the policy stopped the pass");
    if (view->observes) return LAZY_OK;
    if (*n_free < -1) return lazy_invalid(err, "the policy keeps %d tokens; it must be -1 or more", *n_free);
    return cache->model->backend->ops->upload(cache->stream, scores, staging, (size_t)view->n_in_play * sizeof *scores,
                                              err);
}

int lazy_view_copy(const lazy_view *view, lazy_view_part part, int first, int n, void *out, lazy_error *err)
{
    const lazy_layer_state *state = view->state;
    const lazy_cache *cache = state->cache;
    const lazy_config *c = view->config;
    const lazy_kv *kv = &cache->kv[state->layer];
    const size_t width = lazy_float_bytes(view->activations),
                 head_bytes = (size_t)c->head_dim * lazy_float_bytes(view->kv);
    const size_t qkv_bytes = (size_t)lazy_qkv_width(c) * width;
    const struct {
        const void *data; /* (pieces, kv->capacity, bytes) of which each piece has `size` entries */
        size_t bytes;
        int size, pieces;
    } parts[] = {
        [LAZY_VIEW_IN_PLAY] = { state->in_play, sizeof *state->in_play, view->n_in_play, 1 },
        [LAZY_VIEW_ROWS] = { state->rows, sizeof *state->rows, view->n_rows, 1 },
        [LAZY_VIEW_PROTECTED] = { cache->flags, sizeof *cache->flags, view->length, 1 },
        [LAZY_VIEW_PROJECTIONS] = { cache->qkv, qkv_bytes, view->n_rows, 1 },
        [LAZY_VIEW_KEYS] = { kv->k, head_bytes, view->length, c->n_kv_heads },
        [LAZY_VIEW_VALUES] = { kv->v, head_bytes, view->length, c->n_kv_heads },
        [LAZY_VIEW_HIDDEN] = { state->x, (size_t)c->hidden * width, view->n_rows, 1 },
    };
    if ((size_t)part >= sizeof parts / sizeof *parts) return lazy_invalid(err, "a view has no part %d", (int)part);
    if (part == LAZY_VIEW_HIDDEN && state->layer == c->n_layers - 1)
        return lazy_invalid(err, "the last layer has an output for the query token alone");
    if (first < 0 || n < 0 || first > parts[part].size - n)
        return lazy_invalid(err, "%d entries of a view from %d on; this part has %d", n, first, parts[part].size);
    int code = LAZY_OK;
    size_t bytes = parts[part].bytes;
    for (size_t i = 0; i < (size_t)parts[part].pieces && !code; i++)
        code = cache->model->backend->ops->download(cache->stream, (char *)out + i * (size_t)n * bytes,
                                                    (const char *)parts[part].data +
                                                        (i * (size_t)kv->capacity + (size_t)first) * bytes,
                                                    (size_t)n * bytes, err);
    uint8_t *flags = out;
    for (int i = 0; part == LAZY_VIEW_PROTECTED && i < n && !code; i++) flags[i] = flags[i] != LAZY_PRUNABLE;
    return code;
}
