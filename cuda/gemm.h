/* gemm.h — matrix products with cuBLASLt. */
#pragma once

#include "cublas.h"

/* bytes: NVIDIA's recommendation for the devices that need the largest */
enum : size_t { LAZY_GEMM_WORKSPACE = 32 << 20 };

/* A cuBLASLt handle, its workspace and the algorithms chosen so far, for all streams of a device. Thread-safe. */
typedef struct lazy_gemm lazy_gemm;

/* For the current device, which must be current whenever the object is used. */
int lazy_gemm_open(lazy_gemm **out, const lazy_cublas *cublas, lazy_error *err);
/* Before a stream that products ran on is destroyed; its work has finished. */
void lazy_gemm_leave(lazy_gemm *gemm, cudaStream_t stream);
void lazy_gemm_close(lazy_gemm *gemm); /* after all its streams; NULL is allowed */

/* On the stream: y[n, rows] (+)= x[n, cols] w[rows, cols]^T: row-major device memory, contiguous but for rows of y that
 * are `stride` values apart; y overlaps neither x nor w, accumulation in f32. in_type, of x and w: CUDA_R_32F,
 * CUDA_R_16F or CUDA_R_16BF; out_type, of y: the same, or CUDA_R_32F.
 *
 * Takes the first algorithm that cuBLASLt proposes for n rounded up, and remembers it for the last 256 shapes; for n
 * itself where that one is refused. If cuBLASLt has none for this shape, *refused is set, nothing has been submitted,
 * and the result is LAZY_OK: the caller computes the product otherwise. Neither allocates device memory nor waits. */
int lazy_gemm_run(lazy_gemm *gemm, cudaStream_t stream, void *y, const void *x, const void *w, int n, int rows,
                  int cols, int stride, bool accumulate, cudaDataType_t in_type, cudaDataType_t out_type, bool *refused,
                  lazy_error *err);
