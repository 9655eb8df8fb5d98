#include "gemm.h"

#include <initializer_list>
#include <math.h>
#include <mutex>
#include <stdlib.h>
#include <string.h>

extern "C" {
#include "../csrc/error.h"
#include "../csrc/memory.h"
}

static constexpr size_t WORKSPACE = 32 << 20; /* bytes: what cuBLAS advises for the devices that want most */
static constexpr int CANDIDATES = 8;          /* most algorithms tried for a shape */
static constexpr int TRIALS = 3;              /* most timed runs of each */
static constexpr float LONG_TRIAL = 0.5f;     /* milliseconds: a run that long is measured well enough by itself */
static constexpr float BEHIND = 1.1f;         /* an algorithm this many times slower than the best is not timed again */
static constexpr float NEVER = INFINITY;

struct lazy_gemm {
    const lazy_cublas *cublas;
    cudaStream_t stream;
    int device;
    bool tune;
    size_t cache; /* bytes of the device's last cache */
    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t w, x, y; /* reshaped for each product: to make them anew would allocate */
    cublasLtMatmulPreference_t preference;
    void *workspace; /* (WORKSPACE,) on the device */
    cudaEvent_t begin, end;
};

/* One call of lazy_gemm_run. */
struct product {
    void *y;
    const void *x, *w;
    int n, rows, cols;
    bool accumulate;
    cudaDataType_t in, out;
};

/* ---- choices, shared by all streams ----------------------------------------------------- */

struct choice_key {
    int32_t n; /* of the bucket */
    int32_t rows, cols;
    uint32_t rest; /* device, types, alignment, whether it accumulates and was tuned */

    bool operator==(const choice_key &other) const
    {
        return n == other.n && rows == other.rows && cols == other.cols && rest == other.rest;
    }
};

static constexpr int BUCKET = 256; /* most n that share a choice */

struct choice {
    choice_key key; /* rows 0: an empty slot */
    cublasLtMatmulAlgo_t algorithm;
    uint32_t checked[BUCKET / 32]; /* bit key.n - n: the algorithm can do exactly n */
};

/* An open hash table of fixed size: a model needs some dozens for each length of prompt, so it hardly ever fills up. Where it does,
 * what is overwritten will be chosen again. */
static constexpr uint32_t SLOTS = 2048, PROBES = 16;
static choice choices[SLOTS];
static std::mutex choices_lock;

static int bucket_of(int n)
{
    if (n <= 16) return n;
    if (n > 256) return n > INT32_MAX - BUCKET ? n : (n + BUCKET - 1) / BUCKET * BUCKET;
    int bucket = 32;
    while (bucket < n) bucket *= 2;
    return bucket;
}

/* The slot of key, else the one to put it in. The lock is held. */
static choice *slot_of(const choice_key &key)
{
    uint32_t hash = 2166136261u;
    for (uint32_t part : { (uint32_t)key.n, (uint32_t)key.rows, (uint32_t)key.cols, key.rest }) hash = (hash ^ part) * 2654435761u;
    hash ^= hash >> 16;
    for (uint32_t i = 0; i < PROBES; i++) {
        choice *slot = &choices[(hash + i) % SLOTS];
        if (slot->key.rows == 0 || slot->key == key) return slot;
    }
    return &choices[hash % SLOTS];
}

static uint32_t bit_of(const choice_key &key, int n) { return 1u << (key.n - n) % 32; }

static bool recall(const choice_key &key, int n, cublasLtMatmulAlgo_t *algorithm, bool *checked)
{
    std::lock_guard<std::mutex> hold(choices_lock);
    const choice *slot = slot_of(key);
    if (!(slot->key == key)) return false;
    *algorithm = slot->algorithm;
    *checked = slot->checked[(key.n - n) / 32] & bit_of(key, n);
    return true;
}

/* That the algorithm is the choice for key, and can do exactly n. */
static void remember(const choice_key &key, int n, const cublasLtMatmulAlgo_t &algorithm)
{
    std::lock_guard<std::mutex> hold(choices_lock);
    choice *slot = slot_of(key);
    if (!(slot->key == key) || memcmp(&slot->algorithm, &algorithm, sizeof algorithm) != 0) {
        *slot = {};
        slot->key = key;
        slot->algorithm = algorithm;
    }
    slot->checked[(key.n - n) / 32] |= bit_of(key, n);
}

/* ---- errors ----------------------------------------------------------------------------- */

static int fail(const product &p, const char *call, const char *reason, lazy_error *err)
{
    return lazy_fail(err, LAZY_DEVICE, "matrix product (%d, %d) by (%d, %d)^T: %s: %s", p.n, p.cols, p.rows, p.cols, call, reason);
}

static int fail(const lazy_gemm *g, const product &p, const char *call, cublasStatus_t status, lazy_error *err)
{
    return fail(p, call, g->cublas->status_name(status), err);
}

static int fail(const product &p, const char *call, cudaError_t status, lazy_error *err)
{
    return fail(p, call, cudaGetErrorString(status), err);
}

/* ---- one product ------------------------------------------------------------------------ */

static size_t width_of(cudaDataType_t type) { return type == CUDA_R_32F ? 4 : 2; }

/* The bytes that all three addresses are multiples of, in as few steps as make a difference: each step has its own choices. */
static uint32_t alignment_of(const product &p)
{
    uintptr_t bits = (uintptr_t)p.x | (uintptr_t)p.w | (uintptr_t)p.y;
    return bits % 256 == 0 ? 256 : bits % 16 == 0 ? 16 : (uint32_t)width_of(p.in);
}

static choice_key key_of(const lazy_gemm *g, const product &p)
{
    uint32_t rest = (uint32_t)g->device << 24 | alignment_of(p) << 12 | (uint32_t)p.in << 7 | (uint32_t)p.out << 2 |
                    (uint32_t)p.accumulate << 1 | (uint32_t)g->tune;
    return { g->tune ? bucket_of(p.n) : p.n, p.rows, p.cols, rest };
}

static cublasStatus_t shape(const lazy_cublas *c, cublasLtMatrixLayout_t layout, cudaDataType_t type, int rows, int cols)
{
    uint32_t type_value = type;
    uint64_t rows_value = (uint64_t)rows, cols_value = (uint64_t)cols;
    int64_t stride = rows;
    cublasStatus_t status = c->layout_set(layout, CUBLASLT_MATRIX_LAYOUT_TYPE, &type_value, sizeof type_value);
    if (status == CUBLAS_STATUS_SUCCESS) status = c->layout_set(layout, CUBLASLT_MATRIX_LAYOUT_ROWS, &rows_value, sizeof rows_value);
    if (status == CUBLAS_STATUS_SUCCESS) status = c->layout_set(layout, CUBLASLT_MATRIX_LAYOUT_COLS, &cols_value, sizeof cols_value);
    if (status == CUBLAS_STATUS_SUCCESS) status = c->layout_set(layout, CUBLASLT_MATRIX_LAYOUT_LD, &stride, sizeof stride);
    return status;
}

/* To cuBLASLt every matrix is column-major, so it sees each of ours transposed: w as (cols, rows), x as (cols, n), y as (rows, n).
 * What it is asked for is hence y = w^T x, with w as the transposed operand. */
static int shape_all(const lazy_gemm *g, const product &p, lazy_error *err)
{
    cublasStatus_t status = shape(g->cublas, g->w, p.in, p.cols, p.rows);
    if (status == CUBLAS_STATUS_SUCCESS) status = shape(g->cublas, g->x, p.in, p.cols, p.n);
    if (status == CUBLAS_STATUS_SUCCESS) status = shape(g->cublas, g->y, p.out, p.rows, p.n);
    return status == CUBLAS_STATUS_SUCCESS ? LAZY_OK : fail(g, p, "cublasLtMatrixLayoutSetAttribute", status, err);
}

static cublasStatus_t multiply(const lazy_gemm *g, const product &p, void *y, const cublasLtMatmulAlgo_t &algorithm)
{
    static const float ONE = 1, ZERO = 0;
    return g->cublas->matmul(g->handle, g->desc, &ONE, p.w, g->w, p.x, g->x, p.accumulate ? &ONE : &ZERO, y, g->y, y, g->y, &algorithm,
                             g->workspace, WORKSPACE, g->stream);
}

/* Up to `most` algorithms for exactly this shape, at least one, the most promising first. */
static int guess(const lazy_gemm *g, const product &p, int most, cublasLtMatmulAlgo_t *algorithms, int *n_algorithms, lazy_error *err)
{
    uint32_t alignment = alignment_of(p);
    for (cublasLtMatmulPreferenceAttributes_t operand :
         { CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
           CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES }) {
        cublasStatus_t status = g->cublas->preference_set(g->preference, operand, &alignment, sizeof alignment);
        if (status != CUBLAS_STATUS_SUCCESS) return fail(g, p, "cublasLtMatmulPreferenceSetAttribute", status, err);
    }
    cublasLtMatmulHeuristicResult_t found[CANDIDATES] = {};
    int n_found = 0;
    cublasStatus_t status = g->cublas->heuristic(g->handle, g->desc, g->w, g->x, g->y, g->y, g->preference, most, found, &n_found);
    if (status != CUBLAS_STATUS_SUCCESS) return fail(g, p, "cublasLtMatmulAlgoGetHeuristic", status, err);
    *n_algorithms = 0;
    for (int i = 0; i < n_found; i++) {
        if (found[i].state == CUBLAS_STATUS_SUCCESS && found[i].workspaceSize <= WORKSPACE) algorithms[(*n_algorithms)++] = found[i].algo;
    }
    if (*n_algorithms == 0) return fail(g, p, "cublasLtMatmulAlgoGetHeuristic", CUBLAS_STATUS_NOT_SUPPORTED, err);
    return LAZY_OK;
}

/* ---- trials ----------------------------------------------------------------------------- */

/* Milliseconds of one run, NEVER if the algorithm refuses. The last cache is overwritten first, as weights come from memory in a
 * model; that also keeps the device busy until the run is queued, so that only the run is timed. */
static int time_once(const lazy_gemm *g, const product &p, void *scratch, const cublasLtMatmulAlgo_t &algorithm, float *milliseconds,
                     lazy_error *err)
{
    *milliseconds = NEVER;
    cudaError_t status = cudaMemsetAsync(scratch, 0, g->cache, g->stream);
    if (status == cudaSuccess) status = cudaEventRecord(g->begin, g->stream);
    if (status != cudaSuccess) return fail(p, "starting a trial", status, err);
    bool ran = multiply(g, p, scratch, algorithm) == CUBLAS_STATUS_SUCCESS;
    status = cudaEventRecord(g->end, g->stream);
    if (status == cudaSuccess) status = cudaEventSynchronize(g->end);
    float elapsed = 0;
    if (status == cudaSuccess) status = cudaEventElapsedTime(&elapsed, g->begin, g->end);
    if (status != cudaSuccess) return fail(p, "timing a trial", status, err);
    if (ran) *milliseconds = elapsed;
    return LAZY_OK;
}

/* The best of up to TRIALS runs after one that does not count (it may load the kernel), fewer where more would not matter. */
static int time_algorithm(const lazy_gemm *g, const product &p, void *scratch, const cublasLtMatmulAlgo_t &algorithm, float to_beat,
                          float *best, lazy_error *err)
{
    *best = NEVER;
    float milliseconds;
    int code = time_once(g, p, scratch, algorithm, &milliseconds, err);
    if (code != LAZY_OK || milliseconds == NEVER) return code;
    for (int i = 0; i < TRIALS; i++) {
        code = time_once(g, p, scratch, algorithm, &milliseconds, err);
        if (code != LAZY_OK) return code;
        *best = fminf(*best, milliseconds);
        if (*best > BEHIND * to_beat || *best > LONG_TRIAL) break;
    }
    return LAZY_OK;
}

/* The fastest of n > 1 algorithms. Their output goes to scratch memory, taken for the occasion: y must be written once, and added
 * to once. Where there is no memory for that, the first of them will have to do. */
static int try_all(const lazy_gemm *g, const product &p, const cublasLtMatmulAlgo_t *algorithms, int n, cublasLtMatmulAlgo_t *fastest,
                   lazy_error *err)
{
    *fastest = algorithms[0];
    size_t bytes = (size_t)p.n * (size_t)p.rows * width_of(p.out);
    if (bytes < g->cache) bytes = g->cache;
    void *scratch = nullptr;
    cudaError_t status = cudaMalloc(&scratch, bytes);
    if (status == cudaErrorMemoryAllocation) {
        cudaGetLastError(); /* so that nobody takes it for theirs */
        return LAZY_OK;
    }
    if (status != cudaSuccess) return fail(p, "memory for trials", status, err);

    int code = LAZY_OK;
    status = cudaMemsetAsync(scratch, 0, bytes, g->stream); /* what is added to must be numbers */
    if (status != cudaSuccess) code = fail(p, "memory for trials", status, err);
    float best = NEVER;
    for (int i = 0; i < n && code == LAZY_OK; i++) {
        float milliseconds;
        code = time_algorithm(g, p, scratch, algorithms[i], best, &milliseconds, err);
        if (milliseconds < best) {
            best = milliseconds;
            *fastest = algorithms[i];
        }
    }
    status = cudaFree(scratch);
    if (status != cudaSuccess && code == LAZY_OK) code = fail(p, "memory for trials", status, err);
    if (best == NEVER && code == LAZY_OK) code = fail(g, p, "every algorithm", CUBLAS_STATUS_NOT_SUPPORTED, err);
    return code;
}

/* The algorithm for a shape whose bucket has none yet. */
static int choose(const lazy_gemm *g, const product &p, const choice_key &key, cublasLtMatmulAlgo_t *algorithm, lazy_error *err)
{
    cudaStreamCaptureStatus capture;
    cudaError_t status = cudaStreamIsCapturing(g->stream, &capture);
    if (status != cudaSuccess) return fail(p, "cudaStreamIsCapturing", status, err);
    bool capturing = capture != cudaStreamCaptureStatusNone;

    cublasLtMatmulAlgo_t candidates[CANDIDATES];
    int n = 0;
    int code = guess(g, p, g->tune && !capturing ? CANDIDATES : 1, candidates, &n, err);
    if (code != LAZY_OK) return capturing ? lazy_fail_in(err, "captured before it ever ran") : code;
    if (n == 1) *algorithm = candidates[0];
    else code = try_all(g, p, candidates, n, algorithm, err);
    if (code == LAZY_OK && !capturing) remember(key, p.n, *algorithm);
    return code;
}

/* The algorithm for exactly this shape. Where the bucket's is not up to it, which is rare, cuBLASLt is asked each time. */
static int pick(const lazy_gemm *g, const product &p, cublasLtMatmulAlgo_t *algorithm, lazy_error *err)
{
    choice_key key = key_of(g, p);
    bool checked;
    if (!recall(key, p.n, algorithm, &checked)) return choose(g, p, key, algorithm, err);
    if (checked) return LAZY_OK;
    cublasLtMatmulHeuristicResult_t result = {};
    cublasStatus_t status = g->cublas->check(g->handle, g->desc, g->w, g->x, g->y, g->y, algorithm, &result);
    if (status == CUBLAS_STATUS_SUCCESS && result.workspaceSize <= WORKSPACE) {
        remember(key, p.n, *algorithm);
        return LAZY_OK;
    }
    int n = 0;
    return guess(g, p, 1, algorithm, &n, err);
}

static bool known(cudaDataType_t type) { return type == CUDA_R_32F || type == CUDA_R_16F || type == CUDA_R_16BF; }

int lazy_gemm_run(lazy_gemm *g, void *y, const void *x, const void *w, int n, int rows, int cols, bool accumulate, cudaDataType_t in_type,
                  cudaDataType_t out_type, lazy_error *err)
{
    if (n == 0) return LAZY_OK;
    if (!y || !x || !w || n < 0 || rows < 1 || cols < 1)
        return lazy_fail(err, LAZY_INVALID, "matrix product (%d, %d) by (%d, %d)^T: a size below 1, or an address is missing", n, cols,
                         rows, cols);
    if (!known(in_type) || (out_type != in_type && out_type != CUDA_R_32F))
        return lazy_fail(err, LAZY_INVALID, "matrix product: no type %d to type %d; f32, f16 and bf16 go to themselves or to f32", in_type,
                         out_type);
    product p = { y, x, w, n, rows, cols, accumulate, in_type, out_type };
    int code = shape_all(g, p, err);
    if (code != LAZY_OK) return code;
    cublasLtMatmulAlgo_t algorithm;
    code = pick(g, p, &algorithm, err);
    if (code != LAZY_OK) return code;
    cublasStatus_t status = multiply(g, p, y, algorithm);
    return status == CUBLAS_STATUS_SUCCESS ? LAZY_OK : fail(g, p, "cublasLtMatmul", status, err);
}

/* ---- open and close --------------------------------------------------------------------- */

static int open_cuda(lazy_gemm *g, lazy_error *err)
{
    int cache = 0;
    cudaError_t status = cudaGetDevice(&g->device);
    if (status == cudaSuccess) status = cudaDeviceGetAttribute(&cache, cudaDevAttrL2CacheSize, g->device);
    if (status == cudaSuccess) status = cudaEventCreate(&g->begin);
    if (status == cudaSuccess) status = cudaEventCreate(&g->end);
    if (status != cudaSuccess) return lazy_fail(err, LAZY_DEVICE, "matrix products: %s", cudaGetErrorString(status));
    g->cache = (size_t)cache;
    status = cudaMalloc(&g->workspace, WORKSPACE);
    if (status == cudaSuccess) return LAZY_OK;
    cudaGetLastError();
    return lazy_fail(err, status == cudaErrorMemoryAllocation ? LAZY_MEMORY : LAZY_DEVICE,
                     "matrix products: %zu bytes of device memory to work in: %s", WORKSPACE, cudaGetErrorString(status));
}

static cublasStatus_t open_cublas(lazy_gemm *g)
{
    const lazy_cublas *c = g->cublas;
    int32_t transposed = CUBLAS_OP_T, plain = CUBLAS_OP_N;
    uint64_t workspace = WORKSPACE;
    uint32_t reduction = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE; /* parts of a sum are never rounded to 16 bits */
    cublasStatus_t status = c->create(&g->handle);
    if (status == CUBLAS_STATUS_SUCCESS) status = c->product_create(&g->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    if (status == CUBLAS_STATUS_SUCCESS) status = c->product_set(g->desc, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed);
    if (status == CUBLAS_STATUS_SUCCESS) status = c->product_set(g->desc, CUBLASLT_MATMUL_DESC_TRANSB, &plain, sizeof plain);
    for (cublasLtMatrixLayout_t *layout : { &g->w, &g->x, &g->y }) {
        if (status == CUBLAS_STATUS_SUCCESS) status = c->layout_create(layout, CUDA_R_32F, 1, 1, 1);
    }
    if (status == CUBLAS_STATUS_SUCCESS) status = c->preference_create(&g->preference);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = c->preference_set(g->preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = c->preference_set(g->preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reduction, sizeof reduction);
    return status;
}

int lazy_gemm_open(lazy_gemm **out, const lazy_cublas *cublas, cudaStream_t stream, lazy_error *err)
{
    *out = nullptr;
    void *memory;
    int code = lazy_alloc_zeroed(&memory, 1, sizeof(lazy_gemm), "matrix products", err);
    if (code != LAZY_OK) return code;
    lazy_gemm *g = static_cast<lazy_gemm *>(memory);
    const char *tune = getenv("LAZYLLM_CUDA_TUNE");
    g->cublas = cublas;
    g->stream = stream;
    g->tune = !tune || strcmp(tune, "0") != 0;
    code = open_cuda(g, err);
    if (code == LAZY_OK) {
        cublasStatus_t status = open_cublas(g);
        if (status != CUBLAS_STATUS_SUCCESS)
            code = lazy_fail(err, LAZY_DEVICE, "matrix products: %s could not be set up: %s", cublas->file, cublas->status_name(status));
    }
    if (code != LAZY_OK) {
        lazy_gemm_close(g);
        return code;
    }
    *out = g;
    return LAZY_OK;
}

void lazy_gemm_close(lazy_gemm *g)
{
    if (!g) return;
    const lazy_cublas *c = g->cublas;
    if (g->workspace) {
        cudaStreamSynchronize(g->stream); /* products under way still use it */
        cudaFree(g->workspace);
    }
    if (g->end) cudaEventDestroy(g->end);
    if (g->begin) cudaEventDestroy(g->begin);
    if (g->preference) c->preference_destroy(g->preference);
    for (cublasLtMatrixLayout_t layout : { g->w, g->x, g->y }) {
        if (layout) c->layout_destroy(layout);
    }
    if (g->desc) c->product_destroy(g->desc);
    if (g->handle) c->destroy(g->handle);
    lazy_free(g);
}
