/* cpu.h — what the files of the CPU backend share. Activations are f32, weights stay as they lie in the mapping. */
#ifndef LAZY_CPU_H
#define LAZY_CPU_H

#include "../backend.h"
#include "kernels.h"
#include "pool.h"

/* Each worker's own scratch: fits a core's L2 cache. */
enum { WORKER_SCRATCH = 256 * 1024 /* floats */ };

typedef struct lazy_cpu {
    lazy_backend base;
    lazy_ops ops;
    const lazy_kernels *kernels;
    lazy_pool *pool;
    float *scratch; /* (threads, WORKER_SCRATCH) */
} lazy_cpu;

typedef struct lazy_cpu_stream {
    lazy_stream base;
    int rows, tokens; /* that the scratch below is for */
    int32_t *limits;  /* (rows,) how many of the tokens in play each row sees */
    float *partial;   /* (rows <= FEW_ROWS, H, MOST_CHUNKS, D + 2) attention over chunks of keys: outputs, maxima, sums */
    float *gate_up;   /* (FEW_PRODUCT_ROWS, 2 F) */
    float *shares;    /* (H, tokens) attention of a query row, by head */
    uint32_t *order;  /* (tokens,) score bits that selection orders */
} lazy_cpu_stream;

enum {
    FEW_ROWS = 64, /* up to here attention divides the keys among tasks, into at most ... */
    MOST_CHUNKS = 16,
};

enum { MOST_TILE_COLS = 64 }; /* of any instruction set's tile */

static inline int least(int a, int b) { return a < b ? a : b; }
static inline int quotient_up(int a, int b) { return (a + b - 1) / b; }

static inline lazy_cpu *cpu_of(const lazy_stream *stream) { return (lazy_cpu *)stream->backend; }
static inline const lazy_kernels *kernels_of(const lazy_stream *stream) { return cpu_of(stream)->kernels; }
static inline float *scratch_of(const lazy_stream *stream, int worker) { return cpu_of(stream)->scratch + (size_t)worker * WORKER_SCRATCH; }

/* Runs tasks 0 … n-1 on the backend's threads, with the stream's watch polled. */
int lazy_cpu_run(lazy_stream *stream, lazy_task task, void *job, int n, lazy_error *err);

/* limits[r] = how many of in_play are at or before rows[r] */
void lazy_cpu_limits(int32_t *limits, const int32_t *rows, int n, const int32_t *in_play, int m);

/* linear.c */
int lazy_cpu_embed(lazy_stream *, void *, const int32_t *, int, const lazy_matrix *, lazy_error *);
int lazy_cpu_matmul(lazy_stream *, void *, const void *, int, const lazy_matrix *, bool, lazy_error *);
int lazy_cpu_gated(lazy_stream *, void *, const void *, int, const lazy_matrix *, lazy_error *);
int lazy_cpu_logits(lazy_stream *, float *, const void *, int, const lazy_matrix *, lazy_error *);
/* rows.c */
int lazy_cpu_rmsnorm(lazy_stream *, void *, const void *, int, int, const float *, float, lazy_error *);
int lazy_cpu_rotate(lazy_stream *, void *, const int32_t *, int, lazy_kv, const float *, const float *, const float *, float, lazy_error *);
int lazy_cpu_surprisal(lazy_stream *, float *, float *, int, int, const int32_t *, lazy_error *);
int lazy_cpu_argmax(lazy_stream *, int32_t *, const float *, int, lazy_error *);
int lazy_cpu_note_finite(lazy_stream *, const void *, int, int, int32_t *, lazy_error *);
/* attention.c */
int lazy_cpu_attention(lazy_stream *, void *, const void *, const int32_t *, int, lazy_kv, const int32_t *, int, lazy_error *);
/* scores.c */
int lazy_cpu_scores(lazy_stream *, float *, const void *, const int32_t *, int, int, int, lazy_kv, const int32_t *, int, lazy_error *);
/* selection.c */
int lazy_cpu_average(lazy_stream *, float *, const float *, int, int, lazy_error *);
int lazy_cpu_smooth(lazy_stream *, float *, const float *, int, int, lazy_error *);
int lazy_cpu_mass(lazy_stream *, int *, const int32_t *, const float *, int, const uint8_t *, double, lazy_error *);
int lazy_cpu_select(lazy_stream *, int32_t *, const int32_t *, const float *, int, const uint8_t *, int, lazy_error *);
/* sets.c */
int lazy_cpu_mark(lazy_stream *, int32_t *, const int32_t *, int, int, lazy_error *);
int lazy_cpu_filter(lazy_stream *, int32_t *, int *, const int32_t *, int, const int32_t *, int, int, lazy_error *);
int lazy_cpu_regroup(lazy_stream *, void *, const int32_t *, int, const void *, const int32_t *, int, void *, int, int32_t *, lazy_error *);
/* ceilings.c */
int lazy_cpu_multiply_adds(lazy_stream *, double *, lazy_error *);
int lazy_cpu_read(lazy_stream *, const void *, size_t, lazy_error *);

/* reference.c: the same results by the plainest loops */
lazy_ops lazy_reference_ops(void);
extern const lazy_ops lazy_cpu_ops;

#endif
