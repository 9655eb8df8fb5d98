/* lazyllm.h — the public C API: a model, its sessions, a sampler.
 *
 * A model is loaded once and never changes; any number of threads may share it.
 * A session is the one mutable thing: a timeline of tokens with its caches. One thread at a time.
 *
 * Every fallible function returns LAZY_OK (0) or a negative code and takes the error last;
 * the first error wins. The library never exits, aborts or prints. */
#ifndef LAZYLLM_H
#define LAZYLLM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum lazy_code {
    LAZY_OK = 0,
    LAZY_INVALID = -1,    /* an argument is wrong: the message says which and what would be right */
    LAZY_CHECKPOINT = -2, /* the checkpoint is wrong, or its values overflow */
    LAZY_MEMORY = -3,     /* not enough memory; nothing has changed */
    LAZY_IO = -4,         /* a file could not be opened or mapped */
    LAZY_DEVICE = -5,     /* the device is missing or failed */
    LAZY_CANCELLED = -6,  /* the watcher asked to stop */
    LAZY_UNUSABLE = -7,   /* the session is in use by another thread, or an earlier pass did not finish */
} lazy_code;

typedef struct lazy_error {
    lazy_code code;
    char message[480];
} lazy_error;

/* ---- model ------------------------------------------------------------------------------ */

typedef enum lazy_dtype { LAZY_F32, LAZY_F16, LAZY_BF16 } lazy_dtype;

typedef struct lazy_config {
    int n_layers, hidden, n_heads, n_kv_heads, head_dim, ffn, vocab;
    int context; /* most tokens a session may hold */
    float norm_eps;
    const float *inv_freq; /* (head_dim / 2,) angle per position, RoPE scaling included; copied */
    float rope_scale;      /* factor on cosine and sine: 1 unless YaRN */
    bool tied;             /* the LM head is the embedding */
    bool qkv_bias, o_bias;
    bool qk_norm; /* RMS norm over each head of q and k, before RoPE */
} lazy_config;

/* One entry of a safetensors header, already read by the caller. */
typedef struct lazy_tensor {
    const char *name;
    const char *dtype; /* as safetensors spells it: "F32", "F16", "BF16", … */
    const int64_t *shape;
    int rank;
    int shard;       /* index into the shard paths */
    uint64_t offset; /* bytes from the start of the file */
    uint64_t bytes;
} lazy_tensor;

/* Where to compute. */
typedef struct lazy_device {
    const char *name;             /* "cpu", "cuda" or "cuda:N" */
    int threads;                  /* of the CPU; 0 means all cores that this process may use */
    const char *const *libraries; /* paths where cuBLASLt may lie, best first; for CUDA */
    int n_libraries;
} lazy_device;

typedef struct lazy_model lazy_model;

/* Maps the shards read-only and binds every tensor that the config asks for, checking name, dtype, shape
 * and place of each before any memory is taken. Nothing passed in is kept. */
int lazy_model_open(lazy_model **out, const lazy_config *config, const char *const *shards, int n_shards, const lazy_tensor *tensors,
                    int n_tensors, const lazy_device *device, lazy_error *err);
void lazy_model_close(lazy_model *model); /* once its last session is closed; NULL is fine */

const lazy_config *lazy_model_config(const lazy_model *model);
uint64_t lazy_model_bytes(const lazy_model *model); /* of the weights it uses */
int lazy_model_threads(const lazy_model *model);
const char *lazy_model_isa(const lazy_model *model);    /* the kernels' variant */
const char *lazy_model_device(const lazy_model *model); /* "cpu", "cuda:0" */

/* ---- pruning ---------------------------------------------------------------------------- */

typedef struct lazy_stage {
    int layer;    /* prunes once this layer has run */
    bool by_mass; /* false: keep; true: mass, within keep_min … keep_max */
    double keep;  /* share of the prompt tokens that go on */
    double mass, keep_min, keep_max;
} lazy_stage;

typedef enum lazy_decode { LAZY_DECODE_SAME, LAZY_DECODE_FROZEN, LAZY_DECODE_OWN } lazy_decode;

typedef struct lazy_span {
    int64_t begin, end; /* positions begin … end-1 */
} lazy_span;

typedef struct lazy_pruning {
    const lazy_stage *stages; /* for passes over prompt tokens */
    int n_stages;
    lazy_decode decode;
    const lazy_stage *decode_stages; /* for passes over generated tokens, with LAZY_DECODE_OWN */
    int n_decode_stages;
    int sink, window;         /* the first and the last prompt tokens that never leave play */
    const lazy_span *protect; /* more of those */
    int n_protect;
    int queries;          /* score rows averaged: 1 is the paper */
    int smooth;           /* odd width of the mean over neighbouring scores: 1 is the paper */
    int min_tokens;       /* a shorter context runs dense */
    bool prune_generated; /* generated tokens count as prompt tokens when selecting */
    /* Static token pruning instead: one stage, in passes over prompt tokens alone; scores are the mean over its layer and all
     * below; what it drops is never in play again. */
    bool permanent;
} lazy_pruning;

/* The paper's rule with no stage at all: dense. */
#define LAZY_PRUNING_DENSE ((lazy_pruning){ .queries = 1, .smooth = 1 })

/* ---- session ---------------------------------------------------------------------------- */

typedef struct lazy_session lazy_session;

/* Called on the calling thread, at least after every layer; anything but 0 stops the pass. */
typedef struct lazy_watch {
    int (*poll)(void *context, int layers_done, int n_layers);
    void *context;
} lazy_watch;

/* pruning is copied; NULL means dense. The model must outlive the session. */
int lazy_session_open(lazy_session **out, lazy_model *model, const lazy_pruning *pruning, lazy_error *err);
void lazy_session_close(lazy_session *session);

/* Room for n_tokens in all. On failure nothing has changed. */
int lazy_session_reserve(lazy_session *session, int64_t n_tokens, lazy_error *err);

/* Leaves n of the user's tokens out before they come: they take their places in the context, and no pass ever has them in play.
 * positions: ascending, behind the context so far, within the room reserved, and before the last token of the next pass. */
int lazy_session_leave_out(lazy_session *session, const int32_t *positions, int n, lazy_error *err);

/* Appends n tokens, the model's own (generated) or the user's, and runs them through the model.
 * logits: (vocab,) of the last one. A pass that is stopped or fails after it began leaves the session
 * unusable; bad arguments, and missing memory for its buffers, leave it as it was. */
int lazy_session_forward(lazy_session *session, const int32_t *ids, int n, bool generated, float *logits, const lazy_watch *watch,
                         lazy_error *err);

/* A forward that gives the token of the greatest logit, the smaller id among equals, in place of logits. */
int lazy_session_greedy(lazy_session *session, const int32_t *ids, int n, bool generated, int32_t *token, const lazy_watch *watch,
                        lazy_error *err);

/* A forward of n tokens of the user's that gives surprisal[i] = -ln p(ids[i] | all before it), in place of logits. NaN where
 * nothing is before. For sessions that prune nothing. */
int lazy_session_surprisal(lazy_session *session, const int32_t *ids, int n, float *surprisal, const lazy_watch *watch, lazy_error *err);

typedef struct lazy_layer_count {
    int32_t in_play, computed, revived; /* revived: rows that came back from Aux on entering this layer */
} lazy_layer_count;

/* The sets of a run of layers that share them; kept for the last pass while tracing. */
typedef struct lazy_trace_run {
    int first_layer, last_layer;
    int n_in_play, n_computed;
    int32_t *in_play;  /* (n_in_play,) positions, ascending */
    int32_t *computed; /* (n_computed,) positions, ascending */
    float *scores;     /* (n_in_play,) as selected by, or NULL where last_layer is no stage */
} lazy_trace_run;

/* What follows is for the session's own thread between passes. */
int lazy_session_length(const lazy_session *session);
int lazy_session_n_prompt(const lazy_session *session);
const int32_t *lazy_session_depths(const lazy_session *session);             /* (length,) layers that computed K,V of each token */
const uint8_t *lazy_session_kinds(const lazy_session *session);              /* (length,) 0 prompt, 1 generated */
double lazy_session_computed(const lazy_session *session);                   /* share of (prompt token, layer) pairs computed */
double lazy_session_reached_top(const lazy_session *session);                /* share of prompt tokens computed in the last layer */
const lazy_layer_count *lazy_session_last_pass(const lazy_session *session); /* (n_layers,) */
bool lazy_session_traces(const lazy_session *session);
void lazy_session_set_trace(lazy_session *session, bool on);
const lazy_trace_run *lazy_session_trace(const lazy_session *session, int *n_runs);

/* ---- sampler ---------------------------------------------------------------------------- */

typedef struct lazy_sampler lazy_sampler;

/* temperature 0 is greedy (the smaller id among equals); top_k 0 and top_p 1 switch those filters off.
 * The same seed gives the same draws. */
int lazy_sampler_open(lazy_sampler **out, double temperature, double top_p, int top_k, uint64_t seed, lazy_error *err);
void lazy_sampler_close(lazy_sampler *sampler);
bool lazy_sampler_is_greedy(const lazy_sampler *sampler);
int lazy_sampler_next(lazy_sampler *sampler, const float *logits, int n_vocab, int32_t *token, lazy_error *err);

/* ---- bench ------------------------------------------------------------------------------ */

/* One op on random data, prepared once and run at will. Weights come from memory each time, as they do in a model. */
typedef struct lazy_bench lazy_bench;

typedef struct lazy_bench_shape {
    int n;          /* rows computed */
    int m;          /* tokens in play */
    int rows, cols; /* of the weights: y[n, rows] = x[n, cols] W^T */
    lazy_dtype dtype;
    int n_heads, n_kv_heads, head_dim;
} lazy_bench_shape;

/* op: "multiply_adds" and "read" (rows x cols of dtype) are what the machine can do at most; "matmul"; "gated", of rows / 2
 * outputs; "attention" and "scores" of the last n of m tokens, "select" of half of them,
 * "regroup" of their rows of cols values when half of them go. */
int lazy_bench_open(lazy_bench **out, const char *op, lazy_bench_shape shape, const lazy_device *device, lazy_error *err);
void lazy_bench_close(lazy_bench *bench);
int lazy_bench_run(lazy_bench *bench, double *seconds, lazy_error *err);
double lazy_bench_flops(const lazy_bench *bench); /* of one run, a multiply-add being two */
double lazy_bench_bytes(const lazy_bench *bench); /* that one run must read */

/* ---- machine ---------------------------------------------------------------------------- */

/* Instruction sets that this machine can run, best first, ended by NULL. */
const char *const *lazy_cpu_variants(void);
/* The one that a model opened now would use: the best, or what LAZYLLM_CPU asks for ("reference": the plain loops);
 * NULL if this machine cannot run that. */
const char *lazy_cpu_variant_used(void);
int lazy_cpu_cores(void); /* that this process may use */
/* What there is for CUDA, in words: devices, driver, libraries. An error says why CUDA is off. */
int lazy_cuda_look(char *text, size_t size, const char *const *libraries, int n_libraries, lazy_error *err);

#endif
