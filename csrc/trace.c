#include "memory.h"
#include "session.h"

static void free_run(lazy_trace_run *run)
{
    lazy_free(run->in_play);
    lazy_free(run->computed);
    lazy_free(run->scores);
}

static void drop_runs(lazy_report *report)
{
    for (int i = 0; i < report->n_runs; i++) free_run(&report->runs[i]);
    report->n_runs = 0;
}

void lazy_trace_begin(lazy_report *report, bool traced)
{
    drop_runs(report);
    report->traced = traced;
    report->lost = false;
}

int lazy_report_open(lazy_report *report, int n_layers, lazy_error *err)
{
    int code = lazy_alloc_zeroed(&report->counts, n_layers, "the pass counts", err);
    return code ? code : lazy_alloc(&report->runs, n_layers, "the trace", err);
}

void lazy_report_close(lazy_report *report)
{
    drop_runs(report);
    lazy_free(report->counts);
    lazy_free(report->runs);
}

int lazy_trace_add(lazy_report *report, lazy_stream *stream, int first_layer, int last_layer, const int32_t *in_play,
                   int n_in_play, const int32_t *computed, int n_computed, const float *scores, lazy_error *err)
{
    if (!report->traced || report->lost) return LAZY_OK;
    lazy_trace_run run = {
        .first_layer = first_layer, .last_layer = last_layer, .n_in_play = n_in_play, .n_computed = n_computed
    };
    int code = lazy_alloc(&run.in_play, n_in_play, "the trace", NULL);
    if (!code) code = lazy_alloc(&run.computed, n_computed, "the trace", NULL);
    if (!code && scores) code = lazy_alloc(&run.scores, n_in_play, "the trace", NULL);
    if (code) {
        free_run(&run);
        drop_runs(report);
        report->lost = true;
        return LAZY_OK;
    }
    report->runs[report->n_runs++] = run;
    const lazy_ops *ops = stream->backend->ops;
    code = ops->download(stream, run.in_play, in_play, (size_t)n_in_play * sizeof *in_play, err);
    if (!code) code = ops->download(stream, run.computed, computed, (size_t)n_computed * sizeof *computed, err);
    if (!code && scores) code = ops->download(stream, run.scores, scores, (size_t)n_in_play * sizeof *scores, err);
    return code;
}
