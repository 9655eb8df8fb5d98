/* ops_attention.c — attention and the scores of its last rows. */
#include "ops.h"

/* n of the m tokens in play, the last one among them. */
static int32_t *random_rows(int n, const int32_t *in_play, int m)
{
    int32_t *rows = random_positions(n, m);
    for (int r = 0; r < n; r++) rows[r] = in_play[rows[r]];
    return rows;
}

/* n values of `keeping`, in guarded memory; n is even. */
static void *kept(const float *values, size_t n)
{
    void *data = guarded(n * lazy_row_bytes(keeping, 1) / sizeof(uint32_t));
    lazy_narrow(data, values, keeping, (int)n);
    return data;
}

static void test_one_attention(sides s, int n, int m, int length)
{
    float cap = random_int(0, 1) ? 0 : 0.5f + fabsf(random_float());
    s.config->attention_cap = cap;
    int window = random_int(0, 1) ? INT32_MAX : random_int(1, length);
    const lazy_config *c = s.config;
    size_t d = (size_t)c->head_dim, kv_size = (size_t)length * (size_t)c->n_kv_heads * d,
           size = (size_t)n * (size_t)c->n_heads * d;
    size_t qkv_size = (size_t)n * (size_t)(c->n_heads + 2 * c->n_kv_heads) * d;
    int32_t *in_play = random_positions(m, length), *rows = random_rows(n, in_play, m);
    float *qkv = random_floats(qkv_size), *got = guarded(size), *want = guarded(size);
    void *k = kept(random_floats(kv_size), kv_size), *v = kept(random_floats(kv_size), kv_size);
    float peaked = computing != LAZY_COMPUTE_F32 ? 4 : 3; /* rows; errors of shares grow with the products */
    for (size_t i = 0; i < qkv_size; i++) qkv[i] *= peaked;
    const lazy_attending a = { qkv, (int)qkv_size / n, rows, n, { k, v, length }, in_play, m, window };
    s.fast.stream->scores_follow = random_int(0, 1);
    RUN(s.fast, attention, got, &a, NULL);
    RUN(s.plain, attention, want, &a, NULL);
    double error = error_of(got, want, size);
    check(error < (computing != LAZY_COMPUTE_F32 ? ROUNDED : TOLERANCE),
          "%s attention n %d, m %d, length %d, window %d, head %zu, cap %g, K and V in %s: error %.2g", s.fast.name, n,
          m, length, window, d, cap, lazy_formats[keeping].name, error);

    int queries = random_int(0, 2) ? random_int(1, 20) : 1, first_asking = rows[random_int(0, n - 1)];
    int heavy = random_int(-1, c->n_heads - 1);
    lazy_pooling pooling = (lazy_pooling)random_int(LAZY_POOLING_MEAN, LAZY_POOLING_RMS);
    bool reads_keys = !s.fast.stream->scores_follow || (queries > 1 && first_asking < rows[n - 1] && n > 1);
    float *scores = guarded((size_t)m), *expected = guarded((size_t)m);
    RUN(s.plain, scores, expected, &a, queries, pooling, heavy, first_asking, NULL);
    if (!reads_keys) memset(k, 0xff, kv_size * lazy_row_bytes(keeping, 1));
    RUN(s.fast, scores, scores, &a, queries, pooling, heavy, first_asking, NULL);
    error = error_of(scores, expected, (size_t)m);
    double sum = 0, whole = heavy < 0 ? 1 : (c->n_heads + 7.0) / c->n_heads;
    for (int j = 0; j < m; j++) sum += scores[j];
    check(error < TOLERANCE * whole,
          "%s scores n %d, m %d, window %d, cap %g, queries %d, pooling %d, head %d: error %.2g", s.fast.name, n, m,
          window, cap, queries, pooling, heavy, error);
    CHECK_FREED(pooling != LAZY_POOLING_MEAN || fabs(sum / whole - 1) < 1e-5,
                "%s scores n %d, m %d, queries %d, head %d: sum %.8g, not %g", s.fast.name, n, m, queries, heavy, sum,
                whole);
}

/* Heads as wide as the engine takes, more heads on one key than a task holds, more tokens than one chunk each of the
 * most. */
static void test_extremes(const char *variant)
{
    const struct {
        lazy_config config;
        int n, m;
    } cases[] = {
        { { .n_heads = 2, .n_kv_heads = 1, .head_dim = 512, .ffn = 8 }, 90, 300 },
        { { .n_heads = 400, .n_kv_heads = 1, .head_dim = 6, .ffn = 8 }, 70, 300 },
        { { .n_heads = 3, .n_kv_heads = 3, .head_dim = 4, .ffn = 8 }, 5, MAX_TOKENS - 7 },
        { { .n_heads = 30, .n_kv_heads = 3, .head_dim = 4, .ffn = 8 }, 1, MAX_TOKENS - 7 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        sides s = open_sides(variant, &cases[i].config, 2);
        test_one_attention(s, cases[i].n, cases[i].m, cases[i].m + 7);
        close_sides(s);
    }
}

/* Attention of n rows, the last of length tokens, all of them in play; NaN where `spoilt` says: 'q' of the middle row,
 * 'k' or 'v' of the middle row's token; 0 for nowhere. */
static float *spoilt_attention(const char *variant, const lazy_config *c, int threads, int n, int length, char spoilt)
{
    size_t d = (size_t)c->head_dim, width = (size_t)(c->n_heads + 2 * c->n_kv_heads) * d,
           kv_size = (size_t)length * (size_t)c->n_kv_heads * d;
    uint64_t before = seed;
    float *qkv = random_floats((size_t)n * width), *k = random_floats(kv_size), *v = random_floats(kv_size);
    int32_t *in_play = random_positions(length, length), middle = length - n + n / 2;
    float *y = room((size_t)n * (size_t)c->n_heads * d * sizeof *y);
    if (spoilt == 'q') qkv[(size_t)(n / 2) * width] = NAN;
    if (spoilt == 'k') k[(size_t)middle * d] = NAN;
    if (spoilt == 'v') v[(size_t)middle * d] = NAN;
    side s = open_side(variant, c, threads);
    const lazy_attending a = { qkv, (int)width, in_play + length - n, n, { k, v, length }, in_play, length, INT32_MAX };
    RUN(s, attention, y, &a, NULL);
    close_side(s);
    seed = before; /* the next one's data are the same */
    return y;
}

/* True if an output of the row's first head is NaN. */
static bool lost(const float *y, int row, const lazy_config *c)
{
    bool nan = false;
    for (int i = 0; i < c->head_dim; i++) nan = nan || isnan(y[row * c->n_heads * c->head_dim + i]);
    return nan;
}

/* A NaN reaches every row that sees it; threads change nothing. */
static void test_spoilt_attention(const char *variant, int n, int length)
{
    const lazy_config config = { .n_heads = 2, .n_kv_heads = 1, .head_dim = 24, .ffn = 8 };
    float *alone = spoilt_attention(variant, &config, 1, n, length, 0),
          *shared = spoilt_attention(variant, &config, 4, n, length, 0);
    check(memcmp(alone, shared, (size_t)n * 48 * sizeof *alone) == 0, "%s attention n %d: 4 threads differ from one",
          variant, n);
    for (const char *where = "qkv"; *where; where++) {
        float *y = spoilt_attention(variant, &config, 2, n, length, *where);
        bool spread = true;
        for (int r = n / 2; r < (*where == 'q' ? n / 2 + 1 : n); r++) spread = spread && lost(y, r, &config);
        check(spread, "%s attention n %d: a NaN in %c was lost", variant, n, *where);
        check(*where == 'v' || !lost(y, 0, &config), "%s attention n %d: a NaN in %c reached a row that sees none",
              variant, n, *where);
    }
    all_freed();
}

/* Rows of a part of a prompt have the bits that they have in the whole, where windows begin anywhere. */
static void test_parts(const char *variant)
{
    enum { ROWS = 300, HEADS = 4, D = 40, OUT = HEADS * D, WIDTH = 2 * OUT };
    const lazy_config config = { .n_heads = HEADS, .n_kv_heads = HEADS / 2, .head_dim = D, .ffn = 8 };
    side s = open_side(variant, &config, 2);
    s.stream->many_rows = true;
    for (int i = 0; i < 8; i++) {
        int part = random_int(1, ROWS - 1), first = ROWS - part, window = random_int(1, ROWS);
        float *qkv = random_floats(ROWS * WIDTH), *k = random_floats(ROWS * OUT / 2),
              *v = random_floats(ROWS * OUT / 2);
        float *whole = guarded(ROWS * OUT), *alone = guarded((size_t)part * OUT);
        int32_t *all = random_positions(ROWS, ROWS);
        lazy_attending a = { qkv, WIDTH, all, ROWS, { k, v, ROWS }, all, ROWS, window };
        RUN(s, attention, whole, &a, NULL);
        a.q = qkv + first * WIDTH;
        a.rows += first;
        a.n = part;
        RUN(s, attention, alone, &a, NULL);
        CHECK_FREED(memcmp(whole + first * OUT, alone, (size_t)part * OUT * sizeof *alone) == 0,
                    "%s attention of %d rows, window %d: other bits than among %d", s.name, part, window, ROWS);
    }
    close_side(s);
}

/* Columns (rows x heads) that fill parts of a vector, whole vectors and panels; contiguous and scattered tokens; heads
 * that are not a multiple of a vector; K and V of each type, of numbers that bf16 rounds no further. */
static void test_columns(const char *variant)
{
    const struct {
        int heads, group, head_dim;
    } shapes[] = { { 1, 1, 64 }, { 6, 3, 80 }, { 5, 5, 96 }, { 2, 1, 40 }, { 4, 2, 10 } };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        lazy_config config = { .n_heads = shapes[i].heads, .head_dim = shapes[i].head_dim, .ffn = 8 };
        config.n_kv_heads = config.n_heads / shapes[i].group;
        for (keeping = LAZY_F32; keeping <= LAZY_BF16; keeping++) {
            sides s = open_sides(variant, &config, 2);
            for (int n = 2; n <= 35; n += keeping == LAZY_F32 ? each : 3 * each) {
                int m = random_int(n, 700);
                test_one_attention(s, n, m, n % 2 ? m : m + random_int(0, 20));
            }
            test_one_attention(s, SPLIT_KEYS_ROWS + 20, 300, 310);
            close_sides(s);
        }
        keeping = LAZY_F32;
    }
    test_spoilt_attention(variant, 2, 700);
    test_spoilt_attention(variant, 20, 700);
    test_spoilt_attention(variant, SPLIT_KEYS_ROWS + 20, 700);
}

void test_attention(const char *variant, const lazy_config *shapes, size_t n_shapes)
{
    seed = 1; /* its data depend on no other file */
    for (const lazy_config *shape = shapes; shape < shapes + n_shapes; shape++) {
        sides s = open_sides(variant, shape, 3);
        for (int i = 0; i < 30; i += each) {
            int m = random_int(1, 300), n = random_int(1, m);
            test_one_attention(s, i % 2 ? n : (n + 15) / 16, m, m + random_int(0, 50));
        }
        test_one_attention(s, 3, 2500, 2600);
        test_one_attention(s, 1, 2501, 2600);
        test_one_attention(s, SPLIT_KEYS_ROWS, 1100, 1200);
        test_one_attention(s, SPLIT_KEYS_ROWS + 1, 1100, 1200);
        test_one_attention(s, 250, 600, 600);
        close_sides(s);
    }
    test_extremes(variant);
    test_parts(variant);
    test_columns(variant);
}
