/* rows.cu — what is done to each row by itself: embedding, norms, RoPE, surprisal, the greatest logit, the look for numbers that are none. */
#include <cfloat>

#include "values.h"

namespace
{
enum { THREADS = 256, HEAD_WARPS = 4, LOGIT_THREADS = 1024 };

template <class T> __global__ void __launch_bounds__(THREADS) embed_rows(T *x, const int32_t *ids, const T *table, int d)
{
    T *to = x + (int64_t)blockIdx.x * d;
    const T *from = table + (int64_t)ids[blockIdx.x] * d;
    for (int i = threadIdx.x; i < d; i += THREADS) to[i] = from[i];
}

/* y, x: (n, d), one block a row */
template <class T> __global__ void __launch_bounds__(THREADS) norm_rows(T *y, const T *x, int d, const float *weight, float eps)
{
    __shared__ float room[32];
    __shared__ double wide_room[32];
    const T *from = x + (int64_t)blockIdx.x * d;
    T *to = y + (int64_t)blockIdx.x * d;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < d; i += THREADS) {
        float value = lazy_wide(from[i]);
        sum += value * value;
    }
    sum = lazy_block_sum(sum, room);
    float factor = 1.0f / sqrtf(sum / (float)d + eps);
    if (factor == 0.0f) { /* the squares overflowed */
        double wide = 0.0;
        for (int i = threadIdx.x; i < d; i += THREADS) wide += (double)lazy_wide(from[i]) * lazy_wide(from[i]);
        factor = (float)(1.0 / sqrt(lazy_block_sum(wide, wide_room) / d + eps));
    }
    for (int i = threadIdx.x; i < d; i += THREADS) lazy_narrow(&to[i], lazy_wide(from[i]) * factor * weight[i]);
}

/* A warp takes a head: norms it where there is a weight, and turns its pairs (i, i + D/2) by the angles of its position. */
template <class T> __device__ __forceinline__ void turn_head(T *to, const T *from, const float *rope, const float *weight, int d, float eps)
{
    int lane = threadIdx.x % 32, half = d / 2;
    float factor = 1.0f;
    if (weight) {
        float sum = 0.0f;
        for (int i = lane; i < d; i += 32) sum += lazy_wide(from[i]) * lazy_wide(from[i]);
        sum = lazy_warp_sum(sum);
        factor = 1.0f / sqrtf(sum / (float)d + eps);
        if (factor == 0.0f) { /* the squares overflowed */
            double wide = 0.0;
            for (int i = lane; i < d; i += 32) wide += (double)lazy_wide(from[i]) * lazy_wide(from[i]);
            wide = lazy_warp_sum(wide);
            factor = (float)(1.0 / sqrt(wide / d + eps));
        }
        __syncwarp(); /* the whole head was read; what follows may write over it */
    }
    for (int i = lane; i < half; i += 32) {
        float a = lazy_wide(from[i]) * factor, b = lazy_wide(from[half + i]) * factor, c = rope[i], s = rope[half + i];
        if (weight) {
            a *= weight[i];
            b *= weight[half + i];
        }
        lazy_narrow(&to[i], a * c - b * s);
        lazy_narrow(&to[half + i], b * c + a * s);
    }
}

struct rotation {
    const int32_t *rows;
    int n_heads, n_kv_heads, d, capacity;
    const float *rope, *q_norm, *k_norm;
    float eps;
};

/* qkv: (n, (H + 2G) D), one block a row; k, v: (G, capacity, D) */
template <class T> __global__ void __launch_bounds__(32 * HEAD_WARPS) rotate_rows(T *qkv, T *k, T *v, rotation t)
{
    int d = t.d, position = t.rows[blockIdx.x];
    T *row = qkv + (int64_t)blockIdx.x * (t.n_heads + 2 * t.n_kv_heads) * d;
    const float *rope = t.rope + (int64_t)position * d;
    int64_t slot = (int64_t)position * d, head = (int64_t)t.capacity * d;
    for (int h = threadIdx.x / 32; h < t.n_heads + t.n_kv_heads; h += HEAD_WARPS) {
        if (h < t.n_heads) turn_head(row + h * d, row + h * d, rope, t.q_norm, d, t.eps);
        else turn_head(k + (h - t.n_heads) * head + slot, row + h * d, rope, t.k_norm, d, t.eps);
    }
    const T *values = row + (t.n_heads + t.n_kv_heads) * d;
    for (int i = threadIdx.x; i < t.n_kv_heads * d; i += 32 * HEAD_WARPS) v[i / d * head + slot + i % d] = values[i];
}

/* logits: (n, vocab), one block a row */
__global__ void __launch_bounds__(THREADS) surprise_rows(float *surprisal, const float *logits, int vocab, const int32_t *ids)
{
    __shared__ float room[32];
    const float *row = logits + (int64_t)blockIdx.x * vocab;
    float most = -INFINITY, sum = 0.0f;
    for (int v = threadIdx.x; v < vocab; v += THREADS) most = fmaxf(most, row[v]); /* passes NaN over; the sum does not */
    most = lazy_block_max(most, room);
    for (int v = threadIdx.x; v < vocab; v += THREADS) sum += expf(row[v] - most);
    sum = lazy_block_sum(sum, room);
    if (threadIdx.x == 0) surprisal[blockIdx.x] = logf(sum) + (most - row[ids[blockIdx.x]]);
}

/* Least for the greatest logit, then for the smallest id; less than any of these for one that is no finite number. */
__device__ __forceinline__ unsigned long long rank_of(float logit, int id)
{
    unsigned bits = __float_as_uint(logit + 0.0f); /* -0 becomes 0 */
    unsigned falling = bits >> 31 ? bits : ~bits & INT32_MAX;
    return (unsigned long long)(fabsf(logit) <= FLT_MAX ? falling : 0) << 32 | (unsigned)id;
}

/* One block. */
__global__ void __launch_bounds__(LOGIT_THREADS) find_greatest(int32_t *id, const float *logits, int vocab)
{
    __shared__ unsigned long long least;
    if (threadIdx.x == 0) least = ~0ull;
    __syncthreads();
    unsigned long long own = ~0ull;
#pragma unroll 4
    for (int v = threadIdx.x; v < vocab; v += LOGIT_THREADS) own = min(own, rank_of(logits[v], v));
    for (int step = 16; step; step /= 2) own = min(own, __shfl_xor_sync(~0u, own, step));
    if (threadIdx.x % 32 == 0) atomicMin(&least, own);
    __syncthreads();
    if (threadIdx.x == 0) *id = least >> 32 ? (int)(unsigned)least : -1 - (int)(unsigned)least;
}

template <class T> __global__ void __launch_bounds__(THREADS) note_row(const T *x, int d, int layer, int32_t *first_bad)
{
    for (int i = threadIdx.x; i < d; i += THREADS)
        if (!(fabsf(lazy_wide(x[i])) <= FLT_MAX)) atomicMin(first_bad, layer);
}

} // namespace

int lazy_cuda_embed(lazy_stream *stream, void *x, const int32_t *ids, int n, const lazy_matrix *table, lazy_error *err)
{
    return lazy_cuda_typed_op(stream, "embedding", err, [&](auto type, const lazy_queue &queue) {
        using T = decltype(type);
        return lazy_launch(embed_rows<T>, dim3(n), dim3(THREADS), 0, queue, (T *)x, ids, (const T *)table->part[0].data, table->cols);
    });
}

int lazy_cuda_rmsnorm(lazy_stream *stream, void *y, const void *x, int n, int d, const float *weight, float eps, lazy_error *err)
{
    return lazy_cuda_typed_op(stream, "norm", err, [&](auto type, const lazy_queue &queue) {
        using T = decltype(type);
        return lazy_launch(norm_rows<T>, dim3(n), dim3(THREADS), 0, queue, (T *)y, (const T *)x, d, weight, eps);
    });
}

int lazy_cuda_rotate(lazy_stream *stream, void *qkv, const int32_t *rows, int n, lazy_kv kv, const float *rope, const float *q_norm,
                     const float *k_norm, float eps, lazy_error *err)
{
    const lazy_config *c = stream->config;
    rotation t = { rows, c->n_heads, c->n_kv_heads, c->head_dim, kv.capacity, rope, q_norm, k_norm, eps };
    return lazy_cuda_typed_op(stream, "rotation", err, [&](auto type, const lazy_queue &queue) {
        using T = decltype(type);
        return lazy_launch(rotate_rows<T>, dim3(n), dim3(32 * HEAD_WARPS), 0, queue, (T *)qkv, (T *)kv.k, (T *)kv.v, t);
    });
}

int lazy_cuda_surprisal(lazy_stream *stream, float *surprisal, float *logits, int n, int vocab, const int32_t *ids, lazy_error *err)
{
    return lazy_cuda_op(stream, "surprisal", err, [&](const lazy_queue &queue) {
        return lazy_launch(surprise_rows, dim3(n), dim3(THREADS), 0, queue, surprisal, logits, vocab, ids);
    });
}

int lazy_cuda_argmax(lazy_stream *stream, int32_t *id, const float *logits, int vocab, lazy_error *err)
{
    return lazy_cuda_op(stream, "the greatest logit", err, [&](const lazy_queue &queue) {
        return lazy_launch(find_greatest, dim3(1), dim3(LOGIT_THREADS), 0, queue, id, logits, vocab);
    });
}

int lazy_cuda_note_finite(lazy_stream *stream, const void *x, int d, int layer, int32_t *first_bad, lazy_error *err)
{
    return lazy_cuda_typed_op(stream, "the look for numbers that are none", err, [&](auto type, const lazy_queue &queue) {
        using T = decltype(type);
        return lazy_launch(note_row<T>, dim3(1), dim3(THREADS), 0, queue, (const T *)x, d, layer, first_bad);
    });
}
