/* forward.h — the one layer loop: prefill, a follow-up question and a decode step are the same pass. */
#ifndef LAZY_FORWARD_H
#define LAZY_FORWARD_H

#include "session.h"

/* Results of a pass over n tokens; NULL where not wanted. */
typedef struct lazy_outputs {
    float *logits; /* (host) (vocab,) of the last token */
    int32_t *best; /* (host) the id of the greatest logit */
    float
        *surprisal; /* (host) (n,) -ln p of each token, NaN for the first of the context. For passes without pruning */
    float *head;    /* (head_rows, vocab) on the backend: logits of some rows at a time, for surprisal */
    int head_rows;  /* at most row_chunk */
    bool stops_at_first_stage; /* the pass ends below the first stage of prompts, where its tokens wait; it has no
                                  results */
} lazy_outputs;

/* Runs the newest n tokens, already appended and with room reserved, through the model. Only a pass that succeeds
 * changes what the session knows of earlier tokens, at its end. */
int lazy_forward(lazy_session *session, int n, bool generated, lazy_outputs outputs, lazy_error *err);

#endif
