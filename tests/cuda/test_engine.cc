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

enum { LAYERS = 4, HIDDEN = 32, HEADS = 4, KV_HEADS = 2, HEAD = 8, FFN = 40, VOCAB = 97, CONTEXT = 200, PROMPT = 40 };
static const int32_t WINDOWS[LAYERS] = { 0, 25, 0, 11 };
const double TOLERANCE = 1e-5; /* relative to the largest logit: f32 sums in another order */

/* ---- a model ---------------------------------------------------------------------------- */

/* The tensors of a checkpoint with random weights and everything that Gemma has, one after the other in a temporary
 * file. */
class checkpoint
{
  public:
    checkpoint()
    {
        const int q = HEADS * HEAD, kv = KV_HEADS * HEAD;
        add("model.embed_tokens.weight", { VOCAB, HIDDEN }, 1.7f);
        for (int l = 0; l < LAYERS; l++) {
            std::string layer = "model.layers." + std::to_string(l) + ".", attention = layer + "self_attn.",
                        mlp = layer + "mlp.";
            for (const char *place : { "input", "post_attention", "pre_feedforward", "post_feedforward" })
                add(layer + place + "_layernorm.weight", { HIDDEN }, 0.2f);
            add(attention + "q_proj.weight", { q, HIDDEN }, 0.45f);
            add(attention + "k_proj.weight", { kv, HIDDEN }, 0.45f);
            add(attention + "v_proj.weight", { kv, HIDDEN }, 0.3f);
            add(attention + "o_proj.weight", { HIDDEN, q }, 0.3f);
            add(mlp + "gate_proj.weight", { FFN, HIDDEN }, 0.3f);
            add(mlp + "up_proj.weight", { FFN, HIDDEN }, 0.3f);
            add(mlp + "down_proj.weight", { HIDDEN, FFN }, 0.3f);
        }
        add("model.norm.weight", { HIDDEN }, 0.2f);
        add("lm_head.weight", { VOCAB, HIDDEN }, 0.3f);
        for (uint8_t &parts : word_parts) parts = (uint8_t)random_int(0, 3);
        int file = mkstemp(path);
        size_t size = values.size() * sizeof values[0];
        if (file < 0 || write(file, values.data(), size) != (ssize_t)size) abort();
        close(file);
    }
    ~checkpoint() { unlink(path); }

    lazy_model *open(const char *device) const
    {
        std::vector<float> inv_freq;
        for (int i = 0; i < HEAD / 2; i++) inv_freq.push_back(powf(10000.0f, -2.0f * (float)i / HEAD));
        lazy_config config = {};
        config.n_layers = LAYERS;
        config.hidden = HIDDEN;
        config.n_heads = HEADS;
        config.n_kv_heads = KV_HEADS;
        config.head_dim = HEAD;
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
        config.rotary_dim = HEAD;
        config.query_step = 1;
        config.logit_scale = 1;
        config.windows = WINDOWS;
        config.attention_cap = config.logit_cap = 3;
        config.embedding_scale = 5.66f;
        config.pre_norms = config.norm_plus_one = config.post_norms = config.gelu = true;
        std::vector<lazy_tensor> tensors;
        for (const tensor &t : held)
            tensors.push_back({ t.name.c_str(), "F32", t.shape.data(), (int)t.shape.size(), 0, t.first * sizeof(float),
                                t.count * sizeof(float) });
        const char *shard = path;
        lazy_device where = { device, 1, nullptr, nullptr, nullptr, 0 };
        lazy_model *model;
        lazy_error err = {};
        must(lazy_model_open(&model, &config, &shard, 1, tensors.data(), (int)tensors.size(), "auto", &where, nullptr,
                             &err),
             err);
        must(lazy_model_know_words(model, word_parts, &err), err);
        return model;
    }

  private:
    struct tensor {
        std::string name;
        std::vector<int64_t> shape;
        size_t first, count;
    };

    /* Adds a tensor with values from -limit to limit. */
    void add(const std::string &name, std::vector<int64_t> shape, float limit)
    {
        size_t count = 1;
        for (int64_t n : shape) count *= (size_t)n;
        held.push_back({ name, shape, values.size(), count });
        for (float value : random_values(LAZY_F32, count, limit)) values.push_back(value);
    }

    std::vector<tensor> held;
    std::vector<float> values;
    uint8_t word_parts[VOCAB];
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
        must(lazy_session_open(&session, model, &pruning, &err), err);
        *lazy_session_traces(session) = true;
    }
    ~talk() { lazy_session_close(session); }
    talk(const talk &) = delete;

    void forward(const ints &ids, bool generated)
    {
        lazy_error err = {};
        lazy_pass pass = {};
        pass.ids = ids.data();
        pass.n = (int)ids.size();
        pass.generated = generated;
        pass.logits = logits.data();
        must(lazy_session_run(session, &pass, &err), err);
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

/* Prompts, and decode steps of one token. */
static std::vector<turn> turns(const ints &lengths)
{
    std::vector<turn> all;
    for (int n : lengths) all.push_back({ random_ints(n, 0, VOCAB - 1), n == 1 });
    return all;
}

static void compare(lazy_model *cpu_model, lazy_model *cuda_model, const setting &s, const std::vector<turn> &all)
{
    now("%s", s.name);
    talk cpu(cpu_model, s.pruning), cuda(cuda_model, s.pruning);
    for (const turn &t : all) {
        cpu.forward(t.ids, t.generated);
        cuda.forward(t.ids, t.generated);
        const lazy_tokens *want = lazy_session_tokens(cpu.session), *got = lazy_session_tokens(cuda.session);
        check(got->length == want->length, "lengths differ");
        check(std::equal(want->depths, want->depths + want->length, got->depths), "depths differ");
        check(same_trace(cpu.session, cuda.session), "sets differ");
        check(error_of(cuda.logits, cpu.logits) <= TOLERANCE, "logits differ");
    }
}

/* ---- settings --------------------------------------------------------------------------- */

static lazy_stage keep(int layer, double share, bool for_good = false)
{
    return { layer, false, share, 0, 0, 0, for_good };
}

static const lazy_stage two_stages[] = { keep(0, 0.6), keep(2, 0.25) };
static const lazy_stage one_stage[] = { keep(1, 0.3) };
static const lazy_stage for_good[] = { keep(0, 0.6, true), keep(2, 0.25) };
static const lazy_stage one_for_good[] = { keep(1, 0.3, true) };
static const lazy_stage by_mass[] = { { 1, true, 0, 0.8, 0.1, 0.9, false } }; /* after layer 1; 0.1 to 0.9 of all */
static const lazy_span spans[] = { { 5, 9 }, { 30, 31 } };

static std::vector<setting> all_settings()
{
    auto with = [](const lazy_stage *stages, int n) {
        lazy_pruning p = lazy_pruning_dense;
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
    several.pooling = LAZY_POOLING_RMS;
    several.head_layer = 1;
    several.head = 1;
    several.memory = 0.8;
    several.gain = 2;
    several.revival = 0.5;
    several.words = true;
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

int main()
{
    checkpoint weights;
    lazy_model *cpu = weights.open("cpu"), *cuda = weights.open("cuda");
    const std::vector<turn> all = turns({ PROMPT, 1, 1, 9, 1 });
    std::vector<std::thread> threads;
    const std::vector<setting> settings = all_settings();
    for (const setting &s : settings) threads.emplace_back(compare, cpu, cuda, s, all);
    for (std::thread &thread : threads) thread.join();
    lazy_model_close(cuda);
    lazy_model_close(cpu);
    return checked();
}
