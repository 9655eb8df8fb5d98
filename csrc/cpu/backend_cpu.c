/* backend_cpu.c — the CPU as a backend: memory, threads, and the table of ops. */
#include <stdlib.h>
#include <string.h>

#include "../error.h"
#include "../memory.h"
#include "cpu.h"

enum { ROW_CHUNK = 1024 };

static int cpu_alloc(lazy_backend *backend, void **out, size_t bytes, const char *what, lazy_error *err)
{
    (void)backend;
    return lazy_alloc(out, bytes, 1, what, err);
}

static void cpu_free(lazy_backend *backend, void *memory)
{
    (void)backend;
    lazy_free(memory);
}

static int cpu_admit(lazy_backend *backend, uint64_t bytes, const char *what, lazy_error *err)
{
    (void)backend, (void)bytes, (void)what, (void)err; /* weights are mapped: the system drops and reads again what does not fit */
    return LAZY_OK;
}

static int cpu_bind(lazy_backend *backend, lazy_matrix *matrix, lazy_error *err)
{
    (void)backend, (void)matrix, (void)err; /* weights are read where they are mapped */
    return LAZY_OK;
}

static void cpu_unbind(lazy_backend *backend, lazy_matrix *matrix) { (void)backend, (void)matrix; }

static void cpu_close(lazy_backend *backend)
{
    lazy_cpu *cpu = (lazy_cpu *)backend;
    lazy_pool_close(cpu->pool);
    lazy_free(cpu->scratch);
    lazy_free(cpu);
}

static int cpu_stream_open(lazy_backend *backend, const lazy_config *config, lazy_stream **out, lazy_error *err)
{
    lazy_cpu_stream *stream;
    int code = lazy_alloc_zeroed((void **)&stream, 1, sizeof *stream, "a stream", err);
    if (code) return code;
    stream->base = (lazy_stream){ .backend = backend, .config = config };
    *out = &stream->base;
    return LAZY_OK;
}

static void free_scratch(lazy_cpu_stream *s)
{
    void *owned[] = { s->limits, s->partial, s->gate_up, s->shares, s->order };
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) lazy_free(owned[i]);
}

static void cpu_stream_close(lazy_stream *stream)
{
    if (!stream) return;
    free_scratch((lazy_cpu_stream *)stream);
    lazy_free(stream);
}

static int cpu_reserve(lazy_stream *stream, int n_rows, int n_tokens, lazy_error *err)
{
    lazy_cpu_stream *s = (lazy_cpu_stream *)stream;
    if (n_rows <= s->rows && n_tokens <= s->tokens) return LAZY_OK;
    const lazy_config *c = stream->config;
    size_t rows = (size_t)n_rows, tokens = (size_t)n_tokens, heads = (size_t)c->n_heads, d = (size_t)c->head_dim;
    size_t few_rows = rows < FEW_ROWS ? rows : FEW_ROWS, few_product_rows = rows < FEW_PRODUCT_ROWS ? rows : FEW_PRODUCT_ROWS;
    const char *what = "the CPU's scratch";
    lazy_cpu_stream fresh = { .base = s->base, .rows = n_rows, .tokens = n_tokens };
    int code = lazy_alloc((void **)&fresh.limits, rows, sizeof *fresh.limits, what, err);
    if (!code) code = lazy_alloc((void **)&fresh.partial, few_rows * heads * MOST_CHUNKS * (d + 2), sizeof *fresh.partial, what, err);
    if (!code) code = lazy_alloc((void **)&fresh.gate_up, few_product_rows * 2 * (size_t)c->ffn, sizeof *fresh.gate_up, what, err);
    if (!code) code = lazy_alloc((void **)&fresh.shares, heads * tokens, sizeof *fresh.shares, what, err);
    if (!code) code = lazy_alloc((void **)&fresh.order, tokens, sizeof *fresh.order, what, err);
    if (code) {
        free_scratch(&fresh);
        return code;
    }
    free_scratch(s);
    *s = fresh;
    return LAZY_OK;
}

static int cpu_copy(lazy_stream *stream, void *to, const void *from, size_t bytes, lazy_error *err)
{
    (void)stream, (void)err;
    memcpy(to, from, bytes);
    return LAZY_OK;
}

int lazy_cpu_run(lazy_stream *stream, lazy_task task, void *job, int n, lazy_error *err)
{
    lazy_poll poll = { stream->watch, stream->layers_done, stream->config->n_layers };
    int code = lazy_pool_run(cpu_of(stream)->pool, task, job, n, poll);
    return code ? lazy_fail(err, code, "stopped") : LAZY_OK;
}

const lazy_ops lazy_cpu_ops = {
    .alloc = cpu_alloc,
    .free = cpu_free,
    .admit = cpu_admit,
    .bind = cpu_bind,
    .unbind = cpu_unbind,
    .close = cpu_close,
    .stream_open = cpu_stream_open,
    .stream_close = cpu_stream_close,
    .reserve = cpu_reserve,
    .upload = cpu_copy,
    .download = cpu_copy,
    .copy = cpu_copy,
    .embed = lazy_cpu_embed,
    .rmsnorm = lazy_cpu_rmsnorm,
    .matmul = lazy_cpu_matmul,
    .gated = lazy_cpu_gated,
    .rotate = lazy_cpu_rotate,
    .attention = lazy_cpu_attention,
    .logits = lazy_cpu_logits,
    .surprisal = lazy_cpu_surprisal,
    .argmax = lazy_cpu_argmax,
    .note_finite = lazy_cpu_note_finite,
    .scores = lazy_cpu_scores,
    .average = lazy_cpu_average,
    .smooth = lazy_cpu_smooth,
    .mass = lazy_cpu_mass,
    .select = lazy_cpu_select,
    .mark = lazy_cpu_mark,
    .filter = lazy_cpu_filter,
    .regroup = lazy_cpu_regroup,
    .multiply_adds = lazy_cpu_multiply_adds,
    .read = lazy_cpu_read,
};

/* What LAZYLLM_CPU asks for: an instruction set, "reference" for the plain loops, or NULL for the best. */
static const char *wished_variant(void)
{
    const char *wish = getenv("LAZYLLM_CPU");
    return wish && *wish ? wish : NULL;
}

static bool is_reference(const char *wish) { return wish && strcmp(wish, "reference") == 0; }

const char *lazy_cpu_variant_used(void)
{
    const char *wish = wished_variant();
    if (is_reference(wish)) return "reference";
    const lazy_kernels *kernels = lazy_kernels_find(wish);
    return kernels ? kernels->name : NULL;
}

int lazy_cpu_open(lazy_backend **out, int threads, lazy_error *err)
{
    *out = NULL;
    const char *wish = wished_variant();
    bool reference = is_reference(wish);
    const lazy_kernels *kernels = lazy_kernels_find(reference ? NULL : wish);
    if (!kernels)
        return lazy_fail(err, LAZY_DEVICE,
                         "LAZYLLM_CPU is \"%s\", which this machine cannot run; it runs \"%s\" and slower ones, and \"reference\"", wish,
                         lazy_cpu_variants()[0]);
    if (threads == 0) threads = lazy_cpu_cores();

    lazy_cpu *cpu;
    int code = lazy_alloc_zeroed((void **)&cpu, 1, sizeof *cpu, "the CPU backend", err);
    if (code) return code;
    cpu->ops = reference ? lazy_reference_ops() : lazy_cpu_ops;
    cpu->base = (lazy_backend){
        .ops = &cpu->ops,
        .name = "cpu",
        .variant = reference ? "reference" : kernels->name,
        .threads = threads,
        .activation_bytes = sizeof(float),
        .row_chunk = ROW_CHUNK,
    };
    cpu->kernels = kernels;
    code = lazy_alloc((void **)&cpu->scratch, (size_t)threads, WORKER_SCRATCH * sizeof(float), "the workers' scratch", err);
    if (!code) code = lazy_pool_open(&cpu->pool, threads, err);
    if (code) cpu_close(&cpu->base);
    else *out = &cpu->base;
    return code;
}
