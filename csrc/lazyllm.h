/* lazyllm.h — the public C API: a model, its sessions, a sampler.
 *
 * A model is immutable once opened, and threads may share it. A session holds one context: its tokens and caches. One
 * call at a time may be under way on a session: the caller sees to that.
 *
 * Functions that can fail return LAZY_OK (0) or a negative code, and take a lazy_error as the last parameter; the first
 * error is kept. The library never exits, aborts or prints. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum lazy_code {
    LAZY_OK = 0,
    LAZY_INVALID = -1,    /* an argument is invalid: the message names it and what is allowed */
    LAZY_CHECKPOINT = -2, /* the checkpoint is invalid, or a value computed from it is NaN or Inf */
    LAZY_MEMORY = -3,     /* not enough memory; the call has changed nothing */
    LAZY_IO = -4,         /* a file could not be opened or mapped, or has changed since */
    LAZY_DEVICE = -5,     /* the device is missing or failed */
    LAZY_CANCELLED = -6,  /* the progress callback stopped the call */
    LAZY_UNUSABLE = -7,   /* the process was forked during the pass, and this is the child */
} lazy_code;

typedef struct lazy_error {
    lazy_code code;
    char message[480];
} lazy_error;

/* A progress callback of a long call. It runs on the calling thread, at least after every layer; a result other than 0
 * stops the call, which then returns LAZY_CANCELLED. */
typedef struct lazy_watch {
    int (*poll)(void *context, int layers_done, int n_layers);
    void *context;
} lazy_watch;

/* ---- model ------------------------------------------------------------------------------ */

/* Types of values, as format.h describes them; activations, keys and values are of one of the first three. */
typedef enum lazy_dtype {
    LAZY_F32,
    LAZY_F16,
    LAZY_BF16,
    LAZY_Q8_0,
    LAZY_Q4_0,
    LAZY_Q4_1,
    LAZY_Q5_0,
    LAZY_Q5_1,
    LAZY_Q4_K,
    LAZY_Q5_K,
    LAZY_Q6_K
} lazy_dtype;

/* The type to which the CPU rounds the operands of products; sums are f32. INT8: with weights; attention is in bf16
 * where there are instructions for it, else in f32. */
typedef enum lazy_compute { LAZY_COMPUTE_F32, LAZY_COMPUTE_BF16, LAZY_COMPUTE_INT8 } lazy_compute;

enum { LAZY_MAX_ROPES = 4 };

typedef struct lazy_config {
    int n_layers, hidden, n_heads, n_kv_heads, head_dim, ffn, vocab;
    int context; /* maximum number of tokens of a session */
    float norm_eps;
    int n_ropes;               /* at most LAZY_MAX_ROPES */
    const float *inv_freq;     /* (n_ropes, head_dim / 2) radians per position, scaled; 0: the pair stays. Copied */
    const float *rope_scale;   /* (n_ropes,) factors on cosine and sine: 1 unless YaRN or longrope; copied */
    const int32_t *layer_rope; /* (n_layers,) the rope of each layer; copied */
    int short_context; /* in passes over longer contexts each layer turns by the rope after its own; `context`: never */
    int rotary_dim;    /* RoPE turns the first rotary_dim values of a head */
    bool paired_rope;  /* the values that it turns together are 2i and 2i + 1, not i and i + rotary_dim / 2 */
    float query_growth; /* q is multiplied by 1 + growth ln(1 + floor(p / query_step)); not with late_qk_norm */
    int query_step;
    const int32_t *windows; /* (n_layers,) a token attends to the last windows[l] positions; 0: to all. Copied */
    float query_scalar;     /* attention's scores are q.k / sqrt(query_scalar); 0: head_dim */
    float attention_cap;    /* these scores x become cap tanh(x / cap) before the softmax; 0: no cap */
    float logit_cap;        /* the same for logits, behind their factor */
    float embedding_scale;  /* factor on the embeddings: 1 unless Gemma or Granite */
    float logit_scale;      /* factor on the logits: 1 unless Granite */
    bool tied;              /* the LM head uses the embedding's weights */
    bool qkv_bias, o_bias;
    bool qk_norm;       /* RMS norm over each head of q and k, before RoPE */
    bool wide_qk_norm;  /* over all heads of q together, and of k; with qk_norm */
    bool late_qk_norm;  /* behind RoPE; with qk_norm, not with wide_qk_norm */
    bool norm_plus_one; /* norms multiply by 1 + weight */
    bool layer_norm;    /* norms subtract the mean, those of q and k are by head; no other kind of norm beside */
    bool pre_norms;     /* RMS norm of the inputs of attention and FFN; these, post_norms or both */
    bool parallel;      /* attention and FFN both read the norm before attention; with pre_norms, not with post_norms */
    bool post_norms;    /* RMS norm of the outputs of attention and FFN, before they are added to the hidden state */
    bool gelu;          /* the FFN's gate is GELU in its tanh form, not SiLU */
    const int32_t *expert_layers;                 /* (n_layers,) 1: n_experts FFNs in place of one. Copied */
    int n_experts, experts_per_token, expert_ffn; /* 0 where no layer has experts */
    bool normed_experts;                          /* weights of the chosen experts are divided by their sum */
} lazy_config;

/* One entry of a safetensors header, as read by the caller. */
typedef struct lazy_tensor {
    const char *name;
    const char *dtype; /* "F32", "F16", "BF16", …, as in safetensors and GGUF files */
    const int64_t *shape;
    int rank;
    int shard;       /* index into the shard paths */
    uint64_t offset; /* bytes from the start of the file */
    uint64_t bytes;
} lazy_tensor;

typedef struct lazy_device {
    const char *name;    /* "cpu", "cuda", "cuda:N", or "cuda:0,1" for a model whose layers are divided among GPUs */
    int threads;         /* of the CPU, which rounds weights for a GPU too; at least 1 */
    const char *compute; /* "f32", "bf16" or "int8", on the CPU; NULL: f32 */
    const char *kv;      /* type of keys and values: "f32", "f16" or "bf16", on the CPU; NULL: f32 */
    const char *const *libraries; /* for CUDA: paths of cuBLASLt to try, in order */
    int n_libraries;
} lazy_device;

typedef struct lazy_model lazy_model;

/* Maps the shards read-only and binds every tensor that the config requires. Name, dtype, shape and file range of all
 * of them are validated before any memory is allocated. No argument is referenced after the call. weights: the formats
 * of matrices in use: "auto": as stored; "q8": all in Q8_0; "q4": those of the layers in Q4_1, embedding and LM head in
 * Q8_0. watch may be NULL. */
int lazy_model_open(lazy_model **out, const lazy_config *config, const char *const *shards, int n_shards,
                    const lazy_tensor *tensors, int n_tensors, const char *weights, const lazy_device *device,
                    const lazy_watch *watch, lazy_error *err);
void lazy_model_close(lazy_model *model); /* after its last session is closed; model may be NULL */

/* Once, before sessions whose rules have `words`. parts: (vocab,) 1: the token's text begins with a character of a
 * word, 2: it ends with one */
int lazy_model_know_words(lazy_model *model, const uint8_t *parts, lazy_error *err);

/* ---- pruning ---------------------------------------------------------------------------- */

typedef struct lazy_stage {
    int layer;    /* chooses the tokens in play above this layer, once that has keys and values */
    bool by_mass; /* true: by mass, within keep_min … keep_max; false: by keep */
    double keep;  /* fraction of the prompt tokens that stays in play */
    double mass, keep_min, keep_max;
    bool for_good; /* what it drops is gone: no later pass has it in play, in any layer */
} lazy_stage;

typedef enum lazy_decode { LAZY_DECODE_SAME, LAZY_DECODE_FROZEN, LAZY_DECODE_OWN } lazy_decode;

typedef struct lazy_span {
    int64_t begin, end; /* positions begin … end-1 */
} lazy_span;

/* A layer that has keys and values, as a policy sees it; lazy_view_copy hands out arrays. Valid during its call. */
typedef struct lazy_view {
    int layer;
    bool is_prompt;   /* a pass over prompt tokens */
    bool observes;    /* no scores are wanted: the policy observes the layer for a stage above it */
    int n_keep;       /* prompt tokens that the stage keeps, if scores are wanted */
    int length;       /* tokens of the context, the new ones included */
    int first_asking; /* position of the first new token, or of the first that `read` has read of the prompt */
    int n_in_play;    /* m tokens */
    int n_rows;       /* n of them, those that this layer computes */
    int window;       /* of this layer; 0: none */
    struct pass *pass;
} lazy_view;

typedef enum lazy_view_part {
    LAZY_VIEW_IN_PLAY,     /* (m,) int32 positions, ascending */
    LAZY_VIEW_ROWS,        /* (n,) int32 positions, ascending */
    LAZY_VIEW_PROTECTED,   /* (length,) uint8, by position: 1 where the pass cannot drop the token */
    LAZY_VIEW_PROJECTIONS, /* (n, H + 2G, D) of each row H queries, rotated and not scaled; the others are scratch */
    LAZY_VIEW_KEYS,        /* (G, length, D) rotated, by position */
    LAZY_VIEW_VALUES,      /* (G, length, D) by position */
    LAZY_VIEW_HIDDEN,      /* (n, hidden) inputs of the layer */
} lazy_view_part;

/* Copies entries first … first+n-1 of the part's first axis (keys and values: of the second) to `out` (host). */
int lazy_view_copy(const lazy_view *view, lazy_view_part part, int first, int n, void *out, lazy_error *err);

/* A rule of scoring by the caller. */
typedef struct lazy_policy {
    /* scores: (m,) to be filled with numbers, unless the policy observes. *n_free: of the tokens that the pass can
     * drop, how many stay, the highest-scoring first; unchanged (-1): as many as the stage keeps. A result other than 0
     * stops the pass, which then returns LAZY_CANCELLED. Runs on the calling thread, with no op under way and no lock
     * held. NULL: the paper's rule. */
    int (*call)(void *context, const lazy_view *view, float *scores, int *n_free);
    void *context;
} lazy_policy;

/* How the attention of several heads and query rows becomes one score. */
typedef enum lazy_pooling {
    LAZY_POOLING_MEAN, /* the mean over both */
    LAZY_POOLING_RMS,  /* the root mean square over heads, the largest over rows */
} lazy_pooling;

/* The attention of a setting's head: the factor on it, and how it is levelled */
#define LAZY_HEAD_WEIGHT 8.0f
enum { LAZY_LEVEL_ALONE = 4, LAZY_LEVEL_BLOCK = 512 };

typedef struct lazy_pruning {
    const lazy_stage *stages; /* for passes over prompt tokens */
    int n_stages;
    lazy_decode decode;
    const lazy_stage *decode_stages; /* for passes over generated tokens, with LAZY_DECODE_OWN */
    int n_decode_stages;
    int sink, window;         /* numbers of first and last prompt tokens that are always kept */
    const lazy_span *protect; /* spans that are always kept */
    int n_protect;
    int queries;          /* query rows that score, with a head at most LAZY_LEVEL_BLOCK; the paper: 1 */
    lazy_pooling pooling; /* of their attention */
    int head_layer, head; /* whose attention is levelled and counts LAZY_HEAD_WEIGHT times; -1: none */
    int layers;           /* the score is the largest one in so many last layers; the paper: 1 */
    int smooth;           /* odd width of the moving average over the scores; the paper: 1 */
    bool words;           /* then a score is the largest of the token's word */
    double memory;        /* decode steps: a score is at least `memory` times the one remembered; the paper: 0 */
    double gain;          /* decode steps: factor on new scores, beside those remembered; 1 without memory */
    double revival;       /* decode steps: factor on the score of a token that waits in Aux; 1 without memory */
    int min_tokens;       /* passes over contexts of fewer prunable tokens are dense */
    bool prune_generated; /* generated tokens count as prompt tokens when selecting */
    /* The score is the mean over the stage's layer and all layers below, as in static pruning. For one stage, and none
     * for decode; not with layers and memory. */
    bool average;
    /* Gives other scores, and observes the `layers` - 1 layers below each stage. Not with queries, smooth, memory,
     * average or stages by mass. */
    lazy_policy policy;
} lazy_pruning;

/* No stages: dense. A setting begins with these values, not with zeros. */
extern const lazy_pruning lazy_pruning_dense;

/* ---- session ---------------------------------------------------------------------------- */

typedef struct lazy_session lazy_session;

/* pruning is copied; NULL means dense. The model must outlive the session. */
int lazy_session_open(lazy_session **out, lazy_model *model, const lazy_pruning *pruning, lazy_error *err);
void lazy_session_close(lazy_session *session);

/* Takes another setting for the passes to come: other keeps, scores and tokens that are always kept. Its stages are
 * after the same layers and drop for good after the same ones, memory is on or off and `layers` as before, and neither
 * setting has a policy: the caches stay as they are. On failure nothing has changed. */
int lazy_session_reschedule(lazy_session *session, const lazy_pruning *pruning, lazy_error *err);

/* Makes room for n_tokens in total, of which about n_soon come next. On failure nothing has changed. */
int lazy_session_reserve(lazy_session *session, int64_t n_tokens, int64_t n_soon, lazy_error *err);

/* Bytes of all buffers of a session with room for n_tokens, without the weights. */
uint64_t lazy_session_bytes(const lazy_session *session, int n_tokens);

/* Bytes that the next fork takes beyond what it shares with the session. The first one of a session moves it into
 * memory that can be shared, which for a moment takes as much as a copy. */
uint64_t lazy_session_fork_bytes(const lazy_session *session);

/* Removes all tokens but the first `length`, 0 to all of them, whose state stays as it is: K,V, Aux rows, depths. */
int lazy_session_truncate(lazy_session *session, int64_t length, lazy_error *err);

/* A second session in the same state and with the same room, which has run no pass yet. Nothing that is done to one
 * shows in the other. policy_context: for the policy's calls in it, if it has one. */
int lazy_session_fork(lazy_session **out, lazy_session *session, void *policy_context, lazy_error *err);

/* Runs new tokens through the model. A pass that is stopped or fails leaves the session as it was before. */
typedef struct lazy_pass {
    const int32_t *ids; /* (n,) appended to the context */
    int n;
    bool generated;          /* tokens of an answer; else of a prompt */
    const lazy_watch *watch; /* or NULL */
    /* results; NULL where not wanted */
    float *logits; /* (vocab,) of the last token */
    int32_t *best; /* the id of the greatest logit, the smaller among equals */
    /* (n,) -ln p(ids[i] | all before it), NaN for the context's first token. For prompts of sessions without pruning */
    float *surprisal;
    /* These are the beginning of a prompt: they run up to the first stage, since what comes next decides which of them
     * are computed further. A prompt that is read in parts is pruned as if it had been run in one pass. No results. */
    bool reads;
} lazy_pass;

int lazy_session_run(lazy_session *session, const lazy_pass *pass, lazy_error *err);

/* The logits that the last pass ended with: (vocab,). There are none in an empty or a truncated context. */
int lazy_session_logits(lazy_session *session, float *logits, lazy_error *err);

/* The state of a session in parts, to be saved and restored. In each part only the tokens that have a row there appear,
 * in the order of their positions; tokens that are gone have none. */
typedef enum lazy_state_part {
    LAZY_STATE_KEYS,       /* (G, n, D) of the tokens that the layer has computed; in the type of K and V */
    LAZY_STATE_VALUES,     /* (G, n, D) */
    LAZY_STATE_AUX,        /* (n, hidden) of the tokens that wait for the layer; activations */
    LAZY_STATE_REMEMBERED, /* (n,) f32, scores of the stage after the layer, of the first n positions */
    LAZY_STATE_LOGITS,     /* (n,) f32, of the last pass, where a pass may need them: n is vocab or 0. Of no layer */
} lazy_state_part;

/* The n of a part. -1: the session has no such part. */
int lazy_session_state_length(const lazy_session *session, lazy_state_part part, int layer);
/* Copies a part of n entries to or from `data` (host). */
int lazy_session_get_state(lazy_session *session, lazy_state_part part, int layer, void *data, lazy_error *err);
int lazy_session_set_state(lazy_session *session, lazy_state_part part, int layer, int n, const void *data,
                           lazy_error *err);

/* Makes n tokens the context of an empty session; parts of its state come next. gone: (n,) 1: in play no more. */
int lazy_session_set_tokens(lazy_session *session, const int32_t *ids, const uint8_t *kinds, const int32_t *depths,
                            const uint8_t *gone, int n, lazy_error *err);

typedef struct lazy_layer_count {
    int32_t in_play, computed, revived; /* revived: those computed that had to be fetched from the Aux cache */
} lazy_layer_count;

/* Of a traced pass: the tokens in play and computed in consecutive layers where both are the same. */
typedef struct lazy_trace_run {
    int first_layer, last_layer;
    int n_in_play, n_computed;
    int32_t *in_play;  /* (n_in_play,) positions, ascending */
    int32_t *computed; /* (n_computed,) positions, ascending */
    float *scores;     /* (n_in_play,) of the stage after last_layer, smoothed; NULL without one */
} lazy_trace_run;

typedef struct lazy_report {
    lazy_layer_count *counts; /* (n_layers,) */
    lazy_trace_run *runs;     /* (n_runs,) of at most n_layers */
    int n_runs;
    bool traced;
} lazy_report;

enum {
    LAZY_PROMPT = 0,
    LAZY_GENERATED = 1,
    LAZY_READ = 2, /* of the prompt; read, and no pass has ended since */
};

/* A context: id, kind, depth and gone mark of the token at each position. */
typedef struct lazy_tokens {
    int length, n_prompt;
    int n_gone; /* of the tokens in the context */
    int capacity;
    int32_t *ids;    /* (capacity,) */
    uint8_t *kinds;  /* (capacity,) */
    int32_t *depths; /* (capacity,) layers that hold K,V of the token after the last pass */
    uint8_t *gone;   /* (capacity,) 1: dropped for good, in play in no later pass */
} lazy_tokens;

/* These may be called between passes only. */
const lazy_tokens *lazy_session_tokens(const lazy_session *session);
const lazy_report *lazy_session_last_pass(const lazy_session *session);
bool *lazy_session_traces(lazy_session *session); /* true: passes to come are traced */

/* ---- sampler ---------------------------------------------------------------------------- */

typedef struct lazy_sampler lazy_sampler;

/* temperature 0 is greedy (the smaller id among equals); top_k 0 and top_p 1 disable those filters.
 * The same seed gives the same draws. One call at a time may be under way on a sampler. */
int lazy_sampler_open(lazy_sampler **out, double temperature, double top_p, int top_k, uint64_t seed, lazy_error *err);
void lazy_sampler_close(lazy_sampler *sampler);
bool lazy_sampler_is_greedy(const lazy_sampler *sampler);
/* Allocates what draws from n_vocab logits need; without it the first draw does. */
int lazy_sampler_reserve(lazy_sampler *sampler, int n_vocab, lazy_error *err);
int lazy_sampler_next(lazy_sampler *sampler, const float *logits, int n_vocab, int32_t *token, lazy_error *err);

/* ---- machine ---------------------------------------------------------------------------- */

/* Instruction sets of this machine that there are kernels for, best first, NULL-terminated. */
const char *const *lazy_cpu_variants(void);
/* The kernels that a model opened now would use: those of the best instruction set, or of the value of LAZYLLM_CPU.
 * NULL if this machine cannot run that value, or has no instructions for this arithmetic. */
const char *lazy_cpu_variant_used(lazy_compute compute);
/* Describes the CUDA devices, driver and libraries. On failure the error says why CUDA is unavailable. */
int lazy_cuda_look(char *text, size_t size, const char *const *libraries, int n_libraries, lazy_error *err);
