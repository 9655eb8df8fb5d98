/* forward.h — the one layer loop: prefill, a follow-up question and a decode step are the same pass. */
#ifndef LAZY_FORWARD_H
#define LAZY_FORWARD_H

#include "session.h"

/* What is wanted of a pass over n tokens; NULL is not. */
typedef struct lazy_outputs {
    float *logits;    /* (host) (vocab,) of the last token */
    int32_t *best;    /* (host) the id of the greatest of those */
    float *surprisal; /* (host) (n,) -ln p of each token, NaN where nothing is before it. For passes that drop nothing */
    float *head;      /* (head_rows, vocab) room on the backend, for surprisal */
    int head_rows;    /* at most row_chunk */
} lazy_outputs;

/* Runs the n newest tokens of the timeline (already appended, room reserved) through the model. */
int lazy_forward(lazy_session *session, const int32_t *ids, int n, bool generated, lazy_outputs outputs, lazy_error *err);

#endif
