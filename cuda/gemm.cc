#include "gemm.h"

#include <initializer_list>
#include <mutex>
#include <new>
#include <string.h>
#include <type_traits>

extern "C" {
#include "../csrc/error.h"
#include "../csrc/memory.h"
}

namespace
{
constexpr int MAX_CHOICES = 256; /* a pruned pass has a few shapes for each of its numbers of rows */

/* The arguments of lazy_gemm_run that an algorithm depends on. */
struct shape {
    int n, rows, cols, stride;
    cudaDataType_t in, out;
    int accumulate;
    uint32_t alignment; /* bytes that all addresses are multiples of: 256, 16 or one element */
};
static_assert(std::has_unique_object_representations_v<shape>, "shapes are compared by memcmp");

struct choice {
    shape of; /* n == 0: no choice yet */
    bool refused, has_workspace;
    cublasLtMatmulAlgo_t algorithm; /* unless refused */
};
} // namespace

struct lazy_gemm {
    const lazy_cublas *cublas;
    std::mutex lock; /* guards all below */
    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t desc;
    cublasLtMatmulPreference_t preference;
    void *workspace;      /* (LAZY_GEMM_WORKSPACE,) on the device */
    cudaStream_t user;    /* of the last product that uses it; NULL: it is free */
    cudaEvent_t released; /* by `user`, for another stream */
    choice choices[MAX_CHOICES];
    int oldest; /* index into choices */
};

namespace
{
uint32_t width_of(cudaDataType_t type) { return type == CUDA_R_32F ? 4 : 2; }

/* cuBLASLt treats matrices as column-major, so it sees ours transposed: w as (cols, rows), x as (cols, n), y as (rows,
 * n). It is therefore asked for y = w^T x, with w as the transposed operand. */
struct layouts {
    const lazy_cublas *cublas;
    cublasLtMatrixLayout_t w = nullptr, x = nullptr, y = nullptr;
    cublasStatus_t status;

    layouts(const lazy_gemm *g, const shape &s) : cublas(g->cublas)
    {
        auto create = cublas->layout_create;
        status = create(&w, s.in, (uint64_t)s.cols, (uint64_t)s.rows, s.cols);
        if (!status) status = create(&x, s.in, (uint64_t)s.cols, (uint64_t)s.n, s.cols);
        if (!status) status = create(&y, s.out, (uint64_t)s.rows, (uint64_t)s.n, s.stride);
    }
    ~layouts()
    {
        for (cublasLtMatrixLayout_t layout : { w, x, y })
            if (layout) cublas->layout_destroy(layout);
    }
    layouts(const layouts &) = delete;
};

/* Takes the first algorithm that cuBLASLt proposes for operands of this alignment and this workspace; false if it
 * proposes none. */
bool find_algorithm(const lazy_gemm *g, const layouts &l, uint32_t alignment, uint64_t workspace, choice *chosen)
{
    const lazy_cublas *c = g->cublas;
    cublasStatus_t status =
        c->preference_set(g->preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace);
    for (cublasLtMatmulPreferenceAttributes_t operand :
         { CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
           CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES })
        if (!status) status = c->preference_set(g->preference, operand, &alignment, sizeof alignment);
    cublasLtMatmulHeuristicResult_t found = {};
    int n_found = 0;
    if (!status) status = c->heuristic(g->handle, g->desc, l.w, l.x, l.y, l.y, g->preference, 1, &found, &n_found);
    if (status || n_found < 1 || found.state || found.workspaceSize > workspace) return false;
    chosen->algorithm = found.algo;
    chosen->has_workspace = found.workspaceSize > 0;
    return true;
}

/* The choice for this shape. For a new shape cuBLASLt is asked twice: as it is, then as if it were aligned to one
 * element and had no workspace. */
choice *choose(lazy_gemm *g, const shape &s)
{
    for (choice &c : g->choices)
        if (!memcmp(&c.of, &s, sizeof s)) return &c;
    layouts l(g, s);
    choice *c = &g->choices[g->oldest];
    g->oldest = (g->oldest + 1) % MAX_CHOICES;
    *c = {};
    c->of = s;
    c->refused = l.status || (!find_algorithm(g, l, s.alignment, LAZY_GEMM_WORKSPACE, c) &&
                              !find_algorithm(g, l, width_of(s.in), 0, c));
    return c;
}

/* n rounded up to what an algorithm is chosen for, so that steps that revive other numbers of rows share it: kernels
 * compute whole tiles of 8 to 128 rows. */
int rounded(int n)
{
    int size = 8;
    while (size < n && size < 128) size *= 2;
    return (n + size - 1) / size * size;
}

/* Makes the stream wait for the workspace if another stream has used it last. */
cudaError_t take_workspace(lazy_gemm *g, cudaStream_t stream)
{
    cudaError_t failed = cudaSuccess;
    if (g->user && g->user != stream) {
        failed = cudaEventRecord(g->released, g->user);
        if (!failed) failed = cudaStreamWaitEvent(stream, g->released, 0);
    }
    if (!failed) g->user = stream;
    return failed;
}

/* True for the errors of a product that cuBLASLt does not support, as opposed to those of a device that fails. */
bool is_refusal(cublasStatus_t status)
{
    return status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE ||
           status == CUBLAS_STATUS_ARCH_MISMATCH;
}
} // namespace

int lazy_gemm_run(lazy_gemm *g, cudaStream_t stream, void *y, const void *x, const void *w, int n, int rows, int cols,
                  int stride, bool accumulate, cudaDataType_t in_type, cudaDataType_t out_type, bool *refused,
                  lazy_error *err)
{
    static const float ONE = 1, ZERO = 0;
    uintptr_t bits = (uintptr_t)x | (uintptr_t)w | (uintptr_t)y;
    uint32_t alignment = bits % 256 == 0 ? 256u : bits % 16 == 0 ? 16u : width_of(in_type);
    shape s = { n, rows, cols, stride, in_type, out_type, accumulate, alignment };
    std::lock_guard<std::mutex> hold(g->lock);
    layouts l(g, s);
    for (int of_choice : { rounded(n), n }) {
        s.n = of_choice;
        choice *c = choose(g, s);
        if (c->refused) continue;
        cublasStatus_t status = l.status;
        if (!status && c->has_workspace && take_workspace(g, stream)) status = CUBLAS_STATUS_EXECUTION_FAILED;
        if (!status)
            status = g->cublas->matmul(g->handle, g->desc, &ONE, w, l.w, x, l.x, accumulate ? &ONE : &ZERO, y, l.y, y,
                                       l.y, &c->algorithm, g->workspace, LAZY_GEMM_WORKSPACE, stream);
        *refused = false;
        if (!status) return LAZY_OK;
        if (!is_refusal(status))
            return lazy_fail(err, LAZY_DEVICE, "matrix product (%d, %d) by (%d, %d)^T: cublasLtMatmul: %s", n, cols,
                             rows, cols, g->cublas->status_name(status));
        c->refused = of_choice == n; /* a choice for n rounded up stays: other n must not depend on this call */
    }
    *refused = true;
    return LAZY_OK;
}

/* ---- open and close --------------------------------------------------------------------- */

static cublasStatus_t open_cublas(lazy_gemm *g)
{
    const lazy_cublas *c = g->cublas;
    int32_t transposed = CUBLAS_OP_T;                            /* the other operand is not, by default */
    uint32_t reduction = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE; /* partial sums stay f32 */
    cublasStatus_t status = c->create(&g->handle);
    if (!status) status = c->product_create(&g->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    if (!status) status = c->product_set(g->desc, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed);
    if (!status) status = c->preference_create(&g->preference);
    if (!status)
        status =
            c->preference_set(g->preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reduction, sizeof reduction);
    return status;
}

int lazy_gemm_open(lazy_gemm **out, const lazy_cublas *cublas, lazy_error *err)
{
    *out = nullptr;
    void *memory;
    int code = lazy_alloc_zeroed_bytes(&memory, 1, sizeof(lazy_gemm), "matrix products", err);
    if (code) return code;
    lazy_gemm *g = new (memory) lazy_gemm();
    g->cublas = cublas;
    cudaError_t failed = cudaMalloc(&g->workspace, LAZY_GEMM_WORKSPACE);
    if (!failed) failed = cudaEventCreateWithFlags(&g->released, cudaEventDisableTiming);
    if (failed) {
        cudaGetLastError(); /* clears the error, which the next launch would otherwise report */
        code =
            lazy_fail(err, failed == cudaErrorMemoryAllocation ? LAZY_MEMORY : LAZY_DEVICE,
                      "matrix products: %zu bytes of workspace: %s", LAZY_GEMM_WORKSPACE, cudaGetErrorString(failed));
    } else if (cublasStatus_t status = open_cublas(g)) {
        code = lazy_fail(err, LAZY_DEVICE, "matrix products: %s could not be set up: %s", cublas->file,
                         cublas->status_name(status));
    }
    if (code) lazy_gemm_close(g);
    else *out = g;
    return code;
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
    if (g->desc) c->product_destroy(g->desc);
    if (g->handle) c->destroy(g->handle);
    lazy_free(g);
}
