#include "trace.h"

#include <string.h>

#include "memory.h"

static void free_run(lazy_trace_run *run)
{
    lazy_free(run->in_play);
    lazy_free(run->computed);
    lazy_free(run->scores);
}

void lazy_trace_clear(lazy_trace *trace)
{
    for (int i = 0; i < trace->n_runs; i++) free_run(&trace->runs[i]);
    trace->n_runs = 0;
}

void lazy_trace_close(lazy_trace *trace)
{
    lazy_trace_clear(trace);
    lazy_free(trace->runs);
    *trace = (lazy_trace){ 0 };
}

static int make_room(lazy_trace *trace, lazy_error *err)
{
    if (trace->n_runs < trace->capacity) return LAZY_OK;
    int capacity = trace->capacity ? 2 * trace->capacity : 8;
    lazy_trace_run *runs;
    int code = lazy_alloc((void **)&runs, (size_t)capacity, sizeof *runs, "the trace", err);
    if (code) return code;
    if (trace->n_runs) memcpy(runs, trace->runs, (size_t)trace->n_runs * sizeof *runs);
    lazy_free(trace->runs);
    trace->runs = runs;
    trace->capacity = capacity;
    return LAZY_OK;
}

static int fetch(lazy_stream *stream, void **out, const void *from, int n, lazy_error *err)
{
    enum { WIDTH = 4 }; /* positions and scores alike */
    int code = lazy_alloc(out, (size_t)n, WIDTH, "the trace", err);
    return code ? code : stream->backend->ops->download(stream, *out, from, (size_t)n * WIDTH, err);
}

int lazy_trace_add(lazy_trace *trace, lazy_stream *stream, int first_layer, int last_layer, const int32_t *in_play, int n_in_play,
                   const int32_t *computed, int n_computed, const float *scores, lazy_error *err)
{
    if (!trace->on) return LAZY_OK;
    int code = make_room(trace, err);
    if (code) return code;
    lazy_trace_run run = { .first_layer = first_layer, .last_layer = last_layer, .n_in_play = n_in_play, .n_computed = n_computed };
    code = fetch(stream, (void **)&run.in_play, in_play, n_in_play, err);
    if (!code) code = fetch(stream, (void **)&run.computed, computed, n_computed, err);
    if (!code && scores) code = fetch(stream, (void **)&run.scores, scores, n_in_play, err);
    if (code) free_run(&run);
    else trace->runs[trace->n_runs++] = run;
    return code;
}
