#include "gemm.h"

#include <initializer_list>
#include <mutex>
#include <new>

extern "C" {
#include "../csrc/error.h"
#include "../csrc/memory.h"
}

static constexpr int MAX_CHOICES = 256; /* a pruned pass has a few shapes for each of its numbers of rows */

/* The arguments of lazy_gemm_run that an algorithm depends on. */
struct shape {
    int n, rows, cols, stride;
    cudaDataType_t in, out;
    bool accumulate;
    uint32_t alignment; /* bytes that all addresses are multiples of: 256, 16 or one element */

    bool operator==(const shape &o) const
    {
        return n == o.n && rows == o.rows && cols == o.cols && stride == o.stride && in == o.in && out == o.out &&
               accumulate == o.accumulate && alignment == o.alignment;
    }
};

struct choice {
    shape of; /* n == 0: no choice yet */
    bool refused, has_workspace;
    cublasLtMatmulAlgo_t algorithm; /* unless refused */
};

struct lazy_gemm {
    const lazy_cublas *cublas;
    std::mutex lock; /* guards all below */
    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t w, x, y; /* reshaped for each product, because creating them allocates */
    cublasLtMatmulPreference_t preference;
    void *workspace;      /* (LAZY_GEMM_WORKSPACE,) on the device */
    cudaStream_t user;    /* of the last product that uses it; NULL: it is free */
    cudaEvent_t released; /* by `user`, for another stream */
    choice choices[MAX_CHOICES];
    int oldest; /* index into choices */
};

/* ---- one product ------------------------------------------------------------------------ */

static int fail(const lazy_gemm *g, const shape &s, const char *call, cublasStatus_t status, lazy_error *err)
{
    return lazy_fail(err, LAZY_DEVICE, "matrix product (%d, %d) by (%d, %d)^T: %s: %s", s.n, s.cols, s.rows, s.cols,
                     call, g->cublas->status_name(status));
}

static uint32_t width_of(cudaDataType_t type) { return type == CUDA_R_32F ? 4 : 2; }

static cublasStatus_t set_layout(const lazy_cublas *c, cublasLtMatrixLayout_t layout, cudaDataType_t type, int rows,
                                 int cols, int64_t stride)
{
    uint32_t type_value = type;
    uint64_t rows_value = (uint64_t)rows, cols_value = (uint64_t)cols;
    cublasStatus_t status = c->layout_set(layout, CUBLASLT_MATRIX_LAYOUT_TYPE, &type_value, sizeof type_value);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = c->layout_set(layout, CUBLASLT_MATRIX_LAYOUT_ROWS, &rows_value, sizeof rows_value);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = c->layout_set(layout, CUBLASLT_MATRIX_LAYOUT_COLS, &cols_value, sizeof cols_value);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = c->layout_set(layout, CUBLASLT_MATRIX_LAYOUT_LD, &stride, sizeof stride);
    return status;
}

/* cuBLASLt treats matrices as column-major, so it sees ours transposed: w as (cols, rows), x as (cols, n), y as (rows,
 * n). It is therefore asked for y = w^T x, with w as the transposed operand. */
static int set_layouts(const lazy_gemm *g, const shape &s, lazy_error *err)
{
    cublasStatus_t status = set_layout(g->cublas, g->w, s.in, s.cols, s.rows, s.cols);
    if (status == CUBLAS_STATUS_SUCCESS) status = set_layout(g->cublas, g->x, s.in, s.cols, s.n, s.cols);
    if (status == CUBLAS_STATUS_SUCCESS) status = set_layout(g->cublas, g->y, s.out, s.rows, s.n, s.stride);
    return status == CUBLAS_STATUS_SUCCESS ? LAZY_OK : fail(g, s, "cublasLtMatrixLayoutSetAttribute", status, err);
}

/* Takes the first algorithm that cuBLASLt proposes for operands of this alignment and this workspace; false if it
 * proposes none. */
static bool find_algorithm(const lazy_gemm *g, uint32_t alignment, uint64_t workspace, choice *chosen)
{
    const lazy_cublas *c = g->cublas;
    cublasStatus_t status =
        c->preference_set(g->preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace);
    for (cublasLtMatmulPreferenceAttributes_t operand :
         { CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
           CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES })
        if (status == CUBLAS_STATUS_SUCCESS)
            status = c->preference_set(g->preference, operand, &alignment, sizeof alignment);
    cublasLtMatmulHeuristicResult_t found = {};
    int n_found = 0;
    if (status == CUBLAS_STATUS_SUCCESS)
        status = c->heuristic(g->handle, g->desc, g->w, g->x, g->y, g->y, g->preference, 1, &found, &n_found);
    if (status != CUBLAS_STATUS_SUCCESS || n_found < 1 || found.state != CUBLAS_STATUS_SUCCESS ||
        found.workspaceSize > workspace)
        return false;
    chosen->algorithm = found.algo;
    chosen->has_workspace = found.workspaceSize > 0;
    return true;
}

/* *out = the choice for this shape. For a new shape cuBLASLt is asked twice: as it is, then as if it were aligned to
 * one element and had no workspace. */
static int choose(lazy_gemm *g, const shape &s, choice **out, lazy_error *err)
{
    for (choice &c : g->choices)
        if (c.of == s) return *out = &c, LAZY_OK;
    int code = set_layouts(g, s, err);
    if (code) return code;
    choice *c = *out = &g->choices[g->oldest];
    g->oldest = (g->oldest + 1) % MAX_CHOICES;
    *c = {};
    c->of = s;
    c->refused = !find_algorithm(g, s.alignment, LAZY_GEMM_WORKSPACE, c) && !find_algorithm(g, width_of(s.in), 0, c);
    return LAZY_OK;
}

/* n rounded up to what an algorithm is chosen for, so that steps that revive other numbers of rows share it: kernels
 * compute whole tiles of 8 to 128 rows. */
static int rounded(int n)
{
    int size = 8;
    while (size < n && size < 128) size *= 2;
    return (n + size - 1) / size * size;
}

/* Makes the stream wait for the workspace if another stream has used it last. */
static cudaError_t take_workspace(lazy_gemm *g, cudaStream_t stream)
{
    cudaError_t failed = cudaSuccess;
    if (g->user && g->user != stream) {
        failed = cudaEventRecord(g->released, g->user);
        if (!failed) failed = cudaStreamWaitEvent(stream, g->released, 0);
    }
    if (!failed) g->user = stream;
    return failed;
}

static cublasStatus_t multiply(lazy_gemm *g, cudaStream_t stream, const choice &c, void *y, const void *x,
                               const void *w)
{
    static const float ONE = 1, ZERO = 0;
    if (c.has_workspace && take_workspace(g, stream)) return CUBLAS_STATUS_EXECUTION_FAILED;
    return g->cublas->matmul(g->handle, g->desc, &ONE, w, g->w, x, g->x, c.of.accumulate ? &ONE : &ZERO, y, g->y, y,
                             g->y, &c.algorithm, g->workspace, LAZY_GEMM_WORKSPACE, stream);
}

/* True for the errors of a product that cuBLASLt does not support, as opposed to those of a device that fails. */
static bool is_refusal(cublasStatus_t status)
{
    return status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE ||
           status == CUBLAS_STATUS_ARCH_MISMATCH;
}

static bool is_supported(cudaDataType_t type)
{
    return type == CUDA_R_32F || type == CUDA_R_16F || type == CUDA_R_16BF;
}

int lazy_gemm_run(lazy_gemm *g, cudaStream_t stream, void *y, const void *x, const void *w, int n, int rows, int cols,
                  int stride, bool accumulate, cudaDataType_t in_type, cudaDataType_t out_type, bool *refused,
                  lazy_error *err)
{
    *refused = false;
    if (n == 0) return LAZY_OK;
    if (!y || !x || !w || n < 0 || rows < 1 || cols < 1 || stride < rows)
        return lazy_fail(err, LAZY_INVALID,
                         "matrix product (%d, %d) by (%d, %d)^T: a size is below 1, or a pointer is NULL", n, cols,
                         rows, cols);
    if (!is_supported(in_type) || (out_type != in_type && out_type != CUDA_R_32F))
        return lazy_fail(
            err, LAZY_INVALID,
            "matrix product: type %d to type %d is not supported; f32, f16 and bf16 inputs give the same type or f32",
            in_type, out_type);
    uintptr_t bits = (uintptr_t)x | (uintptr_t)w | (uintptr_t)y;
    shape s = { n,       rows,     cols,       stride,
                in_type, out_type, accumulate, bits % 256 == 0 ? 256u : bits % 16 == 0 ? 16u : width_of(in_type) };
    std::lock_guard<std::mutex> hold(g->lock);
    for (int of_choice : { rounded(n), n }) {
        choice *c;
        s.n = of_choice;
        int code = choose(g, s, &c, err);
        if (code) return code;
        if (c->refused) continue;
        s.n = n;
        if ((code = set_layouts(g, s, err))) return code;
        cublasStatus_t status = multiply(g, stream, *c, y, x, w);
        if (status == CUBLAS_STATUS_SUCCESS) return LAZY_OK;
        if (!is_refusal(status)) return fail(g, s, "cublasLtMatmul", status, err);
        c->refused = of_choice == n; /* other n of this choice do not depend on what ran before */
    }
    *refused = true;
    return LAZY_OK;
}

/* ---- open and close --------------------------------------------------------------------- */

static cublasStatus_t open_cublas(lazy_gemm *g)
{
    const lazy_cublas *c = g->cublas;
    int32_t transposed = CUBLAS_OP_T, plain = CUBLAS_OP_N;
    uint32_t reduction = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE; /* partial sums stay f32 */
    cublasStatus_t status = c->create(&g->handle);
    if (status == CUBLAS_STATUS_SUCCESS) status = c->product_create(&g->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = c->product_set(g->desc, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = c->product_set(g->desc, CUBLASLT_MATMUL_DESC_TRANSB, &plain, sizeof plain);
    for (cublasLtMatrixLayout_t *layout : { &g->w, &g->x, &g->y }) {
        if (status == CUBLAS_STATUS_SUCCESS) status = c->layout_create(layout, CUDA_R_32F, 1, 1, 1);
    }
    if (status == CUBLAS_STATUS_SUCCESS) status = c->preference_create(&g->preference);
    if (status == CUBLAS_STATUS_SUCCESS)
        status =
            c->preference_set(g->preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reduction, sizeof reduction);
    return status;
}

int lazy_gemm_open(lazy_gemm **out, const lazy_cublas *cublas, lazy_error *err)
{
    *out = nullptr;
    void *memory;
    int code = lazy_alloc_zeroed_bytes(&memory, 1, sizeof(lazy_gemm), "matrix products", err);
    if (code != LAZY_OK) return code;
    lazy_gemm *g = new (memory) lazy_gemm();
    g->cublas = cublas;
    cudaError_t failed = cudaMalloc(&g->workspace, LAZY_GEMM_WORKSPACE);
    if (!failed) failed = cudaEventCreateWithFlags(&g->released, cudaEventDisableTiming);
    if (failed != cudaSuccess) {
        cudaGetLastError(); /* clears the error, which the next launch would otherwise report */
        code =
            lazy_fail(err, failed == cudaErrorMemoryAllocation ? LAZY_MEMORY : LAZY_DEVICE,
                      "matrix products: %zu bytes of workspace: %s", LAZY_GEMM_WORKSPACE, cudaGetErrorString(failed));
    } else if (cublasStatus_t status = open_cublas(g)) {
        code = lazy_fail(err, LAZY_DEVICE, "matrix products: %s could not be set up: %s", cublas->file,
                         cublas->status_name(status));
    }
    if (code != LAZY_OK) {
        lazy_gemm_close(g);
        return code;
    }
    *out = g;
    return LAZY_OK;
}

void lazy_gemm_leave(lazy_gemm *g, cudaStream_t stream)
{
    std::lock_guard<std::mutex> hold(g->lock);
    if (g->user == stream) g->user = nullptr;
}

void lazy_gemm_close(lazy_gemm *g)
{
    if (!g) return;
    const lazy_cublas *c = g->cublas;
    cudaFree(g->workspace);
    if (g->released) cudaEventDestroy(g->released);
    if (g->preference) c->preference_destroy(g->preference);
    for (cublasLtMatrixLayout_t layout : { g->w, g->x, g->y }) {
        if (layout) c->layout_destroy(layout);
    }
    if (g->desc) c->product_destroy(g->desc);
    if (g->handle) c->destroy(g->handle);
    lazy_free(g);
}
