/* checkpoint.h — the bytes of an input read one after the other, and a small model made of them. */
#pragma once

#include <stdio.h>
#include <stdlib.h>

#include "../../csrc/model.h"
#include "../../csrc/format.h"
#include "../../csrc/memory.h"

typedef struct input {
    const uint8_t *data;
    size_t size;
} input;

static uint8_t next_byte(input *in)
{
    if (!in->size) return 0;
    in->size--;
    return *in->data++;
}

static uint64_t next_number(input *in, int bytes)
{
    uint64_t number = 0;
    for (int i = 0; i < bytes; i++) number = number << 8 | next_byte(in);
    return number;
}

enum { MAX_TENSORS = 80, MAX_RANK = 8 };

typedef struct table {
    lazy_tensor tensors[MAX_TENSORS];
    int64_t shapes[MAX_TENSORS][MAX_RANK];
    char names[MAX_TENSORS][64];
    int n;
    uint64_t bytes; /* of the file */
} table;

static void add(table *t, input *in, const char *name, int64_t rows, int64_t cols)
{
    lazy_dtype dtype = cols ? (lazy_dtype)(next_byte(in) % LAZY_N_DTYPES) : LAZY_F32;
    int64_t row = cols ? cols : rows;
    if (row % lazy_formats[dtype].values) dtype = LAZY_BF16;
    int64_t *shape = t->shapes[t->n];
    shape[0] = rows;
    shape[1] = cols;
    uint64_t bytes = (uint64_t)(cols ? rows : 1) * lazy_row_bytes(dtype, (int)row);
    t->tensors[t->n++] = (lazy_tensor){ name, lazy_formats[dtype].name, shape, cols ? 2 : 1, 0, t->bytes, bytes };
    t->bytes += (bytes + 3) / 4 * 4;
}

static void add_to_layer(table *t, input *in, int layer, const char *suffix, int64_t rows, int64_t cols)
{
    char *name = t->names[t->n];
    snprintf(name, sizeof *t->names, "model.layers.%d.%s", layer, suffix);
    add(t, in, name, rows, cols);
}

static void fill_table(table *t, input *in, const lazy_config *c)
{
    int d = c->hidden, q = lazy_q_width(c), kv = lazy_kv_width(c), f = c->ffn;
    int of_q = c->wide_qk_norm ? q : c->head_dim, of_k = c->wide_qk_norm ? kv : c->head_dim;
    add(t, in, "model.embed_tokens.weight", c->vocab, d);
    add(t, in, "model.norm.weight", d, 0);
    if (!c->tied) add(t, in, "lm_head.weight", c->vocab, d);
    const struct {
        const char *suffix;
        int rows, cols;
        bool absent;
    } parts[] = {
        { "input_layernorm.weight", d, 0, !c->pre_norms },
        { "post_attention_layernorm.weight", d, 0, false },
        { "pre_feedforward_layernorm.weight", d, 0, !c->post_norms || !c->pre_norms },
        { "post_feedforward_layernorm.weight", d, 0, !c->post_norms },
        { "self_attn.q_norm.weight", of_q, 0, !c->qk_norm },
        { "self_attn.k_norm.weight", of_k, 0, !c->qk_norm },
        { "self_attn.q_proj.bias", q, 0, !c->qkv_bias },
        { "self_attn.k_proj.bias", kv, 0, !c->qkv_bias },
        { "self_attn.v_proj.bias", kv, 0, !c->qkv_bias },
        { "self_attn.o_proj.bias", d, 0, !c->o_bias },
        { "self_attn.q_proj.weight", q, d, false },
        { "self_attn.k_proj.weight", kv, d, false },
        { "self_attn.v_proj.weight", kv, d, false },
        { "self_attn.o_proj.weight", d, q, false },
        { "mlp.gate_proj.weight", f, d, false },
        { "mlp.up_proj.weight", f, d, false },
        { "mlp.down_proj.weight", d, f, false },
        { "mlp.gate.weight", c->n_experts, d, false },
        { "mlp.experts.0.gate_proj.weight", f, d, false },
        { "mlp.experts.0.up_proj.weight", f, d, false },
        { "mlp.experts.0.down_proj.weight", d, f, false },
        { "mlp.experts.1.gate_proj.weight", f, d, false },
        { "mlp.experts.1.up_proj.weight", f, d, false },
        { "mlp.experts.1.down_proj.weight", d, f, false },
    };
    for (int layer = 0; layer < c->n_layers; layer++)
        for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
            bool of_experts = strstr(parts[i].suffix, ".experts.") || strstr(parts[i].suffix, "mlp.gate.");
            if (!parts[i].absent && (!of_experts || c->expert_layers[layer]))
                add_to_layer(t, in, layer, parts[i].suffix, parts[i].rows, parts[i].cols);
        }
}

static void require(bool holds, const char *what)
{
    if (holds) return;
    fprintf(stderr, "%s\n", what);
    abort();
}

enum { WIDE = 256, NARROW = 32 };

/* A model with a config, and no weights yet. The config's arrays are its own: it may be changed until tensors are
 * bound. */
static lazy_model *unbound_model(int n_layers, int hidden, int ffn)
{
    lazy_model *model;
    lazy_error err = { 0 };
    require(!lazy_alloc_zeroed(&model, 1, "the model", &err), err.message);
    lazy_config *c = &model->config;
    *c = (lazy_config){
        .n_layers = n_layers,
        .hidden = hidden,
        .n_heads = 2,
        .n_kv_heads = 1,
        .head_dim = NARROW / 2,
        .ffn = ffn,
        .vocab = 8,
        .context = 64,
        .norm_eps = 1e-5f,
        .n_ropes = 1,
        .short_context = 64,
        .rotary_dim = NARROW / 2,
        .query_step = 1,
        .embedding_scale = 1,
        .logit_scale = 1,
        .pre_norms = true,
    };
    size_t n = (size_t)n_layers, n_frequencies = NARROW / 4;
    float *arrays;
    int code = lazy_alloc_zeroed(&arrays, n_frequencies + 1 + 3 * n, "the config", &err);
    require(!code, err.message);
    for (size_t i = 0; i < n_frequencies; i++) arrays[i] = 1.0f / (float)(1 + i);
    arrays[n_frequencies] = 1;
    c->inv_freq = arrays;
    c->rope_scale = arrays + n_frequencies;
    c->layer_rope = (int32_t *)(arrays + n_frequencies + 1);
    c->windows = c->layer_rope + n;
    c->expert_layers = c->windows + n;
    code = lazy_alloc_zeroed(&model->layers, n, "the layers", &err);
    if (!code) code = lazy_alloc_zeroed(&model->shards, 1, "the shards", &err);
    require(!code, err.message);
    return model;
}

/* Binds the tensors to `file` of t->bytes bytes, which must outlive the model. */
static int bind_file(lazy_model *model, const table *t, const unsigned char *file, const char *weights, lazy_error *err)
{
    model->shards[0] = (lazy_mapping){ .data = file, .bytes = t->bytes };
    model->n_shards = 1;
    int code = lazy_bind(model, t->tensors, t->n, weights, 1, NULL, err);
    model->n_shards = 0; /* the rest of the core would ask the system about files that are mapped */
    return code;
}
