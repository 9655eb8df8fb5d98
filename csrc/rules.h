/* rules.h — a checked copy of a pruning setting, its stages by layer, and the number of tokens that each keeps. */
#pragma once

#include "lazyllm.h"

/* *own = a copy of a valid setting, arrays included; NULL: of the dense one. */
int lazy_rules_open(lazy_pruning *own, const lazy_pruning *pruning, const lazy_config *config, lazy_error *err);
void lazy_rules_close(lazy_pruning *own);

/* True if the two settings lead to the same caches, in which tokens wait for the same layers. */
bool lazy_rules_same_caches(const lazy_pruning *pruning, const lazy_pruning *others, int n_layers);

/* True if some pass may drop tokens. */
bool lazy_rules_prune(const lazy_pruning *pruning);

/* True if tokens may wait for this layer in an Aux cache: a stage after the layer below does not drop for good. */
bool lazy_rules_revive_at(const lazy_pruning *pruning, int layer);

/* True if a stage below this layer drops tokens for good. */
bool lazy_rules_drop_for_good(const lazy_pruning *pruning, int layer);

/* True if some pass may have a stage after this layer. */
bool lazy_rules_stage_at(const lazy_pruning *pruning, int layer);

/* True if no stage comes before this layer, so that every pass computes every new token in it. */
bool lazy_rules_whole_layer(const lazy_pruning *pruning, int layer);

/* The layers of a pass over prompt tokens up to that of its first stage; without stages all of them. */
int lazy_rules_layers_before_pruning(const lazy_pruning *pruning, int n_layers);

/* The stages of one pass. */
typedef struct lazy_schedule {
    const lazy_stage *stages;
    int n_stages;
    bool frozen; /* selects and revives nothing: each layer attends to the K,V that it holds */
    int layers;  /* a stage is scored by so many layers, its own the last */
} lazy_schedule;

/* The stages of a pass over prompt or generated tokens. n_prunable: in the context, the new ones included. */
lazy_schedule lazy_rules_schedule(const lazy_pruning *pruning, bool generated, int n_prunable);
/* The stage after this layer, or NULL. */
const lazy_stage *lazy_schedule_stage(const lazy_schedule *schedule, int layer);

/* The number of prunable tokens that the stage keeps. n_prunable: in the context; in_play: of those, the ones in play;
 * n_forced: of these, the ones that always stay; by_mass: the number that hold the stage's mass (mass stages only). */
int lazy_stage_budget(const lazy_stage *stage, int n_prunable, int n_forced, int in_play, int by_mass);
