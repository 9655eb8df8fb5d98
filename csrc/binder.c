#include "binder.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "error.h"
#include "format.h"
#include "memory.h"

/* The tensor table, sorted by name, and the model that its tensors are bound to. */
typedef struct binder {
    lazy_model *model;
    const lazy_tensor **by_name; /* (n,) */
    int n;
    bool dry; /* first round: validate only */
    const lazy_watch *watch;
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

/* Finds a tensor, validates it as (rows, cols), or (rows,) if cols is 0, and returns its address in the mapping. */
static int take(binder *b, const char *name, int rows, int cols, const void **data, lazy_dtype *dtype, lazy_error *err)
{
    const lazy_tensor *t = find(b, name);
    if (!t) return lazy_fail(err, LAZY_CHECKPOINT, "tensor %s: missing from the checkpoint", name);

    if (!lazy_format_find(t->dtype, dtype))
        return lazy_fail(err, LAZY_CHECKPOINT,
                         "tensor %s: dtype %s is not supported; F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K, Q5_K and Q6_K are", name, t->dtype);
    const lazy_format *format = &lazy_formats[*dtype];

    int rank = cols ? 2 : 1;
    if (t->rank != rank || t->shape[0] != rows || (cols && t->shape[1] != cols)) {
        char found[96];
        int length = 0;
        for (int i = 0; i < t->rank && length < (int)sizeof found - 24; i++)
            length += snprintf(found + length, sizeof found - (size_t)length, "%s%" PRId64, i ? ", " : "", t->shape[i]);
        found[length] = '\0';
        if (cols)
            return lazy_fail(err, LAZY_CHECKPOINT, "tensor %s: shape (%s), but the config asks for (%d, %d)", name, found, rows, cols);
        return lazy_fail(err, LAZY_CHECKPOINT, "tensor %s: shape (%s), but the config asks for (%d)", name, found, rows);
    }
    int row = cols ? cols : rows, n_rows = cols ? rows : 1;
    if (row % format->values)
        return lazy_fail(err, LAZY_CHECKPOINT, "tensor %s: rows of %d values; %s stores whole blocks of %d", name, row, format->name,
                         format->values);
    uint64_t bytes = (uint64_t)n_rows * lazy_row_bytes(*dtype, row);
    if (t->bytes != bytes)
        return lazy_fail(err, LAZY_CHECKPOINT, "tensor %s: %" PRIu64 " bytes, but its shape and dtype make %" PRIu64, name, t->bytes,
                         bytes);
    if (t->shard < 0 || t->shard >= b->model->n_shards)
        return lazy_fail(err, LAZY_CHECKPOINT, "tensor %s: shard %d of %d", name, t->shard, b->model->n_shards);
    const lazy_mapping *shard = &b->model->shards[t->shard];
    if (t->offset > shard->bytes || bytes > shard->bytes - t->offset)
        return lazy_fail(err, LAZY_CHECKPOINT,
                         "tensor %s: bytes %" PRIu64 " to %" PRIu64 " lie past the end of a file of %" PRIu64 " bytes", name, t->offset,
                         t->offset + bytes, shard->bytes);
    if (t->offset % (uint64_t)format->align)
        return lazy_fail(err, LAZY_CHECKPOINT,
                         "tensor %s: begins at byte %" PRIu64 ", which is no multiple of its %d-byte elements; save the checkpoint again",
                         name, t->offset, format->align);
    *data = shard->data + t->offset;
    if (b->dry) b->model->bytes += bytes;
    return LAZY_OK;
}

/* Concatenates up to three vectors (q, k and v biases), widens them to f32, adds `plus` and uploads them. */
static int bind_vector(binder *b, float **out, const char *const *names, const int *lengths, int n_names, float plus, lazy_error *err)
{
    const lazy_backend *backend = b->model->backend;
    const void *data[LAZY_MAX_PARTS];
    lazy_dtype dtype[LAZY_MAX_PARTS];
    int total = 0;
    for (int i = 0; i < n_names; i++) {
        int code = take(b, names[i], lengths[i], 0, &data[i], &dtype[i], err);
        if (code) return code;
        total += lengths[i];
    }
    if (b->dry) return LAZY_OK;

    void *memory = NULL;
    float *host = NULL;
    lazy_stream *stream = NULL;
    int code = lazy_alloc((void **)&host, (size_t)total, sizeof *host, "a weight vector", err);
    if (!code) code = backend->ops->alloc(b->model->backend, &memory, (size_t)total * sizeof *host, "a weight vector", err);
    if (!code) code = backend->ops->stream_open(b->model->backend, &b->model->config, &stream, err);
    if (!code) {
        for (int i = 0, at = 0; i < n_names; at += lengths[i++]) lazy_widen(host + at, data[i], dtype[i], lengths[i]);
        for (int i = 0; i < total; i++) host[i] += plus;
        code = backend->ops->upload(stream, memory, host, (size_t)total * sizeof *host, err);
    }
    backend->ops->stream_close(stream);
    lazy_free(host);
    *out = memory;
    return code;
}

static int bind_norm(binder *b, float **out, const char *const *name, int length, lazy_error *err)
{
    return bind_vector(b, out, name, &length, 1, b->model->config.norm_plus_one ? 1.0f : 0.0f, err);
}

static int bind_matrix(binder *b, lazy_matrix *matrix, const char *const *names, const int *rows, int n_names, int cols, lazy_error *err)
{
    lazy_matrix found = { .n_parts = n_names, .cols = cols, .bias = matrix->bias };
    for (int i = 0; i < n_names; i++) {
        found.part[i].rows = rows[i];
        found.rows += rows[i];
        int code = take(b, names[i], rows[i], cols, &found.part[i].data, &found.part[i].dtype, err);
        if (code) return code;
    }
    if (b->dry) return LAZY_OK;
    int code = b->model->backend->ops->bind(b->model->backend, &found, err);
    if (!code) *matrix = found;
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

#define LAYER(...) name_of(&names, l, (const char *const[]){ __VA_ARGS__ }, sizeof((const char *const[]){ __VA_ARGS__ }) / sizeof(char *))

static int bind_layer(binder *b, int l, lazy_error *err)
{
    const lazy_config *c = &b->model->config;
    lazy_layer *layer = &b->model->layers[l];
    layer_names names;
    int d = c->hidden, q = lazy_q_width(c), kv = lazy_kv_width(c), f = c->ffn, code;
    const int qkv_rows[] = { q, kv, kv };
    float *bias = NULL;

    layer->window = c->windows[l] ? c->windows[l] : INT32_MAX;
    layer->local_rope = c->windows[l] && c->local_inv_freq;
    if ((code = bind_norm(b, &layer->attention_norm, LAYER("input_layernorm.weight"), d, err))) return code;
    /* the norm before the FFN was named after its place behind attention, until there were models with norms at both places */
    float **after_attention = c->post_norms ? &layer->attention_post_norm : &layer->ffn_norm;
    if ((code = bind_norm(b, after_attention, LAYER("post_attention_layernorm.weight"), d, err))) return code;
    if (c->post_norms) {
        if ((code = bind_norm(b, &layer->ffn_norm, LAYER("pre_feedforward_layernorm.weight"), d, err))) return code;
        if ((code = bind_norm(b, &layer->ffn_post_norm, LAYER("post_feedforward_layernorm.weight"), d, err))) return code;
    }
    if (c->qk_norm) {
        if ((code = bind_norm(b, &layer->q_norm, LAYER("self_attn.q_norm.weight"), c->head_dim, err))) return code;
        if ((code = bind_norm(b, &layer->k_norm, LAYER("self_attn.k_norm.weight"), c->head_dim, err))) return code;
    }
    if (c->qkv_bias) {
        code = bind_vector(b, &bias, LAYER("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"), qkv_rows, 3, 0, err);
        layer->qkv.bias = bias;
        if (code) return code;
    }
    if ((code = bind_matrix(b, &layer->qkv, LAYER("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
                            qkv_rows, 3, d, err)))
        return code;
    if (c->o_bias) {
        code = bind_vector(b, &bias, LAYER("self_attn.o_proj.bias"), &d, 1, 0, err);
        layer->o.bias = bias;
        if (code) return code;
    }
    if ((code = bind_matrix(b, &layer->o, LAYER("self_attn.o_proj.weight"), &d, 1, q, err))) return code;
    if ((code = bind_matrix(b, &layer->gate_up, LAYER("mlp.gate_proj.weight", "mlp.up_proj.weight"), (const int[]){ f, f }, 2, d, err)))
        return code;
    return bind_matrix(b, &layer->down, LAYER("mlp.down_proj.weight"), &d, 1, f, err);
}

static int bind_all(binder *b, lazy_error *err)
{
    lazy_model *model = b->model;
    const lazy_config *c = &model->config;
    int code;
    if ((code = bind_matrix(b, &model->embedding, (const char *const[]){ "model.embed_tokens.weight" }, &c->vocab, 1, c->hidden, err)))
        return code;
    for (int l = 0; l < c->n_layers; l++) {
        if ((code = bind_layer(b, l, err))) return code;
        if (b->watch && b->watch->poll(b->watch->context, l + 1, c->n_layers))
            return lazy_fail(err, LAZY_CANCELLED, "stopped after layer %d", l);
    }
    if ((code = bind_norm(b, &model->final_norm, (const char *const[]){ "model.norm.weight" }, c->hidden, err))) return code;
    if (c->tied) {
        model->head = model->embedding;
        return LAZY_OK;
    }
    return bind_matrix(b, &model->head, (const char *const[]){ "lm_head.weight" }, &c->vocab, 1, c->hidden, err);
}

int lazy_bind(lazy_model *model, const lazy_tensor *tensors, int n_tensors, const lazy_watch *watch, lazy_error *err)
{
    binder b = { .model = model, .n = n_tensors, .watch = watch };
    int code = lazy_alloc((void **)&b.by_name, (size_t)n_tensors, sizeof *b.by_name, "the tensor table", err);
    if (code) return code;
    for (int i = 0; i < n_tensors; i++) b.by_name[i] = &tensors[i];
    qsort(b.by_name, (size_t)n_tensors, sizeof *b.by_name, compare_names);
    for (int i = 1; i < n_tensors && !code; i++)
        if (compare_names(&b.by_name[i - 1], &b.by_name[i]) == 0)
            code = lazy_fail(err, LAZY_CHECKPOINT, "tensor %s: stands in the checkpoint twice", b.by_name[i]->name);
    for (int round = 0; round < 2 && !code; round++) {
        b.dry = round == 0;
        code = bind_all(&b, err);
        if (!code && b.dry) code = model->backend->ops->admit(model->backend, model->bytes, "the weights", err);
    }
    lazy_free(b.by_name);
    return code;
}
