/* launch.h — blocks, and launches of kernels. */
#pragma once

#include <algorithm>
#include <functional>
#include <string>
#include <thread>
#include <tuple>

#include <linux/futex.h>
#include <link.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "fibers.h"

namespace cuda_on_cpu
{

constexpr size_t MAX_SHARED_BYTES = 163 * 1024; /* per block on sm_80, the oldest architecture supported */

extern "C" void *__tls_get_addr(size_t (*module_and_offset)[2]);

/* The thread-local variables of the kernel's library in the thread that runs blocks, static shared memory among them.
 * bytes is 0 under sanitizers, whose own variables may be there too. They are looked up even then, because the first
 * access allocates them: if a kernel did that, TSan would see one CUDA thread allocate what another writes. */
struct static_shared {
    const void *kernel;
    char *start;
    size_t bytes;
};

inline int find_static_shared([[maybe_unused]] dl_phdr_info *module, size_t, [[maybe_unused]] void *out)
{
#ifndef __SANITIZE_ADDRESS__
    static_shared &found = *static_cast<static_shared *>(out);
    size_t tls_bytes = 0;
    bool is_ours = false;
    for (int i = 0; i < module->dlpi_phnum; i++) {
        const ElfW(Phdr) &part = module->dlpi_phdr[i];
        if (part.p_type == PT_LOAD)
            is_ours |= (uintptr_t)found.kernel - (module->dlpi_addr + part.p_vaddr) < part.p_memsz;
        if (part.p_type == PT_TLS) tls_bytes = part.p_memsz;
    }
    if (!is_ours) return 0;
    size_t first[2] = { module->dlpi_tls_modid, 0 };
    if (tls_bytes) found.start = (char *)__tls_get_addr(&first);
#ifndef __SANITIZE_THREAD__
    found.bytes = tls_bytes;
#endif
#endif
    return 1;
}

UNSEEN inline void run_block(executor &e)
{
    e.live = e.n_threads = (int)(e.block.x * e.block.y * e.block.z);
    e.arrived = e.n_ready = e.n_waiting = 0;
    for (int w = 0; w * WARP < e.n_threads; w++) {
        e.warps[w].live = ~0u >> std::max(0, (w + 1) * WARP - e.n_threads);
        e.warps[w].steps[0].step = e.warps[w].steps[1].step = -1;
    }
    for (int i = 0; i < e.n_threads; i++) {
        if (!e.threads[i]) e.threads[i] = make_thread(i);
        cuda_thread &t = *e.threads[i];
        t.index = { i % e.block.x, i / e.block.x % e.block.y, i / (e.block.x * e.block.y) };
        t.exited = false;
        t.step = t.open_group = t.open_products = 0;
        t.registers_fenced = false;
    }
    e.dynamic_shared = (unsigned char *)malloc(e.shared_bytes);
    e.unfenced = (int *)calloc(e.shared_bytes / 16 + 1, sizeof *e.unfenced);
    if (!e.dynamic_shared || !e.unfenced) fail({}, "no memory for %zu bytes of shared memory", e.shared_bytes);
    memset(e.dynamic_shared, 0xFF, e.shared_bytes);
    publish(e.start_token, true);
    wake_all();
    run_next(e.scheduler);
    if (e.live) fail_deadlock();
    receive(e.end_token);
    free(e.unfenced);
    free(e.dynamic_shared);
}

/* Runs the blocks of one executor. */
UNSEEN inline void run_blocks(const launch &l, int self)
{
    executor &e = executors[self];
    running = &e;
    static_cast<launch &>(e) = l;
    const char *reverse = getenv("LAZYLLM_CUDA_REVERSE");
    e.reversed = reverse && !strcmp(reverse, "1");
#ifdef __SANITIZE_THREAD__
    e.scheduler.tsan_fiber = __tsan_get_current_fiber();
#endif
    static_shared shared = { l.address, NULL, 0 };
    dl_iterate_phdr(find_static_shared, &shared);
    std::string others(shared.start, shared.bytes); /* variables of this thread that are not the kernels' */
    unsigned long long n_blocks = (unsigned long long)e.grid.x * e.grid.y * e.grid.z;
    for (unsigned long long i = 0; i < n_blocks; i++) {
        unsigned long long at = e.reversed ? n_blocks - 1 - i : i;
        e.index = { (unsigned)(at % e.grid.x), (unsigned)(at / e.grid.x % e.grid.y),
                    (unsigned)(at / e.grid.x / e.grid.y) };
        if ((e.index.x + e.index.y + e.index.z) % N_EXECUTORS != (unsigned)self) continue;
        if (shared.bytes) memset(shared.start, 0xFF, shared.bytes);
        run_block(e);
    }
    if (shared.bytes) memcpy(shared.start, others.data(), shared.bytes);
}

/* Not thread-safe. Under TSan two threads run the blocks, one after the other in a way that TSan does not see, so that
 * to TSan their blocks run concurrently. */
inline void run(const launch &l)
{
#ifdef __SANITIZE_THREAD__
    static_assert(N_EXECUTORS == 2, "each gives the turn to the other");
    static int turn;
    std::thread threads[N_EXECUTORS];
    auto run_in_turn = [&](int self) UNSEEN {
        while (__atomic_load_n(&turn, __ATOMIC_ACQUIRE) != self)
            syscall(SYS_futex, &turn, FUTEX_WAIT_PRIVATE, !self, NULL);
        run_blocks(l, self);
        __atomic_store_n(&turn, !self, __ATOMIC_RELEASE);
        syscall(SYS_futex, &turn, FUTEX_WAKE_PRIVATE, 1);
    };
    for (int i = 0; i < N_EXECUTORS; i++) threads[i] = std::thread(run_in_turn, i);
    for (std::thread &thread : threads) thread.join();
#else
    run_blocks(l, 0);
#endif
}

/* In fake_cudart.cc; all device work goes through it. `work` runs when the host waits for the stream, one piece of work
 * at a time. Only `work` may touch device memory. blocks: of a kernel, to be counted. */
cudaError_t submit(cudaStream_t stream, const std::function<void()> &work, unsigned long long blocks);

inline cudaError_t start(const launch &l, cudaStream_t stream)
{
    const dim3 &g = l.grid, &b = l.block;
    bool is_grid = g.x && g.y && g.z && g.x <= 0x7fffffff && g.y <= 65535 && g.z <= 65535;
    bool is_block =
        b.x && b.y && b.z && b.x <= MAX_THREADS && b.y <= MAX_THREADS && b.z <= 64 && b.x * b.y * b.z <= MAX_THREADS;
    if (!is_grid || !is_block || l.shared_bytes > MAX_SHARED_BYTES) return cudaErrorInvalidValue;
    return submit(stream, [l] { run(l); }, (unsigned long long)g.x * g.y * g.z);
}

} // namespace cuda_on_cpu

template <class... P, class... A>
cudaError_t lazy_launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
                        A &&...args)
{
    static_assert(sizeof...(P) == sizeof...(A), "a kernel takes as many arguments as it has parameters");
    auto call = [kernel, all = std::tuple<P...>(static_cast<P>(args)...)] { std::apply(kernel, all); };
    return cuda_on_cpu::start({ (const void *)kernel, grid, block, shared_bytes, call }, stream);
}

#define LAZY_DYNAMIC_SHARED(T, name) T *name = reinterpret_cast<T *>(cuda_on_cpu::running->dynamic_shared)
