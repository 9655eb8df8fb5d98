/* fake_cublas.cc — the cuBLASLt functions declared in ../cublas.h, implemented as plain loops over host memory.
 *
 * Part of the build for the CPU. Compiled alone as a shared library, it also replaces the real one in tests of the
 * loader. It refuses calls that the real library refuses, and calls that this package never makes. Its algorithms
 * differ in their requirements, not in their results, so that tests reach every way of choosing one. */
#include "../cublas.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <functional>
#include <initializer_list>
#include <new>
#include <string.h>
#include <vector>

#ifdef LAZY_CUDA_ON_CPU
namespace cuda_on_cpu
{
cudaError_t submit(cudaStream_t stream, const std::function<void()> &work,
                   unsigned long long blocks); /* in fake_cudart.cc */
}
using cuda_on_cpu::submit;
#else /* compiled alone: there are no streams */
static cudaError_t submit(cudaStream_t, const std::function<void()> &work, unsigned long long)
{
    work();
    return cudaSuccess;
}
#endif

extern "C" {
unsigned long long cuda_on_cpu_searches; /* how often the heuristic was asked */
}

struct cublasLtContext {
    int device;
};

struct lazy_cublas_layout {
    uint32_t type;
    uint64_t rows, cols;
    int64_t ld;
};

struct lazy_cublas_product {
    int32_t transpose_a, transpose_b;
};

struct lazy_cublas_preference {
    uint64_t workspace;
    uint32_t reduction;
    uint32_t alignment[4]; /* of a, b, c, d */
};

enum algorithm_id : uint64_t {
    FOURS, /* needs rows of d in multiples of four, and operands aligned to 16 bytes */
    SPLIT, /* split-k: needs workspace for partial sums */
    PLAIN, /* no requirements */
    N_ALGORITHMS,
};
static constexpr size_t SPLIT_WORKSPACE = 1 << 20, VECTOR = 16 /* bytes */;
static constexpr uint64_t MARK = 0x6c617a792d676d6d; /* marks algorithms that the heuristic returned */

/* ---- objects ---------------------------------------------------------------------------- */

template <class T> static cublasStatus_t make(T **out, const T &value)
{
    if (!out) return CUBLAS_STATUS_INVALID_VALUE;
    *out = new (std::nothrow) T(value);
    return *out ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_ALLOC_FAILED;
}

template <class T> static cublasStatus_t unmake(T *object)
{
    delete object;
    return object ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}

template <class T> static cublasStatus_t set(T *attribute, const void *value, size_t bytes)
{
    if (!value || bytes != sizeof *attribute) return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(attribute, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) { return make(handle, { 0 }); }
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) { return unmake(handle); }
size_t cublasLtGetVersion(void) { return 130000; }

const char *cublasLtGetStatusName(cublasStatus_t status)
{
    switch (status) {
    case CUBLAS_STATUS_SUCCESS: return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_NOT_INITIALIZED: return "CUBLAS_STATUS_NOT_INITIALIZED";
    case CUBLAS_STATUS_ALLOC_FAILED: return "CUBLAS_STATUS_ALLOC_FAILED";
    case CUBLAS_STATUS_INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_ARCH_MISMATCH: return "CUBLAS_STATUS_ARCH_MISMATCH";
    case CUBLAS_STATUS_MAPPING_ERROR: return "CUBLAS_STATUS_MAPPING_ERROR";
    case CUBLAS_STATUS_EXECUTION_FAILED: return "CUBLAS_STATUS_EXECUTION_FAILED";
    case CUBLAS_STATUS_INTERNAL_ERROR: return "CUBLAS_STATUS_INTERNAL_ERROR";
    case CUBLAS_STATUS_NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
    case CUBLAS_STATUS_LICENSE_ERROR: return "CUBLAS_STATUS_LICENSE_ERROR";
    }
    return "an unknown status";
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType_t type, uint64_t rows,
                                          uint64_t cols, int64_t ld)
{
    return make(layout, { (uint32_t)type, rows, cols, ld });
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) { return unmake(layout); }

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute, const void *value,
                                                size_t bytes)
{
    if (!layout) return CUBLAS_STATUS_INVALID_VALUE;
    switch (attribute) {
    case CUBLASLT_MATRIX_LAYOUT_TYPE: return set(&layout->type, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_ROWS: return set(&layout->rows, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_COLS: return set(&layout->cols, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_LD: return set(&layout->ld, value, bytes);
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *product, cublasComputeType_t compute,
                                        cudaDataType_t scale_type)
{
    if (compute != CUBLAS_COMPUTE_32F || scale_type != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
    return make(product, { CUBLAS_OP_N, CUBLAS_OP_N });
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t product) { return unmake(product); }

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t product, cublasLtMatmulDescAttributes_t attribute,
                                              const void *value, size_t bytes)
{
    if (!product) return CUBLAS_STATUS_INVALID_VALUE;
    switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA: return set(&product->transpose_a, value, bytes);
    case CUBLASLT_MATMUL_DESC_TRANSB: return set(&product->transpose_b, value, bytes);
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference)
{
    return make(preference, { 0, 7, { 256, 256, 256, 256 } });
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) { return unmake(preference); }

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void *value,
                                                    size_t bytes)
{
    if (!preference) return CUBLAS_STATUS_INVALID_VALUE;
    switch (attribute) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: return set(&preference->workspace, value, bytes);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK: return set(&preference->reduction, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
        return set(&preference->alignment[attribute - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES], value, bytes);
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}

/* ---- supported products ----------------------------------------------------------------- */

static bool is_valid(const lazy_cublas_layout *layout)
{
    return layout && layout->rows > 0 && layout->cols > 0 && layout->ld >= 0 && (uint64_t)layout->ld >= layout->rows;
}

static bool same(const lazy_cublas_layout &a, const lazy_cublas_layout &b)
{
    return a.type == b.type && a.rows == b.rows && a.cols == b.cols && a.ld == b.ld;
}

/* Checks a product: d (rows, n) = a (cols, rows)^T b (cols, n) + c, in types that cuBLASLt sums in f32. */
static cublasStatus_t check_support(cublasLtHandle_t handle, const lazy_cublas_product *product,
                                    const lazy_cublas_layout *a, const lazy_cublas_layout *b,
                                    const lazy_cublas_layout *c, const lazy_cublas_layout *d)
{
    if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (!product || !is_valid(a) || !is_valid(b) || !is_valid(c) || !is_valid(d) || !same(*c, *d))
        return CUBLAS_STATUS_INVALID_VALUE;
    if (product->transpose_a != CUBLAS_OP_T || product->transpose_b != CUBLAS_OP_N) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (a->rows != b->rows || d->rows != a->cols || d->cols != b->cols) return CUBLAS_STATUS_INVALID_VALUE;
    bool types = (a->type == CUDA_R_32F || a->type == CUDA_R_16F || a->type == CUDA_R_16BF) && b->type == a->type &&
                 (d->type == a->type || d->type == CUDA_R_32F);
    bool odd = a->type != CUDA_R_32F && a->ld % 2 != 0; /* columns that are not aligned to four bytes */
    return types && !odd ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

static size_t workspace_of(uint64_t id) { return id == SPLIT ? SPLIT_WORKSPACE : 0; }

/* Checks that `algorithm` was returned for these types and supports this shape. */
static cublasStatus_t check_support(const cublasLtMatmulAlgo_t *algorithm, const lazy_cublas_layout *a,
                                    const lazy_cublas_layout *d)
{
    if (!algorithm || algorithm->data[0] != MARK || algorithm->data[1] >= N_ALGORITHMS)
        return CUBLAS_STATUS_INVALID_VALUE;
    if (algorithm->data[2] != a->type || algorithm->data[3] != d->type) return CUBLAS_STATUS_INVALID_VALUE;
    return algorithm->data[1] == FOURS && d->rows % 4 != 0 ? CUBLAS_STATUS_NOT_SUPPORTED : CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t product,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int max_found,
                                              cublasLtMatmulHeuristicResult_t *found, int *n_found)
{
    __atomic_fetch_add(&cuda_on_cpu_searches, 1, __ATOMIC_RELAXED);
    cublasStatus_t status = check_support(handle, product, a, b, c, d);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    if (!preference || max_found < 1 || !found || !n_found) return CUBLAS_STATUS_INVALID_VALUE;
    bool vectors = true;
    for (uint32_t alignment : preference->alignment) vectors = vectors && alignment % VECTOR == 0;
    *n_found = 0;
    for (uint64_t id = 0; id < N_ALGORITHMS && *n_found < max_found; id++) {
        cublasLtMatmulAlgo_t algorithm = { { MARK, id, a->type, d->type } };
        if (check_support(&algorithm, a, d) != CUBLAS_STATUS_SUCCESS || workspace_of(id) > preference->workspace)
            continue;
        if ((id == FOURS && !vectors) ||
            (id == SPLIT && !(preference->reduction & CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE)))
            continue;
        found[(*n_found)++] = { algorithm, workspace_of(id), CUBLAS_STATUS_SUCCESS, 1, {} };
    }
    return CUBLAS_STATUS_SUCCESS;
}

/* ---- the product ------------------------------------------------------------------------ */

/* Four floats, which GCC keeps in a vector register at any optimisation level. */
typedef float vec __attribute__((vector_size(16)));
static constexpr int VECS = 4, TILE
= 4 * VECS; /* rows of d that are summed together */

static size_t width_of(uint32_t type) { return type == CUDA_R_32F ? 4 : 2; }

static float widen(const void *from, uint32_t type)
{
    __half f16;
    __nv_bfloat16 bf16;
    float f32;
    switch (type) {
    case CUDA_R_16F: memcpy(&f16, from, sizeof f16); return __half2float(f16);
    case CUDA_R_16BF: memcpy(&bf16, from, sizeof bf16); return __bfloat162float(bf16);
    default: memcpy(&f32, from, sizeof f32); return f32;
    }
}

static void narrow(void *to, uint32_t type, float value)
{
    __half f16 = __float2half_rn(value);
    __nv_bfloat16 bf16 = __float2bfloat16_rn(value);
    switch (type) {
    case CUDA_R_16F: memcpy(to, &f16, sizeof f16); return;
    case CUDA_R_16BF: memcpy(to, &bf16, sizeof bf16); return;
    default: memcpy(to, &value, sizeof value);
    }
}

/* to[i * stride] = from[i], n of them */
static void widen_column(float *to, int64_t stride, const void *from, uint32_t type, int64_t n)
{
    const char *bytes = static_cast<const char *>(from);
    for (int64_t i = 0; i < n; i++) to[i * stride] = widen(bytes + (size_t)i * width_of(type), type);
}

/* sums[i] = column of b (k,) . i-th column of the panel (k, TILE) */
static void dots(float *sums, const float *b, const float *panel, int64_t k)
{
    vec total[VECS] = {};
    for (int64_t kk = 0; kk < k; kk++) {
        for (int v = 0; v < VECS; v++) {
            vec part;
            memcpy(&part, panel + kk * TILE + 4 * v, sizeof part);
            total[v] += part * b[kk];
        }
    }
    memcpy(sums, total, sizeof total);
}

/* The arguments of a product. */
struct job {
    const void *a, *b, *c;
    void *d;
    lazy_cublas_layout a_layout, b_layout, d_layout;
    float alpha, beta;
    char *workspace;
    size_t workspace_bytes; /* 0 if the algorithm needs none */
};

static void multiply(const job &p)
{
    if (p.workspace_bytes > 0)
        p.workspace[0] = p.workspace[p.workspace_bytes - 1] = 1; /* faults if the workspace is invalid */
    int64_t rows = (int64_t)p.d_layout.rows, n = (int64_t)p.d_layout.cols, k = (int64_t)p.a_layout.rows;
    uint32_t in = p.a_layout.type, out = p.d_layout.type;
    std::vector<float> wide_b((size_t)(n * k)), panel((size_t)(k * TILE));
    for (int64_t j = 0; j < n; j++)
        widen_column(&wide_b[(size_t)(j * k)], 1,
                     static_cast<const char *>(p.b) + (size_t)(j * p.b_layout.ld) * width_of(in), in, k);

    for (int64_t first = 0; first < rows; first += TILE) {
        int64_t tile = rows - first < TILE
        ? rows - first : TILE;
        for (int64_t i = 0; i < tile; i++) {
            const char *column = static_cast<const char *>(p.a) + (size_t)((first + i) * p.a_layout.ld) * width_of(in);
            widen_column(&panel[(size_t)i], TILE, column, in, k);
        }
        for (int64_t j = 0; j < n; j++) {
            float sums[TILE];
            dots(sums, &wide_b[(size_t)(j * k)], panel.data(), k);
            for (int64_t i = 0; i < tile; i++) {
                size_t place = (size_t)(j * p.d_layout.ld + first + i) * width_of(out);
                char *to = static_cast<char *>(p.d) + place;
                float before = p.beta != 0 ? p.beta * widen(static_cast<const char *>(p.c) + place, out) : 0;
                narrow(to, out, p.alpha * sums[i]);
                /* as on an H200, the product is rounded before it is added */
                if (p.beta != 0) narrow(to, out, widen(to, out) + before);
            }
        }
    }
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t product, const void *alpha, const void *a,
                              cublasLtMatrixLayout_t a_layout, const void *b, cublasLtMatrixLayout_t b_layout,
                              const void *beta, const void *c, cublasLtMatrixLayout_t c_layout, void *d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t *algorithm, void *workspace,
                              size_t workspace_bytes, cudaStream_t stream)
{
    cublasStatus_t status = check_support(handle, product, a_layout, b_layout, c_layout, d_layout);
    if (status == CUBLAS_STATUS_SUCCESS) status = check_support(algorithm, a_layout, d_layout);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    if (!alpha || !a || !b || !beta || !c || !d) return CUBLAS_STATUS_INVALID_VALUE;

    uint64_t id = algorithm->data[1];
    for (const void *operand : { a, b, c, static_cast<const void *>(d) }) {
        if ((uintptr_t)operand % (id == FOURS ? VECTOR : 2) != 0) return CUBLAS_STATUS_INVALID_VALUE;
    }
    if (workspace_of(id) > workspace_bytes || (workspace_bytes > 0 && !workspace) || (uintptr_t)workspace % VECTOR != 0)
        return CUBLAS_STATUS_INVALID_VALUE;

    job p = { a,
              b,
              c,
              d,
              *a_layout,
              *b_layout,
              *d_layout,
              0,
              0,
              static_cast<char *>(workspace),
              id == SPLIT ? workspace_bytes : 0 };
    memcpy(&p.alpha, alpha, sizeof p.alpha);
    memcpy(&p.beta, beta, sizeof p.beta);
    return submit(
               stream, [p] { multiply(p); }, 0) == cudaSuccess
               ? CUBLAS_STATUS_SUCCESS
               : CUBLAS_STATUS_EXECUTION_FAILED;
}
