/* ops_rows.c — ops on rows by themselves: norms, RoPE, widening and narrowing, softmax, surprisal, argmax. */
#include "ops.h"

/* Values up to `limit`; those whose squares overflow f32 are finite all the same, and so is their norm. */
static void test_rmsnorm(sides s, int n, int d, float limit)
{
    size_t size = (size_t)n * (size_t)d;
    float *x = random_floats(size), *weight = random_floats((size_t)d), *got = guarded(size), *want = guarded(size);
    /* few values may differ from their mean by its rounding alone */
    bool layer_norm = limit == 1 && d >= 8 && random_int(0, 1), accumulate = !layer_norm && random_int(0, 1);
    s.config->layer_norm = layer_norm;
    for (size_t i = 0; i < size; i++) x[i] = limit * x[i] + layer_norm;
    for (size_t i = 0; i < size && accumulate; i++) got[i] = want[i] = random_float();
    RUN(s.fast, rmsnorm, got, x, n, d, weight, 1e-5f, accumulate, NULL);
    RUN(s.plain, rmsnorm, want, x, n, d, weight, 1e-5f, accumulate, NULL);
    double error = error_of(got, want, size);
    CHECK_FREED(error < TOLERANCE, "%s %s n %d, d %d, of values up to %g: error %.2g", s.fast.name,
                layer_norm ? "layer norm" : "rmsnorm", n, d, limit, error);
    s.config->layer_norm = false;
}

/* The norm that checks gives the same bits, and notes the layer if a value is NaN or Inf, unless an earlier one is
 * noted. */
static void test_checked_norm(side s, int n, int d)
{
    const float values[] = { 1.0f, NAN, INFINITY, -INFINITY, FLT_MAX };
    size_t size = (size_t)n * (size_t)d;
    float *x = random_floats(size), *weight = random_floats((size_t)d), *got = guarded(size), *want = guarded(size);
    for (size_t v = 0; v < sizeof values / sizeof *values; v++) {
        size_t at = (size_t)random_int(0, (int)size - 1);
        float kept = x[at];
        x[at] = values[v];
        RUN(s, rmsnorm, want, x, n, d, weight, 1e-5f, false, NULL);
        for (int32_t noted = 3; noted <= 9; noted += 6) {
            int32_t first_bad = noted, expected = isfinite(values[v]) ? noted : min_int(noted, 7);
            RUN(s, checked_rmsnorm, got, x, n, d, weight, 1e-5f, 7, &first_bad, NULL);
            check(first_bad == expected, "%s checked_rmsnorm n %d, d %d, a value of %g, %d noted: %d instead of %d",
                  s.name, n, d, values[v], noted, first_bad, expected);
            check(memcmp(got, want, size * sizeof *got) == 0, "%s checked_rmsnorm n %d, d %d: other bits than rmsnorm",
                  s.name, n, d);
        }
        x[at] = kept;
    }
    check(all_freed(), "%s checked_rmsnorm n %d, d %d: wrote outside its output", s.name, n, d);
}

/* online_softmax's powers of two against those of the C library: to 1.5e-7 of each, and nothing where f32 has next to
 * nothing. */
static void test_online_softmax(const char *variant)
{
    enum { N = 1003 };
    const lazy_row_kernels *kernels = lazy_arithmetic_find(variant, computing)->kernels->rows;
    float s[N], given[N], max = -INFINITY, sum = 0.0f;
    double worst = 0, total = 0;
    for (int round = 0; round < 100; round++, max = -INFINITY, sum = 0.0f, total = 0) {
        for (int i = 0; i < N; i++) given[i] = s[i] = random_float() * (round % 2 ? 1.0f : 70.0f);
        given[5] = s[5] = -1000.0f;
        float largest = -INFINITY;
        for (int i = 0; i < N; i++) largest = fmaxf(largest, given[i]);
        kernels->online_softmax(s, N, &max, &sum);
        for (int i = 0; i < N; i++) {
            double want = exp2((double)(given[i] - largest));
            total += want;
            if (want > 1e-37) worst = fmax(worst, fabs(s[i] / want - 1));
            else worst = fmax(worst, s[i] > 1e-37 || s[i] < 0 ? 1 : 0);
        }
        worst = fmax(worst, max == largest && s[5] == 0.0f && fabs(sum / total - 1) < TOLERANCE ? 0 : 1);
    }
    check(worst < 1.5e-7, "%s online_softmax: error %.2g", variant, worst);
    given[0] = NAN;
    given[1] = 1.0f;
    max = -INFINITY;
    sum = 0.0f;
    kernels->online_softmax(given, 2, &max, &sum);
    check(isnan(given[0]) && isnan(sum), "%s online_softmax: a NaN was lost", variant);
}

/* Every instruction set widens like lazy_widen, which test_formats.py compares with the gguf package, to the bit:
 * blocks with any scales, and every pattern of 16 bits, also one by one. */
static void test_widening(const char *variant)
{
    enum { BYTES = 1 << 17, VALUES = 2 * BYTES };
    uint64_t before = seed;
    static uint8_t data[BYTES];
    static float got[VALUES], want[VALUES];
    void (*widen)(float *, const void *, lazy_dtype, int) =
        lazy_arithmetic_find(variant, computing)->kernels->rows->widen_row;
    for (int dtype = LAZY_F16; dtype < LAZY_N_DTYPES; dtype++) {
        const lazy_format *format = &lazy_formats[dtype];
        int n = BYTES / format->bytes * format->values, n_wrong = 0;
        for (int i = 0; i < BYTES; i++)
            data[i] = (uint8_t)(format->values > 1 ? random_bits() : (uint32_t)(i % 2 ? i >> 9 : i >> 1));
        lazy_widen(want, data, (lazy_dtype)dtype, n);
        for (int step = n; step; step = step == n && format->values == 1 ? 1 : 0) {
            for (int i = 0; i < n; i += step)
                widen(got + i, data + lazy_row_bytes((lazy_dtype)dtype, i), (lazy_dtype)dtype, step);
            for (int i = 0; i < n; i++)
                n_wrong += isnan(want[i]) ? !isnan(got[i]) : memcmp(&got[i], &want[i], sizeof *got) != 0;
        }
        check(n_wrong == 0, "%s widening of %s: %d of %d values are wrong", variant, format->name, n_wrong, n);
    }
    seed = before;
}

/* Rounding goes to the nearest of two neighbours, halfway between them to the even one, beyond the last one to
 * infinity. */
void test_narrowing(lazy_dtype dtype)
{
    const char *name = lazy_formats[dtype].name;
    const uint16_t infinity = dtype == LAZY_BF16 ? 0x7f80 : 0x7c00;
    int n_wrong = 0;
    double low = 0, step = 0;
    for (uint16_t half = 0; half < infinity; half++, low += step) {
        float next;
        lazy_widen(&next, &(uint16_t){ (uint16_t)(half + 1) }, dtype, 1);
        if (isfinite(next)) step = next - low; /* the last one is as far from infinity's place as from the one before */
        float middle = (float)(low + step / 2);
        const struct {
            float x;
            uint16_t want;
        } cases[] = { { (float)low, half },
                      { nextafterf(middle, 0), half },
                      { middle, (uint16_t)(half + (half & 1)) },
                      { nextafterf(middle, INFINITY), (uint16_t)(half + 1) } };
        for (size_t i = 0; i < 2 * sizeof cases / sizeof *cases; i++) {
            uint16_t got, sign = i % 2 ? 0x8000 : 0;
            bool fits = lazy_narrow(&got, &(float){ sign ? -cases[i / 2].x : cases[i / 2].x }, dtype, 1);
            n_wrong += got != (cases[i / 2].want | sign) || fits != (cases[i / 2].want != infinity);
        }
    }
    check(n_wrong == 0, "rounding to %s: %d values are wrong", name, n_wrong);
    uint16_t got[2];
    float back[2];
    bool fits = lazy_narrow(got, (float[]){ NAN, -INFINITY }, dtype, 2);
    lazy_widen(back, got, dtype, 2);
    check(fits && isnan(back[0]) && back[1] == -INFINITY, "rounding NaN and -Inf to %s: %g and %g", name, back[0],
          back[1]);
}

/* The capped values of every 1009th float, of either sign, beside the C library's tanh. */
static void test_tanh(side fast)
{
    enum { STEP = 1009, N = 1000 };
    double worst = 0;
    float x[N], y[N];
    for (uint32_t first = 0x00800000; first < 0x43000000; first += STEP * N) { /* from the smallest normal one to 128 */
        for (uint32_t i = 0; i < N; i++) memcpy(&x[i], &(uint32_t){ (first + i * STEP) | i << 31 }, sizeof *x);
        memcpy(y, x, sizeof y);
        kernels_of(fast.stream)->rows->cap_row(y, N, 1.0f);
        for (int i = 0; i < N; i++) worst = fmax(worst, fabs(y[i] / tanh(x[i]) - 1));
    }
    check(worst < 2e-7, "%s tanh: error %.2g", fast.name, worst);
}

static void test_surprisal(sides s, int n, int vocab)
{
    float *logits = random_floats((size_t)n * (size_t)vocab), *got = guarded((size_t)n), *want = guarded((size_t)n);
    int32_t *ids = room((size_t)n * sizeof *ids);
    for (int r = 0; r < n; r++) {
        ids[r] = random_int(0, vocab - 1);
        for (int v = 0; v < vocab; v++)
            logits[(int64_t)r * vocab + v] = 30.0f * logits[(int64_t)r * vocab + v] - 50.0f * (float)(r % 3);
    }
    RUN(s.plain, surprisal, want, logits, n, vocab, ids, NULL); /* leaves them as they are */
    RUN(s.fast, surprisal, got, logits, n, vocab, ids, NULL);
    double error = 0; /* absolute below 1: log(sum) of an f32 sum that is close to 1 has no relative precision */
    for (int r = 0; r < n; r++) error = fmax(error, error_above(1, got + r, want + r, 1));
    CHECK_FREED(error < TOLERANCE, "%s surprisal n %d, vocab %d: error %.2g", s.fast.name, n, vocab, error);
}

/* Logits that are no number, or infinite, may not pass for a surprisal. */
static void test_bad_surprisal(side fast)
{
    const float bad[] = { NAN, INFINITY };
    for (int i = 0; i < 2; i++) {
        float logits[] = { 1.0f, 2.0f, bad[i], 0.5f }, surprisal = 0.0f;
        RUN(fast, surprisal, &surprisal, logits, 1, 4, (int32_t[]){ 1 }, NULL);
        check(!isfinite(surprisal), "%s surprisal beside a logit of %g: %g", fast.name, bad[i], surprisal);
    }
}

/* The smaller id among equals, be they 0 and -0; of what is no number, or infinite, the first. */
static void test_argmax(side fast)
{
    enum { VOCAB = 300 };
    for (int round = 0; round < 200; round++) {
        float logits[VOCAB];
        int vocab = random_int(1, VOCAB), n_bad = round % 3 ? 0 : random_int(1, 3), levels = random_int(1, 5),
            first_bad = vocab, best = 0;
        for (int i = 0; i < vocab; i++)
            logits[i] = (float)(random_int(-levels, 0) * random_int(-1, 2)) * (i % 2 ? 1.0f : -1.0f);
        for (int i = 1; i < vocab; i++)
            if (logits[i] > logits[best]) best = i;
        for (int i = 0; i < n_bad; i++) {
            int at = random_int(0, vocab - 1);
            logits[at] = (const float[]){ NAN, INFINITY, -INFINITY }[i];
            if (at < first_bad) first_bad = at;
        }
        int32_t got = -12345, want = n_bad ? -1 - first_bad : best;
        RUN(fast, argmax, &got, logits, vocab, NULL);
        check(got == want, "%s argmax of %d, %d of them bad: %d instead of %d", fast.name, vocab, n_bad, got, want);
    }
}

static void test_rotate(sides s, int n, bool normed)
{
    const lazy_config *c = s.config;
    size_t d = (size_t)c->head_dim, qkv_size = (size_t)n * (size_t)(c->n_heads + 2 * c->n_kv_heads) * d;
    int length = 2 * n + 3;
    size_t kv_size = (size_t)length * (size_t)c->n_kv_heads * d;
    int32_t *rows = random_positions(n, length);
    float *from = random_floats(qkv_size), *of_q = random_floats((size_t)length * d),
          *of_k = random_floats((size_t)length * d), *weight = random_floats((size_t)c->n_heads * d);
    size_t q_width = (size_t)c->n_heads * d, width = qkv_size / (size_t)n;
    bool apart = random_int(0, 1); /* queries by one call, keys and values by another */
    float *q[2], *k[2], *v[2];
    side both[] = { s.fast, s.plain };
    for (int i = 0; i < 2; i++) {
        q[i] = guarded(qkv_size);
        k[i] = guarded(kv_size);
        v[i] = guarded(kv_size);
        memcpy(q[i], from, qkv_size * sizeof *from);
        memset(k[i], 0, kv_size * sizeof *from);
        memset(v[i], 0, kv_size * sizeof *from);
        for (int part = apart && !i ? 0 : 2; part < (apart && !i ? 2 : 3); part++)
            RUN(both[i], rotate, part == 1 ? NULL : q[i], part == 0 ? NULL : q[i] + q_width, (int)width, rows, n,
                (lazy_kv){ k[i], v[i], length }, of_q, of_k, normed ? weight : NULL, normed ? weight : NULL, 1e-6f,
                NULL);
    }
    double error = fmax(error_of(k[0], k[1], kv_size), error_of(v[0], v[1], kv_size));
    for (int r = 0; r < n; r++)
        error = fmax(error, error_of(q[0] + (size_t)r * width, q[1] + (size_t)r * width, q_width));
    CHECK_FREED(error < TOLERANCE, "%s rotate n %d, head %zu%s%s: error %.2g", s.fast.name, n, d,
                normed ? ", normed" : "", c->layer_norm ? " by layer norm" : "", error);
}

/* K and V of n tokens, (2, G, n, D), as rotate leaves them in that type. A value other than 0 takes the place of one of
 * k and v, and is not rotated. */
static void *rotated(const char *variant, const lazy_config *c, lazy_dtype type, int n, float value, bool in_v,
                     int *code, lazy_error *err)
{
    keeping = type;
    uint64_t before = seed;
    size_t d = (size_t)c->head_dim, heads = (size_t)(c->n_heads + 2 * c->n_kv_heads),
           kv_size = (size_t)n * (size_t)c->n_kv_heads * d;
    size_t words = kv_size * lazy_row_bytes(type, 1) / sizeof(uint32_t);
    float *qkv = random_floats((size_t)n * heads * d), *rope = random_floats((size_t)n * d), *norm = random_floats(d);
    int32_t *rows = random_positions(n, n);
    if (value != 0) {
        size_t head = (heads - (in_v ? 1 : 1 + (size_t)c->n_kv_heads)) * d, row = (size_t)(n / 2);
        qkv[row * heads * d + head] = value;
        for (size_t i = 0; i < d / 2; i++) {
            rope[row * d + i] = 1;
            rope[row * d + d / 2 + i] = 0;
        }
    }
    uint32_t *both = guarded(2 * words);
    side s = open_side(variant, c, 3);
    *code = RUN(s, rotate, qkv, qkv + (size_t)c->n_heads * d, (int)(heads * d), rows, n,
                (lazy_kv){ both, both + words, n }, rope, rope, norm, value != 0 ? NULL : norm, 1e-6f, err);
    close_side(s);
    keeping = LAZY_F32;
    seed = before;
    return both;
}

/* The values kept are those of f32, rounded once. A finite value beyond the type's range is refused, others are not. */
void test_kept_rows(const char *variant)
{
    const lazy_config config = { .n_heads = 4, .n_kv_heads = 2, .head_dim = 22, .ffn = 8 };
    int code;
    for (lazy_dtype type = LAZY_F16; type <= LAZY_BF16; type++) {
        for (int n = 1; n < 20; n += 6) {
            size_t size = 2 * (size_t)n * 2 * 22;
            lazy_error err = { 0 };
            float *exact = rotated(variant, &config, LAZY_F32, n, 0, false, &code, &err);
            uint16_t *got = rotated(variant, &config, type, n, 0, false, &code, &err),
                     *want = room(size * sizeof *want);
            lazy_narrow(want, exact, type, (int)size);
            CHECK_FREED(code == LAZY_OK && memcmp(got, want, size * sizeof *got) == 0,
                        "%s rotate n %d: K or V in %s is not what F32 rounds to", variant, n, lazy_formats[type].name);
        }
        const float largest = type == LAZY_F16 ? 65504.0f : 0x1.fep127f,
                    beyond = type == LAZY_F16 ? 65520.0f : 0x1.ffp127f;
        const float values[] = { largest, nextafterf(beyond, 0), beyond, -beyond, FLT_MAX, INFINITY, NAN };
        for (size_t i = 0; i < 2 * sizeof values / sizeof *values; i++) {
            lazy_error err = { 0 };
            bool refused = isfinite(values[i / 2]) && fabsf(values[i / 2]) >= beyond;
            rotated(variant, &config, type, 13, values[i / 2], i % 2, &code, &err);
            CHECK_FREED(code == (refused ? LAZY_INVALID : LAZY_OK) &&
                            (!refused || strstr(err.message, "a key or value is beyond")),
                        "%s rotate of %g in %s: code %d, \"%s\"", variant, values[i / 2], lazy_formats[type].name, code,
                        err.message);
        }
    }
}

void test_rows(const char *variant, const lazy_config *shapes, size_t n_shapes)
{
    seed = 1; /* its data depend on no other file */
    sides s = open_sides(variant, &shapes[0], 2);
    test_rmsnorm(s, 1, 37, 1e25f);
    for (int n = 1; n <= 40; n++) test_surprisal(s, n, n == 40 ? 50000 : random_int(1, 300));
    test_bad_surprisal(s.fast);
    test_argmax(s.fast);
    test_tanh(s.fast);
    close_sides(s);
    test_online_softmax(variant);
    test_widening(variant);
    for (const lazy_config *shape = shapes; shape < shapes + n_shapes; shape++) {
        s = open_sides(variant, shape, 3);
        for (int n = 1; n <= 40; n += 3) {
            test_rmsnorm(s, n, random_int(1, 200), 1);
            test_checked_norm(s.fast, n, random_int(1, 200));
            s.config->layer_norm = true;
            test_checked_norm(s.fast, n, random_int(1, 200));
            s.config->layer_norm = false;
            test_rotate(s, n, n % 2);
            s.config->layer_norm = !shape->wide_qk_norm && !shape->late_qk_norm;
            test_rotate(s, n, n % 4 < 3);
            s.config->layer_norm = false;
        }
        close_sides(s);
    }
    test_kept_rows(variant);
}
