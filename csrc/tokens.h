/* tokens.h — the context on the host: kind, depth and eviction of the token at each position. */
#ifndef LAZY_TOKENS_H
#define LAZY_TOKENS_H

#include "lazyllm.h"

enum { LAZY_PROMPT = 0, LAZY_GENERATED = 1 };

typedef struct lazy_tokens {
    int length, n_prompt;
    int n_evicted;    /* of the tokens in the context */
    int left_out_end; /* one past the last position named to lazy_tokens_leave_out; 0 for none */
    int capacity;
    uint8_t *kinds;   /* (capacity,) LAZY_PROMPT or LAZY_GENERATED */
    int32_t *depths;  /* (capacity,) layers that hold K,V of the token after the last pass */
    uint8_t *evicted; /* (capacity,) never in play again: dropped for good, or left out in advance */
} lazy_tokens;

/* Bytes of each token. */
enum { LAZY_TOKEN_BYTES = sizeof(uint8_t) + sizeof(int32_t) + sizeof(uint8_t) };

/* Makes room for `capacity` tokens. On failure nothing has changed. */
int lazy_tokens_reserve(lazy_tokens *tokens, int capacity, lazy_error *err);
void lazy_tokens_close(lazy_tokens *tokens);
void lazy_tokens_append(lazy_tokens *tokens, int n, bool generated);

/* Evicts tokens in advance. positions: ascending, not yet in the context, below the capacity. */
void lazy_tokens_leave_out(lazy_tokens *tokens, const int32_t *positions, int n);

/* gone: (length,) 1 for each token to be evicted, which was not before; else 0 */
void lazy_tokens_evict(lazy_tokens *tokens, const int32_t *gone);

/* flags: (length,) LAZY_PRUNABLE and LAZY_FORCED of every token; the last one is the query token. Returns the number of prunable
 * tokens; *n_forced: those of them that always stay and are not evicted. */
int lazy_tokens_flag(const lazy_tokens *tokens, const lazy_pruning *pruning, uint8_t *flags, int *n_forced);

/* Share of (prompt token, layer) pairs computed, and share of prompt tokens computed in every layer. */
double lazy_tokens_computed(const lazy_tokens *tokens, int n_layers);
double lazy_tokens_reached_top(const lazy_tokens *tokens, int n_layers);

#endif
