/* stream.c — a session's stream on the CPU: its scratch, and tasks run on the backend's threads. */
#include <string.h>

#include "../error.h"
#include "../memory.h"
#include "cpu.h"

/* ---- buffers whose size is that of the largest pass ------------------------------------- */

enum { N_BUFFERS = 12 };

typedef struct buffer {
    void **slot; /* its pointer in the stream */
    size_t bytes;
} buffer;

static size_t larger(size_t a, size_t b) { return a > b ? a : b; }

/* Operands of the largest product of n_rows rows, k values each; none where they are not converted. */
static size_t operands_for(const lazy_stream *stream, int k, int n_rows, int copies, bool converted)
{
    const lazy_arithmetic *arithmetic = cpu_of(stream)->arithmetic;
    const lazy_products *few[] = { arithmetic->fewest, arithmetic->few };
    size_t most = converted ? (size_t)min_int(n_rows, ROW_CHUNK) * (size_t)operand_stride(products_of(stream), k) : 0;
    for (size_t i = 0; i < sizeof few / sizeof *few; i++)
        if (few[i])
            most =
                larger(most, (size_t)min_int(n_rows, few[i]->max_unpacked_others) * (size_t)operand_stride(few[i], k));
    return (size_t)copies * most;
}

static void list_buffers(lazy_cpu_stream *s, int n_rows, int n_tokens, buffer list[N_BUFFERS])
{
    const lazy_stream *stream = &s->base;
    const lazy_config *c = stream->config;
    const int inputs[] = { c->hidden, c->n_heads * c->head_dim, c->ffn }, k = c->experts_per_token;
    size_t operands = 0;
    for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++)
        operands = larger(operands, operands_for(stream, inputs[i], n_rows, 1, is_converted(stream, inputs[i])));
    operands = larger(operands, operands_for(stream, c->hidden, n_rows, k, true));
    operands = larger(operands, operands_for(stream, c->expert_ffn, n_rows, k, is_converted(stream, c->expert_ffn)));
    size_t rows = (size_t)n_rows, tokens = (size_t)n_tokens, heads = (size_t)c->n_heads, d = (size_t)c->head_dim,
           chunk = (size_t)min_int(n_rows, ROW_CHUNK), pairs = chunk * (size_t)k,
           split_rows = (size_t)min_int(n_rows, SPLIT_KEYS_ROWS);
#define BUFFER(name, n) { (void **)&s->name, (n) * sizeof *s->name }
    const buffer buffers[N_BUFFERS] = {
        BUFFER(seen, rows),
        BUFFER(partial, split_rows * heads * MAX_CHUNKS * (d + 2)),
        BUFFER(operands, operands),
        BUFFER(probabilities, heads * tokens),
        BUFFER(order, tokens),
        BUFFER(block_sums, tokens),
        BUFFER(router_logits, chunk * (size_t)c->n_experts),
        BUFFER(weights, pairs),
        BUFFER(places, pairs),
        BUFFER(sorted_rows, pairs),
        BUFFER(expert_rows, pairs * (size_t)c->expert_ffn),
        BUFFER(outputs, pairs * (size_t)c->hidden),
    };
    memcpy(list, buffers, sizeof buffers);
}

static void keep_buffers(lazy_cpu_stream *s)
{
    buffer list[N_BUFFERS];
    list_buffers(s, 0, 0, list);
    for (int i = 0; i < N_BUFFERS; i++) lazy_cpu_keep(s->base.backend, *list[i].slot);
}

uint64_t lazy_cpu_scratch_bytes(const lazy_stream *stream, int n_rows, int n_tokens)
{
    uint64_t sum = WORKER_SCRATCH * sizeof(float); /* stream->scratch */
    buffer list[N_BUFFERS];
    list_buffers((lazy_cpu_stream *)stream, n_rows, n_tokens, list);
    for (int i = 0; i < N_BUFFERS; i++) sum += list[i].bytes;
    return sum;
}

int lazy_cpu_reserve(lazy_stream *stream, int n_rows, int n_tokens, lazy_error *err)
{
    lazy_cpu_stream *s = (lazy_cpu_stream *)stream;
    if (n_rows <= s->rows && n_tokens <= s->tokens) return LAZY_OK;
    lazy_cpu_stream fresh = {
        .base = s->base, .client = s->client, .scratch = s->scratch, .rows = n_rows, .tokens = n_tokens
    };
    buffer list[N_BUFFERS];
    list_buffers(&fresh, n_rows, n_tokens, list);
    int code = LAZY_OK;
    for (int i = 0; i < N_BUFFERS && !code; i++)
        code = lazy_cpu_alloc(s->base.backend, list[i].slot, list[i].bytes, "the CPU's scratch", err);
    keep_buffers(code ? &fresh : s);
    if (!code) *s = fresh;
    return code;
}

/* ---- opening, closing, tasks ------------------------------------------------------------ */

void lazy_cpu_stream_close(lazy_stream *stream)
{
    if (!stream) return;
    lazy_cpu_stream *s = (lazy_cpu_stream *)stream;
    lazy_pool_client_close(s->client);
    keep_buffers(s);
    lazy_cpu_keep(stream->backend, s->scratch);
    lazy_free(s);
}

int lazy_cpu_stream_open(lazy_backend *backend, const lazy_config *config, lazy_stream **out, lazy_error *err)
{
    lazy_cpu_stream *stream;
    int code = lazy_alloc_zeroed(&stream, 1, "a stream", err);
    if (code) return code;
    stream->base = (lazy_stream){ .backend = backend, .config = config };
    code = lazy_pool_client_open(&stream->client, ((lazy_cpu *)backend)->pool, err);
    if (!code)
        code = lazy_cpu_alloc(backend, (void **)&stream->scratch, WORKER_SCRATCH * sizeof(float), "a stream", err);
    if (code) lazy_cpu_stream_close(&stream->base);
    else *out = &stream->base;
    return code;
}

int lazy_cpu_run(lazy_stream *stream, lazy_task task, void *job, int n, lazy_error *err)
{
    lazy_poll poll = { stream->watch, stream->layers_done, stream->config->n_layers };
    int code = lazy_pool_run(((lazy_cpu_stream *)stream)->client, task, job, n, poll);
    if (code == LAZY_UNUSABLE)
        return lazy_fail(err, code, "the process was forked during the pass; use a new session in the child");
    return code ? lazy_fail(err, code, "stopped") : LAZY_OK;
}

typedef struct rows_job {
    lazy_row_task task;
    void *job;
    int n, per_task;
} rows_job;

static void run_range(void *job, int task, int worker)
{
    const rows_job *t = job;
    t->task(t->job, task * t->per_task, block_end(task, t->per_task, t->n), worker);
}

int lazy_cpu_run_rows(lazy_stream *stream, lazy_row_task task, void *job, int n, lazy_error *err)
{
    enum { TASKS_PER_THREAD = 4, LEAST = 4, MOST = 32 };
    rows_job t = { task, job, n, clamp_int(n / (TASKS_PER_THREAD * stream->backend->threads), LEAST, MOST) };
    return lazy_cpu_run(stream, run_range, &t, ceil_div(n, t.per_task), err);
}
