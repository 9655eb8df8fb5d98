/* scores.cu — the attention of the query rows to each token in play, in three launches: sum_chunks multiplies q and K
 * and sums the powers of each row and head by chunks of keys; merge_chunks adds the chunks; pool_rows multiplies again,
 * or for a single query row reads the products that sum_chunks has stored, normalises, and pools heads and rows.
 *
 * The query rows are those of the last `queries` rows whose tokens are new. Only the device knows the rows' positions,
 * so grids are for all of the last `queries` rows.
 *
 * A warp multiplies a tile of 32 rows of one head with 32 keys. A lane loads 16 bytes of a row or key at a time, from
 * global memory to registers: each key of a tile is needed by one warp alone. */
#include <algorithm>

#include "ranges.h"

namespace
{
enum {
    WARPS = 8,
    THREADS = 32 * WARPS,
    ROWS = 32, /* of a tile */
    KEYS = 32,
    KEY_UNIT = 2 * KEYS, /* lengths of chunks are multiples of this */
    SPLIT_ROWS = 64,     /* of more rows the chunks are longer, so that there are not more results */
    PAD = 8              /* between rows in shared memory, so that the rows of a store lie in different banks */
};

template <class T> struct scoring {
    float *scores;                                /* (m,) */
    lazy_softmax *softmaxes;                      /* (query rows, H, chunks); merge_chunks changes the first chunk's */
    float *products;                              /* (H, m) of a single query row, scaled and capped */
    const T *qkv, *k;                             /* (n, width), (G, capacity, D) */
    const int32_t *rows, *in_play;                /* (n,), (m,) positions */
    const lazy_key_range *ranges;                 /* (n,) what each row attends to; both ends ascend with the rows */
    int n, m, n_heads, group, d, width, capacity; /* group: H / G */
    int first, first_asking;                      /* rows r >= first with rows[r] >= first_asking are query rows */
    int chunks, length;                           /* length: in keys */
    float scale, cap;
    lazy_pooling pooling;
};

/* s[u][j][e] of a lane is of row 16u + 8 (e / 2) + lane / 4 and key 8j + 2 (lane % 4) + e % 2, as mma_m16n8k16 has it.
 * Of the lane's four rows, row i is 8i + lane / 4. */
typedef float tile[ROWS / 16][KEYS / 8][4];

/* Calls f(i, key of the tile, element of each of the tiles) for the lane's elements. */
template <class F, class... Tiles> __device__ __forceinline__ void for_each(F f, Tiles &...s)
{
#pragma unroll
    for (int u = 0; u < ROWS / 16; u++)
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) f(2 * u + e / 2, 8 * j + (int)threadIdx.x % 4 * 2 + e % 2, s[u][j][e]...);
}

/* The first query row; rows ascend, so that all later ones are query rows too. */
template <class T> __device__ __forceinline__ int first_query(const scoring<T> &t)
{
    int low = t.first, high = t.n - 1; /* the last row is a new token always */
    while (low < high) {
        int middle = (low + high) / 2;
        if (t.rows[middle] < t.first_asking) low = middle + 1;
        else high = middle;
    }
    return low;
}

template <class T> __device__ __forceinline__ lazy_softmax *softmaxes_of(const scoring<T> &t, int query, int head)
{
    return t.softmaxes + ((int64_t)query * t.n_heads + head) * t.chunks;
}

/* The keys that a row attends to; none beyond the last row. */
template <class T> __device__ __forceinline__ lazy_key_range seen_by(const scoring<T> &t, int row)
{
    return row < t.n ? t.ranges[row] : lazy_key_range{ 0, 0 };
}

__device__ __forceinline__ bool contains(lazy_key_range range, int key)
{
    return key >= range.begin && key < range.end;
}

/* True if a row of the tile attends to one of its keys. */
template <class T> __device__ __forceinline__ bool is_seen(const scoring<T> &t, int first_row, int first_key)
{
    return t.ranges[first_row].begin < first_key + KEYS && t.ranges[min(first_row + ROWS, t.n) - 1].end > first_key;
}

constexpr lazy_softmax EMPTY = { -INFINITY, 0.0f };

/* What powers are relative to. A maximum of -Inf may be that of no products, or of NaNs, which the sum shows. */
__device__ __forceinline__ float base_of(float max) { return max == -INFINITY ? 0.0f : max; }

__device__ __forceinline__ lazy_softmax joined(lazy_softmax a, lazy_softmax b)
{
    float max = fmaxf(a.max, b.max), base = base_of(max);
    return { max, a.sum * exp2f(a.max - base) + b.sum * exp2f(b.max - base) };
}

/* Joins the softmaxes of groups of `lanes` lanes; only the first lane's result is used. */
__device__ __forceinline__ lazy_softmax joined_lanes(lazy_softmax a, int lanes)
{
    for (int step = lanes / 2; step; step /= 2)
        a = joined(a, { __shfl_xor_sync(~0u, a.max, step), __shfl_xor_sync(~0u, a.sum, step) });
    return a;
}

/* 16 bytes of a row of q or K, from element `at` on; 0 beyond its end. */
template <class T> __device__ __forceinline__ lazy_pack<T> part_of(const T *row, int at, int d, bool aligned)
{
    lazy_pack<T> part = {};
    if (aligned && at < d) part = *reinterpret_cast<const lazy_pack<T> *>(row + at);
#pragma unroll
    for (int e = 0; e < (int)(16 / sizeof(T)) && !aligned; e++)
        if (at + e < d) part.value[e] = row[at + e];
    return part;
}

/* s += q k^T over one part. k: the lane's keys; k[2j + e] is 8j + 2 (lane % 4) + e. */
__device__ __forceinline__ void add_products(tile &s, const lazy_pack<float> (&q)[ROWS / 8],
                                             const lazy_pack<float> (&k)[KEYS / 4])
{
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int u = 0; u < ROWS / 16; u++)
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) s[u][j][e] += q[2 * u + e / 2].value[i] * k[2 * j + e % 2].value[i];
}

/* The same over the parts of four lanes, 32 elements. k[j]: key 8j + lane / 4. Each operand has two of a lane's four
 * pairs of elements: sums may be in any order of the elements, if it is the same on both sides. */
template <class T>
__device__ __forceinline__ void add_products(tile &s, const lazy_pack<T> (&q)[ROWS / 8],
                                             const lazy_pack<T> (&k)[KEYS / 8])
{
    auto pair = [](const lazy_pack<T> &part, int i) { return reinterpret_cast<const uint32_t *>(part.value)[i]; };
#pragma unroll
    for (int i = 0; i < 4; i += 2)
#pragma unroll
        for (int u = 0; u < ROWS / 16; u++)
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++)
                mma_m16n8k16(
                    s[u][j],
                    { pair(q[2 * u], i), pair(q[2 * u + 1], i), pair(q[2 * u], i + 1), pair(q[2 * u + 1], i + 1) },
                    { pair(k[j], i), pair(k[j], i + 1) }, T{});
}

/* s = the scaled and capped products of a tile, whose elements are 0 before; rows and keys beyond the last are the last
 * again. */
template <class T>
__device__ __forceinline__ void multiply(tile &s, const scoring<T> &t, int head, int first_row, int first_key)
{
    constexpr bool ON_TENSOR_CORES = sizeof(T) == 2;
    constexpr int WIDE = 16 / sizeof(T), PARTS = ON_TENSOR_CORES ? 4 : 1 /* of a row that its lanes load at a time */,
                  OWN_KEYS = KEYS / (ON_TENSOR_CORES ? 8 : 4);
    int lane = threadIdx.x % 32;
    const T *q[ROWS / 8], *k[OWN_KEYS];
#pragma unroll
    for (int i = 0; i < ROWS / 8; i++)
        q[i] = t.qkv + (int64_t)min(first_row + 8 * i + lane / 4, t.n - 1) * t.width + head * t.d;
#pragma unroll
    for (int i = 0; i < OWN_KEYS; i++) {
        int key = first_key + (ON_TENSOR_CORES ? 8 * i + lane / 4 : 8 * (i / 2) + lane % 4 * 2 + i % 2);
        k[i] = t.k + ((int64_t)(head / t.group) * t.capacity + t.in_play[min(key, t.m - 1)]) * t.d;
    }
    auto add = [&](int first, bool aligned) {
        int at = first + lane % PARTS * WIDE;
        lazy_pack<T> q_parts[ROWS / 8], k_parts[OWN_KEYS];
#pragma unroll
        for (int i = 0; i < OWN_KEYS; i++) k_parts[i] = part_of(k[i], at, t.d, aligned);
#pragma unroll
        for (int i = 0; i < ROWS / 8; i++) q_parts[i] = part_of(q[i], at, t.d, aligned);
        add_products(s, q_parts, k_parts);
    };
    if (t.d % WIDE == 0) {
#pragma unroll 2
        for (int first = 0; first < t.d; first += PARTS * WIDE) add(first, true);
    } else {
#pragma unroll 1
        for (int first = 0; first < t.d; first += PARTS * WIDE) add(first, false);
    }
    for_each([&](int, int, float &x) { x *= t.scale; }, s);
    if (t.cap != 0.0f) for_each([&](int, int, float &x) { x = lazy_capped(x, t.cap); }, s);
}

/* A warp computes all rows of one head over one chunk. Grid: (chunks, blocks of heads). */
template <class T> __global__ void __launch_bounds__(THREADS) sum_chunks(scoring<T> t)
{
    int head = blockIdx.y * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32, begin = first_query(t),
        first_key = blockIdx.x * t.length, end_key = min(first_key + t.length, t.m);
    if (head >= t.n_heads) return;
    for (int first = begin; first < t.n; first += ROWS) {
        lazy_key_range seen[ROWS / 8];
        lazy_softmax so_far[ROWS / 8] = { EMPTY, EMPTY, EMPTY, EMPTY }; /* of the lane's own elements */
        for (int i = 0; i < ROWS / 8; i++) seen[i] = seen_by(t, first + 8 * i + lane / 4);
        for (int key = first_key; key < end_key; key += KEYS) {
            if (!is_seen(t, first, key)) continue;
            tile s = {};
            lazy_softmax of_tile[ROWS / 8] = { EMPTY, EMPTY, EMPTY, EMPTY };
            multiply(s, t, head, first, key);
            for_each(
                [&](int i, int j, float x) { /* fmaxf ignores NaN; the sum keeps it */
                                             of_tile[i].max =
                                                 fmaxf(of_tile[i].max, contains(seen[i], key + j) ? x : -INFINITY);
                },
                s);
            for_each(
                [&](int i, int j, float x) {
                    of_tile[i].sum += contains(seen[i], key + j) ? exp2f(x - base_of(of_tile[i].max)) : 0.0f;
                },
                s);
            if (t.n - begin == 1)
                for_each(
                    [&](int i, int j, float x) {
                        if (contains(seen[i], key + j)) t.products[(int64_t)head * t.m + key + j] = x;
                    },
                    s);
            for (int i = 0; i < ROWS / 8; i++) so_far[i] = joined(so_far[i], of_tile[i]);
        }
        for (int i = 0; i < ROWS / 8; i++) {
            int row = first + 8 * i + lane / 4;
            lazy_softmax of_row = joined_lanes(so_far[i], 4);
            if (lane % 4 == 0 && row < t.n) softmaxes_of(t, row - begin, head)[blockIdx.x] = of_row;
        }
    }
}

/* Replaces the first chunk's softmax by that of all keys, its maximum by the base and its sum by the inverse. A warp
 * joins one row and head. */
template <class T> __global__ void __launch_bounds__(THREADS) merge_chunks(scoring<T> t)
{
    int at = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (at >= (t.n - first_query(t)) * t.n_heads) return;
    lazy_softmax *chunks = softmaxes_of(t, 0, at), all = EMPTY;
    for (int c = lane; c < t.chunks; c += 32) all = joined(all, chunks[c]);
    all = joined_lanes(all, 32);
    if (lane == 0) chunks[0] = { base_of(all.max), 1.0f / all.sum };
}

/* A block pools the tile of all heads and rows for 32 keys; each of its warps adds a share of the heads, in ascending
 * order. */
template <class T> __global__ void __launch_bounds__(THREADS) pool_rows(scoring<T> t)
{
    __shared__ float sums[WARPS][ROWS][KEYS + PAD]; /* over the warp's heads */
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, begin = first_query(t), first_key = blockIdx.x * KEYS,
        heads = (t.n_heads + WARPS - 1) / WARPS, end_head = min((warp + 1) * heads, t.n_heads);
    bool largest = t.pooling == LAZY_POOLING_MAX;
    float pooled = 0.0f; /* of key `lane` over rows warp, warp + WARPS … of each tile, at the end over all */
    for (int first = begin; first < t.n; first += ROWS) {
        lazy_key_range seen[ROWS / 8];
        tile sum = {};
        for (int i = 0; i < ROWS / 8; i++) seen[i] = seen_by(t, first + 8 * i + lane / 4);
        for (int head = warp * heads; head < end_head && is_seen(t, first, first_key); head++) {
            tile p = {};
            lazy_softmax of_row[ROWS / 8];
            for (int i = 0; i < ROWS / 8; i++)
                of_row[i] = *softmaxes_of(t, min(first + 8 * i + lane / 4, t.n - 1) - begin, head);
            if (t.n - begin > 1) multiply(p, t, head, first, first_key);
            else
                for_each(
                    [&](int i, int j, float &x) {
                        if (contains(seen[i], first_key + j)) x = t.products[(int64_t)head * t.m + first_key + j];
                    },
                    p);
            for_each(
                [&](int i, int j, float &total, float x) {
                    total += contains(seen[i], first_key + j) ? exp2f(x - of_row[i].max) * of_row[i].sum : 0.0f;
                },
                sum, p);
        }
        for_each([&](int i, int j, float x) { sums[warp][8 * i + lane / 4][j] = x; }, sum);
        __syncthreads();
        for (int row = warp; row < ROWS; row += WARPS) {
            double total = 0.0;
            for (int w = 0; w < WARPS; w++) total += sums[w][row][lane];
            float mean = (float)(total / t.n_heads);
            pooled = largest ? lazy_larger(pooled, mean) : pooled + mean;
        }
        __syncthreads();
    }
    sums[warp][0][lane] = pooled;
    __syncthreads();
    if (warp || first_key + lane >= t.m) return;
    for (int w = 1; w < WARPS; w++)
        pooled = largest ? lazy_larger(pooled, sums[w][0][lane]) : pooled + sums[w][0][lane];
    t.scores[first_key + lane] = largest ? pooled : pooled / (float)(t.n - begin);
}

int blocks(int n, int size) { return (n + size - 1) / size; }

/* The length of chunks that are at most as many for each row as their scratch has room for. */
int length_of(int rows, int m)
{
    int64_t units = blocks(m, KEY_UNIT), most = std::max<int64_t>(std::min(units, SPLIT_ROWS * units / rows), 1);
    return blocks((int)units, (int)most) * KEY_UNIT;
}
} // namespace

size_t lazy_cuda_max_softmaxes(const lazy_config *config, int n_rows, int n_tokens)
{
    size_t rows = (size_t)n_rows, split = std::min<size_t>(rows, SPLIT_ROWS);
    return (size_t)config->n_heads * std::max(rows, split * (((size_t)n_tokens + KEY_UNIT - 1) / KEY_UNIT));
}

int lazy_cuda_scores(lazy_stream *stream, float *scores, const lazy_attending *a, int queries, lazy_pooling pooling,
                     int first_asking, lazy_error *err)
{
    const lazy_config *c = stream->config;
    lazy_cuda_stream *s = lazy_cuda_scratch(stream);
    int n = a->n, m = a->m, heads = c->n_heads, rows = std::min(queries, n);
    const lazy_key_range *ranges;
    int code = lazy_cuda_find_ranges(stream, a, &ranges, err);
    if (code) return code;
    return lazy_cuda_typed_op(stream, "scores", err, [&](auto type, cudaStream_t queue) {
        using T = decltype(type);
        scoring<T> t = {};
        t.scores = scores;
        t.softmaxes = s->softmaxes;
        t.products = s->products;
        t.qkv = (const T *)a->qkv;
        t.k = (const T *)a->kv.k;
        t.rows = a->rows;
        t.in_play = a->in_play;
        t.ranges = ranges;
        t.n = n;
        t.m = m;
        t.n_heads = heads;
        t.group = heads / c->n_kv_heads;
        t.d = c->head_dim;
        t.width = lazy_qkv_width(c);
        t.capacity = a->kv.capacity;
        t.first = n - rows;
        t.first_asking = first_asking;
        t.length = length_of(rows, m);
        t.chunks = blocks(m, t.length);
        t.scale = lazy_cuda_scale(c);
        t.cap = lazy_cuda_cap(c);
        t.pooling = pooling;
        cudaError_t failed =
            lazy_launch(sum_chunks<T>, dim3(t.chunks, blocks(heads, WARPS)), dim3(THREADS), 0, queue, t);
        if (failed == cudaSuccess)
            failed = lazy_launch(merge_chunks<T>, dim3(blocks(rows * heads, WARPS)), dim3(THREADS), 0, queue, t);
        if (failed == cudaSuccess)
            failed = lazy_launch(pool_rows<T>, dim3(blocks(m, KEYS)), dim3(THREADS), 0, queue, t);
        return failed;
    });
}
