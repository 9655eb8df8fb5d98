/* pass.h — one pass: its state from layer to layer, and how a layer scores tokens. */
#pragma once

#include "session.h"

/* A set of positions on the backend, ascending and without repeats. */
typedef struct set {
    const int32_t *positions; /* (n,) */
    int n;
} set;

/* One pass. In the middle of layer l its sets change from A[l] and C[l] to A[l+1] and C[l+1]: see docs/method.md. */
typedef struct pass {
    lazy_session *session;
    lazy_cache *cache;
    lazy_stream *stream;
    const lazy_ops *ops;
    const lazy_config *config;
    lazy_schedule schedule;
    const lazy_pass *request;

    int length;       /* tokens of the context, the new ones included */
    int first_new;    /* position of the first new token */
    int first_asking; /* of the first token whose row may score: the first one of the prompt, read parts included */
    bool is_prompt;   /* the new tokens are the user's */
    int n_prunable, n_forced; /* in the whole context; of those in play, the ones that always stay */
    int prunable_in_play;
    int n_newly_gone; /* tokens that this pass has dropped for good */
    int n_free;       /* of the tokens that the pass can drop, how many the policy keeps; -1: as the stage says */

    set in_play;              /* the tokens in play; in one of cache->in_play, the other is free for A[l+1] */
    set computed;             /* in_play itself, its tail, or in one of cache->rows */
    void *x;                  /* (computed.n, d) hidden states of `computed`: the layer's inputs until it ends */
    void *x_next;             /* (capacity, d) room for regrouped rows, and within a layer scratch */
    lazy_attending attending; /* rows that have queries, the last ones of C[l] until it ends; they attend to A[l] */
    bool attended;            /* cache->attention has the attention of these rows */
    bool regrouped;           /* C[l+1] is not a tail of C[l] */
    int trace_first;          /* first layer of the trace's run under way */
} pass;

/* activations: (…, width) */
static inline void *row_of(const pass *p, void *activations, int row, int width)
{
    return (char *)activations + (size_t)row * (size_t)width * lazy_activation_bytes(p->session->model->backend);
}

/* ---- scoring.c -------------------------------------------------------------------------- */

/* True if a stage after layer l or above needs the scores of layer l, perhaps with those of other layers. */
bool lazy_scores_layer(const pass *p, int l);

/* Scores the tokens in play by layer l, if a stage needs that. *out: (in_play.n,) the scores by which the stage after
 * layer l selects; NULL without a stage, or where it keeps everything. */
int lazy_score_stage(pass *p, int l, float **out, lazy_error *err);
