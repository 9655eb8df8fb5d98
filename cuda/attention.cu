/* attention.cu — softmax(q k^T) v: chooses the kernel, and splits the keys into chunks where the rows alone do not fill
 * the device. */
#include <algorithm>
#include <type_traits>

#include "attention.h"

namespace
{
enum {
    MAX_CHUNKS = 64,
    WGMMA_ROWS = 128,            /* rows x heads of a block of attention_sm90a.cu, of which a multiprocessor runs one */
    PLAIN_BLOCKS = 8,            /* of attention_plain.cu that a multiprocessor runs at once */
    RESERVED_SHARED_BYTES = 1024 /* of each block, by CUDA */
};

/* Which kernel computes so many rows, counted as rows x heads of one key head. cap: 0 for none */
bool by_mma(const lazy_cuda *cuda, int head_dim) { return cuda->type != LAZY_F32 && lazy_cuda_mma_supports(head_dim); }
bool by_wgmma(const lazy_cuda *cuda, int head_dim, float cap, int rows)
{
    return cuda->wgmma && cap == 0.0f && rows > WGMMA_ROWS / 2 && lazy_cuda_wgmma_supports(head_dim);
}

/* How many blocks of a kernel the device runs at once, and the rows x heads of one key head that each computes. */
struct capacity {
    int rows, blocks;
};

capacity capacity_of(const lazy_cuda *cuda, int head_dim, float cap, int rows)
{
    if (by_wgmma(cuda, head_dim, cap, rows)) return { WGMMA_ROWS, cuda->processors };
    if (!by_mma(cuda, head_dim)) return { 1, cuda->processors * PLAIN_BLOCKS };
    lazy_tiling tiling = lazy_cuda_mma_tiling(head_dim, rows);
    int that_fit = (int)(cuda->shared_bytes / (tiling.shared_bytes + RESERVED_SHARED_BYTES));
    return { tiling.rows, cuda->processors * std::clamp(that_fit, 1, tiling.at_once) };
}

/* Into how many chunks the keys are split, so that all blocks run at once. Depends only on the shapes and the device,
 * so results are reproducible. A single row attends to no more than `window` keys; of several, only the device knows
 * how far apart their windows lie. */
int chunks_of(const lazy_config *c, const lazy_attending *a, const lazy_cuda *cuda)
{
    constexpr int SHORTEST = 64; /* keys of a chunk */
    int rows = a->n * (c->n_heads / c->n_kv_heads), keys = a->n == 1 ? std::min(a->m, a->window) : a->m;
    capacity device = capacity_of(cuda, c->head_dim, c->attention_cap, rows);
    int blocks = lazy_blocks(rows, device.rows) * c->n_kv_heads;
    return std::clamp(device.blocks / blocks, 1, std::min(lazy_blocks(keys, SHORTEST), (int)MAX_CHUNKS));
}

template <class T> cudaError_t attend(const attention_task<T> &t, const lazy_cuda *cuda, cudaStream_t queue)
{
    if constexpr (!std::is_same_v<T, float>) {
        if (by_wgmma(cuda, t.d, t.cap, t.n * t.group)) return lazy_cuda_attend_wgmma(t, queue);
        if (by_mma(cuda, t.d)) return lazy_cuda_attend_mma(t, queue);
    }
    return lazy_cuda_attend_plain(t, queue);
}
} // namespace

/* The smaller of two bounds: MAX_CHUNKS for each row and head, and the rows x heads of all blocks that the device runs
 * at once, whether their tiles are for one row or for many. */
size_t lazy_cuda_max_partials(const lazy_config *config, const lazy_cuda *cuda, int n_rows)
{
    size_t at_once = 0;
    for (int rows : { 1, WGMMA_ROWS / 2, (int)WGMMA_ROWS }) {
        capacity device = capacity_of(cuda, config->head_dim, config->attention_cap, rows);
        at_once = std::max(at_once, (size_t)device.rows * (size_t)device.blocks);
    }
    return std::min((size_t)n_rows * (size_t)config->n_heads * MAX_CHUNKS, at_once);
}

int lazy_cuda_attention(lazy_stream *stream, void *y, const lazy_attending *a, lazy_error *err)
{
    const lazy_config *c = stream->config;
    lazy_cuda_stream *s = lazy_cuda_scratch(stream);
    const lazy_key_range *ranges;
    int code = lazy_cuda_find_ranges(stream, a, &ranges, err);
    if (code) return code;
    if ((code = lazy_cuda_enter(stream->backend, err))) return code;
    return lazy_cuda_with_type(stream, [&](auto type) {
        using T = decltype(type);
        attention_task<T> t = {};
        t.y = (T *)y;
        t.q = (const T *)a->q;
        t.k = (const T *)a->kv.k;
        t.v = (const T *)a->kv.v;
        t.in_play = a->in_play;
        t.ranges = ranges;
        t.partial = s->partial;
        t.tickets = s->tickets;
        t.n = a->n;
        t.n_heads = c->n_heads;
        t.group = c->n_heads / c->n_kv_heads;
        t.d = c->head_dim;
        t.q_stride = a->q_stride;
        t.capacity = a->kv.capacity;
        t.chunks = chunks_of(c, a, lazy_cuda_of(stream));
        t.scale = lazy_attention_scale(c);
        t.cap = lazy_attention_cap(c);
        return lazy_cuda_check(attend(t, lazy_cuda_of(stream), s->queue), "attention", err);
    });
}
