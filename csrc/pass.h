/* pass.h — one pass: its state between layers, and how a layer scores tokens. */
#pragma once

#include "session.h"

/* A set of positions on the backend, ascending and without repeats. */
typedef struct set {
    const int32_t *positions; /* (n,) */
    int n;
} set;

/* One pass, and its state between layers. */
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
    int first_asking; /* of the first token whose row may score: the prompt's own, with what has been read of it */
    bool is_prompt;   /* the new tokens are the user's */
    int n_prunable, n_forced; /* of the whole context */
    int prunable_in_play;
    int n_newly_gone; /* tokens that this pass has dropped for good */
    int n_free;       /* those that a policy keeps after this layer, of the free ones; -1: as the stage says */

    set in_play;              /* A[l], the tokens in play; in one of cache->in_play, the other is free for A[l+1] */
    set computed;             /* C[l]: A[l] itself, its tail, or in one of cache->rows */
    void *x;                  /* (computed.n, d) their hidden states, the inputs of the layer */
    void *x_next;             /* (capacity, d) room for those of other tokens */
    lazy_attending attending; /* the last rows of C[l], those whose queries are there, to A[l] */
    bool attended;            /* cache->attention is theirs */
    bool regrouped;           /* C[l+1] is not a tail of C[l] */
    int trace_first;          /* the layer since which the sets are what they are */
} pass;

/* activations: (…, width) */
static inline void *row_of(const pass *p, void *activations, int row, int width)
{
    return (char *)activations + (size_t)row * (size_t)width * lazy_activation_bytes(p->session->model->backend);
}

/* ---- scoring.c -------------------------------------------------------------------------- */

/* True if a stage in layer l or a higher one is scored by layer l, and by others perhaps. */
bool lazy_scores_layer(const pass *p, int l);

/* Scores the tokens in play by layer l, if a stage needs that. *out: (in_play.n,) what the stage after layer l selects
 * by; NULL where there is none or it keeps everything. */
int lazy_score_stage(pass *p, int l, float **out, lazy_error *err);
