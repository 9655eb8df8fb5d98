/* gemm.h — matrix products of one stream, by cuBLASLt. */
#ifndef LAZY_GEMM_H
#define LAZY_GEMM_H

#include "cublas.h"

/* A cuBLASLt handle and its workspace. One thread at a time; products follow each other on the stream they were opened for. */
typedef struct lazy_gemm lazy_gemm;

/* For a stream of the current device, which stays current whenever the object is used. The stream is not owned. */
int lazy_gemm_open(lazy_gemm **out, const lazy_cublas *cublas, cudaStream_t stream, lazy_error *err);
void lazy_gemm_close(lazy_gemm *gemm); /* waits for the device; NULL is fine */

/* y[n, rows] (+)= x[n, cols] w[rows, cols]^T, all row-major without gaps in device memory, y overlapping neither x nor w; sums are
 * f32. in_type, of x and w: CUDA_R_32F, CUDA_R_16F or CUDA_R_16BF; out_type, of y: the same, or CUDA_R_32F.
 *
 * Which of cuBLASLt's algorithms is best depends on the device and the shape, and its own guess can be far off: the first
 * product of a shape times the likeliest ones, on memory that it takes and gives back, and the choice is remembered for all
 * streams of the process. To vary n costs no trials without end: the products of
 *     n <= 16          each n
 *     n <= 256         from half of a power of two, exclusive, to the power of two
 *     n >  256         from a multiple of 256, exclusive, to the next
 * share a choice, made for the n that comes first, and checked to be possible for each other one. Once the choice is
 * made, a product neither allocates nor waits.
 *
 * With LAZYLLM_CUDA_TUNE=0 in the environment when the object is opened, nothing is timed and cuBLASLt's first guess for exactly
 * this shape is taken, so that two runs of a program give the same bits.
 *
 * While the stream is captured into a graph nothing is timed either, and the guess is not remembered. Some versions of
 * cuBLASLt (13.3) cannot even guess during a capture: run a shape once before capturing it. A trial calls cudaMalloc, which a
 * capture elsewhere in the process forbids unless it was begun with cudaStreamCaptureModeThreadLocal or Relaxed. */
int lazy_gemm_run(lazy_gemm *gemm, void *y, const void *x, const void *w, int n, int rows, int cols, bool accumulate,
                  cudaDataType_t in_type, cudaDataType_t out_type, lazy_error *err);

#endif
