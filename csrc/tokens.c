#include "tokens.h"

#include <string.h>

#include "backend.h"
#include "memory.h"

int lazy_tokens_reserve(lazy_tokens *tokens, int capacity, lazy_error *err)
{
    uint8_t *kinds = NULL;
    int32_t *depths = NULL;
    uint8_t *evicted = NULL;
    int code = lazy_alloc((void **)&kinds, (size_t)capacity, sizeof *kinds, "the tokens' kinds and depths", err);
    if (!code) code = lazy_alloc((void **)&depths, (size_t)capacity, sizeof *depths, "the tokens' kinds and depths", err);
    if (!code) code = lazy_alloc_zeroed((void **)&evicted, (size_t)capacity, sizeof *evicted, "the tokens' kinds and depths", err);
    if (code) {
        lazy_free(kinds);
        lazy_free(depths);
        return code;
    }
    if (tokens->length) {
        memcpy(kinds, tokens->kinds, (size_t)tokens->length * sizeof *kinds);
        memcpy(depths, tokens->depths, (size_t)tokens->length * sizeof *depths);
        memcpy(evicted, tokens->evicted, (size_t)tokens->length * sizeof *evicted);
    }
    for (int i = tokens->length; i < tokens->left_out_end; i++) evicted[i] = tokens->evicted[i];
    lazy_free(tokens->kinds);
    lazy_free(tokens->depths);
    lazy_free(tokens->evicted);
    tokens->kinds = kinds;
    tokens->depths = depths;
    tokens->evicted = evicted;
    tokens->capacity = capacity;
    return LAZY_OK;
}

void lazy_tokens_close(lazy_tokens *tokens)
{
    lazy_free(tokens->kinds);
    lazy_free(tokens->depths);
    lazy_free(tokens->evicted);
    *tokens = (lazy_tokens){ 0 };
}

void lazy_tokens_append(lazy_tokens *tokens, int n, bool generated)
{
    for (int i = 0; i < n; i++, tokens->length++) {
        tokens->kinds[tokens->length] = generated ? LAZY_GENERATED : LAZY_PROMPT;
        tokens->depths[tokens->length] = 0;
        tokens->n_evicted += tokens->evicted[tokens->length];
    }
    if (!generated) tokens->n_prompt += n;
}

void lazy_tokens_leave_out(lazy_tokens *tokens, const int32_t *positions, int n)
{
    for (int i = 0; i < n; i++) tokens->evicted[positions[i]] = true;
    if (tokens->left_out_end <= positions[n - 1]) tokens->left_out_end = positions[n - 1] + 1;
}

void lazy_tokens_evict(lazy_tokens *tokens, const int32_t *gone)
{
    for (int i = 0; i < tokens->length; i++) {
        tokens->evicted[i] |= (uint8_t)gone[i];
        tokens->n_evicted += gone[i];
    }
}

int lazy_tokens_flag(const lazy_tokens *tokens, const lazy_pruning *pruning, uint8_t *flags, int *n_forced)
{
    int rank = 0, n_prunable = 0; /* rank: prompt tokens before this position */
    for (int i = 0; i < tokens->length; i++) {
        bool prompt = tokens->kinds[i] == LAZY_PROMPT;
        flags[i] = prompt || pruning->prune_generated ? LAZY_PRUNABLE : 0;
        if (prompt) {
            if (rank < pruning->sink || rank >= tokens->n_prompt - pruning->window) flags[i] |= LAZY_FORCED;
            rank++;
        }
        n_prunable += flags[i] & LAZY_PRUNABLE;
    }
    for (int s = 0; s < pruning->n_protect; s++)
        for (int64_t i = pruning->protect[s].begin; i < pruning->protect[s].end && i < tokens->length; i++) flags[i] |= LAZY_FORCED;
    flags[tokens->length - 1] |= LAZY_FORCED;

    *n_forced = 0;
    for (int i = 0; i < tokens->length; i++) *n_forced += !tokens->evicted[i] && flags[i] == (LAZY_PRUNABLE | LAZY_FORCED);
    return n_prunable;
}

double lazy_tokens_computed(const lazy_tokens *tokens, int n_layers)
{
    int64_t pairs = 0;
    for (int i = 0; i < tokens->length; i++)
        if (tokens->kinds[i] == LAZY_PROMPT) pairs += tokens->depths[i];
    return tokens->n_prompt ? (double)pairs / ((double)tokens->n_prompt * n_layers) : 0.0;
}

double lazy_tokens_reached_top(const lazy_tokens *tokens, int n_layers)
{
    int reached = 0;
    for (int i = 0; i < tokens->length; i++) reached += tokens->kinds[i] == LAZY_PROMPT && tokens->depths[i] == n_layers;
    return tokens->n_prompt ? (double)reached / tokens->n_prompt : 0.0;
}
