/* session.h — one context: its tokens, caches and pruning. */
#pragma once

#include "cache.h"
#include "rules.h"

struct lazy_session {
    lazy_model *model;
    lazy_pruning pruning; /* its arrays are owned */
    lazy_tokens tokens;
    lazy_cache caches[LAZY_MAX_DEVICES]; /* (model->n_places,) */
    lazy_report last, under_way;         /* of the last pass that has ended; of the one under way, else zeroed */
    bool traces;                         /* passes to come are traced */
};

/* The cache of layer l, and of the tokens that wait for layer l + 1. */
static inline lazy_cache *lazy_cache_of(const lazy_session *s, int l)
{
    return (lazy_cache *)&s->caches[lazy_place_of(s->model, l)];
}

/* The one that has the logits. */
static inline lazy_cache *lazy_last_cache(const lazy_session *s)
{
    return lazy_cache_of(s, s->model->config.n_layers - 1);
}

/* ---- tokens.c: the context on the host ------------------------------------------------------ */

/* Bytes of each token. */
enum { LAZY_TOKEN_BYTES = 2 * sizeof(int32_t) + 2 * sizeof(uint8_t) };

/* Makes room for `capacity` tokens. On failure nothing has changed. */
int lazy_tokens_reserve(lazy_tokens *tokens, int capacity, lazy_error *err);
void lazy_tokens_close(lazy_tokens *tokens);

/* Copies the context to tokens that have room for it. */
void lazy_tokens_copy(lazy_tokens *to, const lazy_tokens *from);

/* Adds n tokens. All that a pass changes before its end is in the struct itself: a copy taken before undoes it. */
void lazy_tokens_append(lazy_tokens *tokens, const int32_t *ids, int n, uint8_t kind);

/* Removes the tokens from position `length` on. */
void lazy_tokens_truncate(lazy_tokens *tokens, int length);

/* The position of the first token of the prompt that a pass ends whose new tokens begin at `first_new`. */
int lazy_tokens_prompt_begin(const lazy_tokens *tokens, int first_new);

/* The end of a pass. Read tokens just before position n_ended become ordinary prompt tokens: a pass has followed; 0:
 * none do. depths: (length,) those after it; gone: (length,) 1 for each token that this pass has dropped for good, else
 * 0; NULL: it has dropped none. */
void lazy_tokens_commit(lazy_tokens *tokens, int n_ended, const int32_t *depths, const int32_t *gone);

/* flags: (length,) LAZY_PRUNABLE, LAZY_FORCED and, if the rule has words, LAZY_JOINED of every token; the last one is
 * the query token. word_parts: the model's, or NULL. Returns the number of prunable tokens; *in_play: those of them
 * that are not gone; *n_forced: those in play that always stay. */
int lazy_tokens_flag(const lazy_tokens *tokens, const lazy_pruning *pruning, const uint8_t *word_parts, uint8_t *flags,
                     int *in_play, int *n_forced);

/* ---- forward.c -------------------------------------------------------------------------- */

/* Runs the tokens of a pass, already appended and with room reserved, through the model. Only a pass that succeeds
 * changes what the session knows of earlier tokens, at its end. */
int lazy_forward(lazy_session *session, const lazy_pass *request, lazy_error *err);

/* ---- session.c -------------------------------------------------------------------------- */

int lazy_report_open(lazy_report *report, int n_layers, bool traced, lazy_error *err);
void lazy_report_close(lazy_report *report); /* may be zeroed, and is then */
