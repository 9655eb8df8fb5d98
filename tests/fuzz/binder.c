/* binder.c — a tensor table and weights made from any bytes, bound and run: refused with words, or every read within the file.
 *
 * The table begins as that of a whole checkpoint. The input says which options the model has, in which format each tensor is, what of the
 * table is changed, and what the file holds. */
#include "../../csrc/binder.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../csrc/device.h"
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

enum { LAYERS = 2, MAX_TENSORS = 40, MAX_RANK = 8, WIDE = 256, NARROW = 32 };

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
    add(t, in, "model.embed_tokens.weight", c->vocab, d);
    add(t, in, "model.norm.weight", d, 0);
    if (!c->tied) add(t, in, "lm_head.weight", c->vocab, d);
    const struct {
        const char *suffix;
        int rows, cols;
        bool absent;
    } parts[] = {
        { "input_layernorm.weight", d, 0, false },
        { "post_attention_layernorm.weight", d, 0, false },
        { "pre_feedforward_layernorm.weight", d, 0, !c->post_norms },
        { "post_feedforward_layernorm.weight", d, 0, !c->post_norms },
        { "self_attn.q_norm.weight", c->head_dim, 0, !c->qk_norm },
        { "self_attn.k_norm.weight", c->head_dim, 0, !c->qk_norm },
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
    };
    for (int layer = 0; layer < LAYERS; layer++)
        for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
            if (!parts[i].absent) add_to_layer(t, in, layer, parts[i].suffix, parts[i].rows, parts[i].cols);
}

static void change_table(table *t, input *in)
{
    static const char *const names[] = { "I64", "Q8_0", "F32", "", "model.norm.weight", "model.layers.0.mlp.up_proj.weight" };
    enum { N_NAMES = sizeof names / sizeof *names };
    for (int n = next_byte(in) % 4; n > 0; n--) {
        lazy_tensor *tensor = &t->tensors[next_byte(in) % t->n];
        int64_t *shape = t->shapes[tensor - t->tensors];
        switch (next_byte(in) % 10) {
        case 0: tensor->name = names[next_byte(in) % N_NAMES]; break;
        case 1: tensor->dtype = names[next_byte(in) % N_NAMES]; break;
        case 2: tensor->rank = next_byte(in) % (MAX_RANK + 1); break;
        case 3: shape[next_byte(in) % MAX_RANK] = (int64_t)next_number(in, 8); break;
        case 4: shape[next_byte(in) % 2] += (int8_t)next_byte(in); break;
        case 5: tensor->offset = next_number(in, 8); break;
        case 6: tensor->offset += (uint64_t)(int64_t)(int8_t)next_byte(in); break;
        case 7: tensor->bytes = next_number(in, 8); break;
        case 8: tensor->shard = (int)next_number(in, 4); break;
        case 9: t->bytes -= t->bytes < 256 ? 0 : next_byte(in); break; /* of the file */
        }
    }
}

static void require(bool holds, const char *what)
{
    if (holds) return;
    fprintf(stderr, "%s\n", what);
    abort();
}

/* A prompt that is pruned, and a token that revives. */
static void run(lazy_model *model)
{
    const lazy_stage stage = { .layer = 0, .keep = 0.5 };
    lazy_pruning pruning = LAZY_PRUNING_DENSE;
    pruning.stages = &stage;
    pruning.n_stages = 1;
    lazy_session *session;
    lazy_error err = { 0 };
    int32_t token;
    require(!lazy_session_open(&session, model, &pruning, &err), err.message);
    int code = lazy_session_greedy(session, (const int32_t[]){ 0, 1, 2, 3, 4 }, 5, false, &token, NULL, &err);
    if (!code) code = lazy_session_greedy(session, &token, 1, true, &token, NULL, &err);
    require(!code || (code == LAZY_CHECKPOINT && *err.message), "a pass failed otherwise than by a number that is not finite");
    lazy_session_close(session);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    input in = { data, size };
    uint8_t options = next_byte(&in), more = next_byte(&in);
    int width = more & 1 ? WIDE : NARROW, ffn = more & 1 ? NARROW : WIDE; /* the K formats have rows of 256 values */
    float inv_freq[NARROW / 4];
    for (int i = 0; i < NARROW / 4; i++) inv_freq[i] = 1.0f / (float)(1 + i);
    const int32_t windows[LAYERS] = { more & 2 ? 3 : 0 };

    lazy_model *model;
    lazy_error err = { 0 };
    require(!lazy_alloc_zeroed((void **)&model, 1, sizeof *model, "the model", &err), err.message);
    model->config = (lazy_config){
        .n_layers = LAYERS,
        .hidden = width,
        .n_heads = 2,
        .n_kv_heads = 1,
        .head_dim = NARROW / 2,
        .ffn = ffn,
        .vocab = 8,
        .context = 64,
        .norm_eps = 1e-5f,
        .rope_scale = 1,
        .embedding_scale = 1,
        .tied = options & 1,
        .qkv_bias = options & 2,
        .o_bias = options & 4,
        .qk_norm = options & 8,
        .paired_rope = options & 16,
        .norm_plus_one = options & 32,
        .post_norms = options & 64,
        .gelu = options & 128,
    };
    lazy_config *c = &model->config;
    int code = lazy_alloc_copy((void **)&c->inv_freq, inv_freq, (size_t)c->head_dim / 2, sizeof *inv_freq, "the config", &err);
    if (!code) code = lazy_alloc_copy((void **)&c->windows, windows, LAYERS, sizeof *windows, "the config", &err);
    if (!code) code = lazy_alloc_zeroed((void **)&model->layers, LAYERS, sizeof *model->layers, "the layers", &err);
    if (!code) code = lazy_alloc_zeroed((void **)&model->shards, 1, sizeof *model->shards, "the shards", &err);
    table t = { 0 };
    fill_table(&t, &in, c);
    change_table(&t, &in);
    const lazy_device device = { .name = "cpu", .threads = 1, .compute = more & 4 ? "bf16" : "f32" };
    if (!code) code = lazy_device_open(&model->backend, &device, lazy_bind_dtype(t.tensors, t.n), &err);
    require(!code || code == LAZY_INVALID || code == LAZY_DEVICE, err.message); /* the machine has no bf16 */

    unsigned char *file = malloc(t.bytes); /* of exactly this size: the sanitizer sees each byte that is read beyond it */
    memset(file, 0, t.bytes);
    for (uint64_t at = 0; at < t.bytes && in.size; at += in.size)
        memcpy(file + at, in.data, t.bytes - at < in.size ? t.bytes - at : in.size);
    model->shards[0] = (lazy_mapping){ .data = file, .bytes = t.bytes };
    model->n_shards = 1;
    if (!code) {
        code = lazy_bind(model, t.tensors, t.n, (lazy_weights)(more >> 3 & 3) % 3, NULL, &err);
        require(!code || *err.message, "an error without words");
    }
    model->n_shards = 0; /* the rest is for files that are mapped */
    if (!code) run(model);
    lazy_model_close(model);
    free(file);
    return 0;
}
