/* policy.h — a rule of scoring by the caller, and what it may look at. */
#ifndef LAZY_POLICY_H
#define LAZY_POLICY_H

#include "cache.h"

/* A layer that has run; on the backend. */
typedef struct lazy_layer_state {
    const lazy_cache *cache;
    int layer;
    const int32_t *in_play; /* (m,) positions */
    const int32_t *rows;    /* (n,) positions */
    const void *x;          /* (n, d) */
} lazy_layer_state;

/* One call of the policy. scores: (m,) on the backend; scores and n_free are NULL where it only observes. */
int lazy_policy_ask(const lazy_policy *policy, const lazy_view *view, float *scores, int *n_free, lazy_error *err);

#endif
