/* tokens.h — the timeline: what each position holds, who wrote it and how deep it has been computed. */
#ifndef LAZY_TOKENS_H
#define LAZY_TOKENS_H

#include "lazyllm.h"

enum { LAZY_PROMPT = 0, LAZY_GENERATED = 1 };

typedef struct lazy_tokens {
    int length, n_prompt;
    int n_gone;
    int n_ahead; /* one past the last position that is left out ahead of its coming; 0 for none */
    int capacity;
    uint8_t *kinds;  /* (capacity,) LAZY_PROMPT or LAZY_GENERATED */
    int32_t *depths; /* (capacity,) as the last pass left them */
    uint8_t *gone;   /* (capacity,) never in play (again): dropped by permanent pruning, or left out before the model */
} lazy_tokens;

/* Room for `capacity` tokens; unchanged on failure. */
int lazy_tokens_reserve(lazy_tokens *tokens, int capacity, lazy_error *err);
void lazy_tokens_close(lazy_tokens *tokens);
void lazy_tokens_append(lazy_tokens *tokens, int n, bool generated);

/* Of the tokens to come, within the room that there is, those at these ascending positions will never be in play. */
void lazy_tokens_leave_out(lazy_tokens *tokens, const int32_t *positions, int n);

/* Of the tokens that were there, the n_kept ones at these ascending positions stay. */
void lazy_tokens_keep(lazy_tokens *tokens, const int32_t *kept, int n_kept);

/* flags[position] of every token for the next selection, the last one being the query; returns how many are prunable,
 * *n_forced how many of those are forced. */
int lazy_tokens_flag(const lazy_tokens *tokens, const lazy_pruning *pruning, uint8_t *flags, int *n_forced);

/* Shares over the prompt tokens: of (token, layer) pairs computed, and of tokens computed in every layer. */
double lazy_tokens_computed(const lazy_tokens *tokens, int n_layers);
double lazy_tokens_reached_top(const lazy_tokens *tokens, int n_layers);

#endif
