/* rows.c — ops on single rows: RMS norm, RoPE, surprisal, argmax. */
#include <stdatomic.h>

#include "../error.h"
#include "cpu.h"

typedef struct norming {
    lazy_stream *stream;
    float *y;       /* (n, d) */
    const float *x; /* (n, d) */
    const float *weight;
    int n, d;
    float eps;
    bool accumulate;
    atomic_bool bad; /* a value of x is NaN or Inf */
} norming;

static void norm_rows(void *job, int first, int end, int worker)
{
    norming *t = job;
    const lazy_row_kernels *kernels = kernels_of(t->stream)->rows;
    for (int r = first; r < end; r++) {
        float *y = t->y + (int64_t)r * t->d;
        const float *x = t->x + (int64_t)r * t->d;
        if (t->stream->config->layer_norm) {
            kernels->center_row(y, x, t->d);
            x = y;
        }
        if (!kernels->norm_row(y, x, t->weight, t->d, t->eps, t->accumulate))
            atomic_store_explicit(&t->bad, true, memory_order_relaxed);
    }
}

int lazy_cpu_rmsnorm(lazy_stream *stream, void *y, const void *x, int n, int d, const float *weight, float eps,
                     bool accumulate, lazy_error *err)
{
    norming t = { stream, y, x, weight, n, d, eps, accumulate, false };
    return lazy_cpu_run_rows(stream, norm_rows, &t, n, err);
}

int lazy_cpu_checked_rmsnorm(lazy_stream *stream, void *y, const void *x, int n, int d, const float *weight, float eps,
                             int layer, int32_t *first_bad, lazy_error *err)
{
    norming t = { stream, y, x, weight, n, d, eps, false, false };
    int code = lazy_cpu_run_rows(stream, norm_rows, &t, n, err);
    if (t.bad) *first_bad = min_int(*first_bad, layer);
    return code;
}

typedef struct rotating {
    lazy_stream *stream;
    float *q, *k_v; /* (n, H D) or NULL; (n, 2 G D) or NULL; */
    int stride;     /*   so many values from one row to the next */
    const int32_t *rows;
    int n;
    lazy_kv kv;
    const float *q_rope, *k_rope, *q_norm, *k_norm;
    float eps;
    atomic_bool too_large; /* a key or value is beyond the range of its type */
} rotating;

/* Rotates the pairs (i, i + D/2) of one head by the angles of its position, in place. */
static void rotate_head(float *head, const float *rope, int head_dim)
{
    int half = head_dim / 2;
    for (int i = 0; i < half; i++) {
        float a = head[i], b = head[half + i], c = rope[i], s = rope[half + i];
        head[i] = a * c - b * s;
        head[half + i] = b * c + a * s;
    }
}

/* norm: (D,) or NULL */
static void turn_head(const rotating *t, float *head, const float *rope, const float *norm)
{
    const lazy_config *c = t->stream->config;
    const lazy_row_kernels *kernels = kernels_of(t->stream)->rows;
    if (norm && c->layer_norm) kernels->center_row(head, head, c->head_dim);
    if (norm && !c->late_qk_norm) kernels->norm_row(head, head, norm, c->head_dim, t->eps, false);
    rotate_head(head, rope, c->head_dim);
    if (norm && c->late_qk_norm) kernels->norm_row(head, head, norm, c->head_dim, t->eps, false);
}

static void rotate_rows(void *job, int first, int end, int worker)
{
    rotating *t = job;
    const lazy_config *c = t->stream->config;
    const lazy_kernels *kernels = kernels_of(t->stream);
    lazy_dtype type = t->stream->backend->kv;
    bool fits = true, wide = t->q_norm && c->wide_qk_norm;
    const float *q_norm = wide ? NULL : t->q_norm, *k_norm = wide ? NULL : t->k_norm; /* of one head */
    int d = c->head_dim, kv_width = c->n_kv_heads * d,
        step = q_norm && c->layer_norm ? d : 0; /* from one head's weights to the next one's */
    for (int r = first; r < end; r++) {
        float *q = t->q ? t->q + (int64_t)r * t->stride : NULL, *k = t->k_v ? t->k_v + (int64_t)r * t->stride : NULL;
        int64_t at = (int64_t)t->rows[r] * d;
        if (wide && q) kernels->rows->norm_row(q, q, t->q_norm, c->n_heads * d, t->eps, false);
        if (wide && k) kernels->rows->norm_row(k, k, t->k_norm, kv_width, t->eps, false);
        for (int h = 0; h < c->n_heads && q; h++)
            turn_head(t, q + h * d, t->q_rope + at, step ? q_norm + h * step : q_norm);
        for (int g = 0; g < c->n_kv_heads && k; g++) {
            const float *v = k + kv_width;
            turn_head(t, k + g * d, t->k_rope + at, step ? k_norm + g * step : k_norm);
            fits &= lazy_narrow(kv_row(t->stream, t->kv, t->kv.k, g, t->rows[r]), k + g * d, type, d);
            fits &= lazy_narrow(kv_row(t->stream, t->kv, t->kv.v, g, t->rows[r]), v + g * d, type, d);
        }
    }
    if (!fits) atomic_store_explicit(&t->too_large, true, memory_order_relaxed);
}

int lazy_cpu_refuse_range(const lazy_stream *stream, lazy_error *err)
{
    if (stream->backend->kv == LAZY_F16)
        return lazy_invalid(
            err, "a key or value is beyond 65504, the largest number of kv=\"f16\": use \"bf16\" or \"f32\"");
    return lazy_invalid(err, "a key or value is beyond 3.39e38, the largest number of kv=\"bf16\": use kv=\"f32\"");
}

int lazy_cpu_rotate(lazy_stream *stream, void *q, void *k_v, int stride, const int32_t *rows, int n, lazy_kv kv,
                    const float *q_rope, const float *k_rope, const float *q_norm, const float *k_norm, float eps,
                    lazy_error *err)
{
    rotating t = { stream, q, k_v, stride, rows, n, kv, q_rope, k_rope, q_norm, k_norm, eps, false };
    int code = lazy_cpu_run_rows(stream, rotate_rows, &t, n, err);
    return !code && t.too_large ? lazy_cpu_refuse_range(stream, err) : code;
}

typedef struct surprising {
    lazy_stream *stream;
    float *surprisal; /* (n,) */
    float *logits;    /* (n, vocab) */
    int vocab;
    const int32_t *ids;
} surprising;

static void surprise_row(void *job, int r, int worker)
{
    const surprising *t = job;
    float *row = t->logits + (int64_t)r * t->vocab, max = -INFINITY, sum = 0.0f;
    kernels_of(t->stream)->rows->scale_row(row, t->vocab, (float)M_LOG2E);
    float own = row[t->ids[r]];
    kernels_of(t->stream)->rows->online_softmax(row, t->vocab, &max, &sum);
    t->surprisal[r] = (float)(M_LN2 * (log2(sum) + max - own));
}

int lazy_cpu_surprisal(lazy_stream *stream, float *surprisal, float *logits, int n, int vocab, const int32_t *ids,
                       lazy_error *err)
{
    surprising t = { stream, surprisal, logits, vocab, ids };
    return lazy_cpu_run(stream, surprise_row, &t, n, err);
}

int lazy_cpu_argmax(lazy_stream *stream, int32_t *id, const float *logits, int vocab, lazy_error *err)
{
    *id = 0;
    for (int i = 0; i < vocab && *id >= 0; i++) {
        if (!isfinite(logits[i])) *id = -1 - i;
        else if (logits[i] > logits[*id]) *id = i;
    }
    return LAZY_OK;
}
