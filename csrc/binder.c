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
    bool dry; /* first round: validate only */
    lazy_weights weights;
    lazy_stream *stream; /* of the second round */
} binder;

static int compare_names(const void *a, const void *b)
{
    return strcmp((*(const lazy_tensor *const *)a)->name, (*(const lazy_tensor *const *)b)->name);
}

static const lazy_tensor *find(const binder *b, const char *name)
{
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
        if (lazy_format_find(tensors[i].dtype, &dtype)) bytes[dtype] += tensors[i].bytes;
    }
    lazy_dtype most = LAZY_F32;
    for (int dtype = LAZY_F16; dtype <= LAZY_BF16; dtype++)
        if (bytes[dtype] > bytes[most]) most = (lazy_dtype)dtype;
    return most;
}

#define refuse(err, name, format, ...) lazy_fail(err, LAZY_CHECKPOINT, "tensor %s: " format, name, ##__VA_ARGS__)

/* Finds a tensor, validates it as (rows, cols), or (rows,) if cols is 0, and returns its address in the mapping. */
static int take(binder *b, const char *name, int rows, int cols, const void **data, lazy_dtype *dtype, lazy_error *err)
{
    const lazy_tensor *t = find(b, name);
    if (!t) return refuse(err, name, "missing from the checkpoint");

    if (!lazy_format_find(t->dtype, dtype))
        return refuse(err, name,
                      "dtype %s is not supported; F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, "
                      "Q5_K and Q6_K are",
                      t->dtype);
    const lazy_format *format = &lazy_formats[*dtype];

    int rank = cols ? 2 : 1;
    if (t->rank != rank || t->shape[0] != rows || (cols && t->shape[1] != cols)) {
        char shape[96];
        int length = 0;
        for (int i = 0; i < t->rank && length < (int)sizeof shape - 24; i++)
            length += snprintf(shape + length, sizeof shape - (size_t)length, "%s%" PRId64, i ? ", " : "", t->shape[i]);
        shape[length] = '\0';
        if (cols) return refuse(err, name, "shape (%s), but the config asks for (%d, %d)", shape, rows, cols);
        return refuse(err, name, "shape (%s), but the config asks for (%d)", shape, rows);
    }
    int row = cols ? cols : rows, n_rows = cols ? rows : 1;
    if (row % format->values)
        return refuse(err, name, "rows of %d values; %s stores whole blocks of %d", row, format->name, format->values);
    uint64_t bytes = (uint64_t)n_rows * lazy_row_bytes(*dtype, row);
    if (t->bytes != bytes)
        return refuse(err, name, "%" PRIu64 " bytes, but its shape and dtype make %" PRIu64, t->bytes, bytes);
    if (t->shard < 0 || t->shard >= b->model->n_shards)
        return refuse(err, name, "shard %d of %d", t->shard, b->model->n_shards);
    const lazy_mapping *shard = &b->model->shards[t->shard];
    if (t->offset > shard->bytes || bytes > shard->bytes - t->offset)
        return refuse(err, name, "bytes %" PRIu64 " to %" PRIu64 " lie past the end of a file of %" PRIu64 " bytes",
                      t->offset, t->offset + bytes, shard->bytes);
    if (t->offset % (uint64_t)format->align)
        return refuse(err, name,
                      "begins at byte %" PRIu64
                      ", which is no multiple of its %d-byte elements; save the checkpoint again",
                      t->offset, format->align);
    *data = shard->data + t->offset;
    return LAZY_OK;
}

/* Memory for weights that the model owns; it may be given back by way of *slot. */
static int own(binder *b, void ***slot, size_t bytes, lazy_error *err)
{
    lazy_model *model = b->model;
    *slot = &model->owned[model->n_owned];
    int code = lazy_alloc_bytes(*slot, bytes, 1, NULL, "weights", err);
    if (!code) model->n_owned++;
    return code;
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

/* How a tensor is used. */
typedef enum use {
    USE_TABLE,
    USE_LAYER,
    USE_QKV,
    USE_ROUTER,
    USE_HEADS
} use; /* embedding or LM head; of a layer; q, k and v, one part each, or the norm of q or k; chooses experts, and is
          never rounded; a norm of q or k, stored as (heads, head_dim) */

/* True if the rows of this part are to be sorted. */
static bool is_sorted(const binder *b, use use, int part)
{
    const lazy_config *c = &b->model->config;
    return (c->paired_rope || c->rotary_dim < c->head_dim) && (use == USE_QKV || use == USE_HEADS) && part < 2;
}

/* Concatenates up to three vectors (q, k and v biases), widens them to f32, adds `plus`, multiplies by `factor` and
 * uploads them. */
static int bind_vector(binder *b, float **out, const char *const *names, const int *lengths, int n_names, use use,
                       float plus, float factor, lazy_error *err)
{
    lazy_backend *backend = b->model->backend;
    const void *data[LAZY_MAX_PARTS];
    lazy_dtype dtype[LAZY_MAX_PARTS];
    int total = 0;
    for (int i = 0; i < n_names; i++) {
        int cols = use == USE_HEADS ? b->model->config.head_dim : 0;
        int code = take(b, names[i], cols ? lengths[i] / cols : lengths[i], cols, &data[i], &dtype[i], err);
        if (code) return code;
        total += lengths[i];
    }
    if (b->dry) {
        b->model->bytes += (size_t)total * sizeof **out;
        return LAZY_OK;
    }
    void *memory = NULL;
    float *host = NULL; /* (2, total): the second one is for sorting */
    int code = lazy_alloc(&host, 2 * (size_t)total, "a weight vector", err);
    if (!code) code = backend->ops->alloc(backend, &memory, (size_t)total * sizeof *host, "a weight vector", err);
    if (!code) {
        for (int i = 0, at = 0; i < n_names; at += lengths[i++]) {
            float *unsorted = host + total;
            lazy_widen(is_sorted(b, use, i) ? unsorted : host + at, data[i], dtype[i], lengths[i]);
            if (is_sorted(b, use, i))
                sort_rows((char *)(host + at), (char *)unsorted, sizeof *host, lengths[i], &b->model->config);
        }
        for (int i = 0; (plus != 0 || factor != 1) && i < total; i++) host[i] = (host[i] + plus) * factor;
        code = backend->ops->upload(b->stream, memory, host, (size_t)total * sizeof *host, err);
    }
    lazy_free(host);
    *out = memory;
    return code;
}

static int bind_norm(binder *b, float **out, const char *const *name, int length, use use, float factor,
                     lazy_error *err)
{
    return bind_vector(b, out, name, &length, 1, use, b->model->config.norm_plus_one ? 1.0f : 0.0f, factor, err);
}

/* The format that a matrix is to have, if that is possible. */
static int choose_format(const binder *b, const char *name, use use, int cols, lazy_dtype stored, lazy_dtype *format,
                         lazy_error *err)
{
    static const char *const settings[] = {
        [LAZY_WEIGHTS_AS_STORED] = "auto", [LAZY_WEIGHTS_Q8] = "q8", [LAZY_WEIGHTS_Q4] = "q4"
    };
    *format = stored;
    if (b->weights != LAZY_WEIGHTS_AS_STORED && use != USE_ROUTER)
        *format = b->weights == LAZY_WEIGHTS_Q4 && use != USE_TABLE ? LAZY_Q4_1 : LAZY_Q8_0;
    const lazy_format *target = &lazy_formats[*format];
    if (lazy_is_quantized(*format) && !b->model->backend->ops->quantize)
        return lazy_fail(err, LAZY_DEVICE,
                         "tensor %s: in %s, which %s cannot compute with; the CPU can (device=\"cpu\")", name,
                         target->name, b->model->backend->name);
    if (*format != stored && lazy_is_quantized(stored))
        return lazy_invalid(
            err, "weights=\"%s\": tensor %s is stored in %s; quantized weights are used as stored, with \"auto\"",
            settings[b->weights], name, lazy_formats[stored].name);
    if (cols % target->values)
        return lazy_invalid(err, "weights=\"%s\": tensor %s has rows of %d values, and %s takes multiples of %d",
                            settings[b->weights], name, cols, target->name, target->values);
    return LAZY_OK;
}

/* Makes the part what the ops expect, in memory of the model where it is not so in the shard. */
static int prepare_part(binder *b, lazy_part *part, int cols, lazy_dtype format, bool unsorted, lazy_error *err)
{
    void **sorted = NULL, **rounded;
    int code = LAZY_OK;
    if (unsorted) {
        size_t row_bytes = lazy_row_bytes(part->dtype, cols);
        if ((code = own(b, &sorted, (size_t)part->rows * row_bytes, err))) return code;
        sort_rows(*sorted, part->data, row_bytes, part->rows, &b->model->config);
        part->data = *sorted;
    }
    if (format == part->dtype) return LAZY_OK;
    if (!(code = own(b, &rounded, (size_t)part->rows * lazy_row_bytes(format, cols), err)))
        code = b->model->backend->ops->quantize(b->stream, *rounded, format, part, cols, err);
    if (code) return code;
    *part = (lazy_part){ .data = *rounded, .rows = part->rows, .dtype = format };
    if (sorted) {
        lazy_free(*sorted);
        *sorted = NULL;
    }
    return LAZY_OK;
}

/* *matrix = what `bind` takes, in the second round. */
static int prepare_matrix(binder *b, lazy_matrix *matrix, const char *const *names, const int *rows, int n_names,
                          int cols, use use, lazy_error *err)
{
    *matrix = (lazy_matrix){ .n_parts = n_names, .cols = cols };
    for (int i = 0; i < n_names; i++) {
        lazy_part *part = &matrix->part[i];
        lazy_dtype format;
        part->rows = rows[i];
        matrix->rows += rows[i];
        int code = take(b, names[i], rows[i], cols, &part->data, &part->dtype, err);
        if (!code) code = choose_format(b, names[i], use, cols, part->dtype, &format, err);
        if (code) return code;
        if (b->dry) b->model->bytes += (size_t)rows[i] * lazy_row_bytes(format, cols);
        else if ((code = prepare_part(b, part, cols, format, is_sorted(b, use, i), err))) return code;
    }
    return LAZY_OK;
}

static int bind_matrix(binder *b, lazy_matrix *matrix, const char *const *names, const int *rows, int n_names, int cols,
                       use use, lazy_error *err)
{
    lazy_matrix bound;
    int code = prepare_matrix(b, &bound, names, rows, n_names, cols, use, err);
    if (code || b->dry) return code;
    bound.bias = matrix->bias;
    code = b->model->backend->ops->bind(b->model->backend, &bound, 1, err);
    if (!code) *matrix = bound;
    return code;
}

enum { NAME_BYTES = 96 };

/* Up to three tensor names of one layer: "model.layers.7." and a suffix each. */
typedef struct layer_names {
    char text[LAZY_MAX_PARTS][NAME_BYTES];
    const char *list[LAZY_MAX_PARTS];
} layer_names;

static const char *const *name_of(layer_names *names, int layer, const char *const *suffixes, int n)
{
    for (int i = 0; i < n; i++) {
        snprintf(names->text[i], NAME_BYTES, "model.layers.%d.%s", layer, suffixes[i]);
        names->list[i] = names->text[i];
    }
    return names->list;
}

#define LAYER(...)                                                                                                     \
    name_of(&names, l, (const char *const[]){ __VA_ARGS__ },                                                           \
            sizeof((const char *const[]){ __VA_ARGS__ }) / sizeof(char *))

/* The matrices of all experts of a layer. kinds: names of the parts of each. */
static int bind_experts(binder *b, lazy_matrix **out, int l, const char *const *kinds, const int *rows, int n_kinds,
                        int cols, lazy_error *err)
{
    int n = b->model->config.n_experts, code = LAZY_OK;
    lazy_matrix *bound = NULL, unused;
    if (!b->dry) code = lazy_alloc(&bound, n, "the table of experts", err);
    for (int e = 0; e < n && !code; e++) {
        layer_names names;
        for (int i = 0; i < n_kinds; i++) {
            snprintf(names.text[i], NAME_BYTES, "model.layers.%d.mlp.experts.%d.%s.weight", l, e, kinds[i]);
            names.list[i] = names.text[i];
        }
        code = prepare_matrix(b, bound ? &bound[e] : &unused, names.list, rows, n_kinds, cols, USE_LAYER, err);
    }
    if (!code && !b->dry) code = b->model->backend->ops->bind(b->model->backend, bound, n, err);
    if (code) lazy_free(bound);
    else *out = bound;
    return code;
}

static int bind_ffn(binder *b, int l, lazy_error *err)
{
    const lazy_config *c = &b->model->config;
    lazy_layer *layer = &b->model->layers[l];
    lazy_experts *experts = &layer->experts;
    layer_names names;
    int d = c->hidden, f = c->expert_layers[l] ? c->expert_ffn : c->ffn, code;
    const int both[] = { f, f };
    if (!c->expert_layers[l]) {
        code = bind_matrix(b, &layer->gate_up, LAYER("mlp.gate_proj.weight", "mlp.up_proj.weight"), both, 2, d,
                           USE_LAYER, err);
        return code ? code : bind_matrix(b, &layer->down, LAYER("mlp.down_proj.weight"), &d, 1, f, USE_LAYER, err);
    }
    code = bind_matrix(b, &experts->router, LAYER("mlp.gate.weight"), &c->n_experts, 1, d, USE_ROUTER, err);
    if (!code)
        code = bind_experts(b, &experts->gate_up, l, (const char *const[]){ "gate_proj", "up_proj" }, both, 2, d, err);
    return code ? code : bind_experts(b, &experts->down, l, (const char *const[]){ "down_proj" }, &d, 1, f, err);
}

static int bind_layer(binder *b, int l, lazy_error *err)
{
    const lazy_config *c = &b->model->config;
    lazy_layer *layer = &b->model->layers[l];
    layer_names names;
    int d = c->hidden, q = lazy_q_width(c), kv = lazy_kv_width(c), code;
    const int qkv_rows[] = { q, kv, kv };
    float *bias = NULL;

    layer->window = c->windows[l] ? c->windows[l] : INT32_MAX;
    const struct {
        bool present;
        const char *name;
        float **norm;
    } norms[] = {
        { c->pre_norms, "input_layernorm.weight", &layer->attention_norm },
        /* the norm before the FFN was named after its place behind attention, until there were models with norms at
         * both places */
        { !c->parallel, "post_attention_layernorm.weight",
          c->post_norms ? &layer->attention_post_norm : &layer->ffn_norm },
        { c->post_norms && c->pre_norms, "pre_feedforward_layernorm.weight", &layer->ffn_norm },
        { c->post_norms, "post_feedforward_layernorm.weight", &layer->ffn_post_norm },
    };
    for (size_t i = 0; i < sizeof norms / sizeof *norms; i++)
        if (norms[i].present && (code = bind_norm(b, norms[i].norm, LAYER(norms[i].name), d, USE_LAYER, 1, err)))
            return code;
    if (c->qk_norm) {
        bool all = c->wide_qk_norm || c->layer_norm;
        use use = c->layer_norm ? USE_HEADS : USE_QKV;
        int of_q = all ? q : c->head_dim, of_k = all ? kv : c->head_dim;
        if ((code = bind_norm(b, &layer->q_norm, LAYER("self_attn.q_norm.weight"), of_q, use, 1, err))) return code;
        if ((code = bind_norm(b, &layer->k_norm, LAYER("self_attn.k_norm.weight"), of_k, use, 1, err))) return code;
    }
    if (c->qkv_bias) {
        code = bind_vector(b, &bias, LAYER("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
                           qkv_rows, 3, USE_QKV, 0, 1, err);
        layer->qkv.bias = bias;
        if (code) return code;
    }
    if ((code = bind_matrix(b, &layer->qkv,
                            LAYER("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
                            qkv_rows, 3, d, USE_QKV, err)))
        return code;
    if (c->o_bias) {
        code = bind_vector(b, &bias, LAYER("self_attn.o_proj.bias"), &d, 1, USE_LAYER, 0, 1, err);
        layer->o.bias = bias;
        if (code) return code;
    }
    if ((code = bind_matrix(b, &layer->o, LAYER("self_attn.o_proj.weight"), &d, 1, q, USE_LAYER, err))) return code;
    return bind_ffn(b, l, err);
}

static int bind_all(binder *b, const lazy_watch *watch, lazy_error *err)
{
    lazy_model *model = b->model;
    const lazy_config *c = &model->config;
    int code;
    if ((code = bind_matrix(b, &model->embedding, (const char *const[]){ "model.embed_tokens.weight" }, &c->vocab, 1,
                            c->hidden, USE_TABLE, err)))
        return code;
    for (int l = 0; l < c->n_layers; l++) {
        if ((code = bind_layer(b, l, err))) return code;
        if (!b->dry) b->stream->layers_done = l + 1;
        if (watch && watch->poll(watch->context, l + 1, c->n_layers))
            return lazy_fail(err, LAZY_CANCELLED, "stopped after layer %d", l);
    }
    /* logits are linear in what the final norm multiplies by */
    if ((code = bind_norm(b, &model->final_norm, (const char *const[]){ "model.norm.weight" }, c->hidden, USE_LAYER,
                          c->logit_scale, err)))
        return code;
    if (c->tied) {
        model->head = model->embedding;
        return LAZY_OK;
    }
    return bind_matrix(b, &model->head, (const char *const[]){ "lm_head.weight" }, &c->vocab, 1, c->hidden, USE_TABLE,
                       err);
}

int lazy_bind(lazy_model *model, const lazy_tensor *tensors, int n_tensors, lazy_weights weights,
              const lazy_watch *watch, lazy_error *err)
{
    const lazy_ops *ops = model->backend->ops;
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
    if (!code) code = ops->admit(model->backend, model->bytes, "the weights", err);
    /* at most two for each tensor: sorted, and rounded */
    if (!code) code = lazy_alloc(&model->owned, 2 * (size_t)n_tensors, "the table of weights", err);
    if (!code) code = ops->stream_open(model->backend, &model->config, &b.stream, err);
    if (!code) {
        b.dry = false;
        b.stream->watch = watch;
        code = bind_all(&b, watch, err);
    }
    ops->stream_close(b.stream);
    lazy_free(b.by_name);
    return code;
}
