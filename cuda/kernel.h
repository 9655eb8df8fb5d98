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
 * Pointers into shared memory are generic ones. All instructions need sm_80, but those of warpgroups: sm_90a and no other. */
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

/* ---- products of a warpgroup, which run beside it (sm_90a): four warps whose first is a multiple of four ----
 *
 * All 128 threads execute these together. The right order is: wgmma_fence on all registers that take part, products, wgmma_commit,
 * wgmma_wait on what is wanted from them. Between a product and its wait its registers, which are d and a, may be neither read nor
 * written, and its shared memory not written. */

/* Orders this thread's writes to shared memory, those of its cp.async that it has waited for among them, before what wgmma reads;
 * other threads' writes need their own fence and then a barrier. */
__device__ __forceinline__ void fence_for_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/* A place in shared memory, as wgmma knows it. */
__device__ __forceinline__ uint32_t shared_address(const void *shared) { return (uint32_t)__cvta_generic_to_shared(shared); }

/* The compiler knows nothing of products under way; this keeps it from moving reads and writes of registers past where it stands. */
template <int N> __device__ __forceinline__ void hold_registers(float (&r)[N][4])
{
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(r[i][0]), "+f"(r[i][1]), "+f"(r[i][2]), "+f"(r[i][3])::"memory");
}

template <int N> __device__ __forceinline__ void hold_registers(uint32_t (&r)[N][4])
{
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+r"(r[i][0]), "+r"(r[i][1]), "+r"(r[i][2]), "+r"(r[i][3])::"memory");
}

/* Must follow whatever wrote the registers of the next products; once for all that are issued up to the next wait. */
template <class... R> __device__ __forceinline__ void wgmma_fence(R &...registers)
{
    (hold_registers(registers), ...);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

/* Makes a group of the products issued since the last one. */
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

/* Waits until at most the N newest groups are under way; `registers` are those of products that are done then. */
template <int N, class... R> __device__ __forceinline__ void wgmma_wait(R &...registers)
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
    (hold_registers(registers), ...);
}

/* d: (64, 8N) f32, warp w of the four has rows 16w … 16w+15, and d[j] is as of mma_m16n8k16 its columns 8j … 8j+7.
 * a: (64, 16), in shared memory by rows, or in registers, of each warp as of mma_m16n8k16.
 * b: (16, 8N), in shared memory by columns or by rows. What lies there is named by wgmma_matrix, below.
 * Not `accumulate`: what was in d counts for nothing. The last argument only names the type of a and b. */
#define LAZY_D32                                                                                                                           \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                                               \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define LAZY_D64                                                                                                                           \
    LAZY_D32 ", "                                                                                                                          \
             "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                                            \
             "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define LAZY_F1(d, j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define LAZY_F8(d, j)                                                                                                                      \
    LAZY_F1(d, j), LAZY_F1(d, j + 1), LAZY_F1(d, j + 2), LAZY_F1(d, j + 3), LAZY_F1(d, j + 4), LAZY_F1(d, j + 5), LAZY_F1(d, j + 6),       \
        LAZY_F1(d, j + 7)
#define LAZY_WGMMA(T, type)                                                                                                                \
    __device__ __forceinline__ void wgmma_by_columns(float(&d)[16][4], uint64_t a, uint64_t b, bool accumulate, T)                         \
    {                                                                                                                                      \
        asm volatile("{.reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" LAZY_D64      \
                     "}, %64, %65, p, 1, 1, 0, 0;}"                                                                                        \
                     : LAZY_F8(d, 0), LAZY_F8(d, 8)                                                                                        \
                     : "l"(a), "l"(b), "r"((int)accumulate)                                                                                \
                     : "memory");                                                                                                          \
    }                                                                                                                                      \
    __device__ __forceinline__ void wgmma_by_rows(float(&d)[16][4], const uint32_t(&a)[4], uint64_t b, T)                                  \
    {                                                                                                                                      \
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" LAZY_D64                                            \
                     "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"                                                                           \
                     : LAZY_F8(d, 0), LAZY_F8(d, 8)                                                                                        \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)                                                                  \
                     : "memory");                                                                                                          \
    }                                                                                                                                      \
    __device__ __forceinline__ void wgmma_by_rows(float(&d)[8][4], const uint32_t(&a)[4], uint64_t b, T)                                   \
    {                                                                                                                                      \
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" LAZY_D32 "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;" \
                     : LAZY_F8(d, 0)                                                                                                       \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)                                                                  \
                     : "memory");                                                                                                          \
    }
LAZY_WGMMA(__nv_bfloat16, "bf16")
LAZY_WGMMA(__half, "f16")
#undef LAZY_WGMMA
#undef LAZY_F8
#undef LAZY_F1
#undef LAZY_D64
#undef LAZY_D32

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

/* ---- how wgmma finds a matrix of 16-bit values in shared memory ----
 *
 * In rows of 64, 128 bytes, eight of which make an atom: 1024 bytes at a multiple of 1024. The 16 bytes at i of row r lie at i ^ r % 8,
 * so that eight of one column lie in different banks. Addresses are swizzled as a whole: what begins within a row is named by where it
 * would begin in row 0. */

enum { WGMMA_ROW = 64, WGMMA_ATOM = 8 * WGMMA_ROW /* values */ };

/* Where the eight values from 8 `piece` of a row lie, in values. */
__host__ __device__ constexpr int wgmma_place(int row, int piece) { return row * WGMMA_ROW + (piece ^ row % 8) * 8; }

/* `from`: the first atom. Operands whose rows run along k take 16 values of each row from `first`; those whose rows run along n or m
 * take 16 whole rows, and what is wider than a row goes on `next` values further on. */
__device__ __forceinline__ uint64_t wgmma_matrix(const void *from, int first, int next)
{
    uint64_t address = shared_address(from) + 2 * first, leading = 2 * next, stride = 2 * WGMMA_ATOM, swizzle_128_bytes = 1;
    return (address & 0x3ffff) >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | swizzle_128_bytes << 62;
}

#endif
