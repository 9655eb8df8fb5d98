#include "values.h"

namespace
{
enum { THREADS = 256 };

__global__ void __launch_bounds__(THREADS)
    find_ranges(lazy_key_range *of_row, const int32_t *rows, int n, const int32_t *in_play, int m, int window)
{
    begin_kernel();
    int r = blockIdx.x * THREADS + threadIdx.x;
    if (r >= n) return;
    int end = lazy_first_from(in_play, m, rows[r] + 1);
    of_row[r] = { window > rows[r] ? 0 : lazy_first_from(in_play, end, rows[r] - window + 1), end };
}
} // namespace

void lazy_cuda_forget_ranges(lazy_stream *stream)
{
    lazy_cuda_scratch(stream)->full.n = lazy_cuda_scratch(stream)->local.n = 0;
}

int lazy_cuda_find_ranges(lazy_stream *stream, const lazy_attending *a, const lazy_key_range **out, lazy_error *err)
{
    lazy_cuda_stream *s = lazy_cuda_scratch(stream);
    lazy_ranges *ranges = a->window == INT32_MAX ? &s->full : &s->local;
    *out = ranges->of_row;
    if (ranges->rows == a->rows && ranges->n == a->n && ranges->in_play == a->in_play && ranges->m == a->m &&
        ranges->window == a->window)
        return LAZY_OK;
    *ranges = { ranges->of_row, a->rows, a->in_play, a->n, a->m, a->window };
    int code = lazy_cuda_run(stream, "finding visible tokens", err, find_ranges, lazy_blocks(a->n, THREADS), THREADS,
                             ranges->of_row, a->rows, a->n, a->in_play, a->m, a->window);
    if (code) ranges->n = 0;
    return code;
}
