/* test_gemm.cc — tests matrix products against plain loops, what is asked of cuBLASLt, and the search for it.
 *
 * Runs on a GPU, or without one on the fakes in cuda/cuda_on_cpu. With the path of a libcublasLt as its argument, it
 * also tests that the library is found in each place that is searched. Prints failures, then "N passed, N failed". */
#include <dlfcn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include "common.h"

static side gpu;

/* Multiples of 1/16 from -4 to 4: exact in every type, and f32 sums of a few thousand of their products are exact in
 * any order, so results are compared bit by bit. */
static floats sixteenths(size_t n)
{
    floats values(n);
    for (float &value : values) value = (float)random_int(-64, 64) / 16;
    return values;
}

static float rounded(double value, lazy_dtype type) { return widened(type, narrowed(type, { (float)value }))[0]; }

struct kind {
    lazy_dtype in, out;
    bool accumulate;
    size_t skip; /* elements by which the operands are misaligned */
};

static int run(lazy_gemm *gemm, cudaStream_t queue, void *y, const void *x, const void *w, int n, int rows, int cols,
               kind t, bool *refused, lazy_error *err)
{
    return lazy_gemm_run(gemm, queue, y, x, w, n, rows, cols, rows, t.accumulate, lazy_cuda_data_type(t.in),
                         lazy_cuda_data_type(t.out), refused, err);
}

static cudaStream_t queue_of(const side &s) { return lazy_cuda_scratch(s.stream)->queue; }

/* ---- one product ------------------------------------------------------------------------ */

static int refused_products; /* how many of the next products cuBLASLt refuses to run */

static void test_product(lazy_gemm *gemm, kind t, int n, int rows, int cols, bool exact,
                         [[maybe_unused]] bool must_refuse = false)
{
    now("%s to %s, %d x (%d, %d)%s, %zu off", lazy_formats[t.in].name, lazy_formats[t.out].name, n, rows, cols,
        t.accumulate ? ", accumulated" : "", t.skip);
    size_t k = (size_t)cols, r = (size_t)rows, size = (size_t)n * r;
    auto operand = [&](size_t values) {
        floats all = exact ? sixteenths(values) : random_values(LAZY_F32, values);
        return output<float>(gpu, all, t.in, t.skip);
    };
    output x = operand((size_t)n * k), w = operand(r * k);
    output y(gpu, t.accumulate ? sixteenths(size) : unwritten(size), t.out, t.skip);
    bytes start = y.bits();
    lazy_error err = {};
    bool refused = true;
    int code = run(gemm, queue_of(gpu), y.on_device(), x.on_device(), w.on_device(), n, rows, cols, t, &refused, &err);
    floats got = y.read();
    check(code == LAZY_OK && x.read() == x.plain && w.read() == w.plain, "code %d (%s), or an operand has changed",
          code, err.message);
#ifdef LAZY_CUDA_ON_CPU
    check(refused == (must_refuse || (t.in != LAZY_F32 && cols % 2)), "refused is %d", refused);
#endif
    if (refused) {
        check(y.bits() == start, "refused, but y has changed");
        return;
    }

    double worst = 0;
    for (size_t at = 0; at < size; at++) {
        double sum = 0, terms = 1;
        for (size_t i = 0; i < k; i++) {
            double term = (double)x.plain[at / r * k + i] * w.plain[at % r * k + i];
            sum += term;
            terms += fabs(term);
        }
        double before = t.accumulate ? y.plain[at] : 0.0;
        double off = fabs(got[at] - (exact ? rounded(rounded(sum, t.out) + before, t.out) : sum + before));
#ifndef LAZY_CUDA_ON_CPU /* some algorithms do not round a product before they add it */
        if (exact) off = fmin(off, fabs(got[at] - rounded(sum + before, t.out)));
#endif
        worst = fmax(worst, isnan(off) ? INFINITY : off / terms);
    }
    check(worst <= (exact ? 0 : 1e-6), "error %g", worst);
}

static void test_products(lazy_gemm *gemm)
{
    const lazy_dtype types[][2] = { { LAZY_F32, LAZY_F32 },
                                    { LAZY_F16, LAZY_F16 },
                                    { LAZY_F16, LAZY_F32 },
                                    { LAZY_BF16, LAZY_BF16 },
                                    { LAZY_BF16, LAZY_F32 } };
    const int shapes[][3] = { { 1, 1, 1 },    { 1, 64, 32 },   { 2, 3, 5 },       { 4, 17, 33 },  { 7, 96, 80 },
                              { 16, 40, 64 }, { 31, 65, 129 }, { 100, 48, 1000 }, { 300, 33, 7 }, { 513, 24, 40 } };
    for (const auto &[in, out] : types)
        for (bool accumulate : { false, true }) {
            for (const auto &s : shapes) test_product(gemm, { in, out, accumulate, 0 }, s[0], s[1], s[2], true);
            /* the same shape again, whose choice is stored; then with misaligned operands */
            for (size_t skip : { 0, 1, 8 }) test_product(gemm, { in, out, accumulate, skip }, 16, 40, 64, true);
        }
    /* f32 products must not use TF32 or other shorter types */
    test_product(gemm, { LAZY_F32, LAZY_F32, false, 0 }, 33, 70, 500, false);
    test_product(gemm, { LAZY_F32, LAZY_F32, true, 0 }, 128, 128, 256, false);
}

/* ---- what cuBLASLt is asked, with a table of functions that count their calls ----------- */

static const lazy_cublas *real_table;
static int n_guesses, n_products;
static uint64_t preferred[CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES + 1]; /* attributes of the last preference */
/* guesses that allow more workspace, or that rely on more alignment, are refused */
static uint64_t max_workspace = UINT64_MAX, max_alignment = UINT64_MAX;
static cublasStatus_t product_status; /* of every product that is not refused; other than success: not run */
static void *workspace_seen;
static bool workspace_moved;

static cublasStatus_t count_guess(cublasLtHandle_t handle, cublasLtMatmulDesc_t product, cublasLtMatrixLayout_t a,
                                  cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                  cublasLtMatmulPreference_t preference, int most,
                                  cublasLtMatmulHeuristicResult_t *found, int *n_found)
{
    n_guesses++;
    if (preferred[CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES] > max_workspace ||
        preferred[CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES] > max_alignment) {
        *n_found = 0;
        return n_guesses % 2 ? CUBLAS_STATUS_NOT_SUPPORTED : CUBLAS_STATUS_SUCCESS; /* cuBLASLt does either */
    }
    return real_table->heuristic(handle, product, a, b, c, d, preference, most, found, n_found);
}

static cublasStatus_t count_product(cublasLtHandle_t handle, cublasLtMatmulDesc_t product, const void *alpha,
                                    const void *a, cublasLtMatrixLayout_t a_layout, const void *b,
                                    cublasLtMatrixLayout_t b_layout, const void *beta, const void *c,
                                    cublasLtMatrixLayout_t c_layout, void *d, cublasLtMatrixLayout_t d_layout,
                                    const cublasLtMatmulAlgo_t *algorithm, void *workspace, size_t workspace_bytes,
                                    cudaStream_t queue)
{
    n_products++;
    workspace_moved |= (workspace_seen && workspace != workspace_seen) || workspace_bytes != 32u << 20;
    workspace_seen = workspace;
    if (refused_products && refused_products--) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (product_status != CUBLAS_STATUS_SUCCESS) return product_status;
    return real_table->matmul(handle, product, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout,
                              algorithm, workspace, workspace_bytes, queue);
}

static cublasStatus_t see_preference(cublasLtMatmulPreference_t preference,
                                     cublasLtMatmulPreferenceAttributes_t attribute, const void *value, size_t size)
{
    memcpy(&preferred[attribute], value, size);
    return real_table->preference_set(preference, attribute, value, size);
}

static lazy_gemm *open_gemm(const lazy_cublas *cublas)
{
    lazy_gemm *gemm;
    lazy_error err = {};
    must(lazy_gemm_open(&gemm, cublas, &err), err);
    return gemm;
}

static const kind ADDED = { LAZY_BF16, LAZY_BF16, true, 0 };

/* Runs a product, checks its output and the number of calls to cuBLASLt. */
static void test_asked(lazy_gemm *gemm, const char *what, int n, int rows, int guesses, int products, kind t = ADDED,
                       bool must_refuse = false)
{
    n_guesses = n_products = 0;
    test_product(gemm, t, n, rows, 64, true, must_refuse);
    check(n_guesses == guesses && n_products == products, "%s: %d guesses and %d products instead of %d and %d", what,
          n_guesses, n_products, guesses, products);
}

static void test_choices()
{
    lazy_cublas counting = *real_table;
    counting.heuristic = count_guess;
    counting.matmul = count_product;
    counting.preference_set = see_preference;
    lazy_gemm *gemm = open_gemm(&counting);
    check(preferred[CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK] == CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE,
          "sums may be split otherwise");

    test_asked(gemm, "a new shape", 20, 200, 1, 1);
    test_asked(gemm, "a known shape", 20, 200, 0, 1);
    for (int n : { 17, 21, 32 }) test_asked(gemm, "an n that is rounded up alike", n, 200, 0, 1);
    for (int n : { 1, 9, 33, 65, 129, 257 }) test_asked(gemm, "an n that is rounded up otherwise", n, 200, 1, 1);
    for (int n : { 8, 16, 64, 128, 256, 384 }) test_asked(gemm, "what those are rounded to", n, 200, 0, 1);
    test_asked(gemm, "more rows", 20, 201, 1, 1);
    test_asked(gemm, "not added", 20, 200, 1, 1, { LAZY_BF16, LAZY_BF16, false, 0 });
    test_asked(gemm, "another output", 20, 200, 1, 1, { LAZY_BF16, LAZY_F32, true, 0 });
    test_asked(gemm, "another input", 20, 200, 1, 1, { LAZY_F16, LAZY_F16, true, 0 });
    test_asked(gemm, "off by an element", 20, 200, 1, 1, { LAZY_BF16, LAZY_BF16, true, 1 });
    test_asked(gemm, "off by 16 bytes", 20, 200, 1, 1, { LAZY_BF16, LAZY_BF16, true, 8 });
    for (int rows = 1000; rows < 1260; rows++) test_asked(gemm, "more shapes than are remembered", 5, rows, 1, 1);
    test_asked(gemm, "one of the last shapes", 5, 1259, 0, 1);
    test_asked(gemm, "a shape forgotten", 5, 1000, 1, 1);

    max_workspace = 0;
    test_asked(gemm, "refused with a workspace", 20, 300, 2, 1);
    test_asked(gemm, "the same once more", 20, 300, 0, 1);
    max_workspace = UINT64_MAX;
    max_alignment = 2;
    test_asked(gemm, "refused with its alignment", 20, 301, 2, 1);
    max_alignment = UINT64_MAX;
    refused_products = 1;
    test_asked(gemm, "refused for what n is rounded to", 20, 302, 2, 2);
    test_asked(gemm, "the same n", 20, 302, 0, 1);
    test_asked(gemm, "another n that is rounded alike", 21, 302, 0, 1);
    refused_products = 2;
    test_asked(gemm, "refused when run", 20, 303, 2, 2, ADDED, true);
    refused_products = 1;
    test_asked(gemm, "refused before", 20, 303, 0, 1, ADDED, true);
    refused_products = 1;
    test_asked(gemm, "an n that is not rounded, refused", 32, 304, 1, 1, ADDED, true);
    test_asked(gemm, "the same once more", 32, 304, 0, 0, ADDED, true);
    check(workspace_seen && !workspace_moved, "the workspace moved or shrank");

    const kind plain = { LAZY_F32, LAZY_F32, false, 0 };
    max_alignment = 0;
    test_asked(gemm, "no algorithm at all", 3, 5, 4, 0, plain, true);
    max_alignment = UINT64_MAX;
    product_status = CUBLAS_STATUS_EXECUTION_FAILED;
    output m(gpu, bytes(1024, 0));
    lazy_error err = {};
    bool refused = false;
    int code = run(gemm, queue_of(gpu), m.on_device(), m.on_device(), m.on_device(), 3, 6, 7, plain, &refused, &err);
    check(code == LAZY_DEVICE && strstr(err.message, "(3, 7) by (6, 7)^T") &&
              strstr(err.message, "CUBLAS_STATUS_EXECUTION_FAILED"),
          "a device that fails: code %d, %s", code, err.message);
    product_status = CUBLAS_STATUS_SUCCESS;
    lazy_gemm_close(gemm);

    err = {};
    counting.create = [](cublasLtHandle_t *) { return CUBLAS_STATUS_EXECUTION_FAILED; };
    code = lazy_gemm_open(&gemm, &counting, &err);
    check(code == LAZY_DEVICE && !gemm && strstr(err.message, "could not be set up: CUBLAS_STATUS_EXECUTION_FAILED"),
          "no handle: code %d, %s", code, err.message);
    lazy_gemm_close(nullptr);
}

/* A product that uses the workspace waits for the one before it on another stream. */
static void test_workspace(lazy_gemm *gemm)
{
    lazy_config config = *gpu.stream->config;
    side other = stream_of(gpu.backend, &config, 1, 1);
    input<float> x(gpu, sixteenths(64)), w(gpu, sixteenths(3 * 64));
    output<float> y(gpu, unwritten(3)), later(other, unwritten(3));
    y.read(); /* waits for the uploads */
    for (auto [queue, to] : { std::pair(queue_of(gpu), y.on_device()), { queue_of(other), later.on_device() } }) {
        bool refused = true;
        lazy_error err = {};
        int code = run(gemm, queue, to, x.on_device(), w.on_device(), 1, 3, 64, { LAZY_F32, LAZY_F32, false, 0 },
                       &refused, &err);
        check(!code && !refused, "%s", err.message);
    }
    float got[3];
    floats want = later.read();
    cudaMemcpy(got, y.on_device(), sizeof got, cudaMemcpyDeviceToHost); /* of the stream that is not waited for */
    check(memcmp(got, want.data(), sizeof got) == 0, "a product runs beside another that uses the same workspace");
    for (const side &s : { gpu, other }) lazy_gemm_leave(gemm, queue_of(s));
    other.ops->stream_close(other.stream);
}

/* Two threads, each with its own stream, run the same shapes concurrently. */
static void test_threads(lazy_gemm *gemm)
{
    enum { MOST = 70, ROWS = 26, COLS = 64 };
    input<float> x(gpu, sixteenths(MOST * COLS)), w(gpu, sixteenths(ROWS * COLS));
    side sides[2];
    floats results[2];
    for (side &s : sides) s = stream_of(gpu.backend, gpu.stream->config, 1, 1);
    output<float>(gpu, unwritten(1)).read(); /* waits for the uploads */
    auto work = [&](int which) {
        const side &s = sides[which];
        bool refused;
        output<float> y(s, unwritten(MOST * ROWS));
        for (int n = 1; n <= MOST; n++)
            did(s, "a product",
                run(gemm, queue_of(s), y.on_device(), x.on_device(), w.on_device(), n, ROWS, COLS,
                    { LAZY_F32, LAZY_F32, false, 0 }, &refused, &s.err));
        results[which] = y.read();
        lazy_gemm_leave(gemm, queue_of(s));
    };
    std::thread other(work, 1);
    work(0);
    other.join();
    check(results[0] == results[1], "other products on another thread");
    for (side &s : sides) s.ops->stream_close(s.stream);
}

/* ---- search for the library ------------------------------------------------------------- */

#ifndef LAZY_CUDA_ON_CPU

/* Loads the library in a child process, because one stays loaded, after prepare(). file: the one that it must take;
 * NULL: it must take none, and say these words. */
template <class F>
static void test_load(const char *what, F prepare, const std::vector<const char *> &places, const char *file,
                      const std::vector<const char *> &words = {})
{
    now("loading: %s", what);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        prepare();
        const lazy_cublas *table = nullptr;
        lazy_error err = {};
        int code = lazy_cublas_load(&table, places.data(), (int)places.size(), &err);
        bool good = file ? code == LAZY_OK && strcmp(table->file, file) == 0 && table->version >= 120000
                         : code == LAZY_DEVICE && !table;
        for (const char *word : words) good = good && strstr(err.message, word);
        if (!good) printf("code %d, %s, took %s\n", code, err.message, table ? table->file : "nothing");
        fflush(stdout);
        _exit(good ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "not as expected");
}

static void test_loading(const char *library)
{
    unsetenv("LAZYLLM_CUBLAS");
    unsetenv("CUDA_HOME");
    const char *missing = "/nowhere/one/libcublasLt.so.13", *useless = "/etc/passwd";
    auto variable = [](const char *file) { return [file] { setenv("LAZYLLM_CUBLAS", file, 1); }; };
    test_load("LAZYLLM_CUBLAS of no file", variable(missing), {}, nullptr,
              { "LAZYLLM_CUBLAS=", missing, "No such file" });
    test_load("LAZYLLM_CUBLAS of another library", variable("libm.so.6"), {}, nullptr, { "it has no cublasLtCreate" });
    if (library) {
        test_load("the variable", variable(library), { missing }, library);
        test_load("one already loaded", [&] { dlopen(library, RTLD_NOW | RTLD_LOCAL); }, { missing }, library);
        setenv("LAZYLLM_CUBLAS", library, 1);
    }
    if (dlopen("libcublasLt.so.13", RTLD_NOW) || dlopen("libcublasLt.so.12", RTLD_NOW)) return; /* places come later */
    auto home_at = [](const char *home) {
        return [home] {
            unsetenv("LAZYLLM_CUBLAS");
            setenv("CUDA_HOME", home, 1);
        };
    };
    test_load(
        "none", home_at("/nowhere/cuda"), { missing, useless }, nullptr,
        { missing, "/etc/passwd cannot be used", "/nowhere/cuda", "pip install nvidia-cublas", "LAZYLLM_CUBLAS" });
    if (!library) return;
    test_load("a place", home_at("/nowhere/cuda"), { missing, useless, library }, library);
    char home[] = "/tmp/test_gemm_XXXXXX";
    must(mkdtemp(home) ? LAZY_OK : LAZY_IO, {});
    std::string folder = std::string(home) + "/lib64", link = folder + "/libcublasLt.so.12";
    check(mkdir(folder.c_str(), 0700) == 0 && symlink(library, link.c_str()) == 0, "no link to the library");
    test_load("CUDA_HOME", home_at(home), { missing }, link.c_str());
    unlink(link.c_str());
    rmdir(folder.c_str());
    rmdir(home);
}

#endif

int main(int argc, char **argv)
{
    [[maybe_unused]] const char *library = argc > 1 ? argv[1] : nullptr;
#ifndef LAZY_CUDA_ON_CPU
    test_loading(library);
#endif
    lazy_error err = {};
    lazy_config config = {};
    config.n_heads = config.n_kv_heads = config.head_dim = config.hidden = config.ffn = 8;
    gpu = stream_of(open_cuda(LAZY_F32), &config, 1, 1);
    must(lazy_cublas_load(&real_table, nullptr, 0, &err), err);
    printf("%s, version %zu\n", real_table->file, real_table->version);
    lazy_gemm *gemm = open_gemm(real_table);
    test_products(gemm);
    test_workspace(gemm);
    test_threads(gemm);
    lazy_gemm_close(gemm);
    test_choices();
    gpu.ops->stream_close(gpu.stream);
    gpu.ops->close(gpu.backend);
    return checked();
}
