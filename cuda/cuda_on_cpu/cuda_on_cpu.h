/* cuda_on_cpu.h — runs CUDA kernels that g++ compiled as C++, for tests without a GPU.
 *
 * Each CUDA thread is a fiber, which runs until it waits for other threads; then the next fiber runs. The blocks of a
 * launch run one after the other on a separate operating system thread, so static shared memory is a static or
 * thread-local variable. fake_cudart.cc replaces the CUDA runtime.
 *
 * It detects, beyond wrong results:
 * - Data races, by TSan, even if the result is right: each fiber is a thread to TSan, and memory is ordered only by
 *   what orders it on a GPU: __syncthreads and __syncwarp. Shuffles, votes, atomics and ldmatrix order nothing. Under
 *   TSan, two blocks are ordered with each other only if the sums of their coordinates are both even or both odd.
 * - Accesses out of bounds, by ASan: dynamic shared memory and device memory are allocations of exactly their size.
 * - Reads of unwritten memory: shared memory starts as NaNs (except __shared__ under a sanitizer), and so does the
 *   destination of cp.async until its wait.
 * - Barriers that not all threads reach, wrong masks, misaligned addresses and deadlocks: it prints a message and calls
 *   abort().
 * - wgmma without the required fences; registers read (they hold NaNs) or written, or shared memory written, while a
 *   product is pending. Products are computed in the wait. It does not check that all four warps of a warpgroup take
 *   part.
 *
 * It cannot detect: weak memory ordering beyond that, the accuracy of approximate instructions, limits on registers and
 * static shared memory, and host memory used by a kernel. Of races with the host and between streams it shows those
 * that go wrong when work runs as late as it may: see fake_cudart.cc.
 *
 * Compile with -fno-strict-aliasing (nvcc lets a kernel read floats as uint4) and -Wno-unknown-pragmas (unroll), link
 * with -pthread. LAZYLLM_CUDA_REVERSE=1 runs threads and blocks from the last to the first. */
#ifndef LAZY_CUDA_ON_CPU_H
#define LAZY_CUDA_ON_CPU_H

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <link.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __shared__
#ifdef __SANITIZE_ADDRESS__
#define __shared__ static /* ASan puts no red zones around thread-local variables */
#else
#define __shared__ static thread_local
#endif

/* Excludes the fiber scheduler from the sanitizers: TSan would report races on data that only one fiber at a time can
 * touch, and ASan would take a switch of stacks for the end of stack frames. */
#define UNSEEN __attribute__((no_sanitize("thread", "address"), noinline))

namespace cuda_on_cpu
{

constexpr int WARP = 32, MAX_THREADS = 1024, MAX_WARPS = MAX_THREADS / WARP;
constexpr size_t MAX_SHARED_BYTES = 163 * 1024; /* per block on sm_80, the oldest architecture supported */
constexpr size_t STACK_BYTES = 256 * 1024, GUARD_BYTES = 64 * 1024;
#ifdef __SANITIZE_THREAD__
constexpr int N_EXECUTORS = 2;
#else
constexpr int N_EXECUTORS = 1;
#endif

/* Source line of a call in a kernel; here() is the default of the last parameter of every emulated function. */
struct place {
    const char *file;
    int line;
};
constexpr place here(const char *file = __builtin_FILE(), int line = __builtin_LINE()) { return { file, line }; }

/* A stack, and the state to resume it. */
struct context {
    void *resume[5];           /* for __builtin_setjmp, which unlike setjmp is not intercepted by sanitizers */
    const void *bottom = NULL; /* this and the next three are for sanitizers */
    size_t size = 0;
    void *fake_stack = NULL;
    void *tsan_fiber = NULL;
};

typedef unsigned __attribute__((vector_size(16), may_alias)) quad; /* 16 bytes of any type */

struct async_copy {
    quad *to;
    quad bytes;
    int group;
};

/* This thread's part of a pending wgmma product: two rows, and two of every eight columns. */
struct product {
    float (*d)[4];               /* holds NaNs until the product is finished */
    int n_columns;               /* 8 for each d[j] */
    std::vector<float> initial;  /* values of d to accumulate to; empty if they are an earlier pending product's */
    const uint32_t *a_registers; /* NULL: a is in shared memory */
    uint32_t a_values[4];
    std::vector<uint16_t> a; /* (2, 16) */
    std::vector<uint16_t> b; /* (16, n_columns / 4) as it was in shared memory when the product was issued */
    uint64_t a_matrix, b_matrix;
    bool b_mn_major;
    float (*wide)(uint16_t);
    int group;
    place at;
};

struct cuda_thread {
    context stack;
    ucontext_t start;
    bool started = false;

    int number; /* within its block */
    uint3 index;
    bool exited;

    const char *waits_in; /* for messages */
    unsigned waits_mask;  /* lanes that it waits with; 0: the whole block */
    place waits_at;

    std::vector<async_copy> copies;
    int open_group;
    std::vector<const void *> landed; /* destinations of completed copies since its last fence_proxy_async */
    std::vector<product> products;
    int open_products; /* group number of the products issued next */
    bool registers_fenced;

    int lane() const { return number % WARP; }
};

/* One warp-level operation of the lanes in `mask`. It is reused only after all lanes have left, because other lanes may
 * start another operation meanwhile. */
struct exchange {
    exchange *next;
    const char *what;
    place at;
    unsigned mask, arrived;
    int to_leave;
    int token; /* orders memory for TSan: see publish */
    alignas(64) unsigned char slot[WARP][64];
};

struct warp {
    unsigned live;
    exchange *open, *unused;
};

/* A kernel with its arguments. */
struct call {
    virtual void operator()() const = 0;
    virtual ~call() = default;
};

template <class... P> struct call_of final : call {
    void (*kernel)(P...);
    std::tuple<P...> args;

    template <class... A> call_of(void (*kernel)(P...), A &&...args) : kernel(kernel), args(static_cast<P>(args)...) {}
    template <size_t... I> void with(std::index_sequence<I...>) const { kernel(std::get<I>(args)...); }
    void operator()() const override { with(std::index_sequence_for<P...>()); }
};

/* State for running blocks, one at a time. */
struct executor {
    dim3 grid, block;
    uint3 index;
    const call *kernel;
    unsigned char *dynamic_shared;
    size_t shared_bytes;
    /* per 16 bytes of dynamic_shared: 1 + the number of the thread whose cp.async wrote them without fence.proxy.async
     * yet, or 0 */
    int *unfenced;
    bool reversed;

    context scheduler;
    cuda_thread *threads[MAX_THREADS];
    warp warps[MAX_WARPS];
    int n_threads, live;
    cuda_thread *ready[MAX_THREADS]; /* ring buffer */
    int first_ready, n_ready;

    int arrived, generation; /* of __syncthreads */
    place arrived_at;
    /* for even and odd generations: a thread that leaves one barrier must not synchronise with one that has reached the
     * next */
    int barrier_token[2];
    int start_token, end_token;
};

inline executor executors[N_EXECUTORS];
inline executor *running; /* one executor runs at a time */
inline cuda_thread *current;
inline int active_executor; /* index of the executor that may run */

/* ---- memory ordering between fibers, the only part of the scheduler that TSan sees ---- */

/* Release on a token. `first` stores, which drops the releases of an earlier use of the token. */
__attribute__((noinline)) inline void publish(int &token, bool first)
{
    if (first) __atomic_store_n(&token, 1, __ATOMIC_RELEASE);
    else __atomic_fetch_add(&token, 1, __ATOMIC_RELEASE);
}

__attribute__((noinline)) inline void receive(const int &token) { (void)__atomic_load_n(&token, __ATOMIC_ACQUIRE); }

/* ---- error reports ---- */

UNSEEN inline const char *describe(char (&text)[256], const char *what, unsigned mask, place at)
{
    if (mask) snprintf(text, sizeof text, "%s of lanes 0x%08x at %s:%d", what, mask, at.file, at.line);
    else snprintf(text, sizeof text, "%s at %s:%d", what, at.file, at.line);
    return text;
}

[[noreturn]] UNSEEN __attribute__((format(printf, 1, 2))) inline void fail(const char *format, ...)
{
    const executor &e = *running;
    fprintf(stderr, "cuda_on_cpu: block (%u, %u, %u), ", e.index.x, e.index.y, e.index.z);
    if (current)
        fprintf(stderr, "thread %d (%u, %u, %u): ", current->number, current->index.x, current->index.y,
                current->index.z);
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
    abort();
}

[[noreturn]] UNSEEN inline void fail_deadlock()
{
    const executor &e = *running;
    fprintf(stderr, "cuda_on_cpu: block (%u, %u, %u): deadlock; of %d threads, %d have returned, and\n", e.index.x,
            e.index.y, e.index.z, e.n_threads, e.n_threads - e.live);
    for (int first = 0, next; first < e.n_threads; first = next) {
        const cuda_thread &t = *e.threads[first];
        next = first + 1;
        if (t.exited) continue;
        auto waits_alike = [&](const cuda_thread &other) {
            return !other.exited && other.waits_in == t.waits_in && other.waits_mask == t.waits_mask &&
                   other.waits_at.line == t.waits_at.line;
        };
        while (next < e.n_threads && waits_alike(*e.threads[next])) next++;
        char text[256];
        describe(text, t.waits_in, t.waits_mask, t.waits_at);
        if (next == first + 1) fprintf(stderr, "  thread %d waits in %s\n", first, text);
        else fprintf(stderr, "  threads %d to %d wait in %s\n", first, next - 1, text);
    }
    abort();
}

/* ---- fibers ---- */

UNSEEN inline void go_to(context &to) { __builtin_longjmp(to.resume, 1); }

/* noipa: the compiler must assume that a kernel's static variables have changed on return. */
UNSEEN __attribute__((noipa)) inline void switch_stack(context &from, context &to, ucontext_t *start)
{
#ifdef __SANITIZE_THREAD__
    __tsan_switch_to_fiber(to.tsan_fiber, __tsan_switch_to_fiber_no_sync);
#endif
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(&from.fake_stack, to.bottom, to.size);
#endif
    if (!__builtin_setjmp(from.resume)) {
        if (start) setcontext(start);
        go_to(to);
    }
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(from.fake_stack, &to.bottom, &to.size);
#endif
}

UNSEEN inline void make_ready(cuda_thread &t)
{
    executor &e = *running;
    e.ready[(e.first_ready + e.n_ready++) % MAX_THREADS] = &t;
}

/* In the order of lane numbers, so that runs are reproducible. */
UNSEEN inline void wake(int warp, unsigned lanes)
{
    const executor &e = *running;
    for (int i = 0; i < WARP; i++) {
        int lane = e.reversed ? WARP - 1 - i : i;
        if (lanes >> lane & 1) make_ready(*e.threads[warp * WARP + lane]);
    }
}

UNSEEN inline void wake_all()
{
    const executor &e = *running;
    int n_warps = (e.n_threads + WARP - 1) / WARP;
    for (int i = 0; i < n_warps; i++) {
        int warp = e.reversed ? n_warps - 1 - i : i;
        wake(warp, e.warps[warp].live);
    }
}

UNSEEN inline void wait_in(const char *what, unsigned mask, place at)
{
    cuda_thread &self = *current;
    self.waits_in = what;
    self.waits_mask = mask;
    self.waits_at = at;
    switch_stack(self.stack, running->scheduler, NULL);
}

/* ---- __syncthreads ---- */

UNSEEN inline void open_full_barrier()
{
    executor &e = *running;
    if (e.arrived == 0 || e.arrived < e.live) return;
    e.arrived = 0;
    e.generation++;
    wake_all();
}

UNSEEN inline void wait_for_block(place at)
{
    executor &e = *running;
    if (e.arrived && (e.arrived_at.line != at.line || strcmp(e.arrived_at.file, at.file)))
        fail("divergent __syncthreads: reached at %s:%d while others of the block wait at %s:%d", at.file, at.line,
             e.arrived_at.file, e.arrived_at.line);
    int &token = e.barrier_token[e.generation % 2];
    publish(token, e.arrived == 0);
    e.arrived++;
    e.arrived_at = at;
    open_full_barrier();
    wait_in("__syncthreads", 0, at);
    receive(token);
}

/* ---- warp-level operations ---- */

UNSEEN inline exchange &arrive(unsigned mask, const char *what, place at)
{
    cuda_thread &self = *current;
    warp &w = running->warps[self.number / WARP];
    if (!(mask >> self.lane() & 1))
        fail("%s with mask 0x%08x, which lacks the calling lane, at %s:%d", what, mask, at.file, at.line);
    exchange *e = w.open;
    for (; e && (e->mask != mask || strcmp(e->what, what)); e = e->next) {
        if (!(e->mask >> self.lane() & 1 && e->arrived & mask))
            continue; /* its lanes may finish first, or do not need this one */
        char mine[256], theirs[256];
        fail("divergent warp: %s, while lanes that it needs wait for this one in %s", describe(mine, what, mask, at),
             describe(theirs, e->what, e->mask, e->at));
    }
    if (!e) {
        e = w.unused ? w.unused : new exchange;
        if (e == w.unused) w.unused = e->next;
        e->next = w.open;
        w.open = e;
        e->what = what;
        e->at = at;
        e->mask = mask;
        e->arrived = 0;
    }
    e->arrived |= 1u << self.lane();
    return *e;
}

/* Completes every exchange that all its live lanes have reached; threads that have returned count as arrived. */
UNSEEN inline void end_full_exchanges(warp &w)
{
    for (exchange **link = &w.open; *link;) {
        exchange *e = *link;
        if ((e->mask & w.live) != e->arrived) {
            link = &e->next;
            continue;
        }
        *link = e->next;
        e->to_leave = __builtin_popcount(e->arrived);
        wake((int)(&w - running->warps), e->arrived);
    }
}

UNSEEN inline void wait_for_others(exchange &e, place at)
{
    end_full_exchanges(running->warps[current->number / WARP]);
    wait_in(e.what, e.mask, at);
}

UNSEEN inline void leave(exchange &e)
{
    if (--e.to_leave) return;
    warp &w = running->warps[current->number / WARP];
    e.next = w.unused;
    w.unused = &e;
}

/* Passes `value` to the other lanes and waits for theirs. The caller calls leave() after reading them. */
template <class T> UNSEEN exchange &exchange_values(unsigned mask, const T &value, const char *what, place at)
{
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(exchange::slot[0]));
    exchange &e = arrive(mask, what, at);
    new (e.slot[current->lane()]) T(value);
    wait_for_others(e, at);
    return e;
}

/* The same for an instruction that all 32 lanes must execute together (PTX's .aligned). */
template <class T> UNSEEN exchange &exchange_values_aligned(const T &value, const char *what, place at)
{
    const warp &w = running->warps[current->number / WARP];
    if (w.live != ~0u) fail("%s needs all 32 lanes, and there are 0x%08x, at %s:%d", what, w.live, at.file, at.line);
    exchange &e = exchange_values(~0u, value, what, at);
    if (e.at.line != at.line)
        fail("divergent warp: %s at %s:%d and at %s:%d", what, at.file, at.line, e.at.file, e.at.line);
    return e;
}

/* The value that a lane passed; NaN for a lane that did not take part, whose value is undefined on a GPU. */
template <class T> UNSEEN T value_of_lane(const exchange &e, int lane)
{
    if (e.arrived >> lane & 1) return *std::launder(reinterpret_cast<const T *>(e.slot[lane]));
    T nothing;
    memset((void *)&nothing, 0xFF, sizeof nothing);
    return nothing;
}

template <class T> UNSEEN T shuffle(unsigned mask, T value, int source, const char *what, place at)
{
    static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8, "no shuffle takes this type");
    exchange &e = exchange_values(mask, value, what, at);
    T theirs = value_of_lane<T>(e, source);
    leave(e);
    return theirs;
}

UNSEEN inline unsigned vote(unsigned mask, bool value, const char *what, place at)
{
    exchange &e = exchange_values(mask, value, what, at);
    unsigned yes = 0;
    for (int lane = 0; lane < WARP; lane++)
        yes |= (unsigned)((e.arrived >> lane & 1) && value_of_lane<bool>(e, lane)) << lane;
    leave(e);
    return yes;
}

/* ---- blocks and launches ---- */

__attribute__((noinline)) inline void run_thread()
{
    receive(running->start_token);
    current->copies.clear();
    current->landed.clear();
    (*running->kernel)();
    if (!current->products.empty())
        fail("returned without waiting for wgmma, at %s:%d", current->products[0].at.file,
             current->products[0].at.line);
    publish(running->end_token, false);
}

/* A fiber's main function: runs one CUDA thread per block, block after block. */
UNSEEN inline void run_threads()
{
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(NULL, &running->scheduler.bottom, &running->scheduler.size);
#endif
    for (;;) {
        run_thread();
        cuda_thread &self = *current;
        warp &w = running->warps[self.number / WARP];
        self.exited = true;
        running->live--;
        w.live &= ~(1u << self.lane());
        end_full_exchanges(w);
        open_full_barrier();
        switch_stack(self.stack, running->scheduler, NULL);
    }
}

UNSEEN inline cuda_thread *make_thread(int number)
{
    cuda_thread *t = new cuda_thread;
    void *memory = mmap(NULL, GUARD_BYTES + STACK_BYTES, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, GUARD_BYTES, PROT_NONE)) fail("no memory for a stack");
    t->number = number;
    t->stack.bottom = (char *)memory + GUARD_BYTES;
    t->stack.size = STACK_BYTES;
    getcontext(&t->start);
    t->start.uc_stack.ss_sp = (void *)t->stack.bottom;
    t->start.uc_stack.ss_size = STACK_BYTES;
    t->start.uc_link = NULL;
    makecontext(&t->start, run_threads, 0);
#ifdef __SANITIZE_THREAD__
    t->stack.tsan_fiber = __tsan_create_fiber(0);
    char name[32];
    snprintf(name, sizeof name, "CUDA thread %d", number);
    __tsan_set_fiber_name(t->stack.tsan_fiber, name);
#endif
    return t;
}

extern "C" void *__tls_get_addr(size_t (*module_and_offset)[2]);

/* The thread-local variables of the kernel's library in the thread that runs blocks, which are all static shared
 * memory: that thread runs nothing else. bytes is 0 under sanitizers, whose own variables may be among them. They are
 * looked up even then, because the first access allocates them: if a kernel did that, TSan would see one CUDA thread
 * allocate the memory that another writes. */
struct static_shared {
    const void *kernel;
    void *start;
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
    if (tls_bytes) found.start = __tls_get_addr(&first);
#ifndef __SANITIZE_THREAD__
    found.bytes = tls_bytes;
#endif
#endif
    return 1;
}

struct launch {
    const void *address; /* of the kernel */
    dim3 grid, block;
    size_t shared_bytes;
    std::shared_ptr<const call> kernel;
};

UNSEEN inline void run_block(executor &e, size_t shared_bytes)
{
    e.live = e.n_threads = (int)(e.block.x * e.block.y * e.block.z);
    e.arrived = e.n_ready = 0;
    for (int w = 0; w * WARP < e.n_threads; w++) e.warps[w].live = ~0u >> std::max(0, (w + 1) * WARP - e.n_threads);
    for (int i = 0; i < e.n_threads; i++) {
        if (!e.threads[i]) e.threads[i] = make_thread(i);
        cuda_thread &t = *e.threads[i];
        t.index = { i % e.block.x, i / e.block.x % e.block.y, i / (e.block.x * e.block.y) };
        t.exited = false;
        t.open_group = t.open_products = 0;
        t.registers_fenced = false;
    }
    e.dynamic_shared = (unsigned char *)malloc(shared_bytes);
    if (!e.dynamic_shared) fail("no memory for %zu bytes of shared memory", shared_bytes);
    memset(e.dynamic_shared, 0xFF, shared_bytes);
    e.shared_bytes = shared_bytes;
    e.unfenced = (int *)calloc(shared_bytes / 16 + 1, sizeof *e.unfenced);
    if (!e.unfenced) fail("no memory to track writes to shared memory");
    publish(e.start_token, true);
    wake_all();
    while (e.live) {
        if (!e.n_ready) fail_deadlock();
        current = e.ready[e.first_ready];
        e.first_ready = (e.first_ready + 1) % MAX_THREADS;
        e.n_ready--;
        ucontext_t *start = current->started ? NULL : &current->start;
        current->started = true;
        switch_stack(e.scheduler, current->stack, start);
        current = NULL;
    }
    receive(e.end_token);
    free(e.unfenced);
    free(e.dynamic_shared);
}

/* Runs this executor's blocks. Under TSan two executors alternate in a way that TSan does not see, so to TSan their
 * blocks run concurrently. */
UNSEEN inline void run_blocks(const launch *l, int self)
{
    while (__atomic_load_n(&active_executor, __ATOMIC_ACQUIRE) != self) usleep(50);
    executor &e = executors[self];
    running = &e;
    e.grid = l->grid;
    e.block = l->block;
    e.kernel = l->kernel.get();
    const char *reverse = getenv("LAZYLLM_CUDA_REVERSE");
    e.reversed = reverse && !strcmp(reverse, "1");
#ifdef __SANITIZE_THREAD__
    e.scheduler.tsan_fiber = __tsan_get_current_fiber();
#endif
    static_shared shared = { l->address, NULL, 0 };
    dl_iterate_phdr(find_static_shared, &shared);
    unsigned long long n_blocks = (unsigned long long)e.grid.x * e.grid.y * e.grid.z;
    for (unsigned long long i = 0; i < n_blocks; i++) {
        unsigned long long at = e.reversed ? n_blocks - 1 - i : i;
        e.index = { (unsigned)(at % e.grid.x), (unsigned)(at / e.grid.x % e.grid.y),
                    (unsigned)(at / e.grid.x / e.grid.y) };
        if ((e.index.x + e.index.y + e.index.z) % N_EXECUTORS != (unsigned)self) continue;
        if (shared.start) memset(shared.start, 0xFF, shared.bytes);
        run_block(e, l->shared_bytes);
    }
    __atomic_store_n(&active_executor, (self + 1) % N_EXECUTORS, __ATOMIC_RELEASE);
}

/* Not thread-safe. */
inline void run(const launch &l)
{
    std::thread threads[N_EXECUTORS];
    for (int i = 0; i < N_EXECUTORS; i++) threads[i] = std::thread(run_blocks, &l, i);
    for (std::thread &thread : threads) thread.join();
}

inline cudaError_t check(const launch &l)
{
    const dim3 &g = l.grid, &b = l.block;
    bool is_grid = g.x && g.y && g.z && g.x <= 0x7fffffff && g.y <= 65535 && g.z <= 65535;
    bool is_block =
        b.x && b.y && b.z && b.x <= MAX_THREADS && b.y <= MAX_THREADS && b.z <= 64 && b.x * b.y * b.z <= MAX_THREADS;
    if (!is_grid || !is_block) return cudaErrorInvalidConfiguration;
    return l.shared_bytes <= MAX_SHARED_BYTES ? cudaSuccess : cudaErrorInvalidValue;
}

/* In fake_cudart.cc; all device work goes through it. `work` runs when the host waits for the stream, one piece of work
 * at a time. Only `work` may touch device memory. */
cudaError_t submit(cudaStream_t stream, const std::function<void()> &work);

} // namespace cuda_on_cpu

template <class... P, class... A>
cudaError_t lazy_launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
                        A &&...args)
{
    static_assert(sizeof...(P) == sizeof...(A), "a kernel takes as many arguments as it has parameters");
    auto call = std::make_shared<const cuda_on_cpu::call_of<P...>>(kernel, std::forward<A>(args)...);
    cuda_on_cpu::launch l = { (const void *)kernel, grid, block, shared_bytes, call };
    cudaError_t code = cuda_on_cpu::check(l);
    return code != cudaSuccess ? code : cuda_on_cpu::submit(stream, [l] { cuda_on_cpu::run(l); });
}

#define LAZY_DYNAMIC_SHARED(T, name) T *name = reinterpret_cast<T *>(cuda_on_cpu::running->dynamic_shared)

/* ---- names defined by CUDA and by kernel.h ---- */

#define threadIdx (cuda_on_cpu::current->index)
#define blockIdx  (cuda_on_cpu::running->index)
#define blockDim  (cuda_on_cpu::running->block)
#define gridDim   (cuda_on_cpu::running->grid)

namespace cuda_on_cpu
{

template <class To, class From> To bits_as(From from)
{
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

/* Atomic read-modify-write, which orders no other memory. */
template <class T, class Next> T update(T *address, Next next)
{
    T old, now;
    __atomic_load(address, &old, __ATOMIC_RELAXED);
    do now = next(old);
    while (!__atomic_compare_exchange(address, &old, &now, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return old;
}

struct alignas(sizeof(exchange::slot[0])) fragments {
    float a[8], b[4];
};

inline float half_of(uint32_t pair, int upper, __nv_bfloat16)
{
    return bits_as<float>(upper ? pair & 0xffff0000 : pair << 16);
}
inline float half_of(uint32_t pair, int upper, __half)
{
    __half_raw bits;
    bits.x = (uint16_t)(upper ? pair >> 16 : pair);
    return __half2float(bits);
}

/* Accumulates in f32 in the order of k; a GPU's tensor cores use another order and rounding. */
UNSEEN inline void multiply(float (&d)[4], const fragments &mine, place at)
{
    exchange &e = exchange_values_aligned(mine, "mma_m16n8k16", at);
    const fragments *shown = std::launder(reinterpret_cast<const fragments *>(e.slot));
    int g = current->lane() / 4, t = current->lane() % 4;
    for (int i = 0; i < 4; i++) {
        int lower = i / 2, col = 2 * t + i % 2;
        for (int k = 0; k < 16; k++) {
            int holder = k % 8 / 2, right = k / 8;
            d[i] +=
                shown[4 * g + holder].a[2 * (lower + 2 * right) + k % 2] * shown[4 * col + holder].b[2 * right + k % 2];
        }
    }
    leave(e);
}

typedef uint16_t __attribute__((may_alias)) value16;
struct rows {
    const value16 *of[WARP];
};

UNSEEN inline rows share_rows(const void *row, place at)
{
    if ((uintptr_t)row % 16)
        fail("ldmatrix of a row at %p, which is no multiple of 16, at %s:%d", row, at.file, at.line);
    exchange &e = exchange_values_aligned(static_cast<const value16 *>(row), "ldmatrix", at);
    rows all;
    for (int lane = 0; lane < WARP; lane++) all.of[lane] = value_of_lane<const value16 *>(e, lane);
    leave(e);
    return all;
}

/* ---- products of a warpgroup ---- */

/* Not a multiple of an atom's size, because a GPU does not guarantee that either. */
constexpr uint32_t FIRST_SHARED_ADDRESS = 16;

/* Records the writer of 16 bytes (1 + thread number), or 0 once it has fenced them; static shared memory is not
 * tracked. */
UNSEEN inline void note_writer(const void *shared, int writer)
{
    const executor &e = *running;
    size_t at = (size_t)((const unsigned char *)shared - e.dynamic_shared);
    if (at < e.shared_bytes) e.unfenced[at / 16] = writer;
}

/* Address of a value of a matrix, from PTX's matrix descriptor: start address, LBO and SBO of 14 bits each, in units of
 * 16 bytes, and the swizzle mode, of which only 128 bytes is emulated: bits 4 to 6 of an address are XORed with bits 7
 * to 9. `across` is the index along a row of 128 bytes, `down` the row. Every 64 values across add the LBO, every 8
 * rows down the SBO. */
UNSEEN inline const value16 *value_at(uint64_t matrix, int across, int down, place at)
{
    const executor &e = *running;
    uint64_t start = (matrix & 0x3fff) << 4, lbo = (matrix >> 16 & 0x3fff) << 4, sbo = (matrix >> 32 & 0x3fff) << 4;
    if (matrix >> 62 != 1 || (matrix >> 49 & 7))
        fail("wgmma of a matrix that is not swizzled by 128 bytes at a base of 0, at %s:%d", at.file, at.line);
    uint64_t address = start + (uint64_t)across / 64 * lbo + (uint64_t)across % 64 * 2 + (uint64_t)down / 8 * sbo +
                       (uint64_t)down % 8 * 128;
    address ^= (address >> 7 & 7) << 4;
    uint64_t byte = address - FIRST_SHARED_ADDRESS;
    if (byte >= e.shared_bytes) fail("wgmma reads beyond shared memory, at %s:%d", at.file, at.line);
    if (e.unfenced[byte / 16])
        fail("wgmma reads what thread %d's cp.async wrote without fence.proxy.async, at %s:%d",
             e.unfenced[byte / 16] - 1, at.file, at.line);
    return (const value16 *)(e.dynamic_shared + byte);
}

/* Reads this thread's part of the operands in shared memory, visibly to TSan. */
inline void read_shared(const product &p, std::vector<uint16_t> &a, std::vector<uint16_t> &b)
{
    int row = current->number % 128 / WARP * 16 + current->lane() / 4, column = current->lane() % 4 * 2;
    a.clear();
    b.clear();
    for (int half = 0; half < 2; half++)
        for (int k = 0; k < 16 && !p.a_registers; k++) a.push_back(*value_at(p.a_matrix, k, row + 8 * half, p.at));
    for (int k = 0; k < 16; k++)
        for (int n = column; n < p.n_columns; n += n % 2 ? 7 : 1)
            b.push_back(p.b_mn_major ? *value_at(p.b_matrix, n, k, p.at) : *value_at(p.b_matrix, k, n, p.at));
}

inline bool is_poison(const float *values, size_t n)
{
    return std::all_of(values, values + n, [](float value) { return bits_as<uint32_t>(value) == ~0u; });
}

inline void issue(product &&p, bool accumulate)
{
    cuda_thread &self = *current;
    if (!self.registers_fenced) fail("wgmma without wgmma_fence since the last wait, at %s:%d", p.at.file, p.at.line);
    std::vector<uint16_t> a;
    read_shared(p, a, p.b);
    if (!p.a_registers) p.a = std::move(a);
    size_t n = (size_t)p.n_columns / 2;
    auto same = [&](const product &earlier) { return earlier.d == p.d; };
    if (!accumulate) p.initial.assign(n, 0.0f);
    else if (std::none_of(self.products.begin(), self.products.end(), same))
        p.initial.assign(&p.d[0][0], &p.d[0][0] + n);
    memset((void *)p.d, 0xFF, n * sizeof(float));
    p.group = self.open_products;
    self.products.push_back(std::move(p));
}

/* Computes a pending product: accumulates in f32 in the order of k and of issue; a GPU's tensor cores use another order
 * and rounding. */
inline void finish(size_t which)
{
    std::vector<product> &all = current->products;
    product &p = all[which];
    std::vector<uint16_t> a, b;
    read_shared(p, a, b);
    if (b != p.b || (!p.a_registers && a != p.a))
        fail("shared memory was written while wgmma read it, at %s:%d", p.at.file, p.at.line);
    if (p.a_registers && memcmp(p.a_registers, p.a_values, sizeof p.a_values))
        fail("registers were written while wgmma read them, at %s:%d", p.at.file, p.at.line);
    size_t n = (size_t)p.n_columns / 2, n_columns = n / 2;
    if (!is_poison(&p.d[0][0], n)) fail("registers were written while wgmma had them, at %s:%d", p.at.file, p.at.line);
    std::vector<float> sums = std::move(p.initial);
    for (size_t i = 0; i < n; i++) {
        size_t half = i % 4 / 2, column = i / 4 * 2 + i % 2;
        for (size_t k = 0; k < 16; k++) sums[i] += p.wide(p.a[16 * half + k]) * p.wide(p.b[n_columns * k + column]);
    }
    for (size_t later = which + 1; later < all.size(); later++) {
        if (all[later].d != p.d) continue;
        if (all[later].initial.empty()) all[later].initial = std::move(sums);
        return;
    }
    std::copy(sums.begin(), sums.end(), &p.d[0][0]);
}

inline float wide_of(uint16_t bits, __nv_bfloat16) { return half_of(bits, 0, __nv_bfloat16()); }
inline float wide_of(uint16_t bits, __half) { return half_of(bits, 0, __half()); }

struct product_operands {
    uint64_t a, b;
    uint32_t registers[4];
};

/* Checks that all lanes pass the same matrices, and gathers the lanes' registers of a. */
UNSEEN inline void share_operands(product &p, place at)
{
    product_operands mine = { p.a_matrix, p.b_matrix, {} };
    if (p.a_registers) memcpy(mine.registers, p.a_registers, sizeof mine.registers);
    exchange &e = exchange_values_aligned(mine, "wgmma", at);
    int quad = current->lane() / 4 * 4;
    p.a.clear();
    for (int half = 0; half < 2 && p.a_registers; half++)
        for (int k = 0; k < 16; k++)
            p.a.push_back((uint16_t)(value_of_lane<product_operands>(e, quad + k % 8 / 2).registers[half + k / 8 * 2] >>
                                     k % 2 * 16));
    for (int lane = 0; lane < WARP; lane++) {
        product_operands theirs = value_of_lane<product_operands>(e, lane);
        if (theirs.a != mine.a || theirs.b != mine.b)
            fail("lanes of a warp name different matrices to wgmma, at %s:%d", at.file, at.line);
    }
    leave(e);
}

template <class T, int N>
void issue_product(float (&d)[N][4], uint64_t a, const uint32_t *a_registers, uint64_t b, bool b_mn_major,
                   bool accumulate, place at)
{
    product p = {};
    p.d = d;
    p.n_columns = 8 * N;
    p.a_matrix = a;
    p.b_matrix = b;
    p.a_registers = a_registers;
    p.b_mn_major = b_mn_major;
    p.wide = [](uint16_t bits) { return wide_of(bits, T()); };
    p.at = at;
    if (a_registers) memcpy(p.a_values, a_registers, sizeof p.a_values);
    share_operands(p, at);
    issue(std::move(p), accumulate);
}

namespace names
{

inline void __syncthreads(place at = here()) { wait_for_block(at); }

UNSEEN inline void __syncwarp(unsigned mask = ~0u, place at = here())
{
    exchange &e = arrive(mask, "__syncwarp", at);
    publish(e.token, (e.arrived & (e.arrived - 1)) == 0);
    wait_for_others(e, at);
    receive(e.token);
    leave(e);
}

template <class T> T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = WARP, place at = here())
{
    int lane = current->lane(), other = lane ^ lane_mask;
    return shuffle(mask, value, other <= (lane | (width - 1)) ? other : lane, "__shfl_xor_sync", at);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, place at = here())
{
    return vote(mask, predicate != 0, "__ballot_sync", at);
}
template <class T> using same = std::common_type_t<T>; /* makes b convert to the address's type */
template <class T> T atomicAdd(T *address, same<T> b)
{
    return update(address, [b](T a) { return a + b; });
}
template <class T> T atomicMin(T *address, same<T> b)
{
    return update(address, [b](T a) { return a < b ? a : b; });
}
inline unsigned __float_as_uint(float x) { return bits_as<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return bits_as<float>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline float fast_exp2f(float x) { return exp2f(x); }

template <class T> T min(T a, T b) { return a < b ? a : b; }
template <class T> T max(T a, T b) { return a > b ? a : b; }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }

template <class T>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], T, place at = here())
{
    fragments mine;
    for (int i = 0; i < 8; i++) mine.a[i] = half_of(a[i / 2], i % 2, T());
    for (int i = 0; i < 4; i++) mine.b[i] = half_of(b[i / 2], i % 2, T());
    multiply(d, mine, at);
}

/* Each lane reads the values that it receives, so that TSan sees which lane reads them. */
inline void ldmatrix_x4(uint32_t (&r)[4], const void *shared_row, place at = here())
{
    rows rows = share_rows(shared_row, at);
    int row = current->lane() / 4, col = current->lane() % 4 * 2;
    for (int i = 0; i < 4; i++) r[i] = rows.of[8 * i + row][col] | (uint32_t)rows.of[8 * i + row][col + 1] << 16;
}

inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void *shared_row, place at = here())
{
    rows rows = share_rows(shared_row, at);
    int row = current->lane() % 4 * 2, col = current->lane() / 4;
    for (int i = 0; i < 4; i++) r[i] = rows.of[8 * i + row][col] | (uint32_t)rows.of[8 * i + row + 1][col] << 16;
}

/* Reads the source at once and writes it to shared memory in the wait. Until then that memory holds NaNs, stored
 * visibly to TSan. */
inline void cp_async_16(void *shared, const void *global, bool valid, place at = here())
{
    if ((uintptr_t)shared % 16 || (uintptr_t)global % 16)
        fail("cp.async from %p to %p, not both multiples of 16, at %s:%d", global, shared, at.file, at.line);
    quad *to = static_cast<quad *>(shared);
    current->copies.push_back(
        { to, valid ? *static_cast<const quad *>(global) : quad{ 0, 0, 0, 0 }, current->open_group });
    *to = quad{ ~0u, ~0u, ~0u, ~0u };
}

inline void cp_async_commit() { current->open_group++; }

template <int N> void cp_async_wait()
{
    std::vector<async_copy> &copies = current->copies;
    auto under_way = copies.begin();
    for (; under_way != copies.end() && under_way->group < current->open_group - N; ++under_way) {
        *under_way->to = under_way->bytes;
        note_writer(under_way->to, current->number + 1);
        current->landed.push_back(under_way->to);
    }
    copies.erase(copies.begin(), under_way);
}

inline uint32_t shared_address(const void *shared)
{
    size_t at = (size_t)((const unsigned char *)shared - running->dynamic_shared);
    if (at > running->shared_bytes) fail("%p is not in dynamic shared memory", shared);
    return FIRST_SHARED_ADDRESS + (uint32_t)at;
}

inline void fence_proxy_async()
{
    for (const void *shared : current->landed) note_writer(shared, 0);
    current->landed.clear();
}

template <class... R> void wgmma_fence(R &...) { current->registers_fenced = true; }
inline void wgmma_commit() { current->open_products++; }

template <int N, class... R> void wgmma_wait(R &...)
{
    std::vector<product> &products = current->products;
    size_t n_done = 0;
    for (; n_done < products.size() && products[n_done].group < current->open_products - N; n_done++) finish(n_done);
    products.erase(products.begin(), products.begin() + (long)n_done);
    current->registers_fenced = false;
}

template <class T> void wgmma_k_major(float (&d)[16][4], uint64_t a, uint64_t b, bool accumulate, T, place at = here())
{
    issue_product<T>(d, a, NULL, b, false, accumulate, at);
}

template <class T, int N>
void wgmma_mn_major(float (&d)[N][4], const uint32_t (&a)[4], uint64_t b, T, place at = here())
{
    issue_product<T>(d, 0, a, b, true, true, at);
}

} // namespace names
} // namespace cuda_on_cpu

using namespace cuda_on_cpu::names;

#endif
