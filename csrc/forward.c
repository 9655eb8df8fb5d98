#include "forward.h"

#include <math.h>
#include <string.h>

#include "error.h"

/* The sets of a pass as it climbs through the layers. */
typedef struct pass {
    lazy_session *session;
    lazy_cache *cache;
    lazy_stream *stream;
    const lazy_ops *ops;
    const lazy_config *config;
    lazy_schedule schedule;
    lazy_outputs outputs;

    int length;               /* tokens of the context, the new ones included */
    int first_new;            /* position of the first new token */
    int n_prunable, n_forced; /* of the whole context */
    int prunable_in_play;

    const int32_t *in_play; /* (m,) A[l] */
    int m;
    const int32_t *rows; /* (n,) C[l]; the very array in_play where every token in play is computed */
    int n;
    int in_play_spare, rows_spare, x_now; /* which of each pair of buffers is free, or in use */
    int first_layer;                      /* since when the sets are what they are, for the trace */
} pass;

static void *offset(const pass *p, void *activations, size_t elements)
{
    return (char *)activations + elements * p->session->model->backend->activation_bytes;
}

static bool computes_all_in_play(const pass *p) { return p->rows == p->in_play; }

/* ---- beginning -------------------------------------------------------------------------- */

/* The n positions from `first` on whose tokens are not gone. */
static int upload_positions(pass *p, int32_t *to, int first, int n, lazy_error *err)
{
    int32_t *positions = p->cache->staging;
    const uint8_t *gone = p->session->tokens.gone;
    for (int i = first, out = 0; out < n; i++)
        if (!gone[i]) positions[out++] = i;
    return p->ops->upload(p->stream, to, positions, (size_t)n * sizeof *positions, err);
}

/* Of the n newest tokens those that are in play. A depth is known of every token, the others' too. */
static int upload_ids(pass *p, const int32_t *ids, int n, lazy_error *err)
{
    int32_t *present = p->cache->staging;
    int out = 0, code = LAZY_OK;
    if (p->n < n) {
        memset(present, 0, (size_t)n * sizeof *present);
        code = p->ops->upload(p->stream, p->cache->depth + p->first_new, present, (size_t)n * sizeof *present, err);
    }
    for (int i = 0; i < n; i++)
        if (!p->session->tokens.gone[p->first_new + i]) present[out++] = ids[i];
    return code ? code : p->ops->upload(p->stream, p->cache->ids, present, (size_t)p->n * sizeof *present, err);
}

static int upload_flags(pass *p, lazy_error *err)
{
    uint8_t *flags = (uint8_t *)p->cache->staging;
    p->n_prunable = lazy_tokens_flag(&p->session->tokens, &p->session->rules.pruning, flags, &p->n_forced);
    p->prunable_in_play = p->n_prunable - p->session->tokens.n_gone; /* only prunable tokens ever go */
    return p->ops->upload(p->stream, p->cache->flags, flags, (size_t)p->length, err);
}

static int upload_notes(pass *p, lazy_error *err)
{
    int32_t *notes = p->cache->staging; /* no bad layer, nothing revived */
    size_t bytes = lazy_n_notes(p->config) * sizeof *notes;
    memset(notes, 0, bytes);
    notes[0] = p->config->n_layers;
    return p->ops->upload(p->stream, p->cache->notes, notes, bytes, err);
}

static int begin(pass *p, const int32_t *ids, int n_new, lazy_error *err)
{
    lazy_cache *cache = p->cache;
    p->m = p->length - p->session->tokens.n_gone;
    p->first_new = p->length - n_new;
    p->n = n_new;
    for (int i = p->first_new; i < p->length; i++) p->n -= p->session->tokens.gone[i];
    p->in_play = cache->in_play[0];
    p->in_play_spare = 1;
    p->rows = p->n == p->m ? p->in_play : cache->rows[0];
    p->rows_spare = 1;

    int code = lazy_cache_fill_rope(cache, p->length, err);
    if (!code) code = upload_notes(p, err);
    if (!code) code = upload_positions(p, cache->in_play[0], 0, p->m, err);
    if (!code && !computes_all_in_play(p)) code = upload_positions(p, cache->rows[0], p->first_new, p->n, err);
    if (!code && p->schedule.n_stages) code = upload_flags(p, err);
    if (!code) code = upload_ids(p, ids, n_new, err);
    /* A frozen pass revives nothing: its rows count as computed throughout, so that only others can be found waiting. */
    int depth = p->schedule.frozen ? p->config->n_layers : 0;
    if (!code) code = p->ops->mark(p->stream, cache->depth, p->rows, p->n, depth, err);
    if (!code) code = p->ops->embed(p->stream, cache->x[0], cache->ids, p->n, &p->session->model->embedding, err);
    return code;
}

/* ---- one layer -------------------------------------------------------------------------- */

/* Attention and FFN of n rows, in place: x += o(attention), x += down(gated(norm(x))). */
static int finish_rows(pass *p, const lazy_layer *w, lazy_kv kv, void *x, const void *qkv, const int32_t *rows, int n, lazy_error *err)
{
    lazy_cache *cache = p->cache;
    const lazy_config *c = p->config;
    size_t d = (size_t)c->hidden;
    int code = p->ops->attention(p->stream, cache->attention, qkv, rows, n, kv, p->in_play, p->m, err);
    if (code) return lazy_fail_in(err, "attention");
    if ((code = p->ops->matmul(p->stream, x, cache->attention, n, &w->o, true, err))) return lazy_fail_in(err, "output projection");

    int chunk = p->session->model->backend->row_chunk;
    for (int first = 0; first < n; first += chunk) {
        int here = n - first < chunk ? n - first : chunk;
        void *part = offset(p, x, (size_t)first * d);
        if ((code = p->ops->rmsnorm(p->stream, cache->normed, part, here, c->hidden, w->ffn_norm, c->norm_eps, err)))
            return lazy_fail_in(err, "FFN norm");
        if ((code = p->ops->gated(p->stream, cache->ffn, cache->normed, here, &w->gate_up, err)))
            return lazy_fail_in(err, "gate and up projection");
        if ((code = p->ops->matmul(p->stream, part, cache->ffn, here, &w->down, true, err))) return lazy_fail_in(err, "down projection");
    }
    return LAZY_OK;
}

static int run_layer(pass *p, int l, lazy_error *err)
{
    lazy_cache *cache = p->cache;
    const lazy_config *c = p->config;
    const lazy_layer *w = &p->session->model->layers[l];
    size_t d = (size_t)c->hidden, width = (size_t)lazy_qkv_width(c);
    void *x = cache->x[p->x_now];
    int code, chunk = p->session->model->backend->row_chunk;

    for (int first = 0; first < p->n; first += chunk) {
        int here = p->n - first < chunk ? p->n - first : chunk;
        if ((code = p->ops->rmsnorm(p->stream, cache->normed, offset(p, x, (size_t)first * d), here, c->hidden, w->attention_norm,
                                    c->norm_eps, err)))
            return lazy_fail_in(err, "attention norm");
        if ((code = p->ops->matmul(p->stream, offset(p, cache->qkv, (size_t)first * width), cache->normed, here, &w->qkv, false, err)))
            return lazy_fail_in(err, "q, k and v projection");
    }
    if ((code = p->ops->rotate(p->stream, cache->qkv, p->rows, p->n, cache->kv[l], cache->rope, w->q_norm, w->k_norm, c->norm_eps, err)))
        return lazy_fail_in(err, "RoPE");

    /* Above the last layer only the query token's output is read, unless every token's own is asked for. */
    int skip = l == c->n_layers - 1 && !p->outputs.surprisal ? p->n - 1 : 0;
    code = finish_rows(p, w, cache->kv[l], offset(p, x, (size_t)skip * d), offset(p, cache->qkv, (size_t)skip * width), p->rows + skip,
                       p->n - skip, err);
    if (code) return code;
    return p->ops->note_finite(p->stream, offset(p, x, (size_t)(p->n - 1) * d), c->hidden, l, cache->notes, err);
}

/* ---- between layers --------------------------------------------------------------------- */

/* A stage that keeps everything costs nothing, unless someone wants to see its scores. */
static bool selects(const pass *p, const lazy_stage *stage)
{
    return stage && (stage->by_mass || p->session->trace.on ||
                     lazy_stage_budget(stage, p->n_prunable, p->n_forced, p->prunable_in_play, 0) < p->prunable_in_play);
}

/* Scores the tokens in play by the layer just run, under permanent pruning by it and all below: the result is in *scores, the
 * other vector is free. */
static int score(pass *p, int l, float **scores, float **spare, lazy_error *err)
{
    lazy_cache *cache = p->cache;
    *scores = cache->scores[0];
    *spare = cache->scores[1];
    int code = p->ops->scores(p->stream, *scores, cache->qkv, p->rows, p->n, p->session->rules.pruning.queries, p->first_new, cache->kv[l],
                              p->in_play, p->m, err);
    if (code || !p->schedule.permanent) return code;
    *scores = cache->scores[1];
    *spare = cache->scores[0];
    return p->ops->average(p->stream, *scores, *spare, p->m, l + 1, err);
}

static int smooth(pass *p, float **scores, float *spare, lazy_error *err)
{
    int width = p->session->rules.pruning.smooth;
    if (width == 1) return LAZY_OK;
    int code = p->ops->smooth(p->stream, spare, *scores, p->m, width, err);
    *scores = spare;
    return code;
}

/* A[l+1] after a stage. Leaves the old set in the other buffer. */
static int select_in_play(pass *p, const lazy_stage *stage, const float *scores, lazy_error *err)
{
    lazy_cache *cache = p->cache;
    int code, by_mass = 0;
    if (stage->by_mass) {
        if ((code = p->ops->mass(p->stream, &by_mass, p->in_play, scores, p->m, cache->flags, stage->mass, err))) return code;
        by_mass += p->n_forced;
    }
    int budget = lazy_stage_budget(stage, p->n_prunable, p->n_forced, p->prunable_in_play, by_mass);
    if (budget == p->prunable_in_play) return LAZY_OK;

    int32_t *kept = cache->in_play[p->in_play_spare];
    if ((code = p->ops->select(p->stream, kept, p->in_play, scores, p->m, cache->flags, budget - p->n_forced, err))) return code;
    p->m -= p->prunable_in_play - budget;
    p->prunable_in_play = budget;
    p->in_play = kept;
    p->in_play_spare ^= 1;
    return LAZY_OK;
}

/* C[l] = { i in A[l] : layer l has no K,V of i }: rows that go on and rows that come back from Aux. */
static int regroup(pass *p, int l, bool all_in_play, lazy_error *err)
{
    lazy_cache *cache = p->cache;
    const int32_t *new_rows = p->in_play;
    int n_new = p->m, code;
    if ((code = p->ops->mark(p->stream, cache->depth, p->rows, p->n, l, err))) return code;
    if (!all_in_play) {
        int32_t *out = cache->rows[p->rows_spare];
        if ((code = p->ops->filter(p->stream, out, &n_new, p->in_play, p->m, cache->depth, l, l, err))) return code;
        new_rows = out;
        p->rows_spare ^= 1;
    }
    void *x = cache->x[p->x_now ^ 1];
    code = p->ops->regroup(p->stream, x, new_rows, n_new, cache->x[p->x_now], p->rows, p->n, cache->aux, p->config->hidden,
                           cache->notes + 1 + l, err);
    p->x_now ^= 1;
    p->rows = new_rows;
    p->n = n_new;
    return code;
}

/* A frozen pass: of the tokens in play, those whose K,V layer l holds (the rows under way count as such). */
static int thaw(pass *p, int l, lazy_error *err)
{
    int32_t *out = p->cache->in_play[p->in_play_spare];
    bool all_in_play = computes_all_in_play(p);
    int code = p->ops->filter(p->stream, out, &p->m, p->in_play, p->m, p->cache->depth, l + 1, p->config->n_layers, err);
    p->in_play = out;
    p->in_play_spare ^= 1;
    if (all_in_play) p->rows = p->in_play;
    return code;
}

/* From layer l to layer l+1: prunes, revives. */
static int climb(pass *p, int l, lazy_error *err)
{
    lazy_session *session = p->session;
    const lazy_stage *stage = lazy_schedule_stage(&p->schedule, l), *scored = lazy_schedule_scored(&p->schedule, l);
    bool waiting = session->waiting[l + 1], last = l == p->config->n_layers - 1;
    float *scores = NULL, *spare;
    int code;
    if (selects(p, scored) && (code = score(p, l, &scores, &spare, err))) return lazy_fail_in(err, "scores");
    if (!stage && !waiting && !last) return LAZY_OK;

    const int32_t *in_play = p->in_play;
    int m = p->m;
    bool all_in_play = computes_all_in_play(p);
    if (stage && scores) {
        if ((code = smooth(p, &scores, spare, err))) return lazy_fail_in(err, "smoothing");
        if ((code = select_in_play(p, stage, scores, err))) return lazy_fail_in(err, "selection");
    }
    if (stage || last || waiting) {
        code = lazy_trace_add(&session->trace, p->stream, p->first_layer, l, in_play, m, p->rows, p->n, scores, err);
        if (code) return code;
        p->first_layer = l + 1;
    }
    if (last) return LAZY_OK;
    if (p->schedule.frozen) return thaw(p, l + 1, err);
    if (p->m == m && (all_in_play || !waiting)) return LAZY_OK;
    if (p->m < m && !p->schedule.permanent) session->waiting[l + 1] = 1;
    return regroup(p, l + 1, all_in_play, err);
}

/* ---- the end ---------------------------------------------------------------------------- */

/* -ln p of every new token, with the LM head on some rows at a time. The first one is told by the pass before, if any. */
static int find_surprisal(pass *p, lazy_error *err)
{
    lazy_cache *cache = p->cache;
    const lazy_model *model = p->session->model;
    const lazy_outputs *out = &p->outputs;
    int vocab = p->config->vocab, first_known = p->first_new ? 0 : 1, code = LAZY_OK;
    float *surprisal = cache->scores[0]; /* nothing is scored where nothing is dropped */
    if (p->first_new) code = p->ops->surprisal(p->stream, surprisal, cache->logits, 1, vocab, cache->ids, err);
    for (int first = 0; first < p->n - 1 && !code; first += out->head_rows) {
        int here = p->n - 1 - first < out->head_rows ? p->n - 1 - first : out->head_rows;
        const void *x = offset(p, cache->x[p->x_now], (size_t)first * (size_t)p->config->hidden);
        code = p->ops->rmsnorm(p->stream, cache->normed, x, here, p->config->hidden, model->final_norm, p->config->norm_eps, err);
        if (!code) code = p->ops->logits(p->stream, out->head, cache->normed, here, &model->head, err);
        if (!code) code = p->ops->surprisal(p->stream, surprisal + first + 1, out->head, here, vocab, cache->ids + first + 1, err);
    }
    out->surprisal[0] = NAN;
    if (!code && first_known < p->n)
        code = p->ops->download(p->stream, out->surprisal + first_known, surprisal + first_known,
                                (size_t)(p->n - first_known) * sizeof *surprisal, err);
    for (int i = first_known; i < p->n && !code; i++)
        if (!isfinite(out->surprisal[i]))
            code = lazy_fail(err, LAZY_CHECKPOINT,
                             "the surprisal of token %d is no finite number: the final norm or the LM head is damaged", i);
    return code;
}

/* What permanent pruning has left in play is what there is from now on. */
static int forget_dropped(pass *p, lazy_error *err)
{
    lazy_tokens *tokens = &p->session->tokens;
    if (!p->schedule.permanent || p->m == tokens->length - tokens->n_gone) return LAZY_OK;
    int code = p->ops->download(p->stream, p->cache->staging, p->in_play, (size_t)p->m * sizeof *p->in_play, err);
    if (!code) lazy_tokens_keep(tokens, p->cache->staging, p->m);
    return code;
}

static int refuse_logit(int id, lazy_error *err)
{
    return lazy_fail(err, LAZY_CHECKPOINT, "the logit of token %d is no finite number: the final norm or the LM head is damaged", id);
}

static int check_logits(const float *logits, int vocab, lazy_error *err)
{
    for (int i = 0; i < vocab; i++)
        if (!isfinite(logits[i])) return refuse_logit(i, err);
    return LAZY_OK;
}

static int finish(pass *p, lazy_error *err)
{
    lazy_session *session = p->session;
    lazy_cache *cache = p->cache;
    const lazy_config *c = p->config;
    const lazy_model *model = session->model;
    const int32_t *notes = cache->staging;
    float *logits = p->outputs.logits;
    int32_t *best = p->outputs.best;
    int code = p->ops->mark(p->stream, cache->depth, p->rows, p->n, c->n_layers, err);
    if (!code && p->outputs.surprisal) code = find_surprisal(p, err);
    const void *last = offset(p, cache->x[p->x_now], (size_t)(p->n - 1) * (size_t)c->hidden);
    if (!code) code = p->ops->rmsnorm(p->stream, cache->normed, last, 1, c->hidden, model->final_norm, c->norm_eps, err);
    if (!code) code = p->ops->logits(p->stream, cache->logits, cache->normed, 1, &model->head, err);
    if (!code && logits) code = p->ops->download(p->stream, logits, cache->logits, (size_t)c->vocab * sizeof *logits, err);
    if (!code && best) code = p->ops->argmax(p->stream, cache->notes + 1 + c->n_layers, cache->logits, c->vocab, err);
    if (!code) code = p->ops->download(p->stream, session->tokens.depths, cache->depth, (size_t)p->length * sizeof(int32_t), err);
    if (!code) code = p->ops->download(p->stream, cache->staging, cache->notes, lazy_n_notes(c) * sizeof *notes, err);
    if (code) return code;

    if (notes[0] < c->n_layers)
        return lazy_fail(err, LAZY_CHECKPOINT,
                         "layer %d gave a value that is no finite number: its weights, or those before it, are damaged", notes[0]);
    if (logits && (code = check_logits(logits, c->vocab, err))) return code;
    if (best && (*best = notes[1 + c->n_layers]) < 0) return refuse_logit(-1 - *best, err);
    for (int l = 0; l < c->n_layers; l++) session->counts[l].revived = notes[1 + l];
    return forget_dropped(p, err);
}

int lazy_forward(lazy_session *session, const int32_t *ids, int n, bool generated, lazy_outputs outputs, lazy_error *err)
{
    int length = session->tokens.length;
    pass p = {
        .session = session,
        .cache = &session->cache,
        .stream = session->cache.stream,
        .ops = session->model->backend->ops,
        .config = &session->model->config,
        .schedule = lazy_rules_schedule(&session->rules, generated, length),
        .outputs = outputs,
        .length = length,
    };
    lazy_trace_clear(&session->trace);
    int code = begin(&p, ids, n, err);
    if (code) return lazy_fail_in(err, "before the first layer");
    for (int l = 0; l < p.config->n_layers; l++) {
        session->counts[l] = (lazy_layer_count){ .in_play = p.m, .computed = p.n };
        if ((code = run_layer(&p, l, err))) return lazy_fail_in(err, "layer %d", l);
        p.stream->layers_done = l + 1;
        const lazy_watch *watch = p.stream->watch;
        if (watch && watch->poll(watch->context, l + 1, p.config->n_layers))
            return lazy_fail(err, LAZY_CANCELLED, "stopped after layer %d", l);
        if ((code = climb(&p, l, err))) return lazy_fail_in(err, "after layer %d", l);
    }
    return finish(&p, err);
}
