/* scores.c — attention of the query rows to each token in play, pooled over heads and rows. */
#include <string.h>

#include "cpu.h"

typedef struct scoring {
    lazy_stream *stream;
    const lazy_kernels *kernels;
    const float *q; /* one query row: (H, D) */
    lazy_attending a;
    lazy_seen seen;       /* the tokens that the row sees */
    float *probabilities; /* (H, m) */
    float *scores;        /* (m,) */
    int row, n_rows, heavy;
    lazy_pooling pooling;
} scoring;

enum { TOKENS_PER_TASK = 512 };

/* probabilities = scaled, capped q k^T of one key head's query heads and TOKENS_PER_TASK of the tokens the row sees. */
static void multiply_keys(void *job, int task, int worker)
{
    const scoring *t = job;
    const lazy_config *c = t->stream->config;
    int visible = t->seen.end - t->seen.begin, tasks = ceil_div(visible, TOKENS_PER_TASK), g = task / tasks,
        d = c->head_dim;
    int heads_per_key = c->n_heads / c->n_kv_heads, first = task % tasks * TOKENS_PER_TASK,
        n = block_end(task % tasks, TOKENS_PER_TASK, visible) - first;
    const float *q = t->q + g * heads_per_key * d;
    float *scaled = scratch_of(t->stream, worker), scale = lazy_attention_scale(c);
    for (int i = 0; i < heads_per_key * d; i++) scaled[i] = q[i] * scale;
    first += t->seen.begin;
    t->kernels->rows->key_dots(t->probabilities + (int64_t)g * heads_per_key * t->a.m + first, t->a.m, scaled,
                               heads_per_key, kv_row(t->stream, t->a.kv, t->a.kv.k, g, 0), t->stream->backend->kv,
                               t->a.in_play + first, n, d);
    for (int h = 0; h < heads_per_key && c->attention_cap > 0; h++)
        t->kernels->rows->cap_row(t->probabilities + (int64_t)(g * heads_per_key + h) * t->a.m + first, n,
                                  lazy_attention_cap(c));
}

static void normalise_head(void *job, int head, int worker)
{
    const scoring *t = job;
    float *probabilities = t->probabilities + (int64_t)head * t->a.m, visible = (float)(t->seen.end - t->seen.begin);
    for (int begin = t->seen.begin, end; begin < t->seen.end; begin = end) {
        float max = -INFINITY, sum = 0.0f;
        end = head != t->heavy           ? t->seen.end
              : begin < LAZY_LEVEL_ALONE ? begin + 1
                                         : block_end(begin / LAZY_LEVEL_BLOCK, LAZY_LEVEL_BLOCK, t->seen.end);
        t->kernels->rows->online_softmax(probabilities + begin, end - begin, &max, &sum);
        t->kernels->rows->scale_row(probabilities + begin, end - begin, (float)(end - begin) / visible / sum);
    }
}

static void pool_heads(void *job, int task, int worker)
{
    const scoring *t = job;
    int n_heads = t->stream->config->n_heads, begin = task * TOKENS_PER_TASK,
        end = block_end(task, TOKENS_PER_TASK, t->a.m);
    int first = max_int(begin, t->seen.begin), last = min_int(end, t->seen.end);
    bool rms = t->pooling == LAZY_POOLING_RMS;
    double sums[TOKENS_PER_TASK] = { 0 }, n = (double)n_heads * (rms ? 1 : t->n_rows);
    for (int h = 0; h < n_heads; h++) {
        double weight = h == t->heavy ? LAZY_HEAD_WEIGHT : 1.0;
        for (int j = first; j < last; j++) {
            double p = weight * t->probabilities[(int64_t)h * t->a.m + j];
            sums[j - begin] += rms ? p * p : p;
        }
    }
    for (int j = begin; j < end; j++) {
        double mean = sums[j - begin] / n;
        float score = (float)(rms ? sqrt(mean) : mean), earlier = t->scores[j];
        if (!t->row || (rms && (score > earlier || isnan(score)))) t->scores[j] = score;
        else if (!rms) t->scores[j] = earlier + score;
    }
}

int lazy_cpu_scores(lazy_stream *stream, float *scores, const lazy_attending *a, int queries, lazy_pooling pooling,
                    int heavy, int first_asking, lazy_error *err)
{
    const lazy_config *c = stream->config;
    lazy_cpu_stream *scratch = (lazy_cpu_stream *)stream;
    int first = a->n > queries ? a->n - queries : 0, code = LAZY_OK;
    while (a->rows[first] < first_asking) first++; /* ends: the last row is the query token, which is new */
    scoring t = {
        .stream = stream, .kernels = kernels_of(stream), .a = *a, .scores = scores, .pooling = pooling, .heavy = heavy
    };
    t.probabilities = scratch->probabilities;
    t.n_rows = a->n - first;
    lazy_cpu_see(scratch->seen, a);
    bool has_raw_scores = scratch->has_raw_scores && t.n_rows == 1;
    scratch->has_raw_scores = false; /* overwritten below */
    for (t.row = 0; t.row < t.n_rows && !code; t.row++) {
        t.q = (const float *)a->q + (int64_t)(first + t.row) * a->q_stride;
        t.seen = scratch->seen[first + t.row];
        int tasks = has_raw_scores ? 0 : c->n_kv_heads * ceil_div(t.seen.end - t.seen.begin, TOKENS_PER_TASK);
        code = lazy_cpu_run(stream, multiply_keys, &t, tasks, err);
        if (!code) code = lazy_cpu_run(stream, normalise_head, &t, c->n_heads, err);
        if (!code) code = lazy_cpu_run(stream, pool_heads, &t, ceil_div(a->m, TOKENS_PER_TASK), err);
    }
    return code;
}
