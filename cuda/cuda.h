/* cuda.h — what the files of the CUDA backend share. Weights, activations, K, V and Aux rows are all of one type, the backend's;
 * every sum is f32 or wider. */
#ifndef LAZY_CUDA_H
#define LAZY_CUDA_H

#include <cuda_runtime_api.h>

extern "C" {
#include "../csrc/cuda_library.h"
#include "../csrc/error.h"
}

#include "gemm.h"
#include "graph.h"

/* The first score that is no number: the layer after which, in the upper half, and the position. */
typedef unsigned long long lazy_bad_score;

static const lazy_bad_score LAZY_NO_BAD_SCORE = ~0ull;

struct lazy_cuda {
    lazy_backend base;
    int device;
    char name[16];     /* "cuda:0" */
    char variant[320]; /* of its kernels: "NVIDIA H200, sm_90, bf16" */
    lazy_dtype type;   /* of weights and activations */
    int processors;
    bool wgmma; /* attention of many rows goes by it */
    const lazy_cublas *cublas;
};

struct lazy_cuda_stream {
    lazy_stream base;
    cudaStream_t queue;
    lazy_graphs *graphs; /* NULL where LAZYLLM_CUDA_GRAPHS=0 */
    lazy_gemm *gemm;
    int rows, tokens;          /* that the scratch below is for */
    int32_t *limits;           /* (rows,) how many of the tokens in play each row sees */
    float *partial;            /* (lazy_cuda_most_partial, D + 2) outputs, maxima, sums of chunks of keys */
    void *gate_up;             /* (row_chunk, 2 F) */
    float *shares;             /* (H, tokens) attention of a query row, by head */
    int32_t *count;            /* a number on its way to the host */
    lazy_bad_score *bad_score; /* written by selection, read by downloads */
    lazy_bad_score *host;      /* pinned, where the last one lands */
};

int lazy_cuda_open(lazy_backend **out, const lazy_cuda_options *options, lazy_error *err);

/* Makes the device the thread's own, as must be done before anything else. */
int lazy_cuda_enter(const lazy_backend *backend, lazy_error *err);

/* The same for ops that only launch kernels: where to. */
int lazy_cuda_queue(lazy_stream *stream, const char *what, lazy_queue *out, lazy_error *err);
/* The same for ops that give the stream anything else to do: all that waits to be launched goes first. */
int lazy_cuda_settle(lazy_stream *stream, lazy_error *err);

/* LAZY_OK, or the error of a call or launch by its own text. */
int lazy_cuda_check(cudaError_t code, const char *what, lazy_error *err);

static inline lazy_cuda *lazy_cuda_of(const lazy_stream *stream) { return reinterpret_cast<lazy_cuda *>(stream->backend); }
static inline lazy_cuda_stream *lazy_cuda_scratch(lazy_stream *stream) { return reinterpret_cast<lazy_cuda_stream *>(stream); }
static inline cudaDataType_t lazy_cuda_data_type(lazy_dtype type)
{
    return type == LAZY_F32 ? CUDA_R_32F : type == LAZY_F16 ? CUDA_R_16F : CUDA_R_16BF;
}

/* hopper.cu: settles whether attention may go by wgmma, and says so in the variant. Waits. */
int lazy_cuda_settle_wgmma(lazy_cuda *cuda, lazy_error *err);

/* products.cu */
int lazy_cuda_matmul(lazy_stream *, void *, const void *, int, const lazy_matrix *, bool, lazy_error *);
int lazy_cuda_gated(lazy_stream *, void *, const void *, int, const lazy_matrix *, lazy_error *);
int lazy_cuda_logits(lazy_stream *, float *, const void *, int, const lazy_matrix *, lazy_error *);
/* rows.cu */
int lazy_cuda_embed(lazy_stream *, void *, const int32_t *, int, const lazy_matrix *, lazy_error *);
int lazy_cuda_rmsnorm(lazy_stream *, void *, const void *, int, int, const float *, float, lazy_error *);
int lazy_cuda_rotate(lazy_stream *, void *, const int32_t *, int, lazy_kv, const float *, const float *, const float *, float,
                     lazy_error *);
int lazy_cuda_surprisal(lazy_stream *, float *, float *, int, int, const int32_t *, lazy_error *);
int lazy_cuda_argmax(lazy_stream *, int32_t *, const float *, int, lazy_error *);
int lazy_cuda_note_finite(lazy_stream *, const void *, int, int, int32_t *, lazy_error *);
/* attention.cu: any rows, by whichever kernel suits */
int lazy_cuda_attention(lazy_stream *, void *, const void *, const int32_t *, int, lazy_kv, const int32_t *, int, lazy_error *);
/* How many partial results it has at most, of passes of up to n_rows rows: one for each row, head and chunk of keys. */
size_t lazy_cuda_most_partial(const lazy_config *, int processors, int n_rows);
/* scores.cu */
int lazy_cuda_scores(lazy_stream *, float *, const void *, const int32_t *, int, int, int, lazy_kv, const int32_t *, int, lazy_error *);
/* selection.cu */
int lazy_cuda_average(lazy_stream *, float *, const float *, int, int, lazy_error *);
int lazy_cuda_smooth(lazy_stream *, float *, const float *, int, int, lazy_error *);
int lazy_cuda_mass(lazy_stream *, int *, const int32_t *, const float *, int, const uint8_t *, double, lazy_error *);
int lazy_cuda_select(lazy_stream *, int32_t *, const int32_t *, const float *, int, const uint8_t *, int, lazy_error *);
/* sets.cu */
int lazy_cuda_mark(lazy_stream *, int32_t *, const int32_t *, int, int, lazy_error *);
int lazy_cuda_filter(lazy_stream *, int32_t *, int *, const int32_t *, int, const int32_t *, int, int, lazy_error *);
int lazy_cuda_regroup(lazy_stream *, void *, const int32_t *, int, const void *, const int32_t *, int, void *, int, int32_t *,
                      lazy_error *);
/* ceilings.cu */
int lazy_cuda_multiply_adds(lazy_stream *, double *, lazy_error *);
int lazy_cuda_read(lazy_stream *, const void *, size_t, lazy_error *);

#endif
