/* ops_selection.c — which tokens stay: smoothing, selection, and lists of positions. */
#include "ops.h"

static bool is_free(uint8_t flags) { return (flags & ~LAZY_JOINED) == LAZY_PRUNABLE; }

/* rank of token j among the free ones: how many come before it by (score, position) */
static int rank_of(int j, const float *scores, const uint8_t *flags, const int32_t *in_play, int m)
{
    int rank = 0;
    for (int i = 0; i < m; i++)
        if (is_free(flags[in_play[i]]) && (scores[i] > scores[j] || (scores[i] == scores[j] && i < j))) rank++;
    return rank;
}

static void test_select(side fast, int m)
{
    int length = m + random_int(0, m), n_free = 0, levels = random_int(1, 2 * m);
    int32_t *in_play = random_positions(m, length), *kept = guarded((size_t)m);
    uint8_t *flags = room((size_t)length);
    float *scores = room((size_t)m * sizeof *scores);
    for (int i = 0; i < length; i++) {
        flags[i] = (uint8_t)random_int(0, 9) > 1 ? LAZY_PRUNABLE : (uint8_t)random_int(0, 3);
        if (random_int(0, 1)) flags[i] |= LAZY_JOINED; /* which changes nothing */
    }
    for (int j = 0; j < m; j++) {
        scores[j] = (float)random_int(0, levels) / (float)levels / (float)m; /* many ties */
        n_free += is_free(flags[in_play[j]]);
    }
    int budget = random_int(0, n_free), n = 0;
    float lowered = random_int(0, 1) ? 0.0f : 0.5f / (float)m; /* some scores below 0 */
    for (int j = 0; j < m; j++) scores[j] -= lowered;
    RUN(fast, select, kept, in_play, scores, m, flags, budget, NULL);
    bool same = true;
    for (int j = 0; j < m; j++)
        if (!is_free(flags[in_play[j]]) || rank_of(j, scores, flags, in_play, m) < budget)
            same = same && kept[n++] == in_play[j];
    check(same, "select m %d, budget %d of %d free", m, budget, n_free);

    for (int j = 0; j < m; j++) scores[j] = fabsf(scores[j]);
    double share = random_float() * 0.5 + 0.5, total = 0, held = 0;
    int by_mass = -1, expected = 0;
    for (int j = 0; j < m; j++)
        if (flags[in_play[j]] & LAZY_PRUNABLE) {
            total += scores[j];
            if (flags[in_play[j]] & LAZY_FORCED) held += scores[j];
        }
    for (; expected < n_free && held < share * total; expected++)
        for (int j = 0; j < m; j++)
            if (is_free(flags[in_play[j]]) && rank_of(j, scores, flags, in_play, m) == expected) held += scores[j];
    RUN(fast, mass, &by_mass, in_play, scores, m, flags, share, NULL);
    check(by_mass == expected, "mass %g of m %d: %d, not %d", share, m, by_mass, expected);

    lazy_error err = { 0 };
    scores[random_int(0, m - 1)] = NAN;
    int code = RUN(fast, select, in_play, in_play, scores, m, flags, 0, &err);
    CHECK_FREED(code == LAZY_CHECKPOINT && strstr(err.message, "position"), "select with a NaN: code %d, \"%s\"", code,
                err.message);
}

/* Attention-like scores: some are equal, some are tiny beside their neighbours. */
static void test_smooth(sides s, int m, int width)
{
    float *scores = room((size_t)m * sizeof *scores), *got = guarded((size_t)m), *want = guarded((size_t)m);
    for (int j = 0; j < m; j++)
        scores[j] = random_int(0, 3) ? exp2f(-(float)random_int(0, 120)) * fabsf(random_float()) : 1.0f;
    for (int j = 0; j < m / 2 && width % 4 == 1; j++) scores[j] = 0; /* behind the window */
    RUN(s.fast, smooth, got, scores, m, width, NULL);
    RUN(s.plain, smooth, want, scores, m, width, NULL);
    double error = 0;
    for (int j = 0; j < m; j++) error = fmax(error, want[j] > 0 ? fabs(got[j] / (double)want[j] - 1) : got[j] != 0);
    check(error < 1.2e-7, "smooth m %d, width %d: relative error %.2g", m, width, error);

    for (int j = 0; j < m; j++) scores[j] = 0x1.fffffep-20f;
    RUN(s.fast, smooth, got, scores, m, width, NULL);
    check(memcmp(got, scores, (size_t)m * sizeof *got) == 0, "smooth m %d, width %d: equal scores do not stay equal", m,
          width);

    int bad = random_int(0, m - 1);
    scores[bad] = NAN;
    RUN(s.fast, smooth, got, scores, m, width, NULL);
    bool spread = true;
    for (int j = 0; j < m; j++) spread = spread && isnan(got[j]) == (abs(j - bad) <= width / 2);
    CHECK_FREED(spread, "smooth m %d, width %d: a NaN is in the windows around it and nowhere else", m, width);
}

static void test_average(side fast, int m, int n)
{
    float *mean = guarded((size_t)m), *want = room((size_t)m * sizeof *want);
    double *sum = memset(room((size_t)m * sizeof *sum), 0, (size_t)m * sizeof *sum);
    for (int i = 1; i <= n; i++) {
        float *scores = random_floats((size_t)m);
        RUN(fast, average, mean, scores, m, i, NULL);
        for (int j = 0; j < m; j++) sum[j] += scores[j];
    }
    for (int j = 0; j < m; j++) want[j] = (float)(sum[j] / n);
    CHECK_FREED(error_of(mean, want, (size_t)m) < TOLERANCE, "average m %d of %d", m, n);
}

/* Words that gaps cut short; from 80 tokens on, some that are longer than the reach on both sides. */
static void test_complete(side fast, int m)
{
    int32_t *in_play = room((size_t)m * sizeof *in_play), *word = room((size_t)m * sizeof *word);
    float *scores = room((size_t)m * sizeof *scores), *got = guarded((size_t)m);
    for (int j = 0, next = random_int(0, 3); j < m; j++) {
        in_play[j] = next;
        next += random_int(0, 9) || j / 80 % 2 ? 1 : random_int(2, 4);
        scores[j] = (float)random_int(-m, m) / (float)m; /* with ties */
    }
    uint8_t *flags = room((size_t)in_play[m - 1] + 1);
    for (int i = 0; i <= in_play[m - 1]; i++)
        flags[i] = (uint8_t)(random_int(0, 9) < 7 ? random_int(4, 7) : random_int(0, 3));
    for (int j = 80; j < m; j++)
        if (j / 80 % 2) flags[in_play[j]] |= LAZY_JOINED;
    int bad = random_int(0, 2 * m);
    if (bad < m) scores[bad] = NAN;
    word[0] = 0;
    for (int j = 1; j < m; j++)
        word[j] = in_play[j] - in_play[j - 1] > 1 || flags[in_play[j]] < LAZY_JOINED ? j : word[j - 1];
    RUN(fast, complete, got, scores, in_play, m, flags, NULL);
    bool same = true;
    for (int j = 0; j < m; j++) {
        float want = -INFINITY;
        for (int i = 0; i < m; i++)
            if (word[i] == word[j] && abs(i - j) <= 32) want = fmaxf(want, scores[i]); /* which passes a NaN over */
        same = same && (j == bad ? isnan(got[j]) : got[j] == want);
    }
    CHECK_FREED(same, "complete m %d, NaN at %d", m, bad);
}

/* Without an Aux cache, dropped rows are lost and the others are whole. */
static void test_regroup_for_good(side fast, int length)
{
    int n_new = random_int(1, length);
    float *x = random_floats((size_t)length), *y = guarded((size_t)n_new);
    int32_t *rows = random_positions(length, length), *new_rows = random_positions(n_new, length), n_revived = 0;
    RUN(fast, regroup, y, new_rows, n_new, x, rows, length, NULL, 1, &n_revived, NULL);
    bool own = n_revived == 0;
    for (int i = 0; i < n_new; i++) own = own && y[i] == x[new_rows[i]];
    CHECK_FREED(own, "regroup without Aux, %d to %d", length, n_new);
}

/* Rows leave for Aux and come back: after any number of regroupings each row still holds its own token's values. */
static void test_regroup(side fast, int length, int d)
{
    size_t size = (size_t)length * (size_t)d;
    float *aux = guarded(size), *x = guarded(size), *y = guarded(size);
    int32_t n_revived = 0, n_all = 0;
    int n = length;
    int32_t *rows = random_positions(length, length);
    for (size_t i = 0; i < size; i++) x[i] = (float)i; /* row p holds p*d … p*d+d-1 */
    bool own = true;
    for (int round = 0; round < 8; round++) {
        int n_new = random_int(1, length), expected = 0;
        int32_t *new_rows = random_positions(n_new, length);
        for (int i = 0, r = 0; i < n_new; i++) {
            while (r < n && rows[r] < new_rows[i]) r++;
            expected += r == n || rows[r] != new_rows[i];
        }
        RUN(fast, regroup, y, new_rows, n_new, x, rows, n, aux, d, &n_revived, NULL);
        for (int i = 0; i < n_new; i++)
            for (int k = 0; k < d; k++)
                own = own && y[(size_t)i * (size_t)d + (size_t)k] == (float)(new_rows[i] * d + k);
        n_all += expected;
        rows = new_rows;
        n = n_new;
        float *swap = x;
        x = y;
        y = swap;
    }
    check(own, "regroup length %d, d %d: a row holds another token's values", length, d);
    CHECK_FREED(n_revived == n_all, "regroup length %d, d %d: counted the revived ones wrongly", length, d);
}

void test_selection(void)
{
    seed = 1; /* its data depend on no other file */
    sides s = open_sides("generic", &(lazy_config){ .n_heads = 1, .n_kv_heads = 1, .head_dim = 2 }, 1);
    for (int m = 1; m <= 130; m++) {
        test_select(s.fast, m);
        test_smooth(s, m, 2 * random_int(0, 20) + 1);
        test_regroup(s.fast, m, random_int(1, 9));
        test_regroup_for_good(s.fast, m);
        test_average(s.fast, m, random_int(1, 40));
        test_complete(s.fast, m);
    }
    test_complete(s.fast, 700);
    test_smooth(s, MAX_TOKENS, 4095);
    test_smooth(s, MAX_TOKENS, 2 * MAX_TOKENS + 1);
    test_smooth(s, 10, INT32_MAX);
    close_sides(s);
}
