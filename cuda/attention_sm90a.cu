/* attention_sm90a.cu — attention by the warpgroup products of Hopper, in 16 bits with f32 sums; for sm_90a and no other.
 *
 * A block takes a tile of rows x heads that share one key head through a chunk of keys, 128 at a time; a warpgroup has 64 rows of the
 * tile. K and V come by cp.async from where they lie. The products with a block's values run while its successor's scores become
 * powers: so values go together with the keys of the block after. */
#include "attention_tile.h"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "compile this file for sm_90a alone"
#endif

namespace
{
enum {
    KEYS = 128, /* of a block */
    WARPGROUPS = 2,
    THREADS = 128 * WARPGROUPS,
    TILE_ROWS = 64 * WARPGROUPS,
    PIECE = 8, /* values that one cp.async takes */
};

/* As wgmma takes them: the first 64 values of each row, then the next 64. */
template <class T, int ROWS, int D> struct matrix {
    T panel[D / WGMMA_ROW][ROWS * WGMMA_ROW];

    static constexpr int PANEL = ROWS * WGMMA_ROW;
    __device__ __forceinline__ T *place(int row, int piece) { return panel[piece / 8] + wgmma_place(row, piece % 8); }
};

template <class T, int D> struct stage {
    matrix<T, KEYS, D> v, next_k; /* of one block, and of the next one */
};

template <class T, int D> struct workspace {
    matrix<T, TILE_ROWS, D> q;
    stage<T, D> stages[2];
};

/* Begins to fetch the tile's rows; what lies behind the last one becomes zero. */
template <class T, int D>
__device__ __forceinline__ void fetch_rows(matrix<T, TILE_ROWS, D> *to, const attention_task<T> &t, int g, int top)
{
    constexpr int PIECES = D / PIECE;
    for (int i = threadIdx.x; i < TILE_ROWS * PIECES; i += THREADS) {
        int at = top + i / PIECES, piece = i % PIECES;
        bool valid = at < t.n * t.group;
        int row = valid ? at / t.group : 0, head = valid ? g * t.group + at % t.group : 0;
        cp_async_16(to->place(i / PIECES, piece), t.qkv + (int64_t)row * t.width + head * D + piece * PIECE, valid);
    }
}

/* Begins to fetch keys first … first+KEYS-1 of `end`; what lies behind becomes zero. */
template <class T, int D>
__device__ __forceinline__ void fetch(matrix<T, KEYS, D> *to, const T *k_or_v, const attention_task<T> &t, int g, int first, int end)
{
    constexpr int PIECES = D / PIECE;
    int piece = (int)threadIdx.x % PIECES;
#pragma unroll
    for (int j = (int)threadIdx.x / PIECES; j < KEYS; j += THREADS / PIECES) {
        bool valid = first + j < end;
        cp_async_16(to->place(j, piece), cache_row(k_or_v, t, g, valid ? first + j : 0) + piece * PIECE, valid);
    }
}

/* This thread's older copies have landed, and after the barrier all threads'. */
template <int UNDER_WAY> __device__ __forceinline__ void wait_for_copies()
{
    cp_async_wait<UNDER_WAY>();
    fence_for_wgmma();
    __syncthreads();
}

/* Begins s = rows by keys. */
template <class T, int D>
__device__ __forceinline__ void multiply_keys(float (&s)[KEYS / 8][4], const matrix<T, TILE_ROWS, D> &q, const matrix<T, KEYS, D> &k)
{
    int warpgroup = (int)threadIdx.x / 128;
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        int panel = 16 * i / WGMMA_ROW, first = 16 * i % WGMMA_ROW;
        wgmma_by_columns(s, wgmma_matrix(q.panel[panel] + warpgroup * 64 * WGMMA_ROW, first, 0), wgmma_matrix(k.panel[panel], first, 0),
                         i > 0, T{});
    }
    wgmma_commit();
}

/* Begins out += shares by values. */
template <class T, int D>
__device__ __forceinline__ void multiply_values(float (&out)[D / 8][4], const uint32_t (&shares)[KEYS / 16][4], const matrix<T, KEYS, D> &v)
{
#pragma unroll
    for (int j = 0; j < KEYS / 16; j++) wgmma_by_rows(out, shares[j], wgmma_matrix(v.panel[0] + 16 * j * WGMMA_ROW, 0, v.PANEL), T{});
    wgmma_commit();
}

template <class T> __device__ __forceinline__ void narrow_all(uint32_t (&shares)[KEYS / 16][4], const float (&s)[KEYS / 8][4])
{
#pragma unroll
    for (int j = 0; j < KEYS / 16; j++) narrow_shares<T>(shares[j], s[2 * j], s[2 * j + 1]);
}

/* The dynamic shared memory from the first multiple of an atom's size on. */
__device__ __forceinline__ unsigned char *aligned(unsigned char *memory)
{
    constexpr uint32_t ATOM_BYTES = 2 * WGMMA_ATOM;
    return memory + (ATOM_BYTES - shared_address(memory) % ATOM_BYTES) % ATOM_BYTES;
}
enum { SLACK = 2 * WGMMA_ATOM - 16 /* that it may skip */ };

template <class T, int D> __global__ void __launch_bounds__(THREADS, 1) attend(attention_task<T> t)
{
    LAZY_DYNAMIC_SHARED(unsigned char, memory);
    auto *work = reinterpret_cast<workspace<T, D> *>(aligned(memory));
    int g = blockIdx.y, chunk = blockIdx.z, top = (int)(gridDim.x - 1 - blockIdx.x) * TILE_ROWS; /* long rows first */
    int warp_top = top + (int)threadIdx.x / 32 * 16, bottom = min(top + TILE_ROWS, t.n * t.group) - 1;
    int begin = chunk * t.chunk, end = min(begin + t.chunk, t.limits[bottom / t.group]);
    int seen_by_all = min(end, t.limits[top / t.group]);

    fetch_rows(&work->q, t, g, top);
    fetch(&work->stages[1].next_k, t.k, t, g, begin, end);
    cp_async_commit();
    fetch(&work->stages[0].v, t.v, t, g, begin, end);
    fetch(&work->stages[0].next_k, t.k, t, g, begin + KEYS, end);
    cp_async_commit();

    float s[KEYS / 8][4] = {}, out[D / 8][4] = {}, shrink[2];
    uint32_t shares[KEYS / 16][4];
    row_pair rows = rows_of_lane(t, warp_top);

    wait_for_copies<1>();
    wgmma_fence(s);
    multiply_keys(s, work->q, work->stages[1].next_k);
    wgmma_wait<0>(s);
    soften(s, rows, shrink, begin, t.scale, begin + KEYS <= seen_by_all);
    narrow_all<T>(shares, s);

    int turn = 0;
    for (int first = begin + KEYS; first < end; first += KEYS, turn ^= 1) {
        wait_for_copies<0>();
        wgmma_fence(s, shares, out);
        multiply_keys(s, work->q, work->stages[turn].next_k);
        multiply_values(out, shares, work->stages[turn].v);
        /* nothing reads the other stage any more: all have waited for their products with it */
        fetch(&work->stages[turn ^ 1].v, t.v, t, g, first, end);
        fetch(&work->stages[turn ^ 1].next_k, t.k, t, g, first + KEYS, end);
        cp_async_commit();
        wgmma_wait<1>(s);
        soften(s, rows, shrink, first, t.scale, first + KEYS <= seen_by_all);
        wgmma_wait<0>(out, shares);
        shrink_outputs(out, shrink);
        narrow_all<T>(shares, s);
    }
    wait_for_copies<0>();
    wgmma_fence(shares, out);
    multiply_values(out, shares, work->stages[turn].v);
    wgmma_wait<0>(out, shares);
    write_rows(t, out, rows, warp_top, g, chunk);
}

template <class T, int D> cudaError_t run(const attention_task<T> &t, const lazy_queue &queue)
{
    int tiles = (t.n * t.group + TILE_ROWS - 1) / TILE_ROWS;
    return lazy_launch(attend<T, D>, dim3(tiles, t.n_heads / t.group, t.chunks), dim3(THREADS), sizeof(workspace<T, D>) + SLACK, queue, t);
}
} // namespace

bool lazy_cuda_wgmma_takes(int head_dim) { return head_dim == 64 || head_dim == 128; }

template <class T> cudaError_t lazy_cuda_attend_by_wgmma(const attention_task<T> &t, const lazy_queue &queue)
{
    return t.d == 64 ? run<T, 64>(t, queue) : run<T, 128>(t, queue);
}

template cudaError_t lazy_cuda_attend_by_wgmma(const attention_task<__half> &, const lazy_queue &);
template cudaError_t lazy_cuda_attend_by_wgmma(const attention_task<__nv_bfloat16> &, const lazy_queue &);
