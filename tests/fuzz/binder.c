/* binder.c — a tensor table and weights made from any bytes, bound and run: refused with words, or every read within
 * the file.
 *
 * The table begins as that of a whole checkpoint. The input says which options the model has, in which format each
 * tensor is, what of the table is changed, and what the file holds. */
#include "checkpoint.h"

#include <stdlib.h>
#include <string.h>

static void change_table(table *t, input *in)
{
    static const char *const names[] = {
        "I64", "Q8_0", "F32", "", "model.norm.weight", "model.layers.0.mlp.up_proj.weight"
    };
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

/* A prompt that is pruned, and a token that revives. */
static void run(lazy_model *model)
{
    const lazy_stage stage = { .layer = 0, .keep = 0.5 };
    lazy_pruning pruning = lazy_pruning_dense;
    pruning.stages = &stage;
    pruning.n_stages = 1;
    lazy_session *session;
    lazy_error err = { 0 };
    int32_t token;
    require(!lazy_session_open(&session, model, &pruning, &err), err.message);
    lazy_pass prompt = { .ids = (const int32_t[]){ 0, 1, 2, 3, 4 }, .n = 5, .best = &token },
              step = { .ids = &token, .n = 1, .generated = true, .best = &token };
    int code = lazy_session_run(session, &prompt, &err);
    if (!code) code = lazy_session_run(session, &step, &err);
    require(!code || (code == LAZY_CHECKPOINT && *err.message),
            "a pass failed otherwise than by a number that is not finite");
    lazy_session_close(session);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    input in = { data, size };
    uint8_t options = next_byte(&in), more = next_byte(&in);
    int width = more & 1 ? WIDE : NARROW, ffn = more & 1 ? NARROW : WIDE; /* the K formats have rows of 256 values */
    lazy_model *model = unbound_model(2, width, ffn);
    lazy_config *c = &model->config;
    c->tied = options & 1;
    c->qkv_bias = options & 2;
    c->o_bias = options & 4;
    c->qk_norm = options & 8;
    c->paired_rope = options & 16;
    c->norm_plus_one = options & 32;
    c->post_norms = options & 64;
    c->gelu = options & 128;
    c->wide_qk_norm = more & 32;
    c->pre_norms = !(c->post_norms && more & 64);
    if (more & 128) c->rotary_dim /= 2;
    ((int32_t *)c->windows)[0] = more & 2 ? 3 : 0;
    if (more & 8) {
        ((int32_t *)c->expert_layers)[0] = 1;
        c->n_experts = 2;
        c->experts_per_token = more & 16 ? 1 : 2;
        c->expert_ffn = ffn;
        c->normed_experts = more & 16;
    }
    static const char *const weights[] = { "auto", "q8", "q4" };
    lazy_error err = { 0 };
    table t = { 0 };
    fill_table(&t, &in, c);
    change_table(&t, &in);
    const lazy_device device = { .name = "cpu", .threads = 1, .compute = more & 4 ? "bf16" : "f32" };
    int code = lazy_model_open_places(model, &device, lazy_bind_dtype(t.tensors, t.n), &err);
    require(!code || code == LAZY_INVALID || code == LAZY_DEVICE, err.message); /* the machine has no bf16 */

    unsigned char *file =
        malloc(t.bytes); /* of exactly this size: the sanitizer sees each byte that is read beyond it */
    memset(file, 0, t.bytes);
    for (uint64_t at = 0; at < t.bytes && in.size; at += in.size)
        memcpy(file + at, in.data, t.bytes - at < in.size ? t.bytes - at : in.size);
    if (!code) {
        code = bind_file(model, &t, file, weights[(more >> 3 & 3) % 3], &err);
        require(!code || *err.message, "an error without words");
    }
    if (!code) run(model);
    lazy_model_close(model);
    free(file);
    return 0;
}
