/* fake_cublas.cc — stands for ../cublas.cc: a table of cuBLASLt's functions as plain loops over host memory.
 *
 * It refuses calls that the real library refuses, and calls that this package never makes. Its algorithms differ in
 * their requirements, not in their results, so that tests reach every way of choosing one. */
#include <numeric>
#include <vector>

#include "../cublas.h"
#include "cuda_on_cpu.h"

extern "C" {
#include "../../csrc/format.h"

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
    FOURS = 0x6c617a79, /* needs rows of d in multiples of four, and operands aligned to 16 bytes */
    SPLIT,              /* split-k: needs workspace for partial sums */
    PLAIN,              /* no requirements */
};
constexpr size_t SPLIT_WORKSPACE = 1 << 20, VECTOR = 16 /* bytes */;

template <class T, class... Members> cublasStatus_t create(T **out, Members... members)
{
    return *out = new T{ members... }, CUBLAS_STATUS_SUCCESS;
}
template <class T> cublasStatus_t destroy(T *object) { return delete object, CUBLAS_STATUS_SUCCESS; }
template <class T, class Attribute> cublasStatus_t set(T *object, Attribute which, const void *value, size_t bytes)
{
    bool good = bytes == ((int)which == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES ? 8 : 4);
    if (good) memcpy(&object->attribute[which], value, bytes);
    return good ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
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
    bool fours = d->rows % 4 == 0,
         splits = preference->attribute[CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES] >= SPLIT_WORKSPACE &&
                  preference->attribute[CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK] ==
                      CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    for (int at = CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES; at <= CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES; at++)
        fours = fours && preference->attribute[at] % VECTOR == 0;
    uint64_t id = fours ? FOURS : splits ? SPLIT : PLAIN;
    *n_found = max_found;
    *found = {};
    found->algo = { { id, (uint64_t)a->type, (uint64_t)d->type } };
    found->workspaceSize = id == SPLIT ? SPLIT_WORKSPACE : 0;
    return CUBLAS_STATUS_SUCCESS;
}

lazy_dtype dtype_of(cudaDataType_t type)
{
    return type == CUDA_R_32F ? LAZY_F32 : type == CUDA_R_16F ? LAZY_F16 : LAZY_BF16;
}

char *place_of(const void *matrix, const lazy_cublas_layout &layout, size_t c)
{
    return (char *)matrix + c * lazy_row_bytes(dtype_of(layout.type), (int)layout.ld);
}

std::vector<float> column(const void *matrix, const lazy_cublas_layout &layout, size_t c)
{
    std::vector<float> values(layout.rows);
    lazy_widen(values.data(), place_of(matrix, layout, c), dtype_of(layout.type), (int)layout.rows);
    return values;
}

/* d = a^T b + beta d; sums in the order of the inner dimension. */
void multiply(const void *a, const lazy_cublas_layout &of_a, const void *b, const lazy_cublas_layout &of_b, void *d,
              const lazy_cublas_layout &of_d, float beta)
{
    std::vector<std::vector<float>> columns;
    for (size_t i = 0; i < of_a.cols; i++) columns.push_back(column(a, of_a, i));
    auto write = [&](size_t j, const std::vector<float> &values) {
        lazy_narrow(place_of(d, of_d, j), values.data(), dtype_of(of_d.type), (int)values.size());
    };
    for (size_t j = 0; j < of_d.cols; j++) {
        std::vector<float> sums, wide = column(b, of_b, j), before = column(d, of_d, j);
        for (const std::vector<float> &of_row : columns)
            sums.push_back(std::inner_product(wide.begin(), wide.end(), of_row.begin(), 0.0f));
        write(j, sums);
        if (beta == 0.0f) continue;
        sums = column(d, of_d, j); /* as on an H200, the product is rounded before it is added */
        for (size_t i = 0; i < sums.size(); i++) sums[i] += before[i];
        write(j, sums);
    }
}

cublasStatus_t run(cublasLtHandle_t, cublasLtMatmulDesc_t product, const void *alpha, const void *a,
                   cublasLtMatrixLayout_t of_a, const void *b, cublasLtMatrixLayout_t of_b, const void *beta,
                   const void *c, cublasLtMatrixLayout_t of_c, void *d, cublasLtMatrixLayout_t of_d,
                   const cublasLtMatmulAlgo_t *algorithm, void *workspace, size_t workspace_bytes, cudaStream_t stream)
{
    const uint64_t *chosen = algorithm->data, id = chosen[0];
    if (!is_supported(*product, *of_a, *of_b, of_c, of_d)) return CUBLAS_STATUS_NOT_SUPPORTED;
    uintptr_t bits = (uintptr_t)a | (uintptr_t)b | (uintptr_t)d;
    if (id < FOURS || id > PLAIN || chosen[1] != (uint64_t)of_a->type || chosen[2] != (uint64_t)of_d->type || c != d ||
        *static_cast<const float *>(alpha) != 1.0f || bits % (id == FOURS ? VECTOR : 2) ||
        (id == FOURS && of_d->rows % 4) || (id == SPLIT && workspace_bytes < SPLIT_WORKSPACE))
        return CUBLAS_STATUS_INVALID_VALUE;
    auto work = [=, kept = *static_cast<const float *>(beta), of_a = *of_a, of_b = *of_b, of_d = *of_d] {
        if (id == SPLIT) static_cast<char *>(workspace)[workspace_bytes - 1] = 1; /* faults if it is too short */
        multiply(a, of_a, b, of_b, d, of_d, kept);
    };
    return cuda_on_cpu::submit(stream, work, 0) ? CUBLAS_STATUS_EXECUTION_FAILED : CUBLAS_STATUS_SUCCESS;
}
} // namespace

int lazy_cublas_load(const lazy_cublas **out, const char *const *, int, lazy_error *)
{
    auto name_of = [](cublasStatus_t) { return "CUBLAS_STATUS_EXECUTION_FAILED"; }; /* the only one that tests return */
    static const lazy_cublas table = { "cuda_on_cpu", 130000,  create, destroy, nullptr, name_of, create,  destroy,
                                       create,        destroy, set,    create,  destroy, set,     propose, run };
    *out = &table;
    return LAZY_OK;
}
