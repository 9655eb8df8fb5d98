/* session.h — one context: its tokens, caches and pruning. */
#pragma once

#include "cache.h"
#include "rules.h"
#include "tokens.h"

struct lazy_session {
    lazy_model *model;
    lazy_pruning pruning; /* its arrays are owned */
    lazy_tokens tokens;
    lazy_cache cache;
    lazy_report last, under_way; /* of the last pass that has ended; of the one under way, else zeroed */
    bool traces;                 /* passes to come are traced */
};

/* ---- forward.c -------------------------------------------------------------------------- */

/* Runs the tokens of a pass, already appended and with room reserved, through the model. Only a pass that succeeds
 * changes what the session knows of earlier tokens, at its end. */
int lazy_forward(lazy_session *session, const lazy_pass *request, lazy_error *err);

/* ---- trace.c ---------------------------------------------------------------------------- */

int lazy_report_open(lazy_report *report, int n_layers, bool traced, lazy_error *err);
void lazy_report_close(lazy_report *report); /* may be zeroed, and is then */

/* Copies the sets of a run of layers from the backend; scores may be NULL. Does nothing unless the pass is traced. */
int lazy_trace_add(lazy_report *report, lazy_stream *stream, int first_layer, int last_layer, const int32_t *in_play,
                   int n_in_play, const int32_t *computed, int n_computed, const float *scores, lazy_error *err);
