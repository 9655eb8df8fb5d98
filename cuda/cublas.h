/* cublas.h — declarations of the part of cuBLASLt's C API that matrix products use, and a table of those functions.
 *
 * cuBLASLt is not linked and not needed to build, because it is half a gigabyte and its location differs between
 * machines. It is loaded when the first device is opened. The values and layouts below are the library's binary
 * interface, unchanged since version 12. */
#pragma once

#include <cuda_runtime_api.h>
#include <library_types.h> /* cudaDataType_t */
#include <stddef.h>
#include <stdint.h>

extern "C" {
#include "../csrc/lazyllm.h"
}

enum cublasStatus_t : int {
    CUBLAS_STATUS_SUCCESS = 0,
    CUBLAS_STATUS_INVALID_VALUE = 7,
    CUBLAS_STATUS_ARCH_MISMATCH = 8,
    CUBLAS_STATUS_EXECUTION_FAILED = 13,
    CUBLAS_STATUS_NOT_SUPPORTED = 15,
};

enum cublasComputeType_t : int { CUBLAS_COMPUTE_32F = 68 };
enum : int32_t { CUBLAS_OP_T = 1 };

/* The comment names the type of each attribute's value, which is passed as bytes of that size. */
enum cublasLtMatmulDescAttributes_t : int { CUBLASLT_MATMUL_DESC_TRANSA = 3 /* int32_t, an operation */ };
enum cublasLtMatmulPreferenceAttributes_t : int {
    CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1,   /* uint64_t */
    CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK = 3, /* uint32_t: where partial sums of a split-k product may lie */
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES = 5, /* uint32_t, like the next three */
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES = 6,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES = 7,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES = 8,
};
enum : uint32_t { CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE = 2 /* in the workspace, as f32 */ };

typedef struct lazy_cublas_handle *cublasLtHandle_t;
typedef struct lazy_cublas_layout *cublasLtMatrixLayout_t;
typedef struct lazy_cublas_product *cublasLtMatmulDesc_t;
typedef struct lazy_cublas_preference *cublasLtMatmulPreference_t;

/* Plain data: may be copied and used with another handle of the same library on the same model of device. */
struct cublasLtMatmulAlgo_t {
    uint64_t data[8];
};

struct cublasLtMatmulHeuristicResult_t {
    cublasLtMatmulAlgo_t algo;
    size_t workspaceSize; /* bytes needed */
    cublasStatus_t state; /* the other members are valid only if this is success */
    float wavesCount;
    int reserved[4];
};
static_assert(sizeof(cublasLtMatmulHeuristicResult_t) == 96, "the library writes an array of these");

/* FUNCTION(result, member of lazy_cublas, symbol in the library, parameters). Matrices are column-major. get_version:
 * 130100 is 13.1.0. heuristic: up to max_found algorithms, best estimate first. matmul: d = alpha op(a) op(b) + beta c;
 * alpha and beta are read from host memory before it returns. */
#define LAZY_CUBLAS_FUNCTIONS(FUNCTION)                                                                                \
    FUNCTION(cublasStatus_t, create, cublasLtCreate, (cublasLtHandle_t *))                                             \
    FUNCTION(cublasStatus_t, destroy, cublasLtDestroy, (cublasLtHandle_t))                                             \
    FUNCTION(size_t, get_version, cublasLtGetVersion, ())                                                              \
    FUNCTION(const char *, status_name, cublasLtGetStatusName, (cublasStatus_t))                                       \
    FUNCTION(cublasStatus_t, layout_create, cublasLtMatrixLayoutCreate,                                                \
             (cublasLtMatrixLayout_t *, cudaDataType_t, uint64_t rows, uint64_t cols, int64_t ld))                     \
    FUNCTION(cublasStatus_t, layout_destroy, cublasLtMatrixLayoutDestroy, (cublasLtMatrixLayout_t))                    \
    FUNCTION(cublasStatus_t, product_create, cublasLtMatmulDescCreate,                                                 \
             (cublasLtMatmulDesc_t *, cublasComputeType_t, cudaDataType_t of_scale))                                   \
    FUNCTION(cublasStatus_t, product_destroy, cublasLtMatmulDescDestroy, (cublasLtMatmulDesc_t))                       \
    FUNCTION(cublasStatus_t, product_set, cublasLtMatmulDescSetAttribute,                                              \
             (cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t, const void *value, size_t bytes))                  \
    FUNCTION(cublasStatus_t, preference_create, cublasLtMatmulPreferenceCreate, (cublasLtMatmulPreference_t *))        \
    FUNCTION(cublasStatus_t, preference_destroy, cublasLtMatmulPreferenceDestroy, (cublasLtMatmulPreference_t))        \
    FUNCTION(cublasStatus_t, preference_set, cublasLtMatmulPreferenceSetAttribute,                                     \
             (cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t, const void *value, size_t bytes))      \
    FUNCTION(cublasStatus_t, heuristic, cublasLtMatmulAlgoGetHeuristic,                                                \
             (cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,              \
              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t, int max_found,           \
              cublasLtMatmulHeuristicResult_t *found, int *n_found))                                                   \
    FUNCTION(cublasStatus_t, matmul, cublasLtMatmul,                                                                   \
             (cublasLtHandle_t, cublasLtMatmulDesc_t, const void *alpha, const void *a,                                \
              cublasLtMatrixLayout_t a_layout, const void *b, cublasLtMatrixLayout_t b_layout, const void *beta,       \
              const void *c, cublasLtMatrixLayout_t c_layout, void *d, cublasLtMatrixLayout_t d_layout,                \
              const cublasLtMatmulAlgo_t *, void *workspace, size_t workspace_bytes, cudaStream_t))

struct lazy_cublas {
    const char *file; /* path of the loaded library */
    size_t version;
#define LAZY_CUBLAS_MEMBER(result, member, symbol, parameters) result(*member) parameters;
    LAZY_CUBLAS_FUNCTIONS(LAZY_CUBLAS_MEMBER)
#undef LAZY_CUBLAS_MEMBER
};

/* Loads the library once per process; *out is valid until the process ends. Thread-safe. Later calls return the library
 * that the first successful call found. Search order:
 *   the full path in the environment variable LAZYLLM_CUBLAS (if set, nothing else is tried);
 *   a libcublasLt.so.13 or .12 already loaded in this process;
 *   places[0 … n_places-1], full paths, read only during the call;
 *   libcublasLt.so.13 and .12 on the dynamic loader's search path;
 *   $CUDA_HOME/lib64. */
int lazy_cublas_load(const lazy_cublas **out, const char *const *places, int n_places, lazy_error *err);
