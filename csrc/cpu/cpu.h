/* cpu.h — what the files of the CPU backend share. Activations are f32; weights are read as the file has them. */
#pragma once

#include "../backend.h"
#include "../numeric.h"
#include "kernels.h"
#include "pool.h"
#include "spare.h"

enum {
    WORKER_SCRATCH = 256 * 1024, /* floats of each thread's scratch: as large as a core's L2 cache */
    ROW_CHUNK = 1024,            /* most rows that are multiplied together */
    MAX_TILE_COLS = 64,          /* columns of any instruction set's register tile */
    /* Attention of up to SPLIT_KEYS_ROWS rows divides the keys among tasks, into at most MAX_CHUNKS chunks. */
    SPLIT_KEYS_ROWS = 64,
    MAX_CHUNKS = 16,
};

typedef struct lazy_cpu {
    lazy_backend base;
    const lazy_arithmetic *arithmetic;
    const lazy_products *in_f32;
    lazy_pool *pool;
    float *scratch; /* (threads - 1, WORKER_SCRATCH) of the pool's workers */
    lazy_spare spare;
} lazy_cpu;

/* A row sees in_play[begin … end-1]. */
typedef struct lazy_seen {
    int32_t begin, end;
} lazy_seen;

typedef struct lazy_cpu_stream {
    lazy_stream base;
    lazy_pool_client *client;
    float *scratch; /* (WORKER_SCRATCH,) of the thread that runs the ops */

    int rows, tokens;     /* largest pass that the buffers below have room for */
    lazy_seen *seen;      /* (rows,) tokens in play that each row sees */
    float *partial;       /* (SPLIT_KEYS_ROWS, H, MAX_CHUNKS, D + 2) output, maximum, sum by chunks of keys */
    float *operands;      /* of as many rows of x as are converted at a time, see operand_stride */
    float *probabilities; /* (H, tokens) attention of one query row */
    bool has_raw_scores;  /* attention has left the last row's scaled and capped q.k in probabilities */
    uint32_t *order;      /* (tokens,) scores as integers, for selection */
    double *block_sums;   /* (tokens,) for smoothing */

    /* of models with experts; chunk: min(rows, ROW_CHUNK), k: experts_per_token, F: expert_ffn */
    float *router_logits; /* (chunk, n_experts) */
    float *weights;       /* (chunk, k) of each row's experts */
    int32_t *places;      /* (chunk, k) of each row's experts, then of their rows below */
    int32_t *sorted_rows; /* (chunk k,) the row of each pair of a row and an expert, by expert */
    float *expert_rows;   /* (chunk k, F) of these pairs */
    float *outputs;       /* (chunk k, d) */
} lazy_cpu_stream;

/* The row of K or V, `k_or_v` of kv, of one key head and slot: (D,) of the backend's type kv. */
static inline char *kv_row(const lazy_stream *stream, lazy_kv kv, void *k_or_v, int head, int slot)
{
    int64_t row = (int64_t)head * kv.capacity + slot;
    return (char *)k_or_v + row * stream->config->head_dim * (int64_t)lazy_float_bytes(stream->backend->kv);
}

static inline lazy_cpu *cpu_of(const lazy_stream *stream) { return (lazy_cpu *)stream->backend; }
static inline const lazy_kernels *kernels_of(const lazy_stream *stream) { return cpu_of(stream)->arithmetic->kernels; }
static inline const lazy_products *products_of(const lazy_stream *stream)
{
    return cpu_of(stream)->arithmetic->products;
}

/* Rows of k values are converted for products unless they are operands already. Rows a multiple of 4 KiB apart map to
 * the same few sets of the L1 cache; these are copied. Copies are an odd number of cache lines apart. */
static inline bool is_converted(const lazy_stream *stream, int k)
{
    return products_of(stream)->unit > 1 || k % 1024 == 0;
}

static inline int64_t operand_stride(const lazy_products *products, int k)
{
    return (ceil_div((int)lazy_row_operands(products, k), 16) | 1) * 16;
}

static inline float *scratch_of(const lazy_stream *stream, int worker)
{
    return worker ? cpu_of(stream)->scratch + (size_t)(worker - 1) * WORKER_SCRATCH
                  : ((const lazy_cpu_stream *)stream)->scratch;
}

/* seen[r] = the positions in in_play that are at or before rows[r] and less than `window` before it */
void lazy_cpu_see(lazy_seen *seen, const lazy_attending *);

/* A task on rows first … end-1; worker: see lazy_task. */
typedef void (*lazy_row_task)(void *job, int first, int end, int worker);

/* Rows sorted by expert. Expert e has those from begin[e] to begin[e + 1] - 1. */
typedef struct lazy_sorted_rows {
    const int32_t *begin; /* (n_experts + 1,) */
    const int32_t *rows;  /* (begin[n_experts],) each one's row of x; NULL: x is sorted */
    int n_experts;
    int n; /* rows of x, by which kernels are chosen: no row's sums depend on other rows' experts */
} lazy_sorted_rows;

/* The ops that the files of this folder define, as lazy_cpu_NAME. */
#define LAZY_CPU_OPS(work)                                                                                             \
    work(alloc) work(free) work(alloc_sparse) work(keep) work(close) work(copy) work(shared_open) work(shared_join)    \
        work(shared_leave) work(shared_close) work(stream_open) work(stream_close) work(reserve) work(scratch_bytes)   \
            work(quantize) work(embed) work(matmul) work(gated) work(mix_experts) work(logits) work(rmsnorm)           \
                work(checked_rmsnorm) work(rotate) work(surprisal) work(argmax) work(attention) work(scores)           \
                    work(keep_scores) work(largest) work(remember) work(average) work(smooth) work(complete)           \
                        work(mass) work(select) work(mark) work(filter) work(regroup)
#define DECLARE_OP(op) extern __typeof__(*((lazy_ops *)0)->op) lazy_cpu_##op;
LAZY_CPU_OPS(DECLARE_OP)
#undef DECLARE_OP

/* stream.c */
/* Runs tasks 0 … n-1 on the backend's threads and polls the stream's watch. */
int lazy_cpu_run(lazy_stream *, lazy_task, void *job, int n, lazy_error *);
/* Runs the task for all of n rows, in ranges of 4 to 32. */
int lazy_cpu_run_rows(lazy_stream *, lazy_row_task, void *job, int n, lazy_error *);
/* linear.c */
/* y = x W^T in f32 whatever the stream's arithmetic, in one order for any n: no row changes another's experts. */
int lazy_cpu_multiply_router(lazy_stream *, float *y, const float *x, int n, const lazy_matrix *w, lazy_error *);
/* y[i, :] = x[row i, :] W^T by its expert's matrix, w[e]; where that has two parts, gate and up: act(gate) * up. */
int lazy_cpu_multiply_experts(lazy_stream *, float *y, const float *x, const lazy_sorted_rows *, const lazy_matrix *w,
                              lazy_error *);
/* rows.c */
int lazy_cpu_refuse_range(const lazy_stream *, lazy_error *); /* a key or value is beyond the range of its type */
