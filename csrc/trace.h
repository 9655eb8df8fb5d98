/* trace.h — the tokens in play and computed in each layer of the last pass, copied to the host on request. */
#ifndef LAZY_TRACE_H
#define LAZY_TRACE_H

#include "backend.h"

typedef struct lazy_trace {
    bool on;              /* of this pass */
    bool lost;            /* memory ran out: the last pass went on without a trace */
    lazy_trace_run *runs; /* (capacity,) */
    int n_runs, capacity;
} lazy_trace;

/* Drops what the trace holds; `on` starts another. */
void lazy_trace_begin(lazy_trace *trace, bool on);
void lazy_trace_close(lazy_trace *trace);

/* Copies the sets of a run of layers from the backend; scores may be NULL. Does nothing while off or once the trace is
 * lost. Running out of memory loses the trace and is no error. */
int lazy_trace_add(lazy_trace *trace, lazy_stream *stream, int first_layer, int last_layer, const int32_t *in_play,
                   int n_in_play, const int32_t *computed, int n_computed, const float *scores, lazy_error *err);

#endif
