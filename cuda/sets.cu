/* sets.cu — operations on ascending lists of positions: mark, filter, regroup. */
#include "scan.h"

namespace
{
enum { THREADS = 256 };

__global__ void __launch_bounds__(THREADS) mark_rows(int32_t *depth, const int32_t *rows, int n, int value)
{
    begin_kernel();
    int r = blockIdx.x * THREADS + threadIdx.x;
    if (r < n) depth[rows[r]] = value;
}

/* Runs twice: first without `out`, and writes how many positions of each block are wanted; then writes these. */
__global__ void __launch_bounds__(SCAN_THREADS)
    filter_positions(int32_t *out, int32_t *n_out, int *counts, const int32_t *positions, int n, const int32_t *depth,
                     int low, int high)
{
    begin_kernel();
    __shared__ int scratch[32];
    int i = blockIdx.x * SCAN_THREADS + threadIdx.x, position = i < n ? positions[i] : 0;
    bool wanted = i < n && depth[position] >= low && depth[position] <= high;
    int before = sum_before_in_grid((int)wanted, out ? counts : nullptr, scratch);
    if (out && wanted) out[before] = position;
    if (threadIdx.x < SCAN_THREADS - 1) return;
    if (!out) counts[blockIdx.x] = before + wanted;
    else if (blockIdx.x == gridDim.x - 1) *n_out = before + wanted;
}

/* Index of `value` in the ascending list of n; -1 if absent. */
__device__ __forceinline__ int find(const int32_t *list, int n, int32_t value)
{
    int at = lazy_first_from(list, n, value);
    return at < n && list[at] == value ? at : -1;
}

template <class T> __device__ __forceinline__ void copy_row(T *__restrict__ to, const T *__restrict__ from, int d)
{
    for (int i = threadIdx.x; i < d; i += THREADS) to[i] = from[i];
}

/* One block per row: blocks 0 … n_new-1 fill y from x or, for revived tokens, from aux; the others store evicted rows
 * in aux, if there is one. Revived and evicted positions are disjoint, so the blocks need no order. */
template <class T>
__global__ void __launch_bounds__(THREADS) move_rows(T *y, const int32_t *new_rows, int n_new, const T *x,
                                                     const int32_t *rows, int n, T *aux, int d, int32_t *n_revived)
{
    begin_kernel();
    int i = blockIdx.x;
    if (i < n_new) {
        int32_t position = new_rows[i];
        int r = find(rows, n, position);
        copy_row(y + (int64_t)i * d, r >= 0 ? x + (int64_t)r * d : aux + (int64_t)position * d, d);
        if (r < 0 && threadIdx.x == 0) atomicAdd(n_revived, 1);
        return;
    }
    int r = i - n_new;
    if (aux && find(new_rows, n_new, rows[r]) < 0) copy_row(aux + (int64_t)rows[r] * d, x + (int64_t)r * d, d);
}
} // namespace

int lazy_cuda_mark(lazy_stream *stream, int32_t *depth, const int32_t *rows, int n, int value, lazy_error *err)
{
    return lazy_cuda_run(stream, "marking depths", err, mark_rows, lazy_blocks(n, THREADS), THREADS, depth, rows, n,
                         value);
}

int lazy_cuda_filter(lazy_stream *stream, int32_t *out, int *n_out, const int32_t *positions, int n,
                     const int32_t *depth, int low, int high, lazy_error *err)
{
    lazy_cuda_forget_ranges(stream);
    lazy_cuda_stream *s = lazy_cuda_scratch(stream);
    int code = LAZY_OK, blocks = n / SCAN_THREADS + 1;
    for (int32_t *to : { (int32_t *)nullptr, out })
        if (!code)
            code = lazy_cuda_run(stream, "filtering positions", err, filter_positions, blocks, SCAN_THREADS, to,
                                 &s->found->count, (int *)s->of_blocks, positions, n, depth, low, high);
    if (code || !n_out) return code;
    code = lazy_cuda_wait(stream, err);
    *n_out = s->found->count;
    return code;
}

int lazy_cuda_regroup(lazy_stream *stream, void *y, const int32_t *new_rows, int n_new, const void *x,
                      const int32_t *rows, int n, void *aux, int d, int32_t *n_revived, lazy_error *err)
{
    return lazy_cuda_with_type(stream, [&](auto type) {
        using T = decltype(type);
        return lazy_cuda_run(stream, "regrouping rows", err, move_rows<T>, n_new + n, THREADS, (T *)y, new_rows, n_new,
                             (const T *)x, rows, n, (T *)aux, d, n_revived);
    });
}
