/* cuda_on_cpu.h — runs CUDA kernels that g++ compiled as C++, for tests without a GPU.
 *
 * Each CUDA thread is a fiber, which runs until it waits for other threads; then the next fiber runs (fibers.h). The
 * blocks of a launch run one after the other (launch.h), so static shared memory is a static or thread-local variable.
 * instructions.h has the names that kernels use, wgmma.h those of a warpgroup. fake_cudart.cc replaces the CUDA
 * runtime.
 *
 * It detects, beyond wrong results:
 * - Data races, by TSan, even if the result is right: each fiber is a thread to TSan, and memory is ordered only by
 *   what orders it on a GPU: __syncthreads, __syncwarp, mbarriers and take_ticket. Shuffles, votes, other atomics and
 *   ldmatrix order nothing. Under TSan, two blocks are ordered with each other only if the sums of their coordinates
 *   are both even or both odd.
 * - Accesses out of bounds, by ASan: dynamic shared memory and device memory are allocations of exactly their size.
 * - Reads of unwritten memory: shared memory starts as NaNs (except __shared__ under a sanitizer), and so does the
 *   destination of cp.async until its wait.
 * - Barriers that not all threads reach, masks that are not of all lanes, misaligned addresses and deadlocks: it prints
 *   a message and calls abort().
 * - wgmma without the required fences; registers read (they hold NaNs) or written, or shared memory written, while a
 *   product is pending. Products are computed in the wait. It does not check that all four warps of a warpgroup take
 *   part, nor that each of them has fenced the copies that arrived at an mbarrier: one is enough.
 *
 * It cannot detect: weak memory ordering beyond that, the accuracy of approximate instructions, limits on registers and
 * static shared memory, and host memory used by a kernel. Of races with the host and between streams it shows those
 * that go wrong when work runs as late as it may: see fake_cudart.cc.
 *
 * Compile with -fno-strict-aliasing (nvcc lets a kernel read floats as uint4) and -Wno-unknown-pragmas (unroll), link
 * with -pthread. LAZYLLM_CUDA_REVERSE=1 runs threads and blocks from the last to the first. */
#pragma once

#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __shared__
#ifdef __SANITIZE_ADDRESS__
#define __shared__ static /* ASan puts no red zones around thread-local variables */
#else
#define __shared__ static thread_local
#endif

#include "instructions.h"
#include "launch.h"
#include "wgmma.h"
