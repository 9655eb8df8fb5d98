/* scores.cu — how much the query rows attend to each token in play: no map of rows by keys, only those rows.
 *
 * Which rows count is known to the device alone: of the last ones that were computed, those of new tokens. */
#include "limits.h"

namespace
{
enum { THREADS = 256, KEYS = 128 /* of a block, a thread each */ };

/* One query row, r of n, and what its scores are averaged with. */
struct query {
    const int32_t *rows, *limits; /* (n,) */
    int r, first, n, first_new;   /* rows from `first` on count, where their tokens are new */
    int m, n_heads;
};

__device__ __forceinline__ bool counts(const query &t) { return t.rows[t.r] >= t.first_new; }

/* The first row that counts. */
__device__ __forceinline__ int begin_of(const query &t)
{
    int first = t.first;
    while (t.rows[first] < t.first_new) first++; /* the last row is the query token: new */
    return first;
}

template <class T> struct keys {
    const T *q; /* (H, D) of the row */
    const T *k; /* (G, capacity, D) */
    const int32_t *in_play;
    int d, group, capacity;
    float scale;
};

/* shares[h, j] = q_h . k_j, to the base 2: blocks of keys by heads */
template <class T> __global__ void __launch_bounds__(KEYS) multiply_keys(float *shares, keys<T> k, query t)
{
    constexpr int WIDE = 16 / sizeof(T);
    int h = blockIdx.y, j = blockIdx.x * KEYS + threadIdx.x;
    if (!counts(t) || j >= t.limits[t.r]) return;
    const T *q = k.q + h * k.d, *key = k.k + ((int64_t)(h / k.group) * k.capacity + k.in_play[j]) * k.d;
    float sum = 0.0f;
    if (k.d % WIDE)
        for (int i = 0; i < k.d; i++) sum += lazy_wide(q[i]) * lazy_wide(key[i]);
    else
        for (int i = 0; i < k.d; i += WIDE) {
            lazy_pack<T> a = *reinterpret_cast<const lazy_pack<T> *>(q + i), b = *reinterpret_cast<const lazy_pack<T> *>(key + i);
#pragma unroll
            for (int e = 0; e < WIDE; e++) sum += lazy_wide(a.value[e]) * lazy_wide(b.value[e]);
        }
    shares[(int64_t)h * t.m + j] = sum * k.scale;
}

/* One block a head. */
__global__ void __launch_bounds__(THREADS) normalise_heads(float *shares, query t)
{
    __shared__ float room[32];
    if (!counts(t)) return;
    float *share = shares + (int64_t)blockIdx.x * t.m, most = -INFINITY, sum = 0.0f;
    int n = t.limits[t.r];
    for (int j = threadIdx.x; j < n; j += THREADS) most = fmaxf(most, share[j]); /* passes NaN over; the sum does not */
    most = lazy_block_max(most, room);
    for (int j = threadIdx.x; j < n; j += THREADS) {
        share[j] = exp2f(share[j] - most);
        sum += share[j];
    }
    float factor = 1.0f / lazy_block_sum(sum, room);
    for (int j = threadIdx.x; j < n; j += THREADS) share[j] *= factor;
}

/* scores[j] = mean over heads, added to those of the rows before. */
__global__ void __launch_bounds__(THREADS) average_heads(float *scores, const float *shares, query t)
{
    int j = blockIdx.x * THREADS + threadIdx.x;
    if (j >= t.m || !counts(t)) return;
    int begin = begin_of(t), visible = t.limits[t.r];
    double sum = 0.0;
    for (int h = 0; h < t.n_heads && j < visible; h++) sum += shares[(int64_t)h * t.m + j];
    float share = (float)(sum / ((double)t.n_heads * (t.n - begin)));
    scores[j] = t.r > begin ? scores[j] + share : share;
}
} // namespace

int lazy_cuda_scores(lazy_stream *stream, float *scores, const void *qkv, const int32_t *rows, int n, int queries, int first_new,
                     lazy_kv kv, const int32_t *in_play, int m, lazy_error *err)
{
    const lazy_config *c = stream->config;
    lazy_cuda_stream *s = lazy_cuda_scratch(stream);
    int d = c->head_dim, width = (c->n_heads + 2 * c->n_kv_heads) * d, first = n > queries ? n - queries : 0;
    query t = { rows, s->limits, 0, first, n, first_new, m, c->n_heads };
    int code = lazy_cuda_limits(stream, rows, n, in_play, m, err);
    for (t.r = first; t.r < n && !code; t.r++)
        code = lazy_cuda_typed_op(stream, "scores", err, [&](auto type, const lazy_queue &queue) {
            using T = decltype(type);
            keys<T> k = { (const T *)qkv + (int64_t)t.r * width,
                          (const T *)kv.k,
                          in_play,
                          d,
                          c->n_heads / c->n_kv_heads,
                          kv.capacity,
                          lazy_cuda_scale(d) };
            cudaError_t failed =
                lazy_launch(multiply_keys<T>, dim3((m + KEYS - 1) / KEYS, c->n_heads), dim3(KEYS), 0, queue, s->shares, k, t);
            if (failed == cudaSuccess) failed = lazy_launch(normalise_heads, dim3(c->n_heads), dim3(THREADS), 0, queue, s->shares, t);
            if (failed == cudaSuccess)
                failed = lazy_launch(average_heads, dim3((m + THREADS - 1) / THREADS), dim3(THREADS), 0, queue, scores, s->shares, t);
            return failed;
        });
    return code;
}
