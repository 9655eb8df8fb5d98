#include "memory.h"
#include "session.h"

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

int lazy_trace_add(lazy_report *report, lazy_stream *stream, int first_layer, int last_layer, const int32_t *in_play,
                   int n_in_play, const int32_t *computed, int n_computed, const float *scores, lazy_error *err)
{
    if (!report->traced) return LAZY_OK;
    const lazy_ops *ops = stream->backend->ops;
    int32_t *memory;
    int code = lazy_alloc(&memory, 2 * (size_t)n_in_play + (size_t)n_computed, "the trace", err);
    if (code) return code;
    const lazy_trace_run run = { .first_layer = first_layer,
                                 .last_layer = last_layer,
                                 .n_in_play = n_in_play,
                                 .n_computed = n_computed,
                                 .in_play = memory,
                                 .computed = memory + n_in_play,
                                 .scores = scores ? (float *)(memory + n_in_play + n_computed) : NULL };
    report->runs[report->n_runs++] = run;
    code = ops->download(stream, run.in_play, in_play, (size_t)n_in_play * sizeof *in_play, err);
    if (!code) code = ops->download(stream, run.computed, computed, (size_t)n_computed * sizeof *computed, err);
    if (!code && scores) code = ops->download(stream, run.scores, scores, (size_t)n_in_play * sizeof *scores, err);
    return code;
}
