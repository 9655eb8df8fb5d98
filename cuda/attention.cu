/* attention.cu — softmax(q k^T) v: chooses the kernel, splits the keys into chunks where the rows alone do not fill the
 * device, and merges the chunks' partial results. */
#include <algorithm>
#include <cstdlib>
#include <type_traits>

#include "attention.h"

namespace
{
enum {
    THREADS = 128,
    MAX_CHUNKS = 64,
    MAX_SPLIT_ROWS = 128,        /* keys are split only for passes of up to this many rows */
    PLAIN_BLOCKS = 8,            /* of attention_plain.cu that a multiprocessor runs at once */
    RESERVED_SHARED_BYTES = 1024 /* of each block, by CUDA */
};

/* Combines the chunks of one row and head per block. partial: (n, H, chunks, D + 2); accumulates in f32. */
template <class T> __global__ void __launch_bounds__(THREADS) merge_chunks(attention_task<T> t)
{
    int row = blockIdx.x, head = blockIdx.y;
    float max_score = -INFINITY, sum = 0.0f;
    for (int c = 0; c < t.chunks; c++) max_score = fmaxf(max_score, partial_of(t, row, head, c)[t.d]);
    for (int c = 0; c < t.chunks; c++) {
        const float *part = partial_of(t, row, head, c);
        sum += part[t.d + 1] * exp2f(part[t.d] - max_score);
    }
    for (int i = threadIdx.x; i < t.d; i += THREADS) {
        float total = 0.0f;
        for (int c = 0; c < t.chunks; c++) {
            const float *part = partial_of(t, row, head, c);
            total += part[i] * exp2f(part[t.d] - max_score);
        }
        lazy_narrow(&t.y[((int64_t)row * t.n_heads + head) * t.d + i], total / sum);
    }
}

/* How many blocks of a kernel the device runs at once, and the rows x heads of one key head that each computes. */
struct capacity {
    int rows, blocks;
};

capacity capacity_of(const lazy_cuda *cuda, int head_dim, int rows)
{
    if (cuda->type == LAZY_F32 || !lazy_cuda_mma_supports(head_dim)) return { 1, cuda->processors * PLAIN_BLOCKS };
    lazy_tiling tiling = lazy_cuda_mma_tiling(head_dim, rows);
    int per_processor = (int)(cuda->shared_bytes / (tiling.shared_bytes + RESERVED_SHARED_BYTES));
    return { tiling.rows, cuda->processors * std::max(per_processor, 1) };
}

/* Chooses t->chunks, so that all blocks run at once. Depends only on the shapes and the device, so results are
 * reproducible. A single row attends to no more than `window` keys; of several, only the device knows how far apart
 * their windows lie. */
template <class T> void split_keys(attention_task<T> *t, int window, const lazy_cuda *cuda)
{
    t->chunks = 1;
    if (t->n > MAX_SPLIT_ROWS) return;
    capacity device = capacity_of(cuda, t->d, t->n * t->group);
    int tiles = (t->n * t->group + device.rows - 1) / device.rows;
    int blocks = tiles * (t->n_heads / t->group);
    int keys = t->n == 1 ? std::min(t->m, window) : t->m, units = (keys + KEY_UNIT - 1) / KEY_UNIT;
    t->chunks = std::clamp(device.blocks / blocks, 1, std::min(units, (int)MAX_CHUNKS));
}

template <class T>
cudaError_t attend_in_chunks(const attention_task<T> &t, [[maybe_unused]] bool wgmma, cudaStream_t queue)
{
    if constexpr (!std::is_same_v<T, float>) {
        if (wgmma && t.cap == 0.0f && t.n > MAX_SPLIT_ROWS && lazy_cuda_wgmma_supports(t.d))
            return lazy_cuda_attend_wgmma(t, queue);
        if (lazy_cuda_mma_supports(t.d)) return lazy_cuda_attend_mma(t, queue);
    }
    return lazy_cuda_attend_plain(t, queue);
}

template <class T> cudaError_t attend(attention_task<T> &t, int window, const lazy_cuda *cuda, cudaStream_t queue)
{
    split_keys(&t, window, cuda);
    cudaError_t code = attend_in_chunks(t, cuda->wgmma, queue);
    if (code != cudaSuccess || t.chunks == 1) return code;
    return lazy_launch(merge_chunks<T>, dim3(t.n, t.n_heads), dim3(THREADS), 0, queue, t);
}
} // namespace

/* The smaller of two bounds: MAX_CHUNKS for each row and head, and the rows x heads of all blocks that the device runs
 * at once, whether their tiles are for one row or for many. */
size_t lazy_cuda_max_partials(const lazy_config *config, const lazy_cuda *cuda, int n_rows)
{
    size_t rows = (size_t)std::min(n_rows, (int)MAX_SPLIT_ROWS) * (size_t)config->n_heads, at_once = 0;
    for (int tile : { 1, (int)MAX_SPLIT_ROWS }) {
        capacity device = capacity_of(cuda, config->head_dim, tile);
        at_once = std::max(at_once, (size_t)device.rows * (size_t)device.blocks);
    }
    return std::min(rows * MAX_CHUNKS, at_once);
}

int lazy_cuda_attention(lazy_stream *stream, void *y, const lazy_attending *a, lazy_error *err)
{
    const lazy_config *c = stream->config;
    lazy_cuda_stream *s = lazy_cuda_scratch(stream);
    const lazy_key_range *ranges;
    int code = lazy_cuda_find_ranges(stream, a, &ranges, err);
    if (code) return code;
    return lazy_cuda_typed_op(stream, "attention", err, [&](auto type, cudaStream_t queue) {
        using T = decltype(type);
        attention_task<T> t = {};
        t.y = (T *)y;
        t.qkv = (const T *)a->qkv;
        t.k = (const T *)a->kv.k;
        t.v = (const T *)a->kv.v;
        t.in_play = a->in_play;
        t.ranges = ranges;
        t.partial = s->partial;
        t.n = a->n;
        t.m = a->m;
        t.n_heads = c->n_heads;
        t.group = c->n_heads / c->n_kv_heads;
        t.d = c->head_dim;
        t.width = (c->n_heads + 2 * c->n_kv_heads) * c->head_dim;
        t.capacity = a->kv.capacity;
        t.scale = lazy_cuda_scale(c);
        t.cap = lazy_cuda_cap(c);
        return attend(t, a->window, lazy_cuda_of(stream), queue);
    });
}
