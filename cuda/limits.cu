#include "limits.h"

namespace
{
enum { THREADS = 256 };

__global__ void __launch_bounds__(THREADS) count_visible(int32_t *limits, const int32_t *rows, int n, const int32_t *in_play, int m)
{
    int r = blockIdx.x * THREADS + threadIdx.x;
    if (r >= n) return;
    int low = 0, high = m;
    while (low < high) {
        int middle = (low + high) / 2;
        if (in_play[middle] <= rows[r]) low = middle + 1;
        else high = middle;
    }
    limits[r] = low;
}
} // namespace

int lazy_cuda_limits(lazy_stream *stream, const int32_t *rows, int n, const int32_t *in_play, int m, lazy_error *err)
{
    return lazy_cuda_op(stream, "counting visible tokens", err, [&](const lazy_queue &queue) {
        return lazy_launch(count_visible, dim3((n + THREADS - 1) / THREADS), dim3(THREADS), 0, queue, lazy_cuda_scratch(stream)->limits,
                           rows, n, in_play, m);
    });
}
