/* scores.c — how much the query rows attend to each token in play. */
#include <math.h>
#include <string.h>

#include "cpu.h"

typedef struct scoring {
    lazy_stream *stream;
    const lazy_cpu_stream *scratch;
    const float *qkv; /* of the query rows: (n, width) */
    int n, width;
    lazy_kv kv;
    const int32_t *in_play; /* (m,) */
    int m;
    float *scores;
} scoring;

/* The shares of one head, summed over the query rows, in shares[head, :]. */
static void share_head(void *job, int head, int worker)
{
    (void)worker;
    const scoring *t = job;
    const lazy_config *c = t->stream->config;
    const lazy_kernels *kernels = kernels_of(t->stream);
    int d = c->head_dim, kv_width = c->n_kv_heads * d, g = head / (c->n_heads / c->n_kv_heads);
    float *shares = t->scratch->shares + (int64_t)head * 2 * t->m, *row = shares + t->m, scale = 1.0f / sqrtf((float)d);
    memset(shares, 0, (size_t)t->m * sizeof *shares);
    for (int r = 0; r < t->n; r++) {
        int limit = t->scratch->limits[r];
        float max = -INFINITY, sum = 0.0f;
        kernels->key_dots(row, t->m, t->qkv + (int64_t)r * t->width + head * d, 1, (const float *)t->kv.k + g * d, kv_width, t->in_play,
                          limit, d);
        kernels->soften(row, limit, scale, &max, &sum);
        for (int j = 0; j < limit; j++) shares[j] += row[j] / sum;
    }
}

enum { TOKENS_PER_TASK = 2048 };

static void average_heads(void *job, int task, int worker)
{
    (void)worker;
    const scoring *t = job;
    int n_heads = t->stream->config->n_heads;
    for (int j = task * TOKENS_PER_TASK; j < t->m && j < (task + 1) * TOKENS_PER_TASK; j++) {
        double sum = 0;
        for (int h = 0; h < n_heads; h++) sum += t->scratch->shares[(int64_t)h * 2 * t->m + j];
        t->scores[j] = (float)(sum / ((double)n_heads * t->n));
    }
}

int lazy_cpu_scores(lazy_stream *stream, float *scores, const void *qkv, const int32_t *rows, int n, int queries, int first_new, lazy_kv kv,
                    const int32_t *in_play, int m, lazy_error *err)
{
    const lazy_config *c = stream->config;
    int first = n > queries ? n - queries : 0;
    while (rows[first] < first_new) first++; /* the last row is the query token: new */
    scoring t = { .stream = stream,
                  .scratch = (lazy_cpu_stream *)stream,
                  .n = n - first,
                  .width = (c->n_heads + 2 * c->n_kv_heads) * c->head_dim,
                  .kv = kv,
                  .in_play = in_play,
                  .m = m,
                  .scores = scores };
    t.qkv = (const float *)qkv + (int64_t)first * t.width;
    lazy_cpu_limits(t.scratch->limits, rows + first, t.n, in_play, m);
    int code = lazy_cpu_run(stream, share_head, &t, c->n_heads, err);
    return code ? code : lazy_cpu_run(stream, average_heads, &t, (m + TOKENS_PER_TASK - 1) / TOKENS_PER_TASK, err);
}
