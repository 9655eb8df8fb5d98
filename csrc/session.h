/* session.h — one context: its tokens, caches and pruning rules. */
#ifndef LAZY_SESSION_H
#define LAZY_SESSION_H

#include <stdatomic.h>

#include "cache.h"
#include "rules.h"
#include "tokens.h"
#include "trace.h"

struct lazy_session {
    lazy_model *model;
    lazy_rules rules;
    lazy_tokens tokens;
    lazy_cache cache;
    lazy_trace trace;
    lazy_layer_count *counts; /* (n_layers,) of the last pass */
    uint8_t *waiting;         /* (n_layers + 1,) true where tokens of that depth may be in the Aux cache */
    atomic_bool busy;         /* a call is under way */
    bool broken;              /* a pass was stopped or failed: the caches are inconsistent */
};

#endif
