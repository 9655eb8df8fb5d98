#include <math.h>
#include <string.h>

#include "error.h"
#include "format.h"
#include "memory.h"
#include "numeric.h"
#include "pass.h"

/* The one of two buffers that does not hold the set. */
static int32_t *room_beside(int32_t *const buffers[2], set s) { return buffers[s.positions == buffers[0]]; }

static set tail_of(set s, int n) { return (set){ s.positions + s.n - n, n }; }

/* ---- beginning -------------------------------------------------------------------------- */

/* The place in the staging room for `part`, an address in what lazy_cache_lay_out has laid out. */
static void *staged(const pass *p, const void *part)
{
    return p->cache->staging + ((const char *)part - (const char *)p->cache->gone);
}

static int begin(pass *p, lazy_error *err)
{
    lazy_cache *cache = p->cache;
    const lazy_session *session = p->session;
    const lazy_tokens *tokens = &session->tokens;
    int n_layers = p->config->n_layers, n_new = p->request->n, n_in_play = 0;
    size_t length = (size_t)p->length;
    p->first_new = p->length - n_new;
    p->first_asking = p->is_prompt ? lazy_tokens_prompt_begin(tokens, p->first_new) : p->first_new;
    lazy_cache_lay_out(cache, p->length, n_new);

    int32_t *notes = staged(p, cache->notes), *depth = staged(p, cache->depth), *ids = staged(p, cache->ids),
            *in_play = staged(p, cache->in_play[0]), *begin = cache->notes;
    uint8_t *end = cache->flags;
    memset(notes, 0, lazy_n_notes(p->config) * sizeof *notes);
    notes[0] = n_layers; /* no bad layer */
    memcpy(depth, tokens->depths, length * sizeof *depth);
    memcpy(ids, tokens->ids + p->first_new, (size_t)n_new * sizeof *ids);
    for (int i = 0; i < p->length; i++)
        if (!tokens->gone[i]) in_play[n_in_play++] = i;
    /* A frozen pass revives nothing. Its rows are marked as computed in all layers, so that mask_uncached keeps them */
    for (int i = p->first_new; i < p->length && p->schedule.frozen; i++) depth[i] = n_layers;
    if (p->schedule.n_stages) {
        p->n_prunable = lazy_tokens_flag(tokens, &session->pruning, session->model->word_parts, staged(p, end),
                                         &p->prunable_in_play, &p->n_forced);
        end += length;
    }
    if (lazy_rules_drop_for_good(&session->pruning, n_layers)) {
        begin = cache->gone;
        memset(staged(p, begin), 0, length * sizeof *begin); /* all of it is read back */
    }
    p->in_play = (set){ cache->in_play[0], n_in_play };
    p->computed = tail_of(p->in_play, n_new);
    p->x = cache->x[0];
    p->x_next = cache->x[1];
    int code = p->ops->upload(p->stream, begin, staged(p, begin), (size_t)((char *)end - (char *)begin), err);
    return code ? code : p->ops->embed(p->stream, p->x, cache->ids, n_new, &session->model->embedding, err);
}

/* ---- one layer -------------------------------------------------------------------------- */

/* y (+)= the norm of x. x, y: (n, d) */
static int norm_rows(pass *p, void *y, const void *x, int n, const float *weight, bool accumulate, lazy_error *err)
{
    return p->ops->rmsnorm(p->stream, y, x, n, p->config->hidden, weight, p->config->norm_eps, accumulate, err);
}

/* x += y W^T, or the experts' output for y if w is NULL; with post_norm, the norm of that. x: (n, d), y: (n, cols) */
static int add_product(pass *p, void *x, const void *y, int n, const lazy_matrix *w, const lazy_experts *experts,
                       const float *post_norm, lazy_error *err)
{
    void *to = post_norm ? p->x_next : x; /* (capacity, d), free within a layer */
    int code = w ? p->ops->matmul(p->stream, to, y, n, w, !post_norm, err)
                 : p->ops->mix_experts(p->stream, to, y, n, experts, !post_norm, err);
    return code || !post_norm ? code : norm_rows(p, x, to, n, post_norm, true, err);
}

/* The FFN of n rows: x += down(gated(norm(x))), or the experts' output in place of down(gated(…)). norm: NULL if the
 * FFN reads x itself. With w->ffn_post_norm its output is normed before it is added. */
static int add_ffn(pass *p, void *rows, int n, const lazy_layer *w, const float *norm, lazy_error *err)
{
    void *normed = p->cache->normed, *gated = p->cache->ffn;
    for (int first = 0, here, code = LAZY_OK; first < n; first += here) {
        here = even_part(n - first, p->session->model->backend->row_chunk);
        void *x = row_of(p, rows, first, p->config->hidden), *y = norm ? normed : x;
        if (norm && (code = norm_rows(p, normed, x, here, norm, false, err)))
            return lazy_fail_in(err, code, "FFN norm");
        if (w->experts.gate_up) {
            code = add_product(p, x, y, here, NULL, &w->experts, w->ffn_post_norm, err);
            if (code) return lazy_fail_in(err, code, "experts");
            continue;
        }
        if ((code = p->ops->gated(p->stream, gated, y, here, &w->gate_up, err)))
            return lazy_fail_in(err, code, "gate and up projection");
        if ((code = add_product(p, x, gated, here, &w->down, NULL, w->ffn_post_norm, err)))
            return lazy_fail_in(err, code, "down projection");
    }
    return LAZY_OK;
}

/* True if layer l computes a part of a prompt that is read in parts: its sums then have the order of the whole
 * prompt's. The layers above the first stage compute the rows of the whole prompt at once. */
static bool computes_part(const pass *p, int l)
{
    return (p->request->reads || p->first_asking < p->first_new) &&
           l < lazy_rules_layers_before_pruning(&p->session->pruning, p->config->n_layers);
}

static lazy_matrix rows_of(const lazy_matrix *w, int first, int n)
{
    lazy_matrix rows = { .rows = n, .cols = w->cols, .bias = w->bias ? w->bias + first : NULL };
    for (int i = 0; i < w->n_parts; first -= w->part[i++].rows) {
        const lazy_part *part = &w->part[i];
        int begin = clamp_int(first, 0, part->rows), end = clamp_int(first + n, 0, part->rows);
        const char *data = (const char *)part->data + (size_t)begin * lazy_row_bytes(part->dtype, w->cols);
        if (begin < end) rows.part[rows.n_parts++] = (lazy_part){ data, end - begin, part->dtype };
    }
    return rows;
}

typedef enum projection { QUERIES, KEYS_AND_VALUES, ALL_THREE } projection;

/* Computes q, or k and v, or all three of these rows of layer l from the norms of x into cache->qkv, rotates q and k,
 * and stores k and v in the cache: without q they need no more room than row_chunk rows, and none afterwards. x:
 * (rows.n, d). A NaN or Inf in x is noted as one of the layer `source`; -1: x is not checked. */
static int project(pass *p, int l, projection what, void *x, set rows, int source, lazy_error *err)
{
    const lazy_config *c = p->config;
    const lazy_cache *cache = p->cache;
    const lazy_layer *layer = &p->session->model->layers[l];
    const int q_width = lazy_q_width(c), begin = what == KEYS_AND_VALUES ? q_width : 0,
              end = what == QUERIES ? q_width : lazy_qkv_width(c),
              rope = c->layer_rope[l] + (p->length > c->short_context);
    const lazy_matrix w = rows_of(&layer->qkv, begin, end - begin);
    /* a layer without this norm checks x by another one, whose output is not used */
    const float *norm = layer->attention_norm ? layer->attention_norm : layer->attention_post_norm;
    for (int first = 0, here; first < rows.n; first += here) {
        here = even_part(rows.n - first, p->session->model->backend->row_chunk);
        void *part = row_of(p, x, first, c->hidden), *from = layer->attention_norm ? cache->normed : part,
             *q = what == KEYS_AND_VALUES ? NULL : row_of(p, cache->qkv, first, w.rows),
             *kv = what == QUERIES ? NULL
                   : q             ? row_of(p, q, 1, q_width)
                                   : cache->qkv;
        int code = LAZY_OK;
        if (source >= 0)
            code = p->ops->checked_rmsnorm(p->stream, cache->normed, part, here, c->hidden, norm, c->norm_eps, source,
                                           cache->notes, err);
        else if (layer->attention_norm) code = norm_rows(p, cache->normed, part, here, norm, false, err);
        if (code) return lazy_fail_in(err, code, "attention norm");
        code = p->ops->matmul(p->stream, q ? q : kv, from, here, &w, false, err);
        if (code) return lazy_fail_in(err, code, "q, k and v projection");
        code = p->ops->rotate(p->stream, q, kv, w.rows, rows.positions + first, here, cache->kv[l],
                              cache->rope->of_q[rope], cache->rope->of_k[rope], layer->q_norm, layer->k_norm,
                              c->norm_eps, err);
        if (code) return lazy_fail_in(err, code, "RoPE");
    }
    return LAZY_OK;
}

/* Computes the queries of these rows of layer l, which attend next. x: (rows.n, d) */
static int find_queries(pass *p, int l, void *x, set rows, lazy_error *err)
{
    p->attending.q = p->cache->qkv;
    p->attending.q_stride = lazy_q_width(p->config);
    p->attending.rows = rows.positions;
    p->attending.n = rows.n;
    return project(p, l, QUERIES, x, rows, -1, err);
}

/* Step 1 of layer l: keys and values of C[l]. Queries too, unless there is no room for all, or a stage of a prompt's
 * pass follows: then only of the rows that score, and in the last layer, so that the last row has the bits that it has
 * in a prompt read in parts. A pass over at most LAZY_PART_ROWS generated or revived tokens attends at once where it
 * scores, so that scores can use its products. */
static int begin_layer(pass *p, int l, lazy_error *err)
{
    const int n = p->computed.n;
    const set asking = tail_of(p->computed, min_int(n, p->session->pruning.queries));
    const bool scored = lazy_scores_layer(p, l) && !p->session->pruning.policy.call, fits = n <= p->cache->qkv_rows,
               all = fits && (!scored || !p->is_prompt || !lazy_schedule_stage(&p->schedule, l) || asking.n == n);
    p->attending = (lazy_attending){ .q = p->cache->qkv,
                                     .q_stride = lazy_qkv_width(p->config),
                                     .rows = p->computed.positions,
                                     .n = all ? n : 0,
                                     .kv = p->cache->kv[l],
                                     .in_play = p->in_play.positions,
                                     .m = p->in_play.n,
                                     .window = p->session->model->layers[l].window };
    p->attended = scored && !p->is_prompt && n <= LAZY_PART_ROWS;
    p->stream->many_rows = computes_part(p, l);
    /* a damaged embedding counts as layer 0's */
    int code = project(p, l, all ? ALL_THREE : KEYS_AND_VALUES, p->x, p->computed, max_int(l - 1, 0), err);
    if (!code && !all && (scored || l == p->config->n_layers - 1)) {
        p->stream->many_rows = true; /* as in a prompt read in parts, whose last part may have these rows alone */
        void *x = row_of(p, p->x, n - asking.n, p->config->hidden);
        code = find_queries(p, l, x, asking, err);
    }
    if (code || !p->attended) return code;
    p->stream->scores_follow = true;
    code = p->ops->attention(p->stream, p->cache->attention, &p->attending, err);
    p->stream->scores_follow = false;
    return lazy_fail_in(err, code, "attention");
}

/* Attention and FFN of n rows, at most LAZY_PART_ROWS, in place: x += o(attention), then x += down(gated(norm(x))), or
 * without norms before x += norm(down(gated(x))); in parallel layers FFN and attention have the same input. attends:
 * the rows' attention is not there yet. */
static int end_rows(pass *p, int l, void *x, int n, bool attends, lazy_error *err)
{
    const lazy_layer *w = &p->session->model->layers[l];
    void *attention = p->cache->attention;
    int code = attends ? p->ops->attention(p->stream, attention, &p->attending, err) : LAZY_OK;
    if (code) return lazy_fail_in(err, code, "attention");
    if (p->config->parallel && (code = add_ffn(p, x, n, w, w->attention_norm, err))) return code;
    code = add_product(p, x, attention, n, &w->o, NULL, w->attention_post_norm, err);
    if (code || p->config->parallel) return lazy_fail_in(err, code, "output projection");
    return add_ffn(p, x, n, w, w->ffn_norm, err);
}

/* Step 3 of layer l, for C[l+1]. */
static int end_layer(pass *p, int l, lazy_error *err)
{
    const lazy_attending begun = p->attending;
    const set rows = p->computed;
    int skipped = begun.n - rows.n;
    bool has_queries = !p->regrouped && skipped >= 0, attends = !p->attended || !has_queries || skipped;
    p->stream->many_rows = computes_part(p, l + 1);
    for (int first = 0, here, code; first < rows.n; first += here) {
        here = even_part(rows.n - first, LAZY_PART_ROWS);
        const set part = { rows.positions + first, here };
        void *x = row_of(p, p->x, first, p->config->hidden);
        if (has_queries) {
            p->attending.q = row_of(p, (void *)begun.q, skipped + first, begun.q_stride);
            p->attending.rows = part.positions;
            p->attending.n = here;
        } else if ((code = find_queries(p, l, x, part, err))) return code;
        if ((code = end_rows(p, l, x, here, attends, err))) return code;
    }
    return LAZY_OK;
}

/* ---- in the middle of a layer ----------------------------------------------------------- */

/* A[l+1]: the tokens in play that the stage after layer l keeps. */
static int prune(pass *p, const lazy_stage *stage, const float *scores, lazy_error *err)
{
    const uint8_t *flags = p->cache->flags;
    const set before = p->in_play;
    int32_t *kept = room_beside(p->cache->in_play, before), *gone = p->cache->gone;
    int code = LAZY_OK, by_mass = 0;
    if (stage->by_mass) {
        code = p->ops->mass(p->stream, &by_mass, before.positions, scores, before.n, flags, stage->mass, err);
        if (code) return lazy_fail_in(err, code, "selection");
        by_mass += p->n_forced;
    }
    int budget = lazy_stage_budget(stage, p->n_prunable, p->n_forced, p->prunable_in_play, by_mass);
    if (p->n_free >= 0) budget = p->n_forced + min_int(p->n_free, p->prunable_in_play - p->n_forced);
    if (budget == p->prunable_in_play) return LAZY_OK;

    code = p->ops->select(p->stream, kept, before.positions, scores, before.n, flags, budget - p->n_forced, err);
    int n_dropped = p->prunable_in_play - budget;
    p->in_play = (set){ kept, before.n - n_dropped };
    p->prunable_in_play = budget;
    if (!code && stage->for_good) {
        code = p->ops->mark(p->stream, gone, before.positions, before.n, 1, err);
        if (!code) code = p->ops->mark(p->stream, gone, kept, p->in_play.n, 0, err);
        p->n_newly_gone += n_dropped;
    }
    return lazy_fail_in(err, code, "selection");
}

/* How many tokens that are not gone had a depth from low to high when the pass began. */
static int count_depths(const pass *p, int low, int high)
{
    const lazy_tokens *tokens = &p->session->tokens;
    int n = 0;
    for (int i = 0; i < p->length; i++) n += !tokens->gone[i] && tokens->depths[i] >= low && tokens->depths[i] <= high;
    return n;
}

/* C[l] = the tokens of A[l] whose K,V layer l does not hold: those of C[l-1] that stay, and of the n_waiting in Aux
 * those in A[l]. The rest of C[l-1] leaves its inputs of layer l-1 in Aux, or is gone. before: A[l-1]. */
static int revive(pass *p, int l, set before, int n_waiting, bool for_good, lazy_error *err)
{
    lazy_cache *cache = p->cache;
    const set rows = p->computed;
    bool pruned = p->in_play.n < before.n, computed_all = rows.n == before.n,
         whole = p->in_play.n == p->length - p->session->tokens.n_gone;
    if (!pruned && (computed_all || !n_waiting)) return LAZY_OK;
    void *aux = for_good && !n_waiting ? NULL : cache->aux[l];

    int code = p->ops->mark(p->stream, cache->depth, rows.positions, rows.n, l, err);
    p->computed = p->in_play;
    if (!code && !computed_all) {
        int32_t *waiting = room_beside(cache->rows, rows);
        int n = rows.n + n_waiting; /* if all of them are in play */
        code = p->ops->filter(p->stream, waiting, whole ? NULL : &n, p->in_play.positions, p->in_play.n, cache->depth,
                              l, l, err);
        if (n < p->in_play.n) p->computed = (set){ waiting, n }; /* else it is all of A[l] */
    }
    if (code || (rows.n == 1 && p->computed.n == 1)) return code; /* the query token, before and after */
    p->regrouped = true;
    code = p->ops->regroup(p->stream, p->x_next, p->computed.positions, p->computed.n, p->x, rows.positions, rows.n,
                           aux, p->config->hidden, cache->notes + 1 + l, err);
    void *x = p->x;
    p->x = p->x_next;
    p->x_next = x;
    return code;
}

/* A frozen pass: takes the tokens whose K,V layer l does not hold out of play. The rows under way stay. */
static int mask_uncached(pass *p, int l, lazy_error *err)
{
    int32_t *held = room_beside(p->cache->in_play, p->in_play);
    int n_layers = p->config->n_layers, n = count_depths(p, l + 1, n_layers) + p->computed.n;
    int code = p->ops->filter(p->stream, held, NULL, p->in_play.positions, p->in_play.n, p->cache->depth, l + 1,
                              n_layers, err);
    if (code) return code;
    p->in_play = (set){ held, n };
    p->computed = tail_of(p->in_play, p->computed.n);
    return LAZY_OK;
}

/* C[L], for which the last layer ends: the query token, or all of C[L-1] if every token's surprisal is wanted. */
static int keep_query(pass *p, lazy_error *err)
{
    const set rows = p->computed;
    if (!p->request->surprisal) {
        p->computed = tail_of(rows, 1);
        p->x = row_of(p, p->x, rows.n - 1, p->config->hidden);
    }
    return p->ops->mark(p->stream, p->cache->depth, rows.positions, rows.n, p->config->n_layers, err);
}

/* Copies the sets of the layers since the last run, up to layer l, from the backend; scores may be NULL. */
static int trace(pass *p, int l, set in_play, const float *scores, lazy_error *err)
{
    lazy_report *report = &p->session->under_way;
    int first_layer = p->trace_first, n = in_play.n, n_computed = p->computed.n;
    p->trace_first = l + 1;
    if (!report->traced) return LAZY_OK;
    int32_t *memory;
    int code = lazy_alloc(&memory, 2 * (size_t)n + (size_t)n_computed, "the trace", err);
    if (code) return code;
    float *to = scores ? (float *)(memory + n + n_computed) : NULL;
    report->runs[report->n_runs++] = (lazy_trace_run){ first_layer, l, n, n_computed, memory, memory + n, to };
    code = p->ops->download(p->stream, memory, in_play.positions, (size_t)n * sizeof *memory, err);
    if (!code)
        code = p->ops->download(p->stream, memory + n, p->computed.positions, (size_t)n_computed * sizeof *memory, err);
    return code || !scores ? code : p->ops->download(p->stream, to, scores, (size_t)n * sizeof *to, err);
}

/* Turns the sets of layer l into those of layer l+1, which differ after a stage, and where tokens may wait in Aux. */
static int prune_and_revive(pass *p, int l, lazy_error *err)
{
    const lazy_stage *stage = lazy_schedule_stage(&p->schedule, l);
    const set before = p->in_play;
    bool last = l == p->config->n_layers - 1;
    int n_waiting = !last && p->cache->aux[l + 1] ? count_depths(p, l + 1, l + 1) : 0;
    float *scores;
    int code = lazy_score_stage(p, l, &scores, err);
    if (code || (!stage && !n_waiting && !last)) return code;

    if (scores && (code = prune(p, stage, scores, err))) return code;
    if ((code = trace(p, l, before, scores, err))) return code;
    if (last) return keep_query(p, err);
    return p->schedule.frozen ? mask_uncached(p, l + 1, err)
                              : revive(p, l + 1, before, n_waiting, stage && stage->for_good, err);
}

/* ---- the end ---------------------------------------------------------------------------- */

static int refuse_head(const char *what, int token, lazy_error *err)
{
    return lazy_fail(err, LAZY_CHECKPOINT,
                     "the %s of token %d is no finite number: the final norm or the LM head is damaged", what, token);
}

/* surprisal[i + 1] = -ln p of new token i + 1, from row i; the LM head computes some rows at a time. */
static int surprise_rows(pass *p, float *surprisal, lazy_error *err)
{
    enum { LOGITS_AT_ONCE = 1 << 24 }; /* 64 MiB of logits */
    const lazy_model *model = p->session->model;
    lazy_backend *backend = p->stream->backend;
    const int32_t *ids = p->cache->ids;
    void *normed = p->cache->normed, *logits = NULL;
    int n = p->computed.n - 1, vocab = p->config->vocab,
        most = clamp_int(min_int(backend->row_chunk, LOGITS_AT_ONCE / vocab), 1, p->computed.n);
    size_t bytes = (size_t)most * (size_t)vocab * sizeof(float);
    int code = p->ops->alloc(backend, &logits, bytes, "logits of many rows", err);
    for (int first = 0, here; first < n && !code; first += here) {
        here = min_int(most, n - first);
        code = norm_rows(p, normed, row_of(p, p->x, first, p->config->hidden), here, model->final_norm, false, err);
        if (!code) code = p->ops->logits(p->stream, logits, normed, here, &model->head, err);
        if (!code)
            code = p->ops->surprisal(p->stream, surprisal + first + 1, logits, here, vocab, ids + first + 1, err);
    }
    p->ops->free(backend, logits);
    return code;
}

/* -ln p of every new token. The first one is predicted by the last logits of the pass before, if there was one. */
static int find_surprisal(pass *p, lazy_error *err)
{
    lazy_cache *cache = p->cache;
    float *out = p->request->surprisal, *surprisal = cache->scores[0]; /* free: no pass that prunes gets here */
    int n = p->computed.n, vocab = p->config->vocab, first = cache->has_logits ? 0 : 1;
    int code = surprise_rows(p, surprisal, err);
    if (!code && !first)
        code = p->ops->copy(p->stream, cache->fresh_logits, cache->logits, (size_t)vocab * sizeof *cache->logits, err);
    if (!code && !first) code = p->ops->surprisal(p->stream, surprisal, cache->fresh_logits, 1, vocab, cache->ids, err);
    out[0] = NAN;
    if (!code && first < n)
        code = p->ops->download(p->stream, out + first, surprisal + first, (size_t)(n - first) * sizeof *out, err);
    for (int i = first; i < n && !code; i++)
        if (!isfinite(out[i])) code = refuse_head("surprisal", i, err);
    return code;
}

/* Makes the results of the pass, which read_back has left in the staging room, the session's state. */
static void commit(pass *p)
{
    lazy_session *session = p->session;
    lazy_cache *cache = p->cache;
    lazy_tokens_commit(&session->tokens, p->request->reads ? 0 : p->first_new, staged(p, cache->depth),
                       p->n_newly_gone ? staged(p, cache->gone) : NULL);
    for (int i = 0; i < session->model->n_places; i++) lazy_cache_commit(&session->caches[i]);
    lazy_report outdated = session->last;
    session->last = session->under_way;
    session->under_way = outdated;
}

static int refuse_layer(int layer, lazy_error *err)
{
    return lazy_fail(err, LAZY_CHECKPOINT,
                     "layer %d gave a value that is no finite number: its weights, or those before it, are damaged",
                     layer);
}

/* Downloads the results of the pass to the staging room and checks them: no layer has noted a NaN or Inf, and the files
 * of the weights have not changed. */
static int read_back(pass *p, lazy_error *err)
{
    const lazy_cache *cache = p->cache;
    const int32_t *notes = staged(p, cache->notes), *begin = p->n_newly_gone ? cache->gone : cache->notes;
    int n_layers = p->config->n_layers, code = LAZY_OK;
    for (const lazy_cache *before = p->session->caches; before < cache && !code; before++) /* what it has to report */
        code = p->ops->download(before->stream, staged(p, begin), before->notes, sizeof *begin, err);
    if (!code)
        code = p->ops->download(p->stream, staged(p, begin), begin,
                                (size_t)(cache->depth + p->length - begin) * sizeof *begin, err);
    if (!code) code = lazy_model_check(p->session->model, err);
    if (code) return code;
    if (notes[0] < n_layers) return refuse_layer(notes[0], err);
    for (int l = 0; l < n_layers; l++) p->session->under_way.counts[l].revived = notes[1 + l];
    return LAZY_OK;
}

/* An error about scores gives way to one that names the layer, if a layer has noted a NaN or Inf. */
static int blame_layer(pass *p, int code, lazy_error *err)
{
    int32_t first_bad;
    if (code != LAZY_CHECKPOINT || p->ops->download(p->stream, &first_bad, p->cache->notes, sizeof first_bad, NULL) ||
        first_bad == p->config->n_layers)
        return code;
    if (err) *err = (lazy_error){ 0 };
    return refuse_layer(first_bad, err);
}

static int finish(pass *p, lazy_error *err)
{
    lazy_cache *cache = p->cache;
    const lazy_config *c = p->config;
    const lazy_model *model = p->session->model;
    float *logits = p->request->logits;
    int code = p->request->surprisal ? find_surprisal(p, err) : LAZY_OK;
    const void *last = row_of(p, p->x, p->computed.n - 1, c->hidden);
    if (!code)
        code = p->ops->checked_rmsnorm(p->stream, cache->normed, last, 1, c->hidden, model->final_norm, c->norm_eps,
                                       c->n_layers - 1, cache->notes, err);
    if (!code) code = p->ops->logits(p->stream, cache->fresh_logits, cache->normed, 1, &model->head, err);
    if (!code) code = p->ops->argmax(p->stream, cache->notes + 1 + c->n_layers, cache->fresh_logits, c->vocab, err);
    if (!code && logits)
        code = p->ops->download(p->stream, logits, cache->fresh_logits, (size_t)c->vocab * sizeof *logits, err);
    if (!code) code = read_back(p, err);
    if (code) return code;
    int best = ((int32_t *)staged(p, cache->notes))[1 + c->n_layers];
    if (best < 0) return refuse_head("logit", -1 - best, err);
    if (p->request->best) *p->request->best = best;
    commit(p);
    return LAZY_OK;
}

/* The end of a pass over l layers only: its tokens have keys and values in all of them, and wait in Aux. */
static int finish_early(pass *p, int l, lazy_error *err)
{
    lazy_cache *cache = p->cache;
    const int32_t *rows = p->computed.positions;
    int n = p->computed.n, code = trace(p, l - 1, p->in_play, NULL, err);
    if (!code) code = p->ops->mark(p->stream, cache->depth, rows, n, l, err);
    if (!code)
        code = p->ops->regroup(p->stream, p->x_next, rows, 0, p->x, rows, n, cache->aux[l], p->config->hidden,
                               cache->notes + 1 + l, err);
    if (!code) code = read_back(p, err);
    if (code) return code;
    commit(p);
    lazy_last_cache(p->session)->has_logits = false;
    return LAZY_OK;
}

/* Goes on where the next layers are computed: takes along all that the pass knows, and the rows under way. */
static int move_on(pass *p, lazy_error *err)
{
    const lazy_cache *from = p->cache;
    lazy_cache *to = p->cache + 1;
    const size_t n = (size_t)p->in_play.n, n_rows = (size_t)p->computed.n, length = (size_t)p->length,
                 row = (size_t)p->config->hidden * lazy_activation_bytes(p->stream->backend),
                 layers = from->layer_scores ? (size_t)min_int(p->session->pruning.layers, p->config->n_layers) : 0;
    const bool is_tail = p->computed.positions == tail_of(p->in_play, p->computed.n).positions;
    lazy_cache_lay_out(to, p->length, p->request->n);
    int32_t *in_play = to->in_play[0];
    const lazy_parcel parcels[] = {
        { to->gone, from->gone, (size_t)((char *)from->in_play[0] - (char *)from->gone) },
        { to->ids, from->ids, (size_t)((char *)from->flags + p->length - (char *)from->ids) },
        { in_play, p->in_play.positions, n * sizeof *in_play },
        { to->rows[0], p->computed.positions, n_rows * sizeof *in_play },
        { to->x[0], p->x, n_rows * row },
        { to->scores[1], from->scores[1], n * sizeof *to->scores[1] }, /* where it is the mean over layers */
        { to->layer_scores, from->layer_scores, layers * length * sizeof *to->layer_scores },
    };
    int code = p->ops->send(p->stream, to->stream, parcels, sizeof parcels / sizeof *parcels, err);
    p->cache = to;
    p->stream = to->stream;
    p->in_play.positions = in_play;
    p->computed = is_tail ? tail_of(p->in_play, p->computed.n) : (set){ to->rows[0], p->computed.n };
    p->x = to->x[0];
    p->x_next = to->x[1];
    return code;
}

static int run_layers(pass *p, lazy_error *err)
{
    lazy_session *session = p->session;
    int code = begin(p, err), all = p->config->n_layers;
    if (code) return lazy_fail_in(err, code, "before the first layer");
    int n_layers = p->request->reads ? lazy_rules_layers_before_pruning(&session->pruning, all) : all;
    for (int l = 0; l < n_layers; l++) {
        if (l == p->cache->place->end && (code = move_on(p, err))) return lazy_fail_in(err, code, "layer %d", l);
        session->under_way.counts[l] = (lazy_layer_count){ .in_play = p->in_play.n, .computed = p->computed.n };
        p->regrouped = false;
        code = begin_layer(p, l, err);
        bool early = l == n_layers - 1 && n_layers < all;
        if (!code && !early) code = prune_and_revive(p, l, err);
        if (!code && !early) code = end_layer(p, l, err);
        if (code) return blame_layer(p, lazy_fail_in(err, code, "layer %d", l), err);
        p->stream->layers_done = l + 1;
        const lazy_watch *watch = p->stream->watch;
        if (watch && watch->poll(watch->context, l + 1, all))
            return lazy_fail(err, LAZY_CANCELLED, "stopped after layer %d", l);
    }
    return blame_layer(p, n_layers < all ? finish_early(p, n_layers, err) : finish(p, err), err);
}

int lazy_forward(lazy_session *session, const lazy_pass *request, lazy_error *err)
{
    int length = session->tokens.length;
    pass p = {
        .session = session,
        .cache = session->caches,
        .stream = session->caches->stream,
        .ops = session->model->backend->ops,
        .config = &session->model->config,
        .request = request,
        .length = length,
        .is_prompt = !request->generated,
        .n_free = -1,
    };
    int n_prunable = session->pruning.prune_generated ? length : session->tokens.n_prompt;
    if (!request->reads) p.schedule = lazy_rules_schedule(&session->pruning, request->generated, n_prunable);
    for (int i = 0; i < session->model->n_places; i++) {
        lazy_cache_begin(&session->caches[i], request->generated);
        session->caches[i].stream->watch = request->watch;
        session->caches[i].stream->layers_done = 0;
    }
    int code = lazy_report_open(&session->under_way, p.config->n_layers, session->traces, err);
    if (!code) code = run_layers(&p, err);
    for (int i = 0; i < session->model->n_places; i++) {
        lazy_cache *cache = &session->caches[i];
        cache->stream->watch = NULL;
        /* waits, so that nothing that a device has noted is left to the next pass */
        if (code) p.ops->download(cache->stream, cache->staging, cache->gone, sizeof *cache->gone, NULL);
    }
    lazy_report_close(&session->under_way);
    return code;
}
