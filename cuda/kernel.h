/* kernel.h — included by every .cu file: launches, and the PTX instructions that kernels use.
 *
 * nvcc compiles a .cu file for the GPU. g++ (`-x c++`) compiles it for the CPU, where each CUDA thread is a fiber, so
 * that every kernel is tested without a GPU, also under sanitizers: see cuda_on_cpu/cuda_on_cpu.h. The names below
 * exist in both builds. Rules for kernels:
 *
 * - They are started with lazy_launch, never with <<<>>>, and call begin_kernel first.
 * - They are static or in an unnamed namespace; otherwise ASan does not put red zones around their __shared__ arrays.
 * - Static shared memory is declared with __shared__, dynamic shared memory with LAZY_DYNAMIC_SHARED, once per kernel.
 * - Shared memory is read and written by assignment (of uint4, for example): TSan does not see the code that g++
 *   generates for memcpy and memset.
 * - PTX is written only in this file, with its emulation in cuda_on_cpu.h.
 * - A block must not wait for another block: on the CPU, blocks run one after the other. The last one to call
 * take_ticket may go on with what all have written.
 *
 * Pointers into shared memory are generic addresses. Instructions need sm_80; those of warpgroups need sm_90a. */
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#ifdef __CUDACC__

/* True if kernels of the current device may start before the stream's earlier ones have ended. */
inline bool kernels_overlap()
{
    static signed char known[64]; /* of each device: 0, or 1 + the answer; another thread finds the same */
    int device = 0, major = 0;
    if (cudaGetDevice(&device) != cudaSuccess || device >= 64) return false;
    if (!known[device] && cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess)
        known[device] = 1 + (major >= 9);
    return known[device] > 1;
}

/* Launches `kernel` and returns the launch's error; errors of earlier kernels may be reported here too. */
template <class... P, class... A>
cudaError_t lazy_launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
                        A &&...args)
{
    static_assert(sizeof...(P) == sizeof...(A), "a kernel takes as many arguments as it has parameters");
    constexpr size_t always_allowed = 48 * 1024;
    if (shared_bytes > always_allowed &&
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared_bytes) != cudaSuccess)
        return cudaGetLastError();
    cudaLaunchAttribute overlap = {};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = { grid, block, shared_bytes, stream, &overlap, kernels_overlap() };
    cudaError_t failed = cudaLaunchKernelEx(&config, kernel, static_cast<P>(args)...), last = cudaGetLastError();
    return failed ? failed : last;
}

/* The first statement of a kernel, before which it reads only what no kernel writes: waits until the stream's earlier
 * kernels have ended, and lets the next one start on what this one leaves free. That pays unless this one is limited by
 * reading memory in all blocks that fit. */
__device__ __forceinline__ void begin_kernel(bool next_starts = true)
{
#if __CUDA_ARCH__ >= 900
    if (next_starts) asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* T *name: the dynamic shared memory of the block, aligned to 16 bytes */
#define LAZY_DYNAMIC_SHARED(T, name)                                                                                   \
    extern __shared__ __align__(16) unsigned char lazy_dynamic_shared[];                                               \
    T *name = reinterpret_cast<T *>(lazy_dynamic_shared)

/* The 32-bit address in the shared state space, which instructions and matrix descriptors take. */
__device__ __forceinline__ uint32_t shared_address(const void *shared)
{
    return (uint32_t)__cvta_generic_to_shared(shared);
}

/* ---- warp instructions: all 32 threads execute the same one together (.sync.aligned) ---- */

/* d += a b, accumulated in f32; a: (16, 16), b: (16, 8), d: (16, 8). With g = lane / 4, t = lane % 4, and the value of
 * the lower index in the lower half of a register:
 *   a[0] = A[g][2t, 2t + 1]       a[1] = A[g + 8][2t, 2t + 1]
 *   a[2] = A[g][2t + 8, 2t + 9]   a[3] = A[g + 8][2t + 8, 2t + 9]
 *   b[0] = B[2t, 2t + 1][g]   b[1] = B[2t + 8, 2t + 9][g]
 *   d[0], d[1] = D[g][2t, 2t + 1]   d[2], d[3] = D[g + 8][2t, 2t + 1]
 * The last argument only selects the type of a and b. */
#define LAZY_MMA(T, type)                                                                                              \
    __device__ __forceinline__ void mma_m16n8k16(float(&d)[4], const uint32_t(&a)[4], const uint32_t(&b)[2], T)        \
    {                                                                                                                  \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0, %1, %2, %3}, "                  \
                     "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                                   \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                  \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                              \
    }
LAZY_MMA(__nv_bfloat16, "bf16")
LAZY_MMA(__half, "f16")
#undef LAZY_MMA

/* Loads four 8x8 matrices of 16-bit values from shared memory. Lane l passes the address of row l % 8 of matrix l / 8:
 * 16 bytes, aligned to 16. r[i] receives, from matrix i, [lane / 4][2 (lane % 4)] and the value to its right (in the
 * upper half); with _trans, [2 (lane % 4)][lane / 4] and the value below it. Not a memory barrier: reading what other
 * lanes wrote needs a __syncwarp before. */
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void *shared_row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(shared_row))
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void *shared_row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(shared_row))
                 : "memory");
}

/* ---- asynchronous copies from global to shared memory ---- */

/* Copies 16 bytes, or writes 16 zeros if not valid (`global` is not read then); both addresses are aligned to 16. The
 * data is undefined until this thread has waited; other threads need a barrier after that. */
__device__ __forceinline__ void cp_async_16(void *shared, const void *global, bool valid)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
                 "r"(valid ? 16 : 0)
                 : "memory");
}

/* Puts this thread's copies since the last commit into a group, which may be empty. */
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/* Waits until at most the N newest groups of this thread are pending. */
template <int N> __device__ __forceinline__ void cp_async_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* ---- barriers in shared memory on which some threads wait for others (sm_90) ---- */

struct mbarrier {
    uint64_t state;
};

/* By one thread, before a barrier of the block: a phase ends when `count` threads have arrived. */
__device__ __forceinline__ void mbarrier_open(mbarrier *barrier, int count)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

/* Earlier writes of this thread are visible to threads that have waited for the phase. */
__device__ __forceinline__ void mbarrier_arrive(mbarrier *barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

/* Waits for the end of the phase of this parity: the first phase's is 0, and 1 does not wait before the first ends. */
__device__ __forceinline__ void mbarrier_wait(mbarrier *barrier, uint32_t parity)
{
    asm volatile("{.reg .pred ended;\n"
                 "again_%=: mbarrier.try_wait.parity.shared::cta.b64 ended, [%0], %1;\n"
                 "@!ended bra again_%=;}" ::"r"(shared_address(barrier)),
                 "r"(parity)
                 : "memory");
}

/* Arrives for this thread once all of its copies have landed; is not waited for. */
__device__ __forceinline__ void cp_async_arrive(mbarrier *barrier)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

/* By a whole warpgroup: gives registers back, or takes of those given back (sm_90a). */
template <int EACH> __device__ __forceinline__ void fewer_registers()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(EACH));
}

template <int EACH> __device__ __forceinline__ void more_registers()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(EACH));
}

/* ---- asynchronous matrix products of a warpgroup (sm_90a): four consecutive warps, the first a multiple of four ----
 *
 * All 128 threads execute these together. Required order: wgmma_fence on all registers used, products, wgmma_commit,
 * wgmma_wait on the registers to be read. Between a product and its wait, its registers (d and a) must not be read or
 * written, and its shared memory must not be written. */

/* The proxy fence: makes writes to shared memory by the generic proxy that are visible to this thread, completed
 * cp.async copies among them, visible to the async proxy, by which wgmma reads. Either every writing thread has its own
 * fence, followed by a barrier, or every thread that multiplies has it after it has waited for the writers. */
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/* The compiler does not know that pending products use these registers: this keeps it from moving accesses to them
 * across this point. */
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

/* Follows the last write to the registers of the next products; one fence serves all products up to the next wait. */
template <class... R> __device__ __forceinline__ void wgmma_fence(R &...registers)
{
    (hold_registers(registers), ...);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

/* Puts the products issued since the last commit into a group. */
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

/* Waits until at most the N newest groups are pending; `registers` are those of the completed products. */
template <int N, class... R> __device__ __forceinline__ void wgmma_wait(R &...registers)
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
    (hold_registers(registers), ...);
}

/* d (+)= a b. d: (64, 8N) f32; warp w of the four holds rows 16w … 16w+15, and its d[j] columns 8j … 8j+7 in
 * mma_m16n8k16's layout. a: (64, 16), K-major in shared memory, or in registers in mma_m16n8k16's layout per warp. b:
 * (16, 8N) in shared memory, K-major (consecutive values along k) or MN-major (along n). Matrices in shared memory are
 * passed as descriptors. Without `accumulate`, d is overwritten. The last argument only selects the type of a and b. */
#define LAZY_D32                                                                                                       \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                           \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define LAZY_D64                                                                                                       \
    LAZY_D32 ", "                                                                                                      \
             "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                        \
             "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define LAZY_F1(d, j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define LAZY_F8(d, j)                                                                                                  \
    LAZY_F1(d, j), LAZY_F1(d, j + 1), LAZY_F1(d, j + 2), LAZY_F1(d, j + 3), LAZY_F1(d, j + 4), LAZY_F1(d, j + 5),      \
        LAZY_F1(d, j + 6), LAZY_F1(d, j + 7)
#define LAZY_WGMMA(T, type)                                                                                            \
    __device__ __forceinline__ void wgmma_k_major(float(&d)[16][4], uint64_t a, uint64_t b, bool accumulate, T)        \
    {                                                                                                                  \
        asm volatile("{.reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." type         \
                     "." type " {" LAZY_D64 "}, %64, %65, p, 1, 1, 0, 0;}"                                             \
                     : LAZY_F8(d, 0), LAZY_F8(d, 8)                                                                    \
                     : "l"(a), "l"(b), "r"((int)accumulate)                                                            \
                     : "memory");                                                                                      \
    }                                                                                                                  \
    __device__ __forceinline__ void wgmma_mn_major(float(&d)[16][4], const uint32_t(&a)[4], uint64_t b, T)             \
    {                                                                                                                  \
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" LAZY_D64                        \
                     "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"                                                       \
                     : LAZY_F8(d, 0), LAZY_F8(d, 8)                                                                    \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)                                              \
                     : "memory");                                                                                      \
    }                                                                                                                  \
    __device__ __forceinline__ void wgmma_mn_major(float(&d)[8][4], const uint32_t(&a)[4], uint64_t b, T)              \
    {                                                                                                                  \
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" LAZY_D32                         \
                     "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"                                                       \
                     : LAZY_F8(d, 0)                                                                                   \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)                                              \
                     : "memory");                                                                                      \
    }
LAZY_WGMMA(__nv_bfloat16, "bf16")
LAZY_WGMMA(__half, "f16")
#undef LAZY_WGMMA
#undef LAZY_F8
#undef LAZY_F1
#undef LAZY_D64
#undef LAZY_D32

/* ---- between blocks ---- */

/* Counts the callers: true for the last of n, which sees all writes before the other calls, and resets the count. */
__device__ __forceinline__ bool take_ticket(unsigned *taken, unsigned n)
{
    unsigned before;
    asm volatile("atom.acq_rel.gpu.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(taken), "r"(n - 1) : "memory");
    return before == n - 1;
}

/* ---- arithmetic ---- */

/* 2^x within 2 ulp; subnormal results are flushed to 0 */
__device__ __forceinline__ float fast_exp2f(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#else
#include "cuda_on_cpu/cuda_on_cpu.h"
#endif

/* ---- layout of a matrix of 16-bit values in shared memory for wgmma: 128-byte swizzle ----
 *
 * Rows of 64 values (128 bytes) along the major dimension; eight rows form a swizzle atom of 1024 bytes, aligned to
 * 1024. Chunk i (16 bytes) of row r is stored as chunk i ^ (r % 8), so that the same chunk of eight consecutive rows
 * lies in different banks. The hardware swizzles complete addresses, so the start address of a matrix that begins
 * within a row is the unswizzled one, which is its address in row 0. */

enum { WGMMA_ROW = 64, WGMMA_ATOM = 8 * WGMMA_ROW /* values */ };

/* Offset, in values, of chunk `chunk` of a row. */
__host__ __device__ constexpr int wgmma_swizzled(int row, int chunk) { return row * WGMMA_ROW + (chunk ^ row % 8) * 8; }

/* Matrix descriptor. atom: the first one; first: index of the first value in its rows. A K-major operand has 16 values
 * of each row, and its LBO (leading dimension byte offset) is not used. An MN-major operand has 16 whole rows, and the
 * LBO leads from 64 columns to the next 64. The SBO (stride dimension byte offset) leads from 8 rows to the next 8. */
__device__ __forceinline__ uint64_t wgmma_descriptor(const void *atom, int first, uint64_t lbo)
{
    uint64_t start = shared_address(atom) + 2 * first, sbo = 2 * WGMMA_ATOM, swizzle_128_bytes = 1;
    return (start & 0x3ffff) >> 4 | lbo >> 4 << 16 | sbo >> 4 << 32 | swizzle_128_bytes << 62;
}
