/* attention_sm90a.cu — attention with Hopper's warpgroup matrix instruction (wgmma): 16-bit operands, f32 accumulation;
 * sm_90a only, and without a cap.
 *
 * A thread block processes a tile of rows x heads that share one key head, over one chunk of keys, 128 keys at a time;
 * a warpgroup owns 64 rows of the tile. cp.async copies K and V from the cache to shared memory. The product with the
 * values of one group of keys runs concurrently with the softmax of the next group, so a stage holds the values of one
 * group and the keys of the next. */
#include "attention_tile.h"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "compile this file for sm_90a only"
#endif

namespace
{
enum {
    KEYS = 128, /* per step of the loop over keys */
    WARPGROUPS = 2,
    THREADS = 128 * WARPGROUPS,
    TILE_ROWS = 64 * WARPGROUPS,
    CHUNK = 8, /* values copied by one cp.async: 16 bytes */
};

/* (ROWS, D) in the layout that wgmma reads: a panel of the first 64 values of each row, then one of the next 64. */
template <class T, int ROWS, int D> struct matrix {
    T panel[D / WGMMA_ROW][ROWS * WGMMA_ROW];

    __device__ __forceinline__ T *chunk(int row, int i) { return panel[i / 8] + wgmma_swizzled(row, i % 8); }
};

template <class T, int D> struct stage {
    matrix<T, KEYS, D> v, next_k; /* values of one group of KEYS keys; keys of the next group */
};

template <class T, int D> struct workspace {
    matrix<T, TILE_ROWS, D> q;
    stage<T, D> stages[2];
};

/* Starts copying the tile's rows of q; rows beyond the last are filled with zeros. */
template <class T, int D>
__device__ __forceinline__ void fetch_rows(matrix<T, TILE_ROWS, D> *to, const attention_task<T> &t, int g, int top)
{
    constexpr int CHUNKS = D / CHUNK;
    for (int i = threadIdx.x; i < TILE_ROWS * CHUNKS; i += THREADS) {
        int at = top + i / CHUNKS, chunk = i % CHUNKS;
        bool valid = at < t.n * t.group;
        int row = valid ? at / t.group : 0, head = valid ? g * t.group + at % t.group : 0;
        cp_async_16(to->chunk(i / CHUNKS, chunk), t.qkv + (int64_t)row * t.width + head * D + chunk * CHUNK, valid);
    }
}

/* Starts copying the keys or values at indices first … first+KEYS-1 of in_play; those at `end` and beyond are filled
 * with zeros. */
template <class T, int D>
__device__ __forceinline__ void fetch(matrix<T, KEYS, D> *to, const T *k_or_v, const attention_task<T> &t, int g,
                                      int first, int end)
{
    constexpr int CHUNKS = D / CHUNK;
    int chunk = (int)threadIdx.x % CHUNKS;
#pragma unroll
    for (int j = (int)threadIdx.x / CHUNKS; j < KEYS; j += THREADS / CHUNKS) {
        bool valid = first + j < end;
        cp_async_16(to->chunk(j, chunk), cache_row(k_or_v, t, g, valid ? first + j : 0) + chunk * CHUNK, valid);
    }
}

/* Waits for this thread's copies, except its PENDING newest groups, makes them visible to wgmma, and waits for all
 * other threads. */
template <int PENDING> __device__ __forceinline__ void wait_for_copies()
{
    cp_async_wait<PENDING>();
    fence_proxy_async();
    __syncthreads();
}

/* Starts s = q k^T: (64 rows of the warpgroup, KEYS). */
template <class T, int D>
__device__ __forceinline__ void multiply_keys(float (&s)[KEYS / 8][4], const matrix<T, TILE_ROWS, D> &q,
                                              const matrix<T, KEYS, D> &k)
{
    int warpgroup = (int)threadIdx.x / 128;
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        int panel = 16 * i / WGMMA_ROW, first = 16 * i % WGMMA_ROW;
        wgmma_k_major(s, wgmma_descriptor(q.panel[panel] + warpgroup * 64 * WGMMA_ROW, first, 0),
                      wgmma_descriptor(k.panel[panel], first, 0), i > 0, T{});
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

template <class T, int D> __global__ void __launch_bounds__(THREADS, 1) attend(attention_task<T> t)
{
    LAZY_DYNAMIC_SHARED(unsigned char, memory);
    auto *work = reinterpret_cast<workspace<T, D> *>(aligned(memory));
    int g = blockIdx.y, chunk = blockIdx.z,
        top = (int)(gridDim.x - 1 - blockIdx.x) * TILE_ROWS; /* rows with the most keys first */
    int warp_top = top + (int)threadIdx.x / 32 * 16, bottom = min(top + TILE_ROWS, t.n * t.group) - 1;
    int row = top / t.group, last_row = bottom / t.group; /* row: the first that attends to keys from `next` on */
    lazy_key_range keys = keys_of_chunk(t, row, last_row, chunk);
    int first = next_key(t, keys.begin, &row, last_row), next = next_key(t, first + KEYS, &row, last_row);

    fetch_rows(&work->q, t, g, top);
    fetch(&work->stages[1].next_k, t.k, t, g, first, keys.end);
    cp_async_commit();
    fetch(&work->stages[0].v, t.v, t, g, first, keys.end);
    fetch(&work->stages[0].next_k, t.k, t, g, next, keys.end);
    cp_async_commit();

    float s[KEYS / 8][4] = {}, out[D / 8][4] = {}, rescale[2];
    uint32_t p[KEYS / 16][4];
    row_pair rows = rows_of_lane(t, warp_top, keys.end);

    wait_for_copies<1>();
    wgmma_fence(s);
    multiply_keys(s, work->q, work->stages[1].next_k);
    wgmma_wait<0>(s);
    online_softmax(s, rows, rescale, first, t.scale, 0.0f);
    narrow_powers<T>(p, s);

    int buffer = 0;
    for (; next < keys.end; buffer ^= 1) {
        first = next;
        next = next_key(t, first + KEYS, &row, last_row);
        wait_for_copies<0>();
        wgmma_fence(s, p, out);
        multiply_keys(s, work->q, work->stages[buffer].next_k);
        multiply_values(out, p, work->stages[buffer].v);
        /* the other stage is free: every thread waited for its products before the barrier above */
        fetch(&work->stages[buffer ^ 1].v, t.v, t, g, first, keys.end);
        fetch(&work->stages[buffer ^ 1].next_k, t.k, t, g, next, keys.end);
        cp_async_commit();
        wgmma_wait<1>(s);
        online_softmax(s, rows, rescale, first, t.scale, 0.0f);
        wgmma_wait<0>(out, p);
        rescale_outputs(out, rescale);
        narrow_powers<T>(p, s);
    }
    wait_for_copies<0>();
    wgmma_fence(p, out);
    multiply_values(out, p, work->stages[buffer].v);
    wgmma_wait<0>(out, p);
    write_rows(t, out, rows, warp_top, g, chunk);
}

template <class T, int D> cudaError_t run(const attention_task<T> &t, cudaStream_t queue)
{
    int tiles = (t.n * t.group + TILE_ROWS - 1) / TILE_ROWS;
    return lazy_launch(attend<T, D>, dim3(tiles, t.n_heads / t.group, t.chunks), dim3(THREADS),
                       sizeof(workspace<T, D>) + SLACK, queue, t);
}
} // namespace

bool lazy_cuda_wgmma_supports(int head_dim) { return head_dim == 64 || head_dim == 128; }

template <class T> cudaError_t lazy_cuda_attend_wgmma(const attention_task<T> &t, cudaStream_t queue)
{
    return t.d == 64 ? run<T, 64>(t, queue) : run<T, 128>(t, queue);
}

template cudaError_t lazy_cuda_attend_wgmma(const attention_task<__half> &, cudaStream_t);
template cudaError_t lazy_cuda_attend_wgmma(const attention_task<__nv_bfloat16> &, cudaStream_t);
