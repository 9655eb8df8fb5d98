#include "trace.h"

#include <string.h>

#include "memory.h"

static void free_run(lazy_trace_run *run)
{
    lazy_free(run->in_play);
    lazy_free(run->computed);
    lazy_free(run->scores);
}

static void drop_runs(lazy_trace *trace)
{
    for (int i = 0; i < trace->n_runs; i++) free_run(&trace->runs[i]);
    trace->n_runs = 0;
}

void lazy_trace_begin(lazy_trace *trace, bool on)
{
    drop_runs(trace);
    trace->on = on;
    trace->lost = false;
}

void lazy_trace_close(lazy_trace *trace)
{
    drop_runs(trace);
    lazy_free(trace->runs);
}

static int reserve_run(lazy_trace *trace)
{
    if (trace->n_runs < trace->capacity) return LAZY_OK;
    int capacity = trace->capacity ? 2 * trace->capacity : 8;
    lazy_trace_run *runs;
    int code = lazy_alloc(&runs, capacity, "the trace", NULL);
    if (code) return code;
    if (trace->n_runs) memcpy(runs, trace->runs, (size_t)trace->n_runs * sizeof *runs);
    lazy_free(trace->runs);
    trace->runs = runs;
    trace->capacity = capacity;
    return LAZY_OK;
}

int lazy_trace_add(lazy_trace *trace, lazy_stream *stream, int first_layer, int last_layer, const int32_t *in_play,
                   int n_in_play, const int32_t *computed, int n_computed, const float *scores, lazy_error *err)
{
    if (!trace->on || trace->lost) return LAZY_OK;
    lazy_trace_run run = {
        .first_layer = first_layer, .last_layer = last_layer, .n_in_play = n_in_play, .n_computed = n_computed
    };
    int code = reserve_run(trace);
    if (!code) code = lazy_alloc(&run.in_play, n_in_play, "the trace", NULL);
    if (!code) code = lazy_alloc(&run.computed, n_computed, "the trace", NULL);
    if (!code && scores) code = lazy_alloc(&run.scores, n_in_play, "the trace", NULL);
    if (code) {
        free_run(&run);
        drop_runs(trace);
        trace->lost = true;
        return LAZY_OK;
    }
    trace->runs[trace->n_runs++] = run;
    const lazy_ops *ops = stream->backend->ops;
    code = ops->download(stream, run.in_play, in_play, (size_t)n_in_play * sizeof *in_play, err);
    if (!code) code = ops->download(stream, run.computed, computed, (size_t)n_computed * sizeof *computed, err);
    if (!code && scores) code = ops->download(stream, run.scores, scores, (size_t)n_in_play * sizeof *scores, err);
    return code;
}
