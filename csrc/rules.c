#include "rules.h"

#include <inttypes.h>
#include <math.h>

#include "error.h"
#include "memory.h"
#include "numeric.h"

static int check_stages(const lazy_stage *stages, int n, int n_layers, const char *which, lazy_error *err)
{
    double last_keep = 1.0;
    for (int i = 0; i < n; i++) {
        const lazy_stage *s = &stages[i];
        int highest = n_layers - (s->for_good ? 1 : 2); /* above the last layer nothing can wait */
        if (s->layer < 0 || s->layer > highest)
            return lazy_invalid(err, "%s: stage after layer %d; a model of %d layers can prune after layers 0 to %d",
                                which, s->layer, n_layers, highest);
        if (i && s->layer <= stages[i - 1].layer)
            return lazy_invalid(err, "%s: layer %d follows layer %d; layers must increase", which, s->layer,
                                stages[i - 1].layer);
        if (s->by_mass) {
            if (!(s->mass > 0 && s->mass <= 1))
                return lazy_invalid(err, "%s: mass %g after layer %d; it must be above 0 and at most 1", which, s->mass,
                                    s->layer);
            if (!(s->keep_min >= 0 && s->keep_min <= s->keep_max && s->keep_max > 0 && s->keep_max <= 1))
                return lazy_invalid(
                    err,
                    "%s: keep_min %g and keep_max %g after layer %d; 0 <= keep_min <= keep_max <= 1 and "
                    "keep_max > 0 must hold",
                    which, s->keep_min, s->keep_max, s->layer);
            continue;
        }
        if (!(s->keep > 0 && s->keep <= 1))
            return lazy_invalid(err, "%s: keep %g after layer %d; it must be above 0 and at most 1", which, s->keep,
                                s->layer);
        if (s->keep > last_keep)
            return lazy_invalid(err,
                                "%s: keep %g after layer %d is more than the %g before it; keeps must not increase",
                                which, s->keep, s->layer, last_keep);
        last_keep = s->keep;
    }
    return LAZY_OK;
}

/* Refuses options that would change a policy's scores, or need scores to be shares. */
static int check_policy(const lazy_pruning *p, lazy_error *err)
{
    int n_by_mass = 0;
    for (int i = 0; i < p->n_stages; i++) n_by_mass += p->stages[i].by_mass;
    for (int i = 0; i < p->n_decode_stages; i++) n_by_mass += p->decode_stages[i].by_mass;
    if (n_by_mass) return lazy_invalid(err, "a policy takes no stage by mass, whose scores must be shares");
    if (p->queries > 1 || p->pooling != LAZY_POOLING_MEAN || p->smooth > 1 || p->memory > 0 || p->average)
        return lazy_invalid(
            err, "a policy takes no queries, pooling, smooth, memory and mean over layers: its scores are final");
    return LAZY_OK;
}

static int check(const lazy_pruning *p, int n_layers, lazy_error *err)
{
    int code = check_stages(p->stages, p->n_stages, n_layers, "stages", err);
    if (!code && p->decode == LAZY_DECODE_OWN)
        code = check_stages(p->decode_stages, p->n_decode_stages, n_layers, "decode", err);
    if (code) return code;
    const struct {
        const char *name;
        int value, least;
    } numbers[] = { { "sink", p->sink, 0 },
                    { "window", p->window, 0 },
                    { "queries", p->queries, 1 },
                    { "layers", p->layers, 1 },
                    { "min_tokens", p->min_tokens, 0 } };
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (numbers[i].value < numbers[i].least)
            return lazy_invalid(err, "%s is %d; it must be %d or more", numbers[i].name, numbers[i].value,
                                numbers[i].least);
    for (int i = 0; i < p->n_protect; i++)
        if (p->protect[i].begin < 0 || p->protect[i].end <= p->protect[i].begin)
            return lazy_invalid(err, "protect: span (%" PRId64 ", %" PRId64 "); 0 <= begin < end must hold",
                                p->protect[i].begin, p->protect[i].end);
    if (p->smooth < 1 || p->smooth % 2 == 0)
        return lazy_invalid(err, "smooth is %d; it must be odd and 1 or more", p->smooth);
    if (!(p->memory >= 0 && p->memory <= 1))
        return lazy_invalid(err, "memory is %g; it must be from 0 to 1", p->memory);
    if (p->average &&
        (p->n_stages != 1 || p->decode != LAZY_DECODE_OWN || p->n_decode_stages || p->layers > 1 || p->memory > 0))
        return lazy_invalid(err, "a mean over layers takes one stage, none for decode, no layers and no memory");
    return p->policy.call ? check_policy(p, err) : LAZY_OK;
}

int lazy_rules_open(lazy_rules *rules, const lazy_pruning *pruning, int n_layers, lazy_error *err)
{
    const char *what = "a pruning setting";
    const lazy_pruning dense = LAZY_PRUNING_DENSE;
    const lazy_pruning *p = pruning ? pruning : &dense;
    *rules = (lazy_rules){ 0 };
    int code = check(p, n_layers, err);
    if (code) return code;
    rules->pruning = *p;
    rules->pruning.stages = rules->pruning.decode_stages = NULL;
    rules->pruning.protect = NULL;
    code = lazy_alloc_copy(&rules->pruning.stages, p->stages, p->n_stages, what, err);
    if (!code) code = lazy_alloc_copy(&rules->pruning.decode_stages, p->decode_stages, p->n_decode_stages, what, err);
    if (!code) code = lazy_alloc_copy(&rules->pruning.protect, p->protect, p->n_protect, what, err);
    if (code) lazy_rules_close(rules);
    return code;
}

void lazy_rules_close(lazy_rules *rules)
{
    lazy_free((void *)rules->pruning.stages);
    lazy_free((void *)rules->pruning.decode_stages);
    lazy_free((void *)rules->pruning.protect);
    *rules = (lazy_rules){ 0 };
}

bool lazy_rules_prune(const lazy_rules *rules)
{
    return rules->pruning.n_stages > 0 ||
           (rules->pruning.decode == LAZY_DECODE_OWN && rules->pruning.n_decode_stages > 0);
}

/* True if a schedule has a stage that drops for good, or one that does not, after one of the layers first … last. */
static bool has_stage(const lazy_pruning *p, bool for_good, int first, int last)
{
    const lazy_stage *stages[] = { p->stages, p->decode_stages };
    const int n[] = { p->n_stages, p->decode == LAZY_DECODE_OWN ? p->n_decode_stages : 0 };
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < n[k]; i++)
            if (stages[k][i].for_good == for_good && first <= stages[k][i].layer && stages[k][i].layer <= last)
                return true;
    return false;
}

bool lazy_rules_revive_at(const lazy_rules *rules, int layer)
{
    return has_stage(&rules->pruning, false, layer - 1, layer - 1);
}
bool lazy_rules_drop_for_good(const lazy_rules *rules, int layer)
{
    return has_stage(&rules->pruning, true, 0, layer - 1);
}

bool lazy_rules_stage_at(const lazy_rules *rules, int layer)
{
    return has_stage(&rules->pruning, true, layer, layer) || has_stage(&rules->pruning, false, layer, layer);
}

bool lazy_rules_same_caches(const lazy_rules *rules, const lazy_rules *others, int n_layers)
{
    bool same = (rules->pruning.memory > 0) == (others->pruning.memory > 0) &&
                lazy_rules_layers_before_pruning(rules, n_layers) == lazy_rules_layers_before_pruning(others, n_layers);
    for (int l = 0; l < n_layers && same; l++)
        same = lazy_rules_revive_at(rules, l) == lazy_rules_revive_at(others, l) &&
               lazy_rules_drop_for_good(rules, l + 1) == lazy_rules_drop_for_good(others, l + 1) &&
               lazy_rules_whole_layer(rules, l) == lazy_rules_whole_layer(others, l);
    return same;
}

bool lazy_rules_whole_layer(const lazy_rules *rules, int layer)
{
    const lazy_pruning *p = &rules->pruning; /* stages are in the order of their layers */
    return (p->n_stages == 0 || layer <= p->stages[0].layer) &&
           (p->decode != LAZY_DECODE_OWN || p->n_decode_stages == 0 || layer <= p->decode_stages[0].layer);
}

int lazy_rules_layers_before_pruning(const lazy_rules *rules, int n_layers)
{
    return rules->pruning.n_stages ? rules->pruning.stages[0].layer + 1 : n_layers;
}

lazy_schedule lazy_rules_schedule(const lazy_rules *rules, bool generated, int length)
{
    const lazy_pruning *p = &rules->pruning;
    if (length < p->min_tokens) return (lazy_schedule){ 0 };
    bool own = generated && p->decode == LAZY_DECODE_OWN;
    if (generated && p->decode == LAZY_DECODE_FROZEN) return (lazy_schedule){ .frozen = true };
    return (lazy_schedule){ .stages = own ? p->decode_stages : p->stages,
                            .n_stages = own ? p->n_decode_stages : p->n_stages,
                            .layers = p->average ? p->stages[0].layer + 1 : p->layers };
}

const lazy_stage *lazy_schedule_stage(const lazy_schedule *schedule, int layer)
{
    for (int i = 0; i < schedule->n_stages; i++)
        if (schedule->stages[i].layer == layer) return &schedule->stages[i];
    return NULL;
}

/* ceil(keep * n), the product in double precision */
static int tokens_of(double keep, int n) { return (int)ceil(keep * n); }

int lazy_stage_budget(const lazy_stage *stage, int n_prunable, int n_forced, int in_play, int by_mass)
{
    int budget = stage->by_mass ? clamp_int(by_mass, tokens_of(stage->keep_min, n_prunable),
                                            tokens_of(stage->keep_max, n_prunable))
                                : tokens_of(stage->keep, n_prunable);
    return max_int(min_int(budget, in_play), n_forced);
}
