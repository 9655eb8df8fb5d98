/* bench.c — one op by itself, on random data, timed. */
#include "bench.h"

#include <ctype.h>
#include <string.h>

#include "../../csrc/cpu/pool.h"
#include "../../csrc/cuda_library.h"
#include "../../csrc/error.h"
#include "../../csrc/format.h"
#include "../../csrc/memory.h"
#include "../../csrc/model.h"
#include "../../csrc/numeric.h"
#include "ceilings.h"

enum {
    MAX_COPIES = 1024,
    MAX_HEAD_DIM = 512,
    MAX_HEADS_WIDTH = 1 << 16,
    COLD_BYTES = 192 * 1024 * 1024, /* more than the caches hold */
    MAX_QUEUED = 64,
    PEAK_PRODUCTS = 64 /* of one run of multiply_adds on a GPU, so that launching and waiting take a negligible part */
};

enum { QUEUE_NS = 200 * 1000 };

typedef struct kind {
    const char *name;
    int (*prepare)(bench *, lazy_error *);
    int (*run)(bench *, lazy_error *);
} kind;

struct bench {
    const kind *kind;
    lazy_backend *backend;
    const lazy_cuda_library *cuda; /* NULL on the CPU */
    lazy_stream *stream;
    lazy_config config; /* as far as the ops read it */
    bench_shape shape;
    lazy_dtype dtype; /* of weights */
    double flops, bytes;

    char *weights; /* (host) copies, one after the other */
    size_t weight_bytes;
    lazy_matrix copy[MAX_COPIES];
    int n_copies, bound, turn;
    int most_queued; /* runs between two waits */

    void *x, *y; /* in the backend's memory, like all below */
    lazy_kv kv;
    int32_t *in_play, *kept;
    float *scores;
    float *factors; /* a norm's weights, or cosines and sines */
    uint8_t *flags;
    void *aux;
    int32_t *n_revived;
};

/* ---- random data ------------------------------------------------------------------------ */

static uint32_t next_bits(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

static float next_float(uint32_t *state) { return (float)next_bits(state) * 0x1p-23f - 1.0f; }

/* Allocates a backend buffer of random values of LAZY_F32, in low … 1, or of a type of 16 bits. */
static int random_buffer(bench *b, void **out, size_t elements, lazy_dtype dtype, float low, lazy_error *err)
{
    float *host = NULL;
    size_t width = lazy_float_bytes(dtype);
    int code = b->backend->ops->alloc(b->backend, out, elements * width, "a benchmark's operands", err);
    if (!code) code = lazy_alloc(&host, elements, "a benchmark's operands", err);
    if (code) return code;
    uint32_t state = 1;
    if (dtype == LAZY_F32) {
        for (size_t i = 0; i < elements; i++) host[i] = low + (1.0f - low) * 0.5f * (next_float(&state) + 1.0f);
    } else {
        bool bf16 = dtype == LAZY_BF16;
        uint32_t any = bf16 ? 0x807fu : 0x83ffu, half = bf16 ? 0x3f00u : 0x3800u; /* a sign, any fraction: ±0.5 … ±1 */
        uint16_t *halves = (uint16_t *)host;
        for (size_t i = 0; i < elements; i++) halves[i] = (uint16_t)((next_bits(&state) & any) | half);
    }
    code = b->backend->ops->upload(b->stream, *out, host, elements * width, err);
    lazy_free(host);
    return code;
}

static int activations(bench *b, void **out, int64_t rows, int64_t cols, lazy_error *err)
{
    return random_buffer(b, out, (size_t)rows * (size_t)cols, b->backend->activations, -1.0f, err);
}

static int keys_and_values(bench *b, int tokens, lazy_error *err)
{
    size_t elements = (size_t)tokens * (size_t)lazy_kv_width(&b->config);
    b->kv.capacity = tokens;
    int code = random_buffer(b, &b->kv.k, elements, b->backend->kv, -1.0f, err);
    return code ? code : random_buffer(b, &b->kv.v, elements, b->backend->kv, -1.0f, err);
}

static int random_weights(bench *b, int most_copies, lazy_error *err)
{
    const bench_shape *s = &b->shape;
    b->weight_bytes = (size_t)s->rows * lazy_row_bytes(b->dtype, s->cols);
    size_t elements = b->weight_bytes / (b->dtype == LAZY_F32 ? 4 : 2), copies = COLD_BYTES / b->weight_bytes + 1;
    b->n_copies = copies < (size_t)most_copies ? (int)copies : most_copies;
    int code = lazy_alloc_bytes((void **)&b->weights, (size_t)b->n_copies, b->weight_bytes, NULL,
                                "a benchmark's weights", err);
    if (code) return code;
    uint32_t state = 1;
    for (size_t i = 0; i < elements; i++) {
        float value = next_float(&state) * 0.1f;
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        if (b->dtype == LAZY_F32) ((float *)b->weights)[i] = value;
        else if (b->dtype == LAZY_BF16) ((uint16_t *)b->weights)[i] = (uint16_t)(bits >> 16);
        else if (lazy_is_quantized(b->dtype))
            ((uint16_t *)b->weights)[i] = (uint16_t)(bits & 0x83ffu); /* as f16, tiny: a small scale */
        else
            ((uint16_t *)b->weights)[i] =
                (uint16_t)((bits >> 16 & 0x8000u) | 0x2800u | (bits & 0x03ffu)); /* 2^-5 … 2^-4 */
    }
    for (int i = 0; i < b->n_copies; i++) {
        char *data = b->weights + (size_t)i * b->weight_bytes;
        if (i) memcpy(data, b->weights, b->weight_bytes);
        b->copy[i] =
            (lazy_matrix){ .part = { { data, s->rows, b->dtype } }, .n_parts = 1, .rows = s->rows, .cols = s->cols };
        if (b->backend->ops->bind && (code = b->backend->ops->bind(b->backend, &b->copy[i], 1, err))) return code;
        b->bound = i + 1;
    }
    return LAZY_OK;
}

static const lazy_matrix *next_weights(bench *b) { return &b->copy[b->turn++ % b->n_copies]; }

/* ---- the ops ---------------------------------------------------------------------------- */

static int prepare_read(bench *b, lazy_error *err)
{
    int code = random_weights(b, 1, err);
    b->bytes = (double)b->weight_bytes;
    return code;
}

static int run_read(bench *b, lazy_error *err)
{
    const void *memory = b->copy[0].part[0].data;
    return b->cuda ? b->cuda->read(b->stream, memory, b->weight_bytes, err)
                   : ceiling_read(b->stream, memory, b->weight_bytes, err);
}

static int prepare_product(bench *b, lazy_error *err)
{
    const bench_shape *s = &b->shape;
    int code = random_weights(b, MAX_COPIES, err);
    if (!code) code = activations(b, &b->x, s->n, s->cols, err);
    if (!code) code = activations(b, &b->y, s->n, s->rows, err);
    b->flops = 2.0 * s->n * s->rows * s->cols;
    b->bytes = (double)b->weight_bytes;
    return code;
}

static int run_matmul(bench *b, lazy_error *err)
{
    return b->backend->ops->matmul(b->stream, b->y, b->x, b->shape.n, next_weights(b), false, err);
}

/* On a GPU: a product of shape n, rows, cols. */
static int prepare_multiply_adds(bench *b, lazy_error *err)
{
    if (!b->cuda) return LAZY_OK;
    int code = prepare_product(b, err);
    b->flops *= PEAK_PRODUCTS;
    return code;
}

static int run_multiply_adds(bench *b, lazy_error *err)
{
    if (!b->cuda) return ceiling_multiply_adds(b->stream, &b->flops, err);
    int code = LAZY_OK;
    for (int i = 0; i < PEAK_PRODUCTS && !code; i++) code = run_matmul(b, err);
    return code;
}

static int run_gated(bench *b, lazy_error *err)
{
    return b->backend->ops->gated(b->stream, b->y, b->x, b->shape.n, next_weights(b), err);
}

/* Allocates a backend buffer of n whole numbers 0, 1, … below `end`, then 0 again. */
static int counting_up(bench *b, int32_t **out, int n, int end, lazy_error *err)
{
    int32_t *host = NULL;
    int code = b->backend->ops->alloc(b->backend, (void **)out, (size_t)n * sizeof **out, "positions", err);
    if (!code) code = lazy_alloc(&host, n, "positions", err);
    if (code) return code;
    for (int i = 0; i < n; i++) host[i] = i % end;
    code = b->backend->ops->upload(b->stream, *out, host, (size_t)n * sizeof *host, err);
    lazy_free(host);
    return code;
}

static int prepare_rmsnorm(bench *b, lazy_error *err)
{
    const bench_shape *s = &b->shape;
    int code = activations(b, &b->x, s->n, s->cols, err);
    if (!code) code = activations(b, &b->y, s->n, s->cols, err);
    if (!code) code = random_buffer(b, (void **)&b->factors, (size_t)s->cols, LAZY_F32, 0.5f, err);
    b->bytes = 1.0 * s->n * s->cols * (double)lazy_activation_bytes(b->backend);
    return code;
}

static int run_rmsnorm(bench *b, lazy_error *err)
{
    return b->backend->ops->rmsnorm(b->stream, b->y, b->x, b->shape.n, b->shape.cols, b->factors, 1e-5f, false, err);
}

static int prepare_embed(bench *b, lazy_error *err)
{
    const bench_shape *s = &b->shape;
    int code = random_weights(b, 1, err);
    if (!code) code = counting_up(b, &b->in_play, s->n, s->rows, err);
    if (!code) code = activations(b, &b->y, s->n, s->cols, err);
    b->bytes = 1.0 * s->n * (double)lazy_row_bytes(b->dtype, s->cols);
    return code;
}

static int run_embed(bench *b, lazy_error *err)
{
    return b->backend->ops->embed(b->stream, b->y, b->in_play, b->shape.n, &b->copy[0], err);
}

static int prepare_rotate(bench *b, lazy_error *err)
{
    const lazy_config *c = &b->config;
    int n = b->shape.n;
    int code = activations(b, &b->y, n, lazy_qkv_width(c), err);
    if (!code) code = keys_and_values(b, n, err);
    if (!code) code = counting_up(b, &b->in_play, n, n, err);
    if (!code) code = random_buffer(b, (void **)&b->factors, (size_t)n * (size_t)c->head_dim, LAZY_F32, 0.0f, err);
    b->bytes = 1.0 * n * lazy_qkv_width(c) * (double)lazy_activation_bytes(b->backend);
    return code;
}

static int run_rotate(bench *b, lazy_error *err)
{
    const lazy_config *c = &b->config;
    char *k_v = (char *)b->y + (size_t)lazy_q_width(c) * lazy_activation_bytes(b->backend);
    return b->backend->ops->rotate(b->stream, b->y, k_v, lazy_qkv_width(c), b->in_play, b->shape.n, b->kv, b->factors,
                                   b->factors, b->factors, b->factors, 1e-5f, err);
}

static int prepare_argmax(bench *b, lazy_error *err)
{
    int code = random_buffer(b, (void **)&b->scores, (size_t)b->shape.rows, LAZY_F32, -1.0f, err);
    if (!code) code = b->backend->ops->alloc(b->backend, &b->y, sizeof(int32_t), "an id", err);
    b->bytes = 1.0 * b->shape.rows * (double)sizeof *b->scores;
    return code;
}

static int run_argmax(bench *b, lazy_error *err)
{
    return b->backend->ops->argmax(b->stream, b->y, b->scores, b->shape.rows, err);
}

static int window_of(const bench_shape *s) { return s->window ? s->window : INT32_MAX; }

static int prepare_attention(bench *b, lazy_error *err)
{
    const lazy_config *c = &b->config;
    const bench_shape *s = &b->shape;
    int64_t kv_width = lazy_kv_width(c), q_width = lazy_q_width(c);
    int code = activations(b, &b->x, s->n, lazy_qkv_width(c), err);
    if (!code) code = activations(b, &b->y, s->n, q_width, err);
    if (!code) code = keys_and_values(b, s->m, err);
    if (!code) code = random_buffer(b, (void **)&b->scores, (size_t)s->m, LAZY_F32, 0.0f, err);
    if (!code) code = counting_up(b, &b->in_play, s->m, s->m, err);
    if (!code)
        code = b->backend->ops->alloc(b->backend, (void **)&b->kept, (size_t)s->m * sizeof *b->kept, "positions", err);
    if (!code) code = b->backend->ops->alloc(b->backend, (void **)&b->flags, (size_t)s->m, "flags", err);
    uint8_t *flags = NULL;
    if (!code) code = lazy_alloc(&flags, (size_t)s->m, "flags", err);
    if (code) return code;
    memset(flags, LAZY_PRUNABLE, (size_t)s->m);
    code = b->backend->ops->upload(b->stream, b->flags, flags, (size_t)s->m, err);
    lazy_free(flags);
    double pairs = 0; /* row r of n sees the tokens up to its own, m - n + r + 1, or a window of them */
    for (int r = 0; r < s->n; r++) pairs += min_int(s->m - s->n + r + 1, window_of(s));
    b->flops = 4.0 * (double)q_width * pairs;
    b->bytes = 2.0 * (double)kv_width * s->m * (double)lazy_float_bytes(b->backend->kv);
    return code;
}

static lazy_attending attending_of(const bench *b)
{
    const bench_shape *s = &b->shape;
    return (lazy_attending){
        b->x, lazy_qkv_width(&b->config), b->in_play + (s->m - s->n), s->n, b->kv, b->in_play, s->m, window_of(s)
    };
}

static int run_attention(bench *b, lazy_error *err)
{
    const lazy_attending a = attending_of(b);
    return b->backend->ops->attention(b->stream, b->y, &a, err);
}

static int run_scores(bench *b, lazy_error *err)
{
    const lazy_attending a = attending_of(b);
    return b->backend->ops->scores(b->stream, b->scores, &a, a.n, LAZY_POOLING_MEAN, -1, 0, err);
}

static int run_select(bench *b, lazy_error *err)
{
    return b->backend->ops->select(b->stream, b->kept, b->in_play, b->scores, b->shape.m, b->flags, b->shape.m / 2,
                                   err);
}

/* Every second of m rows goes on, the others are put away. */
static int prepare_regroup(bench *b, lazy_error *err)
{
    const bench_shape *s = &b->shape;
    int code = prepare_attention(b, err);
    b->backend->ops->free(b->backend, b->x);
    b->backend->ops->free(b->backend, b->y);
    b->x = b->y = NULL;
    if (!code) code = activations(b, &b->x, s->m, s->cols, err);
    if (!code) code = activations(b, &b->y, s->m, s->cols, err);
    if (!code) code = activations(b, &b->aux, s->m, s->cols, err);
    if (!code) code = b->backend->ops->alloc(b->backend, (void **)&b->n_revived, sizeof *b->n_revived, "a count", err);
    if (!code) code = run_select(b, err);
    b->flops = 0.0;
    b->bytes = 1.0 * s->m * s->cols * (double)lazy_activation_bytes(b->backend);
    return code;
}

static int run_regroup(bench *b, lazy_error *err)
{
    const bench_shape *s = &b->shape;
    return b->backend->ops->regroup(b->stream, b->y, b->kept, s->m / 2, b->x, b->in_play, s->m, b->aux, s->cols,
                                    b->n_revived, err);
}

static const kind kinds[] = {
    { "multiply_adds", prepare_multiply_adds, run_multiply_adds },
    { "read", prepare_read, run_read },
    { "matmul", prepare_product, run_matmul },
    { "gated", prepare_product, run_gated },
    { "attention", prepare_attention, run_attention },
    { "scores", prepare_attention, run_scores },
    { "select", prepare_attention, run_select },
    { "regroup", prepare_regroup, run_regroup },
    { "rmsnorm", prepare_rmsnorm, run_rmsnorm },
    { "embed", prepare_embed, run_embed },
    { "rotate", prepare_rotate, run_rotate },
    { "argmax", prepare_argmax, run_argmax },
};

/* ---- opening, running ------------------------------------------------------------------- */

static const kind *kind_of(const char *op)
{
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (strcmp(op, kinds[i].name) == 0) return &kinds[i];
    return NULL;
}

/* lazy_formats has the names in capitals. */
static bool find_format(const char *dtype, lazy_dtype *out)
{
    char name[8] = { 0 };
    for (size_t i = 0; i + 1 < sizeof name && dtype[i]; i++) name[i] = (char)toupper((unsigned char)dtype[i]);
    return lazy_format_find(name, out);
}

static int check_shape(const char *op, const kind *kind, bench_shape s, lazy_dtype dtype, lazy_error *err)
{
    int (*prepare)(bench *, lazy_error *) = kind->prepare;
    bool tokens = prepare == prepare_attention || prepare == prepare_regroup,
         weights = prepare != prepare_multiply_adds && prepare != prepare_rotate,
         rows = prepare != prepare_multiply_adds && prepare != prepare_read && prepare != prepare_argmax;
    if (kind->run == run_gated && s.rows % 2)
        return lazy_fail(err, LAZY_INVALID, "%s: rows is %d; gate and up have as many, so it must be even", op, s.rows);
    if (weights && (s.rows < 1 || s.cols < 1))
        return lazy_fail(err, LAZY_INVALID, "%s: weights of %d x %d; both must be at least 1", op, s.rows, s.cols);
    if (weights && s.cols % lazy_formats[dtype].values)
        return lazy_fail(err, LAZY_INVALID, "%s: cols is %d; %s stores whole blocks of %d", op, s.cols,
                         lazy_formats[dtype].name, lazy_formats[dtype].values);
    if (rows && s.n < 1) return lazy_fail(err, LAZY_INVALID, "%s: n is %d; it must be at least 1", op, s.n);
    if (s.n_kv_heads < 1 || s.n_heads < 1 || s.n_heads % s.n_kv_heads)
        return lazy_fail(err, LAZY_INVALID, "%s: %d heads over %d; both must be at least 1, and divide", op, s.n_heads,
                         s.n_kv_heads);
    if (s.head_dim < 1 || s.head_dim > MAX_HEAD_DIM || s.n_heads > MAX_HEADS_WIDTH / s.head_dim)
        return lazy_fail(err, LAZY_INVALID, "%s: %d heads of %d; a head may have 1 to %d, all of them up to %d", op,
                         s.n_heads, s.head_dim, MAX_HEAD_DIM, MAX_HEADS_WIDTH);
    if (s.window < 0) return lazy_fail(err, LAZY_INVALID, "%s: window is %d; it must be at least 0", op, s.window);
    if (tokens && s.m < s.n) return lazy_fail(err, LAZY_INVALID, "%s: m is %d, less than n = %d", op, s.m, s.n);
    return LAZY_OK;
}

int bench_open(bench **out, const char *op, const bench_shape *shape, const lazy_device *device, lazy_error *err)
{
    *out = NULL;
    const kind *kind = kind_of(op);
    if (!kind) return lazy_fail(err, LAZY_INVALID, "there is no op \"%s\" to measure", op);
    lazy_dtype dtype;
    if (!find_format(shape->dtype, &dtype))
        return lazy_fail(err, LAZY_INVALID,
                         "dtype is \"%.20s\"; it must be a format of weights such as bf16, q8_0 or q4_k", shape->dtype);
    int code = check_shape(op, kind, *shape, dtype, err);
    if (code) return code;
    bench *b;
    if ((code = lazy_alloc_zeroed(&b, 1, "a benchmark", err))) return code;
    b->kind = kind;
    b->shape = *shape;
    b->dtype = dtype;
    b->config = (lazy_config){ .n_layers = 1,
                               .hidden = shape->cols,
                               .n_heads = shape->n_heads,
                               .n_kv_heads = shape->n_kv_heads,
                               .head_dim = shape->head_dim,
                               .ffn = shape->rows / 2,
                               .embedding_scale = 1.0f };
    bool on_cpu = strcmp(device->name, "cpu") == 0;
    b->most_queued = on_cpu ? 1 : MAX_QUEUED;
    if (!on_cpu) code = lazy_cuda_load(&b->cuda, err);
    if (!code) code = lazy_device_open(&b->backend, device, b->dtype, err);
    if (!code && lazy_is_quantized(b->dtype) && !b->backend->ops->quantize)
        code = lazy_fail(err, LAZY_DEVICE, "%s: %s takes no quantized weights", op, b->backend->name);
    if (!code) code = b->backend->ops->stream_open(b->backend, &b->config, &b->stream, err);
    if (!code) code = b->backend->ops->reserve(b->stream, max_int(shape->n, 1), max_int(shape->m, 1), err);
    if (!code) code = kind->prepare(b, err);
    if (code) bench_close(b);
    else *out = b;
    return code;
}

void bench_close(bench *b)
{
    if (!b) return;
    if (b->backend) {
        const lazy_ops *ops = b->backend->ops;
        for (int i = 0; i < b->bound && ops->unbind; i++) ops->unbind(b->backend, &b->copy[i]);
        void *owned[] = { b->x,      b->y,       b->kv.k,  b->kv.v, b->in_play,  b->kept,
                          b->scores, b->factors, b->flags, b->aux,  b->n_revived };
        for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) ops->free(b->backend, owned[i]);
        ops->stream_close(b->stream);
        ops->close(b->backend);
    }
    lazy_free(b->weights);
    lazy_free(b);
}

/* On a device with a queue, short ops are launched several times before waiting, as within a pass. */
int bench_run(bench *b, double *seconds, lazy_error *err)
{
    int64_t started = now_ns();
    int code, runs = 0;
    do {
        code = b->kind->run(b, err);
        runs++;
    } while (!code && runs < b->most_queued && now_ns() - started < QUEUE_NS);
    char last; /* its download waits for all runs */
    if (!code && b->y) code = b->backend->ops->download(b->stream, &last, b->y, 1, err);
    *seconds = (double)(now_ns() - started) * 1e-9 / runs;
    return code;
}

enum { MAX_JOBS = 8 }; /* no op has more */

static int n_jobs, tasks_of_job[MAX_JOBS]; /* since n_jobs was set to 0 */

/* The linker puts these names in place of lazy_pool_run where the core calls it (--wrap), and in its definition. */
int __real_lazy_pool_run(lazy_pool_client *, lazy_task, void *job, int n, lazy_poll);
int __wrap_lazy_pool_run(lazy_pool_client *client, lazy_task task, void *job, int n, lazy_poll poll);

int __wrap_lazy_pool_run(lazy_pool_client *client, lazy_task task, void *job, int n, lazy_poll poll)
{
    if (n_jobs < MAX_JOBS) tasks_of_job[n_jobs++] = n;
    return __real_lazy_pool_run(client, task, job, n, poll);
}

int bench_count(bench *b, const int **tasks, lazy_error *err)
{
    n_jobs = 0;
    int code = b->kind->run(b, err);
    *tasks = tasks_of_job;
    return code ? code : n_jobs;
}

double bench_flops(const bench *b) { return b->flops; }
double bench_bytes(const bench *b) { return b->bytes; }
