/* session.c — any calls with any arguments on sessions of one model: refused with words and without effect, or the
 * session is whole.
 *
 * The input is read as a row of calls. What a caller in Python cannot give, such as an array shorter than its length,
 * is not given here. */
#include "checkpoint.h"

#include <math.h>
#include <string.h>

#include "../../csrc/session.h"

enum { LAYERS = 4, SESSIONS = 3, MOST_STAGES = 3, MOST_TOKENS = 70, MOST_CALLS = 40 };

static lazy_model *model;

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    lazy_error err = { 0 };
    input none = { 0 };
    table t = { 0 };
    model = unbound_model(LAYERS, NARROW, NARROW);
    ((int32_t *)model->config.windows)[1] = 5;
    fill_table(&t, &none, &model->config);
    const lazy_device device = { .name = "cpu", .threads = 1 };
    require(!lazy_model_open_places(model, &device, LAZY_F32, &err), err.message);
    float *file = malloc(t.bytes); /* kept by the model */
    for (uint64_t i = 0; i < t.bytes / sizeof *file; i++) file[i] = sinf((float)i);
    require(!bind_file(model, &t, (unsigned char *)file, "auto", &err), err.message);
    return 0;
}

/* ---- arguments -------------------------------------------------------------------------- */

static double next_share(input *in)
{
    static const double special[] = { 0, 1, -1, 2, 1e-300, NAN, INFINITY };
    enum { N_SPECIAL = sizeof special / sizeof *special };
    uint8_t byte = next_byte(in);
    return byte < N_SPECIAL ? special[byte] : byte / 255.0;
}

/* Mostly small. */
static int next_int(input *in)
{
    uint8_t byte = next_byte(in);
    return byte == 255 ? (int)next_number(in, 4) : byte >= 250 ? byte - 256 : byte % 80;
}

static int next_stages(input *in, lazy_stage *stages)
{
    int n = next_byte(in) % (MOST_STAGES + 1);
    for (int i = 0; i < n; i++) {
        uint8_t kind = next_byte(in);
        stages[i] = (lazy_stage){ .layer = kind % 8 == 7 ? next_int(in) : kind % 8,
                                  .by_mass = kind & 8,
                                  .for_good = kind & 16 };
        if (stages[i].by_mass) {
            stages[i].mass = next_share(in);
            stages[i].keep_min = next_share(in);
            stages[i].keep_max = next_share(in);
        } else {
            stages[i].keep = next_share(in);
        }
    }
    return n;
}

/* Scores and a number of tokens by a pattern, `context`. */
static int call_policy(void *context, const lazy_view *view, float *scores, int *n_free)
{
    unsigned pattern = *(unsigned *)context;
    float *hidden = malloc((size_t)view->n_rows * NARROW * sizeof *hidden);
    lazy_error err = { 0 };
    require(!lazy_view_copy(view, LAZY_VIEW_HIDDEN, 0, view->n_rows, hidden, &err), err.message);
    for (int i = 0; i < view->n_in_play && !view->observes; i++) scores[i] = (float)((unsigned)i * pattern % 7);
    if (!view->observes && pattern % 5 == 1) scores[0] = NAN;
    if (!view->observes && pattern % 3 == 1) *n_free = (int)(pattern % 80) - 2;
    free(hidden);
    return pattern % 11 == 1;
}

static int stop_after(void *context, int layers_done, int n_layers) { return layers_done >= *(int *)context; }

/* ---- sessions ---------------------------------------------------------------------------- */

typedef struct slot {
    lazy_session *session; /* NULL: none */
    unsigned policy;       /* context of its policy */
    bool written;          /* parts of its state are any */
} slot;

static void open_slot(slot *s, input *in)
{
    if (s->session) return;
    lazy_stage stages[MOST_STAGES], decode_stages[MOST_STAGES];
    lazy_span span;
    lazy_pruning p = lazy_pruning_dense;
    lazy_error err = { 0 };
    p.stages = stages;
    p.n_stages = next_stages(in, stages);
    p.decode = (lazy_decode)(next_byte(in) % 3);
    p.decode_stages = decode_stages;
    p.n_decode_stages = p.decode == LAZY_DECODE_OWN ? next_stages(in, decode_stages) : 0;
    uint8_t options = next_byte(in), more = next_byte(in);
    if (options & 1) p.sink = next_int(in);
    if (options & 2) p.window = next_int(in);
    if (options & 4) p.queries = next_int(in);
    if (options & 8) p.layers = next_int(in);
    if (options & 16) p.smooth = next_int(in);
    if (options & 32) p.memory = next_share(in);
    if (more & 16) p.revival = next_share(in);
    if (more & 64) p.gain = 1 / next_share(in);
    if (options & 64) p.min_tokens = next_int(in);
    if (options & 128) {
        p.pooling = LAZY_POOLING_RMS;
        p.head_layer = next_byte(in) % 4 - 1;
        p.head = next_byte(in) % 3;
    }
    p.prune_generated = more & 1;
    p.average = more & 2;
    if (more & 4) {
        span = (lazy_span){ next_int(in), next_int(in) };
        p.protect = &span;
        p.n_protect = 1;
    }
    s->policy = more;
    s->written = false;
    if (more & 8) p.policy = (lazy_policy){ call_policy, &s->policy };
    int code = lazy_session_open(&s->session, model, &p, &err);
    require(!code == (s->session != NULL), "a session and an error");
    require(!code || (code == LAZY_INVALID && *err.message), "a session was refused without words");
}

static void check_whole(const lazy_session *s)
{
    const lazy_tokens *t = lazy_session_tokens(s);
    const lazy_report *last = lazy_session_last_pass(s);
    const lazy_layer_count *counts = last->counts;
    int n_prompt = 0;
    for (int i = 0; i < t->length; i++) {
        int32_t id = t->ids[i], depth = t->depths[i];
        require(id >= 0 && id < model->config.vocab, "an id out of range");
        require(depth >= 0 && depth <= LAYERS, "a depth out of range");
        require(t->kinds[i] <= LAZY_READ && t->gone[i] <= 1, "a mark out of range");
        n_prompt += t->kinds[i] != LAZY_GENERATED;
    }
    require(n_prompt == t->n_prompt, "the prompt's tokens are miscounted");
    for (int l = 0; l < LAYERS; l++)
        require(counts[l].computed <= counts[l].in_play && (!l || counts[l].in_play <= counts[l - 1].in_play),
                "a count out of range");
    for (const lazy_trace_run *run = last->runs; run < last->runs + last->n_runs; run++)
        require(run->n_computed <= run->n_in_play && run->in_play[run->n_in_play - 1] < model->config.context,
                "a trace out of range");
}

typedef struct tokens {
    int length;
    int32_t ids[MOST_TOKENS], depths[MOST_TOKENS];
    uint8_t kinds[MOST_TOKENS], gone[MOST_TOKENS];
} tokens;

static tokens tokens_of(const lazy_session *s)
{
    const lazy_tokens *from = lazy_session_tokens(s);
    tokens t = { .length = from->length };
    size_t n = (size_t)t.length;
    if (!n) return t;
    memcpy(t.ids, from->ids, n * sizeof *t.ids);
    memcpy(t.depths, from->depths, n * sizeof *t.depths);
    memcpy(t.kinds, from->kinds, n);
    memcpy(t.gone, from->gone, n);
    return t;
}

/* ---- calls ------------------------------------------------------------------------------- */

static int run(lazy_session *s, input *in, lazy_error *err)
{
    uint8_t kind = next_byte(in);
    int n = next_byte(in) % MOST_TOKENS, stop = kind & 64 ? next_byte(in) % (LAYERS + 1) : LAYERS + 1;
    const lazy_watch watch = { stop_after, &stop };
    int32_t *ids = malloc((size_t)n * sizeof *ids), token;
    float *out = malloc((size_t)(n + model->config.vocab) * sizeof *out);
    for (int i = 0; i < n; i++) ids[i] = kind & 32 ? next_int(in) : (i + kind) % model->config.vocab;
    lazy_pass pass = { .ids = ids, .n = n, .generated = kind % 8 > 1 && kind & 16, .watch = &watch };
    switch (kind % 8) {
    case 0: pass.surprisal = out; break;
    case 1: pass.reads = true; break;
    case 2: pass.logits = out; break;
    default: pass.best = &token;
    }
    int length = lazy_session_tokens(s)->length, code = lazy_session_run(s, &pass, err);
    require(code || lazy_session_tokens(s)->length == length + n, "a pass has not added its tokens");
    free(ids);
    free(out);
    return code;
}

static size_t row_bytes(lazy_state_part part)
{
    const lazy_config *c = &model->config;
    int values = part == LAZY_STATE_AUX                                 ? c->hidden
                 : part == LAZY_STATE_KEYS || part == LAZY_STATE_VALUES ? lazy_kv_width(c)
                                                                        : 1;
    return (size_t)values * sizeof(float);
}

static int write_part(lazy_session *s, input *in, lazy_error *err)
{
    lazy_state_part part = (lazy_state_part)(next_byte(in) % (LAZY_STATE_LOGITS + 1));
    int layer = next_byte(in) % (LAYERS + 2) - 1, n = next_byte(in) % MOST_TOKENS;
    char *data = calloc((size_t)n + 1, row_bytes(part));
    int code = lazy_session_set_state(s, part, layer, n, data, err);
    free(data);
    return code;
}

static int fork_slot(slot *to, slot *from, lazy_error *err)
{
    if (to->session) return LAZY_OK;
    to->policy = from->policy;
    to->written = from->written;
    return lazy_session_fork(&to->session, from->session, &to->policy, err);
}

/* Changes flags and ids of some tokens, in runs. */
static void change_tokens(tokens *t, input *in, int n_changes)
{
    for (; n_changes; n_changes--) {
        int first = next_byte(in) % MOST_TOKENS, end = first + next_byte(in) % MOST_TOKENS, field = next_byte(in) % 5,
            value = next_int(in);
        if (field == 4) t->length = first;
        for (int i = first; i < end && i < MOST_TOKENS && field < 4; i++) {
            if (field == 0) t->gone[i] = (uint8_t)value;
            if (field == 1) t->kinds[i] = (uint8_t)value;
            if (field == 2) t->depths[i] = value;
            if (field == 3) t->ids[i] = value;
        }
    }
}

/* Writes to `to` a part of `from`, or as many rows of numbers as its own tokens have there; `any` also writes any
 * remembered scores. */
static int copy_part(lazy_session *to, lazy_session *from, lazy_state_part part, int layer, input *in, bool any,
                     lazy_error *err)
{
    int n_from = lazy_session_state_length(from, part, layer), n = n_from;
    if (part <= LAZY_STATE_AUX) n = lazy_session_state_length(to, part, layer);
    if (part == LAZY_STATE_REMEMBERED && any && n >= 0)
        n = next_byte(in) % 4 ? lazy_session_tokens(to)->length : next_byte(in) % MOST_TOKENS;
    if (n <= 0) return LAZY_OK;
    char *data = calloc((size_t)n, row_bytes(part));
    int code = n == n_from ? lazy_session_get_state(from, part, layer, data, err) : LAZY_OK;
    if (!code) code = lazy_session_set_state(to, part, layer, n, data, err);
    free(data);
    return code;
}

/* Restores the state of one session, as a file may have it: with any flags, and the rows that they take. Into a new
 * session of the same setting, if there is no other; unchanged it is then accepted. */
static int restore(slot *to, slot *from, input *in, lazy_error *err)
{
    bool opens = !to->session;
    int n_changes = next_byte(in) % 4;
    if (opens && fork_slot(to, from, err)) return err->code;
    tokens t = tokens_of(from->session);
    change_tokens(&t, in, n_changes);
    int code = opens ? lazy_session_truncate(to->session, 0, err) : LAZY_OK;
    if (!code) code = lazy_session_set_tokens(to->session, t.ids, t.kinds, t.depths, t.gone, t.length, err);
    for (int part = LAZY_STATE_KEYS; part <= LAZY_STATE_LOGITS; part++)
        for (int layer = 0; layer < (part == LAZY_STATE_LOGITS ? 1 : LAYERS) && !code; layer++)
            code = copy_part(to->session, from->session, (lazy_state_part)part, layer, in, n_changes > 0, err);
    require(!code || !opens || n_changes || from->written || !t.length, err->message);
    to->written = from->written || (code && !opens);
    if (code && opens) {
        lazy_session_close(to->session);
        to->session = NULL;
    }
    return code;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    input in = { data, size };
    slot slots[SESSIONS] = { 0 };
    open_slot(&slots[0], &in);
    for (int i = 0; i < MOST_CALLS && in.size; i++) {
        uint8_t byte = next_byte(&in);
        slot *mine = &slots[byte % SESSIONS], *other = &slots[(byte + 1) % SESSIONS];
        int call = byte / SESSIONS % 16;
        lazy_session *s = mine->session;
        if (!s) {
            open_slot(mine, &in);
            continue;
        }
        const tokens before = tokens_of(s);
        lazy_error err = { 0 };
        int code = 0;
        switch (call) {
        case 0: code = lazy_session_truncate(s, next_int(&in), &err); break;
        case 1: code = lazy_session_reserve(s, next_int(&in), 1, &err); break;
        case 2: *lazy_session_traces(s) ^= true; break;
        case 3:
            code = write_part(s, &in, &err);
            mine->written = true;
            break;
        case 4: code = fork_slot(other, mine, &err); break;
        case 5: code = restore(other, mine, &in, &err); break;
        case 6:
            lazy_session_close(s);
            mine->session = NULL;
            continue;
        default: code = run(s, &in, &err);
        }
        require(!code == !*err.message, "an error without words, or words without an error");
        check_whole(s);
        if (!code) continue;
        const tokens after = tokens_of(s);
        require(memcmp(&before, &after, sizeof before) == 0, "a call that failed has changed the tokens");
    }
    for (int i = 0; i < SESSIONS; i++) lazy_session_close(slots[i].session);
    return 0;
}
