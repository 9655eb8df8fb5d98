/* stream.c — a session's stream on the CPU: its scratch, and tasks run on the backend's threads. */
#include "../error.h"
#include "../memory.h"
#include "cpu.h"

static void free_buffers(lazy_cpu_stream *s)
{
    void *owned[] = { s->seen,        s->partial,     s->gate_up,       s->operands, s->shares,
                      s->order,       s->block_sums,  s->router_logits, s->weights,  s->places,
                      s->sorted_rows, s->expert_rows, s->outputs };
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) lazy_free(owned[i]);
}

void lazy_cpu_stream_close(lazy_stream *stream)
{
    if (!stream) return;
    lazy_cpu_stream *s = (lazy_cpu_stream *)stream;
    lazy_pool_client_close(s->client);
    free_buffers(s);
    lazy_free(s->scratch);
    lazy_free(s);
}

int lazy_cpu_stream_open(lazy_backend *backend, const lazy_config *config, lazy_stream **out, lazy_error *err)
{
    lazy_cpu_stream *stream;
    int code = lazy_alloc_zeroed((void **)&stream, 1, sizeof *stream, "a stream", err);
    if (code) return code;
    stream->base = (lazy_stream){ .backend = backend, .config = config };
    code = lazy_pool_client_open(&stream->client, ((lazy_cpu *)backend)->pool, err);
    if (!code) code = lazy_alloc((void **)&stream->scratch, WORKER_SCRATCH, sizeof *stream->scratch, "a stream", err);
    if (code) lazy_cpu_stream_close(&stream->base);
    else *out = &stream->base;
    return code;
}

enum { N_BUFFERS = 13 };

static size_t larger(size_t a, size_t b) { return a > b ? a : b; }
static size_t operands_of(const lazy_products *p, int k, int rows)
{
    return (size_t)rows * (size_t)operand_stride(p, k);
}

/* Operands of the largest product of n_rows rows, k values each; none where they are not converted. */
static size_t operands_for(const lazy_stream *stream, int k, int n_rows, int copies, bool converted)
{
    const lazy_products *products = products_of(stream), *fixed = cpu_of(stream)->arithmetic->fixed;
    size_t many = converted ? operands_of(products, k, copies * min_int(n_rows, ROW_CHUNK)) : 0,
           few = fixed ? operands_of(fixed, k, copies * min_int(n_rows, fixed->max_unpacked_others)) : 0;
    return larger(many, few);
}

/* Bytes of seen, partial, gate_up, operands, shares, order, block_sums, and of the six of models with experts. */
static void buffer_bytes(const lazy_stream *stream, int n_rows, int n_tokens, size_t bytes[N_BUFFERS])
{
    const lazy_config *c = stream->config;
    const int inputs[] = { c->hidden, c->n_heads * c->head_dim, c->ffn }, k = c->experts_per_token;
    size_t operands = 0;
    for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++)
        operands = larger(operands, operands_for(stream, inputs[i], n_rows, 1, is_converted(stream, inputs[i])));
    operands = larger(operands, operands_for(stream, c->hidden, n_rows, k, true));
    operands = larger(operands, operands_for(stream, c->expert_ffn, n_rows, k, is_converted(stream, c->expert_ffn)));
    size_t rows = (size_t)n_rows, tokens = (size_t)n_tokens, heads = (size_t)c->n_heads, d = (size_t)c->head_dim;
    size_t split_rows = (size_t)min_int(n_rows, SPLIT_KEYS_ROWS),
           unpacked_rows = (size_t)min_int(n_rows, UNPACKED_ROWS_LIMIT);
    bytes[0] = rows * sizeof(lazy_seen);
    bytes[1] = split_rows * heads * MAX_CHUNKS * (d + 2) * sizeof(float);
    bytes[2] = unpacked_rows * 2 * (size_t)c->ffn * sizeof(float);
    bytes[3] = operands * sizeof(float);
    bytes[4] = heads * tokens * sizeof(float);
    bytes[5] = tokens * sizeof(uint32_t);
    bytes[6] = tokens * sizeof(double);
    size_t chunk = (size_t)min_int(n_rows, ROW_CHUNK), pairs = chunk * (size_t)k;
    bytes[7] = chunk * (size_t)c->n_experts * sizeof(float);
    bytes[8] = pairs * sizeof(float);
    bytes[9] = bytes[10] = pairs * sizeof(int32_t);
    bytes[11] = pairs * (size_t)c->expert_ffn * sizeof(float);
    bytes[12] = pairs * (size_t)c->hidden * sizeof(float);
}

uint64_t lazy_cpu_scratch_bytes(const lazy_stream *stream, int n_rows, int n_tokens)
{
    size_t bytes[N_BUFFERS];
    uint64_t sum = WORKER_SCRATCH * sizeof(float); /* stream->scratch */
    buffer_bytes(stream, n_rows, n_tokens, bytes);
    for (int i = 0; i < N_BUFFERS; i++) sum += bytes[i];
    return sum;
}

int lazy_cpu_reserve(lazy_stream *stream, int n_rows, int n_tokens, lazy_error *err)
{
    lazy_cpu_stream *s = (lazy_cpu_stream *)stream;
    if (n_rows <= s->rows && n_tokens <= s->tokens) return LAZY_OK;
    lazy_cpu_stream fresh = {
        .base = s->base, .client = s->client, .scratch = s->scratch, .rows = n_rows, .tokens = n_tokens
    };
    void **buffers[N_BUFFERS] = {
        (void **)&fresh.seen,    (void **)&fresh.partial, (void **)&fresh.gate_up,     (void **)&fresh.operands,
        (void **)&fresh.shares,  (void **)&fresh.order,   (void **)&fresh.block_sums,  (void **)&fresh.router_logits,
        (void **)&fresh.weights, (void **)&fresh.places,  (void **)&fresh.sorted_rows, (void **)&fresh.expert_rows,
        (void **)&fresh.outputs
    };
    size_t bytes[N_BUFFERS];
    buffer_bytes(stream, n_rows, n_tokens, bytes);
    int code = LAZY_OK;
    for (int i = 0; i < N_BUFFERS && !code; i++) code = lazy_alloc(buffers[i], bytes[i], 1, "the CPU's scratch", err);
    if (code) {
        free_buffers(&fresh);
        return code;
    }
    free_buffers(s);
    *s = fresh;
    return LAZY_OK;
}

int lazy_cpu_run(lazy_stream *stream, lazy_task task, void *job, int n, lazy_error *err)
{
    lazy_poll poll = { stream->watch, stream->layers_done, stream->config->n_layers };
    int code = lazy_pool_run(((lazy_cpu_stream *)stream)->client, task, job, n, poll);
    if (code == LAZY_UNUSABLE)
        return lazy_fail(err, code, "the process was forked during the pass; use a new session in the child");
    return code ? lazy_fail(err, code, "stopped") : LAZY_OK;
}
