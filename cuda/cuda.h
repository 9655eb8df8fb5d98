/* cuda.h — declarations shared by the files of the CUDA backend. Activations, K, V and Aux rows have the
 * backend's type, and so have weights, unless they are quantized and stay as stored. Sums are accumulated in f32 or
 * wider. */
#pragma once

#include <cmath>
#include <type_traits>

#include <cuda_runtime_api.h>

extern "C" {
#include "../csrc/cuda_library.h"
#include "../csrc/error.h"
#include "../csrc/format.h"
}

#include "gemm.h"

enum {
    LAZY_FEW_ROWS = 32,          /* up to which quantized weights are widened in registers: see products.cu */
    LAZY_PAIR_ROWS = 4,          /* up to which experts are not sorted */
    LAZY_PANEL_BYTES = 64 << 20, /* at most, of quantized weights that are widened at a time */
    LAZY_TOKEN_BLOCK = 512,      /* tokens of one block of threads where tokens are chosen */
    LAZY_BUCKETS = 2048,         /* of a histogram of scores */
};

/* A score that is not a number: its layer in the upper 32 bits and its position in the lower ones. The minimum is the
 * first. */
typedef unsigned long long lazy_bad_score;

static const lazy_bad_score LAZY_NO_BAD_SCORE = ~0ull;

/* in_play[begin … end-1]: the tokens that a row attends to. */
struct lazy_key_range {
    int32_t begin, end;
};

/* A softmax to the base 2: the largest product, and the sum of the powers relative to it, or to 0 if it is -Inf. */
struct lazy_softmax {
    float max, sum;
};

/* The ranges of n rows, and what they were computed from. */
struct lazy_ranges {
    lazy_key_range *of_row; /* (stream's rows,) */
    const int32_t *rows, *in_play;
    int n, m, window; /* n == 0: not computed */
};

/* What the blocks of a selection add up, and what the last of them finds for the next kernel. */
struct lazy_choice {
    unsigned long long weight[LAZY_BUCKETS]; /* the histogram of all blocks; zeros between two ops */
    unsigned tickets;                        /* taken by blocks that have added theirs; 0 between two ops */
    uint32_t threshold;                      /* the order of the lowest scores that are kept, without `shift` bits */
    int shift, ties;                         /* ties: how many of the tokens at the threshold are kept */
};

/* Results of kernels for the host, in its own memory. */
struct lazy_findings {
    lazy_bad_score bad_score; /* the first one that selection has met since the last wait, or LAZY_NO_BAD_SCORE */
    int32_t count;            /* result of `filter` or `mass` */
};

struct lazy_cuda {
    lazy_backend base;
    int device;
    char name[16];     /* "cuda:0" */
    char variant[320]; /* "NVIDIA H200, sm_90, bf16" */
    lazy_dtype type;   /* of activations, and of weights that are not quantized */
    cudaMemPool_t pool;
    int capability; /* 90 is 9.0 */
    int processors;
    size_t shared_bytes; /* shared memory of a multiprocessor */
    bool wgmma;          /* attention of many rows uses the kernel in attention_sm90a.cu */
    lazy_gemm *gemm;
    size_t panel_bytes; /* of the largest panel; grows while weights are bound, before streams are opened for passes */
};

/* The most rows of a product with quantized weights that takes no panel. */
static inline int lazy_few_rows(const lazy_cuda *cuda) { return cuda->type == LAZY_F32 ? 1 : LAZY_FEW_ROWS; }

/* Copies from and to the host go through pinned memory, so that the host may overwrite what it uploads and need not
 * wait for the device. A ring: a slot is written again when the device has copied it. */
struct lazy_staging {
    static constexpr int SLOTS = 2;
    static constexpr size_t SLOT_BYTES = 512 << 10; /* a decode step after 58,000 tokens uploads as much */

    char *memory;              /* (SLOTS, SLOT_BYTES) pinned */
    cudaEvent_t copied[SLOTS]; /* after the last upload from each slot */
    int next;                  /* slot */
};

struct lazy_cuda_stream {
    lazy_stream base;
    cudaStream_t queue;
    cudaEvent_t reached; /* what the stream of another device waits for */
    lazy_staging staging;
    int rows, tokens;         /* that the scratch below has room for */
    lazy_ranges full, local;  /* of layers without a window, and with one */
    float *partial;           /* (lazy_cuda_max_partials, D + 2): see attention_task */
    unsigned *tickets;        /* (lazy_cuda_max_partials,) zeros */
    size_t panel_bytes;       /* of the panel */
    void *panel;              /* quantized weights, widened for a product of many rows */
    void *gate_up;            /* (row_chunk, 2 F), of the larger F where there are experts */
    lazy_softmax *softmaxes;  /* (lazy_cuda_max_softmaxes,) of the query rows */
    float *products;          /* (H, tokens) of a single query row and the keys */
    float *router_logits;     /* (row_chunk, n_experts); these and those below of models with experts, k of each row */
    float *weights;           /* (row_chunk, k) */
    int32_t *chosen, *places; /* (row_chunk, k) a row's experts, and where its rows by expert are */
    int32_t *counts;          /* (n_experts,) rows of each */
    int32_t *sorted_rows;     /* (row_chunk k,) rows by expert */
    void *expert_rows;        /* (row_chunk, F) of one expert, or (LAZY_PAIR_ROWS k, F) of all */
    void *expert_states;      /* (row_chunk k, d) rows by expert, then the experts' outputs */
    uint32_t *orders;         /* (tokens,) their scores' order, see selection.cu; whole blocks of tokens */
    void *of_blocks;          /* (blocks of tokens,) 8 bytes: how many of a block's tokens are chosen */
    lazy_choice *choice;      /* of the op that runs */
    lazy_findings *found;     /* pinned */
};

int lazy_cuda_open(lazy_backend **out, const lazy_cuda_options *options, lazy_error *err);

/* Makes the device current for the calling thread; must precede every other CUDA call. */
int lazy_cuda_enter(lazy_backend *backend, lazy_error *err);

/* Waits for the stream. Fails if selection has met a score that is not a number since the last wait. */
int lazy_cuda_wait(lazy_stream *stream, lazy_error *err);

/* ranges.cu */
/* Must follow every change of positions in device memory. */
void lazy_cuda_forget_ranges(lazy_stream *stream);
/* (*out)[r] = the part of in_play that row r attends to: rows[r] - window < position <= rows[r]. Computed only if the
 * stream's last ranges are of other rows or keys. */
int lazy_cuda_find_ranges(lazy_stream *stream, const lazy_attending *a, const lazy_key_range **out, lazy_error *err);

/* LAZY_OK, or fails with `what` and CUDA's text for the error. */
int lazy_cuda_check(cudaError_t code, const char *what, lazy_error *err);

static inline lazy_cuda *lazy_cuda_of(lazy_backend *backend) { return reinterpret_cast<lazy_cuda *>(backend); }

static inline lazy_cuda *lazy_cuda_of(const lazy_stream *stream) { return lazy_cuda_of(stream->backend); }
static inline lazy_cuda_stream *lazy_cuda_scratch(lazy_stream *stream)
{
    return reinterpret_cast<lazy_cuda_stream *>(stream);
}
static inline cudaDataType_t lazy_cuda_data_type(lazy_dtype type)
{
    return type == LAZY_F32 ? CUDA_R_32F : type == LAZY_F16 ? CUDA_R_16F : CUDA_R_16BF;
}

/* Matrices, and their parts of different types, begin at multiples of 16 bytes. */
static inline size_t lazy_cuda_aligned(size_t bytes) { return (bytes + 15) / 16 * 16; }

/* OP(op of backend.h) for all that the backend has. */
/* clang-format off */
#define LAZY_CUDA_OPS(OP)                                                                                              \
    /* backend_cuda.cc */ OP(alloc) OP(free) OP(admit) OP(bind) OP(unbind) OP(close) OP(stream_open) OP(stream_close)  \
        OP(reserve) OP(scratch_bytes) OP(upload) OP(download) OP(copy) OP(send)                                        \
    /* products.cu */ OP(matmul) OP(gated) OP(logits)                                                                  \
    /* experts.cu */ OP(mix_experts)                                                                                   \
    /* rows.cu */ OP(embed) OP(rmsnorm) OP(checked_rmsnorm) OP(rotate) OP(surprisal) OP(argmax)                        \
    /* attention.cu */ OP(attention)                                                                                   \
    /* scores.cu */ OP(scores)                                                                                         \
    /* pooling.cu */ OP(keep_scores) OP(largest) OP(remember)                                                          \
    /* selection.cu */ OP(average) OP(smooth) OP(complete) OP(mass) OP(select)                                         \
    /* sets.cu */ OP(mark) OP(filter) OP(regroup)
/* clang-format on */
#define LAZY_DECLARE(op) std::remove_pointer_t<decltype(lazy_ops::op)> lazy_cuda_##op;
LAZY_CUDA_OPS(LAZY_DECLARE)
#undef LAZY_DECLARE

/* rows.cu: to[r, :] = scale * row ids[r] of w, r < n; ids may be NULL for a quantized w: row r. scale is rounded to the
 * backend's type first. */
int lazy_cuda_widen(lazy_stream *, void *to, const void *w, lazy_dtype, const int32_t *ids, int n, int cols,
                    float scale, lazy_error *);
/* products.cu: y, in f32, = x W^T */
int lazy_cuda_f32_product(lazy_stream *, float *y, const void *x, int n, const lazy_matrix *w, lazy_error *);
/* y[i, :] = x[i / uses, :] W^T, where W is matrix chosen[i] of w; all of these have one part, of one type. gated: W is
 * gate and up, and y their gated product. */
int lazy_cuda_multiply_pairs(lazy_stream *, void *y, const void *x, int n, int uses, const int32_t *chosen,
                             const lazy_matrix *w, bool gated, lazy_error *);
/* attention.cu: maximum number of partial results (row, head, chunk of keys) in passes of up to n_rows rows. */
size_t lazy_cuda_max_partials(const lazy_config *, const lazy_cuda *, int n_rows);
/* scores.cu: maximum number of softmaxes (query row, head, chunk of keys) in passes of up to n_rows rows over n_tokens
 * tokens. */
size_t lazy_cuda_max_softmaxes(const lazy_config *, int n_rows, int n_tokens);
/* ceilings.cu */
int lazy_cuda_read(lazy_stream *, const void *, size_t, lazy_error *);
