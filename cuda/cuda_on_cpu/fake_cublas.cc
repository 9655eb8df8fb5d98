/* fake_cublas.cc — stands for ../cublas.cc: a table of cuBLASLt's functions as plain loops over host memory.
 *
 * It refuses calls that the real library refuses, and calls that this package never makes. Its algorithms differ in
 * their requirements, not in their results, so that tests reach every way of choosing one. */
#include <vector>

#include "../cublas.h"
#include "../values.h"

extern "C" {
unsigned long long cuda_on_cpu_searches; /* how often the heuristic was asked */
}

struct lazy_cublas_handle {
};
struct lazy_cublas_layout {
    cudaDataType_t type;
    uint64_t rows, cols;
    int64_t ld;
};
struct lazy_cublas_product {
    cublasComputeType_t compute;
    cudaDataType_t of_scale;
    uint64_t attribute[CUBLASLT_MATMUL_DESC_TRANSA + 1] = {};
};
struct lazy_cublas_preference {
    uint64_t attribute[CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES + 1] = {};
};

namespace
{
enum algorithm_id : uint64_t {
    FOURS, /* needs rows of d in multiples of four, and operands aligned to 16 bytes */
    SPLIT, /* split-k: needs workspace for partial sums */
    PLAIN, /* no requirements */
    N_ALGORITHMS,
};
constexpr size_t SPLIT_WORKSPACE = 1 << 20, VECTOR = 16 /* bytes */;
constexpr uint64_t MARK = 0x6c617a792d676d6d; /* marks algorithms that the heuristic returned */

template <class T, class... Members> cublasStatus_t create(T **out, Members... members)
{
    return *out = new T{ members... }, CUBLAS_STATUS_SUCCESS;
}
template <class T> cublasStatus_t destroy(T *object) { return delete object, CUBLAS_STATUS_SUCCESS; }
template <class T, class Attribute> cublasStatus_t set(T *object, Attribute which, const void *value, size_t bytes)
{
    if (bytes != ((int)which == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES ? 8 : 4)) return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(&object->attribute[which], value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

/* True for d (rows, n) = a (cols, rows)^T b (cols, n) + c, summed in f32, with columns aligned to four bytes. */
bool is_supported(const lazy_cublas_product &p, const lazy_cublas_layout &a, const lazy_cublas_layout &b,
                  const lazy_cublas_layout *c, const lazy_cublas_layout *d)
{
    return p.compute == CUBLAS_COMPUTE_32F && p.of_scale == CUDA_R_32F &&
           p.attribute[CUBLASLT_MATMUL_DESC_TRANSA] == CUBLAS_OP_T && c == d && a.type == b.type &&
           (d->type == a.type || d->type == CUDA_R_32F) && a.rows == b.rows && d->rows == a.cols && d->cols == b.cols &&
           (uint64_t)d->ld >= d->rows && (a.type == CUDA_R_32F || a.ld % 2 == 0);
}

cublasStatus_t propose(cublasLtHandle_t, cublasLtMatmulDesc_t product, cublasLtMatrixLayout_t a,
                       cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                       cublasLtMatmulPreference_t preference, int max_found, cublasLtMatmulHeuristicResult_t *found,
                       int *n_found)
{
    __atomic_fetch_add(&cuda_on_cpu_searches, 1, __ATOMIC_RELAXED);
    if (!is_supported(*product, *a, *b, c, d)) return CUBLAS_STATUS_NOT_SUPPORTED;
    const uint64_t *allowed = preference->attribute;
    bool fours = d->rows % 4 == 0, splits = allowed[CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES] >= SPLIT_WORKSPACE;
    for (int at = CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES; at <= CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES; at++)
        fours = fours && allowed[at] % VECTOR == 0;
    splits = splits && allowed[CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK] == CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    uint64_t id = fours ? FOURS : splits ? SPLIT : PLAIN;
    *n_found = max_found;
    *found = { { { MARK, id, (uint64_t)a->type, (uint64_t)d->type } },
               id == SPLIT ? SPLIT_WORKSPACE : 0,
               CUBLAS_STATUS_SUCCESS,
               1,
               {} };
    return CUBLAS_STATUS_SUCCESS;
}

/* Calls use(value of the type). */
template <class F> void with_type(cudaDataType_t type, F use)
{
    if (type == CUDA_R_32F) use(float{});
    else if (type == CUDA_R_16F) use(__half{});
    else use(__nv_bfloat16{});
}

/* to[r * row_step + c * col_step] = value (r, c) of a matrix */
std::vector<float> widened(const void *from, const lazy_cublas_layout &layout, size_t row_step, size_t col_step)
{
    std::vector<float> to(layout.rows * layout.cols);
    with_type(layout.type, [&](auto type) {
        auto *values = static_cast<const decltype(type) *>(from);
        for (size_t c = 0; c < layout.cols; c++)
            for (size_t r = 0; r < layout.rows; r++)
                to[r * row_step + c * col_step] = lazy_wide(values[c * (size_t)layout.ld + r]);
    });
    return to;
}

/* d = a^T b + beta d; sums in the order of the inner dimension. O3: the loop over rows of d is vectorised. */
__attribute__((optimize("O3"))) void multiply(const void *a, const lazy_cublas_layout &of_a, const void *b,
                                              const lazy_cublas_layout &of_b, void *d, const lazy_cublas_layout &of_d,
                                              float beta)
{
    size_t rows = of_d.rows;
    std::vector<float> wide_a = widened(a, of_a, rows, 1), wide_b = widened(b, of_b, 1, of_b.rows);
    for (size_t j = 0; j < of_d.cols; j++) {
        std::vector<float> sums(rows);
        for (size_t k = 0; k < of_a.rows; k++)
            for (size_t i = 0; i < rows; i++) sums[i] += wide_a[k * rows + i] * wide_b[j * of_b.rows + k];
        with_type(of_d.type, [&](auto type) {
            auto *to = static_cast<decltype(type) *>(d) + j * (size_t)of_d.ld;
            for (size_t i = 0; i < rows; i++) {
                float before = beta != 0.0f ? lazy_wide(to[i]) : 0.0f;
                lazy_narrow(&to[i], sums[i]); /* as on an H200, the product is rounded before it is added */
                if (beta != 0.0f) lazy_narrow(&to[i], lazy_wide(to[i]) + before);
            }
        });
    }
}

cublasStatus_t run(cublasLtHandle_t, cublasLtMatmulDesc_t product, const void *alpha, const void *a,
                   cublasLtMatrixLayout_t of_a, const void *b, cublasLtMatrixLayout_t of_b, const void *beta,
                   const void *c, cublasLtMatrixLayout_t of_c, void *d, cublasLtMatrixLayout_t of_d,
                   const cublasLtMatmulAlgo_t *algorithm, void *workspace, size_t workspace_bytes, cudaStream_t stream)
{
    const uint64_t *chosen = algorithm->data, id = chosen[1];
    float scale = *static_cast<const float *>(alpha), kept = *static_cast<const float *>(beta);
    if (!is_supported(*product, *of_a, *of_b, of_c, of_d) || (id == FOURS && of_d->rows % 4 != 0))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    uintptr_t bits = (uintptr_t)a | (uintptr_t)b | (uintptr_t)d;
    if (chosen[0] != MARK || chosen[2] != (uint64_t)of_a->type || chosen[3] != (uint64_t)of_d->type || c != d ||
        scale != 1.0f || bits % (id == FOURS ? VECTOR : 2) || (id == SPLIT && workspace_bytes < SPLIT_WORKSPACE))
        return CUBLAS_STATUS_INVALID_VALUE;
    auto work = [=, of_a = *of_a, of_b = *of_b, of_d = *of_d] {
        if (id == SPLIT) /* faults if the workspace is invalid */
            static_cast<char *>(workspace)[0] = static_cast<char *>(workspace)[workspace_bytes - 1] = 1;
        multiply(a, of_a, b, of_b, d, of_d, kept);
    };
    return cuda_on_cpu::submit(stream, work, 0) ? CUBLAS_STATUS_EXECUTION_FAILED : CUBLAS_STATUS_SUCCESS;
}

const char *name_of(cublasStatus_t status)
{
    return status == CUBLAS_STATUS_EXECUTION_FAILED ? "CUBLAS_STATUS_EXECUTION_FAILED" : "another status";
}
} // namespace

int lazy_cublas_load(const lazy_cublas **out, const char *const *, int, lazy_error *)
{
    static const lazy_cublas table = {
        "cuda_on_cpu", 130000, create,  destroy, [] { return (size_t)130000; },
        name_of,       create, destroy, create,  destroy,
        set,           create, destroy, set,     propose,
        run,
    };
    *out = &table;
    return LAZY_OK;
}
