/* attention_mma.cu — attention on tensor cores (mma.sync): 16-bit operands, f32 accumulation.
 *
 * A thread block processes a tile of rows x heads that share one key head, over one chunk of keys, 64 keys at a time.
 * cp.async copies K and V from the cache to shared memory; the next 64 keys are copied while the current ones are
 * multiplied (32, if head_dim is 256). A warp owns 16 rows of the tile. Its scores stay in registers and, converted to
 * 16 bits, are the left operand of the product with V. */
#include "attention_tile.h"

namespace
{
enum {
    WARP_ROWS = 16, /* rows x heads per warp */
    PAD = 8, /* elements between rows in shared memory, so that the 8 rows of an ldmatrix lie in different banks */
    BUFFERS = 2,
};

/* Per step of the loop over keys. With D = 256, the buffers of 64 keys would not fit into the 99 KiB that sm_86 and
 * sm_89 have. */
__host__ __device__ constexpr int keys_per_step(int d) { return d > 128 ? 32 : 64; }

/* How many of a warp's left operands of q stay in registers. With D = 256 the outputs need them, and each step loads q
 * again. */
__host__ __device__ constexpr int held_operands(int d) { return d > 128 ? 1 : d / 16; }

template <class T, int D> struct tile { /* of K or V, in shared memory */
    T row[keys_per_step(D)][D + PAD];
};

template <class T, int D, int WARPS> struct workspace {
    T q[WARPS * WARP_ROWS][D + PAD];
    tile<T, D> k[BUFFERS], v[BUFFERS];
};

/* Starts copying the keys or values of one step, from index `first` of in_play on; those at `end` and beyond are filled
 * with zeros. */
template <class T, int D, int THREADS>
__device__ __forceinline__ void fetch(tile<T, D> *to, const T *k_or_v, const attention_task<T> &t, int g, int first,
                                      int end)
{
    constexpr int WIDE = 16 / sizeof(T), CHUNKS = D / WIDE;
    for (int i = threadIdx.x; i < keys_per_step(D) * CHUNKS; i += THREADS) {
        int j = i / CHUNKS, at = i % CHUNKS * WIDE;
        bool valid = first + j < end;
        cp_async_16(&to->row[j][at], cache_row(k_or_v, t, g, valid ? first + j : first) + at, valid);
    }
}

/* Loads elements 16i … 16i+15 of the warp's rows of q as a left operand; q: the first of the 16 rows. */
template <class T, int D> __device__ __forceinline__ void load_rows(uint32_t (&to)[4], T (*q)[D + PAD], int i)
{
    int lane = threadIdx.x % 32;
    ldmatrix_x4(to, &q[lane % 16][16 * i + lane / 16 * 8]);
}

/* s[j] += 16 rows of q times keys 8j … 8j+7; layout of s as in attention_tile.h. held: q's operands, or one register
 * set to load them to. */
template <class T, int D, int N>
__device__ __forceinline__ void multiply_keys(float (&s)[N][4], uint32_t (&held)[held_operands(D)][4], T (*q)[D + PAD],
                                              const tile<T, D> &k)
{
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        uint32_t(&a)[4] = held[i % held_operands(D)];
        if (held_operands(D) == 1) load_rows<T, D>(a, q, i);
#pragma unroll
        for (int j = 0; j < N / 2; j++) {
            uint32_t b[4]; /* b[0], b[1]: keys 0-7 of these 16, 16 elements each; b[2], b[3]: keys 8-15 */
            ldmatrix_x4(b, &k.row[16 * j + lane / 16 * 8 + lane % 8][16 * i + lane / 8 % 2 * 8]);
            mma_m16n8k16(s[2 * j], a, { b[0], b[1] }, T{});
            mma_m16n8k16(s[2 * j + 1], a, { b[2], b[3] }, T{});
        }
    }
}

/* out[i] += powers s (16 rows, 8N keys) times elements 8i … 8i+7 of the values */
template <class T, int D, int N>
__device__ __forceinline__ void multiply_values(float (&out)[D / 8][4], const float (&s)[N][4], const tile<T, D> &v)
{
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < N / 2; j++) {
        uint32_t p[4];
        narrow_step<T>(p, s[2 * j], s[2 * j + 1]);
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            uint32_t b[4];
            ldmatrix_x4_trans(b, &v.row[16 * j + lane % 16][16 * i + lane / 16 * 8]);
            mma_m16n8k16(out[2 * i], p, { b[0], b[1] }, T{});
            mma_m16n8k16(out[2 * i + 1], p, { b[2], b[3] }, T{});
        }
    }
}

/* Minimum resident blocks per multiprocessor for __launch_bounds__: about as many as shared memory holds, and few
 * enough that no register is spilled. Without this bound the compiler uses slightly too many registers to reach it. */
constexpr int blocks_at_once(int d, int warps) { return warps == 1 ? 8 : d == 64 ? 3 : 2; }

template <class T, int D, int WARPS>
__global__ void __launch_bounds__(32 * WARPS, blocks_at_once(D, WARPS)) attend(attention_task<T> t)
{
    constexpr int THREADS = 32 * WARPS, KEYS = keys_per_step(D), TILE_ROWS = WARPS * WARP_ROWS, WIDE = 16 / sizeof(T),
                  CHUNKS = D / WIDE;
    LAZY_DYNAMIC_SHARED(unsigned char, memory);
    auto *work = reinterpret_cast<workspace<T, D, WARPS> *>(memory);
    int g = blockIdx.y, chunk = blockIdx.z, n = t.n * t.group;
    int top = (int)(gridDim.x - 1 - blockIdx.x) * TILE_ROWS; /* rows with the most keys first */
    int warp_top = (int)threadIdx.x / 32 * WARP_ROWS, bottom = min(top + TILE_ROWS, n) - 1;
    int row = top / t.group, last_row = bottom / t.group; /* row: the first that attends to keys from `first` on */
    lazy_key_range keys = keys_of_chunk(t, row, last_row, chunk);
    int first = next_key(t, keys.begin, &row, last_row);

    for (int i = threadIdx.x; i < TILE_ROWS * CHUNKS; i += THREADS) {
        int at = top + i / CHUNKS, head = g * t.group + at % t.group;
        const T *q =
            t.qkv + (int64_t)(at < n ? at / t.group : 0) * t.width + (at < n ? head : 0) * D + i % CHUNKS * WIDE;
        cp_async_16(&work->q[i / CHUNKS][i % CHUNKS * WIDE], q, at < n);
    }
    if (first < keys.end) {
        fetch<T, D, THREADS>(&work->k[0], t.k, t, g, first, keys.end);
        fetch<T, D, THREADS>(&work->v[0], t.v, t, g, first, keys.end);
    }
    cp_async_commit();

    float out[D / 8][4] = {}, rescale[2];
    uint32_t q[held_operands(D)][4];
    row_pair rows = rows_of_lane(t, top + warp_top, keys.end);
    for (int step = 0, next; first < keys.end; first = next, step++) {
        int buffer = step % BUFFERS;
        next = next_key(t, first + KEYS, &row, last_row);
        if (next < keys.end) {
            fetch<T, D, THREADS>(&work->k[buffer ^ 1], t.k, t, g, next, keys.end);
            fetch<T, D, THREADS>(&work->v[buffer ^ 1], t.v, t, g, next, keys.end);
        }
        cp_async_commit();
        cp_async_wait<1>();
        __syncthreads();
        if (held_operands(D) > 1 && step == 0) {
#pragma unroll
            for (int i = 0; i < held_operands(D); i++) load_rows<T, D>(q[i], work->q + warp_top, i);
        }
        float s[KEYS / 8][4] = {};
        multiply_keys<T, D>(s, q, work->q + warp_top, work->k[buffer]);
        online_softmax(s, rows, rescale, first, t.scale, t.cap);
        rescale_outputs(out, rescale);
        multiply_values(out, s, work->v[buffer]);
        __syncthreads();
    }
    cp_async_wait<0>();
    write_rows(t, out, rows, top + warp_top, g, chunk);
}

constexpr int warps_for(int rows) { return rows <= WARP_ROWS ? 1 : 4; }

constexpr size_t shared_bytes(int d, int warps)
{
    return 2 * (size_t)(warps * WARP_ROWS + 2 * BUFFERS * keys_per_step(d)) * (size_t)(d + PAD);
}

template <class T, int D, int WARPS> cudaError_t run(const attention_task<T> &t, cudaStream_t queue)
{
    static_assert(sizeof(workspace<T, D, WARPS>) == shared_bytes(D, WARPS));
    int n = t.n * t.group, tiles = (n + WARPS * WARP_ROWS - 1) / (WARPS * WARP_ROWS);
    return lazy_launch(attend<T, D, WARPS>, dim3(tiles, t.n_heads / t.group, t.chunks), dim3(32 * WARPS),
                       sizeof(workspace<T, D, WARPS>), queue, t);
}

template <class T, int D> cudaError_t run_with(const attention_task<T> &t, cudaStream_t queue)
{
    return warps_for(t.n * t.group) == 1 ? run<T, D, 1>(t, queue) : run<T, D, 4>(t, queue);
}
} // namespace

bool lazy_cuda_mma_supports(int head_dim)
{
    return head_dim == 64 || head_dim == 80 || head_dim == 96 || head_dim == 128 || head_dim == 256;
}

lazy_tiling lazy_cuda_mma_tiling(int head_dim, int rows)
{
    int warps = warps_for(rows);
    return { warps * WARP_ROWS, shared_bytes(head_dim, warps) };
}

template <class T> cudaError_t lazy_cuda_attend_mma(const attention_task<T> &t, cudaStream_t queue)
{
    switch (t.d) {
    case 64: return run_with<T, 64>(t, queue);
    case 80: return run_with<T, 80>(t, queue);
    case 96: return run_with<T, 96>(t, queue);
    case 128: return run_with<T, 128>(t, queue);
    default: return run_with<T, 256>(t, queue);
    }
}

template cudaError_t lazy_cuda_attend_mma(const attention_task<__half> &, cudaStream_t);
template cudaError_t lazy_cuda_attend_mma(const attention_task<__nv_bfloat16> &, cudaStream_t);
