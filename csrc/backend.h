/* backend.h — the only contract between the method and a device.
 *
 * A backend is a device: shared, immutable once open. A stream is one session's queue of work on it: ops are
 * carried out in the order given, perhaps later; only those marked "waits" have finished when they return.
 *
 * Pointers named here are addresses in the backend's memory unless marked (host); the method moves them about but
 * never looks behind them. Activations are elements of the backend's own type, `activation_bytes` wide (f32 on the
 * CPU). Scores and logits are always f32, positions int32. Sums are accumulated in f32 or better.
 *
 * Shapes: n rows being computed, d hidden, H query heads, G key-value heads, D head_dim, F ffn, m tokens in play.
 * `rows` and `in_play` hold positions in ascending order, without repeats; rows is a subset of in_play. */
#ifndef LAZY_BACKEND_H
#define LAZY_BACKEND_H

#include "lazyllm.h"

/* Bytes of one value. */
static inline size_t lazy_dtype_width(lazy_dtype dtype) { return dtype == LAZY_F32 ? 4 : 2; }

typedef struct lazy_backend lazy_backend;
typedef struct lazy_stream lazy_stream;

/* W of y = x W^T: (rows, cols), its rows lying in up to three blocks one below the other (q,k,v or gate,up). */
typedef struct lazy_part {
    const void *data; /* (rows, cols) of dtype */
    int rows;
    lazy_dtype dtype;
} lazy_part;

enum { LAZY_MAX_PARTS = 3 };

typedef struct lazy_matrix {
    lazy_part part[LAZY_MAX_PARTS];
    int n_parts;
    int rows, cols;
    const float *bias; /* (rows,) or NULL */
} lazy_matrix;

/* One layer's cache. The slot of a token is its position, so a slot can only ever answer for its own token. The tokens of a head
 * lie together: who attends goes through them head by head. */
typedef struct lazy_kv {
    void *k; /* (G, capacity, D) rotated, activations */
    void *v; /* (G, capacity, D) activations */
    int capacity;
} lazy_kv;

/* What selection may do with the token at a position. */
enum {
    LAZY_PRUNABLE = 1, /* it counts as a prompt token */
    LAZY_FORCED = 2,   /* it stays, whatever its score */
};

typedef struct lazy_ops {
    /* ---- memory ---- */
    int (*alloc)(lazy_backend *, void **out, size_t bytes, const char *what, lazy_error *);
    void (*free)(lazy_backend *, void *memory);
    /* Refuses, with the numbers, what cannot fit. */
    int (*admit)(lazy_backend *, uint64_t bytes, const char *what, lazy_error *);
    /* Makes a matrix that lies in host memory (which stays) usable by the ops. bias is already the backend's. */
    int (*bind)(lazy_backend *, lazy_matrix *, lazy_error *);
    void (*unbind)(lazy_backend *, lazy_matrix *);
    void (*close)(lazy_backend *);

    /* ---- stream ---- */
    int (*stream_open)(lazy_backend *, const lazy_config *, lazy_stream **out, lazy_error *);
    void (*stream_close)(lazy_stream *);
    /* Scratch for passes of up to n_rows rows over up to n_tokens tokens; ops never allocate. */
    int (*reserve)(lazy_stream *, int n_rows, int n_tokens, lazy_error *);
    /* `from` may be used again once this returns. */
    int (*upload)(lazy_stream *, void *to, const void *from /* (host) */, size_t bytes, lazy_error *);
    int (*download)(lazy_stream *, void *to /* (host) */, const void *from, size_t bytes, lazy_error *); /* waits */
    int (*copy)(lazy_stream *, void *to, const void *from, size_t bytes, lazy_error *);

    /* ---- the layer ---- */
    /* x[r,:] = table[ids[r],:] */
    int (*embed)(lazy_stream *, void *x, const int32_t *ids, int n, const lazy_matrix *table, lazy_error *);
    /* y[r,:] = x[r,:] / sqrt(mean(x[r,:]^2) + eps) * weight */
    int (*rmsnorm)(lazy_stream *, void *y, const void *x, int n, int d, const float *weight, float eps, lazy_error *);
    /* y[n,rows] (+)= x[n,cols] W^T + bias */
    int (*matmul)(lazy_stream *, void *y, const void *x, int n, const lazy_matrix *w, bool accumulate, lazy_error *);
    /* y[n,F] = silu(x W[:F]^T) * (x W[F:]^T) */
    int (*gated)(lazy_stream *, void *y, const void *x, int n, const lazy_matrix *gate_up, lazy_error *);
    /* qkv[n,(H+2G)D]: norms (unless NULL) and rotates the heads of q in place, of k on the way to kv.k[rows]; v to kv.v[rows].
     * rope[position, D]: cosines of the D/2 angles, then their sines. */
    int (*rotate)(lazy_stream *, void *qkv, const int32_t *rows, int n, lazy_kv, const float *rope, const float *q_norm,
                  const float *k_norm, float eps, lazy_error *);
    /* y[r,H*D] = softmax over {j : in_play[j] <= rows[r]} of q.k_j / sqrt(D), times v_j */
    int (*attention)(lazy_stream *, void *y, const void *qkv, const int32_t *rows, int n, lazy_kv, const int32_t *in_play, int m,
                     lazy_error *);
    /* y[r, :rows] f32 = x W^T: the LM head */
    int (*logits)(lazy_stream *, float *y, const void *x, int n, const lazy_matrix *w, lazy_error *);
    /* surprisal[r] = -ln softmax(logits[r, :vocab])[ids[r]]; leaves anything in logits */
    int (*surprisal)(lazy_stream *, float *surprisal, float *logits, int n, int vocab, const int32_t *ids, lazy_error *);
    /* *id = that of the greatest of `vocab` logits, the smaller among equals; -1 - i if logit i is the first that is no finite number */
    int (*argmax)(lazy_stream *, int32_t *id, const float *logits, int vocab, lazy_error *);
    /* *first_bad = min(*first_bad, layer) if one of the d values of x is no finite number */
    int (*note_finite)(lazy_stream *, const void *x, int d, int layer, int32_t *first_bad, lazy_error *);

    /* ---- selection ---- */
    /* scores[j] = mean over the H heads and over the last `queries` rows whose position is at least first_new of that
     * row's attention to in_play[j] (0 where in_play[j] lies behind the row) */
    int (*scores)(lazy_stream *, float *scores, const void *qkv, const int32_t *rows, int n, int queries, int first_new, lazy_kv,
                  const int32_t *in_play, int m, lazy_error *);
    /* mean[j] = mean of n vectors of scores, of which this is the n-th; the first one (n = 1) begins it */
    int (*average)(lazy_stream *, float *mean, const float *scores, int m, int n, lazy_error *);
    /* out[j] = mean of scores[max(j-width/2,0) … min(j+width/2,m-1)], width odd */
    int (*smooth)(lazy_stream *, float *out, const float *scores, int m, int width, lazy_error *);
    /* *n_free (host) = how many of the highest-scoring prunable, unforced tokens it takes until, with the forced
     * prunable ones, they hold `mass` of the prunable tokens' scores. NaN is an error. Waits. */
    int (*mass)(lazy_stream *, int *n_free, const int32_t *in_play, const float *scores, int m, const uint8_t *flags, double mass,
                lazy_error *);
    /* kept = the tokens in play that are unprunable or forced, and the n_free highest-scoring others, the smaller
     * position first among equals; ascending. NaN is an error. */
    int (*select)(lazy_stream *, int32_t *kept, const int32_t *in_play, const float *scores, int m, const uint8_t *flags, int n_free,
                  lazy_error *);

    /* ---- bookkeeping ---- */
    /* depth[rows[r]] = value */
    int (*mark)(lazy_stream *, int32_t *depth, const int32_t *rows, int n, int value, lazy_error *);
    /* out = { p in positions : low <= depth[p] <= high }, ascending; *n_out (host). Waits. */
    int (*filter)(lazy_stream *, int32_t *out, int *n_out, const int32_t *positions, int n, const int32_t *depth, int low, int high,
                  lazy_error *);
    /* y[n_new,d]: rows[] -> new_rows[]. Rows that end here go to aux[position,d]; new ones come from there, and
     * *n_revived (backend memory) tells how many. Without aux (NULL) they are gone, and none is new. */
    int (*regroup)(lazy_stream *, void *y, const int32_t *new_rows, int n_new, const void *x, const int32_t *rows, int n, void *aux, int d,
                   int32_t *n_revived, lazy_error *);

    /* ---- ceilings ---- */
    /* As many multiply-adds as the device can do, on random numbers out of registers; *flops of them. Waits. */
    int (*multiply_adds)(lazy_stream *, double *flops, lazy_error *);
    /* Reads memory as fast as the device can. Waits. */
    int (*read)(lazy_stream *, const void *memory, size_t bytes, lazy_error *);
} lazy_ops;

struct lazy_backend {
    const lazy_ops *ops;
    const char *name;    /* of the device: "cpu" */
    const char *variant; /* of its kernels: "avx512" */
    int threads;
    size_t activation_bytes; /* width of one activation */
    int row_chunk;           /* rows that the FFN is best run on at a time */
};

/* The part of a stream that every backend begins with. */
struct lazy_stream {
    lazy_backend *backend;
    const lazy_config *config;
    const lazy_watch *watch; /* of the pass under way, or NULL */
    int layers_done;
    int rows; /* that the pass under way begins with; 0 between passes */
};

int lazy_cpu_open(lazy_backend **out, int threads, lazy_error *err);

#endif
