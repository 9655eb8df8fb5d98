/* session.h — one context: its tokens, caches and pruning rules. */
#ifndef LAZY_SESSION_H
#define LAZY_SESSION_H

#include "cache.h"
#include "rules.h"
#include "tokens.h"
#include "trace.h"

/* The report of a pass. */
typedef struct lazy_report {
    lazy_layer_count *counts; /* (n_layers,) */
    lazy_trace trace;
} lazy_report;

struct lazy_session {
    lazy_model *model;
    lazy_rules rules;
    lazy_tokens tokens;
    lazy_cache cache;
    lazy_report last, under_way; /* of the last pass that has ended; of the one under way */
    bool traces;                 /* passes to come are traced */
    uint8_t *waiting;            /* (n_layers + 1,) true where tokens of that depth may be in the Aux cache */
};

#endif
