/* gemm.h — matrix products with cuBLASLt on one stream. */
#ifndef LAZY_GEMM_H
#define LAZY_GEMM_H

#include "cublas.h"

enum : size_t {
    LAZY_GEMM_WORKSPACE = 32 << 20
}; /* bytes: NVIDIA's recommendation for the devices that need the largest */

/* A cuBLASLt handle and its workspace. Not thread-safe; products run in order on the stream it was opened for. */
typedef struct lazy_gemm lazy_gemm;

/* `stream`, of the current device, stays the caller's; that device must be current whenever the object is used. */
int lazy_gemm_open(lazy_gemm **out, const lazy_cublas *cublas, cudaStream_t stream, lazy_error *err);
void lazy_gemm_close(lazy_gemm *gemm); /* waits for the stream; NULL is allowed */

/* y[n, rows] (+)= x[n, cols] w[rows, cols]^T: row-major device memory, contiguous but for rows of y that are `stride`
 * values apart; y overlaps neither x nor w, accumulation in f32. in_type, of x and w: CUDA_R_32F, CUDA_R_16F or
 * CUDA_R_16BF; out_type, of y: the same, or CUDA_R_32F.
 *
 * Takes the first algorithm that cuBLASLt proposes, and remembers it for the last few dozen shapes. If cuBLASLt has
 * none for this shape, *refused is set, nothing has been submitted, and the result is LAZY_OK: the caller computes the
 * product otherwise. Neither allocates nor waits. */
int lazy_gemm_run(lazy_gemm *gemm, void *y, const void *x, const void *w, int n, int rows, int cols, int stride,
                  bool accumulate, cudaDataType_t in_type, cudaDataType_t out_type, bool *refused, lazy_error *err);

#endif
