/* scores.cu — the attention of the query rows to each token in play: its mean over heads, or each head's share. Only these rows' attention
 * weights are computed, one row at a time.
 *
 * The query rows are those of the last `queries` rows whose tokens are new. Only the device knows the rows' positions, so kernels are
 * launched for all of the last `queries` rows, and return at once for a row that is not a query row. */
#include "limits.h"

namespace
{
enum { THREADS = 256, KEYS = 128 /* per block, one thread each */ };

/* One candidate row r, and the range of rows whose scores are averaged. */
struct query {
    const int32_t *rows;          /* (n,) */
    const lazy_key_range *ranges; /* (n,) the part of in_play that each row attends to */
    int r, first, n, first_new;   /* rows r >= first with rows[r] >= first_new are query rows */
    int m, n_heads;
};

__device__ __forceinline__ bool is_query(const query &t) { return t.rows[t.r] >= t.first_new; }

/* The first query row; rows ascend, so all later ones are query rows too. */
__device__ __forceinline__ int begin_of(const query &t)
{
    int first = t.first;
    while (t.rows[first] < t.first_new) first++; /* ends: the last row is always a new token */
    return first;
}

template <class T> struct keys {
    const T *q; /* (H, D) of the row */
    const T *k; /* (G, capacity, D) */
    const int32_t *in_play;
    int d, group, capacity;
    float scale;
};

/* shares[h, j] = scale * q_h . k_j, for the keys that the row attends to. Grid: (blocks of keys, H). */
template <class T> __global__ void __launch_bounds__(KEYS) multiply_keys(float *shares, keys<T> k, query t)
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
            lazy_pack<T> a = *reinterpret_cast<const lazy_pack<T> *>(q + i), b = *reinterpret_cast<const lazy_pack<T> *>(key + i);
#pragma unroll
            for (int e = 0; e < WIDE; e++) sum += lazy_wide(a.value[e]) * lazy_wide(b.value[e]);
        }
    shares[(int64_t)h * t.m + j] = sum * k.scale;
}

/* Softmax over the keys of a head's shares, with powers of 2, by one block. */
__device__ __forceinline__ void normalise(float *share, lazy_key_range keys)
{
    __shared__ float scratch[32];
    float max_score = -INFINITY, sum = 0.0f;
    for (int j = keys.begin + (int)threadIdx.x; j < keys.end; j += THREADS)
        max_score = fmaxf(max_score, share[j]); /* fmaxf ignores NaN; the sum keeps it */
    max_score = lazy_block_max(max_score, scratch);
    for (int j = keys.begin + (int)threadIdx.x; j < keys.end; j += THREADS) {
        share[j] = exp2f(share[j] - max_score);
        sum += share[j];
    }
    float factor = 1.0f / lazy_block_sum(sum, scratch);
    for (int j = keys.begin + (int)threadIdx.x; j < keys.end; j += THREADS) share[j] *= factor;
}

/* One block per head. */
__global__ void __launch_bounds__(THREADS) normalise_heads(float *shares, query t)
{
    if (is_query(t)) normalise(shares + (int64_t)blockIdx.x * t.m, t.ranges[t.r]);
}

/* scores[j] += the row's part of the mean over heads and query rows; the first query row initialises scores. */
__global__ void __launch_bounds__(THREADS) average_heads(float *scores, const float *shares, query t)
{
    int j = blockIdx.x * THREADS + threadIdx.x;
    if (j >= t.m || !is_query(t)) return;
    int begin = begin_of(t);
    bool visible = j >= t.ranges[t.r].begin && j < t.ranges[t.r].end;
    double sum = 0.0;
    for (int h = 0; h < t.n_heads && visible; h++) sum += shares[(int64_t)h * t.m + j];
    float share = (float)(sum / ((double)t.n_heads * (t.n - begin)));
    scores[j] = t.r > begin ? scores[j] + share : share;
}

/* Each head's shares, by position: (H, capacity). */
struct by_head {
    float *shares;
    const int32_t *in_play;
    const uint8_t *flags;
    int capacity;
};

/* The row's softmax is added to those of the query rows before it; after the last row, each sum is divided by that of all tokens that can
 * be dropped. One block per head, so that this sum has one order. */
__global__ void __launch_bounds__(THREADS) share_heads(by_head out, float *shares, query t)
{
    __shared__ double scratch[32];
    if (!is_query(t)) return;
    float *own = shares + (int64_t)blockIdx.x * t.m, *share = out.shares + (int64_t)blockIdx.x * out.capacity;
    lazy_key_range keys = t.ranges[t.r];
    normalise(own, keys);
    __syncthreads(); /* a thread reads what others have written below */
    bool is_first = t.r == begin_of(t);
    double sum = 0.0;
    for (int j = threadIdx.x; j < t.m; j += THREADS) {
        float *at = share + out.in_play[j];
        float here = j >= keys.begin && j < keys.end ? own[j] : 0.0f;
        *at = is_first ? here : *at + here;
        if (out.flags[out.in_play[j]] == LAZY_PRUNABLE) sum += *at;
    }
    if (t.r < t.n - 1) return;
    sum = lazy_block_sum(sum, scratch);
    for (int j = threadIdx.x; j < t.m; j += THREADS) {
        float *at = share + out.in_play[j];
        *at = out.flags[out.in_play[j]] == LAZY_PRUNABLE && sum != 0.0 ? (float)(*at / sum) : 0.0f;
    }
}

/* For each candidate row: its products with the keys, then finish(shares, row, queue) launches the rest. */
template <class F>
int score_rows(lazy_stream *stream, const void *qkv, const int32_t *rows, int n, int queries, int first_new, lazy_kv kv,
               const int32_t *in_play, int m, int window, lazy_error *err, F finish)
{
    const lazy_config *c = stream->config;
    lazy_cuda_stream *s = lazy_cuda_scratch(stream);
    int d = c->head_dim, width = (c->n_heads + 2 * c->n_kv_heads) * d, first = n > queries ? n - queries : 0;
    const lazy_key_range *ranges;
    int code = lazy_cuda_limits(stream, rows, n, in_play, m, window, &ranges, err);
    query t = { rows, ranges, 0, first, n, first_new, m, c->n_heads };
    for (t.r = first; t.r < n && !code; t.r++)
        code = lazy_cuda_typed_op(stream, "scores", err, [&](auto type, cudaStream_t queue) {
            using T = decltype(type);
            keys<T> k = { (const T *)qkv + (int64_t)t.r * width,
                          (const T *)kv.k,
                          in_play,
                          d,
                          c->n_heads / c->n_kv_heads,
                          kv.capacity,
                          lazy_cuda_scale(c) };
            cudaError_t failed =
                lazy_launch(multiply_keys<T>, dim3((m + KEYS - 1) / KEYS, c->n_heads), dim3(KEYS), 0, queue, s->shares, k, t);
            return failed != cudaSuccess ? failed : finish(s->shares, t, queue);
        });
    return code;
}
} // namespace

int lazy_cuda_scores(lazy_stream *stream, float *scores, const void *qkv, const int32_t *rows, int n, int queries, int first_new,
                     lazy_kv kv, const int32_t *in_play, int m, int window, lazy_error *err)
{
    return score_rows(stream, qkv, rows, n, queries, first_new, kv, in_play, m, window, err,
                      [&](float *shares, const query &t, cudaStream_t queue) {
                          cudaError_t failed = lazy_launch(normalise_heads, dim3(t.n_heads), dim3(THREADS), 0, queue, shares, t);
                          if (failed != cudaSuccess) return failed;
                          return lazy_launch(average_heads, dim3((m + THREADS - 1) / THREADS), dim3(THREADS), 0, queue, scores, shares, t);
                      });
}

int lazy_cuda_head_shares(lazy_stream *stream, float *shares, const void *qkv, const int32_t *rows, int n, int queries, int first_new,
                          lazy_kv kv, const int32_t *in_play, int m, int window, const uint8_t *flags, lazy_error *err)
{
    by_head out = { shares, in_play, flags, kv.capacity };
    return score_rows(stream, qkv, rows, n, queries, first_new, kv, in_play, m, window, err,
                      [&](float *of_row, const query &t, cudaStream_t queue) {
                          return lazy_launch(share_heads, dim3(t.n_heads), dim3(THREADS), 0, queue, out, of_row, t);
                      });
}
