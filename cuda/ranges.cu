#include "ranges.h"

namespace
{
enum { THREADS = 256 };

/* How many positions of in_play are <= position. */
__device__ __forceinline__ int count_up_to(int position, const int32_t *in_play, int m)
{
    int low = 0, high = m;
    while (low < high) {
        int middle = (low + high) / 2;
        if (in_play[middle] <= position) low = middle + 1;
        else high = middle;
    }
    return low;
}

__global__ void __launch_bounds__(THREADS)
    find_ranges(lazy_key_range *of_row, const int32_t *rows, int n, const int32_t *in_play, int m, int window)
{
    int r = blockIdx.x * THREADS + threadIdx.x;
    if (r >= n) return;
    int end = count_up_to(rows[r], in_play, m);
    of_row[r] = { window > rows[r] ? 0 : count_up_to(rows[r] - window, in_play, end), end };
}
} // namespace

void lazy_cuda_forget_ranges(lazy_stream *stream)
{
    lazy_cuda_scratch(stream)->full.n = lazy_cuda_scratch(stream)->local.n = 0;
}

int lazy_cuda_find_ranges(lazy_stream *stream, const int32_t *rows, int n, const int32_t *in_play, int m, int window,
                          const lazy_key_range **out, lazy_error *err)
{
    lazy_cuda_stream *s = lazy_cuda_scratch(stream);
    lazy_ranges *ranges = window == INT32_MAX ? &s->full : &s->local;
    *out = ranges->of_row;
    if (ranges->rows == rows && ranges->n == n && ranges->in_play == in_play && ranges->m == m &&
        ranges->window == window)
        return LAZY_OK;
    *ranges = { ranges->of_row, rows, in_play, n, m, window };
    int code = lazy_cuda_op(stream, "finding visible tokens", err, [&](cudaStream_t queue) {
        return lazy_launch(find_ranges, dim3((n + THREADS - 1) / THREADS), dim3(THREADS), 0, queue, ranges->of_row,
                           rows, n, in_play, m, window);
    });
    if (code) ranges->n = 0;
    return code;
}
