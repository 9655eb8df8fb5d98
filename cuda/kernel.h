/* kernel.h — what every .cu file of this project includes, and all that it may use besides CUDA's own language.
 *
 * nvcc makes GPU code of such a file. g++ (`-x c++`) makes code of it that runs on the CPU, one fiber per CUDA thread, so that
 * every kernel is tested, also under sanitizers, where there is no GPU: see cuda_on_cpu/cuda_on_cpu.h. The names below are the
 * same in both. What they ask of a kernel:
 *
 * - Kernels are started by lazy_launch, never by <<<>>>.
 * - Kernels are static or in a namespace without a name: else ASan does not guard the ends of their __shared__ arrays.
 * - Static shared memory is declared with __shared__, dynamic shared memory with LAZY_DYNAMIC_SHARED, once per kernel.
 * - Shared memory is read and written by assignments, of uint4 say: TSan does not see what g++ makes of memcpy and memset.
 * - PTX belongs in this file, with its emulation in cuda_on_cpu.h, and nowhere else.
 * - A block must not wait for another one: on the CPU they run one after the other. A thread that waits in a loop for others of
 *   its block calls __nanosleep there.
 *
 * Pointers into shared memory are generic ones. All instructions need sm_80. */
#ifndef LAZY_KERNEL_H
#define LAZY_KERNEL_H

#include <cstddef>
#include <cstdint>

#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#ifdef __CUDACC__

/* Lets `kernel` have that much dynamic shared memory. To be called before it is launched by its address. */
template <class... P> cudaError_t lazy_prepare(void (*kernel)(P...), size_t shared_bytes)
{
    constexpr size_t without_asking = 48 * 1024;
    if (shared_bytes <= without_asking) return cudaSuccess;
    cudaError_t code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared_bytes);
    return code == cudaSuccess ? code : cudaGetLastError();
}

/* Starts `kernel` and returns what became of it; kernels that failed earlier on the stream may show here too. */
template <class... P, class... A>
cudaError_t lazy_launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream, A &&...args)
{
    static_assert(sizeof...(P) == sizeof...(A), "a kernel takes as many arguments as it has parameters");
    cudaError_t code = lazy_prepare(kernel, shared_bytes);
    if (code != cudaSuccess) return code;
    kernel<<<grid, block, shared_bytes, stream>>>(static_cast<P>(args)...);
    return cudaGetLastError();
}

/* T *name: the dynamic shared memory of the block, aligned to 16 bytes */
#define LAZY_DYNAMIC_SHARED(T, name)                                                                                                       \
    extern __shared__ __align__(16) unsigned char lazy_dynamic_shared[];                                                                   \
    T *name = reinterpret_cast<T *>(lazy_dynamic_shared)

/* ---- instructions of a whole warp: all 32 threads execute the same one together ---- */

/* d += a b in f32, a: (16, 16), b: (16, 8), d: (16, 8). With g = lane / 4 and t = lane % 4, and the lower index in the lower half:
 *   a[0] = A[g][2t, 2t + 1]   a[1] = A[g + 8][2t, 2t + 1]   a[2] = A[g][2t + 8, 2t + 9]   a[3] = A[g + 8][2t + 8, 2t + 9]
 *   b[0] = B[2t, 2t + 1][g]   b[1] = B[2t + 8, 2t + 9][g]
 *   d[0], d[1] = D[g][2t, 2t + 1]   d[2], d[3] = D[g + 8][2t, 2t + 1]
 * The last argument only names the type of a and b. */
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], __nv_bfloat16)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], __half)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* Four 8x8 matrices of 16-bit values from shared memory. Lane l names row l % 8 of matrix l / 8, 16 bytes that start at a multiple
 * of 16. r[i] gets, of matrix i, [lane / 4][2 (lane % 4)] and the value right of it (in the upper half); with _trans,
 * [2 (lane % 4)][lane / 4] and the value below it. Orders no memory: what other lanes wrote needs __syncwarp before it. */
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void *shared_row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(shared_row))
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void *shared_row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(shared_row))
                 : "memory");
}

/* ---- copies that run beside the thread that asked for them ---- */

/* 16 bytes, or 16 zeros if not valid (`global` is not read then); both ends lie at multiples of 16. The shared memory holds nothing
 * of use until this thread has waited; other threads need a barrier after that. */
__device__ __forceinline__ void cp_async_16(void *shared, const void *global, bool valid)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((uint32_t)__cvta_generic_to_shared(shared)), "l"(global),
                 "r"(valid ? 16 : 0)
                 : "memory");
}

/* Makes a group of this thread's copies since the last one, possibly of none. */
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/* Waits until at most the N newest groups of this thread are under way. */
template <int N> __device__ __forceinline__ void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

/* ---- arithmetic ---- */

/* 2^x within 2 units in the last place; what would be denormal is 0 */
__device__ __forceinline__ float fast_exp2f(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#else
#include "cuda_on_cpu/cuda_on_cpu.h"
#endif

#endif
