#include <string.h>

#include "memory.h"
#include "session.h"

int lazy_tokens_reserve(lazy_tokens *tokens, int capacity, lazy_error *err)
{
    size_t n = (size_t)capacity;
    char *memory;
    int code = lazy_alloc_zeroed(&memory, n * LAZY_TOKEN_BYTES, "the tokens' ids, kinds and depths", err);
    if (code) return code;
    lazy_tokens fresh = { .capacity = capacity, .ids = (int32_t *)memory };
    fresh.depths = fresh.ids + n;
    fresh.kinds = (uint8_t *)(fresh.depths + n);
    fresh.gone = fresh.kinds + n;
    lazy_tokens_copy(&fresh, tokens);
    lazy_tokens_close(tokens);
    *tokens = fresh;
    return LAZY_OK;
}

void lazy_tokens_copy(lazy_tokens *to, const lazy_tokens *from)
{
    size_t n = (size_t)from->length;
    to->length = from->length;
    to->n_prompt = from->n_prompt;
    to->n_gone = from->n_gone;
    if (!n) return;
    memcpy(to->ids, from->ids, n * sizeof *to->ids);
    memcpy(to->kinds, from->kinds, n * sizeof *to->kinds);
    memcpy(to->depths, from->depths, n * sizeof *to->depths);
    memcpy(to->gone, from->gone, n * sizeof *to->gone);
}

void lazy_tokens_close(lazy_tokens *tokens)
{
    lazy_free(tokens->ids); /* with all arrays, which lie behind */
    *tokens = (lazy_tokens){ 0 };
}

void lazy_tokens_append(lazy_tokens *tokens, const int32_t *ids, int n, uint8_t kind)
{
    for (int i = 0; i < n; i++, tokens->length++) {
        tokens->ids[tokens->length] = ids[i];
        tokens->kinds[tokens->length] = kind;
        tokens->depths[tokens->length] = 0;
        tokens->gone[tokens->length] = false;
    }
    if (kind != LAZY_GENERATED) tokens->n_prompt += n;
}

void lazy_tokens_truncate(lazy_tokens *tokens, int length)
{
    for (int i = length; i < tokens->length; i++) {
        tokens->n_prompt -= tokens->kinds[i] != LAZY_GENERATED;
        tokens->n_gone -= tokens->gone[i];
    }
    tokens->length = length;
}

int lazy_tokens_prompt_begin(const lazy_tokens *tokens, int first_new)
{
    while (first_new > 0 && tokens->kinds[first_new - 1] == LAZY_READ) first_new--;
    return first_new;
}

void lazy_tokens_commit(lazy_tokens *tokens, int n_ended, const int32_t *depths, const int32_t *gone)
{
    for (int i = lazy_tokens_prompt_begin(tokens, n_ended); i < n_ended; i++) tokens->kinds[i] = LAZY_PROMPT;
    memcpy(tokens->depths, depths, (size_t)tokens->length * sizeof *depths);
    for (int i = 0; i < tokens->length && gone; i++) {
        tokens->gone[i] |= (uint8_t)gone[i];
        tokens->n_gone += gone[i];
    }
}

int lazy_tokens_flag(const lazy_tokens *tokens, const lazy_pruning *pruning, const uint8_t *word_parts, uint8_t *flags,
                     int *in_play, int *n_forced)
{
    int rank = 0, n_prunable = 0; /* rank: prompt tokens before this position */
    for (int i = 0; i < tokens->length; i++) {
        bool prompt = tokens->kinds[i] != LAZY_GENERATED;
        flags[i] = prompt || pruning->prune_generated ? LAZY_PRUNABLE : 0;
        if (prompt) {
            if (rank < pruning->sink || rank >= tokens->n_prompt - pruning->window) flags[i] |= LAZY_FORCED;
            rank++;
        }
        n_prunable += flags[i] & LAZY_PRUNABLE;
    }
    for (int s = 0; s < pruning->n_protect; s++)
        for (int64_t i = pruning->protect[s].begin; i < pruning->protect[s].end && i < tokens->length; i++)
            flags[i] |= LAZY_FORCED;
    flags[tokens->length - 1] |= LAZY_FORCED;
    for (int i = 1; i < tokens->length && pruning->words && word_parts; i++)
        if (word_parts[tokens->ids[i - 1]] & 2 && word_parts[tokens->ids[i]] & 1) flags[i] |= LAZY_JOINED;

    *in_play = *n_forced = 0;
    for (int i = 0; i < tokens->length; i++) {
        if (tokens->gone[i] || !(flags[i] & LAZY_PRUNABLE)) continue;
        ++*in_play;
        *n_forced += (flags[i] & LAZY_FORCED) != 0;
    }
    return n_prunable;
}
