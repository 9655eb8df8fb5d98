/* backend.h — the interface between the method and a device.
 *
 * A backend is a device; it is immutable once opened, and shared. A stream is one session's queue of ops on it: they
 * run in the order given, possibly after the call returns; only ops marked "Waits" have finished when they return.
 *
 * Pointers are addresses in the backend's memory unless marked (host); the method never dereferences them. Activations
 * are of the backend's own type, `activations` (f32 on the CPU); K and V are of its type `kv`. Scores and logits are
 * f32, positions int32. Sums are accumulated in f32 or wider.
 *
 * Shapes: n rows being computed, d hidden, H query heads, G key-value heads, D head_dim, F ffn, m tokens in play.
 * `rows` and `in_play` hold positions in ascending order, without repeats; rows is a subset of in_play. */
#pragma once

#include <math.h>

#include "lazyllm.h"

/* Bytes of one value of LAZY_F32, LAZY_F16 or LAZY_BF16, which activations, K and V are of. */
static inline size_t lazy_float_bytes(lazy_dtype dtype) { return dtype == LAZY_F32 ? 4 : 2; }

/* Widths of the projections' outputs: H D, G D and (H + 2G) D. */
static inline int lazy_q_width(const lazy_config *c) { return c->n_heads * c->head_dim; }
static inline int lazy_kv_width(const lazy_config *c) { return c->n_kv_heads * c->head_dim; }
static inline int lazy_qkv_width(const lazy_config *c) { return lazy_q_width(c) + 2 * lazy_kv_width(c); }

/* The factor on q.k for softmaxes to the base 2, and the cap on the products so scaled; 0: none. */
static inline float lazy_attention_scale(const lazy_config *c)
{
    return (float)(M_LOG2E / sqrt(c->query_scalar ? (double)c->query_scalar : c->head_dim));
}
static inline float lazy_attention_cap(const lazy_config *c) { return (float)M_LOG2E * c->attention_cap; }

typedef struct lazy_backend lazy_backend;
typedef struct lazy_stream lazy_stream;

/* One block of rows of a weight matrix. */
typedef struct lazy_part {
    const void *data; /* (rows, cols) of dtype, rows of whole blocks */
    int rows;
    lazy_dtype dtype;
} lazy_part;

enum { LAZY_MAX_PARTS = 3, LAZY_MAX_EXPERTS = 1024 };

/* W of y = x W^T, (rows, cols): up to three blocks of rows, one below the other (q,k,v or gate,up). */
typedef struct lazy_matrix {
    lazy_part part[LAZY_MAX_PARTS];
    int n_parts;
    int rows, cols;
    const float *bias; /* (rows,) or NULL */
} lazy_matrix;

/* The experts of a layer, n of the config's. */
typedef struct lazy_experts {
    lazy_matrix router;   /* (n, d) */
    lazy_matrix *gate_up; /* (n,) of (2 F, d) */
    lazy_matrix *down;    /* (n,) of (d, F) */
} lazy_experts;

/* K,V cache of one layer; a slot is a position. Attention reads one head at a time, so its tokens lie together. */
typedef struct lazy_kv {
    void *k; /* (G, capacity, D) rotated */
    void *v; /* (G, capacity, D) */
    int capacity;
} lazy_kv;

/* Rows that attend to tokens in play, in one layer. */
typedef struct lazy_attending {
    const void *q;       /* (n, H D) as rotate leaves it, */
    int q_stride;        /*   so many values from one row to the next */
    const int32_t *rows; /* (n,) */
    int n;
    lazy_kv kv;
    const int32_t *in_play; /* (m,) */
    int m;
    int window; /* at least 1; INT32_MAX: none */
} lazy_attending;

/* Flags of a token for selection. */
enum {
    LAZY_PRUNABLE = 1, /* counts as a prompt token, and may be dropped */
    LAZY_FORCED = 2,   /* is always kept */
    LAZY_JOINED = 4,   /* goes on with the word of the position before */
};

/* True for tokens that may be dropped. */
static inline bool lazy_is_free(uint8_t flags) { return (flags & (LAZY_PRUNABLE | LAZY_FORCED)) == LAZY_PRUNABLE; }

enum { LAZY_WORD_REACH = 32 };

/* Memory that a session shares with its forks. */
typedef struct lazy_shared {
    char *data;
    bool owner; /* what is written here, forks see wherever they have not written themselves */
} lazy_shared;

/* A part of it, in bytes. */
typedef struct lazy_stretch {
    size_t begin, end;
} lazy_stretch;

/* The scores that a stage remembers, and how they count. */
typedef struct lazy_memory {
    float *remembered;    /* (capacity,) by position */
    int n_old, length;    /* positions of which something is remembered; those of the context */
    float factor, gain;   /* on what is remembered, and on new scores */
    const int32_t *depth; /* by position */
    int waiting;          /* the depth of the tokens that the stage could revive, */
    float revival;        /*   and the factor on their scores */
} lazy_memory;

/* What a pass takes from one device to the next. */
typedef struct lazy_parcel {
    void *to;
    const void *from;
    size_t bytes;
} lazy_parcel;

typedef struct lazy_ops {
    /* ---- memory ---- */
    int (*alloc)(lazy_backend *, void **out, size_t bytes, const char *what, lazy_error *);
    void (*free)(lazy_backend *, void *memory); /* after all ops that were given it */
    void (*keep)(lazy_backend *, void *memory); /* frees what a session had, for the next one; NULL: as free */
    /* Allocates what will be written in parts only; the rest takes no physical memory. NULL: all of it does anyway. */
    int (*alloc_sparse)(lazy_backend *, void **out, size_t bytes, const char *what, lazy_error *);
    /* Memory that forks share: all four ops or none, to copy sessions. It takes physical memory where it is written. */
    int (*shared_open)(lazy_backend *, lazy_shared **out, size_t bytes, lazy_error *); /* as its owner */
    /* For a fork: reads as the owner's memory in these parts until the fork writes there. parts: (n,) ascending */
    int (*shared_join)(lazy_shared **out, const lazy_shared *from, const lazy_stretch *parts, int n, lazy_error *);
    /* Before an owner writes a row again: ends ownership, unless no fork and no child process has the memory too. */
    int (*shared_leave)(lazy_shared *, lazy_error *);
    void (*shared_close)(lazy_shared *);
    /* Fails, with both numbers in the message, if so many bytes cannot fit. NULL: any number can. */
    int (*admit)(lazy_backend *, uint64_t bytes, const char *what, lazy_error *);
    /* Makes n matrices of one shape in host memory usable by the ops. That memory outlives them, unless the first
     * part's data is another address then. bias is in the backend's memory already. NULL: the ops read them as they
     * are. */
    int (*bind)(lazy_backend *, lazy_matrix *, int n, lazy_error *);
    void (*unbind)(lazy_backend *, lazy_matrix *); /* with the first one all n; NULL where bind is */
    /* Rounds the part's values to LAZY_Q8_0 or LAZY_Q4_1; to (host): (rows, cols). NULL: the CPU does it. Waits. */
    int (*quantize)(lazy_stream *, void *to, lazy_dtype dtype, const lazy_part *, int cols, lazy_error *);
    void (*close)(lazy_backend *);

    /* ---- stream ---- */
    int (*stream_open)(lazy_backend *, const lazy_config *, lazy_stream **out, lazy_error *);
    void (*stream_close)(lazy_stream *); /* Waits */
    /* Allocates the scratch of passes of up to n_rows rows over up to n_tokens tokens; ops never allocate. */
    int (*reserve)(lazy_stream *, int n_rows, int n_tokens, lazy_error *);
    /* Bytes of that scratch. */
    uint64_t (*scratch_bytes)(const lazy_stream *, int n_rows, int n_tokens);
    /* `from` may be overwritten once this returns. */
    int (*upload)(lazy_stream *, void *to, const void *from /* (host) */, size_t bytes, lazy_error *);
    int (*download)(lazy_stream *, void *to /* (host) */, const void *from, size_t bytes, lazy_error *); /* Waits */
    int (*copy)(lazy_stream *, void *to, const void *from, size_t bytes, lazy_error *);
    /* Copies n parcels from the stream's memory to that of `to`, of another device of this kind, after what is queued
     * on both; what comes next on both comes after. NULL: a model is on one device. */
    int (*send)(lazy_stream *, lazy_stream *to, const lazy_parcel *, int n, lazy_error *);

    /* ---- the layer ---- */
    /* x[r,:] = embedding_scale * table[ids[r],:]; the scale is rounded to the activations' type first */
    int (*embed)(lazy_stream *, void *x, const int32_t *ids, int n, const lazy_matrix *table, lazy_error *);
    /* y[r,:] (+)= x[r,:] / sqrt(mean(x[r,:]^2) + eps) * weight; config->layer_norm: = and of x[r,:] - mean(x[r,:]) */
    int (*rmsnorm)(lazy_stream *, void *y, const void *x, int n, int d, const float *weight, float eps, bool accumulate,
                   lazy_error *);
    /* rmsnorm of a layer's output, overwriting y. *first_bad = min(*first_bad, layer) if a value of x is NaN or Inf. */
    int (*checked_rmsnorm)(lazy_stream *, void *y, const void *x, int n, int d, const float *weight, float eps,
                           int layer, int32_t *first_bad, lazy_error *);
    /* y[n,rows] (+)= x[n,cols] W^T + bias; cols: d, H D or F */
    int (*matmul)(lazy_stream *, void *y, const void *x, int n, const lazy_matrix *w, bool accumulate, lazy_error *);
    /* y[n,F] = act(x W[:F]^T) * (x W[F:]^T), without a bias; act: SiLU, or GELU as config->gelu says */
    int (*gated)(lazy_stream *, void *y, const void *x, int n, const lazy_matrix *gate_up, lazy_error *);
    /* y[n,d] (+)= the sum over each row's experts, in ascending order, of weight * (act(x gate^T) * (x up^T)) down^T;
     * n: at most row_chunk. The experts of a row are those with the greatest products with the router, of equal ones
     * the first; their weights are the softmax of all products, or where config->normed_experts of the chosen ones'. A
     * product that is NaN or Inf makes y[r,:] NaN. Which rows are beside it changes no row. */
    int (*mix_experts)(lazy_stream *, void *y, const void *x, int n, const lazy_experts *, bool accumulate,
                       lazy_error *);
    /* Normalises (unless the norms are NULL) and rotates the heads of q (n, H D) in place, and those of k in k_v
     * (n, 2 G D) into kv.k[rows]; copies v from there into kv.v[rows]. Rows of both are `stride` values apart; q or k_v
     * may be NULL. Keys and values are rounded to their type; a finite value beyond its range is an error. The norms
     * are (D,), or H D and G D long, as config->wide_qk_norm, late_qk_norm and layer_norm say. q_rope, k_rope[position,
     * D]: cosines of the D/2 angles, then their sines. */
    int (*rotate)(lazy_stream *, void *q, void *k_v, int stride, const int32_t *rows, int n, lazy_kv,
                  const float *q_rope, const float *k_rope, const float *q_norm, const float *k_norm, float eps,
                  lazy_error *);
    /* y[r,H*D] = softmax over {j : rows[r] - window < in_play[j] <= rows[r]}, the tokens that row r sees, of q.k_j /
     * sqrt(query_scalar), capped by config->attention_cap, times v_j. */
    int (*attention)(lazy_stream *, void *y, const lazy_attending *, lazy_error *);
    /* y[r, :rows] f32 = x W^T, capped by config->logit_cap: the LM head */
    int (*logits)(lazy_stream *, float *y, const void *x, int n, const lazy_matrix *w, lazy_error *);
    /* surprisal[r] = -ln softmax(logits[r, :vocab])[ids[r]]; overwrites logits */
    int (*surprisal)(lazy_stream *, float *surprisal, float *logits, int n, int vocab, const int32_t *ids,
                     lazy_error *);
    /* *id = index of the greatest logit, the smaller among equals; -1 - i if logit i is the first NaN or Inf */
    int (*argmax)(lazy_stream *, int32_t *id, const float *logits, int vocab, lazy_error *);

    /* ---- selection ---- */
    /* scores[j] = attention probability of in_play[j], 0 where the row does not see it, pooled over the H heads, where
     * that of head `heavy` (-1: none) is levelled and counts LAZY_HEAD_WEIGHT times, and over the rows among the last
     * `queries` whose position is at least first_asking. Levelled: a softmax is over a block of LAZY_LEVEL_BLOCK places
     * in play, from which the first LAZY_LEVEL_ALONE are left out, each a block by itself, and is multiplied by the
     * block's share of the tokens that the row sees. With a heavy head `queries` is at most LAZY_LEVEL_BLOCK. */
    int (*scores)(lazy_stream *, float *scores, const lazy_attending *, int queries, lazy_pooling, int heavy,
                  int first_asking, lazy_error *);
    /* layer[in_play[j]] = scores[j] of a prunable, unforced token, 0 of another. layer: (capacity,) by position. */
    int (*keep_scores)(lazy_stream *, float *layer, const float *scores, const int32_t *in_play, int m,
                       const uint8_t *flags, lazy_error *);
    /* scores[j] = the largest of layers[k, in_play[j]], k < n, and with `also` of scores[j]. layers: (n, capacity) */
    int (*largest)(lazy_stream *, float *scores, const float *layers, int n, int capacity, const int32_t *in_play,
                   int m, bool also, lazy_error *);
    /* remembered[i] *= factor for positions i < n_old, 0 for n_old … length-1; then both remembered[in_play[j]] and
     * scores[j] become the larger of remembered[in_play[j]] and gain * scores[j], or NaN if scores[j] is; then
     * scores[j] *= revival if the token waits. */
    int (*remember)(lazy_stream *, float *scores, const lazy_memory *, const int32_t *in_play, int m, lazy_error *);
    /* Running mean: scores is the n-th vector; mean[j] = mean of the first n. n = 1 overwrites mean. */
    int (*average)(lazy_stream *, float *mean, const float *scores, int m, int n, lazy_error *);
    /* out[j] = mean of scores[max(j-width/2,0) … min(j+width/2,m-1)], width odd */
    int (*smooth)(lazy_stream *, float *out, const float *scores, int m, int width, lazy_error *);
    /* out[j] = the largest of the scores of in_play[j] and up to LAZY_WORD_REACH neighbours on each side that belong to
     * its word: joined positions without a gap */
    int (*complete)(lazy_stream *, float *out, const float *scores, const int32_t *in_play, int m, const uint8_t *flags,
                    lazy_error *);
    /* *n_free (host) = the smallest number of highest-scoring prunable, unforced tokens whose scores, added to those of
     * the forced prunable ones, reach `mass` times the sum of all prunable tokens' scores. NaN is an error. Waits. */
    int (*mass)(lazy_stream *, int *n_free, const int32_t *in_play, const float *scores, int m, const uint8_t *flags,
                double mass, lazy_error *);
    /* kept = the tokens in play that are not prunable or are forced, and the n_free highest-scoring others (of equal
     * scores the smaller position); ascending. Scores may be negative. NaN is an error. */
    int (*select)(lazy_stream *, int32_t *kept, const int32_t *in_play, const float *scores, int m,
                  const uint8_t *flags, int n_free, lazy_error *);

    /* ---- bookkeeping ---- */
    /* depth[rows[r]] = value */
    int (*mark)(lazy_stream *, int32_t *depth, const int32_t *rows, int n, int value, lazy_error *);
    /* out = { p in positions : low <= depth[p] <= high }, ascending; *n_out (host): its size. Waits, but for NULL. */
    int (*filter)(lazy_stream *, int32_t *out, int *n_out, const int32_t *positions, int n, const int32_t *depth,
                  int low, int high, lazy_error *);
    /* From x[n,d] of rows[] to y[n_new,d] of new_rows[]: rows in both are copied; those only in rows[] are stored in
     * aux[position,d]; those only in new_rows[] are fetched from there, their number added to *n_revived (backend
     * memory). aux may be NULL if new_rows is a subset of rows: dropped rows are lost. */
    int (*regroup)(lazy_stream *, void *y, const int32_t *new_rows, int n_new, const void *x, const int32_t *rows,
                   int n, void *aux, int d, int32_t *n_revived, lazy_error *);
} lazy_ops;

struct lazy_backend {
    const lazy_ops *ops;
    const char *name;    /* device: "cpu" */
    const char *variant; /* instruction set of the kernels: "avx512" */
    int threads;
    lazy_dtype activations;
    lazy_dtype kv; /* of keys and values: LAZY_F32, LAZY_F16 or LAZY_BF16 */
    int row_chunk; /* most rows per call of the FFN and of the LM head */
};

static inline size_t lazy_activation_bytes(const lazy_backend *backend)
{
    return lazy_float_bytes(backend->activations);
}

/* The first member of every backend's stream. */
struct lazy_stream {
    lazy_backend *backend;
    const lazy_config *config;
    const lazy_watch *watch; /* of the current pass, or NULL */
    bool scores_follow;      /* for attention: the scores of the same rows come next, and may use its products */
    bool many_rows;          /* for products and attention: sums are in the order that many rows have */
    int layers_done;
};

int lazy_cpu_open(lazy_backend **out, int threads, lazy_compute compute, lazy_dtype kv, lazy_error *err);

/* Opens the backend of a device. type: the dtype of most weights; a device that has to choose one computes in it. */
int lazy_device_open(lazy_backend **out, const lazy_device *device, lazy_dtype type, lazy_error *err);

enum { LAZY_MAX_DEVICES = 16 };

/* The backends of all devices that device->name lists, *n of them, also on failure. */
int lazy_devices_open(lazy_backend *out[LAZY_MAX_DEVICES], int *n, const lazy_device *device, lazy_dtype type,
                      lazy_error *err);
