/* session.h — one timeline: its tokens, its caches, its rules. */
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
    uint8_t *waiting;         /* (n_layers + 1,) whether tokens may wait in Aux at that depth */
    atomic_bool busy;         /* a thread is inside */
    bool broken;              /* a pass did not finish */
};

#endif
