/* rules.h — a pruning setting, checked and owned, and the counts that follow from it. */
#ifndef LAZY_RULES_H
#define LAZY_RULES_H

#include "lazyllm.h"

typedef struct lazy_rules {
    lazy_pruning pruning; /* its arrays are the rules' own */
} lazy_rules;

int lazy_rules_open(lazy_rules *rules, const lazy_pruning *pruning, int n_layers, lazy_error *err);
void lazy_rules_close(lazy_rules *rules);

/* Whether some pass may drop tokens; and whether those may come back, so that an Aux cache is wanted. */
bool lazy_rules_prune(const lazy_rules *rules);
bool lazy_rules_revive(const lazy_rules *rules);

/* What governs one pass. */
typedef struct lazy_schedule {
    const lazy_stage *stages;
    int n_stages;
    bool frozen;    /* no selection, no revival: each layer attends to what its cache holds */
    bool permanent; /* one stage, scored by every layer up to its own, whose choice is for good */
} lazy_schedule;

/* length: tokens of the context, the new ones included. */
lazy_schedule lazy_rules_schedule(const lazy_rules *rules, bool generated, int length);
const lazy_stage *lazy_schedule_stage(const lazy_schedule *schedule, int layer);  /* NULL: none after this layer */
const lazy_stage *lazy_schedule_scored(const lazy_schedule *schedule, int layer); /* the stage that this layer's scores count for */

/* How many prunable tokens stay of those in play: n_prunable in the context, n_forced of them forced,
 * by_mass the number that the stage's mass asks for (used by mass stages only). */
int lazy_stage_budget(const lazy_stage *stage, int n_prunable, int n_forced, int in_play, int by_mass);

#endif
