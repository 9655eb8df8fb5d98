/* trace.h — the sets of the last pass, for those who want to look inside. */
#ifndef LAZY_TRACE_H
#define LAZY_TRACE_H

#include "backend.h"

typedef struct lazy_trace {
    bool on;
    lazy_trace_run *runs; /* (capacity,) */
    int n_runs, capacity;
} lazy_trace;

/* Forgets the runs of the pass before. */
void lazy_trace_clear(lazy_trace *trace);
void lazy_trace_close(lazy_trace *trace);

/* Copies one run of layers out of the backend; scores may be NULL. Does nothing while off. */
int lazy_trace_add(lazy_trace *trace, lazy_stream *stream, int first_layer, int last_layer, const int32_t *in_play, int n_in_play,
                   const int32_t *computed, int n_computed, const float *scores, lazy_error *err);

#endif
