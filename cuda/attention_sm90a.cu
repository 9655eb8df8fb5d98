/* attention_sm90a.cu — attention with Hopper's warpgroup matrix instruction (wgmma): 16-bit operands, f32 accumulation;
 * sm_90a only, and without a cap.
 *
 * A thread block processes a tile of rows x heads that share one key head, over one chunk of keys, KEYS at a time. One
 * warpgroup copies keys and values from the cache to a ring of slots in shared memory; each of the others computes 64
 * rows of the tile. The product with the values of one step runs concurrently with the softmax of the next step, so the
 * slots hold, in this order: keys 0, keys 1, values 0, keys 2, values 1, … */
#include "attention_tile.h"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "compile this file for sm_90a only"
#endif

namespace
{
enum {
    KEYS = 128,      /* per step of the loop over keys */
    WARPGROUP = 128, /* threads */
    CHUNK = 8,       /* values copied by one cp.async: 16 bytes */
    SLOTS = 4,       /* at least 3: a step waits for two at once */
};

/* How many warpgroups compute, and the registers of their threads and of those that copy; together no more than the
 * 65536 that a multiprocessor has. Three warpgroups use each key that is read for more rows; with D = 128 their outputs
 * take too many registers. */
template <int D> struct division {
    static constexpr int COMPUTING = D == 64 ? 3 : 2, THREADS = WARPGROUP * (1 + COMPUTING), ROWS = 64 * COMPUTING,
                         COPYING_REGISTERS = D == 64 ? 32 : 56, COMPUTING_REGISTERS = D == 64 ? 160 : 224;
};

/* (ROWS, D) in the layout that wgmma reads: a panel of the first 64 values of each row, then one of the next 64. */
template <class T, int ROWS, int D> struct matrix {
    T panel[D / WGMMA_ROW][ROWS * WGMMA_ROW];

    __device__ __forceinline__ T *chunk(int row, int i) { return panel[i / 8] + wgmma_swizzled(row, i % 8); }
};

template <class T, int D> struct workspace {
    matrix<T, division<D>::ROWS, D> q;
    matrix<T, KEYS, D> slot[SLOTS]; /* keys or values */
    mbarrier full[SLOTS], empty[SLOTS];
    mbarrier may_multiply[division<D>::COMPUTING]; /* of each computing warpgroup */
};

/* One use of a slot of the ring; the slots are used in turn. */
struct use {
    int slot = 0;
    uint32_t parity = 0; /* of how many times the slot has been used before */

    __device__ __forceinline__ use next() const
    {
        return slot + 1 < SLOTS ? use{ slot + 1, parity } : use{ 0, parity ^ 1 };
    }
};

__device__ __forceinline__ int thread_of_warpgroup() { return (int)threadIdx.x % WARPGROUP; }

/* ---- the warpgroup that copies ---- */

/* Starts copying the tile's rows of q; rows beyond the last are filled with zeros. */
template <class T, int D>
__device__ __forceinline__ void fetch_rows(workspace<T, D> *work, const attention_task<T> &t, int g, int top)
{
    constexpr int CHUNKS = D / CHUNK;
    for (int i = thread_of_warpgroup(); i < division<D>::ROWS * CHUNKS; i += WARPGROUP) {
        int at = top + i / CHUNKS, chunk = i % CHUNKS;
        bool valid = at < t.n * t.group;
        int row = valid ? at / t.group : 0, head = valid ? g * t.group + at % t.group : 0;
        cp_async_16(work->q.chunk(i / CHUNKS, chunk), t.q + (int64_t)row * t.q_stride + head * D + chunk * CHUNK,
                    valid);
    }
}

/* Fills the next slot, once it is empty, with the keys or values at indices first … first+KEYS-1 of in_play, zeros for
 * those at `end` and beyond. A thread copies one chunk of every STEP-th of them; it loads all of their positions before
 * the first copy, because a load between copies would hold up the next one. */
template <class T, int D>
__device__ __forceinline__ void fill(workspace<T, D> *work, use *to, const T *k_or_v, const attention_task<T> &t, int g,
                                     int first, int end)
{
    constexpr int CHUNKS = D / CHUNK, STEP = WARPGROUP / CHUNKS;
    int own = thread_of_warpgroup() / CHUNKS, chunk = thread_of_warpgroup() % CHUNKS;
    int32_t position[KEYS / STEP]; /* -1: none */
#pragma unroll
    for (int i = 0; i < KEYS / STEP; i++)
        position[i] = first + own + i * STEP < end ? t.in_play[first + own + i * STEP] : -1;
    const T *from = k_or_v + (int64_t)g * t.capacity * D + chunk * CHUNK;
    mbarrier_wait(&work->empty[to->slot], to->parity ^ 1);
#pragma unroll
    for (int i = 0; i < KEYS / STEP; i++)
        cp_async_16(work->slot[to->slot].chunk(own + i * STEP, chunk), from + (int64_t)max(position[i], 0) * D,
                    position[i] >= 0);
    cp_async_arrive(&work->full[to->slot]);
    *to = to->next();
}

template <class T, int D>
__device__ __forceinline__ void copy_keys(workspace<T, D> *work, const attention_task<T> &t, int g, int top, int row,
                                          int last_row, lazy_key_range keys)
{
    use to;
    int first = next_key(t, keys.begin, &row, last_row);
    fetch_rows(work, t, g, top); /* keys 0 are copied after q, so their barrier tells that both have landed */
    fill(work, &to, t.k, t, g, first, keys.end);
    for (int next; (next = next_key(t, first + KEYS, &row, last_row)) < keys.end; first = next) {
        fill(work, &to, t.k, t, g, next, keys.end);
        fill(work, &to, t.v, t, g, first, keys.end);
    }
    fill(work, &to, t.v, t, g, first, keys.end);
}

/* ---- the warpgroups that compute ---- */

/* Waits until wgmma may read the slot. */
template <class T, int D> __device__ __forceinline__ void wait_for_copies(workspace<T, D> *work, use at)
{
    mbarrier_wait(&work->full[at.slot], at.parity);
    fence_proxy_async();
}

/* Arrives for this warp, after all of its lanes. */
__device__ __forceinline__ void arrive(mbarrier *barrier)
{
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
}

/* Lets warpgroups start their products one after the other, so that one multiplies while others compute powers. */
template <class T, int D> struct relay {
    mbarrier *own, *following;
    uint32_t parity;

    __device__ __forceinline__ relay(workspace<T, D> *work, int self)
        : own(&work->may_multiply[self]), following(&work->may_multiply[(self + 1) % division<D>::COMPUTING]),
          parity(self == 0) /* the first one starts without waiting */
    {
    }
    __device__ __forceinline__ void take()
    {
        mbarrier_wait(own, parity);
        parity ^= 1;
    }
    __device__ __forceinline__ void pass_on() { arrive(following); }
};

/* Starts s = q k^T: (64 rows of warpgroup `self`, KEYS). */
template <class T, int D>
__device__ __forceinline__ void multiply_keys(float (&s)[KEYS / 8][4], const workspace<T, D> *work, use at, int self)
{
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        int panel = 16 * i / WGMMA_ROW, first = 16 * i % WGMMA_ROW;
        wgmma_k_major(s, wgmma_descriptor(work->q.panel[panel] + self * 64 * WGMMA_ROW, first, 0),
                      wgmma_descriptor(work->slot[at.slot].panel[panel], first, 0), i > 0, T{});
    }
    wgmma_commit();
}

/* Starts out += p v; p: powers (64 rows of the warpgroup, KEYS), narrowed to T. */
template <class T, int D>
__device__ __forceinline__ void multiply_values(float (&out)[D / 8][4], const uint32_t (&p)[KEYS / 16][4],
                                                const matrix<T, KEYS, D> &v)
{
#pragma unroll
    for (int j = 0; j < KEYS / 16; j++)
        wgmma_mn_major(out, p[j], wgmma_descriptor(v.panel[0] + 16 * j * WGMMA_ROW, 0, sizeof v.panel[0]), T{});
    wgmma_commit();
}

template <class T>
__device__ __forceinline__ void narrow_powers(uint32_t (&p)[KEYS / 16][4], const float (&s)[KEYS / 8][4])
{
#pragma unroll
    for (int j = 0; j < KEYS / 16; j++) narrow_step<T>(p[j], s[2 * j], s[2 * j + 1]);
}

/* The first address in dynamic shared memory that is a multiple of an atom's 1024 bytes, as the swizzled layout
 * requires. */
__device__ __forceinline__ unsigned char *aligned(unsigned char *memory)
{
    constexpr uint32_t ATOM_BYTES = 2 * WGMMA_ATOM;
    return memory + (ATOM_BYTES - shared_address(memory) % ATOM_BYTES) % ATOM_BYTES;
}
enum { SLACK = 2 * WGMMA_ATOM - 16 /* bytes that aligned() may skip */ };

/* 64 rows of the tile by the computing warpgroup `self`; warp_top: the first row of this warp. */
template <class T, int D>
__device__ __forceinline__ void compute_rows(workspace<T, D> *work, const attention_task<T> &t, int g, int chunk,
                                             int self, int warp_top, int row, int last_row, lazy_key_range keys)
{
    float s[KEYS / 8][4] = {}, out[D / 8][4] = {}, rescale[2];
    uint32_t p[KEYS / 16][4];
    row_pair rows = rows_of_lane(t, warp_top, keys.end);
    relay<T, D> turn(work, self);
    int first = next_key(t, keys.begin, &row, last_row), next = next_key(t, first + KEYS, &row, last_row);

    use k, v = k.next();
    wait_for_copies(work, k);
    turn.take();
    wgmma_fence(s);
    multiply_keys(s, work, k, self);
    turn.pass_on();
    wgmma_wait<0>(s);
    arrive(&work->empty[k.slot]);
    online_softmax(s, rows, rescale, first, t.scale, 0.0f);
    narrow_powers<T>(p, s);

    for (; next < keys.end; v = v.next()) {
        first = next;
        next = next_key(t, first + KEYS, &row, last_row);
        k = v;
        v = k.next();
        wait_for_copies(work, k);
        wait_for_copies(work, v);
        turn.take();
        wgmma_fence(s, p, out);
        multiply_keys(s, work, k, self);
        multiply_values(out, p, work->slot[v.slot]);
        turn.pass_on();
        wgmma_wait<1>(s);
        arrive(&work->empty[k.slot]);
        online_softmax(s, rows, rescale, first, t.scale, 0.0f);
        wgmma_wait<0>(out, p);
        arrive(&work->empty[v.slot]);
        rescale_outputs(out, rescale);
        narrow_powers<T>(p, s);
    }
    wait_for_copies(work, v);
    wgmma_fence(p, out);
    multiply_values(out, p, work->slot[v.slot]);
    wgmma_wait<0>(out, p);
    write_rows(t, out, rows, warp_top, g, chunk);
}

template <class T, int D> __global__ void __launch_bounds__(division<D>::THREADS, 1) attend(attention_task<T> t)
{
    begin_kernel();
    using divided = division<D>;
    LAZY_DYNAMIC_SHARED(unsigned char, memory);
    auto *work = reinterpret_cast<workspace<T, D> *>(aligned(memory));
    int g = blockIdx.y, chunk = blockIdx.z,
        top = (int)(gridDim.x - 1 - blockIdx.x) * divided::ROWS; /* rows with the most keys first */
    int bottom = min(top + divided::ROWS, t.n * t.group) - 1;
    int row = top / t.group, last_row = bottom / t.group; /* row: the first that attends to keys not yet passed */
    lazy_key_range keys = keys_of_chunk(t, row, last_row, chunk);

    if (threadIdx.x == 0) {
        for (mbarrier &full : work->full) mbarrier_open(&full, WARPGROUP);
        for (mbarrier &empty : work->empty) mbarrier_open(&empty, divided::COMPUTING * WARPGROUP / 32);
        for (mbarrier &turn : work->may_multiply) mbarrier_open(&turn, WARPGROUP / 32);
    }
    __syncthreads();
    if (threadIdx.x < WARPGROUP) {
        fewer_registers<divided::COPYING_REGISTERS>();
        copy_keys(work, t, g, top, row, last_row, keys);
    } else {
        more_registers<divided::COMPUTING_REGISTERS>();
        int self = (int)threadIdx.x / WARPGROUP - 1;
        compute_rows(work, t, g, chunk, self, top + 64 * self + thread_of_warpgroup() / 32 * 16, row, last_row, keys);
    }
}

template <class T, int D> cudaError_t run(const attention_task<T> &t, cudaStream_t queue)
{
    using divided = division<D>;
    return lazy_launch(attend<T, D>, dim3(lazy_blocks(t.n * t.group, divided::ROWS), t.n_heads / t.group, t.chunks),
                       dim3(divided::THREADS), sizeof(workspace<T, D>) + SLACK, queue, t);
}
} // namespace

bool lazy_cuda_wgmma_supports(int head_dim) { return head_dim == 64 || head_dim == 128; }

template <class T> cudaError_t lazy_cuda_attend_wgmma(const attention_task<T> &t, cudaStream_t queue)
{
    return t.d == 64 ? run<T, 64>(t, queue) : run<T, 128>(t, queue);
}

template cudaError_t lazy_cuda_attend_wgmma(const attention_task<__half> &, cudaStream_t);
template cudaError_t lazy_cuda_attend_wgmma(const attention_task<__nv_bfloat16> &, cudaStream_t);
