/* fibers.h — the threads of a block as fibers, and how they wait for each other: __syncthreads, and the operations of a
 * warp. */
#pragma once

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>
#include <type_traits>
#include <vector>

#include <cuda_runtime.h>
#include <sys/mman.h>
#include <ucontext.h>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

/* Excludes the scheduler from the sanitizers: TSan would report races on data that only one fiber at a time can touch,
 * and ASan would take a switch of stacks for the end of stack frames. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define UNSEEN __attribute__((no_sanitize("thread", "address"), noinline))
#else
#define UNSEEN
#endif

namespace cuda_on_cpu
{

constexpr int WARP = 32, MAX_THREADS = 1024, MAX_WARPS = MAX_THREADS / WARP;
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

UNSEEN inline bool same_text(const char *a, const char *b) { return a == b || !strcmp(a, b); }
UNSEEN inline bool operator==(place a, place b) { return a.line == b.line && same_text(a.file, b.file); }

/* A stack, and the state to resume it. */
struct context {
    ucontext_t start;          /* for the first time */
    bool started = true;       /* from then on, or if it has no `start` */
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

/* What a lane passes to wgmma: matrices in shared memory, and its part of a if that is in registers. */
struct product_operands {
    uint64_t a, b;
    uint32_t registers[4];
};

/* This thread's part of a pending wgmma product: two rows, and two of every eight columns. */
struct product {
    float (*d)[4];               /* holds NaNs until the product is finished */
    int n_columns;               /* 8 for each d[j] */
    const uint32_t *a_registers; /* NULL: a is in shared memory */
    product_operands operands;
    bool b_mn_major;
    float (*wide)(uint16_t);
    int group;
    place at;
    std::vector<float> initial = {}; /* values of d to accumulate to; empty if they are an earlier pending product's */
    std::vector<uint16_t> a = {};    /* (2, 16) */
    std::vector<uint16_t> b = {};    /* (16, n_columns / 4) as it was in shared memory when the product was issued */
};

struct mbarrier;

struct cuda_thread {
    context stack;
    bool exited, has_begun;
    int number; /* within its block */
    uint3 index;
    int step; /* warp operations that it has reached in this block */

    const char *waits_in; /* for messages */
    place waits_at;

    std::vector<async_copy> copies;
    int open_group;
    std::vector<const void *> landed; /* destinations of completed copies since its last fence_proxy_async */
    mbarrier *waited_for;             /* the last one */
    std::vector<product> products;
    int open_products; /* group number of the products issued next */
    bool registers_fenced;

    int lane() const { return number % WARP; }
};

/* One operation that all lanes of a warp execute together. */
struct exchange {
    int step; /* its number in this block */
    const char *what;
    place at;
    unsigned arrived; /* lanes */
    int token;        /* orders memory for TSan: see publish */
    alignas(64) unsigned char slot[WARP][64];
};

struct warp {
    unsigned live;     /* lanes that have not returned */
    exchange steps[2]; /* the even and the odd one: all lanes have left step s before one of them reaches s + 2 */
};

struct launch {
    const void *address; /* of the kernel */
    dim3 grid, block;
    size_t shared_bytes;
    std::function<void()> kernel; /* with its arguments */
};

/* A launch, and the state for running its blocks, one at a time. */
struct executor : launch {
    uint3 index;
    unsigned char *dynamic_shared;
    /* per 16 bytes of dynamic_shared: 1 + the number of the thread whose cp.async wrote them, or the number of the
     * mbarrier at which it arrived, without fence.proxy.async yet; or 0 */
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
    cuda_thread *waiting[MAX_THREADS]; /* at an mbarrier */
    int n_waiting;
};

inline executor executors[N_EXECUTORS];
inline executor *running; /* one executor runs at a time */
inline cuda_thread *current;
inline context *left; /* by the last switch of stacks */

/* ---- memory ordering between fibers, the only part of the scheduler that TSan sees ---- */

/* Release on a token. `first` stores, which drops the releases of an earlier use of the token. */
__attribute__((noinline)) inline void publish(int &token, bool first)
{
    if (first) __atomic_store_n(&token, 1, __ATOMIC_RELEASE);
    else __atomic_fetch_add(&token, 1, __ATOMIC_RELEASE);
}

__attribute__((noinline)) inline void receive(const int &token) { (void)__atomic_load_n(&token, __ATOMIC_ACQUIRE); }

/* ---- error reports ---- */

/* at: where in a kernel, or {} */
[[noreturn]] UNSEEN __attribute__((format(printf, 2, 3))) inline void fail(place at, const char *format, ...)
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
    if (at.file) fprintf(stderr, ", at %s:%d", at.file, at.line);
    fputc('\n', stderr);
    abort();
}

[[noreturn]] UNSEEN inline void fail_deadlock()
{
    const executor &e = *running;
    fprintf(stderr, "cuda_on_cpu: block (%u, %u, %u): deadlock; of %d threads, %d have returned, and\n", e.index.x,
            e.index.y, e.index.z, e.n_threads, e.n_threads - e.live);
    const cuda_thread *last = NULL;
    for (int i = 0; i < e.n_threads; i++) {
        const cuda_thread &t = *e.threads[i];
        if (t.exited || (last && same_text(last->waits_in, t.waits_in) && last->waits_at == t.waits_at)) continue;
        fprintf(stderr, "  thread %d waits in %s at %s:%d\n", i, t.waits_in, t.waits_at.file, t.waits_at.line);
        last = &t; /* those after it that wait for the same are not listed */
    }
    abort();
}

/* ---- fibers ---- */

UNSEEN inline void go_to(context &to) { __builtin_longjmp(to.resume, 1); }

/* noipa: the compiler must assume that a kernel's static variables have changed on return. */
UNSEEN __attribute__((noipa)) inline void switch_stack(context &from, context &to)
{
#ifdef __SANITIZE_THREAD__
    __tsan_switch_to_fiber(to.tsan_fiber, __tsan_switch_to_fiber_no_sync);
#endif
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(&from.fake_stack, to.bottom, to.size);
#endif
    left = &from;
    if (!__builtin_setjmp(from.resume)) {
        if (to.started) go_to(to);
        to.started = true;
        setcontext(&to.start);
    }
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(from.fake_stack, &left->bottom, &left->size);
#endif
}

UNSEEN inline void make_ready(cuda_thread &t)
{
    executor &e = *running;
    e.ready[(e.first_ready + e.n_ready++) % MAX_THREADS] = &t;
}

/* Runs the fiber that is ready first; the scheduler, if there is none. Returns when it is `from`'s turn again. */
UNSEEN inline void run_next(context &from)
{
    executor &e = *running;
    if (!e.n_ready) {
        current = NULL;
        switch_stack(from, e.scheduler);
        return;
    }
    cuda_thread &next = *e.ready[e.first_ready];
    e.first_ready = (e.first_ready + 1) % MAX_THREADS;
    e.n_ready--;
    current = &next;
    if (&next.stack != &from) switch_stack(from, next.stack);
}

/* In the order of lane numbers, so that runs are reproducible. */
UNSEEN inline void wake(const warp &w, unsigned lanes)
{
    const executor &e = *running;
    cuda_thread *const *threads = e.threads + (&w - e.warps) * WARP;
    for (int i = 0; i < WARP; i++) {
        int lane = e.reversed ? WARP - 1 - i : i;
        if (lanes >> lane & 1) make_ready(*threads[lane]);
    }
}

UNSEEN inline void wake_all()
{
    const executor &e = *running;
    int n_warps = (e.n_threads + WARP - 1) / WARP;
    for (int i = 0; i < n_warps; i++) {
        const warp &w = e.warps[e.reversed ? n_warps - 1 - i : i];
        wake(w, w.live);
    }
}

UNSEEN inline void wait_in(const char *what, place at)
{
    cuda_thread &self = *current;
    self.waits_in = what;
    self.waits_at = at;
    run_next(self.stack);
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
    if (e.arrived && !(e.arrived_at == at))
        fail(e.arrived_at, "divergent __syncthreads: reached at %s:%d while others of the block wait", at.file,
             at.line);
    int &token = e.barrier_token[e.generation % 2];
    publish(token, e.arrived == 0);
    e.arrived++;
    e.arrived_at = at;
    open_full_barrier();
    wait_in("__syncthreads", at);
    receive(token);
}

/* ---- operations of a warp ---- */

UNSEEN inline warp &own_warp() { return running->warps[current->number / WARP]; }

UNSEEN inline exchange &arrive(unsigned mask, const char *what, place at)
{
    cuda_thread &self = *current;
    if (mask != ~0u) fail(at, "%s with mask 0x%08x, which is not of all lanes", what, mask);
    exchange &e = own_warp().steps[self.step % 2];
    if (e.step != self.step) {
        e.step = self.step;
        e.what = what;
        e.at = at;
        e.arrived = 0;
    } else if (!same_text(e.what, what) || !(e.at == at)) {
        fail(e.at, "divergent warp: %s at %s:%d, while other lanes wait in %s", what, at.file, at.line, e.what);
    }
    self.step++;
    e.arrived |= 1u << self.lane();
    return e;
}

/* Wakes the lanes that have reached an operation, if all live ones have. */
UNSEEN inline void end_if_full(const warp &w, const exchange &e)
{
    if (e.arrived == w.live) wake(w, e.arrived);
}

UNSEEN inline void wait_for_others(const exchange &e)
{
    end_if_full(own_warp(), e);
    wait_in(e.what, e.at);
}

/* Passes `value` to the other lanes and waits for theirs, which the result holds until this lane's next operation. */
template <class T>
UNSEEN const exchange &exchange_values(const T &value, const char *what, place at, unsigned mask = ~0u)
{
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(exchange::slot[0]));
    exchange &e = arrive(mask, what, at);
    new (e.slot[current->lane()]) T(value);
    wait_for_others(e);
    return e;
}

/* The same for an instruction that all 32 lanes must execute (PTX's .aligned). */
template <class T> UNSEEN const exchange &exchange_values_aligned(const T &value, const char *what, place at)
{
    unsigned live = own_warp().live;
    if (live != ~0u) fail(at, "%s needs all 32 lanes, and there are 0x%08x", what, live);
    return exchange_values(value, what, at);
}

/* The value that a lane passed; NaN for a lane that has returned, whose value is undefined on a GPU. */
template <class T> UNSEEN T value_of_lane(const exchange &e, int lane)
{
    if (e.arrived >> lane & 1) return *std::launder(reinterpret_cast<const T *>(e.slot[lane]));
    T nothing;
    memset((void *)&nothing, 0xFF, sizeof nothing);
    return nothing;
}

/* ---- the life of a fiber ---- */

__attribute__((noinline)) inline void run_thread()
{
    receive(running->start_token);
    current->copies.clear();
    current->landed.clear();
    current->waited_for = NULL;
    current->has_begun = false;
    running->kernel();
    if (!current->has_begun) fail({}, "a kernel returned without begin_kernel");
    if (!current->products.empty()) fail(current->products[0].at, "returned without waiting for wgmma");
    publish(running->end_token, false);
}

/* A fiber's main function: runs one CUDA thread per block, block after block. */
UNSEEN inline void run_threads()
{
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(NULL, &left->bottom, &left->size);
#endif
    for (;;) {
        run_thread();
        cuda_thread &self = *current;
        warp &w = own_warp();
        const exchange &waiting = w.steps[self.step % 2];
        self.exited = true;
        running->live--;
        w.live &= ~(1u << self.lane());
        if (waiting.step == self.step) end_if_full(w, waiting);
        open_full_barrier();
        run_next(self.stack);
    }
}

UNSEEN inline cuda_thread *make_thread(int number)
{
    cuda_thread *t = new cuda_thread;
    void *memory = mmap(NULL, GUARD_BYTES + STACK_BYTES, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, GUARD_BYTES, PROT_NONE)) fail({}, "no memory for a stack");
    t->number = number;
    t->stack.bottom = (char *)memory + GUARD_BYTES;
    t->stack.size = STACK_BYTES;
    t->stack.started = false;
    ucontext_t &start = t->stack.start;
    getcontext(&start);
    start.uc_stack.ss_sp = (void *)t->stack.bottom;
    start.uc_stack.ss_size = STACK_BYTES;
    start.uc_link = NULL;
    makecontext(&start, run_threads, 0);
#ifdef __SANITIZE_THREAD__
    t->stack.tsan_fiber = __tsan_create_fiber(0);
    char name[32];
    snprintf(name, sizeof name, "CUDA thread %d", number);
    __tsan_set_fiber_name(t->stack.tsan_fiber, name);
#endif
    return t;
}

} // namespace cuda_on_cpu
