/* scores.cu — the attention of the query rows to each token in play. Only these rows' attention weights are computed,
 * one row at a time.
 *
 * The query rows are those of the last `queries` rows whose tokens are new. Only the device knows the rows' positions,
 * so kernels are launched for all of the last `queries` rows, and return at once for a row that is not a query row. */
#include "ranges.h"

namespace
{
enum { THREADS = 256, KEYS = 128 /* per block, one thread each */ };

/* Row r, which may be a query row, and the rows whose scores are pooled. */
struct query {
    const int32_t *rows;           /* (n,) */
    const lazy_key_range *ranges;  /* (n,) the part of in_play that each row attends to */
    int r, first, n, first_asking; /* rows r >= first with rows[r] >= first_asking are query rows */
    int m, n_heads;
    lazy_pooling pooling;
};

__device__ __forceinline__ bool is_query(const query &t) { return t.rows[t.r] >= t.first_asking; }

/* The first query row; rows ascend, so that all later ones are query rows too. */
__device__ __forceinline__ int begin_of(const query &t)
{
    int first = t.first;
    while (t.rows[first] < t.first_asking) first++; /* the last row is a new token always */
    return first;
}

template <class T> struct keys {
    const T *q; /* (H, D) of the row */
    const T *k; /* (G, capacity, D) */
    const int32_t *in_play;
    int d, group, capacity;
    float scale, cap;
};

/* p[h, j] = scale * q_h . k_j, capped, for the keys that the row attends to. Grid: (blocks of keys, H). */
template <class T> __global__ void __launch_bounds__(KEYS) multiply_keys(float *p, keys<T> k, query t)
{
    constexpr int WIDE = 16 / sizeof(T);
    int h = blockIdx.y, j = blockIdx.x * KEYS + threadIdx.x;
    if (!is_query(t) || j < t.ranges[t.r].begin || j >= t.ranges[t.r].end) return;
    const T *q = k.q + h * k.d, *key = k.k + ((int64_t)(h / k.group) * k.capacity + k.in_play[j]) * k.d;
    float sum = 0.0f;
    if (k.d % WIDE)
        for (int i = 0; i < k.d; i++) sum += lazy_wide(q[i]) * lazy_wide(key[i]);
    else
        for (int i = 0; i < k.d; i += WIDE) {
            lazy_pack<T> a = *reinterpret_cast<const lazy_pack<T> *>(q + i),
                         b = *reinterpret_cast<const lazy_pack<T> *>(key + i);
#pragma unroll
            for (int e = 0; e < WIDE; e++) sum += lazy_wide(a.value[e]) * lazy_wide(b.value[e]);
        }
    p[(int64_t)h * t.m + j] = lazy_capped(sum * k.scale, k.cap);
}

/* Softmax over the keys of p[h], by powers of 2; one block per head. */
__global__ void __launch_bounds__(THREADS) normalise_heads(float *p, query t)
{
    __shared__ float scratch[32];
    if (!is_query(t)) return;
    float *own = p + (int64_t)blockIdx.x * t.m, max_score = -INFINITY, sum = 0.0f;
    lazy_key_range keys = t.ranges[t.r];
    for (int j = keys.begin + (int)threadIdx.x; j < keys.end; j += THREADS)
        max_score = fmaxf(max_score, own[j]); /* fmaxf ignores NaN; the sum keeps it */
    max_score = lazy_block_max(max_score, scratch);
    for (int j = keys.begin + (int)threadIdx.x; j < keys.end; j += THREADS) {
        own[j] = exp2f(own[j] - max_score);
        sum += own[j];
    }
    float factor = 1.0f / lazy_block_sum(sum, scratch);
    for (int j = keys.begin + (int)threadIdx.x; j < keys.end; j += THREADS) own[j] *= factor;
}

/* Adds the row's part of the mean over query rows to scores, or takes the larger of both. The first query row
 * initialises scores. */
__global__ void __launch_bounds__(THREADS) pool_heads(float *scores, const float *p, query t)
{
    int j = blockIdx.x * THREADS + threadIdx.x;
    if (j >= t.m || !is_query(t)) return;
    int begin = begin_of(t);
    bool visible = j >= t.ranges[t.r].begin && j < t.ranges[t.r].end;
    double sum = 0.0;
    for (int h = 0; h < t.n_heads && visible; h++) sum += p[(int64_t)h * t.m + j];
    bool largest = t.pooling == LAZY_POOLING_MAX;
    float mean = (float)(sum / ((double)t.n_heads * (largest ? 1 : t.n - begin))), earlier = scores[j];
    if (t.r == begin) scores[j] = mean;
    else scores[j] = largest ? lazy_larger(earlier, mean) : earlier + mean;
}
} // namespace

int lazy_cuda_scores(lazy_stream *stream, float *scores, const lazy_attending *a, int queries, lazy_pooling pooling,
                     int first_asking, lazy_error *err)
{
    const lazy_config *c = stream->config;
    lazy_cuda_stream *s = lazy_cuda_scratch(stream);
    int d = c->head_dim, n = a->n, m = a->m, width = lazy_qkv_width(c), first = n > queries ? n - queries : 0;
    const lazy_key_range *ranges;
    int code = lazy_cuda_find_ranges(stream, a, &ranges, err);
    query t = { a->rows, ranges, 0, first, n, first_asking, m, c->n_heads, pooling };
    for (t.r = first; t.r < n && !code; t.r++)
        code = lazy_cuda_typed_op(stream, "scores", err, [&](auto type, cudaStream_t queue) {
            using T = decltype(type);
            keys<T> k = { (const T *)a->qkv + (int64_t)t.r * width,
                          (const T *)a->kv.k,
                          a->in_play,
                          d,
                          c->n_heads / c->n_kv_heads,
                          a->kv.capacity,
                          lazy_cuda_scale(c),
                          lazy_cuda_cap(c) };
            cudaError_t failed = lazy_launch(multiply_keys<T>, dim3((m + KEYS - 1) / KEYS, c->n_heads), dim3(KEYS), 0,
                                             queue, s->probabilities, k, t);
            if (failed == cudaSuccess)
                failed = lazy_launch(normalise_heads, dim3(c->n_heads), dim3(THREADS), 0, queue, s->probabilities, t);
            if (failed == cudaSuccess)
                failed = lazy_launch(pool_heads, dim3((m + THREADS - 1) / THREADS), dim3(THREADS), 0, queue, scores,
                                     s->probabilities, t);
            return failed;
        });
    return code;
}
