/* test_engine.cc — whole passes on the CUDA core compared with the CPU core: identical sets of tokens, logits within a
 * tolerance.
 *
 * A small model with random weights runs prompts, decode steps and follow-ups under every kind of setting, each setting
 * on a thread of its own. It exists for ThreadSanitizer, which reports too many false positives under Python;
 * tests/test_method.py covers more settings. Prints the failures, then "N passed, N failed".
 *
 *   test_engine    loads liblazyllm_cuda.so from its own folder */
#include <unistd.h>

#include <thread>

#include "common.h"

enum { LAYERS = 4, HIDDEN = 32, HEADS = 4, KV_HEADS = 2, FFN = 40, VOCAB = 97, CONTEXT = 200, PROMPT = 60 };
static const int32_t WINDOWS[LAYERS] = { 0, 25, 0, 11 };
const double TOLERANCE = 1e-5;      /* relative to the largest logit: f32 sums in another order */
const double BF16_TOLERANCE = 0.05; /* activations of 8 bits */

/* ---- a model ---------------------------------------------------------------------------- */

/* The tensors of a checkpoint with random weights, one after the other in a temporary file. In bf16, it has everything
 * that Gemma has. */
class checkpoint
{
  public:
    checkpoint(int head_dim, bool in_bf16) : head(head_dim), bf16(in_bf16)
    {
        const int q = HEADS * head, kv = KV_HEADS * head;
        add("model.embed_tokens.weight", { VOCAB, HIDDEN }, 1.7f);
        for (int l = 0; l < LAYERS; l++) {
            std::string layer = "model.layers." + std::to_string(l) + ".", attention = layer + "self_attn.",
                        mlp = layer + "mlp.";
            add(layer + "input_layernorm.weight", { HIDDEN }, 0);
            add(layer + "post_attention_layernorm.weight", { HIDDEN }, 0);
            if (bf16) add(layer + "pre_feedforward_layernorm.weight", { HIDDEN }, 0);
            if (bf16) add(layer + "post_feedforward_layernorm.weight", { HIDDEN }, 0);
            add(attention + "q_proj.weight", { q, HIDDEN }, 0.45f);
            add(attention + "k_proj.weight", { kv, HIDDEN }, 0.45f);
            add(attention + "v_proj.weight", { kv, HIDDEN }, 0.3f);
            add(attention + "o_proj.weight", { HIDDEN, q }, 0.3f);
            add(mlp + "gate_proj.weight", { FFN, HIDDEN }, 0.3f);
            add(mlp + "up_proj.weight", { FFN, HIDDEN }, 0.3f);
            add(mlp + "down_proj.weight", { HIDDEN, FFN }, 0.3f);
        }
        add("model.norm.weight", { HIDDEN }, 0);
        add("lm_head.weight", { VOCAB, HIDDEN }, 0.3f);
        int file = mkstemp(path);
        bytes data = narrowed(bf16 ? LAZY_BF16 : LAZY_F32, values);
        if (file < 0 || write(file, data.data(), data.size()) != (ssize_t)data.size()) abort();
        close(file);
    }
    ~checkpoint() { unlink(path); }

    lazy_model *open(const char *device) const
    {
        std::vector<float> inv_freq;
        for (int i = 0; i < head / 2; i++) inv_freq.push_back(powf(10000.0f, -2.0f * (float)i / (float)head));
        lazy_config config = {};
        config.n_layers = LAYERS;
        config.hidden = HIDDEN;
        config.n_heads = HEADS;
        config.n_kv_heads = KV_HEADS;
        config.head_dim = head;
        config.ffn = FFN;
        config.vocab = VOCAB;
        config.context = CONTEXT;
        config.norm_eps = 1e-5f;
        config.inv_freq = inv_freq.data();
        const float rope_scale = 1;
        const int32_t layer_rope[LAYERS] = {}, expert_layers[LAYERS] = {};
        config.n_ropes = 1;
        config.rope_scale = &rope_scale;
        config.layer_rope = layer_rope;
        config.expert_layers = expert_layers;
        config.short_context = CONTEXT;
        config.rotary_dim = head;
        config.query_step = 1;
        config.logit_scale = 1;
        config.windows = WINDOWS;
        config.attention_cap = config.logit_cap = bf16 ? 3 : 0;
        config.embedding_scale = bf16 ? 5.66f : 1;
        config.pre_norms = true;
        config.norm_plus_one = config.post_norms = config.gelu = bf16;
        std::vector<lazy_tensor> tensors;
        for (const tensor &t : held)
            tensors.push_back({ t.name.c_str(), bf16 ? "BF16" : "F32", t.shape.data(), (int)t.shape.size(), 0,
                                t.first * width(), t.count * width() });
        const char *shard = path;
        lazy_device where = { device, 1, nullptr, nullptr, nullptr, 0 };
        lazy_model *model;
        lazy_error err = {};
        if (!lazy_model_open(&model, &config, &shard, 1, tensors.data(), (int)tensors.size(), "auto", &where, nullptr,
                             &err))
            return model;
        printf("%s: %s\n", device, err.message);
        exit(1);
    }

  private:
    struct tensor {
        std::string name;
        std::vector<int64_t> shape;
        size_t first, count;
    };

    size_t width() const { return bf16 ? sizeof(uint16_t) : sizeof(float); }

    /* Adds a tensor with values from -limit to limit; for 0, a norm's weights near 1, or near 0 where the norm adds 1
     */
    void add(const std::string &name, std::vector<int64_t> shape, float limit)
    {
        size_t count = 1;
        for (int64_t n : shape) count *= (size_t)n;
        held.push_back({ name, shape, values.size(), count });
        for (size_t i = 0; i < count; i++)
            values.push_back(limit > 0 ? random_values(LAZY_F32, 1, limit)[0]
                                       : (bf16 ? 0.0f : 1.0f) + random_values(LAZY_F32, 1, 0.2f)[0]);
    }

    int head;
    bool bf16;
    std::vector<tensor> held;
    std::vector<float> values;
    char path[32] = "/tmp/lazyllm-engine-XXXXXX";
};

/* ---- comparison ------------------------------------------------------------------------- */

struct setting {
    const char *name;
    lazy_pruning pruning;
};

struct talk {
    lazy_session *session;
    floats logits = floats(VOCAB);

    talk(lazy_model *model, const lazy_pruning &pruning)
    {
        lazy_error err = {};
        if (!lazy_session_open(&session, model, &pruning, &err)) return;
        printf("%s\n", err.message);
        exit(1);
    }
    ~talk() { lazy_session_close(session); }
    talk(const talk &) = delete;

    bool forward(const ints &ids, bool generated)
    {
        lazy_error err = {};
        lazy_pass pass = {};
        pass.ids = ids.data();
        pass.n = (int)ids.size();
        pass.generated = generated;
        pass.logits = logits.data();
        int code = lazy_session_run(session, &pass, &err);
        if (code) printf("%s\n", err.message);
        return !code;
    }
};

/* Compares positions in play and computed positions, for every run of layers. */
static bool same_trace(const lazy_session *a, const lazy_session *b)
{
    const lazy_report *left = lazy_session_last_pass(a), *right = lazy_session_last_pass(b);
    if (left->n_runs != right->n_runs) return false;
    for (int i = 0; i < left->n_runs; i++) {
        const lazy_trace_run &x = left->runs[i], &y = right->runs[i];
        if (x.last_layer != y.last_layer ||
            !std::equal(x.in_play, x.in_play + x.n_in_play, y.in_play, y.in_play + y.n_in_play) ||
            !std::equal(x.computed, x.computed + x.n_computed, y.computed, y.computed + y.n_computed))
            return false;
    }
    return true;
}

struct turn {
    ints ids;
    bool generated;
};

static void compare_pass(talk &cpu, talk &cuda, const turn &t)
{
    bool ran = cpu.forward(t.ids, t.generated) && cuda.forward(t.ids, t.generated);
    check(ran, "a pass failed");
    if (!ran) return;
    const lazy_tokens *want = lazy_session_tokens(cpu.session), *got = lazy_session_tokens(cuda.session);
    check(got->length == want->length, "lengths differ");
    check(std::equal(want->depths, want->depths + want->length, got->depths), "depths differ");
    const lazy_layer_count *counts = lazy_session_last_pass(cpu.session)->counts;
    check(memcmp(counts, lazy_session_last_pass(cuda.session)->counts, LAYERS * sizeof *counts) == 0, "counts differ");
    check(same_trace(cpu.session, cuda.session), "sets differ");
    check(error_of(cuda.logits, cpu.logits) <= TOLERANCE, "logits differ");
}

/* Prompts, and decode steps of one token. */
static std::vector<turn> turns(const ints &lengths)
{
    std::vector<turn> all;
    for (int n : lengths) {
        all.push_back({ ints((size_t)n), n == 1 });
        for (int32_t &id : all.back().ids) id = random_int(0, VOCAB - 1);
    }
    return all;
}

static void compare(lazy_model *cpu_model, lazy_model *cuda_model, const setting &s, const std::vector<turn> &all)
{
    now("%s", s.name);
    talk cpu(cpu_model, s.pruning), cuda(cuda_model, s.pruning);
    *lazy_session_traces(cpu.session) = true;
    *lazy_session_traces(cuda.session) = true;
    for (const turn &t : all) compare_pass(cpu, cuda, t);
}

/* ---- settings --------------------------------------------------------------------------- */

static lazy_stage keep(int layer, double share, bool for_good = false)
{
    lazy_stage stage = {};
    stage.layer = layer;
    stage.keep = share;
    stage.for_good = for_good;
    return stage;
}

static lazy_stage mass(int layer, double share)
{
    lazy_stage stage = keep(layer, 0);
    stage.by_mass = true;
    stage.mass = share;
    stage.keep_min = 0.1;
    stage.keep_max = 0.9;
    return stage;
}

static const lazy_stage two_stages[] = { keep(0, 0.6), keep(2, 0.25) };
static const lazy_stage one_stage[] = { keep(1, 0.3) };
static const lazy_stage for_good[] = { keep(0, 0.6, true), keep(2, 0.25) };
static const lazy_stage one_for_good[] = { keep(1, 0.3, true) };
static const lazy_stage by_mass[] = { mass(1, 0.8) };
static const lazy_span spans[] = { { 5, 9 }, { 30, 31 } };

static std::vector<setting> all_settings()
{
    auto with = [](const lazy_stage *stages, int n) {
        lazy_pruning p = {};
        p.queries = p.layers = p.smooth = 1;
        p.stages = stages;
        p.n_stages = n;
        return p;
    };
    lazy_pruning same = with(two_stages, 2), frozen = same, own = same, options = same, average = with(one_for_good, 1);
    frozen.decode = LAZY_DECODE_FROZEN;
    own.decode = LAZY_DECODE_OWN;
    own.decode_stages = one_stage;
    own.n_decode_stages = 1;
    options.sink = 2;
    options.window = 3;
    options.protect = spans;
    options.n_protect = 2;
    options.queries = 4;
    options.smooth = 5;
    average.decode = LAZY_DECODE_OWN;
    average.average = true;
    lazy_pruning several = same;
    several.layers = 2;
    several.queries = 3;
    several.pooling = LAZY_POOLING_MAX;
    several.memory = 0.8;
    return { { "dense", with(nullptr, 0) },
             { "two stages", same },
             { "frozen", frozen },
             { "stages of its own for decoding", own },
             { "options", options },
             { "mass", with(by_mass, 1) },
             { "for good", with(for_good, 2) },
             { "static", average },
             { "several layers, remembered", several } };
}

/* In 16 bits the two cores may select different tokens, so only dense logits are compared; the other settings need only
 * run. */
static void run_in_bf16(lazy_model *cpu_model, lazy_model *cuda_model, const std::vector<setting> &settings)
{
    for (const setting &s : settings) {
        now("%s in bf16", s.name);
        talk cpu(cpu_model, s.pruning), cuda(cuda_model, s.pruning);
        for (const turn &t : turns({ PROMPT, 1, 1, 9 })) {
            bool ran = cpu.forward(t.ids, t.generated) && cuda.forward(t.ids, t.generated);
            check(ran, "a pass in bf16 failed");
            if (ran && !s.pruning.n_stages)
                check(error_of(cuda.logits, cpu.logits) <= BF16_TOLERANCE, "logits in bf16 differ");
        }
    }
}

int main()
{
    std::vector<setting> settings = all_settings();
    {
        checkpoint weights(8, false);
        lazy_model *cpu = weights.open("cpu"), *cuda = weights.open("cuda");
        printf("%s\n", lazy_model_isa(cuda));
        const std::vector<turn> all = turns({ PROMPT, 1, 1, 1, 9, 1, 1 });
        std::vector<std::thread> threads;
        for (const setting &s : settings) threads.emplace_back(compare, cpu, cuda, s, all);
        for (std::thread &thread : threads) thread.join();
        lazy_model_close(cuda);
        lazy_model_close(cpu);
    }
    checkpoint weights(64, true);
    lazy_model *cpu = weights.open("cpu"), *cuda = weights.open("cuda");
    printf("%s\n", lazy_model_isa(cuda));
    run_in_bf16(cpu, cuda, settings);
    lazy_model_close(cuda);
    lazy_model_close(cpu);
    return checked();
}
