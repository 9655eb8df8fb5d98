/* attention_mma.cu — attention on tensor cores (mma.sync): 16-bit operands, f32 accumulation.
 *
 * A thread block processes a tile of rows x heads that share one key head, over one chunk of keys. A warp owns 16 rows
 * of the tile. Its scores stay in registers and, converted to 16 bits, are the left operand of the product with V.
 * cp.async copies K and V from the cache to shared memory: the next keys while the current ones are multiplied.
 *
 * A tile of many rows has one team of 4 warps, which share the keys in shared memory. A tile of 16 rows, of a decode
 * step, has several teams of one warp: each takes a part of the chunk, at its own pace, because copying takes longer
 * than multiplying, and the block merges their results in the end. */
#include <type_traits>

#include "attention_tile.h"

namespace
{
enum {
    WARP_ROWS = 16, /* rows x heads per warp */
    PAD = 8, /* elements between rows in shared memory, so that the 8 rows of an ldmatrix lie in different banks */
    BUFFERS = 2,
};

/* D: of a head; WARPS: of a team. With D = 256, the buffers of more keys would not fit into the 99 KiB that sm_86 and
 * sm_89 have. */
template <int D, int WARPS> struct shape {
    static constexpr int KEYS = WARPS == 1 ? 16 : D > 128 ? 32 : 64; /* of a team, per step of its loop over keys */
    static constexpr int TEAMS = WARPS > 1 ? 1 : D > 128 ? 2 : 4, TEAM = 32 * WARPS, THREADS = TEAM * TEAMS;
    static constexpr int ROWS = WARPS * WARP_ROWS;
};

/* How many of a warp's left operands of q stay in registers. With D = 256 the outputs need them, and each step loads q
 * again. */
__host__ __device__ constexpr int held_operands(int d) { return d > 128 ? 1 : d / 16; }

template <class T, int D, int WARPS> struct buffer {
    static constexpr int KEYS = shape<D, WARPS>::KEYS;
    T k[KEYS][D + PAD], v[KEYS][D + PAD];
    int32_t position[KEYS]; /* of those keys, before they are copied */
};

template <class T, int D, int WARPS> struct workspace {
    T q[shape<D, WARPS>::ROWS][D + PAD];
    buffer<T, D, WARPS> team[shape<D, WARPS>::TEAMS][BUFFERS];
};

template <int WARPS> __device__ __forceinline__ void wait_for_team()
{
    if constexpr (WARPS == 1) __syncwarp();
    else __syncthreads();
}

/* The position of the key of one step that this thread looks up. */
template <class T, int D, int WARPS>
__device__ __forceinline__ int32_t look_up(const attention_task<T> &t, int first, int end)
{
    int j = (int)threadIdx.x % shape<D, WARPS>::TEAM;
    return j < shape<D, WARPS>::KEYS && first + j < end ? t.in_play[first + j] : 0;
}

template <class T, int D, int WARPS>
__device__ __forceinline__ void put_position(buffer<T, D, WARPS> *to, int32_t position)
{
    int j = (int)threadIdx.x % shape<D, WARPS>::TEAM;
    if (j < to->KEYS) to->position[j] = position;
}

/* Starts copying `n` keys and values, whose positions `to` holds; those beyond are filled with zeros. */
template <class T, int D, int WARPS>
__device__ __forceinline__ void fetch(buffer<T, D, WARPS> *to, const attention_task<T> &t, int g, int n)
{
    constexpr int WIDE = 16 / sizeof(T), CHUNKS = D / WIDE, TEAM = shape<D, WARPS>::TEAM;
    const int64_t head = (int64_t)g * t.capacity * D;
#pragma unroll
    for (int i = 0; i < to->KEYS * CHUNKS; i += TEAM) {
        int j = (i + (int)threadIdx.x % TEAM) / CHUNKS, at = (i + (int)threadIdx.x % TEAM) % CHUNKS * WIDE;
        int64_t from = head + (int64_t)(j < n ? to->position[j] : 0) * D + at;
        cp_async_16(&to->k[j][at], t.k + from, j < n);
        cp_async_16(&to->v[j][at], t.v + from, j < n);
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
                                              T (*k)[D + PAD])
{
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        uint32_t(&a)[4] = held[i % held_operands(D)];
        if (held_operands(D) == 1) load_rows<T, D>(a, q, i);
#pragma unroll
        for (int j = 0; j < N / 2; j++) {
            uint32_t b[4]; /* b[0], b[1]: keys 0-7 of these 16, 16 elements each; b[2], b[3]: keys 8-15 */
            ldmatrix_x4(b, &k[16 * j + lane / 16 * 8 + lane % 8][16 * i + lane / 8 % 2 * 8]);
            mma_m16n8k16(s[2 * j], a, { b[0], b[1] }, T{});
            mma_m16n8k16(s[2 * j + 1], a, { b[2], b[3] }, T{});
        }
    }
}

/* out[i] += powers s (16 rows, 8N keys) times elements 8i … 8i+7 of the values */
template <class T, int D, int N>
__device__ __forceinline__ void multiply_values(float (&out)[D / 8][4], const float (&s)[N][4], T (*v)[D + PAD])
{
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < N / 2; j++) {
        uint32_t p[4];
        narrow_step<T>(p, s[2 * j], s[2 * j + 1]);
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            uint32_t b[4];
            ldmatrix_x4_trans(b, &v[16 * j + lane % 16][16 * i + lane / 16 * 8]);
            mma_m16n8k16(out[2 * i], p, { b[0], b[1] }, T{});
            mma_m16n8k16(out[2 * i + 1], p, { b[2], b[3] }, T{});
        }
    }
}

/* Minimum resident blocks per multiprocessor for __launch_bounds__: about as many as shared memory holds, and few
 * enough that no register is spilled. Without this bound the compiler uses slightly too many registers to reach it. */
constexpr int blocks_at_once(int d, int warps) { return warps > 1 ? (d == 64 ? 3 : 2) : d < 96 ? 4 : 3; }

template <class T, int D, int WARPS>
__global__ void __launch_bounds__(shape<D, WARPS>::THREADS, blocks_at_once(D, WARPS)) attend(attention_task<T> t)
{
    begin_kernel();
    using s = shape<D, WARPS>;
    constexpr int WIDE = 16 / sizeof(T), CHUNKS = D / WIDE;
    LAZY_DYNAMIC_SHARED(unsigned char, memory);
    auto *work = reinterpret_cast<workspace<T, D, WARPS> *>(memory);
    int g = blockIdx.y, chunk = blockIdx.z, n = t.n * t.group, team = (int)threadIdx.x / s::TEAM;
    int top = (int)(gridDim.x - 1 - blockIdx.x) * s::ROWS; /* rows with the most keys first */
    int warp_top = (int)threadIdx.x % s::TEAM / 32 * WARP_ROWS, bottom = min(top + s::ROWS, n) - 1;
    int row = top / t.group, last_row = bottom / t.group; /* row: the first that attends to keys not yet passed */
    lazy_key_range keys = keys_of_chunk(t, row, last_row, chunk * s::TEAMS + team, s::TEAMS);
    auto *buffers = work->team[team];

    for (int i = threadIdx.x; i < s::ROWS * CHUNKS; i += s::THREADS) {
        int at = top + i / CHUNKS, head = g * t.group + at % t.group;
        const T *q =
            t.q + (int64_t)(at < n ? at / t.group : 0) * t.q_stride + (at < n ? head : 0) * D + i % CHUNKS * WIDE;
        cp_async_16(&work->q[i / CHUNKS][i % CHUNKS * WIDE], q, at < n);
    }
    cp_async_commit();
    int first = next_key(t, keys.begin, &row, last_row), next = next_key(t, first + s::KEYS, &row, last_row);
    put_position(&buffers[0], look_up<T, D, WARPS>(t, first, keys.end));
    put_position(&buffers[1], look_up<T, D, WARPS>(t, next, keys.end));
    wait_for_team<WARPS>();
    fetch(&buffers[0], t, g, keys.end - first);
    cp_async_commit();

    float out[D / 8][4] = {}, rescale[2];
    uint32_t q[held_operands(D)][4];
    row_pair rows = rows_of_lane(t, top + warp_top, keys.end);
    cp_async_wait<1>();
    __syncthreads();
    if (held_operands(D) > 1) {
#pragma unroll
        for (int i = 0; i < held_operands(D); i++) load_rows<T, D>(q[i], work->q + warp_top, i);
    }
    for (int step = 0, after; first < keys.end; first = next, next = after, step++) {
        auto &current = buffers[step % BUFFERS];
        after = next_key(t, next + s::KEYS, &row, last_row);
        int32_t position = look_up<T, D, WARPS>(t, after, keys.end);
        if (next < keys.end) fetch(&buffers[(step + 1) % BUFFERS], t, g, keys.end - next);
        cp_async_commit();
        cp_async_wait<1>();
        wait_for_team<WARPS>();
        float scores[s::KEYS / 8][4] = {};
        multiply_keys<T, D>(scores, q, work->q + warp_top, current.k);
        online_softmax(scores, rows, rescale, first, t.scale, t.cap);
        rescale_outputs(out, rescale);
        multiply_values<T, D>(out, scores, current.v);
        put_position(&current, position);
        wait_for_team<WARPS>();
    }
    cp_async_wait<0>();
    if constexpr (s::TEAMS == 1) {
        write_rows(t, out, rows, top + warp_top, g, chunk);
    } else {
        typedef float partials[s::TEAMS][D + 2];
        static_assert(s::ROWS * sizeof(partials) <= sizeof work->team);
        auto *of_row = reinterpret_cast<partials *>(work->team);
        __syncthreads(); /* every team has read its keys */
        write_partials(out, rows, t.scale, [&](int i) { return of_row[i][team]; });
        __syncthreads();
        int begin = top + team * (s::ROWS / s::TEAMS), end = min(begin + s::ROWS / s::TEAMS, n);
        for (int at = begin; at < end; at++) {
            merged_row<D> merged = merge<D>(of_row[at - top][0], s::TEAMS, D);
            if (t.chunks == 1) write_row(t, g, at, merged);
            else write_partial(t, g, at, chunk, merged);
        }
        if (t.chunks > 1 && begin < end) merge_if_last<D>(t, g, begin, end);
    }
}

constexpr int warps_for(int rows) { return rows <= WARP_ROWS ? 1 : 4; }

template <class T, int D, int WARPS> cudaError_t run(const attention_task<T> &t, cudaStream_t queue)
{
    using s = shape<D, WARPS>;
    return lazy_launch(attend<T, D, WARPS>, dim3(lazy_blocks(t.n * t.group, s::ROWS), t.n_heads / t.group, t.chunks),
                       dim3(s::THREADS), sizeof(workspace<T, D, WARPS>), queue, t);
}

/* Calls use(D, warps of a team), both as types, for that head_dim and that many rows x heads of a key head. */
template <class F> auto with_shape(int head_dim, int rows, F use)
{
    auto with = [&](auto d) {
        return warps_for(rows) == 1 ? use(d, std::integral_constant<int, 1>())
                                    : use(d, std::integral_constant<int, 4>());
    };
    switch (head_dim) {
    case 64: return with(std::integral_constant<int, 64>());
    case 80: return with(std::integral_constant<int, 80>());
    case 96: return with(std::integral_constant<int, 96>());
    case 128: return with(std::integral_constant<int, 128>());
    default: return with(std::integral_constant<int, 256>());
    }
}
} // namespace

bool lazy_cuda_mma_supports(int head_dim)
{
    return head_dim == 64 || head_dim == 80 || head_dim == 96 || head_dim == 128 || head_dim == 256;
}

lazy_tiling lazy_cuda_mma_tiling(int head_dim, int rows)
{
    return with_shape(head_dim, rows, [](auto d, auto warps) -> lazy_tiling {
        return { shape<d, warps>::ROWS, sizeof(workspace<__half, d, warps>), blocks_at_once(d, warps) };
    });
}

template <class T> cudaError_t lazy_cuda_attend_mma(const attention_task<T> &t, cudaStream_t queue)
{
    return with_shape(t.d, t.n * t.group, [&](auto d, auto warps) { return run<T, d, warps>(t, queue); });
}

template cudaError_t lazy_cuda_attend_mma(const attention_task<__half> &, cudaStream_t);
template cudaError_t lazy_cuda_attend_mma(const attention_task<__nv_bfloat16> &, cudaStream_t);
