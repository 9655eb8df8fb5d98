/* experts.cu — FFNs of experts: chooses the experts of each row, and adds up their weighted outputs.
 *
 * With up to LAZY_PAIR_ROWS rows, each pair of a row and one of its experts is a GEMV of its own. More rows are sorted
 * by expert on the device; the host waits once for the number that each expert has. */
#include <algorithm>

#include "scan.h"

namespace
{
enum { THREADS = 256 };

/* The experts of each row with the greatest logits, ascending, and their weights. One warp for a row.
 * logits: (n, n_experts); weights, chosen: (n, k). */
__global__ void __launch_bounds__(32)
    route_rows(float *weights, int32_t *chosen, const float *logits, int n_experts, int k, bool normed)
{
    begin_kernel();
    __shared__ float row[LAZY_MAX_EXPERTS];
    __shared__ bool taken[LAZY_MAX_EXPERTS];
    int lane = threadIdx.x; /* alone reads and writes entries lane, lane + 32, … of these */
    const float *from = logits + (int64_t)blockIdx.x * n_experts;
    float zero = 0.0f, top = -INFINITY, total = 0.0f, of_chosen = 0.0f;
    for (int e = lane; e < n_experts; e += 32) {
        zero += from[e] * 0.0f; /* NaN beside a NaN or an Inf */
        row[e] = from[e] == from[e] ? from[e] : -INFINITY;
        taken[e] = false;
        top = fmaxf(top, row[e]);
    }
    top = lazy_warp_max(top);
    for (int i = 0; i < k; i++) {
        int best = INT32_MAX;
        float greatest = -INFINITY;
        for (int e = lane; e < n_experts; e += 32) {
            if (taken[e] || (best < INT32_MAX && !(row[e] > greatest))) continue;
            best = e;
            greatest = row[e];
        }
        for (int step = 16; step; step /= 2) {
            int other = __shfl_xor_sync(~0u, best, step);
            float value = __shfl_xor_sync(~0u, greatest, step);
            if (value < greatest || (value == greatest && other > best)) continue;
            best = other;
            greatest = value;
        }
        if (best % 32 == lane) taken[best] = true;
    }
    for (int e = lane; e < n_experts; e += 32) {
        total += expf(row[e] - top);
        if (taken[e]) of_chosen += expf(row[e] - top);
    }
    zero = lazy_warp_sum(zero);
    total = lazy_warp_sum(normed ? of_chosen : total);
    int at = blockIdx.x * k;
    for (int first = 0; first < n_experts; first += 32) {
        int e = first + lane;
        bool yes = e < n_experts && taken[e];
        unsigned votes = __ballot_sync(~0u, yes);
        if (yes) {
            int mine = at + __popc(votes & ((1u << lane) - 1));
            chosen[mine] = e;
            weights[mine] = expf(row[e] - top) / total + zero;
        }
        at += __popc(votes);
    }
}

/* counts[e] = how many of the pairs chose expert e. One block for an expert. chosen: (n_pairs,). */
__global__ void __launch_bounds__(THREADS) count_pairs(int32_t *counts, const int32_t *chosen, int n_pairs)
{
    begin_kernel();
    __shared__ int scratch[32];
    int own = 0;
    for (int i = threadIdx.x; i < n_pairs; i += THREADS) own += chosen[i] == (int)blockIdx.x;
    int all = lazy_block_sum(own, scratch);
    if (threadIdx.x == 0) counts[blockIdx.x] = all;
}

/* Sorts the pairs by expert: the row of each, and the place of each pair. One block for an expert. */
__global__ void __launch_bounds__(SCAN_THREADS)
    sort_pairs(int32_t *sorted_rows, int32_t *places, const int32_t *counts, const int32_t *chosen, int n_pairs, int k)
{
    begin_kernel();
    __shared__ int scratch[32];
    int before = 0, expert = blockIdx.x;
    for (int e = threadIdx.x; e < expert; e += SCAN_THREADS) before += counts[e];
    int at = lazy_block_sum(before, scratch);
    for (int first = 0; first < n_pairs; first += SCAN_THREADS) {
        int i = first + threadIdx.x, here;
        bool yes = i < n_pairs && chosen[i] == expert;
        int place = at + sum_before((int)yes, &here, scratch);
        if (yes) {
            sorted_rows[place] = i / k;
            places[i] = place;
        }
        at += here;
    }
}

/* to[i, :] = x[rows[i], :]. Grid: (n, blocks of d). */
template <class T> __global__ void __launch_bounds__(THREADS) gather(T *to, const T *x, const int32_t *rows, int d)
{
    begin_kernel();
    int i = blockIdx.y * THREADS + threadIdx.x;
    if (i < d) to[(int64_t)blockIdx.x * d + i] = x[(int64_t)rows[blockIdx.x] * d + i];
}

/* y[r, :] (+)= sum over j of weights[r, j] * outputs[place of (r, j), :]. places: (n, k), or NULL: pair by pair.
 * Grid: (n, blocks of d). */
template <class T>
__global__ void __launch_bounds__(THREADS)
    add_outputs(T *y, const T *outputs, const float *weights, const int32_t *places, int k, int d, bool accumulate)
{
    begin_kernel();
    int i = blockIdx.y * THREADS + threadIdx.x, first = blockIdx.x * k;
    if (i >= d) return;
    T *to = y + (int64_t)blockIdx.x * d + i;
    float sum = accumulate ? lazy_wide(*to) : 0.0f;
    for (int pair = first; pair < first + k; pair++)
        sum += weights[pair] * lazy_wide(outputs[(int64_t)(places ? places[pair] : pair) * d + i]);
    lazy_narrow(to, sum);
}

/* True if each matrix has one part, and all have the same type, as multiply_pairs asks. */
bool are_alike(const lazy_matrix *w, int n)
{
    return std::all_of(w, w + n, [&](const lazy_matrix &other) {
        return other.n_parts == 1 && other.part[0].dtype == w->part[0].dtype;
    });
}

/* The outputs of the experts for the rows of x, sorted by expert; places are set. */
int multiply_sorted(lazy_stream *stream, const void *x, int n, const lazy_experts *experts, lazy_error *err)
{
    lazy_cuda_stream *s = lazy_cuda_scratch(stream);
    int n_experts = experts->router.rows, d = experts->router.cols, k = stream->config->experts_per_token,
        n_pairs = n * k;
    size_t row_bytes = lazy_row_bytes(lazy_cuda_of(stream)->type, d);
    int32_t counts[LAZY_MAX_EXPERTS];
    const char *what = "sorting rows by expert";
    int code = lazy_cuda_run(stream, what, err, count_pairs, n_experts, THREADS, s->counts, s->chosen, n_pairs);
    if (!code)
        code = lazy_cuda_run(stream, what, err, sort_pairs, n_experts, SCAN_THREADS, s->sorted_rows, s->places,
                             s->counts, s->chosen, n_pairs, k);
    if (!code)
        code = lazy_cuda_with_type(stream, [&](auto type) {
            using T = decltype(type);
            return lazy_cuda_run(stream, what, err, gather<T>, dim3(n_pairs, lazy_blocks(d, THREADS)), THREADS,
                                 (T *)s->expert_states, (const T *)x, s->sorted_rows, d);
        });
    if (!code) code = lazy_cuda_download(stream, counts, s->counts, (size_t)n_experts * sizeof *counts, err);
    for (int e = 0, first = 0; e < n_experts && !code; first += counts[e++]) {
        if (!counts[e]) continue;
        void *states = (char *)s->expert_states + first * row_bytes; /* of this expert's rows, then its outputs */
        code = lazy_cuda_gated(stream, s->expert_rows, states, counts[e], &experts->gate_up[e], err);
        if (!code) code = lazy_cuda_matmul(stream, states, s->expert_rows, counts[e], &experts->down[e], false, err);
    }
    return code;
}
} // namespace

int lazy_cuda_mix_experts(lazy_stream *stream, void *y, const void *x, int n, const lazy_experts *experts,
                          bool accumulate, lazy_error *err)
{
    lazy_cuda_stream *s = lazy_cuda_scratch(stream);
    const lazy_config *c = stream->config;
    int n_experts = experts->router.rows, d = experts->router.cols, k = c->experts_per_token;
    bool sorted = n > LAZY_PAIR_ROWS || !are_alike(experts->gate_up, n_experts) || !are_alike(experts->down, n_experts);
    int code = lazy_cuda_f32_product(stream, s->router_logits, x, n, &experts->router, err);
    if (!code)
        code = lazy_cuda_run(stream, "routing", err, route_rows, n, 32, s->weights, s->chosen, s->router_logits,
                             n_experts, k, c->normed_experts);
    if (!code && sorted) code = multiply_sorted(stream, x, n, experts, err);
    else if (!code) {
        code = lazy_cuda_multiply_pairs(stream, s->expert_rows, x, n * k, k, s->chosen, experts->gate_up, true, err);
        if (!code)
            code = lazy_cuda_multiply_pairs(stream, s->expert_states, s->expert_rows, n * k, 1, s->chosen,
                                            experts->down, false, err);
    }
    if (code) return code;
    return lazy_cuda_with_type(stream, [&](auto type) {
        using T = decltype(type);
        return lazy_cuda_run(stream, "adding the experts' outputs", err, add_outputs<T>,
                             dim3(n, lazy_blocks(d, THREADS)), THREADS, (T *)y, (const T *)s->expert_states, s->weights,
                             sorted ? s->places : nullptr, k, d, accumulate);
    });
}
