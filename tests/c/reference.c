/* reference.c — the compute ops by plain loops. */
#include "reference.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../../csrc/cpu/cpu.h"
#include "../../csrc/error.h"
#include "../../csrc/format.h"

enum {
    ROWS_AT_ONCE = 32, /* of x: a weight is widened once for them */
    SUMS = 8           /* of a dot product, beside each other: one alone waits for each addition */
};

/* sums[r] = x[r, :] . w[out, :] + bias[out] for n rows of x. */
static void dots(double *sums, const float *x, int n, const lazy_matrix *w, int out)
{
    enum { BLOCK = LAZY_LONGEST_BLOCK };
    float weights[BLOCK];
    for (int r = 0; r < n; r++) sums[r] = w->bias ? w->bias[out] : 0.0;
    const lazy_part *part = w->part;
    while (out >= part->rows) out -= part++->rows;
    const char *from = (const char *)part->data + (size_t)out * lazy_row_bytes(part->dtype, w->cols);
    for (int first = 0; first < w->cols; first += BLOCK) {
        int here = min_int(BLOCK, w->cols - first);
        lazy_widen(weights, from + lazy_row_bytes(part->dtype, first), part->dtype, here);
        for (int r = 0; r < n; r++) {
            const float *row = x + (int64_t)r * w->cols + first;
            double parts[SUMS] = { sums[r] };
            int k = 0;
            for (; k + SUMS <= here; k += SUMS)
                for (int i = 0; i < SUMS; i++) parts[i] += (double)row[k + i] * weights[k + i];
            for (; k < here; k++) parts[0] += (double)row[k] * weights[k];
            sums[r] = 0;
            for (int i = 0; i < SUMS; i++) sums[r] += parts[i];
        }
    }
}

static int reference_matmul(lazy_stream *stream, void *y, const void *x, int n, const lazy_matrix *w, bool accumulate,
                            lazy_error *err)
{
    double sums[ROWS_AT_ONCE];
    for (int first = 0; first < n; first += ROWS_AT_ONCE) {
        int here = min_int(ROWS_AT_ONCE, n - first);
        for (int j = 0; j < w->rows; j++) {
            dots(sums, (const float *)x + (int64_t)first * w->cols, here, w, j);
            for (int r = 0; r < here; r++) {
                float *out = (float *)y + (int64_t)(first + r) * w->rows + j;
                *out = (float)(accumulate ? *out + sums[r] : sums[r]);
            }
        }
    }
    return LAZY_OK;
}

static double capped(double x, double cap) { return cap > 0 ? cap * tanh(x / cap) : x; }

static int reference_logits(lazy_stream *stream, float *y, const void *x, int n, const lazy_matrix *w, lazy_error *err)
{
    int code = reference_matmul(stream, y, x, n, w, false, err);
    for (int64_t i = 0; i < (int64_t)n * w->rows; i++) y[i] = (float)capped(y[i], stream->config->logit_cap);
    return code;
}

static int reference_surprisal(lazy_stream *stream, float *surprisal, float *logits, int n, int vocab,
                               const int32_t *ids, lazy_error *err)
{
    for (int r = 0; r < n; r++) {
        const float *row = logits + (int64_t)r * vocab;
        double max = -INFINITY, sum = 0;
        for (int v = 0; v < vocab; v++) max = row[v] > max ? row[v] : max; /* gcc 12 for aarch64 fails on fmax here */
        for (int v = 0; v < vocab; v++) sum += exp(row[v] - max);
        surprisal[r] = (float)(log(sum) + max - row[ids[r]]);
    }
    return LAZY_OK;
}

static double gelu(double x) { return 0.5 * x * (1.0 + tanh(sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x))); }

static int reference_gated(lazy_stream *stream, void *y, const void *x, int n, const lazy_matrix *gate_up,
                           lazy_error *err)
{
    int ffn = gate_up->rows / 2;
    float *products = malloc((size_t)n * (size_t)gate_up->rows * sizeof *products);
    int code = reference_matmul(stream, products, x, n, gate_up, false, err);
    for (int64_t i = 0; i < (int64_t)n * ffn; i++) {
        const float *row = products + i / ffn * gate_up->rows;
        double gate = row[i % ffn], up = row[ffn + i % ffn];
        ((float *)y)[i] = (float)((stream->config->gelu ? gelu(gate) : gate / (1.0 + exp(-gate))) * up);
    }
    free(products);
    return code;
}

/* True if expert e is one of the k with the greatest logits. */
static bool is_chosen(const float *logits, int n, int k, int e)
{
    int before = 0;
    for (int i = 0; i < n; i++) before += logits[i] > logits[e] || (logits[i] == logits[e] && i < e);
    return before < k;
}

static int reference_mix_experts(lazy_stream *stream, void *y, const void *x, int n, const lazy_experts *experts,
                                 bool accumulate, lazy_error *err)
{
    const lazy_config *c = stream->config;
    int n_experts = experts->router.rows, d = experts->router.cols, k = c->experts_per_token;
    float *logits = malloc((size_t)n_experts * sizeof *logits),
          *hidden = malloc((size_t)c->expert_ffn * sizeof *hidden), *output = malloc((size_t)d * sizeof *output);
    double *sums = malloc((size_t)d * sizeof *sums);
    for (int r = 0; r < n; r++) {
        const float *from = (const float *)x + (int64_t)r * d;
        float *to = (float *)y + (int64_t)r * d;
        double total = 0;
        reference_matmul(stream, logits, from, 1, &experts->router, false, err); /* without a soft cap */
        for (int e = 0; e < n_experts; e++)
            if (!c->normed_experts || is_chosen(logits, n_experts, k, e)) total += exp(logits[e]);
        for (int i = 0; i < d; i++) sums[i] = accumulate ? to[i] : 0;
        for (int e = 0; e < n_experts; e++) {
            if (!is_chosen(logits, n_experts, k, e)) continue;
            reference_gated(stream, hidden, from, 1, &experts->gate_up[e], err);
            reference_matmul(stream, output, hidden, 1, &experts->down[e], false, err);
            for (int i = 0; i < d; i++) sums[i] += exp(logits[e]) / total * output[i];
        }
        for (int i = 0; i < d; i++) to[i] = (float)sums[i];
    }
    free(logits);
    free(hidden);
    free(output);
    free(sums);
    return LAZY_OK;
}

static void norm(float *y, const float *x, int d, const float *weight, float eps, bool accumulate, bool layer_norm)
{
    double mean = 0, sum = 0;
    for (int i = 0; i < d && layer_norm; i++) mean += (double)x[i] / d;
    for (int i = 0; i < d; i++) sum += (x[i] - mean) * (x[i] - mean);
    double factor = 1.0 / sqrt(sum / d + eps);
    for (int i = 0; i < d; i++) y[i] = (float)((accumulate ? y[i] : 0.0) + (x[i] - mean) * factor * weight[i]);
}

static int reference_rmsnorm(lazy_stream *stream, void *y, const void *x, int n, int d, const float *weight, float eps,
                             bool accumulate, lazy_error *err)
{
    for (int r = 0; r < n; r++)
        norm((float *)y + (int64_t)r * d, (const float *)x + (int64_t)r * d, d, weight, eps, accumulate,
             stream->config->layer_norm);
    return LAZY_OK;
}

static void rotate_head(float *head, int d, const float *rope, const float *weight, float eps, bool late,
                        bool layer_norm)
{
    if (weight && !late) norm(head, head, d, weight, eps, false, layer_norm);
    for (int i = 0; i < d / 2; i++) {
        double a = head[i], b = head[d / 2 + i], c = rope[i], s = rope[d / 2 + i];
        head[i] = (float)(a * c - b * s);
        head[d / 2 + i] = (float)(b * c + a * s);
    }
    if (weight && late) norm(head, head, d, weight, eps, false, false);
}

static int reference_rotate(lazy_stream *stream, void *q_of_rows, void *k_v_of_rows, int stride, const int32_t *rows,
                            int n, lazy_kv kv, const float *q_rope, const float *k_rope, const float *q_norm,
                            const float *k_norm, float eps, lazy_error *err)
{
    const lazy_config *c = stream->config;
    int d = c->head_dim, step = c->layer_norm ? d : 0;
    bool fits = true, wide = c->wide_qk_norm, late = c->late_qk_norm;
    for (int r = 0; r < n; r++) {
        float *q = (float *)q_of_rows + (int64_t)r * stride, *k = (float *)k_v_of_rows + (int64_t)r * stride,
              *v = k + c->n_kv_heads * d;
        int64_t at = (int64_t)rows[r] * d;
        if (wide && q_norm) norm(q, q, c->n_heads * d, q_norm, eps, false, false);
        if (wide && k_norm) norm(k, k, c->n_kv_heads * d, k_norm, eps, false, false);
        for (int h = 0; h < c->n_heads; h++)
            rotate_head(q + h * d, d, q_rope + at, wide || !q_norm ? NULL : q_norm + h * step, eps, late,
                        c->layer_norm);
        for (int g = 0; g < c->n_kv_heads; g++) {
            rotate_head(k + g * d, d, k_rope + at, wide || !k_norm ? NULL : k_norm + g * step, eps, late,
                        c->layer_norm);
            fits &= lazy_narrow(kv_row(stream, kv, kv.k, g, rows[r]), k + g * d, stream->backend->kv, d);
            fits &= lazy_narrow(kv_row(stream, kv, kv.v, g, rows[r]), v + g * d, stream->backend->kv, d);
        }
    }
    return fits ? LAZY_OK : lazy_cpu_refuse_range(stream, err);
}

/* p = share * softmax(p), of n products */
static void softmax(float *p, int n, double share)
{
    double max = -INFINITY, sum = 0;
    for (int j = 0; j < n; j++) max = fmax(max, p[j]);
    for (int j = 0; j < n; j++) sum += p[j] = (float)exp(p[j] - max);
    for (int j = 0; j < n; j++) p[j] = (float)(share * p[j] / sum);
}

/* p[j] = the row's attention to in_play[j], for the tokens that it sees. */
static void attend_row(lazy_stream *stream, float *p, const lazy_attending *a, int row, int head, bool levelled)
{
    const lazy_config *c = stream->config;
    const float *q = (const float *)a->q + (int64_t)row * a->q_stride;
    const lazy_seen seen = ((lazy_cpu_stream *)stream)->seen[row];
    int d = c->head_dim, g = head / (c->n_heads / c->n_kv_heads);
    float *key = scratch_of(stream, 0);
    for (int j = seen.begin; j < seen.end; j++) {
        double dot = 0;
        lazy_widen(key, kv_row(stream, a->kv, a->kv.k, g, a->in_play[j]), stream->backend->kv, d);
        for (int i = 0; i < d; i++) dot += (double)q[head * d + i] * key[i];
        p[j] = (float)capped(dot / sqrt(c->query_scalar ? c->query_scalar : d), c->attention_cap);
    }
    for (int begin = seen.begin, end; begin < seen.end; begin = end) {
        end = !levelled ? seen.end : begin < 4 ? begin + 1 : min_int(seen.end, begin - begin % 512 + 512);
        softmax(p + begin, end - begin, (double)(end - begin) / (seen.end - seen.begin));
    }
}

static int reference_attention(lazy_stream *stream, void *y, const lazy_attending *a, lazy_error *err)
{
    const lazy_config *c = stream->config;
    lazy_cpu_stream *scratch = (lazy_cpu_stream *)stream;
    int d = c->head_dim;
    double *sums = (double *)scratch_of(stream, 0);
    float *value = (float *)(sums + d);
    lazy_cpu_see(scratch->seen, a);
    for (int r = 0; r < a->n; r++) {
        for (int h = 0; h < c->n_heads; h++) {
            float *p = scratch->probabilities, *out = (float *)y + ((int64_t)r * c->n_heads + h) * d;
            lazy_seen seen = scratch->seen[r];
            int g = h / (c->n_heads / c->n_kv_heads);
            attend_row(stream, p, a, r, h, false);
            memset(sums, 0, (size_t)d * sizeof *sums);
            for (int j = seen.begin; j < seen.end; j++) {
                lazy_widen(value, kv_row(stream, a->kv, a->kv.v, g, a->in_play[j]), stream->backend->kv, d);
                for (int i = 0; i < d; i++) sums[i] += (double)p[j] * value[i];
            }
            for (int i = 0; i < d; i++) out[i] = (float)sums[i];
        }
    }
    return LAZY_OK;
}

static int reference_scores(lazy_stream *stream, float *scores, const lazy_attending *a, int queries,
                            lazy_pooling pooling, int heavy, int first_asking, lazy_error *err)
{
    const lazy_config *c = stream->config;
    lazy_cpu_stream *scratch = (lazy_cpu_stream *)stream;
    int n = a->n, m = a->m, counted = 0;
    double *sums = scratch->block_sums; /* over heads */
    memset(scores, 0, (size_t)m * sizeof *scores);
    lazy_cpu_see(scratch->seen, a);
    for (int r = n > queries ? n - queries : 0; r < n; r++) {
        if (a->rows[r] < first_asking) continue;
        counted++;
        memset(sums, 0, (size_t)m * sizeof *sums);
        for (int h = 0; h < c->n_heads; h++) {
            lazy_seen seen = scratch->seen[r];
            attend_row(stream, scratch->probabilities, a, r, h, h == heavy);
            for (int j = seen.begin; j < seen.end; j++) {
                double p = scratch->probabilities[j] * (h == heavy ? 8.0 : 1.0);
                sums[j] += pooling == LAZY_POOLING_RMS ? p * p : p;
            }
        }
        for (int j = 0; j < m; j++) {
            double mean = sums[j] / c->n_heads;
            float score = (float)(pooling == LAZY_POOLING_RMS ? sqrt(mean) : mean);
            if (pooling == LAZY_POOLING_MEAN) scores[j] += score;
            else if (score > scores[j] || isnan(score)) scores[j] = score;
        }
    }
    for (int j = 0; j < m && pooling == LAZY_POOLING_MEAN; j++) scores[j] /= (float)counted;
    return LAZY_OK;
}

static int reference_smooth(lazy_stream *stream, float *out, const float *scores, int m, int width, lazy_error *err)
{
    for (int j = 0; j < m; j++) {
        int first = max_int(j - width / 2, 0), last = min_int(j + width / 2, m - 1);
        double sum = 0;
        for (int i = first; i <= last; i++) sum += scores[i];
        out[j] = (float)(sum / (last - first + 1));
    }
    return LAZY_OK;
}

int reference_open(lazy_backend **out, lazy_dtype kv, lazy_error *err)
{
    static lazy_ops ops;
    int code = lazy_cpu_open(out, 1, LAZY_COMPUTE_F32, kv, err);
    if (code) return code;
    ops = *(*out)->ops;
    ops.rmsnorm = reference_rmsnorm;
    ops.matmul = reference_matmul;
    ops.gated = reference_gated;
    ops.mix_experts = reference_mix_experts;
    ops.rotate = reference_rotate;
    ops.attention = reference_attention;
    ops.logits = reference_logits;
    ops.surprisal = reference_surprisal;
    ops.scores = reference_scores;
    ops.smooth = reference_smooth;
    (*out)->ops = &ops;
    return LAZY_OK;
}
