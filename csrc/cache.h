/* cache.h — a session's buffers on its backend: K,V, the Aux cache, and the working memory of a pass.
 *
 * K,V slots, Aux rows and RoPE angles are indexed by the token's position. A row is written once, by the first pass that computes its
 * token in its layer (K,V) or drops it before that layer (Aux). What a pass writes beyond the context or above the depth of a token is
 * not read before the pass has ended, so that a pass that does not end leaves nothing to be undone. */
#ifndef LAZY_CACHE_H
#define LAZY_CACHE_H

#include "model.h"
#include "rules.h"

/* A buffer whose size is proportional to the capacity. */
typedef struct lazy_growing {
    void **slot;      /* the pointer in lazy_cache */
    int pieces;       /* consecutive arrays of `capacity` tokens each: the kv heads of K and V, else 1 */
    size_t per_token; /* bytes of a token in one piece */
    bool remembered;  /* kept from pass to pass, thus copied when the capacity grows */
    bool sparse;      /* only some tokens have rows */
    int least, most;  /* tokens of these depths have rows */
    const char *what;
    void *fresh; /* the larger buffer, during lazy_cache_reserve */
} lazy_growing;

/* Scores of one stage that decode steps remember. */
typedef struct lazy_remembered {
    float *scores; /* (capacity,) by position; NULL without `memory`, or without a stage */
    int n;         /* positions filled; later ones count as 0 */
    float *fresh;  /* (capacity,) those of the pass under way */
    int n_fresh;   /* positions filled; -1: the pass has not reached the stage */
} lazy_remembered;

typedef struct lazy_cache {
    const lazy_model *model;
    lazy_stream *stream;
    int capacity;          /* tokens */
    lazy_growing *growing; /* (n_growing,) all buffers below with a capacity in their shape */
    int n_growing;

    /* kept from pass to pass */
    lazy_kv *kv;     /* (n_layers,) */
    void **aux;      /* (n_layers,) [l]: (capacity, d) inputs of layer l of tokens dropped before it; NULL where none is revived */
    float *rope[2];  /* (capacity, D) D/2 cosines, then D/2 sines, of each position's angles; [1] by local_inv_freq, NULL without */
    int rope_length; /* positions filled */
    lazy_remembered *remembered; /* (n_layers,) of the stage after each layer */
    float *logits;               /* (vocab,) of the last pass */
    bool has_logits;

    /* working memory of one pass */
    int32_t *depth;      /* (capacity,) number of layers that hold K,V of the token */
    int32_t *ids;        /* (capacity,) */
    uint8_t *flags;      /* (capacity,) */
    int32_t *gone;       /* (capacity,) by position: 1 for tokens that this pass has dropped for good; NULL if no stage does */
    int32_t *in_play[2]; /* (capacity,) */
    int32_t *rows[2];    /* (capacity,) */
    float *scores[2];    /* (capacity,) */
    float *shares;       /* (min(layers, n_layers), capacity) by position, layer l in row l % layers; or NULL */
    void *x[2];          /* (capacity, d) hidden states of this layer and the next */
    void *qkv;           /* (capacity, (H + 2G) D) */
    void *attention;     /* (capacity, H D) */
    void *normed;        /* (row_chunk, d) */
    void *ffn;           /* (row_chunk, F) */
    float *fresh_logits; /* (vocab,) */
    int32_t *notes;      /* (lazy_n_notes,) first layer with a NaN or Inf; rows revived on entering each layer; argmax of the logits */

    /* (host) staging buffer of uploads and downloads: holds the flags or positions of all tokens, the notes, or rows of a RoPE table */
    int32_t *staging;
    size_t staging_words;
} lazy_cache;

static inline size_t lazy_n_notes(const lazy_config *c) { return (size_t)c->n_layers + 2; }

int lazy_cache_open(lazy_cache *cache, lazy_model *model, const lazy_rules *rules, lazy_error *err);
void lazy_cache_close(lazy_cache *cache);

/* Makes room for `capacity` tokens; what is known of the first `length` is kept. depths: (length,) (host). On failure nothing has
 * changed. */
int lazy_cache_reserve(lazy_cache *cache, int capacity, const int32_t *depths, int length, lazy_error *err);

/* Copies what is kept of the first `length` tokens to a cache that was opened with the same rules and has room for them. Waits. */
int lazy_cache_copy(lazy_cache *to, const lazy_cache *from, const int32_t *depths, int length, lazy_error *err);

/* Rows of some tokens, one after the other: (pieces, n, per_token) bytes on the host. */
typedef struct lazy_rows {
    char *data;
    const uint8_t *has; /* (length,) by position: true for the n tokens */
    int length, n;
} lazy_rows;

/* Reads or writes the rows of one buffer. */
int lazy_cache_read(lazy_cache *cache, const lazy_growing *g, lazy_rows rows, lazy_error *err);
int lazy_cache_write(lazy_cache *cache, const lazy_growing *g, lazy_rows rows, lazy_error *err);

/* The buffer whose pointer is *slot, or NULL if the cache has none. */
const lazy_growing *lazy_cache_find(const lazy_cache *cache, const void *slot);

/* Forgets what was remembered of positions from `length` on, and the logits. */
void lazy_cache_truncate(lazy_cache *cache, int length);

/* Before and after a pass: its remembered scores and logits replace those before only once it has ended. */
void lazy_cache_begin(lazy_cache *cache, bool generated);
void lazy_cache_commit(lazy_cache *cache);

/* Bytes of all buffers at this capacity. */
uint64_t lazy_cache_bytes(const lazy_cache *cache, int capacity);

/* Fills the RoPE tables up to `length` positions. */
int lazy_cache_fill_rope(lazy_cache *cache, int length, lazy_error *err);

#endif
