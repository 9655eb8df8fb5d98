/* test_ops.cc — compares every op of the CUDA backend with the CPU's reference implementation, in all three types.
 *
 * Runs on a GPU, or without one on the fakes in cuda/cuda_on_cpu. Each run uses new random data, odd shapes, and
 * outputs filled with NaN between guards. Inputs are rounded to the type; the reference gets the same values as f32.
 * Prints the failures, then "N passed, N failed".
 *
 *   test_ops [WORD …]
 *   quick              fewer shapes, for slow sanitizers
 *   a number           the seed of an earlier run, which printed it, to repeat that run */
#include <float.h>
#include <time.h>

#include <deque>
#include <memory>

#include "common.h"

extern "C" {
#include "../c/reference.h"
}

static bool quick;

/* Maximum errors, relative to the largest value, by lazy_dtype. */
static const double precisions[] = {
    1e-5,   /* f32 sums of up to a few thousand terms, in any order */
    2e-3,   /* four roundings of up to 5e-4: intermediate gate and up, accumulation to y */
    1.5e-2, /* four roundings of up to 4e-3 */
};

/* ---- random data ------------------------------------------------------------------------ */

static bytes random_bytes(size_t n)
{
    bytes data(n);
    for (unsigned char &byte : data) byte = (unsigned char)random_bits();
    return data;
}

/* Weights of any type, n values of up to about 1. */
static bytes random_weights(lazy_dtype type, size_t n)
{
    static const float largest[] = { 1, 1, 1, 128, 8, 16, 16, 32, 1024, 2048, 4096 }; /* integers times scales */
    if (!lazy_is_quantized(type)) return narrowed(type, random_values(type, n));
    const lazy_format &format = lazy_formats[type];
    bytes data = random_bytes(n / (size_t)format.values * (size_t)format.bytes);
    for (size_t block = 0; block < data.size(); block += (size_t)format.bytes) {
        size_t scale = block + (type == LAZY_Q6_K ? offsetof(lazy_q6_k, scale) : 0);
        floats factors = random_values(LAZY_F32, 2); /* scale, offset */
        factors[0] /= largest[type];
        factors[1] /= format.values == 256 ? 64 : 1;
        lazy_narrow(&data[scale], factors.data(), LAZY_F16, format.has_offset ? 2 : 1);
    }
    return data;
}

/* n positions from 0 … length-1, ascending; always includes length-1. */
static ints random_positions(int n, int length)
{
    ints positions;
    for (int i = 0; i < length - 1; i++)
        if (random_int(1, length - 1 - i) < n - (int)positions.size()) positions.push_back(i);
    positions.push_back(length - 1);
    return positions;
}

/* n of the positions in play, ascending; always includes the last one. */
static ints random_rows(int n, const ints &in_play)
{
    ints rows = random_positions(n, (int)in_play.size());
    for (int32_t &row : rows) row = in_play[(size_t)row];
    return rows;
}

/* In bf16 and f32, its square overflows f32; in f16, near the largest value. The norm of such values must still be
 * finite. */
static float huge(lazy_dtype type) { return type == LAZY_F16 ? 60000.0f : 1e25f; }

static int pick(const ints &list) { return list[(size_t)random_int(0, (int)list.size() - 1)]; }

static lazy_config config_of(int n_heads, int n_kv_heads, int head_dim)
{
    lazy_config config = {};
    config.n_layers = 1;
    config.n_heads = n_heads;
    config.n_kv_heads = n_kv_heads;
    config.head_dim = head_dim;
    config.hidden = 24;
    config.ffn = 45;
    config.n_experts = 70;
    config.experts_per_token = 5;
    config.expert_ffn = 19;
    config.query_scalar = random_int(0, 1) ? 0 : 1.7f * (float)head_dim;
    config.attention_cap = random_int(0, 1) ? 0 : 1.5f;
    config.logit_cap = random_int(0, 1) ? 0 : 2.5f;
    config.embedding_scale = 1;
    return config;
}

/* The backend under test and the reference. */
struct rig {
    lazy_dtype type, stored; /* of the backend, and of weights */
    lazy_config config;
    side gpu, plain;

    rig(lazy_dtype of_type, const lazy_config &of_config, int rows, int tokens)
        : type(of_type), stored(of_type), config(of_config)
    {
        lazy_error err = {};
        lazy_backend *cpu;
        must(reference_open(&cpu, LAZY_F32, &err), err);
        gpu = stream_of(open_cuda(type), &config, rows, tokens);
        plain = stream_of(cpu, &config, rows, tokens);
    }
    ~rig()
    {
        for (const side &s : { gpu, plain }) {
            s.ops->stream_close(s.stream);
            s.ops->close(s.backend);
        }
    }
    rig(const rig &) = delete;

    const char *name() const { return lazy_formats[type].name; }
    double precision() const { return precisions[type]; }
    bool is_gpu(const side &s) const { return s.backend == gpu.backend; }
    /* Random values of activations. */
    floats values(size_t n, float limit = 1) const { return random_values(type, n, limit); }
    input<float> in(floats values) const { return { gpu, std::move(values), type }; }
    output<float> out(floats values) const { return { gpu, std::move(values), type }; }
    input<float> in_f32(floats values) const { return { gpu, std::move(values) }; }
    output<float> out_f32(floats values) const { return { gpu, std::move(values) }; }
    /* Runs an op on both sides. */
    template <class F> void both(F op) const
    {
        op(gpu);
        op(plain);
    }
};

static void compare(const floats &got, const floats &want, double tolerance, double min_scale = 1e-30)
{
    double error = error_of(got, want, min_scale);
    check(error < tolerance, "error %.2g", error);
}

static void compare(const array<float> &y, double tolerance, double min_scale = 1e-30)
{
    compare(y.read(), y.plain, tolerance, min_scale);
}

template <class T> static void same(const array<T> &y, const char *what)
{
    check(y.read() == y.plain, "other %s than the reference's", what);
}

#ifdef LAZY_CUDA_ON_CPU
extern "C" unsigned long long cuda_on_cpu_launches, cuda_on_cpu_widest;
#else
static unsigned long long cuda_on_cpu_launches, cuda_on_cpu_widest; /* not counted on a GPU */
#endif

/* Counts launches, and the blocks of the widest, from its construction on. */
struct launch_count {
    unsigned long long before = cuda_on_cpu_launches;

    launch_count() { cuda_on_cpu_widest = 0; }
    void expect(unsigned long long at_most, int blocks) const
    {
        unsigned long long n = cuda_on_cpu_launches - before;
        check(n <= at_most && (!n || cuda_on_cpu_widest >= (unsigned)blocks),
              "%llu launches, the widest of %llu blocks, instead of %llu and %d", n, cuda_on_cpu_widest, at_most,
              blocks);
    }
};

/* ---- memory and streams ----------------------------------------------------------------- */

/* A call has failed with this code and these words. */
static void refused(const side &gpu, const char *op, int code, lazy_code wanted, const std::string &words)
{
    check(code == wanted && strstr(gpu.err.message, words.c_str()), "%s: code %d, \"%s\"", op, code, gpu.err.message);
    gpu.err = {};
}

static void test_copies(const rig &r)
{
    for (int i = 0; i < 5; i++) {
        size_t n = (size_t)random_int(1, 1000), from = (size_t)random_int(0, 9), to = (size_t)random_int(0, 9);
        now("%s copies of %zu bytes from %zu to %zu", r.name(), n, from, to);
        input source(r.gpu, random_bytes(from + n));
        output copied(r.gpu, bytes(to + n + 5, 0xff));
        r.both([&](const side &s) { DO(s, copy, copied.on(s, to), source.on(s, from), n); });
        same(copied, "bytes");
    }
}

/* Uploads longer than a slot of the staging, and more of them than it has slots, from memory that is overwritten at
 * once. */
static void test_uploads(const rig &r)
{
    now("%s uploads", r.name());
    output uploaded(r.gpu, bytes(3 * lazy_staging::SLOTS * lazy_staging::SLOT_BYTES + 77, 0xff));
    uploaded.plain = random_bytes(uploaded.plain.size());
    for (size_t done = 0, n; done < uploaded.plain.size(); done += n) {
        n = std::min(uploaded.plain.size() - done, (size_t)random_int(1, 2 * (int)lazy_staging::SLOT_BYTES));
        bytes source(&uploaded.plain[done], &uploaded.plain[done] + n);
        DO(r.gpu, upload, uploaded.on_device(done), source.data(), n);
        std::fill(source.begin(), source.end(), 0xee);
    }
    same(uploaded, "bytes");
}

/* Requests that cannot be met fail with the sizes in the message, and leave existing objects intact; test_cuda.py has
 * others. */
static void test_refusals(const rig &r)
{
    now("%s refusals", r.name());
    const side &gpu = r.gpu;
    output kept = r.out(r.values(100));

    const size_t HUGE_BYTES = (size_t)1 << 50;
    void *memory = &memory;
    int code = gpu.ops->alloc(gpu.backend, &memory, HUGE_BYTES, "a test's memory", &gpu.err);
    check(!memory, "alloc left an address");
    refused(gpu, "alloc", code, LAZY_MEMORY, "a test's memory: " + std::to_string(HUGE_BYTES));

    char weight = 0;
    lazy_matrix w = {};
    w.part[0] = { &weight, 1 << 30, r.type };
    w.n_parts = 1;
    w.rows = 1 << 30;
    w.cols = 1 << 20;
    refused(gpu, "bind", gpu.ops->bind(gpu.backend, &w, 1, &gpu.err), LAZY_MEMORY, "weights");
    check(w.part[0].data == &weight && w.part[0].rows == 1 << 30, "a refused matrix was changed");

    lazy_config many_heads = config_of(512, 1, 16);
    side s = stream_of(gpu.backend, &many_heads, 1, 7);
    lazy_cuda_stream before = *lazy_cuda_scratch(s.stream);
    refused(gpu, "reserve", s.ops->reserve(s.stream, 1, INT32_MAX, &gpu.err), LAZY_MEMORY, "scratch");
    lazy_cuda_stream after = *lazy_cuda_scratch(s.stream);
    check(after.tokens == before.tokens && after.products == before.products, "a refused reserve left traces");
    s.ops->stream_close(s.stream);

    same(kept, "values");
}

static size_t free_memory()
{
    size_t left = 0, total;
    cudaMemGetInfo(&left, &total);
    return left;
}

static void test_streams(const rig &r)
{
    now("%s streams opened and closed", r.name());
#ifdef LAZY_CUDA_ON_CPU
    const size_t OTHERS = 0;
#else
    const size_t OTHERS = 16 << 20; /* other processes may use the device too */
#endif
    size_t left = 0;
    for (int i = 0; i < 40; i++) {
        side s = { r.gpu.backend, r.gpu.ops, nullptr, {} };
        did(s, "stream_open", s.ops->stream_open(s.backend, &r.config, &s.stream, &s.err));
        for (int tokens = 10; i % 8 == 0 && tokens <= 30; tokens += 10) DO(s, reserve, tokens / 10, tokens);
        s.ops->stream_close(s.stream);
        if (i == 0) left = free_memory(); /* the first stream may allocate memory that stays */
    }
    r.gpu.ops->stream_close(nullptr);
    check(free_memory() + OTHERS >= left, "%zu bytes of memory are missing", left - free_memory());
}

/* ---- products --------------------------------------------------------------------------- */

/* n matrices for the device, of several parts; the reference gets the values after conversion to the device's type, but
 * those of quantized parts as they are. */
class weights
{
  public:
    std::vector<lazy_matrix> gpu, plain, rounded; /* rounded: all values are, to the device's type */
    int rows = 0;                                 /* of a matrix */

    /* stored: the type of each matrix, or of its first part where `mixed` */
    weights(const rig &r, const std::vector<lazy_dtype> &stored, int n_parts, int part_rows, int cols, bool mixed,
            bool biased)
        : s(r.gpu)
    {
        for (lazy_dtype type : stored) add(r, type, n_parts, part_rows, cols, mixed);
        if (biased) {
            bias = std::make_unique<input<float>>(s, random_values(LAZY_F32, (size_t)rows));
            gpu[0].bias = bias->on_device();
            plain[0].bias = rounded[0].bias = bias->plain.data();
        }
        did(s, "bind", s.ops->bind(s.backend, gpu.data(), (int)stored.size(), &s.err));
    }
    ~weights() { s.ops->unbind(s.backend, gpu.data()); }
    weights(const weights &) = delete;

    lazy_matrix *on(const side &of, bool all_rounded = false)
    {
        return (of.backend == s.backend ? gpu : all_rounded ? rounded : plain).data();
    }

  private:
    side s;
    std::deque<bytes> parts;
    std::deque<floats> values;
    std::unique_ptr<input<float>> bias;

    void add(const rig &r, lazy_dtype stored, int n_parts, int part_rows, int cols, bool mixed)
    {
        lazy_matrix matrix = {};
        floats kept, narrow;
        matrix.cols = cols;
        matrix.n_parts = n_parts;
        for (int i = 0; i < n_parts; i++) {
            lazy_dtype type = type_of(r, stored, i, cols, mixed);
            size_t n = (size_t)(part_rows + i) * (size_t)cols;
            parts.push_back(random_weights(type, n));
            floats wide = widened(type, parts.back()), rounded_part = widened(r.type, narrowed(r.type, wide));
            const floats &used = lazy_is_quantized(type) ? wide : rounded_part;
            kept.insert(kept.end(), used.begin(), used.end());
            narrow.insert(narrow.end(), rounded_part.begin(), rounded_part.end());
            matrix.part[i] = { parts.back().data(), part_rows + i, type };
            matrix.rows += part_rows + i;
        }
        rows = matrix.rows;
        gpu.push_back(matrix);
        matrix.n_parts = 1;
        for (auto [list, all] : { std::pair(&plain, &kept), std::pair(&rounded, &narrow) }) {
            values.push_back(std::move(*all));
            matrix.part[0] = { values.back().data(), rows, LAZY_F32 };
            list->push_back(matrix);
        }
    }

    /* Where mixed, beside a first quantized part there are some of any type. */
    static lazy_dtype type_of(const rig &r, lazy_dtype stored, int part, int cols, bool mixed)
    {
        if (!mixed || (!part && stored != r.type)) return stored;
        if (stored == r.type) return (lazy_dtype)((r.type + 1 + part) % 3);
        return (lazy_dtype)random_int(LAZY_F32, cols % LAZY_LONGEST_BLOCK ? LAZY_Q5_1 : LAZY_Q6_K);
    }
};

/* Minimum scale of a product's errors: a sum that cancels still has the rounding errors of its terms. */
static const double TERM = 1;

struct product {
    int n, parts, rows, cols;
    bool mixed, biased, accumulate;
    int skipped; /* rows before the first one used in x and y, so that these start inside an allocation */
};

static void test_matmul(const rig &r, const product &p)
{
    now("%s matmul n %d, %d parts of %d, cols %d%s%s%s, %d skipped", r.name(), p.n, p.parts, p.rows, p.cols,
        p.mixed ? ", mixed" : "", p.biased ? ", bias" : "", p.accumulate ? ", accumulated" : "", p.skipped);
    weights w(r, { r.stored }, p.parts, p.rows, p.cols, p.mixed, p.biased);
    size_t cols = (size_t)p.cols, rows = (size_t)w.rows, skipped = (size_t)p.skipped, n = (size_t)p.n + skipped;
    floats before = p.accumulate ? r.values(n * rows) : unwritten(n * rows);
    std::fill_n(before.begin(), skipped * rows, 0.0f);
    input x = r.in(r.values(n * cols));
    output y = r.out(before);
    r.both([&](const side &s) {
        DO(s, matmul, y.on(s, skipped * rows), x.on(s, skipped * cols), p.n, w.on(s, p.n > 1), p.accumulate);
    });
    compare(y, r.precision(), TERM);
}

static void test_logits(const rig &r, int n, int rows, int cols, bool mixed)
{
    now("%s logits n %d, rows %d, cols %d, cap %g%s", r.name(), n, rows, cols, r.config.logit_cap,
        mixed ? ", mixed" : "");
    weights w(r, { r.stored }, 1, rows, cols, mixed, false);
    input x = r.in(r.values((size_t)(n * cols)));
    output y = r.out_f32(unwritten((size_t)(n * rows)));
    r.both([&](const side &s) { DO(s, logits, y.on(s), x.on(s), n, w.on(s, n > 1)); });
    compare(y, precisions[LAZY_F32], TERM);
}

static void test_gated(rig &r, int n, int ffn, int cols, bool mixed, bool gelu)
{
    if (mixed) ffn = (ffn + 2) / 3 * 3;
    now("%s gated n %d, ffn %d, cols %d%s%s", r.name(), n, ffn, cols, mixed ? ", mixed" : "", gelu ? ", GELU" : "");
    r.config.gelu = gelu;
    weights w(r, { r.stored }, mixed ? 3 : 1, mixed ? 2 * ffn / 3 - 1 : 2 * ffn, cols, mixed, false);
    input x = r.in(r.values((size_t)(n * cols)));
    output y = r.out(unwritten((size_t)(n * ffn)));
    r.both([&](const side &s) { DO(s, gated, y.on(s), x.on(s), n, w.on(s, n > 1)); });
    compare(y, r.precision(), TERM);
}

/* Weights of one layer's experts. */
class expert_weights
{
  public:
    expert_weights(const rig &r, int n, int d, int ffn)
        : router(r, { r.type }, 1, n, d, false, false), gate_up(r, types(r, n), 1, 2 * ffn, d, false, false),
          down(r, types(r, n), 1, d, ffn, false, false)
    {
    }
    /* *to = those of a side; returns `to`. Rounded for rows that are sorted by expert: most are then several an expert.
     */
    const lazy_experts *on(const side &s, lazy_experts *to, int n)
    {
        bool sorted = n > LAZY_PAIR_ROWS;
        *to = { *router.on(s), gate_up.on(s, sorted), down.on(s, sorted) };
        return to;
    }

  private:
    weights router, gate_up, down;

    /* One of an odd number of quantized experts is not. */
    static std::vector<lazy_dtype> types(const rig &r, int n)
    {
        std::vector<lazy_dtype> all((size_t)n, r.stored);
        if (r.stored != r.type && n % 2) all[1] = LAZY_F16;
        return all;
    }
};

static void test_mix_experts(rig &r, int n, int n_experts, int k, int d, bool accumulate)
{
    now("%s mix_experts n %d, %d of %d, d %d%s", r.name(), n, k, n_experts, d, accumulate ? ", accumulated" : "");
    r.config.experts_per_token = k;
    r.config.normed_experts = k % 2;
    expert_weights w(r, n_experts, d, r.config.expert_ffn);
    size_t size = (size_t)(n * d);
    input x = r.in(r.values(size));
    output y = r.out(accumulate ? r.values(size) : unwritten(size));
    lazy_experts experts;
    r.both([&](const side &s) { DO(s, mix_experts, y.on(s), x.on(s), n, w.on(s, &experts, n), accumulate); });
    /* seven roundings: gate, up, their product, an expert's output, the sum; both weights of an expert with one row */
    compare(y, (r.type == LAZY_F32 ? 1 : 7.0 / 4) * r.precision(), TERM);
}

/* A router's NaN or Inf makes the row NaN; the experts chosen for it are within bounds all the same. */
static void test_spoilt_router(rig &r, int n, float value)
{
    now("%s mix_experts n %d, %g in a row", r.name(), n, value);
    r.config.experts_per_token = 2;
    expert_weights w(r, 3, 8, r.config.expert_ffn);
    floats states = r.values((size_t)(n * 8));
    states[3] = value;
    input x = r.in(states);
    output y = r.out(floats(states.size(), 0.0f));
    lazy_experts experts;
    DO(r.gpu, mix_experts, y.on_device(), x.on_device(), n, w.on(r.gpu, &experts, n), false);
    floats got = y.read();
    for (size_t i = 0; i < got.size(); i++) check(std::isnan(got[i]) == (i < 8), "%g at %zu", got[i], i);
}

static void test_experts(rig &r)
{
    const int n_experts = r.config.n_experts, k = r.config.experts_per_token;
    for (int n : quick ? ints{ 1, 6 } : ints{ 1, 2, 4, 5, 17, 70 }) {
        test_mix_experts(r, n, random_int(3, 9), random_int(1, 3), random_int(1, r.config.hidden), n % 2);
        test_mix_experts(r, n, n_experts, k, 8, !(n % 2));
    }
    for (int n : { 2, 6 })
        for (float value : { NAN, INFINITY }) test_spoilt_router(r, n, value);
}

/* Alternately a multiple of 8, which allows 16-byte loads, and an odd number, which does not. */
static int random_cols(int round) { return round % 2 ? 8 * random_int(1, 16) : 2 * random_int(0, 64) + 1; }

static void test_products(rig &r)
{
    const ints rows = quick ? ints{ 1, 3, 5, 17 } : ints{ 1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 33, 70 };
    int round = random_int(0, 11);
    for (int n : rows)
        for (int i = 0; i < (quick ? 1 : 3); i++, round++)
            test_matmul(r, { n, random_int(1, 3), random_int(1, quick ? 15 : 60), random_cols(round), round % 3 == 0,
                             round % 4 < 2, round % 5 < 2, random_int(0, 2) });
    for (int n : { 1, 2, 4, 5 }) test_matmul(r, { n, 1, 3, 1200, false, false, true, 0 });
    for (int n : rows) {
        round++;
        test_logits(r, n, random_int(1, quick ? 20 : 90), random_cols(round), round % 3 == 0);
        test_gated(r, n, random_int(1, quick ? 9 : r.config.ffn), random_cols(round), round % 3 == 1, round % 2);
    }
}

static void test_embed(rig &r, int n, int cols, bool mixed, float scale)
{
    now("%s embed n %d, cols %d%s, scale %g", r.name(), n, cols, mixed ? ", mixed" : "", scale);
    weights table(r, { r.stored }, mixed ? LAZY_MAX_PARTS : 1, 20, cols, mixed, false);
    ints wanted = random_ints(n, 0, table.rows - 1);
    wanted[0] = table.rows - 1;
    input ids(r.gpu, wanted);
    output x = r.out(unwritten((size_t)(n * cols)));
    r.both([&](const side &s) {
        r.config.embedding_scale = r.is_gpu(s) ? scale : widened(r.type, narrowed(r.type, { scale }))[0];
        DO(s, embed, x.on(s), ids.on(s), n, table.on(s));
    });
    r.config.embedding_scale = 1;
    check(x.bits() == narrowed(r.type, x.plain), "other values than the table's");
}

/* Weights of one format, alone and beside others, by few rows and by many, for which they are widened a few rows at a
 * time. */
static void test_quantized(lazy_dtype type, lazy_dtype format)
{
    int block = lazy_formats[format].values, cols = block * random_int(1, (quick ? 256 : 768) / block), round = 0;
    lazy_config config = config_of(3, 1, 16);
    config.hidden = config.expert_ffn = cols;
    rig r(type, config, 1, 1);
    r.stored = format;
    weights largest(r, { r.stored }, 1, pick({ 1, 5, 9, 140 }), cols, false, false);
    DO(r.gpu, reserve, 40, 40);
    for (int n :
         quick ? ints{ 1, 6, 12, 20, 40 } : ints{ 1, 2, 4, 5, 8, 9, 16, 17, LAZY_FEW_ROWS, LAZY_FEW_ROWS + 1, 40 }) {
        test_matmul(r, { n, random_int(1, 3), random_int(1, 20), cols, ++round % 2 > 0, n % 3 > 0, n % 4 > 1, 1 });
        test_logits(r, n, random_int(1, quick ? 200 : 300), cols, false);
        test_gated(r, n, random_int(1, config.ffn), cols, round % 2 == 0, n % 2);
        test_embed(r, n, cols, false, n % 2 ? 1.0f : 5.656854f);
    }
    for (int n : quick ? ints{ 1, 6, 20 } : ints{ 1, 3, 6, 12, 20, 40 })
        test_mix_experts(r, n, 3 + n % 2, 2, cols, ++round % 2);
}

/* ---- rows ------------------------------------------------------------------------------- */

static void test_rmsnorm(rig &r, int n, int d, float limit, bool accumulate, bool layer_norm = false)
{
    r.config.layer_norm = layer_norm;
    now("%s rmsnorm n %d, d %d, of values up to %g%s%s", r.name(), n, d, limit, accumulate ? ", accumulated" : "",
        layer_norm ? ", less their mean" : "");
    size_t size = (size_t)(n * d);
    input x = r.in(r.values(size, limit)), weight = r.in_f32(random_values(LAZY_F32, (size_t)d));
    output y = r.out(accumulate ? r.values(size) : unwritten(size));
    r.both([&](const side &s) { DO(s, rmsnorm, y.on(s), x.on(s), n, d, weight.on(s), 1e-5f, accumulate); });
    compare(y, r.precision());
    r.config.layer_norm = false;
}

/* The same bits as rmsnorm's, and the layer is noted if a value is NaN or Inf, unless an earlier one is. */
static void test_checked_rmsnorm(const rig &r, int n, int d, float value, int noted, int layer)
{
    now("%s checked_rmsnorm n %d, d %d, %g, %d noted, layer %d", r.name(), n, d, value, noted, layer);
    floats values = r.values((size_t)(n * d));
    values[(size_t)random_int(0, n * d - 1)] = value;
    input x = r.in(values), weight = r.in_f32(random_values(LAZY_F32, (size_t)d));
    output y = r.out(unwritten(values.size())), unchecked = r.out(unwritten(values.size()));
    output first_bad(r.gpu, ints{ noted });
    DO(r.gpu, checked_rmsnorm, y.on_device(), x.on_device(), n, d, weight.on_device(), 1e-5f, layer,
       first_bad.on_device());
    DO(r.gpu, rmsnorm, unchecked.on_device(), x.on_device(), n, d, weight.on_device(), 1e-5f, false);
    int32_t got = first_bad.read()[0], want = isfinite(value) ? noted : std::min(noted, layer);
    check(got == want, "%d instead of %d", got, want);
    check(y.bits() == unchecked.bits(), "other bits than rmsnorm");
}

/* WIDE: the norms are over all heads; LATE: behind RoPE; LAYER_NORM: they subtract the mean, with weights for each
 * head */
enum norming { PER_HEAD, WIDE, LATE, LAYER_NORM };

static void test_rotate(rig &r, int n, bool q_normed, bool k_normed, float limit, norming how = PER_HEAD)
{
    lazy_config &c = r.config;
    c.wide_qk_norm = how == WIDE;
    c.late_qk_norm = how == LATE;
    c.layer_norm = how == LAYER_NORM;
    now("%s rotate n %d, head_dim %d, heads %d to %d%s%s, norming %d, of values up to %g", r.name(), n, c.head_dim,
        c.n_heads, c.n_kv_heads, q_normed ? ", q normed" : "", k_normed ? ", k normed" : "", how, limit);
    int length = 2 * n + 3, capacity = length + 4;
    size_t d = (size_t)c.head_dim, width = (size_t)lazy_qkv_width(&c), q_width = (size_t)lazy_q_width(&c),
           kv_width = (size_t)lazy_kv_width(&c), angles = (size_t)length * d;
    bool all_heads = how == WIDE || how == LAYER_NORM;
    input rows(r.gpu, random_positions(n, length));
    input q_rope = r.in_f32(random_values(LAZY_F32, angles)), k_rope = r.in_f32(random_values(LAZY_F32, angles)),
          q_norm = r.in_f32(random_values(LAZY_F32, all_heads ? q_width : d)),
          k_norm = r.in_f32(random_values(LAZY_F32, all_heads ? kv_width : d));
    output qkv = r.out(r.values((size_t)n * width, limit)), k = r.out(r.values(kv_width * (size_t)capacity)),
           v = r.out(r.values(kv_width * (size_t)capacity));
    r.both([&](const side &s) {
        char *q = qkv.on(s), *k_v = q + q_width * lazy_activation_bytes(s.backend);
        bool apart = &s == &r.gpu && random_int(0, 1); /* queries by one call, keys and values by another */
        for (int part = apart ? 0 : 2; part < (apart ? 2 : 3); part++)
            DO(s, rotate, part == 1 ? NULL : q, part == 0 ? NULL : k_v, (int)width, rows.on(s), n,
               { k.on(s), v.on(s), capacity }, q_rope.on(s), k_rope.on(s), q_normed ? q_norm.on(s) : address{},
               k_normed ? k_norm.on(s) : address{}, 1e-6f);
    });
    floats q = qkv.read();
    for (size_t i = 0; i < q.size(); i++)
        if (i % width >= q_width) q[i] = qkv.plain[i] = 0; /* k and v are in the cache now */
    compare(q, qkv.plain, r.precision());
    compare(k, r.precision());
    same(v, "values in v");
}

static void test_surprisal(const rig &r, int n, int vocab)
{
    now("%s surprisal n %d, vocab %d", r.name(), n, vocab);
    floats values = random_values(LAZY_F32, (size_t)(n * vocab), 30);
    input ids(r.gpu, random_ints(n, 0, vocab - 1));
    output logits = r.out_f32(values), surprisal = r.out_f32(unwritten((size_t)n));
    r.both([&](const side &s) { DO(s, surprisal, surprisal.on(s), logits.on(s), n, vocab, ids.on(s)); });
    /* log(sum) of an f32 sum of at least 1: exact to a few 1e-7, however small the surprisal of a likely token is. */
    compare(surprisal, 1e-6, 1);

    for (float bad : { NAN, INFINITY }) {
        values[(size_t)random_int(0, vocab - 1)] = bad;
        output damaged = r.out_f32(values), beside_nan = r.out_f32({ 0 });
        DO(r.gpu, surprisal, beside_nan.on_device(), damaged.on_device(), 1, vocab, ids.on_device());
        check(!std::isfinite(beside_nan.read()[0]), "a number beside a logit of %g", bad);
    }
}

/* Odd rounds: few different values, so that most are equal. Even rounds: values of large magnitude, all different. */
static void test_argmax(const rig &r, int vocab)
{
    for (int round = 0; round < 12; round++) {
        now("%s argmax of %d, round %d", r.name(), vocab, round);
        floats values = random_values(LAZY_F32, (size_t)vocab, round % 2 ? 3 : -1e30f);
        for (float &logit : values) logit = round % 2 ? truncf(logit) : logit;
        if (round % 4 == 3)
            for (float &logit : values) logit = -fabsf(logit);
        for (int bad = 0; bad < round - 8; bad++)
            values[(size_t)random_int(0, vocab - 1)] = bad == 0 ? -INFINITY : bad == 1 ? INFINITY : NAN;
        input logits = r.in_f32(values);
        output id(r.gpu, ints{ -7 });
        r.both([&](const side &s) { DO(s, argmax, id.on(s), logits.on(s), vocab); });
        same(id, "token");
    }
}

static void test_rows(rig &r)
{
    const float largest[] = { FLT_MAX, 65504.0f, 0x1.fep127f }; /* indexed by lazy_dtype */
    for (int n : { 1, 5, 33 })
        for (float scale : { 1.0f, 33.94f }) test_embed(r, n, random_cols(n / 4), n > 1, scale);
    for (int d : { 1, 2, 31, 129, 257, 2 * random_int(100, 300) + 1 }) {
        test_rmsnorm(r, random_int(1, 4), d, 1, false);
        test_rmsnorm(r, 2, d, huge(r.type), false);
        test_rmsnorm(r, 3, d, 1, true);
        if (d > 2)
            test_rmsnorm(r, 3, d, 3, false, true); /* two values may differ from their mean by its rounding alone */
    }
    for (int d : { 8, 8 * random_int(2, 500), 8192,
                   8200 }) { /* whole packs; the last in f32, and in 16 bits, do not fit into registers */
        test_rmsnorm(r, 2, d, 1, d % 16 == 0);
        test_rmsnorm(r, 1, d, huge(r.type), true);
        test_rmsnorm(r, 2, d, 3, false, true);
    }
    for (int vocab : { 1, 31, 257, random_int(300, 2000) }) test_surprisal(r, random_int(1, 5), vocab);
    for (int vocab : { 1, 2, 33, 1024, random_int(1025, 5000) }) test_argmax(r, vocab);
    for (int d : { 1, random_int(2, 255), 256, 701, 4096, 8200 }) {
        for (float value : { NAN, INFINITY, -INFINITY, largest[r.type] }) {
            test_checked_rmsnorm(r, random_int(1, 4), d, value, 1000, 7);
            test_checked_rmsnorm(r, 1, d, value, 3, 7);
        }
    }
}

/* ---- attention -------------------------------------------------------------------------- */

enum { MAX_ROWS = 130, MAX_TOKENS = 300 };

/* Inputs of attention: n rows, m tokens in play, from a longer context. Cache slots of tokens that are not in play hold
 * NaN; so does, if there is one, one value of the key `bad` in head bad_head. */
struct scene {
    int n, m, length, capacity, q_stride;
    input<int32_t> in_play, rows;
    input<float> qkv, k, v;

    scene(const rig &r, int of_length, const ints &positions, const ints &of_rows, int bad = -1, int bad_head = 0)
        : n((int)of_rows.size()), m((int)positions.size()), length(of_length), capacity(of_length + 3),
          q_stride(lazy_qkv_width(&r.config)), in_play(r.gpu, positions), rows(r.gpu, of_rows),
          qkv(r.in(r.values((size_t)(n * lazy_qkv_width(&r.config)), 4))), /* large: the softmax is peaked */
          k(r.in(cache(r, positions, bad, bad_head))), v(r.in(cache(r, positions, -1, 0)))
    {
        v.read(); /* waits for the uploads, because other streams read the inputs */
    }

    lazy_attending attending(const side &s, int window)
    {
        return { qkv.on(s), q_stride, rows.on(s), n, { k.on(s), v.on(s), capacity }, in_play.on(s), m, window };
    }

  private:
    floats cache(const rig &r, const ints &positions, int bad, int bad_head) const
    {
        size_t d = (size_t)r.config.head_dim, slots = (size_t)(r.config.n_kv_heads * capacity);
        floats values = r.values(slots * d);
        for (size_t slot = 0; slot < slots; slot++)
            if (!std::binary_search(positions.begin(), positions.end(), (int)slot % capacity))
                std::fill_n(values.begin() + (long)(slot * d), d, NAN);
        if (bad >= 0) values[(size_t)(bad_head * capacity + bad) * d + (size_t)random_int(0, (int)d - 1)] = NAN;
        return values;
    }
};

/* Overrides the device's number of multiprocessors, which determines the number of key chunks. */
static floats attention_of(const rig &r, scene &t, int window, int processors)
{
    lazy_cuda *cuda = reinterpret_cast<lazy_cuda *>(r.gpu.backend);
    int own = cuda->processors;
    cuda->processors = processors;
    side s = stream_of(r.gpu.backend, &r.config, t.n, t.m); /* with scratch for that number of multiprocessors */
    output<float> y(s, unwritten((size_t)(t.n * lazy_q_width(&r.config))), r.type);
    const lazy_attending a = t.attending(s, window);
    DO(s, attention, y.on_device(), &a);
    floats got = y.read();
    s.ops->stream_close(s.stream);
    cuda->processors = own;
    return got;
}

static floats plain_attention_of(const rig &r, scene &t, int window)
{
    floats y((size_t)(t.n * lazy_q_width(&r.config)));
    const lazy_attending a = t.attending(r.plain, window);
    DO(r.plain, attention, y.data(), &a);
    return y;
}

static std::string text_of(const rig &r, const scene &t, int window)
{
    const lazy_config &c = r.config;
    char text[200];
    snprintf(text, sizeof text, "n %d, m %d of %d, head_dim %d, heads %d to %d, window %d, cap %g", t.n, t.m, t.length,
             c.head_dim, c.n_heads, c.n_kv_heads, window, c.attention_cap);
    return text;
}

/* on: a stream of r.gpu's backend. NaNs must be where the reference has them. */
static void test_scores(const rig &r, const side &on, scene &t, int window, int queries, int first_asking)
{
    lazy_pooling pooling = (lazy_pooling)random_int(LAZY_POOLING_MEAN, LAZY_POOLING_RMS);
    int n_heads = r.config.n_heads, heavy = random_int(-1, n_heads - 1);
    now("%s scores %s, queries %d, pooling %d, head %d, new from %d", r.name(), text_of(r, t, window).c_str(), queries,
        pooling, heavy, first_asking);
    output<float> first(on, unwritten((size_t)t.m)), again(on, unwritten((size_t)t.m));
    auto score = [&](const side &s, output<float> &scores) {
        const lazy_attending a = t.attending(s, window);
        DO(s, scores, scores.on(s), &a, queries, pooling, heavy, first_asking);
    };
    score(r.plain, first);
    score(on, first); /* finds the ranges of the rows too */
    launch_count counted;
    score(on, again);
    counted.expect(3, 1);
    check(again.bits() == first.bits(), "other bits the second time");
    floats got = first.read(), want = first.plain;
    double sum = 0, whole = heavy < 0 ? 1 : (n_heads + 7.0) / n_heads;
    bool alike = true;
    for (size_t j = 0; j < want.size(); j++) {
        alike = alike && isnan(got[j]) == isnan(want[j]);
        sum += got[j] / whole;
        if (isnan(want[j])) got[j] = want[j] = 0;
    }
    check(alike, "NaNs elsewhere");
    compare(got, want, precisions[LAZY_F32]);
    check(pooling != LAZY_POOLING_MEAN || isnan(sum) || fabs(sum - 1) < 1e-5, "the sum is %.8g, not 1", sum);
}

static const int NO_WINDOW = INT32_MAX;

static void test_attention(const rig &r, int n, int m, int length, int window = NO_WINDOW)
{
    ints in_play = random_positions(m, length);
    scene t(r, length, in_play, random_rows(n, in_play));
    floats want = plain_attention_of(r, t, window);
    for (int processors : n <= 128 && m > 128 ? ints{ 1, 132 } : ints{ 132 }) {
        now("%s attention %s, on %d processors", r.name(), text_of(r, t, window).c_str(), processors);
        compare(attention_of(r, t, window, processors), want, r.precision());
    }
    test_scores(r, r.gpu, t, window, random_int(1, 5), pick(t.rows.plain));
}

/* Scores by few and many rows, all or some of which are query rows; the last scene has a NaN in one key. The scratch is
 * as large as the pass needs. */
static void test_query_rows(lazy_dtype type, int n_heads, int n_kv_heads, int head_dim)
{
    const int LEVELS = 2 * LAZY_LEVEL_BLOCK; /* tokens, in more blocks of a levelled head than one */
    rig r(type, config_of(n_heads, n_kv_heads, head_dim), LEVELS, LEVELS);
    for (int queries : { 1, 2, 17, 32, 64, 100, 300, 20 }) {
        if (quick && (queries == 64 || queries == 17 || queries == 300)) continue;
        bool levels = queries <= 2 || queries == 20 || queries == 300;
        int n = queries + random_int(0, 20), most = quick ? 170 : MAX_TOKENS,
            m = levels ? random_int(LAZY_LEVEL_BLOCK + 5, LEVELS) : random_int(std::max(n, 130), most),
            length = m + random_int(0, 60);
        ints in_play = random_positions(m, length);
        scene t(r, length, in_play, random_rows(n, in_play), queries == 20 ? pick(in_play) : -1,
                random_int(0, n_kv_heads - 1));
        side s = stream_of(r.gpu.backend, &r.config, n, m);
        for (int window : { NO_WINDOW, random_int(1, m) })
            for (int asking : { 1, random_int(1, n), n })
                test_scores(r, s, t, window, queries, t.rows.plain[(size_t)(n - asking)]);
        s.ops->stream_close(s.stream);
    }
}

/* A NaN in one key makes the outputs NaN for the rows that attend to it, in the query heads of its key head, and no
 * others. */
static void test_bad_key(const rig &r, int n, int m)
{
    const lazy_config &c = r.config;
    ints in_play = random_positions(m, m + 40);
    int bad = in_play[(size_t)random_int(m / 4, 3 * m / 4)], g = random_int(0, c.n_kv_heads - 1),
        group = c.n_heads / c.n_kv_heads, window = random_int(0, 1) ? NO_WINDOW : random_int(1, m);
    scene t(r, m + 40, in_play, random_rows(n, in_play), bad, g);
    const floats wanted = plain_attention_of(r, t, window);
    for (int processors : { 1, 132 }) {
        now("%s attention to a NaN %s, on %d processors", r.name(), text_of(r, t, window).c_str(), processors);
        floats got = attention_of(r, t, window, processors), want = wanted;
        bool spread = true;
        for (size_t i = 0; i < got.size(); i++) {
            int head = (int)i / c.head_dim, row = t.rows.plain[(size_t)(head / c.n_heads)];
            if (row < bad || bad <= row - window || head % c.n_heads / group != g) continue;
            spread = spread && isnan(got[i]);
            got[i] = want[i] = 0;
        }
        check(spread, "the NaN was lost");
        compare(got, want, r.precision());
    }
}

/* Positions that `filter` and `select` change in memory that attention has read before: it must not use the ranges that
 * it found then. Nothing else may run on the stream in between, so all memory is prepared before. */
static void test_other_positions(const rig &r)
{
    const int N = 3, M = 40, LENGTH = 90, SETS = 3; /* the first by filter, then one that differs, then one by select */
    ints all, rows = { 30, 60, LENGTH - 1 };
    for (int i = 0; i < LENGTH; i++) all.push_back(i);
    std::vector<std::unique_ptr<input<int32_t>>> depths;
    std::vector<std::unique_ptr<input<float>>> scores;
    for (int i = 0; i < SETS; i++) {
        ints chosen = random_positions(M - N, LENGTH), depth((size_t)LENGTH, 1);
        floats score((size_t)LENGTH, 0);
        for (const ints &some : { chosen, rows })
            for (int32_t position : some) depth[(size_t)position] = 7, score[(size_t)position] = 1;
        depths.push_back(std::make_unique<input<int32_t>>(r.gpu, depth));
        scores.push_back(std::make_unique<input<float>>(r.gpu, score));
    }
    scene t(r, LENGTH, all, rows);
    input free(r.gpu, bytes((size_t)LENGTH, LAZY_PRUNABLE));
    output in_play(r.gpu, ints((size_t)M, -1));
    output y = r.out(unwritten((size_t)(N * lazy_q_width(&r.config))));
    for (int i = 0; i < SETS; i++) {
        const ints &depth = depths[(size_t)i]->plain;
        int m = (int)std::count(depth.begin(), depth.end(), 7);
        r.both([&](const side &s) {
            if (i < 2) DO(s, filter, in_play.on(s), &m, t.in_play.on(s), LENGTH, depths[(size_t)i]->on(s), 7, 7);
            else DO(s, select, in_play.on(s), t.in_play.on(s), scores[(size_t)i]->on(s), LENGTH, free.on(s), m);
        });
        for (int window : { NO_WINDOW, 20 }) {
            now("%s attention after positions changed, set %d, window %d", r.name(), i, window);
            r.both([&](const side &s) {
                lazy_attending a = t.attending(s, window);
                a.in_play = in_play.on(s);
                a.m = m;
                DO(s, attention, y.on(s), &a);
            });
            compare(y, r.precision());
        }
    }
}

/* `thorough`: also with as many rows as a prefill. */
static void test_heads(lazy_dtype type, int head_dim, int group, bool thorough)
{
    int n_kv_heads = group == 8 ? 1 : 2;
    rig r(type, config_of(n_kv_heads * group, n_kv_heads, head_dim), MAX_ROWS, MAX_TOKENS);
    ints rows = quick      ? ints{ 1, 5, thorough ? 17 : 2 }
                : thorough ? ints{ 1, 2, 5, 17, 64, 65, 130 }
                           : ints{ 1, 2, 5, 17 };
    for (int n : rows) {
        int m = std::max(n, random_int(1, quick ? 150 : MAX_TOKENS));
        test_attention(r, n, m, m + random_int(0, 60));
    }
    test_attention(r, 3, thorough ? 64 : 65, 100);
    test_attention(r, 4, thorough ? 256 : 129, 300);
    /* windows shorter and longer than a tile, over scattered tokens; rows far apart, rows side by side */
    const ints windows = quick ? ints{ 30 } : ints{ 1, 30, 150 };
    for (int window : windows) {
        if (thorough || window == 30) test_attention(r, thorough ? 5 : 2, quick ? 140 : 280, 420, window);
        if (thorough) test_attention(r, quick ? 20 : 90, quick ? 100 : 200, 260, window);
    }
    test_bad_key(r, 9, quick ? 130 : 180);
    test_rotate(r, 1, false, false, 1);
    test_rotate(r, 3, true, true, 1);
    test_rotate(r, random_int(2, 9), thorough, !thorough, 1);
    test_rotate(r, 2, true, true, 1, WIDE);
    test_rotate(r, 2, true, true, 1, LATE);
    test_rotate(r, 3, true, thorough, 1, LAYER_NORM);
    test_rotate(r, 2, true, true, thorough ? huge(type) : 1);
}

static void test_all_heads(lazy_dtype type)
{
    const ints dims = quick ? ints{ 16, 64, 128 } : ints{ 16, 40, 64, 80, 96, 128, 256, 512 }, groups = { 1, 3, 8 };
    int thorough_group = random_int(0, 2), left_out = -1;
    for (int head_dim : dims) {
        for (size_t i = 0; i < groups.size(); i++)
            if ((int)i == thorough_group || (!quick && (int)i != left_out))
                test_heads(type, head_dim, groups[i], (int)i == thorough_group);
        left_out = thorough_group;
        thorough_group = (thorough_group + 1) % 3;
    }
}

/* Chunks of several steps over keys, and nearly the maximum number of chunks. */
static void test_long_context(lazy_dtype type, int head_dim, int m)
{
    rig r(type, config_of(1, 1, head_dim), 2, m);
    test_attention(r, 1, m, m + 5);
    test_attention(r, 2, m - 40, m);
    test_attention(r, 1, m, m + 5, m / 5);
}

/* Prefill with wgmma: on a GPU that has it, or on the fake device set to compute capability 9.0. */
static void test_wgmma(lazy_dtype type)
{
    setenv("LAZYLLM_CUDA_FAKE_CAPABILITY", "90", 1);
    const ints dims = quick ? ints{ 64 } : ints{ 64, 128 };
    for (int head_dim : dims) {
        int group = pick({ 1, 2, 3 }), n_kv_heads = quick || group == 3 ? 1 : 2;
        lazy_config config = config_of(n_kv_heads * group, n_kv_heads, head_dim);
        config.attention_cap = 0;
        rig r(type, config, 300, 500);
        bool used = reinterpret_cast<lazy_cuda *>(r.gpu.backend)->wgmma;
        printf("%s\n", r.gpu.backend->variant);
        now("%s wgmma", r.name());
        check(used == (reinterpret_cast<lazy_cuda *>(r.gpu.backend)->capability == 90) &&
                  used == !!strstr(r.gpu.backend->variant, ", wgmma"),
              "used: %d, in %s", used, r.gpu.backend->variant);
        if (!used) break;
        test_attention(r, 129, 300, 400, 90);
        test_attention(r, 70, 500, 600); /* several chunks of keys */
        test_bad_key(r, 130, 280);
        r.config.attention_cap = 1.5f; /* not by wgmma, which has no cap */
        test_attention(r, 129, 300, 400, 90);
        r.config.attention_cap = 0;
        if (quick) continue;
        test_attention(r, 129, 129, 140);
        test_attention(r, 150, 257, 300);
        test_attention(r, 300, 500, 800);
        for (int i = 0; i < 3; i++) {
            int n = random_int(129, 300), m = random_int(n, 500);
            test_attention(r, n, m, m + random_int(0, 300), random_int(1, m));
        }
        test_attention(r, 129, 500, 5000, 200); /* gaps between the windows */
    }
    unsetenv("LAZYLLM_CUDA_FAKE_CAPABILITY");
}

/* ---- selection -------------------------------------------------------------------------- */

static void test_smooth(const rig &r, int m, int width)
{
    now("%s smooth m %d, width %d", r.name(), m, width);
    input scores = r.in_f32(random_values(LAZY_F32, (size_t)m));
    output out = r.out_f32(unwritten((size_t)m));
    r.both([&](const side &s) { DO(s, smooth, out.on(s), scores.on(s), m, width); });
    same(out, "means");
}

static void test_average(const rig &r, int m, int n)
{
    now("%s average of %d over m %d", r.name(), n, m);
    output mean = r.out_f32(unwritten((size_t)m));
    for (int i = 1; i <= n; i++) {
        input scores = r.in_f32(random_values(LAZY_F32, (size_t)m));
        r.both([&](const side &s) { DO(s, average, mean.on(s), scores.on(s), m, i); });
    }
    same(mean, "means");
}

enum flagging { ALL_FREE, SOME_FORCED, SOME_UNPRUNABLE, ANY_FLAGS, NONE_FREE, FLAGGINGS };

static std::vector<uint8_t> random_flags(flagging how, int length)
{
    std::vector<uint8_t> flags((size_t)length, LAZY_PRUNABLE);
    for (uint8_t &flag : flags) {
        bool special = random_int(0, 3) == 0;
        if (how == SOME_FORCED && special) flag = LAZY_PRUNABLE | LAZY_FORCED;
        if (how == SOME_UNPRUNABLE && special) flag = 0;
        if (how == ANY_FLAGS) flag = (uint8_t)random_int(0, LAZY_PRUNABLE | LAZY_FORCED);
        if (how == NONE_FREE) flag = LAZY_FORCED;
        if (random_int(0, 1)) flag |= LAZY_JOINED; /* which changes nothing but words */
    }
    return flags;
}

enum spread { ANY, FEW, IN_ONE_EXPONENT, TWO_LEVELS, EQUAL, ONE_AMONG_EQUALS, ON_BOTH_SIDES_OF_0, SPREADS };

/* ANY: arbitrary scores, one of them -0. The others are multiples of 2^-30, so that sums are exact. */
static floats random_scores(int m, spread how)
{
    int level = random_int(1, 1 << 13);
    auto score = [&]() -> float {
        switch (how) {
        case ANY: return fabsf((float)random_bits()) * 0x1p-2f / (float)m;
        case FEW: return (float)random_int(0, 24);
        case IN_ONE_EXPONENT: return (float)random_int(1 << 13, (1 << 14) - 1);
        case TWO_LEVELS: return (float)(level + random_int(0, 1));
        case ON_BOTH_SIDES_OF_0: return (float)random_int(-(1 << 13), 1 << 13);
        default: return (float)level;
        }
    };
    floats scores((size_t)m);
    for (float &each : scores) each = score() * 0x1p-30f;
    if (how == ANY) scores[(size_t)random_int(0, m - 1)] = -0.0f;
    if (how == ONE_AMONG_EQUALS) scores[(size_t)random_int(0, m - 1)] *= 1.5f;
    return scores;
}

/* One position of `apart` begins a word, and `gaps` are not in play. */
static void test_complete(const rig &r, int m, int gaps, int apart)
{
    now("%s complete m %d, %d gaps, words %d apart", r.name(), m, gaps, apart);
    input in_play(r.gpu, random_positions(m, m + gaps));
    std::vector<uint8_t> joined((size_t)(m + gaps));
    for (uint8_t &flag : joined) flag = (uint8_t)(random_int(0, 3) | (random_int(1, apart) > 1 ? LAZY_JOINED : 0));
    input flags(r.gpu, joined);
    floats values = random_scores(m, (spread)pick({ ANY, FEW, ON_BOTH_SIDES_OF_0 }));
    if (random_int(0, 1)) values[(size_t)random_int(0, m - 1)] = NAN;
    input scores = r.in_f32(values);
    output out = r.out_f32(unwritten((size_t)m));
    launch_count counted;
    r.both([&](const side &s) { DO(s, complete, out.on(s), scores.on(s), in_play.on(s), m, flags.on(s)); });
    counted.expect(1, m / LAZY_TOKEN_BLOCK);
    check(out.bits() == narrowed(LAZY_F32, out.plain), "other scores than the reference's");
}

/* Tokens chosen by number and, where the sums of their scores are exact, by mass. */
static void test_select(const rig &r, int m, flagging how, spread of_scores)
{
    int length = m + random_int(0, m);
    input in_play(r.gpu, random_positions(m, length));
    input flags(r.gpu, random_flags(how, length));
    input scores = r.in_f32(random_scores(m, of_scores));
    int n_free = (int)std::count_if(in_play.plain.begin(), in_play.plain.end(),
                                    [&](int32_t position) { return lazy_is_free(flags.plain[(size_t)position]); });
    for (int budget : { 0, std::min(1, n_free), random_int(0, n_free), std::max(0, n_free - 1), n_free }) {
        now("%s select m %d, flags %d, scores %d, %d of %d free", r.name(), m, how, of_scores, budget, n_free);
        output kept(r.gpu, ints((size_t)(m - n_free + budget), -1));
        launch_count counted;
        r.both([&](const side &s) { DO(s, select, kept.on(s), in_play.on(s), scores.on(s), m, flags.on(s), budget); });
        counted.expect(2, m / LAZY_TOKEN_BLOCK);
        same(kept, "tokens");
    }
    if (of_scores == ANY || of_scores == ON_BOTH_SIDES_OF_0) return;
    for (double mass : { random_bits() / 4294967296.0, 0.9, 1.0 }) {
        now("%s mass %g of m %d, flags %d, scores %d", r.name(), mass, m, how, of_scores);
        int n[2] = { -1, -2 };
        r.both([&](const side &s) { DO(s, mass, &n[r.is_gpu(s)], in_play.on(s), scores.on(s), m, flags.on(s), mass); });
        check(n[1] == n[0], "%d tokens, not %d", n[1], n[0]);
    }
}

/* NaN among the scores: the next op that waits for the device reports the first one, once. */
static void test_bad_scores(const rig &r, int m)
{
    const side &gpu = r.gpu;
    ints in_play = random_positions(m, 2 * m);
    floats scores = random_scores(m, FEW), later = scores;
    int first = random_int(0, m - 1), layer = random_int(0, 90);
    scores[(size_t)first] = scores.back() = later.front() = NAN;
    now("%s NaN among the scores of %d in layer %d", r.name(), m, layer);
    input positions(gpu, in_play);
    input free(gpu, bytes((size_t)(2 * m), LAZY_PRUNABLE));
    input bad = r.in_f32(scores), also_bad = r.in_f32(later);
    output kept(gpu, ints((size_t)m, -1));
    std::string words = "in layer " + std::to_string(layer) + ": the score of the token at position " +
                        std::to_string(in_play[(size_t)first]) + " is not a number";
    for (const input<float> *chosen_by : { &bad, &also_bad }) {
        gpu.stream->layers_done = layer + (chosen_by == &also_bad);
        DO(gpu, select, kept.on_device(), positions.on_device(), chosen_by->on_device(), m, free.on_device(), m / 2);
    }
    int32_t any;
    const address at = positions.on_device();
    refused(gpu, "download", gpu.ops->download(gpu.stream, &any, at, sizeof any, &gpu.err), LAZY_CHECKPOINT, words);
    DO(gpu, download, &any, at, sizeof any);
    gpu.stream->layers_done = layer;
    int code = gpu.ops->mass(gpu.stream, &any, at, bad.on_device(), m, free.on_device(), 0.5, &gpu.err);
    refused(gpu, "mass", code, LAZY_CHECKPOINT, words);
    gpu.stream->layers_done = 0;
    kept.read();
}

/* The scores of three layers, the largest of them, and what is remembered of it in a second pass over more tokens. */
static void test_pooling(const rig &r, int m, flagging how)
{
    now("%s pooling m %d, flags %d", r.name(), m, (int)how);
    int length = m + random_int(0, 50), capacity = length + random_int(0, 9), n_old = random_int(0, length);
    float factor = random_int(0, 2) * 0.5f, gain = (float)random_int(1, 4), revival = random_int(0, 2) * 0.5f;
    auto sizes = [](size_t n) {
        floats values = random_values(LAZY_F32, n);
        for (float &value : values) value = fabsf(value);
        return values;
    };
    input in_play(r.gpu, random_positions(m, length)), depth(r.gpu, random_ints(length, 2, 4));
    input flags(r.gpu, random_flags(how, length));
    input raw = r.in_f32(sizes(3 * (size_t)m));
    output layers = r.out_f32(unwritten(3 * (size_t)capacity)), largest = r.out_f32(unwritten((size_t)m)),
           remembered = r.out_f32(sizes((size_t)capacity));
    launch_count counted;
    r.both([&](const side &s) {
        for (size_t layer = 0; layer < 3; layer++)
            DO(s, keep_scores, layers.on(s, layer * (size_t)capacity), raw.on(s, layer * (size_t)m), in_play.on(s), m,
               flags.on(s));
    });
    counted.expect(3, m / LAZY_TOKEN_BLOCK);
    r.both([&](const side &s) {
        DO(s, largest, largest.on(s), layers.on(s), 1, capacity, in_play.on(s), m, false);
        DO(s, largest, largest.on(s), layers.on(s, (size_t)capacity), 2, capacity, in_play.on(s), m, true);
        const lazy_memory memory = { remembered.on(s), n_old, length, factor, gain, depth.on(s), 3, revival };
        DO(s, remember, largest.on(s), &memory, in_play.on(s), m);
    });
    compare(largest, 1e-6);
    compare(remembered, 1e-6);
}

static void test_selection(const rig &r)
{
    for (int m : { 1, 7, 300 }) {
        for (int width : { 1, 3, 9, 2 * m + 1, 2 * random_int(0, 40) + 1 }) test_smooth(r, m, width);
        test_average(r, m, random_int(1, 5));
        for (int how = 0; how < FLAGGINGS; how++) test_pooling(r, m, (flagging)how);
    }
    const ints sizes = quick ? ints{ 1, 33, 700 }
                             : ints{ 1, 2, 31, 33, random_int(34, 510), 511, 512, 513, 1025 + random_int(0, 200) };
    const ints spreads = { ANY, FEW, ON_BOTH_SIDES_OF_0 };
    for (int m : sizes) {
        for (int apart : { 3, 200 }) test_complete(r, m, random_int(0, m / 50), apart);
        for (int how = 0; how < FLAGGINGS; how++)
            for (int of_scores : quick ? ints{ pick(spreads) } : spreads)
                test_select(r, m, (flagging)how, (spread)of_scores);
    }
    for (int m : { 1, 40, 600 }) test_bad_scores(r, m);
}

/* ---- bookkeeping ------------------------------------------------------------------------ */

static void test_depths(const rig &r, int n)
{
    int length = n + random_int(0, n), value = random_int(0, 9), low = random_int(0, 5), high = random_int(low, 9),
        n_positions = random_int(1, length), n_found[2] = { -1, -2 };
    now("%s mark and filter n %d of %d, depths %d to %d", r.name(), n, length, low, high);
    input rows(r.gpu, random_positions(n, length)), positions(r.gpu, random_positions(n_positions, length));
    output depths(r.gpu, random_ints(length, 0, 9));
    r.both([&](const side &s) { DO(s, mark, depths.on(s), rows.on(s), n, value); });
    same(depths, "depths");

    size_t room = (size_t)std::count_if(positions.plain.begin(), positions.plain.end(), [&](int32_t position) {
        return depths.plain[(size_t)position] >= low && depths.plain[(size_t)position] <= high;
    });
    output found(r.gpu, ints(room, -1)), again(r.gpu, ints(room, -1));
    launch_count counted;
    r.both([&](const side &s) {
        DO(s, filter, found.on(s), &n_found[r.is_gpu(s)], positions.on(s), n_positions, depths.on(s), low, high);
        DO(s, filter, again.on(s), nullptr, positions.on(s), n_positions, depths.on(s), low, high);
    });
    counted.expect(2 * 2, n_positions / LAZY_TOKEN_BLOCK);
    check(n_found[1] == n_found[0], "%d found, not %d", n_found[1], n_found[0]);
    same(found, "positions");
    same(again, "positions, where their number is known,");
}

/* Tens of thousands of tokens, in many blocks, scored in each way. */
static void test_many_tokens()
{
    const int MOST = quick ? 5000 : 70000;
    rig r(LAZY_F32, config_of(1, 1, 16), 1, MOST);
    for (int how = 0; how < SPREADS; how++)
        test_select(r, random_int(MOST / 2, MOST), how % 2 ? ANY_FLAGS : ALL_FREE, (spread)how);
    test_pooling(r, random_int(MOST / 2, MOST - 1), ANY_FLAGS);
    test_depths(r, random_int(MOST / 4, MOST / 2));
}

/* Without aux, the new rows are some of the old ones. */
static void test_regroup(const rig &r, int n, int n_new, int length, int d, bool with_aux)
{
    now("%s regroup %d to %d of %d, d %d%s", r.name(), n, n_new, length, d, with_aux ? "" : ", for good");
    ints old = random_positions(n, length),
         kept = with_aux ? random_positions(n_new, length + 1) : random_rows(n_new, old);
    if (with_aux) /* the last row may be evicted, kept or new */
        kept.back() = random_int(n_new > 1 ? kept[(size_t)n_new - 2] + 1 : 0, length);
    input rows(r.gpu, old), new_rows(r.gpu, kept);
    input x = r.in(r.values((size_t)(n * d)));
    output y = r.out(unwritten((size_t)(n_new * d))), aux = r.out(r.values((size_t)((length + 1) * d)));
    output n_revived(r.gpu, ints{ 3 });
    r.both([&](const side &s) {
        DO(s, regroup, y.on(s), new_rows.on(s), n_new, x.on(s), rows.on(s), n, with_aux ? aux.on(s) : address{}, d,
           n_revived.on(s));
    });
    same(y, "rows");
    same(aux, "rows in Aux");
    same(n_revived, "number of revived rows");
}

static void test_sets(const rig &r)
{
    const ints sizes = quick ? ints{ 1, 40, 700 } : ints{ 1, 2, 31, 33, random_int(34, 510), 512, 513, 1100 };
    for (int n : sizes) test_depths(r, n);
    test_regroup(r, 1, 1, 1, 5, true);
    test_regroup(r, 20, 20, 20, 3, true);
    for (int n : { 1, 33, 300 }) test_regroup(r, n, random_int(1, n), n, random_int(1, 600), false);
    for (int i = 0; i < (quick ? 4 : 12); i++) {
        int length = random_int(1, quick ? 30 : 90);
        test_regroup(r, random_int(1, length), random_int(1, length), length, random_int(1, 600), true);
    }
}

/* ---- the read ceiling ------------------------------------------------------------------- */

static void test_read(const rig &r)
{
    now("%s read", r.name());
    for (size_t size : { (size_t)1, (size_t)16, (size_t)4099, (size_t)100000 }) {
        input memory(r.gpu, bytes(size));
        did(r.gpu, "read", lazy_cuda_read(r.gpu.stream, memory.on_device(), size, &r.gpu.err));
    }
}

/* ---- all -------------------------------------------------------------------------------- */

/* Everything but the kernels that use wgmma; if quick, with half of the quantized formats. */
static void test_portable(lazy_dtype type, bool odd_formats)
{
    {
        rig r(type, config_of(3, 1, 16), 80, 2200);
        if (type == LAZY_F32) printf("%s\n", r.gpu.backend->variant);
        test_copies(r);
        test_uploads(r);
        test_refusals(r);
        test_streams(r);
        test_products(r);
        test_experts(r);
        test_rows(r);
        test_selection(r);
        test_sets(r);
        test_read(r);
        test_other_positions(r);
    }
    for (int format = LAZY_Q8_0; format < LAZY_N_DTYPES; format++)
        if (!quick || format % 2 == odd_formats) test_quantized(type, (lazy_dtype)format);
    if (type == LAZY_F32) test_many_tokens();
    test_all_heads(type);
    test_query_rows(type, 12, 3, 40);
    if (!quick) test_query_rows(type, 3, 3, 33);
    test_long_context(type, 16, quick ? 1000 : 8200);
    test_long_context(type, 64, quick ? 400 : 4200);
}

int main(int argc, char **argv)
{
    seed = (uint64_t)time(nullptr);
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "quick") == 0) quick = true;
        else seed = strtoull(argv[i], nullptr, 10);
    }
    printf("seed %llu\n", (unsigned long long)seed);
    const bool quick_all = quick, odd = random_int(0, 1);
#ifdef __SANITIZE_THREAD__
    const bool in_f32 = random_int(0, 1);
#endif
    for (lazy_dtype type : { LAZY_F32, LAZY_F16, LAZY_BF16 }) {
        /* the kernels of bf16, but for conversions, which a GPU may do in other instructions */
        if (quick_all && type == LAZY_F16) continue;
#ifdef LAZY_CUDA_ON_CPU
        quick = quick_all || type == LAZY_F16;
#endif
        setenv("LAZYLLM_CUDA_WGMMA", "0", 1);
#ifdef __SANITIZE_THREAD__
        /* it takes minutes, and barriers are the same in every type: one type is drawn */
        if (in_f32 == (type == LAZY_F32)) test_portable(type, odd);
#else
        test_portable(type, odd == (type == LAZY_F32));
#endif
        unsetenv("LAZYLLM_CUDA_WGMMA");
        if (type != LAZY_F32) test_wgmma(type);
    }
    return checked();
}
