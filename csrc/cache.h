/* cache.h — what a session remembers on its backend, and the room it works in.
 *
 * Everything is indexed by position: the K,V slot of a token, its Aux row (one per token, not one per layer: a
 * token waits at one depth at a time), its depth. */
#ifndef LAZY_CACHE_H
#define LAZY_CACHE_H

#include "model.h"

/* A buffer that grows with the context. */
typedef struct lazy_growing {
    void **slot;      /* the member of lazy_cache that points to it */
    int pieces;       /* one after the other, each with room for every token: the heads of K and V, or 1 */
    size_t per_token; /* bytes in a piece */
    bool remembered;  /* from pass to pass */
    const char *what;
    void *fresh; /* its successor, while growing */
} lazy_growing;

typedef struct lazy_cache {
    const lazy_model *model;
    lazy_stream *stream;
    int capacity;          /* tokens */
    lazy_growing *growing; /* (n_growing,) every member below that has a capacity */
    int n_growing;

    /* remembered from pass to pass */
    lazy_kv *kv;     /* (n_layers,) */
    void *aux;       /* (capacity, d) input of the layer at which the token waits; NULL where nothing is pruned */
    int32_t *depth;  /* (capacity,) layers that hold K,V of the token */
    float *rope;     /* (capacity, D) cosines, then sines, of each position's angles */
    int rope_length; /* positions filled */

    /* worked in during one pass */
    int32_t *ids;        /* (capacity,) */
    uint8_t *flags;      /* (capacity,) */
    int32_t *in_play[2]; /* (capacity,) */
    int32_t *rows[2];    /* (capacity,) */
    float *scores[2];    /* (capacity,) raw and smoothed */
    void *x[2];          /* (capacity, d) hidden states, before and after regrouping */
    void *qkv;           /* (capacity, (H + 2G) D) */
    void *attention;     /* (capacity, H D) */
    void *normed;        /* (row_chunk, d) */
    void *ffn;           /* (row_chunk, F) */
    float *logits;       /* (vocab,) */
    int32_t *notes;      /* (lazy_n_notes,) first layer with a value that is no number; rows revived entering each layer; argmax */

    /* (host) where what goes to the backend and back is put together: room for the flags or positions of every token, the notes,
     * or one row of the RoPE table */
    int32_t *staging;
    size_t staging_words;
} lazy_cache;

static inline size_t lazy_n_notes(const lazy_config *c) { return (size_t)c->n_layers + 2; }

int lazy_cache_open(lazy_cache *cache, lazy_model *model, bool keeps_aux, lazy_error *err);
void lazy_cache_close(lazy_cache *cache);

/* Room for `capacity` tokens, the first `length` of which are remembered. Unchanged on failure. */
int lazy_cache_reserve(lazy_cache *cache, int capacity, int length, lazy_error *err);

/* Fills the RoPE table up to `length` positions. */
int lazy_cache_fill_rope(lazy_cache *cache, int length, lazy_error *err);

#endif
