#include "session.h"

#include <math.h>

#include "error.h"
#include "forward.h"
#include "memory.h"

int lazy_session_open(lazy_session **out, lazy_model *model, const lazy_pruning *pruning, lazy_error *err)
{
    *out = NULL;
    int n_layers = model->config.n_layers;
    lazy_session *s;
    int code = lazy_alloc_zeroed((void **)&s, 1, sizeof *s, "the session", err);
    if (code) return code;
    s->model = model;
    atomic_init(&s->busy, false);
    code = lazy_rules_open(&s->rules, pruning, n_layers, err);
    if (!code) code = lazy_cache_open(&s->cache, model, &s->rules, err);
    if (!code) code = lazy_alloc_zeroed((void **)&s->counts, (size_t)n_layers, sizeof *s->counts, "the pass counts", err);
    if (!code) code = lazy_alloc_zeroed((void **)&s->waiting, (size_t)n_layers + 1, sizeof *s->waiting, "the waiting marks", err);
    if (code) lazy_session_close(s);
    else *out = s;
    return code;
}

void lazy_session_close(lazy_session *s)
{
    if (!s) return;
    lazy_free(s->waiting);
    lazy_free(s->counts);
    lazy_trace_close(&s->trace);
    lazy_cache_close(&s->cache);
    lazy_tokens_close(&s->tokens);
    lazy_rules_close(&s->rules);
    lazy_free(s);
}

static int enter(lazy_session *s, lazy_error *err)
{
    if (atomic_exchange(&s->busy, true)) return lazy_fail(err, LAZY_UNUSABLE, "the session is in use: a call on it is under way");
    if (!s->broken) return LAZY_OK;
    atomic_store(&s->busy, false);
    return lazy_fail(err, LAZY_UNUSABLE, "an earlier pass of this session did not finish; open a new session");
}

/* Makes room for n_tokens, and for `wish` tokens if it has to grow. If the caches fail to grow, more room for kinds and depths does no harm. */
static int reserve(lazy_session *s, int64_t n_tokens, int64_t wish, lazy_error *err)
{
    int context = s->model->config.context;
    if (n_tokens > context)
        return lazy_fail(err, LAZY_INVALID, "%lld tokens are more than the model's context of %d", (long long)n_tokens, context);
    if (n_tokens <= s->cache.capacity) return LAZY_OK;
    int capacity = (int)(wish > context ? context : wish > n_tokens ? wish : n_tokens);
    int code = LAZY_OK;
    if (capacity > s->tokens.capacity) code = lazy_tokens_reserve(&s->tokens, capacity, err);
    if (!code) code = lazy_cache_reserve(&s->cache, capacity, s->tokens.depths, s->tokens.length, err);
    return code;
}

int lazy_session_reserve(lazy_session *s, int64_t n_tokens, lazy_error *err)
{
    int code = enter(s, err);
    if (code) return code;
    code = reserve(s, n_tokens, n_tokens, err);
    atomic_store(&s->busy, false);
    return code;
}

uint64_t lazy_session_bytes(const lazy_session *s, int n_tokens)
{
    return lazy_cache_bytes(&s->cache, n_tokens) + (uint64_t)n_tokens * LAZY_TOKEN_BYTES;
}

int lazy_session_leave_out(lazy_session *s, const int32_t *positions, int n, lazy_error *err)
{
    int code = enter(s, err);
    if (code) return code;
    lazy_tokens *tokens = &s->tokens;
    if (n < 1) code = lazy_fail(err, LAZY_INVALID, "no positions were given; there must be one at least");
    for (int i = 0; i < n && !code; i++)
        if (positions[i] < (i ? positions[i - 1] + 1 : tokens->length) || positions[i] >= tokens->capacity)
            code = lazy_fail(err, LAZY_INVALID, "position %d at index %d; they must rise from %d, and room is reserved for %d tokens",
                             positions[i], i, tokens->length, tokens->capacity);
    if (!code) lazy_tokens_leave_out(tokens, positions, n);
    atomic_store(&s->busy, false);
    return code;
}

static int check_ids(const lazy_session *s, const int32_t *ids, int n, lazy_error *err)
{
    if (n < 1) return lazy_fail(err, LAZY_INVALID, "no tokens were given; a pass needs at least one");
    int vocab = s->model->config.vocab;
    for (int i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= vocab)
            return lazy_fail(err, LAZY_INVALID, "token id %d at index %d; ids go from 0 to %d", ids[i], i, vocab - 1);
    return LAZY_OK;
}

/* Runs one pass; enter() has succeeded. */
static int run(lazy_session *s, const int32_t *ids, int n, bool generated, lazy_outputs outputs, const lazy_watch *watch, lazy_error *err)
{
    int64_t length = (int64_t)s->tokens.length + n;
    if (s->tokens.left_out_end > s->tokens.length && (s->tokens.left_out_end >= length || generated || outputs.surprisal))
        return lazy_fail(err, LAZY_INVALID, "tokens are left out up to position %d; a pass over the user's tokens beyond it must come next",
                         s->tokens.left_out_end - 1);
    enum { SLACK = 64 }; /* tokens: spare room for decoding; later the capacity doubles */
    int code = reserve(s, length, s->tokens.length ? 2 * length : length + SLACK, err);
    if (code) return code;
    s->broken = true; /* until the pass has finished */
    lazy_tokens_append(&s->tokens, n, generated);
    s->cache.stream->watch = watch;
    s->cache.stream->layers_done = 0;
    code = lazy_forward(s, ids, n, generated, outputs, err);
    s->cache.stream->watch = NULL;
    s->broken = code != LAZY_OK;
    return code;
}

static int forward(lazy_session *s, const int32_t *ids, int n, bool generated, lazy_outputs outputs, const lazy_watch *watch,
                   lazy_error *err)
{
    int code = check_ids(s, ids, n, err);
    if (!code) code = enter(s, err);
    if (code) return code;
    code = run(s, ids, n, generated, outputs, watch, err);
    atomic_store(&s->busy, false);
    return code;
}

int lazy_session_forward(lazy_session *s, const int32_t *ids, int n, bool generated, float *logits, const lazy_watch *watch,
                         lazy_error *err)
{
    return forward(s, ids, n, generated, (lazy_outputs){ .logits = logits }, watch, err);
}

int lazy_session_greedy(lazy_session *s, const int32_t *ids, int n, bool generated, int32_t *token, const lazy_watch *watch,
                        lazy_error *err)
{
    return forward(s, ids, n, generated, (lazy_outputs){ .best = token }, watch, err);
}

int lazy_session_surprisal(lazy_session *s, const int32_t *ids, int n, float *surprisal, const lazy_watch *watch, lazy_error *err)
{
    enum { LOGITS_AT_ONCE = 1 << 24 }; /* 64 MiB of logits */
    int code = check_ids(s, ids, n, err);
    if (!code && lazy_rules_prune(&s->rules))
        code = lazy_fail(err, LAZY_INVALID, "the session prunes, so that not every token has a surprisal; open one without pruning");
    if (!code) code = enter(s, err);
    if (code) return code;
    lazy_backend *backend = s->model->backend;
    int vocab = s->model->config.vocab, rows = LOGITS_AT_ONCE / vocab;
    if (rows > backend->row_chunk) rows = backend->row_chunk;
    if (rows > n) rows = n;
    if (rows < 1) rows = 1;
    lazy_outputs outputs = { .surprisal = surprisal, .head_rows = rows };
    code = backend->ops->alloc(backend, (void **)&outputs.head, (size_t)rows * (size_t)vocab * sizeof(float), "logits of many rows", err);
    if (!code) code = run(s, ids, n, false, outputs, watch, err);
    backend->ops->free(backend, outputs.head);
    atomic_store(&s->busy, false);
    return code;
}

int lazy_session_length(const lazy_session *s) { return s->tokens.length; }
int lazy_session_n_prompt(const lazy_session *s) { return s->tokens.n_prompt; }
const int32_t *lazy_session_depths(const lazy_session *s) { return s->tokens.depths; }
const uint8_t *lazy_session_kinds(const lazy_session *s) { return s->tokens.kinds; }
double lazy_session_computed(const lazy_session *s) { return lazy_tokens_computed(&s->tokens, s->model->config.n_layers); }
double lazy_session_reached_top(const lazy_session *s) { return lazy_tokens_reached_top(&s->tokens, s->model->config.n_layers); }
const lazy_layer_count *lazy_session_last_pass(const lazy_session *s) { return s->counts; }
bool lazy_session_traces(const lazy_session *s) { return s->trace.on; }
void lazy_session_set_trace(lazy_session *s, bool on) { s->trace.on = on; }
bool lazy_session_trace_lost(const lazy_session *s) { return s->trace.lost; }

const lazy_trace_run *lazy_session_trace(const lazy_session *s, int *n_runs)
{
    *n_runs = s->trace.n_runs;
    return s->trace.runs;
}
