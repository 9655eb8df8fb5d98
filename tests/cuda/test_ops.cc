/* test_ops.cc — compares every op of the CUDA backend with the CPU's reference implementation, in all three types.
 *
 * Runs on a GPU, or without one on the fakes in cuda/cuda_on_cpu. Each run uses new random data, odd shapes, and
 * outputs filled with NaN between guards. Inputs are rounded to the type; the reference gets the same values as f32.
 * Prints the failures, then "N passed, N failed".
 *
 *   test_ops [WORD …]
 *   quick              fewer shapes, for slow sanitizers
 *   without_wgmma, wgmma_alone
 *   a number           the seed of an earlier run, which printed it, to repeat that run */
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "../../cuda/cuda.h"

extern "C" {
#include "../c/reference.h"
}

typedef std::vector<unsigned char> bytes;
typedef std::vector<float> floats;
typedef std::vector<int32_t> ints;

static std::atomic<int> passed, failed;
static bool quick, wgmma = true, portable = true;

/* Describes the current test; printed with each failure. */
static thread_local std::string subject;

__attribute__((format(printf, 1, 2))) static void now(const char *format, ...)
{
    char text[300];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    subject = text;
}

__attribute__((format(printf, 2, 3))) static void check(bool good, const char *format, ...)
{
    if (good) {
        passed++;
        return;
    }
    failed++;
    char text[600];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    printf("FAILED %s: %s\n", subject.c_str(), text);
}

/* ---- types ------------------------------------------------------------------------------ */

/* Maximum errors, relative to the largest value. */
static const struct precision {
    const char *name;
    size_t width;
    double of_activations, of_f32;
} precisions[] = {
    /* indexed by lazy_dtype */
    { "f32", 4, 1e-5, 1e-5 },    /* f32 sums of up to a few thousand terms, in any order */
    { "f16", 2, 2e-3, 1e-5 },    /* four roundings of up to 5e-4: intermediate gate and up, accumulation to y */
    { "bf16", 2, 1.5e-2, 1e-5 }, /* four roundings of up to 4e-3 */
};

static size_t width_of(lazy_dtype type) { return precisions[type].width; }

static void put(unsigned char *at, lazy_dtype type, float value)
{
    __half f16 = __float2half_rn(value);
    __nv_bfloat16 bf16 = __float2bfloat16_rn(value);
    const void *from = type == LAZY_F16    ? (const void *)&f16
                       : type == LAZY_BF16 ? (const void *)&bf16
                                           : (const void *)&value;
    memcpy(at, from, width_of(type));
}

static float get(const unsigned char *at, lazy_dtype type)
{
    __half f16;
    __nv_bfloat16 bf16;
    float f32;
    switch (type) {
    case LAZY_F16: memcpy(&f16, at, sizeof f16); return __half2float(f16);
    case LAZY_BF16: memcpy(&bf16, at, sizeof bf16); return __bfloat162float(bf16);
    default: memcpy(&f32, at, sizeof f32); return f32;
    }
}

static bytes narrowed(lazy_dtype type, const floats &values)
{
    bytes data(values.size() * width_of(type));
    for (size_t i = 0; i < values.size(); i++) put(&data[i * width_of(type)], type, values[i]);
    return data;
}

static floats widened(lazy_dtype type, const bytes &data)
{
    floats values(data.size() / width_of(type));
    for (size_t i = 0; i < values.size(); i++) values[i] = get(&data[i * width_of(type)], type);
    return values;
}

template <class T> static bytes bytes_of(const std::vector<T> &values)
{
    const unsigned char *data = reinterpret_cast<const unsigned char *>(values.data());
    return bytes(data, data + values.size() * sizeof(T));
}

static ints ints_of(const bytes &data)
{
    ints values(data.size() / sizeof(int32_t));
    if (!values.empty()) memcpy(values.data(), data.data(), data.size());
    return values;
}

/* ---- random data ------------------------------------------------------------------------ */

static uint64_t seed;

static uint32_t random_bits()
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 32);
}

static int random_int(int low, int high) { return low + (int)(random_bits() % (uint32_t)(high - low + 1)); }

/* Uniform from -limit to limit, exact in the type. */
static floats random_values(lazy_dtype type, size_t n, float limit = 1)
{
    floats values(n);
    for (float &value : values) value = (float)((double)random_bits() / 2147483648.0 - 1.0) * limit;
    return type == LAZY_F32 ? values : widened(type, narrowed(type, values));
}

/* Weights of any type, n values of up to about 1. */
static bytes random_weights(lazy_dtype type, size_t n)
{
    static const float largest[] = { 1, 1, 1, 128, 8, 16, 16, 32, 1024, 2048, 4096 }; /* integers times scales */
    if (!lazy_is_quantized(type)) return narrowed(type, random_values(type, n));
    const lazy_format &format = lazy_formats[type];
    bytes data(n / (size_t)format.values * (size_t)format.bytes);
    for (unsigned char &byte : data) byte = (unsigned char)random_bits();
    for (size_t block = 0; block < data.size(); block += (size_t)format.bytes) {
        size_t scale = block + (type == LAZY_Q6_K ? offsetof(lazy_q6_k, scale) : 0);
        put(&data[scale], LAZY_F16, random_values(LAZY_F16, 1)[0] / largest[type]);
        if (format.has_offset)
            put(&data[scale + 2], LAZY_F16, random_values(LAZY_F16, 1)[0] / (format.values == 256 ? 64 : 1));
    }
    return data;
}

static floats weights_of(lazy_dtype type, const bytes &data, size_t n)
{
    floats values(n);
    lazy_widen(values.data(), data.data(), type, (int)n);
    return values;
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

/* ---- the two sides ---------------------------------------------------------------------- */

struct side {
    lazy_backend *backend;
    const lazy_ops *ops;
    lazy_stream *stream;
    mutable lazy_error err;
};

static void must(int code, const lazy_error &err)
{
    if (code == LAZY_OK) return;
    printf("%s\n", err.message);
    exit(2);
}

static void did(const side &s, const char *op, int code)
{
    if (code == LAZY_OK) return;
    check(false, "%s: code %d, %s", op, code, s.err.message);
    s.err = {};
}

static side stream_of(lazy_backend *backend, const lazy_config *config, int rows, int tokens)
{
    side s = { backend, backend->ops, nullptr, {} };
    must(s.ops->stream_open(backend, config, &s.stream, &s.err), s.err);
    must(s.ops->reserve(s.stream, rows, tokens, &s.err), s.err);
    return s;
}

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

struct rig {
    lazy_dtype type, stored; /* of the backend, and of weights */
    lazy_config config;
    side gpu, plain;

    rig(lazy_dtype of_type, const lazy_config &of_config, int rows, int tokens)
        : type(of_type), stored(of_type), config(of_config)
    {
        lazy_error err = {};
        lazy_backend *cuda, *cpu;
        lazy_cuda_options options = {};
        options.type = type;
        must(lazy_cuda_open(&cuda, &options, &err), err);
        must(reference_open(&cpu, LAZY_F32, &err), err);
        gpu = stream_of(cuda, &config, rows, tokens);
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

    const char *name() const { return precisions[type].name; }
    size_t width() const { return width_of(type); }
};

/* ---- memory of the device --------------------------------------------------------------- */

/* An op's input, allocated with its exact size so that ASan and compute-sanitizer detect reads beyond it. */
class input
{
  public:
    input(const side &owner, const bytes &data) : s(owner)
    {
        did(s, "alloc", s.ops->alloc(s.backend, &memory, data.size(), "an input", &s.err));
        did(s, "upload", s.ops->upload(s.stream, memory, data.data(), data.size(), &s.err));
    }
    template <class T> input(const side &owner, const std::vector<T> &data) : input(owner, bytes_of(data)) {}
    ~input() { s.ops->free(s.backend, memory); }
    input(const input &) = delete;

    template <class T> const T *as() const { return static_cast<const T *>(memory); }
    const void *at(size_t byte = 0) const { return static_cast<char *>(memory) + byte; }

  private:
    side s;
    void *memory;
};

/* An op's output, between guards; filled with NaN unless initial bytes are given. */
class output
{
  public:
    output(const side &owner, const bytes &initial) : s(owner), size(initial.size())
    {
        bytes all(size + 2 * MARGIN, GUARD);
        std::copy(initial.begin(), initial.end(), all.begin() + MARGIN);
        did(s, "alloc", s.ops->alloc(s.backend, &memory, all.size(), "an output", &s.err));
        did(s, "upload", s.ops->upload(s.stream, memory, all.data(), all.size(), &s.err));
    }
    output(const side &owner, size_t bytes_of_it) : output(owner, bytes(bytes_of_it, 0xff)) {}
    ~output() { s.ops->free(s.backend, memory); }
    output(const output &) = delete;

    template <class T = void> T *as() const { return static_cast<T *>(at()); }
    void *at(size_t byte = 0) const { return static_cast<char *>(memory) + MARGIN + byte; }

    bytes read() const
    {
        bytes all(size + 2 * MARGIN);
        did(s, "download", s.ops->download(s.stream, all.data(), memory, all.size(), &s.err));
        auto begin = all.begin() + MARGIN, end = begin + (long)size;
        auto is_guard = [](unsigned char byte) { return byte == GUARD; };
        check(std::all_of(all.begin(), begin, is_guard) && std::all_of(end, all.end(), is_guard),
              "wrote outside its output");
        return bytes(begin, end);
    }

  private:
#ifdef __SANITIZE_ADDRESS__ /* checks the bounds of allocations itself, for reads too */
    static constexpr long MARGIN = 0;
#else
    static constexpr long MARGIN = 256; /* keeps the device's alignment */
#endif
    static constexpr unsigned char GUARD = 0xdb;
    side s;
    void *memory;
    size_t size;
};

/* Largest absolute difference divided by the largest value of `want`, or by min_scale if that is greater; infinity if
 * any value is NaN. */
static double error_of(const floats &got, const floats &want, double min_scale = 1e-30)
{
    double worst = 0, largest = min_scale;
    for (size_t i = 0; i < want.size(); i++) {
        if (isnan(got[i]) || isnan(want[i])) return INFINITY;
        worst = fmax(worst, fabs((double)got[i] - want[i]));
        largest = fmax(largest, fabs(want[i]));
    }
    return worst / largest;
}

static void compare(const floats &got, const floats &want, double tolerance, double min_scale = 1e-30)
{
    double error = error_of(got, want, min_scale);
    check(error < tolerance, "error %.2g", error);
}

/* ---- memory and streams ----------------------------------------------------------------- */

static void test_copies(const rig &r)
{
    const side &gpu = r.gpu;
    for (int i = 0; i < 5; i++) {
        size_t n = (size_t)random_int(1, 1000), from = (size_t)random_int(0, 9), to = (size_t)random_int(0, 9);
        now("%s copies of %zu bytes from %zu to %zu", r.name(), n, from, to);
        bytes data(from + n), want(to + n + 5, 0xff);
        for (unsigned char &byte : data) byte = (unsigned char)random_bits();
        input source(gpu, data);
        output copied(gpu, want.size());
        did(gpu, "copy", gpu.ops->copy(gpu.stream, copied.at(to), source.at(from), n, &gpu.err));
        std::copy(data.begin() + (long)from, data.end(), want.begin() + (long)to);
        check(copied.read() == want, "other bytes arrived");
    }
}

/* Uploads longer than a slot of the staging, and more of them than it has slots, from memory that is overwritten at
 * once. */
static void test_uploads(const rig &r)
{
    now("%s uploads", r.name());
    const side &gpu = r.gpu;
    bytes want(3 * lazy_staging::SLOTS * lazy_staging::SLOT_BYTES + 77), source;
    for (unsigned char &byte : want) byte = (unsigned char)random_bits();
    output uploaded(gpu, want.size());
    for (size_t done = 0; done < want.size(); done += source.size()) {
        size_t n = std::min(want.size() - done, (size_t)random_int(1, 2 * (int)lazy_staging::SLOT_BYTES));
        source.assign(want.begin() + (long)done, want.begin() + (long)(done + n));
        did(gpu, "upload", gpu.ops->upload(gpu.stream, uploaded.at(done), source.data(), n, &gpu.err));
        std::fill(source.begin(), source.end(), 0xee);
    }
    check(uploaded.read() == want, "other bytes arrived");
}

/* Requests that cannot be met fail with the sizes in the message, and leave existing objects intact. */
static void test_refusals(const rig &r)
{
    now("%s refusals", r.name());
    const side &gpu = r.gpu;
    bytes data = narrowed(r.type, random_values(r.type, 100));
    output kept(gpu, data);
    auto refused = [&](const char *what, int code, lazy_code wanted, const char *words) {
        check(code == wanted && strstr(gpu.err.message, words), "%s: code %d, \"%s\"", what, code, gpu.err.message);
        gpu.err = {};
    };

    const size_t HUGE_BYTES = (size_t)1 << 50;
    void *memory = &memory;
    int code = gpu.ops->alloc(gpu.backend, &memory, HUGE_BYTES, "a test's memory", &gpu.err);
    check(!memory, "alloc left an address");
    check(strstr(gpu.err.message, "a test's memory"), "alloc names nothing: \"%s\"", gpu.err.message);
    refused("alloc", code, LAZY_MEMORY, std::to_string(HUGE_BYTES).c_str());
    refused("admit", gpu.ops->admit(gpu.backend, HUGE_BYTES, "the test's weights", &gpu.err), LAZY_MEMORY,
            "the test's weights take 1048576.00 GiB");
    did(gpu, "admit", gpu.ops->admit(gpu.backend, 1, "a byte", &gpu.err));

    char weight = 0;
    lazy_matrix w = {};
    w.part[0] = { &weight, 1 << 30, r.type };
    w.n_parts = 1;
    w.rows = 1 << 30;
    w.cols = 1 << 20;
    refused("bind", gpu.ops->bind(gpu.backend, &w, 1, &gpu.err), LAZY_MEMORY, "weights");
    check(w.part[0].data == &weight && w.part[0].rows == 1 << 30, "a refused matrix was changed");

    lazy_config many_heads = config_of(512, 1, 16);
    side s = stream_of(gpu.backend, &many_heads, 1, 7);
    lazy_cuda_stream before = *lazy_cuda_scratch(s.stream);
    code = s.ops->reserve(s.stream, 1, INT32_MAX, &gpu.err);
    refused("reserve", code, LAZY_MEMORY, "scratch");
    lazy_cuda_stream after = *lazy_cuda_scratch(s.stream);
    check(after.tokens == before.tokens && after.products == before.products, "a refused reserve left traces");
    s.ops->stream_close(s.stream);

    lazy_backend *none;
    lazy_cuda_options options = {};
    options.device = 999;
    refused("a device that is not there", lazy_cuda_open(&none, &options, &gpu.err), LAZY_DEVICE, "cuda:999");
    check(kept.read() == data, "what was there before has changed");
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
        for (int tokens = 10; i % 8 == 0 && tokens <= 30; tokens += 10)
            did(s, "reserve", s.ops->reserve(s.stream, tokens / 10, tokens, &s.err));
        s.ops->stream_close(s.stream);
        if (i == 0) left = free_memory(); /* the first stream may allocate memory that stays */
    }
    r.gpu.ops->stream_close(nullptr);
    check(free_memory() + OTHERS >= left, "%zu bytes of memory are missing", left - free_memory());
}

/* ---- products --------------------------------------------------------------------------- */

/* A matrix of several parts for the device; the reference gets the values after conversion to the device's type, but
 * those of quantized parts as they are. */
class weights
{
  public:
    lazy_matrix gpu = {}, plain = {}, rounded = {}; /* rounded: all values are, to the device's type */

    weights(const rig &r, int n_parts, int rows, int cols, bool mixed, bool biased)
        : weights(r, r.stored, n_parts, rows, cols, mixed, biased)
    {
    }
    weights(const rig &r, lazy_dtype stored, int n_parts, int rows, int cols, bool mixed, bool biased) : s(r.gpu)
    {
        gpu.cols = cols;
        gpu.n_parts = n_parts;
        for (int i = 0; i < n_parts; i++) {
            lazy_dtype type = type_of(r, stored, i, cols, mixed);
            int part_rows = rows + i;
            size_t n = (size_t)part_rows * (size_t)cols;
            parts[i] = random_weights(type, n);
            floats part = weights_of(type, parts[i], n), narrow = widened(r.type, narrowed(r.type, part));
            narrow_values.insert(narrow_values.end(), narrow.begin(), narrow.end());
            if (lazy_is_quantized(type)) narrow = part;
            values.insert(values.end(), narrow.begin(), narrow.end());
            gpu.part[i] = { parts[i].data(), part_rows, type };
            gpu.rows += part_rows;
        }
        plain = gpu;
        plain.part[0] = { values.data(), gpu.rows, LAZY_F32 };
        plain.n_parts = 1;
        if (biased) {
            bias = random_values(LAZY_F32, (size_t)gpu.rows);
            on_gpu = std::make_unique<input>(s, bias);
            gpu.bias = on_gpu->as<float>();
            plain.bias = bias.data();
        }
        rounded = plain;
        rounded.part[0].data = narrow_values.data();
        did(s, "bind", s.ops->bind(s.backend, &gpu, 1, &s.err));
    }
    ~weights() { s.ops->unbind(s.backend, &gpu); }
    weights(const weights &) = delete;

  private:
    side s;
    bytes parts[LAZY_MAX_PARTS];
    floats values, narrow_values, bias;
    std::unique_ptr<input> on_gpu;

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
    weights w(r, p.parts, p.rows, p.cols, p.mixed, p.biased);
    size_t n = (size_t)p.n, cols = (size_t)p.cols, rows = (size_t)w.gpu.rows, skipped = (size_t)p.skipped;
    floats x = random_values(r.type, (skipped + n) * cols), want = random_values(r.type, n * rows);
    bytes start(skipped * rows * r.width(), 0xff), before = narrowed(r.type, want);
    if (!p.accumulate) before.assign(before.size(), 0xff);
    start.insert(start.end(), before.begin(), before.end());
    input on_gpu(r.gpu, narrowed(r.type, x));
    output y(r.gpu, start);

    did(r.gpu, "matmul",
        r.gpu.ops->matmul(r.gpu.stream, y.at(skipped * rows * r.width()), on_gpu.at(skipped * cols * r.width()), p.n,
                          &w.gpu, p.accumulate, &r.gpu.err));
    r.plain.ops->matmul(r.plain.stream, want.data(), x.data() + skipped * cols, p.n, &w.plain, p.accumulate, nullptr);
    bytes got = y.read();
    bytes::iterator first = got.begin() + (long)(skipped * rows * r.width());
    check(std::all_of(got.begin(), first, [](unsigned char byte) { return byte == 0xff; }), "wrote before its output");
    compare(widened(r.type, bytes(first, got.end())), want, precisions[r.type].of_activations, TERM);
}

static void test_logits(const rig &r, int n, int rows, int cols, bool mixed)
{
    now("%s logits n %d, rows %d, cols %d, cap %g%s", r.name(), n, rows, cols, r.config.logit_cap,
        mixed ? ", mixed" : "");
    weights w(r, 1, rows, cols, mixed, false);
    floats x = random_values(r.type, (size_t)(n * cols)), want((size_t)(n * rows));
    input on_gpu(r.gpu, narrowed(r.type, x));
    output y(r.gpu, want.size() * sizeof(float));
    did(r.gpu, "logits", r.gpu.ops->logits(r.gpu.stream, y.as<float>(), on_gpu.at(), n, &w.gpu, &r.gpu.err));
    const lazy_matrix *plain = n > LAZY_GEMV_BLOCK_ROWS ? &w.rounded : &w.plain;
    r.plain.ops->logits(r.plain.stream, want.data(), x.data(), n, plain, nullptr);
    compare(widened(LAZY_F32, y.read()), want, precisions[r.type].of_f32, TERM);
}

static void test_gated(rig &r, int n, int ffn, int cols, bool mixed, bool gelu)
{
    if (mixed) ffn = (ffn + 2) / 3 * 3;
    now("%s gated n %d, ffn %d, cols %d%s%s", r.name(), n, ffn, cols, mixed ? ", mixed" : "", gelu ? ", GELU" : "");
    r.config.gelu = gelu;
    weights w(r, mixed ? 3 : 1, mixed ? 2 * ffn / 3 - 1 : 2 * ffn, cols, mixed, n % 2);
    floats x = random_values(r.type, (size_t)(n * cols)), want((size_t)(n * ffn));
    input on_gpu(r.gpu, narrowed(r.type, x));
    output y(r.gpu, want.size() * r.width());
    did(r.gpu, "gated", r.gpu.ops->gated(r.gpu.stream, y.at(), on_gpu.at(), n, &w.gpu, &r.gpu.err));
    r.plain.ops->gated(r.plain.stream, want.data(), x.data(), n, &w.plain, nullptr);
    compare(widened(r.type, y.read()), want, precisions[r.type].of_activations, TERM);
}

/* Weights of one layer's experts, as `weights` has those of one matrix. */
class expert_weights
{
  public:
    lazy_experts gpu = {}, plain = {};

    expert_weights(const rig &r, int n, int d, int ffn) : s(r.gpu), router(r, r.type, 1, n, d, false, false)
    {
        for (int e = 0; e < n; e++) {
            lazy_dtype type = r.stored != r.type && n % 2 && e == 1 ? LAZY_F16 : r.stored;
            for (auto [parts, rows, cols] : { std::tuple(&gate_up, 2 * ffn, d), std::tuple(&down, d, ffn) }) {
                size_t size = (size_t)rows * (size_t)cols;
                stored.push_back(random_weights(type, size));
                kept.push_back(weights_of(type, stored.back(), size));
                lazy_matrix matrix = {};
                matrix.n_parts = 1;
                matrix.rows = rows;
                matrix.cols = cols;
                matrix.part[0] = { stored.back().data(), rows, type };
                parts->gpu.push_back(matrix);
                matrix.part[0] = { kept.back().data(), rows, LAZY_F32 };
                parts->plain.push_back(matrix);
            }
        }
        for (both *parts : { &gate_up, &down }) did(s, "bind", s.ops->bind(s.backend, parts->gpu.data(), n, &s.err));
        gpu = { router.gpu, gate_up.gpu.data(), down.gpu.data() };
        plain = { router.plain, gate_up.plain.data(), down.plain.data() };
    }
    ~expert_weights()
    {
        for (both *parts : { &gate_up, &down }) s.ops->unbind(s.backend, parts->gpu.data());
    }
    expert_weights(const expert_weights &) = delete;

  private:
    struct both {
        std::vector<lazy_matrix> gpu, plain;
    };
    side s;
    weights router;
    both gate_up, down;
    std::deque<floats> kept;
    std::deque<bytes> stored;
};

static void test_mix_experts(rig &r, int n, int n_experts, int k, int d, bool accumulate)
{
    now("%s mix_experts n %d, %d of %d, d %d%s", r.name(), n, k, n_experts, d, accumulate ? ", accumulated" : "");
    r.config.experts_per_token = k;
    r.config.normed_experts = k % 2;
    expert_weights w(r, n_experts, d, r.config.expert_ffn);
    floats x = random_values(r.type, (size_t)(n * d)), want = random_values(r.type, x.size());
    input on_gpu(r.gpu, narrowed(r.type, x));
    output y(r.gpu, accumulate ? narrowed(r.type, want) : bytes(x.size() * r.width(), 0xff));
    did(r.gpu, "mix_experts",
        r.gpu.ops->mix_experts(r.gpu.stream, y.at(), on_gpu.at(), n, &w.gpu, accumulate, &r.gpu.err));
    r.plain.ops->mix_experts(r.plain.stream, want.data(), x.data(), n, &w.plain, accumulate, nullptr);
    compare(widened(r.type, y.read()), want, precisions[r.type].of_activations, TERM);
}

/* A router's NaN or Inf makes the row NaN, and the experts chosen are some all the same. */
static void test_spoilt_router(rig &r, int n, float value)
{
    now("%s mix_experts n %d, %g in a row", r.name(), n, value);
    r.config.experts_per_token = 2;
    expert_weights w(r, 3, 8, r.config.expert_ffn);
    floats x = random_values(r.type, (size_t)(n * 8));
    x[3] = value;
    input on_gpu(r.gpu, narrowed(r.type, x));
    output y(r.gpu, bytes(x.size() * r.width(), 0));
    did(r.gpu, "mix_experts", r.gpu.ops->mix_experts(r.gpu.stream, y.at(), on_gpu.at(), n, &w.gpu, false, &r.gpu.err));
    floats got = widened(r.type, y.read());
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
    weights table(r, mixed ? LAZY_MAX_PARTS : 1, 20, cols, mixed, false);
    ints ids((size_t)n);
    for (int32_t &id : ids) id = random_int(0, table.gpu.rows - 1);
    ids[0] = table.gpu.rows - 1;
    floats want((size_t)(n * cols));
    input on_gpu(r.gpu, ids);
    output x(r.gpu, want.size() * r.width());
    r.config.embedding_scale = scale;
    did(r.gpu, "embed", r.gpu.ops->embed(r.gpu.stream, x.at(), on_gpu.as<int32_t>(), n, &table.gpu, &r.gpu.err));
    r.config.embedding_scale = widened(r.type, narrowed(r.type, { scale }))[0];
    r.plain.ops->embed(r.plain.stream, want.data(), ids.data(), n, &table.plain, nullptr);
    r.config.embedding_scale = 1;
    check(x.read() == narrowed(r.type, want), "other values than the table's");
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
    weights largest(r, 1, pick({ 1, 5, 9, 140 }), cols, false, false);
    did(r.gpu, "reserve", r.gpu.ops->reserve(r.gpu.stream, 40, 40, &r.gpu.err));
    for (int n : quick ? ints{ 1, 6, 20 } : ints{ 1, 2, 4, 5, 16, 17, 40 }) {
        test_matmul(r, { n, random_int(1, 3), random_int(1, 20), cols, ++round % 2 > 0, n % 3 > 0, n % 4 > 1, 1 });
        test_logits(r, n, random_int(1, quick ? 200 : 300), cols, false);
        test_gated(r, n, random_int(1, config.ffn), cols, round % 2 == 0, n % 2);
        test_embed(r, n, cols, false, n % 2 ? 1.0f : 5.656854f);
        test_mix_experts(r, n, 3 + round % 2, 2, cols, round % 2);
    }
}

/* ---- rows ------------------------------------------------------------------------------- */

static void test_rmsnorm(const rig &r, int n, int d, float limit, bool accumulate = false)
{
    now("%s rmsnorm n %d, d %d, of values up to %g%s", r.name(), n, d, limit, accumulate ? ", accumulated" : "");
    floats x = random_values(r.type, (size_t)(n * d), limit), weight = random_values(LAZY_F32, (size_t)d),
           want = random_values(r.type, x.size());
    input on_gpu(r.gpu, narrowed(r.type, x)), factors(r.gpu, weight);
    output y(r.gpu, accumulate ? narrowed(r.type, want) : bytes(x.size() * r.width(), 0xff));
    did(r.gpu, "rmsnorm",
        r.gpu.ops->rmsnorm(r.gpu.stream, y.at(), on_gpu.at(), n, d, factors.as<float>(), 1e-5f, accumulate,
                           &r.gpu.err));
    r.plain.ops->rmsnorm(r.plain.stream, want.data(), x.data(), n, d, weight.data(), 1e-5f, accumulate, nullptr);
    compare(widened(r.type, y.read()), want, precisions[r.type].of_activations);
}

static void test_layer_norm(rig &r, int n, int d)
{
    r.config.layer_norm = true;
    test_rmsnorm(r, n, d, 3, false);
    r.config.layer_norm = false;
}

/* The same bits as rmsnorm's, and the layer is noted if a value is NaN or Inf, unless an earlier one is. */
static void test_checked_rmsnorm(const rig &r, int n, int d, float value, int noted, int layer)
{
    now("%s checked_rmsnorm n %d, d %d, %g, %d noted, layer %d", r.name(), n, d, value, noted, layer);
    floats x = random_values(r.type, (size_t)(n * d)), weight = random_values(LAZY_F32, (size_t)d);
    x[(size_t)random_int(0, n * d - 1)] = value;
    input on_gpu(r.gpu, narrowed(r.type, x)), factors(r.gpu, weight);
    bytes unwritten(x.size() * r.width(), 0xff);
    output y(r.gpu, unwritten), same(r.gpu, unwritten), first_bad(r.gpu, bytes_of(ints{ noted }));
    did(r.gpu, "checked_rmsnorm",
        r.gpu.ops->checked_rmsnorm(r.gpu.stream, y.at(), on_gpu.at(), n, d, factors.as<float>(), 1e-5f, layer,
                                   first_bad.as<int32_t>(), &r.gpu.err));
    did(r.gpu, "rmsnorm",
        r.gpu.ops->rmsnorm(r.gpu.stream, same.at(), on_gpu.at(), n, d, factors.as<float>(), 1e-5f, false, &r.gpu.err));
    int32_t got = ints_of(first_bad.read())[0], want = isfinite(value) ? noted : std::min(noted, layer);
    check(got == want, "%d instead of %d", got, want);
    check(y.read() == same.read(), "other bits than rmsnorm");
}

/* wide, late: the norms are over all heads, or behind RoPE; layer_norm: they subtract the mean, with weights for each
 * head */
static void test_rotate(rig &r, int n, bool q_normed, bool k_normed, float limit, bool wide = false, bool late = false,
                        bool layer_norm = false)
{
    lazy_config &c = r.config;
    c.layer_norm = layer_norm;
    c.wide_qk_norm = wide;
    c.late_qk_norm = late;
    now("%s rotate n %d, head_dim %d, heads %d to %d%s%s%s%s, of values up to %g", r.name(), n, c.head_dim, c.n_heads,
        c.n_kv_heads, q_normed ? ", q normed" : "", k_normed ? ", k normed" : "", wide ? ", wide" : "",
        late         ? ", late"
        : layer_norm ? ", layer norm"
                     : "",
        limit);
    int length = 2 * n + 3, capacity = length + 4;
    size_t d = (size_t)c.head_dim, width = (size_t)(c.n_heads + 2 * c.n_kv_heads) * d, q_width = (size_t)c.n_heads * d;
    size_t cache_size = (size_t)(c.n_kv_heads * capacity) * d;
    ints rows = random_positions(n, length);
    floats qkv = random_values(r.type, (size_t)n * width, limit), k = random_values(r.type, cache_size),
           v = random_values(r.type, cache_size);
    floats q_rope = random_values(LAZY_F32, (size_t)length * d), k_rope = random_values(LAZY_F32, (size_t)length * d),
           q_norm = random_values(LAZY_F32, wide || layer_norm ? q_width : d),
           k_norm = random_values(LAZY_F32, wide || layer_norm ? (size_t)c.n_kv_heads * d : d);
    input positions(r.gpu, rows), q_angles(r.gpu, q_rope), k_angles(r.gpu, k_rope), of_q(r.gpu, q_norm),
        of_k(r.gpu, k_norm);
    output got_qkv(r.gpu, narrowed(r.type, qkv)), got_k(r.gpu, narrowed(r.type, k)), got_v(r.gpu, narrowed(r.type, v));
    did(r.gpu, "rotate",
        r.gpu.ops->rotate(r.gpu.stream, got_qkv.at(), positions.as<int32_t>(), n, { got_k.at(), got_v.at(), capacity },
                          q_angles.as<float>(), k_angles.as<float>(), q_normed ? of_q.as<float>() : nullptr,
                          k_normed ? of_k.as<float>() : nullptr, 1e-6f, &r.gpu.err));
    floats before = k;
    r.plain.ops->rotate(r.plain.stream, qkv.data(), rows.data(), n, { k.data(), v.data(), capacity }, q_rope.data(),
                        k_rope.data(), q_normed ? q_norm.data() : nullptr, k_normed ? k_norm.data() : nullptr, 1e-6f,
                        nullptr);

    floats all = widened(r.type, got_qkv.read()), q, want_q, new_k = widened(r.type, got_k.read());
    for (size_t row = 0; row < (size_t)n; row++) {
        q.insert(q.end(), all.begin() + (long)(row * width), all.begin() + (long)(row * width + q_width));
        want_q.insert(want_q.end(), qkv.begin() + (long)(row * width), qkv.begin() + (long)(row * width + q_width));
    }
    compare(q, want_q, precisions[r.type].of_activations);
    compare(new_k, k, precisions[r.type].of_activations);
    check(widened(r.type, got_v.read()) == v, "v: other values than those given, or in other slots");
    bool untouched = true;
    for (size_t i = 0; i < cache_size; i++) {
        int slot = (int)(i / d) % capacity;
        untouched = untouched && (std::binary_search(rows.begin(), rows.end(), slot) || new_k[i] == before[i]);
    }
    check(untouched, "a slot of k that was not meant has changed");
}

static void test_surprisal(const rig &r, int n, int vocab)
{
    now("%s surprisal n %d, vocab %d", r.name(), n, vocab);
    floats logits = random_values(LAZY_F32, (size_t)(n * vocab), 30), want((size_t)n);
    ints ids((size_t)n);
    for (int32_t &id : ids) id = random_int(0, vocab - 1);
    input wanted(r.gpu, ids);
    output on_gpu(r.gpu, bytes_of(logits)), surprisal(r.gpu, want.size() * sizeof(float)),
        beside_nan(r.gpu, sizeof(float));
    did(r.gpu, "surprisal",
        r.gpu.ops->surprisal(r.gpu.stream, surprisal.as<float>(), on_gpu.as<float>(), n, vocab, wanted.as<int32_t>(),
                             &r.gpu.err));
    floats kept = logits;
    r.plain.ops->surprisal(r.plain.stream, want.data(), kept.data(), n, vocab, ids.data(), nullptr);
    /* log(sum) of an f32 sum of at least 1: exact to a few 1e-7, however small the surprisal of a likely token is. */
    compare(widened(LAZY_F32, surprisal.read()), want, 1e-6, 1);

    for (float bad : { NAN, INFINITY }) {
        logits[(size_t)random_int(0, vocab - 1)] = bad;
        output damaged(r.gpu, bytes_of(logits));
        did(r.gpu, "surprisal",
            r.gpu.ops->surprisal(r.gpu.stream, beside_nan.as<float>(), damaged.as<float>(), 1, vocab,
                                 wanted.as<int32_t>(), &r.gpu.err));
        check(!std::isfinite(widened(LAZY_F32, beside_nan.read())[0]), "a number beside a logit of %g", bad);
    }
}

/* Odd rounds: few different values, so that most are equal. Even rounds: values of large magnitude, all different. */
static void test_argmax(const rig &r, int vocab)
{
    for (int round = 0; round < 12; round++) {
        now("%s argmax of %d, round %d", r.name(), vocab, round);
        floats logits = random_values(LAZY_F32, (size_t)vocab, round % 2 ? 3 : -1e30f);
        for (float &logit : logits) logit = round % 2 ? truncf(logit) : logit;
        if (round % 4 == 3)
            for (float &logit : logits) logit = -fabsf(logit);
        for (int bad = 0; bad < round - 8; bad++)
            logits[(size_t)random_int(0, vocab - 1)] = bad == 0 ? -INFINITY : bad == 1 ? INFINITY : NAN;
        input on_gpu(r.gpu, logits);
        output id(r.gpu, sizeof(int32_t));
        did(r.gpu, "argmax", r.gpu.ops->argmax(r.gpu.stream, id.as<int32_t>(), on_gpu.as<float>(), vocab, &r.gpu.err));
        int32_t got = ints_of(id.read())[0], want;
        r.plain.ops->argmax(r.plain.stream, &want, logits.data(), vocab, nullptr);
        check(got == want, "%d instead of %d", got, want);
    }
}

static void test_rows(rig &r)
{
    const float largest[] = { FLT_MAX, 65504.0f, 0x1.fep127f }; /* indexed by lazy_dtype */
    for (int n : { 1, 5, 33 })
        for (float scale : { 1.0f, 33.94f }) test_embed(r, n, random_cols(n / 4), n > 1, scale);
    for (int d : { 1, 2, 31, 129, 257, 2 * random_int(100, 300) + 1 }) {
        test_rmsnorm(r, random_int(1, 4), d, 1);
        test_rmsnorm(r, 2, d, huge(r.type));
        test_rmsnorm(r, 3, d, 1, true);
        if (d > 2) test_layer_norm(r, 3, d); /* two values may differ from their mean by its rounding alone */
    }
    for (int d : { 8, 8 * random_int(2, 500), 8192,
                   8200 }) { /* whole packs; the last in f32, and in 16 bits, do not fit into registers */
        test_rmsnorm(r, 2, d, 1, d % 16 == 0);
        test_rmsnorm(r, 1, d, huge(r.type), true);
        test_layer_norm(r, 2, d);
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
 * NaN. */
struct scene {
    int n, m, length, capacity;
    ints in_play, rows;
    floats qkv, k, v;

    scene(const rig &r, int of_n, int of_m, int of_length)
        : n(of_n), m(of_m), length(of_length), capacity(of_length + 3)
    {
        const lazy_config &c = r.config;
        size_t d = (size_t)c.head_dim, slots = (size_t)(c.n_kv_heads * capacity);
        in_play = random_positions(m, length);
        rows = random_rows(n, in_play);
        qkv = random_values(r.type, (size_t)(n * (c.n_heads + 2 * c.n_kv_heads)) * d,
                            4); /* large queries, so that the softmax is peaked */
        k = random_values(r.type, slots * d);
        v = random_values(r.type, slots * d);
        for (size_t slot = 0; slot < slots; slot++) {
            if (std::binary_search(in_play.begin(), in_play.end(), (int)slot % capacity)) continue;
            std::fill_n(k.begin() + (long)(slot * d), d, NAN);
            std::fill_n(v.begin() + (long)(slot * d), d, NAN);
        }
    }
    lazy_attending attending(int window)
    {
        return { qkv.data(), rows.data(), n, { k.data(), v.data(), capacity }, in_play.data(), m, window };
    }
};

/* A scene in device memory. */
struct staged_scene {
    input qkv, k, v, rows, in_play;
    int capacity;

    staged_scene(const rig &r, const scene &t)
        : qkv(r.gpu, narrowed(r.type, t.qkv)), k(r.gpu, narrowed(r.type, t.k)), v(r.gpu, narrowed(r.type, t.v)),
          rows(r.gpu, t.rows), in_play(r.gpu, t.in_play), capacity(t.capacity)
    {
        char waited; /* waits for the uploads, because other streams read the inputs */
        did(r.gpu, "download", r.gpu.ops->download(r.gpu.stream, &waited, in_play.at(), 1, &r.gpu.err));
    }
    lazy_attending attending(const scene &t, int window) const
    {
        lazy_kv kv = { const_cast<void *>(k.at()), const_cast<void *>(v.at()), capacity };
        return { qkv.at(), rows.as<int32_t>(), t.n, kv, in_play.as<int32_t>(), t.m, window };
    }
};

/* Overrides the device's number of multiprocessors, which determines the number of key chunks. */
class processor_override
{
  public:
    processor_override(const rig &r, int processors)
        : cuda(reinterpret_cast<lazy_cuda *>(r.gpu.backend)), own(cuda->processors)
    {
        cuda->processors = processors;
    }
    ~processor_override() { cuda->processors = own; }
    processor_override(const processor_override &) = delete;

  private:
    lazy_cuda *cuda;
    int own;
};

static floats attention_of(const rig &r, const scene &t, const staged_scene &staged, int window, int processors)
{
    processor_override override_in_scope(r, processors);
    side s =
        stream_of(r.gpu.backend, &r.config, t.n, t.m); /* its scratch has the size for that number of multiprocessors */
    output y(s, (size_t)(t.n * r.config.n_heads * r.config.head_dim) * r.width());
    const lazy_attending a = staged.attending(t, window);
    did(s, "attention", s.ops->attention(s.stream, y.at(), &a, &s.err));
    floats got = widened(r.type, y.read());
    s.ops->stream_close(s.stream);
    return got;
}

static floats plain_attention_of(const rig &r, scene &t, int window)
{
    floats y((size_t)(t.n * r.config.n_heads * r.config.head_dim));
    const lazy_attending a = t.attending(window);
    r.plain.ops->attention(r.plain.stream, y.data(), &a, nullptr);
    return y;
}

#ifdef LAZY_CUDA_ON_CPU
extern "C" unsigned long long cuda_on_cpu_launches;
#else
static unsigned long long cuda_on_cpu_launches; /* not counted on a GPU */
#endif

/* s: a stream of r.gpu's backend. NaNs must be where the reference has them. */
static void test_scores(const rig &r, const side &s, scene &t, const staged_scene &staged, int window, int queries,
                        int first_asking, lazy_pooling pooling)
{
    now("%s scores n %d, m %d of %d, head_dim %d, heads %d to %d, window %d, cap %g, queries %d, pooling %d, "
        "new from %d",
        r.name(), t.n, t.m, t.length, r.config.head_dim, r.config.n_heads, r.config.n_kv_heads, window,
        r.config.attention_cap, queries, pooling, first_asking);
    floats want((size_t)t.m), got, got_numbers, want_numbers;
    const lazy_attending on_gpu = staged.attending(t, window), plain = t.attending(window);
    r.plain.ops->scores(r.plain.stream, want.data(), &plain, queries, pooling, first_asking, nullptr);
    output first(s, want.size() * sizeof(float)), again(s, want.size() * sizeof(float));
    unsigned long long launches = 0;
    for (const output *scores : { &first, &again }) {
        launches = cuda_on_cpu_launches;
        did(s, "scores", s.ops->scores(s.stream, scores->as<float>(), &on_gpu, queries, pooling, first_asking, &s.err));
        launches = cuda_on_cpu_launches - launches; /* the first time the ranges of the rows are found too */
    }
    check(launches <= 3, "%llu launches", launches);
    got = widened(LAZY_F32, first.read());
    check(again.read() == bytes_of(got), "other bits the second time");
    double sum = 0;
    bool same = true;
    for (size_t j = 0; j < want.size(); j++) {
        same = same && isnan(got[j]) == isnan(want[j]);
        sum += got[j];
        if (isnan(want[j])) continue;
        got_numbers.push_back(got[j]);
        want_numbers.push_back(want[j]);
    }
    check(same, "NaNs elsewhere");
    compare(got_numbers, want_numbers, precisions[r.type].of_f32);
    check(pooling == LAZY_POOLING_MAX || isnan(sum) || fabs(sum - 1) < 1e-5, "the sum is %.8g, not 1", sum);
}

static const int NO_WINDOW = INT32_MAX;

static void test_attention(const rig &r, int n, int m, int length, int window = NO_WINDOW)
{
    scene t(r, n, m, length);
    staged_scene staged(r, t);
    floats want = plain_attention_of(r, t, window);
    ints devices = n <= 128 && m > 128 ? ints{ 1, 132 } : ints{ 132 };
    for (int processors : devices) {
        now("%s attention n %d, m %d of %d, head_dim %d, heads %d to %d, window %d, cap %g, on %d processors", r.name(),
            n, m, length, r.config.head_dim, r.config.n_heads, r.config.n_kv_heads, window, r.config.attention_cap,
            processors);
        compare(attention_of(r, t, staged, window, processors), want, precisions[r.type].of_activations);
    }
    test_scores(r, r.gpu, t, staged, window, random_int(1, 5), pick(t.rows),
                random_int(0, 1) ? LAZY_POOLING_MAX : LAZY_POOLING_MEAN);
}

/* Scores by few and many rows, all or some of which are query rows; the last scene has a NaN in one key. The scratch is
 * as large as the pass needs. */
static void test_query_rows(lazy_dtype type, int n_heads, int n_kv_heads, int head_dim)
{
    rig r(type, config_of(n_heads, n_kv_heads, head_dim), MAX_ROWS, MAX_TOKENS);
    for (int queries : { 1, 2, 17, 32, 64, 100, 20 }) {
        if (quick && (queries == 64 || queries == 17)) continue;
        int n = queries + random_int(0, 20), m = random_int(std::max(n, 130), quick ? 170 : MAX_TOKENS);
        scene t(r, n, m, m + random_int(0, 60));
        if (queries == 20)
            t.k[(size_t)(random_int(0, n_kv_heads - 1) * t.capacity + pick(t.in_play)) * (size_t)head_dim] = NAN;
        staged_scene staged(r, t);
        side s = stream_of(r.gpu.backend, &r.config, n, m);
        for (int window : { NO_WINDOW, random_int(1, m) })
            for (int asking : { 1, random_int(1, n), n }) {
                lazy_pooling pooling = random_int(0, 1) ? LAZY_POOLING_MAX : LAZY_POOLING_MEAN;
                test_scores(r, s, t, staged, window, queries, t.rows[(size_t)(n - asking)], pooling);
            }
        s.ops->stream_close(s.stream);
    }
}

/* A NaN in one key makes the outputs NaN for the rows that attend to it, in the query heads of its key head, and no
 * others. */
static void test_bad_key(const rig &r, int n, int m)
{
    const lazy_config &c = r.config;
    scene t(r, n, m, m + 40);
    size_t d = (size_t)c.head_dim;
    int bad = t.in_play[(size_t)random_int(m / 4, 3 * m / 4)], g = random_int(0, c.n_kv_heads - 1),
        group = c.n_heads / c.n_kv_heads;
    t.k[(size_t)(g * t.capacity + bad) * d + (size_t)random_int(0, c.head_dim - 1)] = NAN;
    staged_scene staged(r, t);
    int window = random_int(0, 1) ? NO_WINDOW : random_int(1, m);
    floats want = plain_attention_of(r, t, window);
    for (int processors : { 1, 132 }) {
        now("%s attention to a NaN n %d, m %d, head_dim %d, heads %d to %d, window %d, on %d processors", r.name(), n,
            m, c.head_dim, c.n_heads, c.n_kv_heads, window, processors);
        floats got = attention_of(r, t, staged, window, processors), others, wanted;
        bool spread = true;
        for (size_t i = 0; i < got.size(); i++) {
            int row = (int)(i / d) / c.n_heads, head = (int)(i / d) % c.n_heads;
            if (t.rows[(size_t)row] >= bad && bad > t.rows[(size_t)row] - window && head / group == g) {
                spread = spread && isnan(got[i]);
                continue;
            }
            others.push_back(got[i]);
            wanted.push_back(want[i]);
        }
        check(spread, "the NaN was lost");
        compare(others, wanted, precisions[r.type].of_activations);
    }
}

/* Positions that `filter` and `select` change in memory that attention has read before: it must not go on with what it
 * knew of them. Nothing else may run on the stream in between, so all memory is prepared before. */
static void test_other_positions(const rig &r)
{
    const side &gpu = r.gpu;
    const int N = 3, M = 40, LENGTH = 90, SETS = 4;
    scene t(r, N, M, LENGTH);
    t.rows = { 30, 60, LENGTH - 1 };
    t.k = random_values(r.type, t.k.size());
    t.v = random_values(r.type, t.v.size());
    ints all((size_t)LENGTH);
    for (int i = 0; i < LENGTH; i++) all[(size_t)i] = i;
    std::vector<ints> sets;
    std::vector<std::unique_ptr<input>> depths, scores;
    for (int i = 0; i < SETS; i++) {
        sets.push_back(t.rows);
        for (int32_t position : random_positions(M + 5, LENGTH))
            if ((int)sets.back().size() < M && !std::count(t.rows.begin(), t.rows.end(), position))
                sets.back().push_back(position);
        std::sort(sets.back().begin(), sets.back().end());
        ints depth((size_t)LENGTH, 1);
        floats score((size_t)LENGTH, 0);
        for (int32_t position : sets.back()) depth[(size_t)position] = 7, score[(size_t)position] = 1;
        depths.push_back(std::make_unique<input>(gpu, depth));
        scores.push_back(std::make_unique<input>(gpu, score));
    }
    input qkv(gpu, narrowed(r.type, t.qkv)), k(gpu, narrowed(r.type, t.k)), v(gpu, narrowed(r.type, t.v)),
        rows(gpu, t.rows);
    input positions(gpu, all), free(gpu, bytes((size_t)LENGTH, LAZY_PRUNABLE));
    output in_play(gpu, (size_t)M * sizeof(int32_t)),
        y(gpu, (size_t)(N * r.config.n_heads * r.config.head_dim) * r.width());
    lazy_kv kv = { const_cast<void *>(k.at()), const_cast<void *>(v.at()), t.capacity };
    for (int i = 0; i < SETS; i++) {
        int m = (int)sets[(size_t)i].size();
        t.in_play = sets[(size_t)i];
        if (i < SETS / 2) {
            did(gpu, "filter",
                gpu.ops->filter(gpu.stream, in_play.as<int32_t>(), &m, positions.as<int32_t>(), LENGTH,
                                depths[(size_t)i]->as<int32_t>(), 7, 7, &gpu.err));
        } else {
            did(gpu, "select",
                gpu.ops->select(gpu.stream, in_play.as<int32_t>(), positions.as<int32_t>(),
                                scores[(size_t)i]->as<float>(), LENGTH, free.as<uint8_t>(), m, &gpu.err));
        }
        for (int window : { NO_WINDOW, 20 }) {
            now("%s attention after positions changed, set %d, window %d", r.name(), i, window);
            const lazy_attending a = { qkv.at(), rows.as<int32_t>(), N, kv, in_play.as<int32_t>(), m, window };
            did(gpu, "attention", gpu.ops->attention(gpu.stream, y.at(), &a, &gpu.err));
            floats want((size_t)(N * r.config.n_heads * r.config.head_dim));
            const lazy_attending plain = { t.qkv.data(), t.rows.data(), N, t.attending(window).kv, t.in_play.data(), m,
                                           window };
            r.plain.ops->attention(r.plain.stream, want.data(), &plain, nullptr);
            compare(widened(r.type, y.read()), want, precisions[r.type].of_activations);
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
    test_rotate(r, 2, true, true, 1, true);
    test_rotate(r, 2, true, true, 1, false, true);
    test_rotate(r, 3, true, thorough, 1, false, false, true);
    r.config.layer_norm = false;
    if (thorough) test_rotate(r, 2, true, true, huge(type));
    r.config.wide_qk_norm = r.config.late_qk_norm = false;
}

static void test_all_heads(lazy_dtype type)
{
    const ints dims = quick ? ints{ 16, 128 } /* test_engine has 64 */ : ints{ 16, 40, 64, 80, 96, 128, 256, 512 },
               groups = { 1, 3, 8 };
    int thorough_group = random_int(0, 2);
    for (int head_dim : dims) {
        for (size_t i = 0; i < groups.size(); i++)
            if (!quick || (int)i == thorough_group) test_heads(type, head_dim, groups[i], (int)i == thorough_group);
        thorough_group = (thorough_group + 1) % 3;
    }
}

/* Chunks that span several groups of keys, and nearly the maximum number of chunks. */
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
#ifdef LAZY_CUDA_ON_CPU
    setenv("LAZYLLM_CUDA_FAKE_CAPABILITY", "90", 1);
#endif
    const ints dims = quick ? ints{ 64 } : ints{ 64, 128 };
    for (int head_dim : dims) {
        int group = pick({ 1, 2, 3 }), n_kv_heads = quick || group == 3 ? 1 : 2;
        lazy_config config = config_of(n_kv_heads * group, n_kv_heads, head_dim);
        config.attention_cap = 0;
        rig r(type, config, 300, 500);
        bool used = reinterpret_cast<lazy_cuda *>(r.gpu.backend)->wgmma;
        printf("%s\n", r.gpu.backend->variant);
#ifdef LAZY_CUDA_ON_CPU
        const bool must = true;
#else
        const bool must = !portable; /* asked for by name, on a device that has it */
#endif
        now("%s wgmma", r.name());
        check(!must || (used && strstr(r.gpu.backend->variant, ", wgmma")), "it is not used: %s",
              r.gpu.backend->variant);
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
#ifdef LAZY_CUDA_ON_CPU
    unsetenv("LAZYLLM_CUDA_FAKE_CAPABILITY");
#endif
}

/* ---- selection -------------------------------------------------------------------------- */

static void test_smooth(const rig &r, int m, int width)
{
    now("%s smooth m %d, width %d", r.name(), m, width);
    floats scores = random_values(LAZY_F32, (size_t)m), want(scores.size());
    input on_gpu(r.gpu, scores);
    output out(r.gpu, scores.size() * sizeof(float));
    did(r.gpu, "smooth", r.gpu.ops->smooth(r.gpu.stream, out.as<float>(), on_gpu.as<float>(), m, width, &r.gpu.err));
    r.plain.ops->smooth(r.plain.stream, want.data(), scores.data(), m, width, nullptr);
    check(widened(LAZY_F32, out.read()) == want, "other means than the reference's");
}

static void test_average(const rig &r, int m, int n)
{
    now("%s average of %d over m %d", r.name(), n, m);
    floats want((size_t)m);
    output mean(r.gpu, want.size() * sizeof(float));
    for (int i = 1; i <= n; i++) {
        floats scores = random_values(LAZY_F32, (size_t)m);
        input on_gpu(r.gpu, scores);
        did(r.gpu, "average", r.gpu.ops->average(r.gpu.stream, mean.as<float>(), on_gpu.as<float>(), m, i, &r.gpu.err));
        r.plain.ops->average(r.plain.stream, want.data(), scores.data(), m, i, nullptr);
    }
    check(widened(LAZY_F32, mean.read()) == want, "other means than the reference's");
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
    }
    return flags;
}

/* levels > 0: multiples of 2^-15 from 0 to levels 2^-15, so that sums are exact and many scores are equal. levels = 0:
 * arbitrary scores, one of them -0. */
static floats random_scores(int m, int levels)
{
    floats scores((size_t)m);
    for (float &score : scores)
        score = levels ? (float)random_int(0, levels) * 0x1p-15f : fabsf((float)random_bits()) * 0x1p-32f / (float)m;
    if (!levels) scores[(size_t)random_int(0, m - 1)] = -0.0f;
    return scores;
}

static void test_choice(const rig &r, const ints &in_play, const floats &scores, const std::vector<uint8_t> &flags,
                        int budget)
{
    const side &gpu = r.gpu;
    int m = (int)in_play.size(), n_kept = 0;
    for (int32_t position : in_play) n_kept += flags[(size_t)position] != LAZY_PRUNABLE;
    ints want((size_t)(n_kept + budget));
    r.plain.ops->select(r.plain.stream, want.data(), in_play.data(), scores.data(), m, flags.data(), budget, nullptr);
    input positions(gpu, in_play), on_gpu(gpu, scores), allowed(gpu, flags);
    output kept(gpu, want.size() * sizeof(int32_t));
    did(gpu, "select",
        gpu.ops->select(gpu.stream, kept.as<int32_t>(), positions.as<int32_t>(), on_gpu.as<float>(), m,
                        allowed.as<uint8_t>(), budget, &gpu.err));
    check(ints_of(kept.read()) == want, "other tokens than the reference's");
}

/* Scores whose sums are exact. */
static void test_mass(const rig &r, const ints &in_play, const floats &scores, const std::vector<uint8_t> &flags)
{
    int m = (int)in_play.size();
    input positions(r.gpu, in_play), on_gpu(r.gpu, scores), allowed(r.gpu, flags);
    for (double mass : { random_bits() / 4294967296.0, 0.9, 1.0 }) {
        int got = -1, want = -1;
        did(r.gpu, "mass",
            r.gpu.ops->mass(r.gpu.stream, &got, positions.as<int32_t>(), on_gpu.as<float>(), m, allowed.as<uint8_t>(),
                            mass, &r.gpu.err));
        r.plain.ops->mass(r.plain.stream, &want, in_play.data(), scores.data(), m, flags.data(), mass, nullptr);
        check(got == want, "mass %g: %d tokens, not %d", mass, got, want);
    }
}

static void test_select(const rig &r, int m, flagging how, int levels)
{
    int length = m + random_int(0, m), n_free = 0;
    ints in_play = random_positions(m, length);
    std::vector<uint8_t> flags = random_flags(how, length);
    floats scores = random_scores(m, levels);
    for (int32_t position : in_play) n_free += flags[(size_t)position] == LAZY_PRUNABLE;
    for (int budget : { 0, random_int(0, n_free), n_free }) {
        now("%s select m %d, flags %d, levels %d, %d of %d free", r.name(), m, how, levels, budget, n_free);
        test_choice(r, in_play, scores, flags, budget);
    }
    floats lowered = scores; /* half of them below 0 */
    std::sort(lowered.begin(), lowered.end());
    float middle = lowered[(size_t)m / 2];
    std::transform(scores.begin(), scores.end(), lowered.begin(), [&](float score) { return score - middle; });
    test_choice(r, in_play, lowered, flags, n_free / 2);
    now("%s mass of m %d, flags %d, levels %d", r.name(), m, how, levels);
    if (levels) test_mass(r, in_play, scores, flags);
}

/* NaN among the scores: the next op that waits for the device reports the first one, once. */
static void test_bad_scores(const rig &r, int m)
{
    const side &gpu = r.gpu;
    ints in_play = random_positions(m, 2 * m);
    floats scores = random_scores(m, 5), later = scores;
    int first = random_int(0, m - 1), layer = random_int(0, 90);
    scores[(size_t)first] = scores.back() = later.front() = NAN;
    now("%s NaN among the scores of %d after layer %d", r.name(), m, layer);
    input positions(gpu, in_play), bad(gpu, scores), also_bad(gpu, later),
        free(gpu, bytes((size_t)(2 * m), LAZY_PRUNABLE));
    output kept(gpu, (size_t)m * sizeof(int32_t));
    auto select = [&](const input &chosen_by, int after) {
        gpu.stream->layers_done = after + 1;
        did(gpu, "select",
            gpu.ops->select(gpu.stream, kept.as<int32_t>(), positions.as<int32_t>(), chosen_by.as<float>(), m,
                            free.as<uint8_t>(), m / 2, &gpu.err));
    };
    std::string words = "after layer " + std::to_string(layer) + ": the score of the token at position " +
                        std::to_string(in_play[(size_t)first]) + " is not a number";
    auto expect_error = [&](const char *op, int code) {
        check(code == LAZY_CHECKPOINT && strstr(gpu.err.message, words.c_str()), "%s: code %d, \"%s\"", op, code,
              gpu.err.message);
        gpu.err = {};
    };
    int32_t any;
    select(bad, layer);
    select(also_bad, layer + 1);
    expect_error("download", gpu.ops->download(gpu.stream, &any, positions.at(), sizeof any, &gpu.err));
    did(gpu, "the download after that", gpu.ops->download(gpu.stream, &any, positions.at(), sizeof any, &gpu.err));
    gpu.stream->layers_done = layer + 1;
    expect_error("mass", gpu.ops->mass(gpu.stream, &any, positions.as<int32_t>(), bad.as<float>(), m,
                                       free.as<uint8_t>(), 0.5, &gpu.err));
    gpu.stream->layers_done = 0;
    kept.read();
}

/* The shares of three layers, the largest of them, and what is remembered of it in a second pass over more tokens. */
static void test_pooling(const rig &r, int m, flagging how)
{
    now("%s pooling m %d, flags %d", r.name(), m, (int)how);
    int length = m + random_int(0, 50), capacity = length + random_int(0, 9), n_old = random_int(0, length);
    ints in_play = random_positions(m, length);
    std::vector<uint8_t> flags = random_flags(how, length);
    input positions(r.gpu, in_play), flagged(r.gpu, flags);
    floats shares(3 * (size_t)capacity), scores((size_t)m), known = random_values(LAZY_F32, (size_t)capacity);
    for (float &score : known) score = fabsf(score);
    output on_gpu(r.gpu, shares.size() * sizeof(float)), largest(r.gpu, scores.size() * sizeof(float)),
        remembered(r.gpu, bytes_of(known));
    for (int layer = 0; layer < 3; layer++) {
        floats raw = random_values(LAZY_F32, (size_t)m);
        for (float &score : raw) score = fabsf(score);
        input given(r.gpu, raw);
        size_t row = (size_t)layer * (size_t)capacity;
        did(r.gpu, "share",
            r.gpu.ops->share(r.gpu.stream, on_gpu.as<float>() + row, given.as<float>(), positions.as<int32_t>(), m,
                             flagged.as<uint8_t>(), &r.gpu.err));
        r.plain.ops->share(r.plain.stream, shares.data() + row, raw.data(), in_play.data(), m, flags.data(), nullptr);
    }
    did(r.gpu, "largest",
        r.gpu.ops->largest(r.gpu.stream, largest.as<float>(), on_gpu.as<float>(), 1, capacity, positions.as<int32_t>(),
                           m, false, &r.gpu.err));
    did(r.gpu, "largest",
        r.gpu.ops->largest(r.gpu.stream, largest.as<float>(), on_gpu.as<float>() + capacity, 2, capacity,
                           positions.as<int32_t>(), m, true, &r.gpu.err));
    r.plain.ops->largest(r.plain.stream, scores.data(), shares.data(), 3, capacity, in_play.data(), m, false, nullptr);
    float factor = random_int(0, 2) * 0.5f;
    did(r.gpu, "remember",
        r.gpu.ops->remember(r.gpu.stream, largest.as<float>(), remembered.as<float>(), n_old, length, factor,
                            positions.as<int32_t>(), m, &r.gpu.err));
    r.plain.ops->remember(r.plain.stream, scores.data(), known.data(), n_old, length, factor, in_play.data(), m,
                          nullptr);
    compare(widened(LAZY_F32, largest.read()), scores, 1e-6);
    compare(widened(LAZY_F32, remembered.read()), known, 1e-6);
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
    for (int m : sizes)
        for (int how = 0; how < FLAGGINGS; how++)
            for (int levels : { 0, random_int(1, 24) }) test_select(r, m, (flagging)how, levels);
    for (int m : { 1, 40, 600 }) test_bad_scores(r, m);
}

/* ---- bookkeeping ------------------------------------------------------------------------ */

static void test_depths(const rig &r, int n)
{
    const side &gpu = r.gpu;
    int length = n + random_int(0, n), value = random_int(0, 9), low = random_int(0, 5), high = random_int(low, 9);
    now("%s mark and filter n %d of %d, depths %d to %d", r.name(), n, length, low, high);
    ints rows = random_positions(n, length), positions = random_positions(random_int(1, length), length),
         depth((size_t)length);
    for (int32_t &layers : depth) layers = random_int(0, 9);
    input on_gpu(gpu, rows), candidates(gpu, positions);
    output marked(gpu, bytes_of(depth));
    did(gpu, "mark", gpu.ops->mark(gpu.stream, marked.as<int32_t>(), on_gpu.as<int32_t>(), n, value, &gpu.err));
    r.plain.ops->mark(r.plain.stream, depth.data(), rows.data(), n, value, nullptr);
    check(ints_of(marked.read()) == depth, "other depths than the reference's");

    ints want(positions.size());
    int n_want = -1, n_got = -1;
    r.plain.ops->filter(r.plain.stream, want.data(), &n_want, positions.data(), (int)positions.size(), depth.data(),
                        low, high, nullptr);
    want.resize((size_t)n_want);
    output found(gpu, want.size() * sizeof(int32_t));
    did(gpu, "filter",
        gpu.ops->filter(gpu.stream, found.as<int32_t>(), &n_got, candidates.as<int32_t>(), (int)positions.size(),
                        marked.as<int32_t>(), low, high, &gpu.err));
    check(n_got == n_want, "%d found, not %d", n_got, n_want);
    check(ints_of(found.read()) == want, "other positions than the reference's");
    output same(gpu, want.size() * sizeof(int32_t));
    did(gpu, "filter",
        gpu.ops->filter(gpu.stream, same.as<int32_t>(), nullptr, candidates.as<int32_t>(), (int)positions.size(),
                        marked.as<int32_t>(), low, high, &gpu.err));
    check(same.read() == found.read(), "other positions where their number is known");
}

/* Tens of thousands of tokens, in many blocks: most scores in one bucket of a histogram or in few, all equal, or below
 * 0; none, one, all but one or all are to be kept. Scores are multiples of 2^-30, so that sums are exact. */
static void test_many_tokens()
{
    const int MOST = quick ? 5000 : 70000;
    rig r(LAZY_F32, config_of(1, 1, 16), 1, MOST);
    enum { IN_ONE_EXPONENT, EQUAL, TWO_LEVELS, BELOW_0, ONE_AMONG_EQUALS, KINDS };
    for (int kind = 0; kind < KINDS; kind++) {
        int m = random_int(MOST / 2, MOST), length = m + random_int(0, m), level = random_int(1, 1 << 13);
        ints in_play = random_positions(m, length);
        floats scores((size_t)m);
        for (float &score : scores)
            score = (float)(kind == IN_ONE_EXPONENT ? random_int(1 << 13, (1 << 14) - 1)
                            : kind == TWO_LEVELS    ? level + random_int(0, 1)
                            : kind == BELOW_0       ? -random_int(0, 1 << 14)
                                                    : level) *
                    0x1p-30f;
        if (kind == ONE_AMONG_EQUALS) scores[(size_t)random_int(0, m - 1)] *= 1.5f;
        std::vector<uint8_t> flags = random_flags(kind % 2 ? ANY_FLAGS : ALL_FREE, length);
        int n_free = 0;
        for (int32_t position : in_play) n_free += flags[(size_t)position] == LAZY_PRUNABLE;
        for (int budget : { 0, 1, random_int(0, n_free), n_free - 1, n_free }) {
            now("select m %d, kind %d, %d of %d free", m, kind, budget, n_free);
            test_choice(r, in_play, scores, flags, budget);
        }
        now("mass of m %d, kind %d", m, kind);
        if (kind != BELOW_0) test_mass(r, in_play, scores, flags);
    }
    test_pooling(r, random_int(MOST / 2, MOST - 1), ANY_FLAGS);
    test_depths(r, random_int(MOST / 4, MOST / 2));
}

static void test_regroup(const rig &r, int n, int n_new, int length, int d)
{
    const side &gpu = r.gpu;
    now("%s regroup %d to %d of %d, d %d", r.name(), n, n_new, length, d);
    ints rows = random_positions(n, length), new_rows = random_positions(n_new, length + 1);
    new_rows.back() = random_int(n_new > 1 ? new_rows[(size_t)n_new - 2] + 1 : 0,
                                 length); /* the last row may be evicted, kept or new */
    floats x = random_values(r.type, (size_t)(n * d)), aux = random_values(r.type, (size_t)((length + 1) * d)),
           want((size_t)(n_new * d));
    input of_x(gpu, narrowed(r.type, x)), of_rows(gpu, rows), of_new(gpu, new_rows);
    output y(gpu, want.size() * r.width()), of_aux(gpu, narrowed(r.type, aux)), n_revived(gpu, bytes{ 3, 0, 0, 0 });
    did(gpu, "regroup",
        gpu.ops->regroup(gpu.stream, y.at(), of_new.as<int32_t>(), n_new, of_x.at(), of_rows.as<int32_t>(), n,
                         of_aux.at(), d, n_revived.as<int32_t>(), &gpu.err));
    int32_t revived = 3;
    r.plain.ops->regroup(r.plain.stream, want.data(), new_rows.data(), n_new, x.data(), rows.data(), n, aux.data(), d,
                         &revived, nullptr);
    check(widened(r.type, y.read()) == want, "a row holds another token's values");
    check(widened(r.type, of_aux.read()) == aux, "other rows in Aux than the reference's");
    check(ints_of(n_revived.read())[0] == revived, "%d revived, not %d", ints_of(n_revived.read())[0], revived);
}

/* Without aux, evicted rows are dropped and the others are kept unchanged. */
static void test_regroup_without_aux(const rig &r, int n, int d)
{
    const side &gpu = r.gpu;
    int n_new = random_int(1, n);
    now("%s regroup %d to %d for good, d %d", r.name(), n, n_new, d);
    ints rows = random_positions(n, n), new_rows = random_positions(n_new, n);
    floats x = random_values(r.type, (size_t)(n * d)), want;
    for (int32_t row : new_rows)
        want.insert(want.end(), x.begin() + (int64_t)row * d, x.begin() + (int64_t)(row + 1) * d);
    input of_x(gpu, narrowed(r.type, x)), of_rows(gpu, rows), of_new(gpu, new_rows);
    output y(gpu, want.size() * r.width()), n_revived(gpu, bytes(sizeof(int32_t), 0));
    did(gpu, "regroup",
        gpu.ops->regroup(gpu.stream, y.at(), of_new.as<int32_t>(), n_new, of_x.at(), of_rows.as<int32_t>(), n, nullptr,
                         d, n_revived.as<int32_t>(), &gpu.err));
    check(widened(r.type, y.read()) == want, "a row holds another token's values");
    check(ints_of(n_revived.read())[0] == 0, "%d revived, of none", ints_of(n_revived.read())[0]);
}

static void test_sets(const rig &r)
{
    const ints sizes = quick ? ints{ 1, 40, 700 } : ints{ 1, 2, 31, 33, random_int(34, 510), 512, 513, 1100 };
    for (int n : sizes) test_depths(r, n);
    test_regroup(r, 1, 1, 1, 5);
    test_regroup(r, 20, 20, 20, 3);
    for (int n : { 1, 33, 300 }) test_regroup_without_aux(r, n, random_int(1, 600));
    for (int i = 0; i < (quick ? 4 : 12); i++) {
        int length = random_int(1, quick ? 30 : 90);
        test_regroup(r, random_int(1, length), random_int(1, length), length, random_int(1, 600));
    }
}

/* ---- the read ceiling ------------------------------------------------------------------- */

static void test_read(const rig &r)
{
    now("%s read", r.name());
    for (size_t size : { (size_t)1, (size_t)16, (size_t)4099, (size_t)100000 }) {
        input memory(r.gpu, bytes(size));
        did(r.gpu, "read", lazy_cuda_read(r.gpu.stream, memory.at(), size, &r.gpu.err));
    }
}

/* ---- determinism ------------------------------------------------------------------------ */

/* Weights of one layer that runs through all ops; every bit of its results is compared. */
struct layer_weights {
    weights table, qkv, o, gate_up, down;

    explicit layer_weights(const rig &r)
        : table(r, 1, 50, r.config.hidden, false, false),
          qkv(r, 1, (r.config.n_heads + 2 * r.config.n_kv_heads) * r.config.head_dim, r.config.hidden, false, true),
          o(r, 1, r.config.hidden, r.config.n_heads * r.config.head_dim, false, false),
          gate_up(r, 1, 2 * r.config.ffn, r.config.hidden, true, false),
          down(r, 1, r.config.hidden, r.config.ffn, false, false)
    {
    }
};

struct pass_inputs {
    scene tokens;
    int window;
    ints ids;
    floats norm, rope;

    pass_inputs(const rig &r, int n, int m, int of_window) : tokens(r, n, m, m + 30), window(of_window), ids((size_t)n)
    {
        for (int32_t &id : ids) id = random_int(0, 49);
        norm = random_values(LAZY_F32, (size_t)r.config.hidden);
        rope = random_values(LAZY_F32, (size_t)(tokens.length * r.config.head_dim));
    }
};

/* Runs one layer; returns the bytes of all its outputs. */
static bytes pass(const side &s, const rig &r, const layer_weights &w, const pass_inputs &given)
{
    const lazy_config &c = r.config;
    const scene &t = given.tokens;
    const lazy_ops *ops = s.ops;
    int n = t.n, m = t.m, d = c.hidden;
    size_t rows = (size_t)n, width = r.width(), head = (size_t)c.head_dim;
    input ids(s, given.ids), norm(s, given.norm), rope(s, given.rope), positions(s, t.rows), in_play(s, t.in_play);
    input flags(s, std::vector<uint8_t>((size_t)t.length, LAZY_PRUNABLE));
    output x(s, rows * (size_t)d * width), h(s, rows * (size_t)d * width),
        heads(s, rows * (size_t)c.n_heads * head * width);
    output qkv(s, rows * (size_t)(c.n_heads + 2 * c.n_kv_heads) * head * width), gated(s, rows * (size_t)c.ffn * width);
    output k(s, narrowed(r.type, t.k)), v(s, narrowed(r.type, t.v)), logits(s, 50 * sizeof(float)),
        bad(s, bytes_of(ints{ 9 }));
    output scores(s, (size_t)m * sizeof(float)), smooth(s, (size_t)m * sizeof(float)),
        kept(s, (size_t)m * sizeof(int32_t));
    lazy_kv kv = { k.at(), v.at(), t.capacity };
    const int32_t *at = positions.as<int32_t>(), *play = in_play.as<int32_t>();
    int n_free = -1;

    did(s, "embed", ops->embed(s.stream, x.at(), ids.as<int32_t>(), n, &w.table.gpu, &s.err));
    did(s, "checked_rmsnorm",
        ops->checked_rmsnorm(s.stream, h.at(), x.at(), n, d, norm.as<float>(), 1e-5f, 1, bad.as<int32_t>(), &s.err));
    did(s, "matmul", ops->matmul(s.stream, qkv.at(), h.at(), n, &w.qkv.gpu, false, &s.err));
    did(s, "rotate",
        ops->rotate(s.stream, qkv.at(), at, n, kv, rope.as<float>(), rope.as<float>(), nullptr, nullptr, 1e-5f,
                    &s.err));
    const lazy_attending attending = { qkv.at(), at, n, kv, play, m, given.window };
    did(s, "attention", ops->attention(s.stream, heads.at(), &attending, &s.err));
    did(s, "matmul", ops->matmul(s.stream, x.at(), heads.at(), n, &w.o.gpu, true, &s.err));
    did(s, "rmsnorm", ops->rmsnorm(s.stream, h.at(), x.at(), n, d, norm.as<float>(), 1e-5f, true, &s.err));
    did(s, "gated", ops->gated(s.stream, gated.at(), h.at(), n, &w.gate_up.gpu, &s.err));
    did(s, "matmul", ops->matmul(s.stream, x.at(), gated.at(), n, &w.down.gpu, true, &s.err));
    did(s, "scores", ops->scores(s.stream, scores.as<float>(), &attending, 3, LAZY_POOLING_MAX, 0, &s.err));
    did(s, "smooth", ops->smooth(s.stream, smooth.as<float>(), scores.as<float>(), m, 3, &s.err));
    did(s, "mass", ops->mass(s.stream, &n_free, play, smooth.as<float>(), m, flags.as<uint8_t>(), 0.7, &s.err));
    did(s, "select",
        ops->select(s.stream, kept.as<int32_t>(), play, smooth.as<float>(), m, flags.as<uint8_t>(), n_free, &s.err));
    did(s, "logits", ops->logits(s.stream, logits.as<float>(), x.at(), 1, &w.table.gpu, &s.err));

    check(n_free > 0 && n_free <= m, "%d of %d tokens hold most of the scores", n_free, m);
    check(ints_of(bad.read())[0] == 9, "a pass over numbers gave none");
    bytes all;
    for (const output *left : { &x, &heads, &k, &v, &scores, &kept, &logits }) {
        bytes part = left->read();
        all.insert(all.end(), part.begin(), part.end());
    }
    return all;
}

/* A pass gives the same bits when it runs alone, repeatedly, and concurrently with another stream. */
static void test_repetition(lazy_dtype type)
{
    const int STREAMS = 2, ROUNDS = quick ? 1 : 3;
    rig r(type, config_of(4, 2, 64), 20, 300);
    layer_weights w(r);
    output(r.gpu, (size_t)1).read(); /* waits for the biases, which other streams read */
    std::vector<std::unique_ptr<pass_inputs>> inputs;
    std::vector<side> sides;
    std::vector<bytes> alone;
    for (int i = 0; i < STREAMS; i++) {
        inputs.push_back(std::make_unique<pass_inputs>(r, i ? 3 : 7, random_int(180, 260), i ? 70 : NO_WINDOW));
        sides.push_back(stream_of(r.gpu.backend, &r.config, 20, 300));
        now("%s pass of %d rows over %d, alone", r.name(), inputs.back()->tokens.n, inputs.back()->tokens.m);
        alone.push_back(pass(sides.back(), r, w, *inputs.back()));
        check(pass(sides.back(), r, w, *inputs.back()) == alone.back(), "other bits the second time");
    }
    std::vector<std::thread> threads;
    for (size_t i = 0; i < (size_t)STREAMS; i++)
        threads.emplace_back([&, i] {
            now("%s pass of %d rows over %d, beside another", r.name(), inputs[i]->tokens.n, inputs[i]->tokens.m);
            for (int round = 0; round < ROUNDS; round++)
                check(pass(sides[i], r, w, *inputs[i]) == alone[i], "other bits than alone");
        });
    for (std::thread &thread : threads) thread.join();
    for (const side &s : sides) s.ops->stream_close(s.stream);
}

/* ---- all -------------------------------------------------------------------------------- */

/* Everything but the kernels that use wgmma. */
static void test_portable(lazy_dtype type)
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
    for (int format = LAZY_Q8_0; format < LAZY_N_DTYPES; format++) test_quantized(type, (lazy_dtype)format);
    if (type == LAZY_F32) test_many_tokens();
    test_all_heads(type);
    test_query_rows(type, 12, 3, 40);
    test_query_rows(type, 3, 3, 33);
    test_long_context(type, 16, quick ? 1000 : 8200);
    test_long_context(type, 64, quick ? 400 : 4200);
    test_repetition(type);
}

int main(int argc, char **argv)
{
    seed = (uint64_t)time(nullptr);
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "quick") == 0) quick = true;
        else if (strcmp(argv[i], "without_wgmma") == 0) wgmma = false;
        else if (strcmp(argv[i], "wgmma_alone") == 0) portable = false;
        else seed = strtoull(argv[i], nullptr, 10);
    }
    printf("seed %llu\n", (unsigned long long)seed);
    const bool quick_all = quick;
    for (lazy_dtype type : { LAZY_F32, LAZY_F16, LAZY_BF16 }) {
        /* the kernels of bf16, but for conversions, which a GPU may do in other instructions */
        if (quick_all && type == LAZY_F16) continue;
#ifdef LAZY_CUDA_ON_CPU
        quick = quick_all || type == LAZY_F16;
#endif
        setenv("LAZYLLM_CUDA_WGMMA", "0", 1);
        if (portable) test_portable(type);
        unsetenv("LAZYLLM_CUDA_WGMMA");
        if (wgmma && type != LAZY_F32) test_wgmma(type);
    }
    printf("%d passed, %d failed\n", passed.load(), failed.load());
    return failed != 0;
}
