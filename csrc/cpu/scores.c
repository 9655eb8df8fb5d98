/* scores.c — how much the query rows attend to each token in play. */
#include <math.h>
#include <string.h>

#include "cpu.h"

typedef struct scoring {
    lazy_stream *stream;
    const lazy_kernels *kernels;
    const float *q; /* one query row: (H, D) */
    lazy_kv kv;
    const int32_t *in_play;
    int m, visible;  /* tokens in play, and how many of them the row sees */
    float *shares;   /* (H, m) */
    float *scores;   /* (m,) */
    int row, n_rows; /* the scores are the mean over rows */
} scoring;

enum { TOKENS_PER_TASK = 512 };

static int token_tasks(int n) { return (n + TOKENS_PER_TASK - 1) / TOKENS_PER_TASK; }
static int last_token(int task, int n) { return (task + 1) * TOKENS_PER_TASK < n ? (task + 1) * TOKENS_PER_TASK : n; }

/* shares = q k^T, to the base 2, of the heads that share a key head */
static void multiply_keys(void *job, int task, int worker)
{
    const scoring *t = job;
    const lazy_config *c = t->stream->config;
    int tasks = token_tasks(t->visible), g = task / tasks, first = task % tasks * TOKENS_PER_TASK, d = c->head_dim;
    int group = c->n_heads / c->n_kv_heads;
    const float *q = t->q + g * group * d;
    float *scaled = scratch_of(t->stream, worker), scale = (float)(M_LOG2E / sqrt(d));
    for (int i = 0; i < group * d; i++) scaled[i] = q[i] * scale;
    t->kernels->key_dots(t->shares + (int64_t)g * group * t->m + first, t->m, scaled, group,
                         (const float *)t->kv.k + (int64_t)g * t->kv.capacity * d, t->in_play + first,
                         last_token(task % tasks, t->visible) - first, d);
}

static void normalise_head(void *job, int head, int worker)
{
    (void)worker;
    const scoring *t = job;
    float *shares = t->shares + (int64_t)head * t->m, max = -INFINITY, sum = 0.0f;
    t->kernels->soften(shares, t->visible, &max, &sum);
    t->kernels->scale_row(shares, t->visible, 1.0f / sum);
}

static void average_heads(void *job, int task, int worker)
{
    (void)worker;
    const scoring *t = job;
    int n_heads = t->stream->config->n_heads, end = last_token(task, t->m);
    for (int j = task * TOKENS_PER_TASK; j < end; j++) {
        double sum = 0;
        for (int h = 0; h < n_heads && j < t->visible; h++) sum += t->shares[(int64_t)h * t->m + j];
        float share = (float)(sum / ((double)n_heads * t->n_rows));
        t->scores[j] = t->row ? t->scores[j] + share : share;
    }
}

int lazy_cpu_scores(lazy_stream *stream, float *scores, const void *qkv, const int32_t *rows, int n, int queries, int first_new, lazy_kv kv,
                    const int32_t *in_play, int m, lazy_error *err)
{
    const lazy_config *c = stream->config;
    const lazy_cpu_stream *scratch = (lazy_cpu_stream *)stream;
    int first = n > queries ? n - queries : 0, code = LAZY_OK;
    while (rows[first] < first_new) first++; /* the last row is the query token: new */
    scoring t = { .stream = stream,
                  .kernels = kernels_of(stream),
                  .kv = kv,
                  .in_play = in_play,
                  .m = m,
                  .shares = scratch->shares,
                  .scores = scores,
                  .n_rows = n - first };
    lazy_cpu_limits(scratch->limits, rows + first, t.n_rows, in_play, m);
    for (t.row = 0; t.row < t.n_rows && !code; t.row++) {
        t.q = (const float *)qkv + (int64_t)(first + t.row) * (c->n_heads + 2 * c->n_kv_heads) * c->head_dim;
        t.visible = scratch->limits[t.row];
        code = lazy_cpu_run(stream, multiply_keys, &t, c->n_kv_heads * token_tasks(t.visible), err);
        if (!code) code = lazy_cpu_run(stream, normalise_head, &t, c->n_heads, err);
        if (!code) code = lazy_cpu_run(stream, average_heads, &t, token_tasks(m), err);
    }
    return code;
}
