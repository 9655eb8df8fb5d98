#include "model.h"

#include <math.h>
#include <string.h>

#include "device.h"
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

/* All three sizes are 0 where no layer has experts. */
static int check_experts(const lazy_config *c, lazy_error *err)
{
    int least = 0;
    for (int l = 0; l < c->n_layers; l++) {
        if (c->expert_layers[l] != 0 && c->expert_layers[l] != 1)
            return refuse(err, "expert_layers[%d] is %d; it must be 0 or 1", l, c->expert_layers[l]);
        least |= c->expert_layers[l];
    }
    const struct {
        const char *name;
        int value, most;
    } fields[] = {
        { "n_experts", c->n_experts, LAZY_MAX_EXPERTS },
        { "experts_per_token", c->experts_per_token, c->n_experts },
        { "expert_ffn", c->expert_ffn, MAX_WIDTH },
    };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if (fields[i].value < least || fields[i].value > fields[i].most)
            return refuse(err, "%s is %d; it must be %d to %d", fields[i].name, fields[i].value, least, fields[i].most);
    return LAZY_OK;
}

static int check_config(const lazy_config *c, lazy_error *err)
{
    const struct {
        const char *name;
        int value, most;
    } fields[] = {
        { "n_layers", c->n_layers, MAX_LAYERS },
        { "hidden", c->hidden, MAX_WIDTH },
        { "n_heads", c->n_heads, MAX_WIDTH },
        { "n_kv_heads", c->n_kv_heads, MAX_WIDTH },
        { "head_dim", c->head_dim, MAX_HEAD_DIM },
        { "ffn", c->ffn, MAX_WIDTH },
        { "vocab", c->vocab, MAX_VOCAB },
        { "context", c->context, MAX_CONTEXT },
        { "n_ropes", c->n_ropes, LAZY_MAX_ROPES },
        { "rotary_dim", c->rotary_dim, c->head_dim },
        { "query_step", c->query_step, MAX_CONTEXT },
        { "short_context", c->short_context, MAX_CONTEXT },
    };
    const struct {
        const char *name;
        float value;
        bool may_be_0;
    } factors[] = {
        { "query_scalar", c->query_scalar, true },
        { "attention_cap", c->attention_cap, true },
        { "logit_cap", c->logit_cap, true },
        { "query_growth", c->query_growth, true },
        { "embedding_scale", c->embedding_scale, false },
        { "logit_scale", c->logit_scale, false },
    };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if (fields[i].value < 1 || fields[i].value > fields[i].most)
            return refuse(err, "%s is %d; it must be 1 to %d", fields[i].name, fields[i].value, fields[i].most);
    if (c->n_heads % c->n_kv_heads)
        return refuse(err, "n_heads %d is no multiple of n_kv_heads %d", c->n_heads, c->n_kv_heads);
    if (c->head_dim % 2 || c->rotary_dim % 2)
        return refuse(err, "%s %d is odd; RoPE turns pairs", c->head_dim % 2 ? "head_dim" : "rotary_dim",
                      c->head_dim % 2 ? c->head_dim : c->rotary_dim);
    if ((int64_t)c->n_heads * c->head_dim > MAX_HEADS_WIDTH)
        return refuse(err, "n_heads %d times head_dim %d is more than %d", c->n_heads, c->head_dim, MAX_HEADS_WIDTH);
    if (!(c->norm_eps >= 0 && c->norm_eps < 1))
        return refuse(err, "norm_eps is %g; it must be at least 0 and below 1", c->norm_eps);
    for (size_t i = 0; i < sizeof factors / sizeof *factors; i++)
        if (!isfinite(factors[i].value) || factors[i].value < 0 || (factors[i].value == 0 && !factors[i].may_be_0))
            return refuse(err, "%s is %g; it must be %s 0", factors[i].name, factors[i].value,
                          factors[i].may_be_0 ? "at least" : "above");
    if (c->layer_norm && (c->wide_qk_norm || c->late_qk_norm || c->post_norms))
        return refuse(err, "layer_norm goes with norms before attention, FFN and RoPE alone");
    if (c->parallel && (!c->pre_norms || c->post_norms))
        return refuse(err, "parallel goes with a norm before attention alone");
    if (!c->pre_norms && !c->post_norms) return refuse(err, "neither pre_norms nor post_norms");
    if (c->query_growth > 0 && c->late_qk_norm)
        return refuse(err, "query_growth and late_qk_norm, which would norm it away");
    for (int r = 0; r < c->n_ropes; r++)
        if (!isfinite(c->rope_scale[r]) || c->rope_scale[r] <= 0)
            return refuse(err, "rope_scale[%d] is %g; it must be above 0", r, c->rope_scale[r]);
    for (int i = 0; i < c->n_ropes * c->head_dim / 2; i++)
        if (!isfinite(c->inv_freq[i])) return refuse(err, "inv_freq[%d] is %g", i, c->inv_freq[i]);
    int last_rope = c->n_ropes - 1 - (c->short_context < c->context);
    for (int l = 0; l < c->n_layers; l++)
        if (c->layer_rope[l] < 0 || c->layer_rope[l] > last_rope)
            return refuse(err, "layer_rope[%d] is %d; it must be 0 to %d", l, c->layer_rope[l], last_rope);
    for (int l = 0; l < c->n_layers; l++)
        if (c->windows[l] < 0) return refuse(err, "windows[%d] is %d; it must be at least 0", l, c->windows[l]);
    return check_experts(c, err);
}

int lazy_model_open(lazy_model **out, const lazy_config *config, const char *const *shards, int n_shards,
                    const lazy_tensor *tensors, int n_tensors, lazy_weights weights, const lazy_device *device,
                    const lazy_watch *watch, lazy_error *err)
{
    *out = NULL;
    int code = check_config(config, err);
    if (code) return code;

    lazy_model *model;
    code = lazy_alloc_zeroed(&model, 1, "the model", err);
    if (code) return code;
    model->config = *config;
    lazy_config *own = &model->config;
    size_t n_layers = (size_t)config->n_layers, n_ropes = (size_t)config->n_ropes;
    const struct {
        void **copy;
        const void *array;
        size_t n;
    } arrays[] = { { (void **)&own->inv_freq, config->inv_freq, n_ropes * (size_t)config->head_dim / 2 },
                   { (void **)&own->rope_scale, config->rope_scale, n_ropes },
                   { (void **)&own->layer_rope, config->layer_rope, n_layers },
                   { (void **)&own->windows, config->windows, n_layers },
                   { (void **)&own->expert_layers, config->expert_layers, n_layers } }; /* of 4 bytes each */
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) *arrays[i].copy = NULL;
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        if ((code = lazy_alloc_bytes(arrays[i].copy, arrays[i].n, 4, arrays[i].array, "the config", err))) goto done;

    if ((code = lazy_alloc_zeroed(&model->shards, n_shards, "the shard table", err))) goto done;
    for (; model->n_shards < n_shards; model->n_shards++)
        if ((code = lazy_mapping_open(&model->shards[model->n_shards], shards[model->n_shards], err))) goto done;

    if ((code = lazy_alloc_zeroed(&model->layers, (size_t)config->n_layers, "the layer table", err))) goto done;
    if ((code = lazy_device_open(&model->backend, device, lazy_bind_dtype(tensors, n_tensors), err))) goto done;
    code = lazy_bind(model, tensors, n_tensors, weights, watch, err);
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

static void drop_matrix(lazy_backend *backend, lazy_matrix *matrix)
{
    backend->ops->unbind(backend, matrix);
    backend->ops->free(backend, (void *)matrix->bias);
}

static void drop_experts(lazy_backend *backend, lazy_experts *experts)
{
    drop_matrix(backend, &experts->router);
    if (experts->gate_up) backend->ops->unbind(backend, experts->gate_up);
    if (experts->down) backend->ops->unbind(backend, experts->down);
    lazy_free(experts->gate_up);
    lazy_free(experts->down);
}

void lazy_model_close(lazy_model *model)
{
    if (!model) return;
    lazy_backend *backend = model->backend;
    if (backend) {
        for (int l = 0; l < model->config.n_layers; l++) {
            lazy_layer *layer = &model->layers[l];
            float *vectors[] = { layer->attention_norm,      layer->q_norm,   layer->k_norm,
                                 layer->attention_post_norm, layer->ffn_norm, layer->ffn_post_norm };
            for (size_t i = 0; i < sizeof vectors / sizeof *vectors; i++) backend->ops->free(backend, vectors[i]);
            lazy_matrix *matrices[] = { &layer->qkv, &layer->o, &layer->gate_up, &layer->down };
            for (size_t i = 0; i < sizeof matrices / sizeof *matrices; i++) drop_matrix(backend, matrices[i]);
            drop_experts(backend, &layer->experts);
        }
        if (!model->config.tied) drop_matrix(backend, &model->head);
        drop_matrix(backend, &model->embedding);
        backend->ops->free(backend, model->final_norm);
        lazy_rope_close(model);
        backend->ops->close(backend);
    }
    for (int i = 0; i < model->n_owned; i++) lazy_free(model->owned[i]);
    lazy_free(model->owned);
    for (int i = 0; i < model->n_shards; i++) lazy_mapping_close(&model->shards[i]);
    lazy_free(model->shards);
    lazy_free(model->layers);
    lazy_free((void *)model->config.inv_freq);
    lazy_free((void *)model->config.rope_scale);
    lazy_free((void *)model->config.layer_rope);
    lazy_free((void *)model->config.windows);
    lazy_free((void *)model->config.expert_layers);
    lazy_free(model);
}

const lazy_config *lazy_model_config(const lazy_model *model) { return &model->config; }
uint64_t lazy_model_bytes(const lazy_model *model) { return model->bytes; }
lazy_dtype lazy_model_activations(const lazy_model *model) { return model->backend->activations; }
lazy_dtype lazy_model_kv(const lazy_model *model) { return model->backend->kv; }
int lazy_model_threads(const lazy_model *model) { return model->backend->threads; }
const char *lazy_model_isa(const lazy_model *model) { return model->backend->variant; }
const char *lazy_model_device(const lazy_model *model) { return model->backend->name; }
