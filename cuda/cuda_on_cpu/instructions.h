/* instructions.h — the functions of CUDA and of kernel.h that kernels use; wgmma.h has those of wgmma. */
#pragma once

#include <cmath>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "fibers.h"

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
    memcpy((void *)&to, &from, sizeof to);
    return to;
}

struct alignas(sizeof(exchange::slot[0])) fragments {
    float a[8], b[4];
};

/* The lower or the upper number of 16 bits. */
template <class T> float half_of(uint32_t pair, int upper)
{
    return (float)bits_as<T>((uint16_t)(upper ? pair >> 16 : pair));
}

typedef uint16_t __attribute__((may_alias)) value16;

/* Lanes exchange addresses of rows; each lane reads the values that it receives, so that TSan sees which lane reads
 * them. `across`, `down`: from a value to the one that shares its register. */
inline void load_matrices(uint32_t (&r)[4], const void *shared_row, int row, int col, int across, int down, place at)
{
    if ((uintptr_t)shared_row % 16) fail(at, "ldmatrix of a row at %p, which is no multiple of 16", shared_row);
    const exchange &e = exchange_values_aligned(static_cast<const value16 *>(shared_row), "ldmatrix", at);
    for (int i = 0; i < 4; i++)
        r[i] = value_of_lane<const value16 *>(e, 8 * i + row)[col] |
               (uint32_t)value_of_lane<const value16 *>(e, 8 * i + row + down)[col + across] << 16;
}

/* Records the writer of 16 bytes (1 + thread number), or 0 once it has fenced them; static shared memory is not
 * tracked. */
UNSEEN inline void note_writer(const void *shared, int writer)
{
    const executor &e = *running;
    size_t at = (size_t)((const unsigned char *)shared - e.dynamic_shared);
    if (at < e.shared_bytes) e.unfenced[at / 16] = writer;
}

struct mbarrier {
    int count, missing, phase;
    int token[2];      /* of even and odd phases */
    bool has_unfenced; /* copies that arrived here, and that no thread has fenced since */
};

/* Other than those of threads. */
UNSEEN inline int number_of(const mbarrier &b)
{
    return -1 - (int)((const unsigned char *)&b - running->dynamic_shared);
}

UNSEEN inline void leave_unfenced(mbarrier &b) { b.has_unfenced = true; }

namespace names
{

inline void __syncthreads(place at = here()) { wait_for_block(at); }

UNSEEN inline void __syncwarp(unsigned mask = ~0u, place at = here())
{
    exchange &e = arrive(mask, "__syncwarp", at);
    publish(e.token, (e.arrived & (e.arrived - 1)) == 0);
    wait_for_others(e);
    receive(e.token);
}

template <class T> UNSEEN T __shfl_sync(unsigned mask, T value, int lane, place at = here())
{
    static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8, "no shuffle takes this type");
    return value_of_lane<T>(exchange_values(value, "__shfl_sync", at, mask), lane & (WARP - 1));
}

template <class T> UNSEEN T __shfl_xor_sync(unsigned mask, T value, int lane_mask, place at = here())
{
    return __shfl_sync(mask, value, current->lane() ^ lane_mask, at);
}

UNSEEN inline unsigned __ballot_sync(unsigned mask, int predicate, place at = here())
{
    const exchange &e = exchange_values(predicate != 0, "__ballot_sync", at, mask);
    unsigned yes = 0;
    for (int lane = 0; lane < WARP; lane++)
        yes |= (unsigned)((e.arrived >> lane & 1) && value_of_lane<bool>(e, lane)) << lane;
    return yes;
}

/* Atomics on integers, which order no other memory. common_type_t makes b convert to the address's type. */
template <class T> T atomicAdd(T *address, std::common_type_t<T> b)
{
    return __atomic_fetch_add(address, b, __ATOMIC_RELAXED);
}
template <class T> T atomicMin(T *address, std::common_type_t<T> b)
{
    T a = __atomic_load_n(address, __ATOMIC_RELAXED);
    while (b < a && !__atomic_compare_exchange_n(address, &a, b, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) continue;
    return a;
}
inline void begin_kernel(bool = true) { current->has_begun = true; }
/* The only atomic that orders memory. */
inline bool take_ticket(unsigned *taken, unsigned n)
{
    unsigned before = __atomic_load_n(taken, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(taken, &before, before >= n - 1 ? 0 : before + 1, false, __ATOMIC_ACQ_REL,
                                        __ATOMIC_RELAXED));
    return before == n - 1;
}
inline unsigned __float_as_uint(float x) { return bits_as<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return bits_as<float>(x); }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector)
{
    uint64_t bytes = (uint64_t)y << 32 | x;
    unsigned picked = 0;
    for (int i = 0; i < 4; i++) picked |= (unsigned)(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return picked;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline float fast_exp2f(float x) { return exp2f(x); }
inline float __fdividef(float a, float b) { return a / b; }

template <class T> T min(T a, T b) { return a < b ? a : b; }
template <class T> T max(T a, T b) { return a > b ? a : b; }

/* Accumulates in f32 in the order of k; a GPU's tensor cores use another order and rounding. */
template <class T>
UNSEEN void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], T, place at = here())
{
    fragments mine;
    for (int i = 0; i < 8; i++) mine.a[i] = half_of<T>(a[i / 2], i % 2);
    for (int i = 0; i < 4; i++) mine.b[i] = half_of<T>(b[i / 2], i % 2);
    const exchange &e = exchange_values_aligned(mine, "mma_m16n8k16", at);
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
}

inline void ldmatrix_x4(uint32_t (&r)[4], const void *shared_row, place at = here())
{
    load_matrices(r, shared_row, current->lane() / 4, current->lane() % 4 * 2, 1, 0, at);
}

inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void *shared_row, place at = here())
{
    load_matrices(r, shared_row, current->lane() % 4 * 2, current->lane() / 4, 0, 1, at);
}

/* Reads the source at once and writes it to shared memory in the wait. Until then that memory holds NaNs, stored
 * visibly to TSan. */
inline void cp_async_16(void *shared, const void *global, bool valid, place at = here())
{
    if ((uintptr_t)shared % 16 || (uintptr_t)global % 16)
        fail(at, "cp.async from %p to %p, not both multiples of 16", global, shared);
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

using cuda_on_cpu::mbarrier;

UNSEEN inline void mbarrier_open(mbarrier *b, int count) { *b = { count, count, 0, {}, false }; }

UNSEEN inline void mbarrier_arrive(mbarrier *b)
{
    publish(b->token[b->phase % 2], b->missing == b->count);
    if (--b->missing) return;
    b->missing = b->count;
    b->phase++;
    executor &e = *running;
    for (int i = 0; i < e.n_waiting; i++) make_ready(*e.waiting[i]);
    e.n_waiting = 0;
}

UNSEEN inline void mbarrier_wait(mbarrier *b, uint32_t parity, place at = here())
{
    executor &e = *running;
    while ((uint32_t)b->phase % 2 == parity) {
        e.waiting[e.n_waiting++] = current;
        wait_in("mbarrier_wait", at);
    }
    receive(b->token[parity]);
    current->waited_for = b;
}

/* The copies land at once. */
inline void cp_async_arrive(mbarrier *barrier)
{
    cp_async_commit();
    cp_async_wait<0>();
    for (const void *shared : current->landed) note_writer(shared, number_of(*barrier));
    current->landed.clear();
    leave_unfenced(*barrier);
    mbarrier_arrive(barrier);
}

/* Fences this thread's copies and those that arrived at the mbarrier it waited for last. A missing fence of another
 * thread of the same product is not detected after that. */
UNSEEN inline void fence_proxy_async()
{
    executor &e = *running;
    for (const void *shared : current->landed) note_writer(shared, 0);
    current->landed.clear();
    mbarrier *b = current->waited_for;
    if (!b || !b->has_unfenced) return;
    for (size_t i = 0; i < e.shared_bytes / 16; i++)
        if (e.unfenced[i] == number_of(*b)) e.unfenced[i] = 0;
    b->has_unfenced = false;
}

template <int EACH> void fewer_registers() {}
template <int EACH> void more_registers() {}

} // namespace names
} // namespace cuda_on_cpu

using namespace cuda_on_cpu::names;
