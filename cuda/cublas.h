/* cublas.h — declarations of the part of cuBLASLt's C API that matrix products use, and a table of those functions.
 *
 * cuBLASLt is not linked and not needed to build, because it is half a gigabyte and its location differs between
 * machines. It is loaded when the first device is opened. The values and layouts below are the library's binary
 * interface, unchanged since version 12. */
#ifndef LAZY_CUBLAS_H
#define LAZY_CUBLAS_H

#include <cuda_runtime_api.h>
#include <library_types.h> /* cudaDataType_t */
#include <stddef.h>
#include <stdint.h>

extern "C" {
#include "../csrc/lazyllm.h"
}

enum cublasStatus_t : int {
    CUBLAS_STATUS_SUCCESS = 0,
    CUBLAS_STATUS_NOT_INITIALIZED = 1,
    CUBLAS_STATUS_ALLOC_FAILED = 3,
    CUBLAS_STATUS_INVALID_VALUE = 7,
    CUBLAS_STATUS_ARCH_MISMATCH = 8,
    CUBLAS_STATUS_MAPPING_ERROR = 11,
    CUBLAS_STATUS_EXECUTION_FAILED = 13,
    CUBLAS_STATUS_INTERNAL_ERROR = 14,
    CUBLAS_STATUS_NOT_SUPPORTED = 15,
    CUBLAS_STATUS_LICENSE_ERROR = 16,
};

enum cublasOperation_t : int { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1 };

enum cublasComputeType_t : int { CUBLAS_COMPUTE_32F = 68 };

/* The comment names the type of each attribute's value, which is passed as bytes of that size. */
enum cublasLtMatrixLayoutAttribute_t : int {
    CUBLASLT_MATRIX_LAYOUT_TYPE = 0, /* uint32_t */
    CUBLASLT_MATRIX_LAYOUT_ROWS = 2, /* uint64_t */
    CUBLASLT_MATRIX_LAYOUT_COLS = 3, /* uint64_t */
    CUBLASLT_MATRIX_LAYOUT_LD = 4,   /* int64_t, elements from one column to the next */
};

enum cublasLtMatmulDescAttributes_t : int {
    CUBLASLT_MATMUL_DESC_TRANSA = 3, /* int32_t */
    CUBLASLT_MATMUL_DESC_TRANSB = 4, /* int32_t */
};

enum cublasLtMatmulPreferenceAttributes_t : int {
    CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1,   /* uint64_t */
    CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK = 3, /* uint32_t */
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES = 5, /* uint32_t, like the next three */
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES = 6,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES = 7,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES = 8,
};

/* Allowed places for the partial sums of a split-k product. A product that is not split is always allowed. */
enum cublasLtReductionScheme_t : uint32_t {
    CUBLASLT_REDUCTION_SCHEME_INPLACE = 1,      /* in the output */
    CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE = 2, /* in the workspace, as f32 */
    CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE = 4,  /* in the workspace, in the output's type */
};

typedef struct cublasLtContext *cublasLtHandle_t;
typedef struct lazy_cublas_layout *cublasLtMatrixLayout_t;
typedef struct lazy_cublas_product *cublasLtMatmulDesc_t;
typedef struct lazy_cublas_preference *cublasLtMatmulPreference_t;

/* Plain data: may be copied and used with another handle of the same library on the same model of device. */
typedef struct cublasLtMatmulAlgo_t {
    uint64_t data[8];
} cublasLtMatmulAlgo_t;

typedef struct cublasLtMatmulHeuristicResult_t {
    cublasLtMatmulAlgo_t algo;
    size_t workspaceSize; /* bytes needed */
    cublasStatus_t state; /* the other members are valid only if this is success */
    float wavesCount;
    int reserved[4];
} cublasLtMatmulHeuristicResult_t;

static_assert(sizeof(cublasLtMatmulHeuristicResult_t) == 96, "the library writes an array of these");

#ifdef LAZY_CUDA_ON_CPU /* a real library in the process must not find the fakes of cuda_on_cpu/ */
#pragma GCC visibility push(hidden)
#endif
extern "C" {
cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle);
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle);
size_t cublasLtGetVersion(void); /* 130100 is 13.1.0 */
const char *cublasLtGetStatusName(cublasStatus_t status);

/* Matrices are column-major. */
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType_t type, uint64_t rows,
                                          uint64_t cols, int64_t ld);
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout);
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute, const void *value,
                                                size_t bytes);

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *product, cublasComputeType_t compute,
                                        cudaDataType_t scale_type);
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t product);
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t product, cublasLtMatmulDescAttributes_t attribute,
                                              const void *value, size_t bytes);

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference);
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference);
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void *value,
                                                    size_t bytes);

/* Up to max_found algorithms, best estimate first. */
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t product,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int max_found,
                                              cublasLtMatmulHeuristicResult_t *found, int *n_found);
/* d = alpha op(a) op(b) + beta c; alpha and beta are read from host memory before it returns. */
cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t product, const void *alpha, const void *a,
                              cublasLtMatrixLayout_t a_layout, const void *b, cublasLtMatrixLayout_t b_layout,
                              const void *beta, const void *c, cublasLtMatrixLayout_t c_layout, void *d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t *algorithm, void *workspace,
                              size_t workspace_bytes, cudaStream_t stream);
}
#ifdef LAZY_CUDA_ON_CPU
#pragma GCC visibility pop
#endif

/* FUNCTION(member of lazy_cublas, symbol in the library) */
#define LAZY_CUBLAS_FUNCTIONS(FUNCTION)                                                                                \
    FUNCTION(create, cublasLtCreate)                                                                                   \
    FUNCTION(destroy, cublasLtDestroy)                                                                                 \
    FUNCTION(get_version, cublasLtGetVersion)                                                                          \
    FUNCTION(status_name, cublasLtGetStatusName)                                                                       \
    FUNCTION(layout_create, cublasLtMatrixLayoutCreate)                                                                \
    FUNCTION(layout_destroy, cublasLtMatrixLayoutDestroy)                                                              \
    FUNCTION(layout_set, cublasLtMatrixLayoutSetAttribute)                                                             \
    FUNCTION(product_create, cublasLtMatmulDescCreate)                                                                 \
    FUNCTION(product_destroy, cublasLtMatmulDescDestroy)                                                               \
    FUNCTION(product_set, cublasLtMatmulDescSetAttribute)                                                              \
    FUNCTION(preference_create, cublasLtMatmulPreferenceCreate)                                                        \
    FUNCTION(preference_destroy, cublasLtMatmulPreferenceDestroy)                                                      \
    FUNCTION(preference_set, cublasLtMatmulPreferenceSetAttribute)                                                     \
    FUNCTION(heuristic, cublasLtMatmulAlgoGetHeuristic)                                                                \
    FUNCTION(matmul, cublasLtMatmul)

typedef struct lazy_cublas {
    const char *file; /* path of the loaded library */
    size_t version;   /* 130100 is 13.1.0 */
#define LAZY_CUBLAS_MEMBER(name, symbol) decltype(&symbol) name;
    LAZY_CUBLAS_FUNCTIONS(LAZY_CUBLAS_MEMBER)
#undef LAZY_CUBLAS_MEMBER
} lazy_cublas;

/* Loads the library once per process; *out is valid until the process ends. Thread-safe. Later calls return the library
 * that the first successful call found. Search order:
 *   the full path in the environment variable LAZYLLM_CUBLAS (if set, nothing else is tried);
 *   a libcublasLt.so.13 or .12 already loaded in this process;
 *   places[0 … n_places-1], full paths, read only during the call;
 *   libcublasLt.so.13 and .12 on the dynamic loader's search path;
 *   $CUDA_HOME/lib64. */
int lazy_cublas_load(const lazy_cublas **out, const char *const *places, int n_places, lazy_error *err);

#endif
