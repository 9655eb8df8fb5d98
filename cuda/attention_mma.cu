/* attention_mma.cu — attention on tensor cores, in 16 bits with f32 sums.
 *
 * A block takes a tile of rows x heads that share one key head through a chunk of keys, 64 at a time. K and V come by cp.async from
 * where they lie, the next block while this one is worked on. A warp has 16 rows of the tile; its scores stay in registers and
 * become, narrowed, the operand of the second product. */
#include "attention_tile.h"

namespace
{
enum {
    KEYS = 64,      /* of a block */
    WARP_ROWS = 16, /* rows x heads of a warp */
    PAD = 8,        /* elements between rows in shared memory, so that eight of them lie in different banks */
    BUFFERS = 2,
};

template <class T, int D> struct tile { /* of K or V, in shared memory */
    T row[KEYS][D + PAD];
};

template <class T, int D, int WARPS> struct workspace {
    T q[WARPS * WARP_ROWS][D + PAD];
    tile<T, D> k[BUFFERS], v[BUFFERS];
};

/* Begins to fetch keys first … first+KEYS-1 of `end`; what lies behind becomes zero. */
template <class T, int D, int THREADS>
__device__ __forceinline__ void fetch(tile<T, D> *to, const T *k_or_v, const attention_task<T> &t, int g, int first, int end)
{
    constexpr int WIDE = 16 / sizeof(T), PIECES = D / WIDE;
    for (int i = threadIdx.x; i < KEYS * PIECES; i += THREADS) {
        int j = i / PIECES, at = i % PIECES * WIDE;
        bool valid = first + j < end;
        cp_async_16(&to->row[j][at], cache_row(k_or_v, t, g, valid ? first + j : first) + at, valid);
    }
}

/* s[j] = 16 rows by keys 8j … 8j+7 */
template <class T, int D>
__device__ __forceinline__ void multiply_keys(float (&s)[KEYS / 8][4], const uint32_t (&q)[D / 16][4], const tile<T, D> &k)
{
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < KEYS / 16; j++) {
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            uint32_t b[4]; /* keys 0-7 and 8-15 of these 16, 16 elements each */
            ldmatrix_x4(b, &k.row[16 * j + lane / 16 * 8 + lane % 8][16 * i + lane / 8 % 2 * 8]);
            mma_m16n8k16(s[2 * j], q[i], { b[0], b[1] }, T{});
            mma_m16n8k16(s[2 * j + 1], q[i], { b[2], b[3] }, T{});
        }
    }
}

/* out[i] += shares by elements 8i … 8i+7 of the values */
template <class T, int D>
__device__ __forceinline__ void multiply_values(float (&out)[D / 8][4], const float (&s)[KEYS / 8][4], const tile<T, D> &v)
{
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < KEYS / 16; j++) {
        uint32_t share[4];
        narrow_shares<T>(share, s[2 * j], s[2 * j + 1]);
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            uint32_t b[4];
            ldmatrix_x4_trans(b, &v.row[16 * j + lane % 16][16 * i + lane / 16 * 8]);
            mma_m16n8k16(out[2 * i], share, { b[0], b[1] }, T{});
            mma_m16n8k16(out[2 * i + 1], share, { b[2], b[3] }, T{});
        }
    }
}

/* About as many as shared memory has room for on Hopper; without being told, the compiler just misses it. */
constexpr int blocks_at_once(int d, int warps) { return (d == 64 ? 16 : 8) / warps; }

template <class T, int D, int WARPS> __global__ void __launch_bounds__(32 * WARPS, blocks_at_once(D, WARPS)) attend(attention_task<T> t)
{
    constexpr int THREADS = 32 * WARPS, TILE_ROWS = WARPS * WARP_ROWS, WIDE = 16 / sizeof(T), PIECES = D / WIDE;
    LAZY_DYNAMIC_SHARED(unsigned char, memory);
    auto *work = reinterpret_cast<workspace<T, D, WARPS> *>(memory);
    int g = blockIdx.y, chunk = blockIdx.z, n = t.n * t.group;
    int top = (int)(gridDim.x - 1 - blockIdx.x) * TILE_ROWS; /* long rows first */
    int lane = threadIdx.x % 32, warp_top = (int)threadIdx.x / 32 * WARP_ROWS, bottom = min(top + TILE_ROWS, n) - 1;
    int begin = chunk * t.chunk, end = min(begin + t.chunk, t.limits[bottom / t.group]), seen_by_all = t.limits[top / t.group];

    for (int i = threadIdx.x; i < TILE_ROWS * PIECES; i += THREADS) {
        int at = top + i / PIECES, row = at / t.group, head = g * t.group + at % t.group;
        const T *q = t.qkv + (int64_t)(at < n ? row : 0) * t.width + (at < n ? head : 0) * D + i % PIECES * WIDE;
        cp_async_16(&work->q[i / PIECES][i % PIECES * WIDE], q, at < n);
    }
    if (begin < end) {
        fetch<T, D, THREADS>(&work->k[0], t.k, t, g, begin, end);
        fetch<T, D, THREADS>(&work->v[0], t.v, t, g, begin, end);
    }
    cp_async_commit();

    float out[D / 8][4] = {}, shrink[2];
    uint32_t q[D / 16][4];
    row_pair rows = rows_of_lane(t, top + warp_top);
    for (int first = begin, turn = 0; first < end; first += KEYS, turn ^= 1) {
        if (first + KEYS < end) {
            fetch<T, D, THREADS>(&work->k[turn ^ 1], t.k, t, g, first + KEYS, end);
            fetch<T, D, THREADS>(&work->v[turn ^ 1], t.v, t, g, first + KEYS, end);
        }
        cp_async_commit();
        cp_async_wait<1>();
        __syncthreads();
        if (first == begin) {
#pragma unroll
            for (int i = 0; i < D / 16; i++) ldmatrix_x4(q[i], &work->q[warp_top + lane % 16][16 * i + lane / 16 * 8]);
        }
        float s[KEYS / 8][4] = {};
        multiply_keys(s, q, work->k[turn]);
        soften(s, rows, shrink, first, t.scale, first + KEYS <= min(seen_by_all, end));
        shrink_outputs(out, shrink);
        multiply_values(out, s, work->v[turn]);
        __syncthreads();
    }
    cp_async_wait<0>();
    write_rows(t, out, rows, top + warp_top, g, chunk);
}

template <class T, int D, int WARPS> cudaError_t run(const attention_task<T> &t, const lazy_queue &queue)
{
    int n = t.n * t.group, tiles = (n + WARPS * WARP_ROWS - 1) / (WARPS * WARP_ROWS);
    return lazy_launch(attend<T, D, WARPS>, dim3(tiles, t.n_heads / t.group, t.chunks), dim3(32 * WARPS), sizeof(workspace<T, D, WARPS>),
                       queue, t);
}

template <class T, int D> cudaError_t run_with(const attention_task<T> &t, const lazy_queue &queue)
{
    return t.n * t.group <= WARP_ROWS ? run<T, D, 1>(t, queue) : run<T, D, 4>(t, queue);
}
} // namespace

bool lazy_cuda_mma_takes(int head_dim) { return head_dim == 64 || head_dim == 80 || head_dim == 96 || head_dim == 128; }

template <class T> cudaError_t lazy_cuda_attend_by_mma(const attention_task<T> &t, const lazy_queue &queue)
{
    switch (t.d) {
    case 64: return run_with<T, 64>(t, queue);
    case 80: return run_with<T, 80>(t, queue);
    case 96: return run_with<T, 96>(t, queue);
    default: return run_with<T, 128>(t, queue);
    }
}

template cudaError_t lazy_cuda_attend_by_mma(const attention_task<__half> &, const lazy_queue &);
template cudaError_t lazy_cuda_attend_by_mma(const attention_task<__nv_bfloat16> &, const lazy_queue &);
