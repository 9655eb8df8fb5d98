/* forward.h — the one layer loop: prefill, a follow-up question and a decode step are the same pass. */
#ifndef LAZY_FORWARD_H
#define LAZY_FORWARD_H

#include "session.h"

/* Runs the n newest tokens of the timeline (already appended, room reserved) through the model.
 * logits (host): (vocab,) of the last one. */
int lazy_forward(lazy_session *session, const int32_t *ids, int n, bool generated, float *logits, lazy_error *err);

#endif
