#include "rules.h"

#include <inttypes.h>
#include <math.h>

#include "error.h"
#include "memory.h"
#include "numeric.h"

const lazy_pruning lazy_pruning_dense = {
    .queries = 1, .head_layer = -1, .layers = 1, .smooth = 1, .gain = 1, .revival = 1
};

static int check_stages(const lazy_stage *stages, int n, int n_layers, const char *which, lazy_error *err)
{
    double most = 1.0; /* keep */
    for (int i = 0; i < n; i++) {
        const lazy_stage *s = &stages[i];
        int lowest = i ? stages[i - 1].layer + 1 : 0, highest = n_layers - (s->for_good ? 1 : 2);
        if (s->layer < lowest || s->layer > highest) /* above the last layer nothing can wait */
            return lazy_invalid(err,
                                "%s: stage after layer %d; in a model of %d layers it can prune after layers %d to %d",
                                which, s->layer, n_layers, lowest, highest);
        bool mass_holds = s->mass > 0 && s->mass <= 1 && s->keep_min >= 0 && s->keep_min <= s->keep_max &&
                          s->keep_max > 0 && s->keep_max <= 1;
        if (s->by_mass && !mass_holds)
            return lazy_invalid(err,
                                "%s: mass %g, keep_min %g and keep_max %g after layer %d; 0 < mass <= 1, "
                                "0 <= keep_min <= keep_max <= 1 and keep_max > 0 must hold",
                                which, s->mass, s->keep_min, s->keep_max, s->layer);
        if (s->by_mass) continue;
        if (!(s->keep > 0 && s->keep <= most))
            return lazy_invalid(err, "%s: keep %g after layer %d; it must be above 0 and at most %g", which, s->keep,
                                s->layer, most);
        most = s->keep;
    }
    return LAZY_OK;
}

/* False with options that would change a policy's scores, or need those to be attention. */
static bool suits_policy(const lazy_pruning *p)
{
    int n_by_mass = 0;
    for (int i = 0; i < p->n_stages; i++) n_by_mass += p->stages[i].by_mass;
    for (int i = 0; i < p->n_decode_stages; i++) n_by_mass += p->decode_stages[i].by_mass;
    return !n_by_mass && p->queries == 1 && p->pooling == LAZY_POOLING_MEAN && p->head_layer == -1 && p->smooth == 1 &&
           !p->words && p->memory == 0 && !p->average;
}

static int check(const lazy_pruning *p, const lazy_config *config, lazy_error *err)
{
    int n_layers = config->n_layers;
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
    if (p->head_layer < -1 || p->head_layer >= n_layers || p->head < 0 || p->head >= config->n_heads)
        return lazy_invalid(err, "head %d of layer %d; the model has %d layers of %d heads", p->head, p->head_layer,
                            n_layers, config->n_heads);
    if (p->head_layer >= 0 && p->queries > LAZY_LEVEL_BLOCK)
        return lazy_invalid(err, "queries is %d; with a head it must be at most %d", p->queries, LAZY_LEVEL_BLOCK);
    for (int i = 0; i < p->n_protect; i++)
        if (p->protect[i].begin < 0 || p->protect[i].end <= p->protect[i].begin)
            return lazy_invalid(err, "protect: span (%" PRId64 ", %" PRId64 "); 0 <= begin < end must hold",
                                p->protect[i].begin, p->protect[i].end);
    if (p->smooth < 1 || p->smooth % 2 == 0)
        return lazy_invalid(err, "smooth is %d; it must be odd and 1 or more", p->smooth);
    if (!(p->memory >= 0 && p->memory <= 1))
        return lazy_invalid(err, "memory is %g; it must be from 0 to 1", p->memory);
    if (!(p->gain >= 1 && p->gain <= 1000) || (p->memory == 0 && p->gain != 1))
        return lazy_invalid(err, "gain is %g; it must be from 1 to 1000, and 1 without memory", p->gain);
    if (!(p->revival >= 0 && p->revival <= 1) || (p->memory == 0 && p->revival != 1))
        return lazy_invalid(err, "revival is %g; it must be from 0 to 1, and 1 without memory", p->revival);
    if (p->average &&
        (p->n_stages != 1 || p->decode != LAZY_DECODE_OWN || p->n_decode_stages || p->layers > 1 || p->memory > 0))
        return lazy_invalid(err, "a mean over layers takes one stage, none for decode, no layers and no memory");
    if (p->policy.call && !suits_policy(p))
        return lazy_invalid(err, "a policy's scores are final: it takes no stage by mass, no queries, pooling, head, "
                                 "smooth, words, memory and mean over layers");
    return LAZY_OK;
}

int lazy_rules_open(lazy_pruning *own, const lazy_pruning *pruning, const lazy_config *config, lazy_error *err)
{
    const char *what = "a pruning setting";
    const lazy_pruning *p = pruning ? pruning : &lazy_pruning_dense;
    *own = lazy_pruning_dense;
    int code = check(p, config, err);
    if (code) return code;
    *own = *p;
    own->stages = own->decode_stages = NULL;
    own->protect = NULL;
    code = lazy_alloc_copy(&own->stages, p->stages, p->n_stages, what, err);
    if (!code) code = lazy_alloc_copy(&own->decode_stages, p->decode_stages, p->n_decode_stages, what, err);
    if (!code) code = lazy_alloc_copy(&own->protect, p->protect, p->n_protect, what, err);
    if (code) lazy_rules_close(own);
    return code;
}

void lazy_rules_close(lazy_pruning *own)
{
    lazy_free((void *)own->stages);
    lazy_free((void *)own->decode_stages);
    lazy_free((void *)own->protect);
    *own = lazy_pruning_dense;
}

enum { FOR_GOOD = 1, NOT_FOR_GOOD = 2, ANY = 3 };

/* True if some pass may have a stage of these kinds after one of the layers first … last. */
static bool has_stage(const lazy_pruning *p, int kinds, int first, int last)
{
    const lazy_stage *stages[] = { p->stages, p->decode_stages };
    const int n[] = { p->n_stages, p->decode == LAZY_DECODE_OWN ? p->n_decode_stages : 0 };
    for (int k = 0; k < 2; k++)
        for (const lazy_stage *s = stages[k]; s < stages[k] + n[k]; s++)
            if (kinds & (s->for_good ? FOR_GOOD : NOT_FOR_GOOD) && first <= s->layer && s->layer <= last) return true;
    return false;
}

bool lazy_rules_prune(const lazy_pruning *p) { return has_stage(p, ANY, 0, INT32_MAX); }
bool lazy_rules_revive_at(const lazy_pruning *p, int layer) { return has_stage(p, NOT_FOR_GOOD, layer - 1, layer - 1); }
bool lazy_rules_drop_for_good(const lazy_pruning *p, int layer) { return has_stage(p, FOR_GOOD, 0, layer - 1); }
bool lazy_rules_stage_at(const lazy_pruning *p, int layer) { return has_stage(p, ANY, layer, layer); }
bool lazy_rules_whole_layer(const lazy_pruning *p, int layer) { return !has_stage(p, ANY, 0, layer - 1); }

bool lazy_rules_same_caches(const lazy_pruning *pruning, const lazy_pruning *others, int n_layers)
{
    bool same = (pruning->memory > 0) == (others->memory > 0) &&
                min_int(pruning->layers, n_layers) == min_int(others->layers, n_layers);
    same &= lazy_rules_layers_before_pruning(pruning, n_layers) == lazy_rules_layers_before_pruning(others, n_layers);
    for (int l = 0; l < n_layers && same; l++)
        same = lazy_rules_revive_at(pruning, l) == lazy_rules_revive_at(others, l) &&
               lazy_rules_drop_for_good(pruning, l + 1) == lazy_rules_drop_for_good(others, l + 1) &&
               lazy_rules_whole_layer(pruning, l) == lazy_rules_whole_layer(others, l);
    return same;
}

int lazy_rules_layers_before_pruning(const lazy_pruning *pruning, int n_layers)
{
    return pruning->n_stages ? pruning->stages[0].layer + 1 : n_layers;
}

lazy_schedule lazy_rules_schedule(const lazy_pruning *p, bool generated, int n_prunable)
{
    if (n_prunable < p->min_tokens) return (lazy_schedule){ 0 };
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
