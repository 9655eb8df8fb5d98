/* test_gemm.cc — tests matrix products against plain loops, what is asked of cuBLASLt, and the search for it.
 *
 * Runs on a GPU, or without one on the fakes in cuda/cuda_on_cpu. With the path of a libcublasLt (real or fake) as its
 * argument, it also tests that the library is found in each place that is searched. Prints the failures, then "N
 * passed, N failed". */
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <string>
#include <sys/stat.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "../../cuda/gemm.h"
#include "../c/check.h"

static uint64_t seed = 1;

static uint32_t random_bits()
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 32);
}

/* ---- numbers of three types ------------------------------------------------------------- */

static size_t width_of(cudaDataType_t type) { return type == CUDA_R_32F ? 4 : 2; }

static const char *name_of(cudaDataType_t type)
{
    return type == CUDA_R_32F ? "f32" : type == CUDA_R_16F ? "f16" : "bf16";
}

static void put(char *at, cudaDataType_t type, float value)
{
    __half f16 = __float2half_rn(value);
    __nv_bfloat16 bf16 = __float2bfloat16_rn(value);
    const void *from = type == CUDA_R_16F    ? (const void *)&f16
                       : type == CUDA_R_16BF ? (const void *)&bf16
                                             : (const void *)&value;
    memcpy(at, from, width_of(type));
}

static float get(const char *at, cudaDataType_t type)
{
    __half f16;
    __nv_bfloat16 bf16;
    float f32;
    switch (type) {
    case CUDA_R_16F: memcpy(&f16, at, sizeof f16); return __half2float(f16);
    case CUDA_R_16BF: memcpy(&bf16, at, sizeof bf16); return __bfloat162float(bf16);
    default: memcpy(&f32, at, sizeof f32); return f32;
    }
}

static float rounded(double value, cudaDataType_t type)
{
    char bytes[4];
    put(bytes, type, (float)value);
    return get(bytes, type);
}

/* A matrix in host memory. */
typedef std::vector<char> bytes;

/* Multiples of 1/16 from -4 to 4: exact in every type, and f32 sums of a few thousand of their products are exact in
 * any order, so results are compared bit by bit. Most
 * algorithms of cuBLASLt round a product to the output's type before they add it. */
static bytes sixteenths(cudaDataType_t type, size_t n)
{
    bytes data(n * width_of(type));
    for (size_t i = 0; i < n; i++) put(&data[i * width_of(type)], type, (float)((int)(random_bits() % 129) - 64) / 16);
    return data;
}

static bytes any_floats(size_t n)
{
    bytes data(n * sizeof(float));
    for (size_t i = 0; i < n; i++)
        put(&data[i * sizeof(float)], CUDA_R_32F, (float)random_bits() / 2147483648.0f - 1.0f);
    return data;
}

/* ---- one product ------------------------------------------------------------------------ */

static void must(cudaError_t status)
{
    if (status == cudaSuccess) return;
    printf("CUDA: %s\n", cudaGetErrorString(status));
    exit(2);
}

static cudaStream_t stream;

static void transfer(void *to, const void *from, size_t size, cudaMemcpyKind direction)
{
    must(cudaMemcpyAsync(to, from, size, direction, stream));
    must(cudaStreamSynchronize(stream));
}

/* A copy on the device between guards; its address is `skip` bytes past a 256-byte boundary. */
struct copy {
    enum { GUARD = 256 };
    char *memory;
    size_t skip, size;

    copy(const bytes &from, size_t skip_bytes) : skip(skip_bytes), size(from.size())
    {
        bytes all(size + skip + 2 * GUARD, 0x7f);
        memcpy(&all[GUARD + skip], from.data(), size);
        must(cudaMalloc((void **)&memory, all.size()));
        transfer(memory, all.data(), all.size(), cudaMemcpyHostToDevice);
    }
    ~copy() { cudaFree(memory); }
    copy(const copy &) = delete;
    void *at() const { return memory + GUARD + skip; }

    /* Copies it back; *whole: the guards are unchanged. */
    bytes back(bool *whole) const
    {
        bytes all(size + skip + 2 * GUARD);
        transfer(all.data(), memory, all.size(), cudaMemcpyDeviceToHost);
        *whole = true;
        for (size_t i = 0; i < all.size(); i++) {
            bool inside = i >= GUARD + skip && i < GUARD + skip + size;
            *whole = *whole && (inside || all[i] == 0x7f);
        }
        return bytes(all.begin() + GUARD + (long)skip, all.begin() + GUARD + (long)(skip + size));
    }
};

struct kind {
    cudaDataType_t in, out;
    bool accumulate;
    size_t skip; /* elements by which the operands are misaligned */
};

static int refused_products; /* how many of the next products cuBLASLt refuses to run */

static void test_product(lazy_gemm *gemm, kind t, int n, int rows, int cols, bool exact, bool must_refuse = false)
{
    size_t k = (size_t)cols, r = (size_t)rows;
    bytes x = exact ? sixteenths(t.in, (size_t)n * k) : any_floats((size_t)n * k);
    bytes w = exact ? sixteenths(t.in, r * k) : any_floats(r * k);
    bytes y = sixteenths(t.out, (size_t)n * r);
    bytes start = y;
    if (!t.accumulate) start.assign(y.size(), (char)0xff); /* NaN in every type */
    copy on_x(x, t.skip * width_of(t.in)), on_w(w, t.skip * width_of(t.in)), on_y(start, t.skip * width_of(t.out));

    lazy_error err = {};
    bool refused = true;
    int code = lazy_gemm_run(gemm, stream, on_y.at(), on_x.at(), on_w.at(), n, rows, cols, rows, t.accumulate, t.in,
                             t.out, &refused, &err);
    bool whole, whole_x, whole_w;
    bytes got = on_y.back(&whole);
    bool untouched = on_x.back(&whole_x) == x && on_w.back(&whole_w) == w;
#ifdef LAZY_CUDA_ON_CPU
    bool may_refuse = must_refuse || (t.in != CUDA_R_32F && cols % 2);
    check(refused == may_refuse, "%s, %d x (%d, %d): refused is %d", name_of(t.in), n, rows, cols, refused);
#endif
    if (refused) {
        check(code == LAZY_OK && got == start, "%s, %d x (%d, %d): refused, but y has changed", name_of(t.in), n, rows,
              cols);
        return;
    }

    double worst = 0;
    for (size_t j = 0; j < (size_t)n; j++) {
        for (size_t i = 0; i < r; i++) {
            double sum = 0, size = 1;
            for (size_t kk = 0; kk < k; kk++) {
                double part =
                    (double)get(&x[(j * k + kk) * width_of(t.in)], t.in) * get(&w[(i * k + kk) * width_of(t.in)], t.in);
                sum += part;
                size += fabs(part);
            }
            double before = t.accumulate ? get(&y[(j * r + i) * width_of(t.out)], t.out) : 0.0;
            double result = get(&got[(j * r + i) * width_of(t.out)], t.out);
            double off = fabs(result - (exact ? rounded(rounded(sum, t.out) + before, t.out) : sum + before));
#ifndef LAZY_CUDA_ON_CPU
            if (exact) off = fmin(off, fabs(result - rounded(sum + before, t.out))); /* as some algorithms do */
#endif
            worst = fmax(worst, isnan(off) ? INFINITY : off / size);
        }
    }
    double allowed = exact ? 0 : 1e-6;
    check(code == LAZY_OK && whole && whole_x && whole_w && untouched && worst <= allowed,
          "%s to %s, %d x (%d, %d)%s, %zu off: code %d (%s), error %g%s", name_of(t.in), name_of(t.out), n, rows, cols,
          t.accumulate ? ", accumulated" : "", t.skip, code, err.message, worst, whole ? "" : ", wrote outside");
}

static const cudaDataType_t TYPES[][2] = {
    { CUDA_R_32F, CUDA_R_32F },   { CUDA_R_16F, CUDA_R_16F },  { CUDA_R_16F, CUDA_R_32F },
    { CUDA_R_16BF, CUDA_R_16BF }, { CUDA_R_16BF, CUDA_R_32F },
};

static void test_products(lazy_gemm *gemm)
{
    const int shapes[][3] = { { 1, 1, 1 },    { 1, 64, 32 },   { 2, 3, 5 },       { 4, 17, 33 },  { 7, 96, 80 },
                              { 16, 40, 64 }, { 31, 65, 129 }, { 100, 48, 1000 }, { 300, 33, 7 }, { 513, 24, 40 } };
    for (const auto &types : TYPES) {
        for (int accumulate = 0; accumulate < 2; accumulate++) {
            for (const auto &s : shapes)
                test_product(gemm, { types[0], types[1], accumulate != 0, 0 }, s[0], s[1], s[2], true);
            /* the same shape again, whose choice is stored; then with misaligned operands */
            test_product(gemm, { types[0], types[1], accumulate != 0, 0 }, 16, 40, 64, true);
            test_product(gemm, { types[0], types[1], accumulate != 0, 1 }, 16, 40, 64, true);
            test_product(gemm, { types[0], types[1], accumulate != 0, 8 }, 16, 40, 64, true);
        }
    }
    /* f32 products must not use TF32 or other shorter types */
    test_product(gemm, { CUDA_R_32F, CUDA_R_32F, false, 0 }, 33, 70, 500, false);
    test_product(gemm, { CUDA_R_32F, CUDA_R_32F, true, 0 }, 128, 128, 256, false);
}

static void test_arguments(lazy_gemm *gemm)
{
    copy m(bytes(1024, 0), 0);
    lazy_error err = {};
    bool refused;
    check(lazy_gemm_run(gemm, stream, nullptr, nullptr, nullptr, 0, 4, 4, 4, false, CUDA_R_32F, CUDA_R_32F, &refused,
                        &err) == LAZY_OK,
          "no rows: %s", err.message);
    const struct {
        void *y;
        int n, rows, cols;
        cudaDataType_t in, out;
        const char *says;
    } bad[] = {
        { nullptr, 2, 2, 2, CUDA_R_32F, CUDA_R_32F, "NULL" },
        { m.at(), -1, 2, 2, CUDA_R_32F, CUDA_R_32F, "below 1" },
        { m.at(), 2, 0, 2, CUDA_R_32F, CUDA_R_32F, "below 1" },
        { m.at(), 2, 2, -3, CUDA_R_32F, CUDA_R_32F, "below 1" },
        { m.at(), 2, 2, 2, CUDA_R_64F, CUDA_R_64F, "type 1" },
        { m.at(), 2, 2, 2, CUDA_R_32F, CUDA_R_16F, "type 2" },
        { m.at(), 2, 2, 2, CUDA_R_16F, CUDA_R_16BF, "to type 14" },
    };
    for (const auto &b : bad) {
        err = {};
        int code = lazy_gemm_run(gemm, stream, b.y, m.at(), m.at(), b.n, b.rows, b.cols, b.rows, false, b.in, b.out,
                                 &refused, &err);
        check(code == LAZY_INVALID && strstr(err.message, b.says), "%s: code %d, %s", b.says, code, err.message);
    }
}

/* ---- what cuBLASLt is asked, with a table of functions that count their calls ----------- */

static const lazy_cublas *real_table;
static lazy_cublas counting;
static int n_guesses, n_products;
static uint64_t workspace_allowed; /* by the last preference */
static uint32_t reduction_seen, alignment_asked;
static uint64_t max_workspace =
    UINT64_MAX; /* guesses that allow more workspace, or that rely on more alignment, are refused */
static uint32_t max_alignment = UINT32_MAX;
static cublasStatus_t product_status; /* of every product that is not refused; other than success: not run */
static void *workspace_seen;
static bool workspace_moved;

static cublasStatus_t count_guess(cublasLtHandle_t handle, cublasLtMatmulDesc_t product, cublasLtMatrixLayout_t a,
                                  cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                  cublasLtMatmulPreference_t preference, int most,
                                  cublasLtMatmulHeuristicResult_t *found, int *n_found)
{
    n_guesses++;
    if (workspace_allowed > max_workspace || alignment_asked > max_alignment) {
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
    if (workspace_seen && workspace != workspace_seen) workspace_moved = true;
    if (workspace_bytes != 32u << 20) workspace_moved = true;
    workspace_seen = workspace;
    if (refused_products && refused_products--) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (product_status != CUBLAS_STATUS_SUCCESS) return product_status;
    return real_table->matmul(handle, product, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout,
                              algorithm, workspace, workspace_bytes, queue);
}

static cublasStatus_t see_preference(cublasLtMatmulPreference_t preference,
                                     cublasLtMatmulPreferenceAttributes_t attribute, const void *value, size_t size)
{
    if (attribute == CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK) memcpy(&reduction_seen, value, sizeof reduction_seen);
    if (attribute == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES)
        memcpy(&workspace_allowed, value, sizeof workspace_allowed);
    if (attribute == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES)
        memcpy(&alignment_asked, value, sizeof alignment_asked);
    return real_table->preference_set(preference, attribute, value, size);
}

static cublasStatus_t refuse_handle(cublasLtHandle_t *) { return CUBLAS_STATUS_NOT_INITIALIZED; }

static lazy_gemm *open_gemm(const lazy_cublas *cublas)
{
    lazy_gemm *gemm = nullptr;
    lazy_error err = {};
    if (lazy_gemm_open(&gemm, cublas, &err) != LAZY_OK) {
        printf("open: %s\n", err.message);
        exit(2);
    }
    return gemm;
}

static const kind ADDED = { CUDA_R_16BF, CUDA_R_16BF, true, 0 };

/* Runs a product, checks its result and the number of calls to cuBLASLt. */
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
    counting = *real_table;
    counting.heuristic = count_guess;
    counting.matmul = count_product;
    counting.preference_set = see_preference;
    lazy_gemm *gemm = open_gemm(&counting);
    check(reduction_seen == CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, "sums may be split as %u", reduction_seen);

    test_asked(gemm, "a new shape", 20, 200, 1, 1);
    test_asked(gemm, "a known shape", 20, 200, 0, 1);
    for (int n : { 17, 21, 32 }) test_asked(gemm, "an n that is rounded up alike", n, 200, 0, 1);
    for (int n : { 1, 9, 33, 65, 129, 257 }) test_asked(gemm, "an n that is rounded up otherwise", n, 200, 1, 1);
    for (int n : { 8, 16, 64, 128, 256, 384 }) test_asked(gemm, "what those are rounded to", n, 200, 0, 1);
    test_asked(gemm, "more rows", 20, 201, 1, 1);
    test_asked(gemm, "not added", 20, 200, 1, 1, { CUDA_R_16BF, CUDA_R_16BF, false, 0 });
    test_asked(gemm, "another output", 20, 200, 1, 1, { CUDA_R_16BF, CUDA_R_32F, true, 0 });
    test_asked(gemm, "another input", 20, 200, 1, 1, { CUDA_R_16F, CUDA_R_16F, true, 0 });
    test_asked(gemm, "off by an element", 20, 200, 1, 1, { CUDA_R_16BF, CUDA_R_16BF, true, 1 });
    test_asked(gemm, "off by 16 bytes", 20, 200, 1, 1, { CUDA_R_16BF, CUDA_R_16BF, true, 8 });
    for (int rows = 1000; rows < 1260; rows++) test_asked(gemm, "more shapes than are remembered", 5, rows, 1, 1);
    test_asked(gemm, "one of the last shapes", 5, 1259, 0, 1);
    test_asked(gemm, "a shape forgotten", 5, 1000, 1, 1);

    max_workspace = 0;
    test_asked(gemm, "refused with a workspace", 20, 300, 2, 1);
    test_asked(gemm, "the same once more", 20, 300, 0, 1);
    max_workspace = UINT64_MAX;
    max_alignment = 2;
    test_asked(gemm, "refused with its alignment", 20, 301, 2, 1);
    max_alignment = UINT32_MAX;
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

    max_alignment = 0;
    copy m(bytes(1024, 0), 0);
    lazy_error err = {};
    bool refused = false;
    int code =
        lazy_gemm_run(gemm, stream, m.at(), m.at(), m.at(), 3, 5, 7, 5, false, CUDA_R_32F, CUDA_R_32F, &refused, &err);
    check(code == LAZY_OK && refused, "no algorithm at all: code %d, %s, refused is %d", code, err.message, refused);
    max_alignment = UINT32_MAX;
    product_status = CUBLAS_STATUS_EXECUTION_FAILED;
    code =
        lazy_gemm_run(gemm, stream, m.at(), m.at(), m.at(), 3, 6, 7, 6, false, CUDA_R_32F, CUDA_R_32F, &refused, &err);
    check(code == LAZY_DEVICE && strstr(err.message, "(3, 7) by (6, 7)^T") &&
              strstr(err.message, "CUBLAS_STATUS_EXECUTION_FAILED"),
          "a device that fails: code %d, %s", code, err.message);
    product_status = CUBLAS_STATUS_SUCCESS;
    lazy_gemm_close(gemm);

    lazy_cublas broken = counting;
    broken.create = refuse_handle;
    err = {};
    code = lazy_gemm_open(&gemm, &broken, &err);
    check(code == LAZY_DEVICE && !gemm && strstr(err.message, "CUBLAS_STATUS_NOT_INITIALIZED"),
          "no handle: code %d, %s", code, err.message);
    lazy_gemm_close(nullptr);
}

/* A product that uses the workspace waits for the one before it on another stream. */
static void test_workspace(lazy_gemm *gemm)
{
    cudaStream_t other;
    must(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    copy x(sixteenths(CUDA_R_32F, 64), 0), w(sixteenths(CUDA_R_32F, 3 * 64), 0), y(bytes(3 * sizeof(float), -1), 0),
        later(bytes(3 * sizeof(float), -1), 0);
    bool refused;
    lazy_error err = {};
    float got[2][3];
    for (auto [queue, to] : { std::pair(stream, y.at()), std::pair(other, later.at()) })
        check(!lazy_gemm_run(gemm, queue, to, x.at(), w.at(), 1, 3, 64, 3, false, CUDA_R_32F, CUDA_R_32F, &refused,
                             &err) &&
                  !refused,
              "%s", err.message);
    must(cudaStreamSynchronize(other));
    must(cudaMemcpy(got[0], y.at(), sizeof got[0], cudaMemcpyDeviceToHost)); /* of the stream that is not waited for */
    must(cudaMemcpy(got[1], later.at(), sizeof got[1], cudaMemcpyDeviceToHost));
    check(memcmp(got[0], got[1], sizeof got[0]) == 0, "a product runs beside another that uses the same workspace");
    must(cudaStreamSynchronize(stream));
    for (cudaStream_t queue : { stream, other }) lazy_gemm_leave(gemm, queue);
    must(cudaStreamDestroy(other));
}

/* Two threads, each with its own stream, run the same shapes concurrently. */
static void test_threads(lazy_gemm *gemm)
{
    enum { MOST = 70, ROWS = 26, COLS = 64 };
    copy x(sixteenths(CUDA_R_32F, MOST * COLS), 0), w(sixteenths(CUDA_R_32F, ROWS * COLS), 0);
    std::vector<float> results[2];
    lazy_error errors[2] = {};
    auto work = [&](int which) {
        bool refused;
        cudaStream_t own;
        float *y;
        must(cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking));
        must(cudaMalloc((void **)&y, MOST * ROWS * sizeof *y));
        results[which].resize(MOST * ROWS);
        int code = LAZY_OK;
        for (int n = 1; n <= MOST && code == LAZY_OK; n++)
            code = lazy_gemm_run(gemm, own, y, x.at(), w.at(), n, ROWS, COLS, ROWS, false, CUDA_R_32F, CUDA_R_32F,
                                 &refused, &errors[which]);
        must(cudaMemcpyAsync(results[which].data(), y, MOST * ROWS * sizeof *y, cudaMemcpyDeviceToHost, own));
        must(cudaStreamSynchronize(own));
        lazy_gemm_leave(gemm, own);
        must(cudaFree(y));
        must(cudaStreamDestroy(own));
    };
    std::thread other(work, 1);
    work(0);
    other.join();
    check(!errors[0].code && !errors[1].code && results[0] == results[1], "two threads: %s %s", errors[0].message,
          errors[1].message);
}

/* ---- search for the library ------------------------------------------------------------- */

#ifndef LAZY_CUDA_ON_CPU

static bool load_fails(const char *const *places, int n_places, std::vector<const char *> says)
{
    const lazy_cublas *table = nullptr;
    lazy_error err = {};
    int code = lazy_cublas_load(&table, places, n_places, &err);
    bool good = code == LAZY_DEVICE && !table && err.code == LAZY_DEVICE;
    for (const char *word : says) good = good && strstr(err.message, word);
    if (!good) printf("code %d, %s\n", code, err.message);
    return good;
}

static bool load_takes(const char *const *places, int n_places, const char *file)
{
    const lazy_cublas *table = nullptr;
    lazy_error err = {};
    int code = lazy_cublas_load(&table, places, n_places, &err);
    bool good = code == LAZY_OK && table && strcmp(table->file, file) == 0 && table->version >= 120000;
    if (!good) printf("code %d, %s, took %s\n", code, err.message, table ? table->file : "nothing");
    return good;
}

/* Runs `test` in a child process, because a loaded library stays loaded; returns its result. */
template <class F> static bool alone(F test)
{
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        bool good = test();
        fflush(stdout);
        _exit(good ? 0 : 1);
    }
    int status = -1;
    return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static void test_loading(const char *library)
{
    unsetenv("LAZYLLM_CUBLAS");
    unsetenv("CUDA_HOME");
    const char *missing[] = { "/nowhere/one/libcublasLt.so.13", "/nowhere/two/libcublasLt.so.12" };
    const char *useless[] = { "/etc/passwd" };

    check(alone([] {
              setenv("LAZYLLM_CUBLAS", "/nowhere/libcublasLt.so.13", 1);
              return load_fails(nullptr, 0, { "LAZYLLM_CUBLAS=/nowhere/libcublasLt.so.13", "No such file" });
          }),
          "a variable that names no file");
    check(alone([] {
              setenv("LAZYLLM_CUBLAS", "libm.so.6", 1);
              return load_fails(nullptr, 0, { "LAZYLLM_CUBLAS=libm.so.6", "it has no cublasLtCreate" });
          }),
          "a variable that names another library");

    const bool none_by_loader = alone([] {
        const lazy_cublas *table;
        return lazy_cublas_load(&table, nullptr, 0, nullptr) != LAZY_OK;
    });
    if (none_by_loader) {
        check(alone([&] {
                  return load_fails(
                      missing, 2, { missing[0], missing[1], "pip install nvidia-cublas", "LAZYLLM_CUBLAS", "not set" });
              }),
              "places without a library");
        check(alone([&] {
                  setenv("CUDA_HOME", "/nowhere/cuda", 1);
                  return load_fails(useless, 1, { "/etc/passwd cannot be used", "/nowhere/cuda" });
              }),
              "a place with something else");
    }
    if (!library) return;

    check(alone([&] {
              setenv("LAZYLLM_CUBLAS", library, 1);
              bool good = load_takes(missing, 2, library);
              setenv("LAZYLLM_CUBLAS", "/nowhere/libcublasLt.so.13", 1);
              return good && load_takes(missing, 2, library); /* the library stays loaded */
          }),
          "the variable");
    check(alone([&] { return dlopen(library, RTLD_NOW | RTLD_LOCAL) && load_takes(missing, 2, library); }),
          "one already loaded");
    check(alone([&] {
              const char *places[] = { missing[0], useless[0], library };
              return load_takes(places, 3, library);
          }),
          "a place");
    if (!none_by_loader) return; /* CUDA_HOME comes after the loader's search path */
    check(alone([&] {
              char home[] = "/tmp/test_gemm_XXXXXX";
              if (!mkdtemp(home)) return false;
              std::string folder = std::string(home) + "/lib64", link = folder + "/libcublasLt.so.12";
              setenv("CUDA_HOME", home, 1);
              bool good = mkdir(folder.c_str(), 0700) == 0 && symlink(library, link.c_str()) == 0;
              good = good && load_takes(missing, 2, link.c_str());
              unlink(link.c_str());
              rmdir(folder.c_str());
              rmdir(home);
              return good;
          }),
          "CUDA_HOME");
    setenv("LAZYLLM_CUBLAS", library, 1);
}

#endif

int main(int argc, char **argv)
{
    const char *library = argc > 1 ? argv[1] : nullptr;
#ifdef LAZY_CUDA_ON_CPU
    (void)library;
#else
    test_loading(library);
#endif
    lazy_error err = {};
    if (lazy_cublas_load(&real_table, nullptr, 0, &err) != LAZY_OK) {
        printf("%s\n", err.message);
        return 2;
    }
    printf("%s, version %zu\n", real_table->file, real_table->version);
    must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    lazy_gemm *gemm = open_gemm(real_table);
    test_products(gemm);
    test_arguments(gemm);
    test_workspace(gemm);
    test_threads(gemm);
    lazy_gemm_close(gemm);
    test_choices();
    must(cudaStreamDestroy(stream));
    return checked();
}
