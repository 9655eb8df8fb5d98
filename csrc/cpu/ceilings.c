/* ceilings.c — the peak rates of this machine, multiply-adds and memory reads, that benchmarks compare the ops with. */
#include <stdatomic.h>

#include "cpu.h"

typedef struct ceiling {
    lazy_stream *stream;
    float random[64];
    const char *memory;
    size_t bytes;
    int tasks;
    _Atomic float sink; /* receives results, so that the compiler keeps the work */
    double flops;       /* of one task */
} ceiling;

enum { TASKS_PER_THREAD = 16, STEPS = 200 * 1000 };

static void multiply_add(void *job, int task, int worker)
{
    (void)worker;
    ceiling *t = job;
    double flops;
    t->sink = product_kernels_of(t->stream)->multiply_adds(t->random, STEPS, &flops);
    if (task == 0) t->flops = flops;
}

int lazy_cpu_multiply_adds(lazy_stream *stream, double *flops, lazy_error *err)
{
    ceiling t = { .stream = stream, .tasks = TASKS_PER_THREAD * stream->backend->threads };
    uint32_t bits = 1;
    for (int i = 0; i < 64; i++) {
        bits = bits * 1664525u + 1013904223u;
        t.random[i] = (float)(bits >> 8) * 0x1p-23f - 1.0f;
    }
    int code = lazy_cpu_run(stream, multiply_add, &t, t.tasks, err);
    *flops = t.flops * t.tasks;
    return code;
}

static void read_part(void *job, int task, int worker)
{
    (void)worker;
    ceiling *t = job;
    size_t part = t->bytes / (size_t)t->tasks / sizeof(float) * sizeof(float);
    t->sink = kernels_of(t->stream)->rows->read(t->memory + (size_t)task * part, part);
}

int lazy_cpu_read(lazy_stream *stream, const void *memory, size_t bytes, lazy_error *err)
{
    ceiling t = { .stream = stream, .memory = memory, .bytes = bytes, .tasks = TASKS_PER_THREAD * stream->backend->threads };
    return lazy_cpu_run(stream, read_part, &t, t.tasks, err);
}
