/* cache.h — a session's buffers on its backend: K,V, the Aux cache, and the working memory of a pass.
 *
 * K,V slots and Aux rows are indexed by the token's position. A row is written once: K,V by the pass that computes the
 * token in the layer, Aux by the pass that drops it there. What a pass writes beyond the context or above the depth of
 * a token is not read before the pass has ended, so that a pass that does not end leaves nothing to be undone.
 *
 * Where the backend can share memory, the first fork moves K,V and Aux into memory that forks share. A fork may see
 * there what the owner has written since: rows beyond the fork's context or above its depths, which it does not read
 * before it has written them itself. Only rows that are written a second time, after truncation or a pass that did not
 * end, would show; before those the owner leaves. */
#pragma once

#include "model.h"
#include "rules.h"

/* Most rows of a pass that have queries and attention at a time; no less than a backend's row_chunk. Smaller parts
 * would take longer. */
enum { LAZY_PART_ROWS = 8192 };

/* A buffer with room for as many tokens as the cache, or as are computed at once. */
typedef struct lazy_buffer {
    void **slot;      /* the pointer in lazy_cache */
    int limit;        /* most tokens that it needs room for */
    int pieces;       /* consecutive arrays of `capacity` tokens each: the kv heads of K and V, else 1 */
    size_t per_token; /* bytes of a token in one piece */
    size_t extra;     /* bytes beside them */
    bool kept;        /* from pass to pass, thus copied when it grows */
    bool sparse;      /* only some tokens have rows */
    int least, most;  /* of K, V and Aux: the least and the greatest depth of tokens that have rows */
    const char *what;
    int capacity;         /* tokens; at least the cache's, up to the limit */
    size_t shared_offset; /* of K, V and Aux: where the buffer lies in shared memory */
} lazy_buffer;

/* Scores of one stage that decode steps remember. */
typedef struct lazy_remembered {
    float *scores; /* (capacity,) by position; NULL without `memory`, or without a stage */
    int n;         /* positions filled; later ones count as 0 */
    float *fresh;  /* (capacity,) those of the pass under way */
    int n_fresh;   /* positions filled; -1: the pass has not reached the stage */
} lazy_remembered;

typedef struct lazy_cache {
    const lazy_model *model;
    lazy_place *place; /* whose layers have their K,V, Aux and remembered scores here */
    lazy_stream *stream;
    int capacity;               /* tokens */
    lazy_buffer *buffers;       /* (n_buffers,) all buffers below that are on the backend */
    int n_buffers, n_with_rows; /* K, V and Aux come first */
    size_t shared_bytes;        /* of K, V and Aux with room for the model's context */

    lazy_shared *shared;    /* K,V and Aux with room for the model's context; NULL: their buffers grow like others */
    int written;            /* no position from here on has a row, not even of a pass that did not end */
    int32_t *shared_depths; /* (n_shared,) (host) unless it is the owner: rows up to these depths are the owner's, */
    int n_shared;           /*   of the first n_shared positions; all others this cache has written itself */

    const lazy_rope *rope; /* the model's, of `capacity` positions at least */

    /* kept from pass to pass; K,V and Aux with room for kv[l].capacity tokens, which is at least `capacity` */
    lazy_kv *kv; /* (n_layers,) */
    void **aux;  /* (n_layers,) (capacity, d) or NULL; of tokens that wait for layer l, the inputs of layer l-1 */
    lazy_remembered *remembered; /* (n_layers,) of the stage after each layer */
    float *logits;               /* (vocab,) of the last pass */
    bool has_logits;

    /* working memory of one pass; no buffer has more rows than the capacity */
    int32_t *gone; /* (length,) by position: 1 for tokens that this pass has dropped for good; unset if no stage does */
    int32_t *notes;      /* first layer with a NaN or Inf; rows revived for each layer; the logits' argmax */
    int32_t *depth;      /* (length,) number of layers that hold K,V of the token */
    int32_t *in_play[2]; /* (length,), (capacity,) */
    int32_t *ids;        /* (n,) of the new tokens */
    uint8_t *flags;   /* (length,) LAZY_PRUNABLE, LAZY_FORCED, LAZY_JOINED; the last that lazy_cache_lay_out places */
    int32_t *rows[2]; /* (capacity,) */
    float *scores[2]; /* (capacity,) */
    float *layer_scores; /* (min(layers, n_layers), length) by position, layer l in row l % layers; or NULL */
    void *x[2];          /* (capacity, d) hidden states, and room for them when they are regrouped */
    int qkv_rows;        /* that have room in qkv; in passes of more, queries are computed part by part */
    void *qkv;           /* (qkv_rows, (H + 2G) D), or keys and values without some or all queries */
    void *attention;     /* (LAZY_PART_ROWS, H D) */
    void *normed;        /* (row_chunk, d) */
    void *ffn;           /* (row_chunk, F) of layers without experts */
    float *fresh_logits; /* (vocab,) */

    char *staging; /* (host) of uploads and downloads: room for `gone` and all up to `flags` */
} lazy_cache;

static inline size_t lazy_n_notes(const lazy_config *c) { return (size_t)c->n_layers + 2; }

/* Bytes of each token from `gone` to `flags`. */
enum { LAZY_LAID_OUT_BYTES = 4 * sizeof(int32_t) + sizeof(uint8_t) };

int lazy_cache_open(lazy_cache *cache, const lazy_model *model, lazy_place *place, const lazy_pruning *pruning,
                    lazy_error *err);
void lazy_cache_close(lazy_cache *cache);

/* Makes room for `capacity` tokens, `sparse` if most of it will not be written soon; the rows of the first `length` are
 * kept. depths: (length,) (host). If it fails, `capacity` is as before, and buffers that have grown keep their room. */
int lazy_cache_reserve(lazy_cache *cache, int capacity, bool sparse, const int32_t *depths, int length,
                       lazy_error *err);

/* Places notes, depth, in_play[0], ids and flags one behind the other behind `gone`, for a pass with n new tokens of
 * `length`: it then uploads in one piece, and downloads all up to `depth` in one. */
void lazy_cache_lay_out(lazy_cache *cache, int length, int n);

/* Forgets what was remembered of positions from `length` on, and the logits. */
void lazy_cache_truncate(lazy_cache *cache, int length);

/* Before and after a pass: its remembered scores and logits replace those before only once it has ended. */
void lazy_cache_begin(lazy_cache *cache, bool generated);
void lazy_cache_commit(lazy_cache *cache);

/* Bytes of all buffers at this capacity, and of a RoPE table that is still to be made. */
uint64_t lazy_cache_bytes(const lazy_cache *cache, int capacity);

/* ---- buffers.c -------------------------------------------------------------------------- */

/* The memory of a buffer, and the tokens that it has room for. */
typedef struct lazy_room {
    void *data;
    int capacity;
} lazy_room;

static inline lazy_room lazy_room_of(const lazy_buffer *b) { return (lazy_room){ *b->slot, b->capacity }; }

/* True if tokens of this depth have rows in the buffer. */
static inline bool lazy_buffer_holds(const lazy_buffer *b, int depth) { return b->least <= depth && depth <= b->most; }

/* Bytes of a buffer of a cache with room for so many tokens. */
static inline size_t lazy_buffer_bytes(const lazy_buffer *b, int capacity)
{
    return b->per_token * (size_t)b->pieces * (size_t)(capacity < b->limit ? capacity : b->limit) + b->extra;
}

/* Lists the buffers, which are NULL; the cache's tables exist. */
int lazy_buffers_open(lazy_cache *cache, const lazy_pruning *pruning, lazy_error *err);

/* Each buffer is freed before the next one grows, so that one at a time is there twice. */
int lazy_buffers_grow(lazy_cache *cache, int capacity, bool sparse, const int32_t *depths, int length, lazy_error *err);

/* Gives a buffer this memory; the former memory is the caller's to free. */
void lazy_buffer_place(lazy_cache *cache, lazy_buffer *b, lazy_room room);

/* Copies a buffer's rows of the first `length` tokens, without those that the cache shares. Where memory may be sparse,
 * only rows that exist, so that the others go on taking none. depths: (length,) (host) */
int lazy_buffer_copy(const lazy_cache *cache, const lazy_buffer *b, lazy_room to, lazy_room from, const int32_t *depths,
                     int length, lazy_error *err);

/* ---- forks.c ---------------------------------------------------------------------------- */

/* Gives a cache just opened with the same rules the same room and the rows of `length` tokens. depths (host). Waits. */
int lazy_cache_fork(lazy_cache *to, lazy_cache *from, const int32_t *depths, int length, lazy_error *err);

/* Before rows of the positions `first` … end-1 are written, and others above their depths. depths: (first,) (host). */
int lazy_cache_write_from(lazy_cache *cache, int first, int end, const int32_t *depths, lazy_error *err);

/* Bytes of the rows of `length` tokens, which a fork shares; 0 before the first fork. */
uint64_t lazy_cache_shared_bytes(const lazy_cache *cache, int length);
