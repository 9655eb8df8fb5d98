/* experts.c — FFNs of experts: chooses the experts of each row, and adds up their weighted outputs. */
#include <string.h>

#include "cpu.h"

typedef struct mixture {
    lazy_stream *stream;
    float *y; /* (n, d) */
    int n, n_experts, d;
    bool accumulate;
} mixture;

/* The experts with the greatest logits, ascending; the result is 0, or NaN if a logit is no finite number. */
static float choose(int32_t *chosen, int n_chosen, const float *logits, int n)
{
    bool taken[LAZY_MAX_EXPERTS] = { false };
    for (int i = 0; i < n_chosen; i++) {
        int best = -1;
        for (int e = 0; e < n; e++)
            if (!taken[e] && (best < 0 || logits[e] > logits[best])) best = e;
        taken[best] = true;
    }
    float zero = 0.0f;
    for (int e = 0; e < n; e++) {
        zero += logits[e] * 0.0f;
        if (taken[e]) *chosen++ = e;
    }
    return zero;
}

static void route_rows(void *job, int first, int end, int worker)
{
    const mixture *m = job;
    const lazy_cpu_stream *s = (lazy_cpu_stream *)m->stream;
    const lazy_row_kernels *kernels = kernels_of(m->stream)->rows;
    int k = m->stream->config->experts_per_token;
    for (int r = first; r < end; r++) {
        float *logits = s->router_logits + (int64_t)r * m->n_experts, max = -INFINITY, sum = 0.0f, of_chosen = 0.0f;
        int32_t *chosen = s->places + (int64_t)r * k;
        float *weights = s->weights + (int64_t)r * k, zero = choose(chosen, k, logits, m->n_experts);
        kernels->scale_row(logits, m->n_experts, (float)M_LOG2E);
        kernels->online_softmax(logits, m->n_experts, &max, &sum);
        for (int i = 0; i < k; i++) of_chosen += logits[chosen[i]];
        if (m->stream->config->normed_experts) sum = of_chosen;
        for (int i = 0; i < k; i++) weights[i] = logits[chosen[i]] / sum + zero;
    }
}

/* Sorts the pairs of a row and an expert by expert, then row. begin[e]: the first pair of expert e. places: in, the
 * pairs' experts; out, where they are sorted to. */
static void sort_by_expert(const mixture *m, int32_t begin[LAZY_MAX_EXPERTS + 1])
{
    const lazy_cpu_stream *s = (lazy_cpu_stream *)m->stream;
    int k = m->stream->config->experts_per_token, next[LAZY_MAX_EXPERTS] = { 0 };
    for (int i = 0; i < m->n * k; i++) next[s->places[i]]++;
    begin[0] = 0;
    for (int e = 0; e < m->n_experts; e++) {
        begin[e + 1] = begin[e] + next[e];
        next[e] = begin[e];
    }
    for (int i = 0; i < m->n * k; i++) {
        s->places[i] = next[s->places[i]]++;
        s->sorted_rows[s->places[i]] = i / k;
    }
}

static void add_outputs(void *job, int first, int end, int worker)
{
    const mixture *m = job;
    const lazy_cpu_stream *s = (lazy_cpu_stream *)m->stream;
    int d = m->d, k = m->stream->config->experts_per_token;
    for (int r = first; r < end; r++) {
        float *y = m->y + (int64_t)r * d;
        if (!m->accumulate) memset(y, 0, (size_t)d * sizeof *y);
        kernels_of(m->stream)->rows->value_sums(y, s->weights + (int64_t)r * k, k, 1, s->outputs, LAZY_F32,
                                                s->places + (int64_t)r * k, k, d);
    }
}

int lazy_cpu_mix_experts(lazy_stream *stream, void *y, const void *x, int n, const lazy_experts *experts,
                         bool accumulate, lazy_error *err)
{
    lazy_cpu_stream *s = (lazy_cpu_stream *)stream;
    mixture m = { stream, y, n, experts->router.rows, experts->router.cols, accumulate };
    int32_t begin[LAZY_MAX_EXPERTS + 1];
    int code = lazy_cpu_multiply_router(stream, s->router_logits, x, n, &experts->router, err);
    if (!code) code = lazy_cpu_run_rows(stream, route_rows, &m, n, err);
    if (code) return code;
    sort_by_expert(&m, begin);
    lazy_sorted_rows sorted = { begin, s->sorted_rows, m.n_experts, n };
    code = lazy_cpu_multiply_experts(stream, s->expert_rows, x, &sorted, experts->gate_up, err);
    sorted.rows = NULL;
    if (!code) code = lazy_cpu_multiply_experts(stream, s->outputs, s->expert_rows, &sorted, experts->down, err);
    return code ? code : lazy_cpu_run_rows(stream, add_outputs, &m, n, err);
}
