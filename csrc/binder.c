#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "error.h"
#include "format.h"
#include "memory.h"
#include "model.h"

/* The tensor table, sorted by name, and the model that its tensors are bound to. */
typedef struct binder {
    lazy_model *model;
    const lazy_tensor **by_name; /* (n,) */
    int n;
    bool dry;                              /* first round: validate only */
    const char *weights;                   /* "auto", "q8" or "q4" */
    int place;                             /* that the tensors are for */
    lazy_stream *stream[LAZY_MAX_DEVICES]; /* of the second round, one a place */
    lazy_stream *rounding;                 /* the first one, or the CPU's where the backend cannot round weights */
    size_t own_bytes;                      /* first round: of weights that are rounded or sorted */
    char *own;       /* second round: room for these on the CPU, side by side for the sake of huge pages */
    char prefix[64]; /* of the names of tensors: "model.layers.7.", or of an expert's */
} binder;

/* How a tensor is used. */
typedef enum use {
    USE_LAYER,
    USE_TABLE,  /* embedding or LM head */
    USE_ROUTER, /* chooses experts: never rounded */
    USE_QKV,    /* q, k and v, or the norm of q or k */
    USE_HEADS,  /* a norm of q or k, stored as (heads, head_dim) */
} use;

/* The source of a vector or matrix: up to three tensors, one below the other. */
typedef struct source {
    use use;
    int cols; /* 0: of a vector */
    int n;
    const char *names[LAZY_MAX_PARTS]; /* behind the prefix */
    int rows[LAZY_MAX_PARTS];
} source;

static int compare_names(const void *a, const void *b)
{
    return strcmp((*(const lazy_tensor *const *)a)->name, (*(const lazy_tensor *const *)b)->name);
}

static const lazy_tensor *find(const binder *b, const char *suffix)
{
    char name[2 * sizeof b->prefix];
    snprintf(name, sizeof name, "%s%s", b->prefix, suffix);
    lazy_tensor key = { .name = name };
    const lazy_tensor *wanted = &key;
    const lazy_tensor **hit = bsearch(&wanted, b->by_name, (size_t)b->n, sizeof *b->by_name, compare_names);
    return hit ? *hit : NULL;
}

lazy_dtype lazy_bind_dtype(const lazy_tensor *tensors, int n_tensors)
{
    uint64_t bytes[LAZY_N_DTYPES] = { 0 };
    for (int i = 0; i < n_tensors; i++) {
        lazy_dtype dtype;
        if (lazy_format_find(tensors[i].dtype, &dtype))
            bytes[lazy_is_quantized(dtype) ? LAZY_BF16 : dtype] += tensors[i].bytes;
    }
    lazy_dtype most = LAZY_F32;
    for (int dtype = LAZY_F16; dtype <= LAZY_BF16; dtype++)
        if (bytes[dtype] > bytes[most]) most = (lazy_dtype)dtype;
    return most;
}

#define refuse(b, name, err, format, ...)                                                                              \
    lazy_fail(err, LAZY_CHECKPOINT, "tensor %s%s: " format, (b)->prefix, name, ##__VA_ARGS__)

/* *part = a tensor in the mapping, once it is validated as (rows, cols), or (rows,) if cols is 0. */
static int take(const binder *b, const char *name, int rows, int cols, lazy_part *part, lazy_error *err)
{
    const lazy_tensor *t = find(b, name);
    if (!t) return refuse(b, name, err, "missing from the checkpoint");

    if (!lazy_format_find(t->dtype, &part->dtype))
        return refuse(b, name, err,
                      "dtype %s is not supported; F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, "
                      "Q5_K and Q6_K are",
                      t->dtype);
    const lazy_format *format = &lazy_formats[part->dtype];

    int rank = cols ? 2 : 1;
    if (t->rank != rank || t->shape[0] != rows || (cols && t->shape[1] != cols)) {
        char shape[96];
        int length = 0;
        for (int i = 0; i < t->rank && length < (int)sizeof shape - 24; i++)
            length += snprintf(shape + length, sizeof shape - (size_t)length, "%s%" PRId64, i ? ", " : "", t->shape[i]);
        shape[length] = '\0';
        if (cols) return refuse(b, name, err, "shape (%s), but the config asks for (%d, %d)", shape, rows, cols);
        return refuse(b, name, err, "shape (%s), but the config asks for (%d)", shape, rows);
    }
    int row = cols ? cols : rows, n_rows = cols ? rows : 1;
    if (row % format->values)
        return refuse(b, name, err, "rows of %d values; %s stores whole blocks of %d", row, format->name,
                      format->values);
    uint64_t bytes = (uint64_t)n_rows * lazy_row_bytes(part->dtype, row);
    if (t->bytes != bytes)
        return refuse(b, name, err, "%" PRIu64 " bytes, but its shape and dtype make %" PRIu64, t->bytes, bytes);
    if (t->shard < 0 || t->shard >= b->model->n_shards)
        return refuse(b, name, err, "shard %d of %d", t->shard, b->model->n_shards);
    const lazy_mapping *shard = &b->model->shards[t->shard];
    if (t->offset > shard->bytes || bytes > shard->bytes - t->offset)
        return refuse(b, name, err, "bytes %" PRIu64 " to %" PRIu64 " lie past the end of a file of %" PRIu64 " bytes",
                      t->offset, t->offset + bytes, shard->bytes);
    if (t->offset % (uint64_t)format->align)
        return refuse(b, name, err,
                      "begins at byte %" PRIu64
                      ", which is no multiple of its %d-byte elements; save the checkpoint again",
                      t->offset, format->align);
    part->data = shard->data + t->offset;
    part->rows = rows;
    return LAZY_OK;
}

/* The row of a stored head that is row i of the model's, in which RoPE turns i and i + head_dim / 2 together. Values
 * that are not turned come last in the file, and here behind the turned ones of each half. */
static int stored_row(const lazy_config *c, int i)
{
    int half = c->head_dim / 2, turned = c->rotary_dim / 2, pair = i % half, second = i / half;
    if (pair >= turned) return c->rotary_dim + second * (half - turned) + pair - turned;
    return c->paired_rope ? 2 * pair + second : second * turned + pair;
}

/* Puts the rows of each head into the model's order. */
static void sort_rows(char *to, const char *from, size_t row_bytes, int rows, const lazy_config *c)
{
    for (int i = 0; i < rows; i++) {
        int within = i % c->head_dim, row = i - within + stored_row(c, within);
        memcpy(to + (size_t)i * row_bytes, from + (size_t)row * row_bytes, row_bytes);
    }
}

/* True if the rows of this part are to be sorted. */
static bool is_sorted(const binder *b, use use, int part)
{
    const lazy_config *c = &b->model->config;
    return (c->paired_rope || c->rotary_dim < c->head_dim) && (use == USE_QKV || use == USE_HEADS) && part < 2;
}

/* Uploads vectors (the biases of q, k and v) one behind the other, as f32, plus `plus` and then times `factor`. */
static int bind_vector(binder *b, float **out, const source *from, float plus, float factor, lazy_error *err)
{
    const lazy_config *c = &b->model->config;
    lazy_backend *backend = b->model->places[b->place].backend;
    lazy_part part[LAZY_MAX_PARTS];
    int total = 0, code, cols = from->use == USE_HEADS ? c->head_dim : 0;
    for (int i = 0; i < from->n; total += from->rows[i++])
        if ((code = take(b, from->names[i], cols ? from->rows[i] / cols : from->rows[i], cols, &part[i], err)))
            return code;
    if (b->dry) {
        b->model->places[b->place].bytes += (size_t)total * sizeof **out;
        return LAZY_OK;
    }
    void *memory = NULL;
    float *host = NULL; /* (2, total): the second one is for sorting */
    code = lazy_alloc(&host, 2 * (size_t)total, "a weight vector", err);
    if (!code) code = backend->ops->alloc(backend, &memory, (size_t)total * sizeof *host, "a weight vector", err);
    if (!code) {
        for (int i = 0, at = 0; i < from->n; at += from->rows[i++]) {
            float *unsorted = host + total;
            bool sorts = is_sorted(b, from->use, i);
            lazy_widen(sorts ? unsorted : host + at, part[i].data, part[i].dtype, from->rows[i]);
            if (sorts) sort_rows((char *)(host + at), (char *)unsorted, sizeof *host, from->rows[i], c);
        }
        for (int i = 0; (plus != 0 || factor != 1) && i < total; i++) host[i] = (host[i] + plus) * factor;
        code = backend->ops->upload(b->stream[b->place], memory, host, (size_t)total * sizeof *host, err);
    }
    lazy_free(host);
    *out = memory;
    return code;
}

/* The format that a matrix is to have, if that is possible. */
static int choose_format(const binder *b, const char *name, use use, int cols, lazy_dtype stored, lazy_dtype *format,
                         lazy_error *err)
{
    bool rounds = strcmp(b->weights, "auto") != 0 && use != USE_ROUTER, q4 = strcmp(b->weights, "q4") == 0;
    *format = !rounds ? stored : q4 && use != USE_TABLE ? LAZY_Q4_1 : LAZY_Q8_0;
    const lazy_format *target = &lazy_formats[*format];
    if (*format != stored && lazy_is_quantized(stored))
        return lazy_invalid(err, "weights=\"%s\": tensor %s%s is stored in %s, which is used as stored, with \"auto\"",
                            b->weights, b->prefix, name, lazy_formats[stored].name);
    if (cols % target->values)
        return lazy_invalid(err, "weights=\"%s\": tensor %s%s has rows of %d values, and %s takes multiples of %d",
                            b->weights, b->prefix, name, cols, target->name, target->values);
    return LAZY_OK;
}

static size_t own_bytes(const lazy_part *part, lazy_dtype format, int cols)
{
    enum { LINE = 64 };
    return ((size_t)part->rows * lazy_row_bytes(format, cols) + LINE - 1) / LINE * LINE;
}

/* Memory of the model: of b->own, or else a block that a device copies. */
static int take_room(binder *b, void **out, size_t bytes, lazy_error *err)
{
    lazy_model *model = b->model;
    if (b->own) {
        *out = b->own;
        b->own += bytes;
        return LAZY_OK;
    }
    int code = lazy_alloc_bytes(out, bytes, 1, NULL, "weights", err);
    if (!code) model->owned[model->n_owned++] = *out;
    return code;
}

/* Rounds and sorts a part as the ops expect it, into memory of the model; other parts stay in the shard. */
static int prepare_part(binder *b, lazy_part *part, int cols, lazy_dtype format, bool unsorted, lazy_error *err)
{
    const size_t bytes = own_bytes(part, format, cols);
    void *rounded = NULL, *sorted = NULL;
    int code = LAZY_OK;
    if (format != part->dtype) {
        code =
            unsorted ? lazy_alloc_bytes(&rounded, bytes, 1, NULL, "weights", err) : take_room(b, &rounded, bytes, err);
        if (!code) code = b->rounding->backend->ops->quantize(b->rounding, rounded, format, part, cols, err);
        *part = (lazy_part){ .data = rounded, .rows = part->rows, .dtype = format };
    }
    if (!code && unsorted) {
        code = take_room(b, &sorted, bytes, err);
        if (!code) sort_rows(sorted, part->data, lazy_row_bytes(format, cols), part->rows, &b->model->config);
        part->data = sorted;
    }
    if (unsorted) lazy_free(rounded);
    return code;
}

/* Checks the parts of a matrix; in the second round, *matrix = the matrix as `bind` takes it. */
static int prepare_matrix(binder *b, lazy_matrix *matrix, const source *from, lazy_error *err)
{
    *matrix = (lazy_matrix){ .n_parts = from->n, .cols = from->cols };
    for (int i = 0; i < from->n; i++) {
        lazy_part *part = &matrix->part[i];
        lazy_dtype format;
        int code = take(b, from->names[i], from->rows[i], from->cols, part, err);
        if (!code) code = choose_format(b, from->names[i], from->use, from->cols, part->dtype, &format, err);
        if (!code && !b->dry) code = prepare_part(b, part, from->cols, format, is_sorted(b, from->use, i), err);
        if (code) return code;
        if (b->dry) b->model->places[b->place].bytes += (size_t)part->rows * lazy_row_bytes(format, from->cols);
        if (b->dry && (format != part->dtype || is_sorted(b, from->use, i)))
            b->own_bytes += own_bytes(part, format, from->cols);
        matrix->rows += part->rows;
    }
    return LAZY_OK;
}

/* Binds n matrices of one shape: layer l's experts, or one (l: -1). What the backend copies is freed. */
static int bind_matrices(binder *b, lazy_matrix *out, int n, int l, const source *from, lazy_error *err)
{
    lazy_model *model = b->model;
    lazy_matrix unused;
    int n_owned = model->n_owned, code = LAZY_OK;
    for (int e = 0; e < n && !code; e++) {
        if (l >= 0) snprintf(b->prefix, sizeof b->prefix, "model.layers.%d.mlp.experts.%d.", l, e);
        code = prepare_matrix(b, b->dry ? &unused : &out[e], from, err);
    }
    if (code || b->dry) return code;
    const void *prepared = out->part[0].data;
    lazy_backend *backend = model->places[b->place].backend;
    if (backend->ops->bind) code = backend->ops->bind(backend, out, n, err);
    while (!code && out->part[0].data != prepared && model->n_owned > n_owned)
        lazy_free(model->owned[--model->n_owned]);
    return code;
}

static int bind_matrix(binder *b, lazy_matrix *matrix, const source *from, lazy_error *err)
{
    lazy_matrix bound;
    int code = bind_matrices(b, &bound, 1, -1, from, err);
    if (code || b->dry) return code;
    bound.bias = matrix->bias;
    *matrix = bound;
    return LAZY_OK;
}

static int bind_experts(binder *b, lazy_matrix **out, int l, const source *from, lazy_error *err)
{
    lazy_matrix *bound = NULL;
    int n = b->model->config.n_experts, code = b->dry ? LAZY_OK : lazy_alloc(&bound, n, "the table of experts", err);
    if (!code) code = bind_matrices(b, bound, n, l, from, err);
    if (code) lazy_free(bound);
    else *out = bound;
    return code;
}

static int bind_layer(binder *b, int l, lazy_error *err)
{
    const lazy_config *c = &b->model->config;
    lazy_layer *layer = &b->model->layers[l];
    lazy_experts *experts = &layer->experts;
    const bool mixes = c->expert_layers[l], whole_norms = c->wide_qk_norm || c->layer_norm, post = c->post_norms,
               both = post && c->pre_norms;
    const int d = c->hidden, q = lazy_q_width(c), kv = lazy_kv_width(c), f = c->ffn, expert_f = c->expert_ffn,
              of_q = whole_norms ? q : c->head_dim, of_k = whole_norms ? kv : c->head_dim;
    const use of_heads = c->layer_norm ? USE_HEADS : USE_QKV;
    const float plus = c->norm_plus_one;
    /* without post_norms, "post_attention_layernorm" is the norm before the FFN */
    float **second_norm = post ? &layer->attention_post_norm : &layer->ffn_norm;
#define Q_K_V(kind) { "self_attn.q_proj." kind, "self_attn.k_proj." kind, "self_attn.v_proj." kind }
    const source qkv = { USE_QKV, d, 3, Q_K_V("weight"), { q, kv, kv } },
                 qkv_bias = { USE_QKV, 0, 3, Q_K_V("bias"), { q, kv, kv } };
    const struct {
        bool present;
        float **vector, plus;
        source from;
    } vectors[] = {
        { c->pre_norms, &layer->attention_norm, plus, { USE_LAYER, 0, 1, { "input_layernorm.weight" }, { d } } },
        { !c->parallel, second_norm, plus, { USE_LAYER, 0, 1, { "post_attention_layernorm.weight" }, { d } } },
        { both, &layer->ffn_norm, plus, { USE_LAYER, 0, 1, { "pre_feedforward_layernorm.weight" }, { d } } },
        { post, &layer->ffn_post_norm, plus, { USE_LAYER, 0, 1, { "post_feedforward_layernorm.weight" }, { d } } },
        { c->qk_norm, &layer->q_norm, plus, { of_heads, 0, 1, { "self_attn.q_norm.weight" }, { of_q } } },
        { c->qk_norm, &layer->k_norm, plus, { of_heads, 0, 1, { "self_attn.k_norm.weight" }, { of_k } } },
        { c->qkv_bias, (float **)&layer->qkv.bias, 0, qkv_bias },
        { c->o_bias, (float **)&layer->o.bias, 0, { USE_LAYER, 0, 1, { "self_attn.o_proj.bias" }, { d } } },
    };
    const struct {
        bool present;
        lazy_matrix *matrix;
        source from;
    } matrices[] = {
        { true, &layer->qkv, qkv },
        { true, &layer->o, { USE_LAYER, q, 1, { "self_attn.o_proj.weight" }, { d } } },
        { !mixes, &layer->gate_up, { USE_LAYER, d, 2, { "mlp.gate_proj.weight", "mlp.up_proj.weight" }, { f, f } } },
        { !mixes, &layer->down, { USE_LAYER, f, 1, { "mlp.down_proj.weight" }, { d } } },
        { mixes, &experts->router, { USE_ROUTER, d, 1, { "mlp.gate.weight" }, { c->n_experts } } },
    };
    const source gate_up = { USE_LAYER, d, 2, { "gate_proj.weight", "up_proj.weight" }, { expert_f, expert_f } },
                 down = { USE_LAYER, expert_f, 1, { "down_proj.weight" }, { d } };
    int code = LAZY_OK;
    layer->window = c->windows[l] ? c->windows[l] : INT32_MAX;
    snprintf(b->prefix, sizeof b->prefix, "model.layers.%d.", l);
    for (size_t i = 0; i < sizeof vectors / sizeof *vectors && !code; i++)
        if (vectors[i].present) code = bind_vector(b, vectors[i].vector, &vectors[i].from, vectors[i].plus, 1, err);
    for (size_t i = 0; i < sizeof matrices / sizeof *matrices && !code; i++)
        if (matrices[i].present) code = bind_matrix(b, matrices[i].matrix, &matrices[i].from, err);
    if (!code && mixes) code = bind_experts(b, &experts->gate_up, l, &gate_up, err);
    if (!code && mixes) code = bind_experts(b, &experts->down, l, &down, err);
    return code;
}

static int bind_all(binder *b, const lazy_watch *watch, lazy_error *err)
{
    lazy_model *model = b->model;
    const lazy_config *c = &model->config;
    const source embedding = { USE_TABLE, c->hidden, 1, { "model.embed_tokens.weight" }, { c->vocab } },
                 norm = { USE_LAYER, 0, 1, { "model.norm.weight" }, { c->hidden } },
                 head = { USE_TABLE, c->hidden, 1, { "lm_head.weight" }, { c->vocab } };
    int code = LAZY_OK;
    for (int l = 0; l < c->n_layers; l++) {
        b->place = lazy_place_of(model, l);
        if ((code = bind_layer(b, l, err))) return code;
        if (!b->dry) b->stream[0]->layers_done = l + 1;
        if (watch && watch->poll(watch->context, l + 1, c->n_layers))
            return lazy_fail(err, LAZY_CANCELLED, "stopped after layer %d", l);
    }
    *b->prefix = '\0';
    b->place = 0;
    code = bind_matrix(b, &model->embedding, &embedding, err);
    b->place = model->n_places - 1;
    /* logits are linear in what the final norm multiplies by */
    if (!code) code = bind_vector(b, &model->final_norm, &norm, c->norm_plus_one, c->logit_scale, err);
    if (!code && lazy_head_is_embedding(model)) model->head = model->embedding;
    else if (!code) code = bind_matrix(b, &model->head, c->tied ? &embedding : &head, err);
    return code;
}

int lazy_bind(lazy_model *model, const lazy_tensor *tensors, int n_tensors, const char *weights, int threads,
              const lazy_watch *watch, lazy_error *err)
{
    const lazy_ops *ops = model->backend->ops;
    lazy_backend *cpu = NULL;
    if (strcmp(weights, "auto") != 0 && strcmp(weights, "q8") != 0 && strcmp(weights, "q4") != 0)
        return lazy_invalid(err, "weights must be auto, q8 or q4, not \"%s\"", weights);
    binder b = { .model = model, .n = n_tensors, .weights = weights };
    int code = lazy_alloc(&b.by_name, n_tensors, "the tensor table", err);
    if (code) return code;
    for (int i = 0; i < n_tensors; i++) b.by_name[i] = &tensors[i];
    qsort(b.by_name, (size_t)n_tensors, sizeof *b.by_name, compare_names);
    for (int i = 1; i < n_tensors && !code; i++)
        if (compare_names(&b.by_name[i - 1], &b.by_name[i]) == 0)
            code = lazy_fail(err, LAZY_CHECKPOINT, "tensor %s: stands in the checkpoint twice", b.by_name[i]->name);
    b.dry = true;
    if (!code) code = bind_all(&b, watch, err);
    for (int i = 0; i < model->n_places && !code; i++) {
        model->bytes += model->places[i].bytes;
        if (ops->admit) code = ops->admit(model->places[i].backend, model->places[i].bytes, "the weights", err);
    }
    if (!code) code = lazy_alloc(&model->owned, n_tensors, "the table of weights", err); /* sorted or rounded */
    if (!code && !ops->bind && b.own_bytes) code = take_room(&b, (void **)&b.own, b.own_bytes, err);
    for (int i = 0; i < model->n_places && !code; i++)
        code = ops->stream_open(model->places[i].backend, &model->config, &b.stream[i], err);
    b.rounding = b.stream[0];
    if (!code && !ops->quantize && strcmp(weights, "auto") != 0) {
        b.rounding = NULL;
        code = lazy_cpu_open(&cpu, threads, LAZY_COMPUTE_F32, LAZY_F32, err);
        if (!code) code = cpu->ops->stream_open(cpu, &model->config, &b.rounding, err);
    }
    if (!code) {
        b.dry = false;
        b.stream[0]->watch = watch; /* rounding polls it */
        code = bind_all(&b, watch, err);
    }
    if (cpu) {
        cpu->ops->stream_close(b.rounding);
        cpu->ops->close(cpu);
    }
    for (int i = 0; i < model->n_places; i++) ops->stream_close(b.stream[i]);
    lazy_free(b.by_name);
    return code;
}
