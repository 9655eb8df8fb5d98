/* scores.cu — the attention of the query rows to each token in play, in three launches: sum_chunks multiplies q and K
 * and sums the powers of each row and head by chunks of keys; merge_chunks adds the chunks; pool_rows multiplies again,
 * or for a single query row reads the products that sum_chunks has stored, normalises, and pools heads and rows.
 *
 * The query rows are those of the last `queries` rows whose tokens are new. Only the device knows the rows' positions,
 * so grids are for all of the last `queries` rows.
 *
 * A warp multiplies a tile of 32 rows of one head with 32 keys. Its lanes load 16 bytes of a row or key at a time, from
 * global memory to registers: no other warp of the block needs these rows and keys of this head. */
#include <algorithm>

#include "values.h"

namespace
{
enum {
    ROWS = 32, /* of a tile */
    KEYS = 32,
    SUM_WARPS = 4, /* per block */
    POOL_WARPS = 8,
    MIN_LENGTH = 2 * KEYS, /* of chunks */
    PAD = 8                /* between rows in shared memory, so that the rows of a store lie in different banks */
};

constexpr lazy_softmax EMPTY = { -INFINITY, 0.0f };

struct scoring {
    float *scores;                /* (m,) */
    lazy_softmax *softmaxes;      /* (query rows, H, chunks); merge_chunks changes the first of each block */
    float *products;              /* (H, m) of a single query row, scaled and capped */
    lazy_attending a;             /* its rows r >= first with positions of at least first_asking are query rows */
    const lazy_key_range *ranges; /* (n,) what each row attends to; both ends ascend with the rows */
    int first, first_asking, chunks, length; /* length: of chunks, in keys */
    int n_heads, group, d;                   /* group: H / G */
    float scale, cap;
    lazy_pooling pooling;
    int heavy;
};

/* A lane's elements, in the layout of mma_m16n8k16: s[4u + j] is of rows 16u … 16u + 15 and keys 8j … 8j + 7. */
typedef float tile[8][4];

__device__ __forceinline__ float &at(tile &s, int e) { return s[e / 4][e % 4]; }

/* Calls f(e, i, j) for the lane's elements: e is of row 8i + lane / 4 and key j. */
template <class F> __device__ __forceinline__ void for_each(F f)
{
#pragma unroll
    for (int e = 0; e < 32; e++) f(e, e / 16 * 2 + e % 4 / 2, e / 4 % 4 * 8 + (int)threadIdx.x % 4 * 2 + e % 2);
}

/* The first query row; rows ascend, so that all later ones are query rows too: the last row is a new token always. */
__device__ __forceinline__ int first_query(const scoring &t)
{
    return t.first + lazy_first_from(t.a.rows + t.first, t.a.n - 1 - t.first, t.first_asking);
}

__device__ __forceinline__ lazy_softmax *softmaxes_of(const scoring &t, int query, int head)
{
    return t.softmaxes + ((int64_t)query * t.n_heads + head) * t.chunks;
}

/* Chunks whose keys share one softmax. */
__device__ __forceinline__ int chunks_per_block(const scoring &t, int head)
{
    return head == t.heavy ? LAZY_LEVEL_BLOCK / t.length : t.chunks;
}

__device__ __forceinline__ bool contains(lazy_key_range range, int key)
{
    return key >= range.begin && key < range.end;
}

/* The keys that each of the lane's rows attends to; none beyond the last row. */
__device__ __forceinline__ void find_seen(lazy_key_range (&seen)[4], const scoring &t, int first_row)
{
    for (int i = 0; i < 4; i++) {
        int row = first_row + 8 * i + (int)threadIdx.x % 32 / 4;
        seen[i] = row < t.a.n ? t.ranges[row] : lazy_key_range{ 0, 0 };
    }
}

/* True of the keys of a levelled head that are blocks by themselves. */
__device__ __forceinline__ bool is_alone(const scoring &t, int head, int key)
{
    return head == t.heavy && key < LAZY_LEVEL_ALONE;
}

/* True if a row of the tile attends to one of its keys. */
__device__ __forceinline__ bool is_seen(const scoring &t, int first_row, int first_key)
{
    return t.ranges[first_row].begin < first_key + KEYS && t.ranges[min(first_row + ROWS, t.a.n) - 1].end > first_key;
}

/* The base of powers. A maximum of -Inf may be that of no products, or of NaNs, which the sum shows. */
__device__ __forceinline__ float base_of(float max) { return max == -INFINITY ? 0.0f : max; }

__device__ __forceinline__ lazy_softmax joined(lazy_softmax a, lazy_softmax b)
{
    float max = fmaxf(a.max, b.max), base = base_of(max);
    return { max, a.sum * exp2f(a.max - base) + b.sum * exp2f(b.max - base) };
}

/* Joins those of `lanes` lanes; only the result of the first is used. */
__device__ __forceinline__ lazy_softmax joined_lanes(lazy_softmax a, int lanes)
{
    for (int step = lanes / 2; step; step /= 2)
        a = joined(a, { __shfl_xor_sync(~0u, a.max, step), __shfl_xor_sync(~0u, a.sum, step) });
    return a;
}

/* 16 bytes of a row of q or K, from element `first` on; 0 beyond its end. */
template <class T> __device__ __forceinline__ lazy_pack<T> part_of(const T *row, int first, int d, bool aligned)
{
    lazy_pack<T> part = {};
    if (aligned && first < d) part = *reinterpret_cast<const lazy_pack<T> *>(row + first);
#pragma unroll
    for (int e = 0; e < (int)(16 / sizeof(T)) && !aligned; e++)
        if (first + e < d) part.value[e] = row[first + e];
    return part;
}

/* s += q k^T over one part. k: the lane's keys; k[2j + e] is 8j + 2 (lane % 4) + e. */
__device__ __forceinline__ void add_products(tile &s, const lazy_pack<float> (&q)[4], const lazy_pack<float> (&k)[8])
{
#pragma unroll
    for (int part = 0; part < 4; part++)
        for_each([&](int e, int i, int) { at(s, e) += q[i].value[part] * k[e / 4 % 4 * 2 + e % 2].value[part]; });
}

/* The same over the parts of four lanes, 32 elements. k[j]: key 8j + lane / 4. An operand has two of each lane's four
 * pairs of elements: the order of the elements in a product does not matter, if it is the same on both sides. */
template <class T>
__device__ __forceinline__ void add_products(tile &s, const lazy_pack<T> (&q)[4], const lazy_pack<T> (&k)[4])
{
    auto pair = [](const lazy_pack<T> &part, int i) { return reinterpret_cast<const uint32_t *>(part.value)[i]; };
#pragma unroll
    for (int i = 0; i < 4; i += 2)
#pragma unroll
        for (int f = 0; f < 8; f++) {
            const lazy_pack<T> &upper = q[f / 4 * 2], &lower = q[f / 4 * 2 + 1], &key = k[f % 4];
            mma_m16n8k16(s[f], { pair(upper, i), pair(lower, i), pair(upper, i + 1), pair(lower, i + 1) },
                         { pair(key, i), pair(key, i + 1) }, T{});
        }
}

/* s = the scaled and capped products of a tile, whose elements are 0 before; rows and keys beyond the last are the last
 * again. */
template <class T>
__device__ __forceinline__ void multiply(tile &s, const scoring &t, int head, int first_row, int first_key)
{
    constexpr int WIDE = 16 / sizeof(T), LANES = WIDE == 8 ? 4 : 1 /* that load different parts of a row */,
                  OWN_KEYS = WIDE == 8 ? 4 : 8;
    int lane = threadIdx.x % 32;
    const T *q[4], *k[OWN_KEYS];
#pragma unroll
    for (int i = 0; i < 4; i++)
        q[i] = (const T *)t.a.q + (int64_t)min(first_row + 8 * i + lane / 4, t.a.n - 1) * t.a.q_stride + head * t.d;
#pragma unroll
    for (int i = 0; i < OWN_KEYS; i++) {
        int key = first_key + (WIDE == 8 ? 8 * i + lane / 4 : i / 2 * 8 + lane % 4 * 2 + i % 2);
        k[i] = (const T *)t.a.kv.k +
               ((int64_t)(head / t.group) * t.a.kv.capacity + t.a.in_play[min(key, t.a.m - 1)]) * t.d;
    }
    auto add = [&](int first, bool aligned) {
        lazy_pack<T> q_parts[4], k_parts[OWN_KEYS];
#pragma unroll
        for (int i = 0; i < OWN_KEYS; i++) k_parts[i] = part_of(k[i], first + lane % LANES * WIDE, t.d, aligned);
#pragma unroll
        for (int i = 0; i < 4; i++) q_parts[i] = part_of(q[i], first + lane % LANES * WIDE, t.d, aligned);
        add_products(s, q_parts, k_parts);
    };
    if (t.d % WIDE == 0) {
#pragma unroll 2
        for (int first = 0; first < t.d; first += LANES * WIDE) add(first, true);
    } else {
#pragma unroll 1
        for (int first = 0; first < t.d; first += LANES * WIDE) add(first, false);
    }
    for_each([&](int e, int, int) { at(s, e) *= t.scale; });
    if (t.cap != 0.0f) for_each([&](int e, int, int) { at(s, e) = lazy_capped(at(s, e), t.cap); });
}

/* A warp computes all rows of one head over one chunk. Grid: (chunks, blocks of heads). */
template <class T> __global__ void __launch_bounds__(32 * SUM_WARPS) sum_chunks(scoring t)
{
    begin_kernel();
    int head = blockIdx.y * SUM_WARPS + threadIdx.x / 32, lane = threadIdx.x % 32, begin = first_query(t),
        first_key = blockIdx.x * t.length, end_key = min(first_key + t.length, t.a.m);
    if (head >= t.n_heads) return;
    for (int first = begin; first < t.a.n; first += ROWS) {
        lazy_key_range seen[4];
        lazy_softmax so_far[4] = { EMPTY, EMPTY, EMPTY, EMPTY }; /* of the lane's own elements */
        find_seen(seen, t, first);
        for (int key = first_key; key < end_key; key += KEYS) {
            if (!is_seen(t, first, key)) continue;
            tile s = {};
            lazy_softmax more[4] = { EMPTY, EMPTY, EMPTY, EMPTY };
            multiply<T>(s, t, head, first, key);
            auto counts = [&](int i, int j) { return contains(seen[i], key + j) && !is_alone(t, head, key + j); };
            /* fmaxf ignores NaN; the sum keeps it */
            for_each(
                [&](int e, int i, int j) { more[i].max = fmaxf(more[i].max, counts(i, j) ? at(s, e) : -INFINITY); });
            for_each([&](int e, int i, int j) {
                more[i].sum += counts(i, j) ? exp2f(at(s, e) - base_of(more[i].max)) : 0.0f;
            });
            for (int i = 0; i < 4; i++) so_far[i] = joined(so_far[i], more[i]);
            if (t.a.n - begin > 1) continue;
            for_each([&](int e, int i, int j) {
                if (contains(seen[i], key + j)) t.products[(int64_t)head * t.a.m + key + j] = at(s, e);
            });
        }
        for (int i = 0; i < 4; i++) {
            int row = first + 8 * i + lane / 4;
            lazy_softmax of_row = joined_lanes(so_far[i], 4);
            if (lane % 4 == 0 && row < t.a.n) softmaxes_of(t, row - begin, head)[blockIdx.x] = of_row;
        }
    }
}

/* Replaces the first chunk's softmax of each row, head and block by that of the block: its maximum by the base, and its
 * sum by the factor on powers. The keys of a head are one block, those of a levelled head several. A warp joins one row
 * and head. */
__global__ void __launch_bounds__(32 * SUM_WARPS) merge_chunks(scoring t)
{
    begin_kernel();
    int pair = blockIdx.x * SUM_WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (pair >= (t.a.n - first_query(t)) * t.n_heads) return;
    lazy_softmax *chunks = softmaxes_of(t, 0, pair);
    lazy_key_range seen = t.ranges[first_query(t) + pair / t.n_heads];
    int head = pair % t.n_heads, per_block = chunks_per_block(t, head);
    for (int first = 0; first < t.chunks; first += per_block) {
        lazy_softmax all = EMPTY;
        int end = min(first + per_block, t.chunks), begin_key = max(seen.begin, first * t.length),
            end_key = min(seen.end, end * t.length);
        if (is_alone(t, head, begin_key)) begin_key = LAZY_LEVEL_ALONE;
        for (int c = first + lane; c < end; c += 32) all = joined(all, chunks[c]);
        all = joined_lanes(all, 32);
        if (lane == 0)
            chunks[first] = { base_of(all.max),
                              (float)(end_key - begin_key) / (float)(seen.end - seen.begin) / all.sum };
    }
}

/* A block pools 32 keys over all heads and rows; each of its warps adds a part of the heads, in ascending order. */
template <class T> __global__ void __launch_bounds__(32 * POOL_WARPS) pool_rows(scoring t)
{
    begin_kernel();
    __shared__ float sums[POOL_WARPS][ROWS][KEYS + PAD]; /* over the warp's heads */
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, begin = first_query(t), first_key = blockIdx.x * KEYS,
        heads = lazy_blocks(t.n_heads, POOL_WARPS), end_head = min((warp + 1) * heads, t.n_heads);
    bool rms = t.pooling == LAZY_POOLING_RMS;
    auto pool = [&](float a, float b) { return rms ? lazy_larger(a, b) : a + b; };
    float pooled = 0.0f; /* of key `lane` over rows warp, warp + POOL_WARPS … of each tile, then over all */
    for (int first = begin; first < t.a.n; first += ROWS) {
        lazy_key_range seen[4];
        tile sum = {};
        find_seen(seen, t, first);
        for (int head = warp * heads; head < end_head && is_seen(t, first, first_key); head++) {
            tile p = {};
            float weight = head == t.heavy ? LAZY_HEAD_WEIGHT : 1.0f;
            int per_block = chunks_per_block(t, head), chunk = first_key / t.length / per_block * per_block;
            lazy_softmax of_row[4];
            for (int i = 0; i < 4; i++)
                of_row[i] = softmaxes_of(t, min(first + 8 * i + lane / 4, t.a.n - 1) - begin, head)[chunk];
            if (t.a.n - begin > 1) multiply<T>(p, t, head, first, first_key);
            else
                for_each([&](int e, int i, int j) {
                    if (contains(seen[i], first_key + j)) at(p, e) = t.products[(int64_t)head * t.a.m + first_key + j];
                });
            for_each([&](int e, int i, int j) {
                if (!contains(seen[i], first_key + j)) return;
                lazy_softmax block = is_alone(t, head, first_key + j)
                                         ? lazy_softmax{ at(p, e), 1.0f / (float)(seen[i].end - seen[i].begin) }
                                         : of_row[i];
                float probability = weight * exp2f(at(p, e) - block.max) * block.sum;
                at(sum, e) += rms ? probability * probability : probability;
            });
        }
        for_each([&](int e, int i, int j) { sums[warp][8 * i + lane / 4][j] = at(sum, e); });
        __syncthreads();
        for (int row = warp; row < ROWS; row += POOL_WARPS) {
            double total = 0.0;
            for (int w = 0; w < POOL_WARPS; w++) total += sums[w][row][lane];
            float mean = (float)(total / t.n_heads);
            pooled = pool(pooled, rms ? sqrtf(mean) : mean);
        }
        __syncthreads();
    }
    sums[warp][0][lane] = pooled;
    __syncthreads();
    if (warp || first_key + lane >= t.a.m) return;
    for (int w = 1; w < POOL_WARPS; w++) pooled = pool(pooled, sums[w][0][lane]);
    t.scores[first_key + lane] = rms ? pooled : pooled / (float)(t.a.n - begin);
}

/* The length of chunks: of more rows they are longer, so that there are not more results. It divides LAZY_LEVEL_BLOCK
 * wherever a head is levelled. */
int length_of(int rows)
{
    int length = MIN_LENGTH;
    while (length < rows) length *= 2;
    return length;
}
} // namespace

size_t lazy_cuda_max_softmaxes(const lazy_config *config, int n_rows, int n_tokens)
{
    size_t rows = (size_t)n_rows, chunks = ((size_t)n_tokens + MIN_LENGTH - 1) / MIN_LENGTH;
    return (size_t)config->n_heads * (rows + std::min<size_t>(rows, MIN_LENGTH) * chunks);
}

int lazy_cuda_scores(lazy_stream *stream, float *scores, const lazy_attending *a, int queries, lazy_pooling pooling,
                     int heavy, int first_asking, lazy_error *err)
{
    const lazy_config *c = stream->config;
    lazy_cuda_stream *s = lazy_cuda_scratch(stream);
    int rows = std::min(queries, a->n), heads = c->n_heads, length = length_of(rows);
    const lazy_key_range *ranges;
    int code = lazy_cuda_find_ranges(stream, a, &ranges, err);
    if (code) return code;
    const scoring t = { scores,
                        s->softmaxes,
                        s->products,
                        *a,
                        ranges,
                        a->n - rows,
                        first_asking,
                        lazy_blocks(a->m, length),
                        length,
                        heads,
                        heads / c->n_kv_heads,
                        c->head_dim,
                        lazy_attention_scale(c),
                        lazy_attention_cap(c),
                        pooling,
                        heavy };
    return lazy_cuda_with_type(stream, [&](auto type) {
        using T = decltype(type);
        auto run = [&](void (*kernel)(scoring), dim3 grid, int warps) {
            return lazy_cuda_run(stream, "scores", err, kernel, grid, 32 * warps, t);
        };
        int failed = run(sum_chunks<T>, dim3(t.chunks, lazy_blocks(heads, SUM_WARPS)), SUM_WARPS);
        if (!failed) failed = run(merge_chunks, lazy_blocks(rows * heads, SUM_WARPS), SUM_WARPS);
        return failed ? failed : run(pool_rows<T>, lazy_blocks(a->m, KEYS), POOL_WARPS);
    });
}
