#include "session.h"

#include "error.h"
#include "memory.h"
#include "numeric.h"

int lazy_report_open(lazy_report *report, int n_layers, bool traced, lazy_error *err)
{
    *report = (lazy_report){ .traced = traced };
    int code = lazy_alloc_zeroed(&report->counts, n_layers, "the pass counts", err);
    return code ? code : lazy_alloc(&report->runs, n_layers, "the trace", err);
}

void lazy_report_close(lazy_report *report)
{
    for (int i = 0; i < report->n_runs; i++) lazy_free(report->runs[i].in_play); /* with its other arrays */
    lazy_free(report->counts);
    lazy_free(report->runs);
    *report = (lazy_report){ 0 };
}

int lazy_session_open(lazy_session **out, lazy_model *model, const lazy_pruning *pruning, lazy_error *err)
{
    *out = NULL;
    int n_layers = model->config.n_layers;
    lazy_session *s;
    int code = lazy_alloc_zeroed(&s, 1, "the session", err);
    if (code) return code;
    s->model = model;
    code = lazy_rules_open(&s->pruning, pruning, &model->config, err);
    for (int i = 0; i < model->n_places && !code; i++)
        code = lazy_cache_open(&s->caches[i], model, &model->places[i], &s->pruning, err);
    if (!code) code = lazy_report_open(&s->last, n_layers, false, err);
    if (code) lazy_session_close(s);
    else *out = s;
    return code;
}

void lazy_session_close(lazy_session *s)
{
    if (!s) return;
    lazy_report_close(&s->last);
    for (int i = 0; i < s->model->n_places; i++) lazy_cache_close(&s->caches[i]);
    lazy_tokens_close(&s->tokens);
    lazy_rules_close(&s->pruning);
    lazy_free(s);
}

int lazy_session_reschedule(lazy_session *s, const lazy_pruning *pruning, lazy_error *err)
{
    int n_layers = s->model->config.n_layers;
    lazy_pruning own;
    int code = lazy_rules_open(&own, pruning, &s->model->config, err);
    if (code) return code;
    bool same_rows = (s->pruning.queries > LAZY_PART_ROWS) == (own.queries > LAZY_PART_ROWS);
    if (s->pruning.policy.call || own.policy.call || !same_rows ||
        !lazy_rules_same_caches(&s->pruning, &own, n_layers)) {
        lazy_rules_close(&own);
        return lazy_invalid(err, "the session's caches are for stages after other layers, for other layers or queries "
                                 "that score, or for memory, or a setting has a policy; open another session");
    }
    lazy_rules_close(&s->pruning);
    s->pruning = own;
    return LAZY_OK;
}

/* Makes room for n_tokens, or `wish` if it has to grow. Room for tokens alone, if the caches fail, does no harm. */
static int reserve(lazy_session *s, int64_t n_tokens, int64_t wish, int64_t n_soon, lazy_error *err)
{
    int context = s->model->config.context;
    if (n_tokens > context)
        return lazy_invalid(err, "%lld tokens are more than the model's context of %d", (long long)n_tokens, context);
    if (n_tokens <= lazy_last_cache(s)->capacity) return LAZY_OK;
    int capacity = (int)(wish > context ? context : wish > n_tokens ? wish : n_tokens);
    int code = LAZY_OK;
    if (capacity > s->tokens.capacity) code = lazy_tokens_reserve(&s->tokens, capacity, err);
    for (int i = 0; i < s->model->n_places && !code; i++)
        code =
            lazy_cache_reserve(&s->caches[i], capacity, n_soon < capacity / 2, s->tokens.depths, s->tokens.length, err);
    return code;
}

int lazy_session_reserve(lazy_session *s, int64_t n_tokens, int64_t n_soon, lazy_error *err)
{
    return reserve(s, n_tokens, n_tokens, n_soon, err);
}

uint64_t lazy_session_bytes(const lazy_session *s, int n_tokens)
{
    uint64_t bytes = (uint64_t)n_tokens * LAZY_TOKEN_BYTES;
    for (int i = 0; i < s->model->n_places; i++) bytes += lazy_cache_bytes(&s->caches[i], n_tokens);
    return bytes;
}

uint64_t lazy_session_fork_bytes(const lazy_session *s)
{
    uint64_t bytes = lazy_session_bytes(s, lazy_last_cache(s)->capacity);
    for (int i = 0; i < s->model->n_places; i++) bytes -= lazy_cache_shared_bytes(&s->caches[i], s->tokens.length);
    return bytes;
}

int lazy_session_truncate(lazy_session *s, int64_t length, lazy_error *err)
{
    if (length < 0 || length > s->tokens.length)
        return lazy_invalid(err, "a context of %d tokens cannot be truncated to %lld; it must be 0 to %d",
                            s->tokens.length, (long long)length, s->tokens.length);
    for (int i = 0; i < s->model->n_places && length < s->tokens.length; i++)
        lazy_cache_truncate(&s->caches[i], (int)length);
    lazy_tokens_truncate(&s->tokens, (int)length);
    return LAZY_OK;
}

int lazy_session_fork(lazy_session **out, lazy_session *s, void *policy_context, lazy_error *err)
{
    lazy_pruning pruning = s->pruning;
    pruning.policy.context = policy_context;
    int code = lazy_session_open(out, s->model, &pruning, err);
    if (code) return code;
    lazy_session *fork = *out;
    fork->traces = s->traces;
    const int capacity = lazy_last_cache(s)->capacity;
    if (capacity == 0) return LAZY_OK;
    code = lazy_tokens_reserve(&fork->tokens, capacity, err);
    for (int i = 0; i < s->model->n_places && !code; i++)
        code = lazy_cache_fork(&fork->caches[i], &s->caches[i], s->tokens.depths, s->tokens.length, err);
    if (code) {
        lazy_session_close(fork);
        *out = NULL;
    } else lazy_tokens_copy(&fork->tokens, &s->tokens);
    return code;
}

int lazy_session_logits(lazy_session *s, float *logits, lazy_error *err)
{
    const lazy_cache *cache = lazy_last_cache(s);
    if (!cache->has_logits)
        return lazy_invalid(err, "there are no logits: the context is empty, or was truncated after its last pass");
    size_t bytes = (size_t)s->model->config.vocab * sizeof *logits;
    return s->model->backend->ops->download(cache->stream, logits, cache->logits, bytes, err);
}

/* Refuses a pass that cannot come next, before anything changes. */
static int check_pass(const lazy_session *s, const lazy_pass *pass, lazy_error *err)
{
    const lazy_pruning *pruning = &s->pruning;
    int vocab = s->model->config.vocab;
    if (pass->reads && pruning->n_stages && pruning->stages[0].for_good)
        return lazy_invalid(err, "the first stage, after layer %d, drops tokens for good: none can wait there",
                            pruning->stages[0].layer);
    if (pass->surprisal && lazy_rules_prune(pruning))
        return lazy_invalid(err, "the session prunes, and not every token has a surprisal; open one without pruning");
    if (pass->n < 1) return lazy_invalid(err, "no tokens were given; a pass needs at least one");
    for (int i = 0; i < pass->n; i++)
        if (pass->ids[i] < 0 || pass->ids[i] >= vocab)
            return lazy_invalid(err, "token id %d at index %d; ids go from 0 to %d", pass->ids[i], i, vocab - 1);
    return LAZY_OK;
}

int lazy_session_run(lazy_session *s, const lazy_pass *pass, lazy_error *err)
{
    enum { SLACK = 64 }; /* tokens: spare room for decoding; later the capacity doubles */
    int64_t length = (int64_t)s->tokens.length + pass->n;
    int code = check_pass(s, pass, err);
    if (!code) code = reserve(s, length, s->tokens.length ? 2 * length : length + SLACK, length, err);
    for (int i = 0; i < s->model->n_places && !code; i++)
        code = lazy_cache_write_from(&s->caches[i], s->tokens.length, (int)length, s->tokens.depths, err);
    const lazy_tokens before = s->tokens;
    if (!code) {
        uint8_t kind = pass->reads ? LAZY_READ : pass->generated ? LAZY_GENERATED : LAZY_PROMPT;
        lazy_tokens_append(&s->tokens, pass->ids, pass->n, kind);
        code = lazy_forward(s, pass, err);
    }
    if (code) s->tokens = before;
    return code;
}

const lazy_tokens *lazy_session_tokens(const lazy_session *s) { return &s->tokens; }
const lazy_report *lazy_session_last_pass(const lazy_session *s) { return &s->last; }
bool *lazy_session_traces(lazy_session *s) { return &s->traces; }
