/* test_engine.cc — whole passes on the CUDA core compared with the CPU core: identical sets of tokens, logits within a
 * tolerance.
 *
 * A small model with random weights runs prompts, decode steps and follow-ups under every kind of setting, each setting
 * on a thread of its own. It exists for ThreadSanitizer, which reports too many false positives under Python;
 * tests/test_method.py covers more settings. Prints the failures, then "N passed, N failed".
 *
 *   test_engine    loads liblazyllm_cuda.so from its own folder */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <thread>
#include <vector>

extern "C" {
#include "../../csrc/lazyllm.h"
}

enum { LAYERS = 4, HIDDEN = 32, HEADS = 4, KV_HEADS = 2, FFN = 40, VOCAB = 97, CONTEXT = 200, PROMPT = 60 };
static const int32_t WINDOWS[LAYERS] = { 0, 25, 0, 11 };
const double TOLERANCE = 1e-5;      /* relative to the largest logit: f32 sums in another order */
const double BF16_TOLERANCE = 0.05; /* activations of 8 bits */

static std::atomic<int> passed, failed;

static void check(bool good, const char *subject, const char *what)
{
    good ? passed++ : failed++;
    if (!good) printf("FAILED %s: %s\n", subject, what);
}

/* ---- a model ---------------------------------------------------------------------------- */

/* Uniform from -1 to 1. */
static float draw(uint64_t &seed)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (float)((double)(seed >> 40) / (double)(1 << 23) - 1.0);
}

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
        std::vector<uint16_t> upper_halves;
        for (float value : values) {
            uint32_t bits;
            memcpy(&bits, &value, sizeof bits);
            upper_halves.push_back((uint16_t)(bits >> 16));
        }
        const void *data = bf16 ? (const void *)upper_halves.data() : values.data();
        if (file < 0 || write(file, data, values.size() * width()) != (ssize_t)(values.size() * width())) abort();
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
            values.push_back(limit > 0 ? limit * draw(seed) : (bf16 ? 0.0f : 1.0f) + 0.2f * draw(seed));
    }

    int head;
    bool bf16;
    std::vector<tensor> held;
    std::vector<float> values;
    uint64_t seed = 7;
    char path[32] = "/tmp/lazyllm-engine-XXXXXX";
};

/* ---- comparison ------------------------------------------------------------------------- */

struct setting {
    const char *name;
    lazy_pruning pruning;
};

struct side {
    lazy_session *session;
    std::vector<float> logits = std::vector<float>(VOCAB);

    side(lazy_model *model, const lazy_pruning &pruning)
    {
        lazy_error err = {};
        if (!lazy_session_open(&session, model, &pruning, &err)) return;
        printf("%s\n", err.message);
        exit(1);
    }
    ~side() { lazy_session_close(session); }
    side(const side &) = delete;

    bool forward(const std::vector<int32_t> &ids, bool generated)
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

static double difference(const std::vector<float> &got, const std::vector<float> &want)
{
    double worst = 0, largest = 0;
    for (size_t i = 0; i < want.size(); i++) {
        worst = std::max(worst, std::fabs((double)got[i] - want[i]));
        largest = std::max(largest, std::fabs((double)want[i]));
    }
    return worst / largest;
}

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

static void compare_pass(const char *subject, side &cpu, side &cuda, const std::vector<int32_t> &ids, bool generated)
{
    bool ran = cpu.forward(ids, generated) && cuda.forward(ids, generated);
    check(ran, subject, "a pass failed");
    if (!ran) return;
    const lazy_tokens *want = lazy_session_tokens(cpu.session), *got = lazy_session_tokens(cuda.session);
    check(got->length == want->length, subject, "lengths differ");
    check(std::equal(want->depths, want->depths + want->length, got->depths), subject, "depths differ");
    const lazy_layer_count *counts = lazy_session_last_pass(cpu.session)->counts;
    check(memcmp(counts, lazy_session_last_pass(cuda.session)->counts, LAYERS * sizeof *counts) == 0, subject,
          "counts differ");
    check(same_trace(cpu.session, cuda.session), subject, "sets differ");
    check(difference(cuda.logits, cpu.logits) <= TOLERANCE, subject, "logits differ");
}

static std::vector<int32_t> some_ids(int n, uint64_t seed)
{
    std::vector<int32_t> ids;
    for (int i = 0; i < n; i++) ids.push_back((int32_t)((draw(seed) + 1) / 2 * (VOCAB - 1)));
    return ids;
}

/* Compares a prompt, decode steps, a follow-up prompt and more decode steps on both cores. */
static void compare(lazy_model *cpu_model, lazy_model *cuda_model, const setting &s)
{
    side cpu(cpu_model, s.pruning), cuda(cuda_model, s.pruning);
    *lazy_session_traces(cpu.session) = true;
    *lazy_session_traces(cuda.session) = true;
    compare_pass(s.name, cpu, cuda, some_ids(PROMPT, 1), false);
    for (int step = 0; step < 3; step++) compare_pass(s.name, cpu, cuda, some_ids(1, (uint64_t)step + 2), true);
    compare_pass(s.name, cpu, cuda, some_ids(9, 20), false);
    for (int step = 0; step < 2; step++) compare_pass(s.name, cpu, cuda, some_ids(1, (uint64_t)step + 30), true);
}

/* ---- settings --------------------------------------------------------------------------- */

static lazy_stage keep(int layer, double share)
{
    lazy_stage stage = {};
    stage.layer = layer;
    stage.keep = share;
    return stage;
}

static lazy_stage drop(int layer, double share)
{
    lazy_stage stage = keep(layer, share);
    stage.for_good = true;
    return stage;
}

static lazy_stage mass(int layer, double share)
{
    lazy_stage stage = {};
    stage.layer = layer;
    stage.by_mass = true;
    stage.mass = share;
    stage.keep_min = 0.1;
    stage.keep_max = 0.9;
    return stage;
}

static const lazy_stage two_stages[] = { keep(0, 0.6), keep(2, 0.25) };
static const lazy_stage one_stage[] = { keep(1, 0.3) };
static const lazy_stage for_good[] = { drop(0, 0.6), keep(2, 0.25) };
static const lazy_stage one_for_good[] = { drop(1, 0.3) };
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
        side cpu(cpu_model, s.pruning), cuda(cuda_model, s.pruning);
        for (int n : { (int)PROMPT, 1, 1, 9 }) {
            bool ran = cpu.forward(some_ids(n, 3), n == 1) && cuda.forward(some_ids(n, 3), n == 1);
            check(ran, s.name, "a pass in bf16 failed");
            if (ran && !s.pruning.n_stages)
                check(difference(cuda.logits, cpu.logits) <= BF16_TOLERANCE, s.name, "logits in bf16 differ");
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
        std::vector<std::thread> threads;
        for (const setting &s : settings) threads.emplace_back(compare, cpu, cuda, s);
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
    printf("%d passed, %d failed\n", passed.load(), failed.load());
    return failed != 0;
}
