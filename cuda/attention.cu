/* attention.cu — softmax(q k^T) v of any rows over any keys: which kernel takes it, into how many chunks the keys are cut where the
 * rows alone do not fill the device, and how chunks are put together. */
#include <algorithm>
#include <cstdlib>
#include <type_traits>

#include "attention.h"

namespace
{
enum {
    THREADS = 128,
    KEY_UNIT = 128, /* a chunk is a multiple of it */
    MOST_CHUNKS = 64,
    FEW_ROWS = 128, /* up to here keys are cut */
    BLOCKS_PER_PROCESSOR = 4,
    TILE = 16, /* rows of q, with the heads of a group side by side, that one block takes */
};

/* One block for a row's head. */
template <class T> __global__ void __launch_bounds__(THREADS) merge_chunks(attention_task<T> t)
{
    int row = blockIdx.x, head = blockIdx.y;
    float most = -INFINITY, sum = 0.0f;
    for (int c = 0; c < t.chunks; c++) most = fmaxf(most, partial_of(t, row, head, c)[t.d]);
    for (int c = 0; c < t.chunks; c++) {
        const float *part = partial_of(t, row, head, c);
        sum += part[t.d + 1] * exp2f(part[t.d] - most);
    }
    for (int i = threadIdx.x; i < t.d; i += THREADS) {
        float total = 0.0f;
        for (int c = 0; c < t.chunks; c++) {
            const float *part = partial_of(t, row, head, c);
            total += part[i] * exp2f(part[t.d] - most);
        }
        lazy_narrow(&t.y[((int64_t)row * t.n_heads + head) * t.d + i], total / sum);
    }
}

/* Depends on the shapes and the device alone. */
template <class T> void cut_keys(attention_task<T> *t, int processors)
{
    t->chunk = t->m;
    t->chunks = 1;
    if (t->n > FEW_ROWS) return;
    int tiles = (t->n * t->group + TILE - 1) / TILE
    *(t->n_heads / t->group);
    int wanted = processors * BLOCKS_PER_PROCESSOR / std::max(1, tiles);
    int chunks = std::clamp(wanted, 1, (int)MOST_CHUNKS);
    t->chunk = ((t->m + chunks - 1) / chunks + KEY_UNIT - 1) / KEY_UNIT * KEY_UNIT;
    t->chunks = (t->m + t->chunk - 1) / t->chunk;
}

template <class T> cudaError_t attend_in_chunks(const attention_task<T> &t, [[maybe_unused]] bool wgmma, const lazy_queue &queue)
{
    if constexpr (!std::is_same_v<T, float>) {
        if (wgmma && t.n > FEW_ROWS && lazy_cuda_wgmma_takes(t.d)) return lazy_cuda_attend_by_wgmma(t, queue);
        if (lazy_cuda_mma_takes(t.d)) return lazy_cuda_attend_by_mma(t, queue);
    }
    return lazy_cuda_attend_plainly(t, queue);
}

template <class T> cudaError_t attend(attention_task<T> &t, const lazy_cuda *cuda, const lazy_queue &queue)
{
    cut_keys(&t, cuda->processors);
    cudaError_t code = attend_in_chunks(t, cuda->wgmma, queue);
    if (code != cudaSuccess || t.chunks == 1) return code;
    return lazy_launch(merge_chunks<T>, dim3(t.n, t.n_heads), dim3(THREADS), 0, queue, t);
}
} // namespace

/* A tile's rows in as many chunks as there are blocks for each tile; and no more than the rows have. */
size_t lazy_cuda_most_partial(const lazy_config *config, int processors, int n_rows)
{
    size_t rows = (size_t)std::min(n_rows, (int)FEW_ROWS) * (size_t)config->n_heads;
    return std::min(rows * MOST_CHUNKS, (size_t)processors * BLOCKS_PER_PROCESSOR * TILE);
}

int lazy_cuda_attention(lazy_stream *stream, void *y, const void *qkv, const int32_t *rows, int n, lazy_kv kv, const int32_t *in_play,
                        int m, lazy_error *err)
{
    const lazy_config *c = stream->config;
    lazy_cuda_stream *s = lazy_cuda_scratch(stream);
    int code = lazy_cuda_limits(stream, rows, n, in_play, m, err);
    if (code) return code;
    return lazy_cuda_typed_op(stream, "attention", err, [&](auto type, const lazy_queue &queue) {
        using T = decltype(type);
        attention_task<T> t = {};
        t.y = (T *)y;
        t.qkv = (const T *)qkv;
        t.k = (const T *)kv.k;
        t.v = (const T *)kv.v;
        t.in_play = in_play;
        t.limits = s->limits;
        t.partial = s->partial;
        t.n = n;
        t.m = m;
        t.n_heads = c->n_heads;
        t.group = c->n_heads / c->n_kv_heads;
        t.d = c->head_dim;
        t.width = (c->n_heads + 2 * c->n_kv_heads) * c->head_dim;
        t.capacity = kv.capacity;
        t.scale = lazy_cuda_scale(c->head_dim);
        return attend(t, lazy_cuda_of(stream), queue);
    });
}
