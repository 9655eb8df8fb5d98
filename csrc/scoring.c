/* scoring.c — the layers of a pass that score its tokens, and the scores by which its stages select. */
#include "error.h"
#include "numeric.h"
#include "pass.h"

/* A stage that will keep every token needs no scores, unless a trace shows them or they are remembered. A policy may
 * keep fewer tokens than the stage, and a trace must not change that: it is asked by the stage's own number alone. */
static bool needs_scores(const pass *p, const lazy_stage *stage)
{
    const lazy_pruning *pruning = &p->session->pruning;
    return stage->by_mass || (p->session->traces && !pruning->policy.call) || pruning->memory > 0 ||
           lazy_stage_budget(stage, p->n_prunable, p->n_forced, p->prunable_in_play, 0) < p->prunable_in_play;
}

/* True if layer l is one of the last `layers` up to a stage and sees at least as far as the stage's own layer. Policies
 * and means over layers take all of them. */
static bool counts_for(const pass *p, int l, int stage)
{
    const lazy_pruning *pruning = &p->session->pruning;
    const lazy_layer *layers = p->session->model->layers;
    if (l <= stage - p->schedule.layers || l > stage) return false;
    return pruning->policy.call || pruning->average || layers[l].window >= layers[stage].window;
}

/* True if a stage after layer `first` or above needs the scores of layer l, perhaps with those of other layers. */
static bool scores_from(const pass *p, int l, int first)
{
    const lazy_schedule *schedule = &p->schedule;
    for (int i = 0; i < schedule->n_stages; i++) {
        const lazy_stage *stage = &schedule->stages[i];
        if (first <= stage->layer && counts_for(p, l, stage->layer) && needs_scores(p, stage)) return true;
    }
    return false;
}

bool lazy_scores_layer(const pass *p, int l) { return scores_from(p, l, l); }

static void swap(float **a, float **b)
{
    float *other = *a;
    *a = *b;
    *b = other;
}

/* Where a stage is scored by several layers, puts the scores of layer l together with those of the layers below it: to
 * their mean, or, for the stage, to the largest one. in, out: *scores: (in_play.n,), *spare: (in_play.n,) free. */
static int pool_layers(pass *p, int l, float **scores, float **spare, lazy_error *err)
{
    lazy_cache *cache = p->cache;
    int layers = p->schedule.layers, length = p->length, m = p->in_play.n;
    if (p->session->pruning.average) {
        swap(scores, spare);
        return p->ops->average(p->stream, *scores, *spare, m, l + 1, err);
    }
    if (layers == 1) return LAZY_OK;
    float *own = cache->layer_scores + (size_t)(l % layers) * (size_t)length;
    int code = p->ops->keep_scores(p->stream, own, *scores, p->in_play.positions, m, cache->flags, err);
    if (!lazy_schedule_stage(&p->schedule, l)) return code;
    bool begun = false;
    for (int row = 0, end; row <= l && row < layers && !code; row = end) { /* runs of rows that count, or do not */
        bool count = counts_for(p, l - (l - row) % layers, l);
        for (end = row + 1; end <= l && end < layers && counts_for(p, l - (l - end) % layers, l) == count;) end++;
        if (!count) continue;
        const float *first = cache->layer_scores + (size_t)row * (size_t)length;
        code = p->ops->largest(p->stream, *scores, first, end - row, length, p->in_play.positions, m, begun, err);
        begun = true;
    }
    return code;
}

/* One call of the policy. scores: (in_play.n,) to be written, unless it only observes. */
static int call_policy(pass *p, const lazy_view *view, float *scores, lazy_error *err)
{
    const lazy_policy *policy = &p->session->pruning.policy;
    float *staging = (float *)p->cache->staging; /* unused during the call; has a word for every token */
    if (policy->call(policy->context, view, staging, &p->n_free))
        return lazy_fail(err, LAZY_CANCELLED, "the policy stopped the pass");
    if (view->observes) return LAZY_OK;
    if (p->n_free < -1) return lazy_invalid(err, "the policy keeps %d tokens; it must be -1 or more", p->n_free);
    return p->ops->upload(p->stream, scores, staging, (size_t)p->in_play.n * sizeof *scores, err);
}

/* Calls the policy in layer l: to observe it for a stage above, and for the scores of the layer's own stage, *out. */
static int ask_policy(pass *p, int l, float **out, lazy_error *err)
{
    const lazy_stage *stage = lazy_schedule_stage(&p->schedule, l);
    int window = p->session->model->layers[l].window, code = LAZY_OK;
    lazy_view view = {
        .layer = l,
        .is_prompt = p->is_prompt,
        .observes = true,
        .length = p->length,
        .first_asking = p->first_asking,
        .n_in_play = p->in_play.n,
        .n_rows = p->computed.n,
        .window = window == INT32_MAX ? 0 : window,
        .pass = p,
    };
    if (scores_from(p, l, l + 1)) code = call_policy(p, &view, NULL, err);
    if (code || !stage || !needs_scores(p, stage)) return code;
    view.observes = false;
    view.n_keep = lazy_stage_budget(stage, p->n_prunable, p->n_forced, p->prunable_in_play, 0);
    p->n_free = -1;
    *out = p->cache->scores[0];
    return call_policy(p, &view, *out, err);
}

int lazy_view_copy(const lazy_view *view, lazy_view_part part, int first, int n, void *out, lazy_error *err)
{
    const pass *p = view->pass;
    const lazy_cache *cache = p->cache;
    const lazy_config *c = p->config;
    const lazy_kv *kv = &cache->kv[view->layer];
    const lazy_backend *backend = p->session->model->backend;
    const size_t width = lazy_activation_bytes(backend), head = (size_t)c->head_dim * lazy_float_bytes(backend->kv);
    const struct {
        const void *data; /* (pieces, kv->capacity, bytes); of each piece the first `size` entries are there */
        size_t bytes;
        int size, pieces;
    } parts[] = {
        [LAZY_VIEW_IN_PLAY] = { p->in_play.positions, sizeof(int32_t), view->n_in_play, 1 },
        [LAZY_VIEW_ROWS] = { p->computed.positions, sizeof(int32_t), view->n_rows, 1 },
        [LAZY_VIEW_PROTECTED] = { cache->flags, sizeof *cache->flags, view->length, 1 },
        [LAZY_VIEW_PROJECTIONS] = { cache->qkv, (size_t)lazy_qkv_width(c) * width, view->n_rows, 1 },
        [LAZY_VIEW_KEYS] = { kv->k, head, view->length, c->n_kv_heads },
        [LAZY_VIEW_VALUES] = { kv->v, head, view->length, c->n_kv_heads },
        [LAZY_VIEW_HIDDEN] = { p->x, (size_t)c->hidden * width, view->n_rows, 1 },
    };
    if ((size_t)part >= sizeof parts / sizeof *parts) return lazy_invalid(err, "a view has no part %d", (int)part);
    if (first < 0 || n < 0 || first > parts[part].size - n)
        return lazy_invalid(err, "%d entries of a view from %d on; this part has %d", n, first, parts[part].size);
    int code = LAZY_OK;
    size_t bytes = parts[part].bytes;
    for (size_t i = 0; i < (size_t)parts[part].pieces && !code; i++) {
        const char *from = (const char *)parts[part].data + (i * (size_t)kv->capacity + (size_t)first) * bytes;
        code = p->ops->download(p->stream, (char *)out + i * (size_t)n * bytes, from, (size_t)n * bytes, err);
    }
    uint8_t *flags = out;
    for (int i = 0; part == LAZY_VIEW_PROTECTED && i < n && !code; i++) flags[i] = !lazy_is_free(flags[i]);
    return code;
}

int lazy_score_stage(pass *p, int l, float **out, lazy_error *err)
{
    lazy_cache *cache = p->cache;
    const lazy_pruning *pruning = &p->session->pruning;
    float *scores = cache->scores[0], *spare = cache->scores[1];
    *out = NULL;
    if (!lazy_scores_layer(p, l)) return LAZY_OK;
    if (pruning->policy.call) return ask_policy(p, l, out, err);

    int heavy = l == pruning->head_layer ? pruning->head : -1;
    int code = p->ops->scores(p->stream, scores, &p->attending, pruning->queries, pruning->pooling, heavy,
                              p->first_asking, err);
    if (!code) code = pool_layers(p, l, &scores, &spare, err);
    if (code) return lazy_fail_in(err, code, "scores");
    const lazy_stage *stage = lazy_schedule_stage(&p->schedule, l);
    if (!stage || !needs_scores(p, stage)) return LAZY_OK;
    if (pruning->smooth > 1) {
        code = p->ops->smooth(p->stream, spare, scores, p->in_play.n, pruning->smooth, err);
        swap(&scores, &spare);
    }
    if (!code && pruning->words) {
        code = p->ops->complete(p->stream, spare, scores, p->in_play.positions, p->in_play.n, cache->flags, err);
        swap(&scores, &spare);
    }
    if (code) return lazy_fail_in(err, code, "smoothing");
    *out = scores;
    if (pruning->memory > 0) {
        lazy_remembered *known = &cache->remembered[l];
        int n_known = p->is_prompt ? 0 : known->n;
        bool last = l == p->config->n_layers - 1; /* above which no token waits */
        if (n_known)
            code = p->ops->copy(p->stream, known->fresh, known->scores, (size_t)n_known * sizeof *known->fresh, err);
        if (!code)
            code = p->ops->remember(p->stream, *out,
                                    &(lazy_memory){ .remembered = known->fresh,
                                                    .n_old = n_known,
                                                    .length = p->length,
                                                    .factor = (float)pruning->memory,
                                                    .gain = p->is_prompt ? 1.0f : (float)pruning->gain,
                                                    .depth = cache->depth,
                                                    .waiting = l + 1,
                                                    .revival = p->is_prompt || last ? 1.0f : (float)pruning->revival },
                                    p->in_play.positions, p->in_play.n, err);
        known->n_fresh = p->length;
    }
    return lazy_fail_in(err, code, "remembered scores");
}
