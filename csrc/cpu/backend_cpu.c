/* backend_cpu.c — the CPU backend: its memory, its threads, and the table of ops. */
#include <stdlib.h>
#include <string.h>

#include "../error.h"
#include "../memory.h"
#include "cpu.h"

static int cpu_alloc(lazy_backend *backend, void **out, size_t bytes, const char *what, lazy_error *err)
{
    (void)backend;
    return lazy_alloc_bytes(out, bytes, 1, NULL, what, err);
}

static void cpu_free(lazy_backend *backend, void *memory)
{
    (void)backend;
    lazy_free(memory);
}

static void cpu_expect_sparse(lazy_backend *backend, void *memory, size_t bytes)
{
    (void)backend;
    lazy_use_small_pages(memory, bytes);
}

static int cpu_admit(lazy_backend *backend, uint64_t bytes, const char *what, lazy_error *err)
{
    (void)backend, (void)bytes, (void)what,
        (void)err; /* weights are mapped: the system drops pages that do not fit and reads them again */
    return LAZY_OK;
}

static int cpu_bind(lazy_backend *backend, lazy_matrix *matrices, int n, lazy_error *err)
{
    (void)backend, (void)matrices, (void)n, (void)err; /* weights are read from the mapping */
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

static int cpu_copy(lazy_stream *stream, void *to, const void *from, size_t bytes, lazy_error *err)
{
    (void)stream, (void)err;
    memcpy(to, from, bytes);
    return LAZY_OK;
}

static const lazy_ops ops = { .alloc = cpu_alloc,
                              .free = cpu_free,
                              .expect_sparse = cpu_expect_sparse,
                              .admit = cpu_admit,
                              .bind = cpu_bind,
                              .unbind = cpu_unbind,
                              .close = cpu_close,
                              .upload = cpu_copy,
                              .download = cpu_copy,
                              .copy = cpu_copy,
#define ENTRY(op) .op = lazy_cpu_##op,
                              LAZY_CPU_OPS(ENTRY)
#undef ENTRY
};

/* The value of LAZYLLM_CPU: an instruction set, or NULL for the best one. */
static const char *requested_isa(void)
{
    const char *requested = getenv("LAZYLLM_CPU");
    return requested && *requested ? requested : NULL;
}

const char *lazy_cpu_variant_used(lazy_compute compute)
{
    const lazy_arithmetic *arithmetic = lazy_arithmetic_find(requested_isa(), compute);
    return arithmetic ? arithmetic->products->name : NULL;
}

int lazy_cpu_open(lazy_backend **out, int threads, lazy_compute compute, lazy_dtype kv, lazy_error *err)
{
    *out = NULL;
    const char *isa = requested_isa();
    const lazy_arithmetic *in_f32 = lazy_arithmetic_find(isa, LAZY_COMPUTE_F32),
                          *arithmetic = lazy_arithmetic_find(isa, compute);
    if (!in_f32)
        return lazy_fail(err, LAZY_DEVICE,
                         "LAZYLLM_CPU is \"%s\", which this machine cannot run; it runs \"%s\" and slower ones", isa,
                         lazy_cpu_variants()[0]);
    if (!arithmetic)
        return lazy_fail(err, LAZY_DEVICE,
                         "compute is %s, which needs the instructions %s; the kernels here are those of %s: use f32",
                         compute == LAZY_COMPUTE_BF16 ? "bf16" : "int8",
                         compute == LAZY_COMPUTE_BF16 ? "AVX512-BF16" : "AVX512-VNNI", in_f32->isa);

    lazy_cpu *cpu;
    int code = lazy_alloc_zeroed(&cpu, 1, "the CPU backend", err);
    if (code) return code;
    cpu->base = (lazy_backend){
        .ops = &ops,
        .name = "cpu",
        .variant = arithmetic->products->name,
        .threads = threads,
        .activations = LAZY_F32,
        .kv = kv,
        .row_chunk = ROW_CHUNK,
    };
    cpu->arithmetic = arithmetic;
    cpu->in_f32 = in_f32->products;
    code = lazy_alloc(&cpu->scratch, (size_t)(threads - 1) * WORKER_SCRATCH, "the workers' scratch", err);
    if (!code) code = lazy_pool_open(&cpu->pool, threads, err);
    if (code) cpu_close(&cpu->base);
    else *out = &cpu->base;
    return code;
}
