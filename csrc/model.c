#include "model.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "error.h"
#include "memory.h"

/* Upper bounds: products of sizes stay within 63 bits. */
enum {
    MAX_LAYERS = 4096,
    MAX_WIDTH = 1 << 20,
    MAX_HEADS_WIDTH = 1 << 16,
    MAX_HEAD_DIM = 512,
    MAX_VOCAB = 1 << 24,
    MAX_CONTEXT = 1 << 28
};

#define refuse(err, ...) lazy_fail(err, LAZY_CHECKPOINT, "config: " __VA_ARGS__)

static int check_config(const lazy_config *c, lazy_error *err)
{
    const struct {
        const char *name;
        double value, least, most;
    } numbers[] = {
        { "n_layers", c->n_layers, 1, MAX_LAYERS },
        { "hidden", c->hidden, 1, MAX_WIDTH },
        { "n_heads", c->n_heads, 1, MAX_WIDTH },
        { "n_kv_heads", c->n_kv_heads, 1, MAX_WIDTH },
        { "head_dim", c->head_dim, 1, MAX_HEAD_DIM },
        { "ffn", c->ffn, 1, MAX_WIDTH },
        { "vocab", c->vocab, 1, MAX_VOCAB },
        { "context", c->context, 1, MAX_CONTEXT },
        { "n_ropes", c->n_ropes, 1, LAZY_MAX_ROPES },
        { "rotary_dim", c->rotary_dim, 1, c->head_dim },
        { "query_step", c->query_step, 1, MAX_CONTEXT },
        { "short_context", c->short_context, 1, MAX_CONTEXT },
        { "norm_eps", c->norm_eps, 0, 1 },
        { "query_scalar", c->query_scalar, 0, FLT_MAX },
        { "attention_cap", c->attention_cap, 0, FLT_MAX },
        { "logit_cap", c->logit_cap, 0, FLT_MAX },
        { "query_growth", c->query_growth, 0, FLT_MAX },
        { "embedding_scale", c->embedding_scale, FLT_MIN, FLT_MAX },
        { "logit_scale", c->logit_scale, FLT_MIN, FLT_MAX },
        { "n_experts", c->n_experts, 0, LAZY_MAX_EXPERTS },
        { "experts_per_token", c->experts_per_token, c->n_experts > 0, c->n_experts },
        { "expert_ffn", c->expert_ffn, c->n_experts > 0, MAX_WIDTH },
    };
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (!(numbers[i].value >= numbers[i].least && numbers[i].value <= numbers[i].most))
            return refuse(err, "%s is %.9g; it must be %.9g to %.9g", numbers[i].name, numbers[i].value,
                          numbers[i].least, numbers[i].most);
    const struct {
        bool holds;
        const char *problem;
    } problems[] = {
        { c->n_heads % c->n_kv_heads, "n_heads is no multiple of n_kv_heads" },
        { c->head_dim % 2 || c->rotary_dim % 2, "head_dim or rotary_dim is odd; RoPE turns pairs" },
        { (int64_t)c->n_heads * c->head_dim > MAX_HEADS_WIDTH, "n_heads times head_dim is more than 65536" },
        { c->layer_norm && (c->wide_qk_norm || c->late_qk_norm || c->post_norms),
          "layer_norm goes with norms before attention, FFN and RoPE alone" },
        { c->parallel && (!c->pre_norms || c->post_norms), "parallel goes with a norm before attention alone" },
        { !c->pre_norms && !c->post_norms, "neither pre_norms nor post_norms" },
        { c->query_growth > 0 && c->late_qk_norm, "query_growth and late_qk_norm, which would norm it away" },
    };
    for (size_t i = 0; i < sizeof problems / sizeof *problems; i++)
        if (problems[i].holds) return refuse(err, "%s", problems[i].problem);
    for (int r = 0; r < c->n_ropes; r++)
        if (!(c->rope_scale[r] > 0 && c->rope_scale[r] <= FLT_MAX))
            return refuse(err, "rope_scale[%d] is %g; it must be above 0", r, c->rope_scale[r]);
    for (int i = 0; i < c->n_ropes * c->head_dim / 2; i++)
        if (!isfinite(c->inv_freq[i])) return refuse(err, "inv_freq[%d] is %g", i, c->inv_freq[i]);
    int last_rope = c->n_ropes - 1 - (c->short_context < c->context);
    for (int l = 0; l < c->n_layers; l++)
        if (c->layer_rope[l] < 0 || c->layer_rope[l] > last_rope || c->windows[l] < 0 || c->expert_layers[l] < 0 ||
            c->expert_layers[l] > (c->n_experts > 0))
            return refuse(err, "layer %d has rope %d of 0 to %d, window %d and %d of its FFNs from %d experts", l,
                          c->layer_rope[l], last_rope, c->windows[l], c->expert_layers[l], c->n_experts);
    return LAZY_OK;
}

/* Puts copies, which lie in one block of memory, in place of the caller's arrays. */
static int copy_arrays(lazy_config *own, lazy_error *err)
{
    size_t n_layers = (size_t)own->n_layers, n_ropes = (size_t)own->n_ropes, n = n_ropes * (size_t)own->head_dim / 2;
    float *memory;
    int code = lazy_alloc(&memory, n + n_ropes + 3 * n_layers, "the config", err);
    own->inv_freq = code ? NULL : memcpy(memory, own->inv_freq, n * sizeof *memory);
    if (code) return code;
    own->rope_scale = memcpy(memory + n, own->rope_scale, n_ropes * sizeof *memory);
    int32_t *layers = (int32_t *)(memory + n + n_ropes);
    own->layer_rope = memcpy(layers, own->layer_rope, n_layers * sizeof *layers);
    own->windows = memcpy(layers + n_layers, own->windows, n_layers * sizeof *layers);
    own->expert_layers = memcpy(layers + 2 * n_layers, own->expert_layers, n_layers * sizeof *layers);
    return LAZY_OK;
}

int lazy_model_open_places(lazy_model *model, const lazy_device *device, lazy_dtype type, lazy_error *err)
{
    lazy_backend *backends[LAZY_MAX_DEVICES];
    int n, n_layers = model->config.n_layers, code = lazy_devices_open(backends, &n, device, type, err);
    if (!code && n > n_layers)
        code = lazy_invalid(err, "device is \"%s\"; the model has %d layers to divide", device->name, n_layers);
    for (int i = 0; i < n; i++)
        model->places[i] = (lazy_place){ backends[i], .first = i * n_layers / n, .end = (i + 1) * n_layers / n };
    model->n_places = n;
    model->backend = model->places[0].backend;
    if (!code) snprintf(model->device, sizeof model->device, "%s", n > 1 ? device->name : model->backend->name);
    return code;
}

int lazy_model_open(lazy_model **out, const lazy_config *config, const char *const *shards, int n_shards,
                    const lazy_tensor *tensors, int n_tensors, const char *weights, const lazy_device *device,
                    const lazy_watch *watch, lazy_error *err)
{
    *out = NULL;
    int code = check_config(config, err);
    lazy_model *model;
    if (!code) code = lazy_alloc_zeroed(&model, 1, "the model", err);
    if (code) return code;
    model->config = *config;
    if ((code = copy_arrays(&model->config, err))) goto done;
    if ((code = lazy_alloc_zeroed(&model->shards, n_shards, "the shard table", err))) goto done;
    for (; model->n_shards < n_shards; model->n_shards++)
        if ((code = lazy_mapping_open(&model->shards[model->n_shards], shards[model->n_shards], err))) goto done;

    if ((code = lazy_alloc_zeroed(&model->layers, (size_t)config->n_layers, "the layer table", err))) goto done;
    if ((code = lazy_model_open_places(model, device, lazy_bind_dtype(tensors, n_tensors), err))) goto done;
    code = lazy_bind(model, tensors, n_tensors, weights, device->threads, watch, err);
    if (!code) code = lazy_model_check(model, err);
done:
    if (code) lazy_model_close(model);
    else *out = model;
    return code;
}

int lazy_model_check(const lazy_model *model, lazy_error *err)
{
    int code = LAZY_OK;
    for (int i = 0; i < model->n_shards && !code; i++) code = lazy_mapping_check(&model->shards[i], err);
    return code;
}

int lazy_model_know_words(lazy_model *model, const uint8_t *parts, lazy_error *err)
{
    if (model->word_parts) return LAZY_OK;
    return lazy_alloc_copy(&model->word_parts, parts, model->config.vocab, "the parts of words", err);
}

static void drop_matrix(lazy_backend *backend, lazy_matrix *matrix)
{
    if (backend->ops->unbind) backend->ops->unbind(backend, matrix);
    backend->ops->free(backend, (void *)matrix->bias);
}

static void drop_experts(lazy_backend *backend, lazy_matrix *experts)
{
    if (experts && backend->ops->unbind) backend->ops->unbind(backend, experts);
    lazy_free(experts);
}

void lazy_model_close(lazy_model *model)
{
    if (!model) return;
    if (model->n_places) {
        lazy_backend *first = model->places[0].backend, *last = model->places[model->n_places - 1].backend;
        for (int l = 0; l < model->config.n_layers; l++) {
            lazy_layer *layer = &model->layers[l];
            lazy_backend *backend = model->places[lazy_place_of(model, l)].backend;
            float *vectors[] = { layer->attention_norm,      layer->q_norm,   layer->k_norm,
                                 layer->attention_post_norm, layer->ffn_norm, layer->ffn_post_norm };
            for (size_t i = 0; i < sizeof vectors / sizeof *vectors; i++) backend->ops->free(backend, vectors[i]);
            lazy_matrix *matrices[] = { &layer->qkv, &layer->o, &layer->gate_up, &layer->down, &layer->experts.router };
            for (size_t i = 0; i < sizeof matrices / sizeof *matrices; i++) drop_matrix(backend, matrices[i]);
            drop_experts(backend, layer->experts.gate_up);
            drop_experts(backend, layer->experts.down);
        }
        if (!lazy_head_is_embedding(model)) drop_matrix(last, &model->head);
        drop_matrix(first, &model->embedding);
        last->ops->free(last, model->final_norm);
    }
    for (int i = 0; i < model->n_places; i++) {
        lazy_rope_close(&model->places[i]);
        model->places[i].backend->ops->close(model->places[i].backend);
    }
    for (int i = 0; i < model->n_owned; i++) lazy_free(model->owned[i]);
    lazy_free(model->owned);
    for (int i = 0; i < model->n_shards; i++) lazy_mapping_close(&model->shards[i]);
    lazy_free(model->shards);
    lazy_free(model->layers);
    lazy_free(model->word_parts);
    lazy_free((void *)model->config.inv_freq); /* with the other arrays */
    lazy_free(model);
}
