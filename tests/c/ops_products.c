/* ops_products.c — products of rows with weights: matmul, gated, experts, logits. */
#include "ops.h"

/* A matrix of random weights in `parts` blocks of rows; every block of a dtype of its own where mixed. */
static lazy_matrix random_matrix(int parts, int rows, int cols, lazy_dtype dtype, bool mixed, bool biased)
{
    lazy_matrix w = { .n_parts = parts, .cols = cols };
    for (int i = 0; i < parts; i++) {
        lazy_part *part = &w.part[i];
        part->rows = rows + i;
        part->dtype = mixed ? (lazy_dtype)((dtype + i) % (cols % LAZY_LONGEST_BLOCK ? 3 : LAZY_N_DTYPES)) : dtype;
        w.rows += part->rows;
        if (part->dtype == LAZY_F32) {
            part->data = random_floats((size_t)part->rows * (size_t)cols);
            continue;
        }
        size_t n = (size_t)part->rows * lazy_row_bytes(part->dtype, cols) / sizeof(uint16_t);
        /* bf16: ±0.5 to 2; f16, and with it scales: -2 to 2, of 8 bits for bf16 */
        uint16_t *half = room((n + 1) * sizeof *half);
        uint32_t f16_bits = computing == LAZY_COMPUTE_BF16 && part->dtype == LAZY_F16 ? 0xbbf8 : 0xbbff;
        for (size_t k = 0; k < n; k++)
            half[k] =
                (uint16_t)(part->dtype == LAZY_BF16 ? (random_bits() & 0x80ff) | 0x3f00 : random_bits() & f16_bits);
        part->data = half;
    }
    if (biased) w.bias = random_floats((size_t)w.rows);
    return w;
}

/* A copy of (n, cols) values as products take them: in int8, groups of 32 rounded to multiples of a 127th of their
 * largest value. */
static float *as_operands(const float *x, int n, int cols)
{
    float *copy = room((size_t)n * (size_t)cols * sizeof *copy);
    memcpy(copy, x, (size_t)n * (size_t)cols * sizeof *copy);
    for (int i = 0; i < n * cols && computing == LAZY_COMPUTE_INT8; i += i % cols + 32 > cols ? cols - i % cols : 32) {
        int here = i % cols + 32 > cols ? cols - i % cols : 32;
        float largest = 0;
        for (int j = i; j < i + here; j++) largest = fmaxf(largest, fabsf(copy[j]));
        for (int j = i; j < i + here && largest > 0; j++)
            copy[j] = roundf(copy[j] * (1 / (largest / 127))) * (largest / 127);
    }
    return copy;
}

static bool takes(const lazy_products *few, const lazy_matrix *w, int n)
{
    bool all = few && n <= few->max_unpacked_others;
    for (int i = 0; i < w->n_parts; i++) all = all && few->formats[w->part[i].dtype];
    return all;
}

/* The products that keep the integers of w's blocks, as n is small: in fixed point or in f32; NULL: none do, as those
 * in bf16, whose unit is a pair of values, round them. */
static const lazy_products *products_of_few(side fast, const lazy_matrix *w, int n)
{
    const lazy_arithmetic *a = cpu_of(fast.stream)->arithmetic;
    return takes(a->fewest, w, n) ? a->fewest : takes(a->few, w, n) && a->few->unit == 1 ? a->few : NULL;
}

/* A copy of w as products take it: in bf16, values of blocks are rounded to bf16, if x does not have few rows; in int8,
 * values that are not in blocks are rounded to LAZY_Q8_0. Shares w's bias. */
static lazy_matrix weights_as_operands(const lazy_matrix *w, bool few)
{
    lazy_matrix copy = *w;
    int padded = (w->cols + LAZY_GROUP - 1) / LAZY_GROUP * LAZY_GROUP;
    float *wide = room((size_t)padded * sizeof *wide);
    char *rounded = room((size_t)padded * sizeof *wide);
    for (int i = 0; i < w->n_parts; i++) {
        lazy_part *part = &copy.part[i];
        size_t bytes = lazy_row_bytes(part->dtype, w->cols);
        lazy_dtype to = part->dtype;
        if (computing == LAZY_COMPUTE_BF16 && lazy_is_quantized(to) && !few) to = LAZY_BF16;
        if (computing == LAZY_COMPUTE_INT8 && !lazy_is_quantized(to)) to = LAZY_Q8_0;
        if (to == part->dtype) {
            part->data = memcpy(room((size_t)part->rows * bytes + 1), part->data, (size_t)part->rows * bytes);
            continue;
        }
        float *values = room((size_t)part->rows * (size_t)w->cols * sizeof *values);
        for (int r = 0; r < part->rows; r++) {
            memset(wide, 0, (size_t)padded * sizeof *wide);
            lazy_widen(wide, (const char *)part->data + (size_t)r * bytes, part->dtype, w->cols);
            if (to == LAZY_BF16) lazy_narrow(rounded, wide, to, padded);
            else lazy_quantize(rounded, wide, to, padded);
            lazy_widen(wide, rounded, to, padded);
            memcpy(values + (size_t)r * (size_t)w->cols, wide, (size_t)w->cols * sizeof *values);
        }
        part->data = values;
        part->dtype = LAZY_F32;
    }
    return copy;
}

static void test_matmul(sides s, int n, int parts, int rows, int cols, lazy_dtype dtype, bool mixed, bool biased,
                        bool accumulate)
{
    lazy_matrix w = random_matrix(parts, rows, cols, dtype, mixed, biased);
    size_t size = (size_t)n * (size_t)w.rows;
    float *x = random_floats((size_t)n * (size_t)cols), *got = guarded(size), *want = guarded(size),
          *before = random_floats(size);
    if (accumulate) {
        memcpy(got, before, size * sizeof *got);
        memcpy(want, before, size * sizeof *want);
    }
    RUN(s.fast, matmul, got, x, n, &w, accumulate, NULL);
    const lazy_products *few = products_of_few(s.fast, &w, n);
    lazy_matrix taken = weights_as_operands(&w, few);
    float *x_taken = as_operands(x, n, cols);
    RUN(s.plain, matmul, want, x_taken, n, &taken, accumulate, NULL);
    double error = error_of(got, want, size);
    CHECK_FREED(error < (computing == LAZY_COMPUTE_BF16 && few && few->unit > 1 ? FIXED : TOLERANCE),
                "%s matmul n %d, %d parts, rows %d, cols %d, dtype %d%s%s%s: error %.2g", s.fast.name, n, parts, w.rows,
                cols, dtype, mixed ? ", mixed" : "", biased ? ", bias" : "", accumulate ? ", accumulated" : "", error);
}

/* Columns of one block, of several, and so many that they are packed in several stretches. */
static void test_quantized_products(sides s)
{
    uint64_t before = seed; /* a further format changes no other test's data */
    for (int dtype = LAZY_Q8_0; dtype < LAZY_N_DTYPES; dtype++) {
        int block = lazy_formats[dtype].values, long_row = 1024 / block * block + 5 * block;
        for (int n = 1; n <= 20; n += each)
            test_matmul(s, n, 1, random_int(1, 50), block * (n < 3 ? 1 : random_int(1, 12)), (lazy_dtype)dtype, false,
                        n % 5 == 0, n % 2);
        for (int i = 0; i < 6; i++)
            test_matmul(s, i % 2 ? UNPACKED_ROWS_LIMIT + random_int(1, 80) : random_int(1, 60), random_int(1, 3),
                        random_int(1, 70), block * random_int(1, 12), (lazy_dtype)dtype, false, i % 3 == 0, i % 4 == 0);
        test_matmul(s, UNPACKED_ROWS_LIMIT + 3, 1, 37, long_row, (lazy_dtype)dtype, false, false, true);
        test_matmul(s, UNPACKED_ROWS_LIMIT + 20, 3, 21, 1280, (lazy_dtype)dtype, true, true, false);
        test_matmul(s, 5, 3, 21, 512, (lazy_dtype)dtype, true, false, true);
        /* with few rows' products only if they take all formats */
        test_matmul(s, 1, 3, 21, 512, (lazy_dtype)dtype, true, false, false);
    }
    seed = before;
}

/* In int8, weights of any format that is not in blocks give the products of their blocks, to the bit. */
static void test_rounded_weights(side fast, int n)
{
    int cols = 32 * random_int(1, 40);
    for (int dtype = LAZY_F32; dtype <= LAZY_BF16; dtype++) {
        lazy_matrix w = random_matrix(1, 75, cols, (lazy_dtype)dtype, false, false), blocks = w;
        float *x = random_floats((size_t)(n * cols)), *wide = room((size_t)(75 * cols) * sizeof *wide);
        lazy_widen(wide, w.part[0].data, (lazy_dtype)dtype, 75 * cols);
        for (int i = 0; i < 32; i++) wide[i] *= 0x1p-30f; /* the scale of this group is below those of f16 */
        for (int i = 32; i < 75 * cols; i += 5)
            wide[i] *= 127 * 0x1p-8f * (float)random_int(-128, 128); /* ties, and small ones */
        blocks.part[0].data = room(75 * lazy_row_bytes(LAZY_Q8_0, cols));
        blocks.part[0].dtype = LAZY_Q8_0;
        lazy_quantize((void *)blocks.part[0].data, wide, LAZY_Q8_0, 75 * cols);
        lazy_matrix floats = w;
        floats.part[0].data = wide;
        floats.part[0].dtype = LAZY_F32;
        size_t size = (size_t)n * 75;
        float *got = guarded(size), *want = guarded(size);
        RUN(fast, matmul, got, x, n, &floats, false, NULL);
        RUN(fast, matmul, want, x, n, &blocks, false, NULL);
        CHECK_FREED(memcmp(got, want, size * sizeof *got) == 0,
                    "%s matmul n %d, cols %d: other products than those of blocks of 8 bits", fast.name, n, cols);
    }
}

/* A NaN or an Inf in a row of x, or in a row of weights, reaches every product with it and no other. */
static void test_spoilt_products(side fast, int n, lazy_dtype dtype, float bad)
{
    enum { ROWS = 37, COLS = 256 };
    lazy_matrix w = random_matrix(1, ROWS, COLS, dtype, false, false);
    float *x = random_floats((size_t)n * COLS), *y = guarded((size_t)n * ROWS);
    int row = random_int(0, n - 1), column = dtype == LAZY_F32 ? random_int(0, ROWS - 1) : ROWS, n_wrong = 0;
    x[row * COLS + random_int(0, COLS - 1)] = bad;
    if (column < ROWS) ((float *)w.part[0].data)[column * COLS + random_int(0, COLS - 1)] = bad;
    RUN(fast, matmul, y, x, n, &w, false, NULL);
    for (int i = 0; i < n * ROWS; i++) n_wrong += isfinite(y[i]) == (i / ROWS == row || i % ROWS == column);
    CHECK_FREED(n_wrong == 0, "%s matmul n %d, dtype %d: %g is lost or spreads to %d products", fast.name, n, dtype,
                bad, n_wrong);
}

/* y = x . w of a table's dots, by itself. */
static float *dots_of(const lazy_products *products, const float *x, int n, const void *w, lazy_dtype dtype, int rows,
                      int cols)
{
    enum { ROOM = 1 << 16 };
    size_t stride = lazy_row_operands(products, cols), size = (size_t)(n * rows);
    float *operands = guarded((size_t)n * stride), *y = guarded(size);
    for (int r = 0; r < n; r++) products->convert(operands + (size_t)r * stride, x + r * cols, cols);
    float *room = guarded(ROOM);
    products->dots(y, rows, operands, (int64_t)stride, n, w, dtype, rows, cols, false, room);
    return y;
}

/* Rounding to fixed point changes each value of x by at most a share of the largest one of its group, whatever the
 * groups' sizes are: zeros, subnormals and the largest numbers among them. Units of 1 are f32. */
static void test_fixed_products(const char *variant)
{
    enum { ROWS = 9, MOST = 8 };
    const lazy_products *products = lazy_arithmetic_find(variant, computing)->fewest;
    for (int dtype = LAZY_Q8_0; products && dtype < LAZY_N_DTYPES; dtype++)
        for (int i = 0; i < 60 && products->formats[dtype]; i += each) {
            int n = i % products->max_unpacked_others + 1, cols = lazy_formats[dtype].values * random_int(1, 20);
            double share = products->unit == 1 ? 0x1p-23 : (const double[]){ 0x1p-23, 0x1p-15, 1.0 / 254 }[computing];
            lazy_matrix w = random_matrix(1, ROWS, cols, (lazy_dtype)dtype, false, false);
            float *x = random_floats((size_t)(n * cols)), *wide = room((size_t)(ROWS * cols) * sizeof *wide), sizes[5];
            for (int k = 0; k < 5; k++) sizes[k] = ldexpf(1.0f, random_int(-149, 100));
            for (int k = 0; k < n * cols; k++)
                x[k] *= k % 7 ? sizes[k / 32 % 5] : k / 32 % 4 ? 0.001f * sizes[k / 32 % 5] : 0.0f;
            lazy_widen(wide, w.part[0].data, (lazy_dtype)dtype, ROWS * cols);
            float *y = dots_of(products, x, n, w.part[0].data, (lazy_dtype)dtype, ROWS, cols);
            for (int j = 0; j < n * ROWS; j++) {
                const float *row = x + j / ROWS * cols, *weights = wide + j % ROWS * cols;
                double sum = 0, bound = 0;
                for (int k = 0; k < cols; k += 32) {
                    double most = 0, magnitude = 0, products_of_group = 0;
                    for (int e = k; e < k + 32; e++) {
                        sum += (double)row[e] * weights[e];
                        most = fmax(most, fabs(row[e]));
                        magnitude += fabs(weights[e]);
                        products_of_group += fabs((double)row[e] * weights[e]);
                    }
                    /* in int8 a group whose scale would be subnormal becomes 0 */
                    bound += (1.01 * share * most + (computing == LAZY_COMPUTE_INT8 ? 127 : 1) * FLT_MIN) * magnitude +
                             TOLERANCE * products_of_group;
                }
                check(fabs(y[j] - sum) <= bound, "%s n %d, %s, cols %d: %g is not %g within %g", products->name, n,
                      lazy_formats[dtype].name, cols, y[j], sum, bound);
            }
            check(all_freed(), "%s n %d, cols %d: wrote outside operands, room or output", products->name, n, cols);
        }
}

static void test_plain_products(sides s)
{
    for (int n = 1; n <= 130; n += each)
        test_matmul(s, n, 1, random_int(1, 130), random_int(1, 130), (lazy_dtype)(n % 3), false, n % 5 == 0, n % 2);
    for (int i = 0; i < 20; i += each)
        test_matmul(s, random_int(1, 70), random_int(1, 3), random_int(1, 60), random_int(1, 130), (lazy_dtype)(i % 3),
                    i % 2, i % 3 == 0, i % 4 == 0);
    test_matmul(s, 3, 2, 40, 5000, LAZY_BF16, false, false, false);
    test_matmul(s, 33, 1, 40, 5000, LAZY_BF16, false, true, true);
    /* tiles of weights as they are stored, or not because rows are no whole number of operands */
    test_matmul(s, 9, 2, 40, 5001, LAZY_BF16, false, false, true);
    test_matmul(s, 13, 1, 70, 4128, LAZY_BF16, false, true, false);
    test_matmul(s, 20, 2, 70, 4128, LAZY_BF16, true, false, true);
    /* enough rows to pack the weights: in one stretch and several, rows that are copied first, blocks by rows and by
     * columns */
    for (int i = 0; i < 20; i += each)
        test_matmul(s, UNPACKED_ROWS_LIMIT + random_int(1, 80), random_int(1, 3), random_int(1, 130),
                    random_int(1, 130), (lazy_dtype)(i % 3), i % 2, i % 3 == 0, i % 4 == 0);
    test_matmul(s, UNPACKED_ROWS_LIMIT + 1, 1, 37, 1024, LAZY_F16, false, false, true);
    test_matmul(s, UNPACKED_ROWS_LIMIT + 5, 1, 33, 2048, LAZY_F32, false, true, false);
    test_matmul(s, UNPACKED_ROWS_LIMIT + 40, 2, 30, 2100, LAZY_BF16, true, true, true);
    test_matmul(s, 500, 3, 70, 96, LAZY_F16, false, true, false);
}

static void test_gated(sides s, int n, int cols)
{
    const lazy_config *c = s.config;
    lazy_matrix w = random_matrix(1, 2 * c->ffn, cols, LAZY_BF16, false, false);
    size_t size = (size_t)n * (size_t)c->ffn;
    float *x = random_floats((size_t)n * (size_t)cols), *got = guarded(size), *want = guarded(size);
    for (size_t i = 0; i < (size_t)n * (size_t)cols; i += 17) x[i] *= 16; /* gates far from 0, too */
    RUN(s.fast, gated, got, x, n, &w, NULL);
    lazy_matrix taken = weights_as_operands(&w, false);
    float *x_taken = as_operands(x, n, cols);
    RUN(s.plain, gated, want, x_taken, n, &taken, NULL);
    double error = error_of(got, want, size);
    CHECK_FREED(error < TOLERANCE, "%s gated n %d, cols %d: error %.2g", s.fast.name, n, cols, error);
}

static void test_gated_products(const char *variant, const lazy_config *config)
{
    sides s = open_sides(variant, config, 3);
    for (int n = 1; n <= 40; n += 3) test_gated(s, n, config->hidden);
    for (int i = 0; i < 6; i++)
        test_gated(s, UNPACKED_ROWS_LIMIT + random_int(1, 80), i == 3 ? 1024 : i == 5 ? 2100 : random_int(1, 130));
    close_sides(s);
}

/* The same product by one thread and by several: each sum has an order of its own, so all are equal to the bit,
 * whichever columns went through the streams together. */
static void test_any_threads(const char *variant)
{
    const lazy_config config = { .n_heads = 1, .n_kv_heads = 1, .head_dim = 2, .ffn = 9 };
    enum { NUMBERS = 6 };
    const int numbers[NUMBERS] = { 1, 2, 3, 5, 16, 40 };
    side with[NUMBERS];
    for (int t = 0; t < NUMBERS; t++) with[t] = open_side(variant, &config, numbers[t]);
    for (int i = 0; i < 40; i += each) {
        lazy_dtype dtype = (lazy_dtype)(i % LAZY_N_DTYPES);
        int n = i % 5 == 0 ? random_int(UNPACKED_ROWS_LIMIT + 1, 400) : random_int(1, i % 5 == 1 ? 2 : 60),
            cols = lazy_is_quantized(dtype) ? 256 * random_int(1, 3) : random_int(1, 75);
        lazy_matrix w = random_matrix(3, 4 * random_int(1, 60) + 1 + i % 3, cols, dtype, false, false);
        size_t size = (size_t)n * (size_t)w.rows;
        float *x = random_floats((size_t)n * (size_t)cols), *alone = guarded(size), *shared = guarded(size);
        for (int t = 0; t < NUMBERS; t++) {
            RUN(with[t], matmul, t == 0 ? alone : shared, x, n, &w, false, NULL);
            check(t == 0 || memcmp(alone, shared, size * sizeof *x) == 0,
                  "%s matmul n %d, rows %d, cols %d: %d threads differ from one", variant, n, w.rows, cols, numbers[t]);
        }
        check(all_freed(), "%s matmul n %d, cols %d: wrote outside its output", variant, n, cols);
    }
    for (int t = 0; t < NUMBERS; t++) close_side(with[t]);
}

/* Rows so short that one task could take hundreds of panels: gate and up of a block must still fit beside them. */
static void test_short_gates(const char *variant)
{
    bool wide = lazy_arithmetic_find(variant, computing)->products->tile_rows > 6;
    lazy_config config = { .n_heads = 1, .n_kv_heads = 1, .head_dim = 2, .ffn = wide ? 18240 : 45000 };
    sides s = open_sides(variant, &config, 1);
    test_gated(s, wide ? UNPACKED_ROWS_LIMIT + 1 : 33, wide ? 16 : 8);
    close_sides(s);
}

/* Columns longer than a panel, and more rows than have room for gate and up of a task: panels are packed for each part
 * of the rows. */
static void test_long_gates(const char *variant)
{
    lazy_config config = { .n_heads = 1, .n_kv_heads = 1, .head_dim = 2, .ffn = 672 };
    sides s = open_sides(variant, &config, 1);
    test_gated(s, 520, 1030);
    close_sides(s);
}

enum { EXPERTS = 6 };

typedef struct expert_weights {
    lazy_experts experts;
    lazy_matrix gate_up[EXPERTS], down[EXPERTS];
} expert_weights;

/* Random weights of experts, of a dtype of its own each where mixed; the router has the same weights for two. */
static void random_experts(expert_weights *w, int d, int ffn, lazy_dtype first, bool mixed)
{
    w->experts = (lazy_experts){ random_matrix(1, EXPERTS, d, LAZY_F32, false, false), w->gate_up, w->down };
    float *router = (float *)w->experts.router.part[0].data;
    memcpy(router + 4 * d, router + d, (size_t)d * sizeof *router);
    for (int e = 0; e < EXPERTS; e++) {
        lazy_dtype dtype = mixed ? (lazy_dtype)((first + e) % LAZY_N_DTYPES) : first;
        w->gate_up[e] = random_matrix(1, ffn, d, dtype, false, false);
        w->gate_up[e].part[1] = random_matrix(1, ffn, d, dtype, false, false).part[0];
        w->gate_up[e].n_parts = 2;
        w->gate_up[e].rows = 2 * ffn;
        w->down[e] = random_matrix(1, d, ffn, dtype, false, false);
    }
}

static void test_mix_experts(sides s, int n, int d, lazy_dtype dtype, bool mixed, bool accumulate)
{
    expert_weights w, taken;
    random_experts(&w, d, s.config->expert_ffn, dtype, mixed);
    taken.experts = (lazy_experts){ w.experts.router, taken.gate_up, taken.down };
    const lazy_products *gate = products_of_few(s.fast, &w.gate_up[0], n),
                        *down = products_of_few(s.fast, &w.down[0], n);
    for (int e = 1; e < EXPERTS; e++) { /* if all experts' can be the same */
        if (gate != products_of_few(s.fast, &w.gate_up[e], n)) gate = NULL;
        if (down != products_of_few(s.fast, &w.down[e], n)) down = NULL;
    }
    for (int e = 0; e < EXPERTS; e++) {
        taken.gate_up[e] = weights_as_operands(&w.gate_up[e], gate);
        taken.down[e] = weights_as_operands(&w.down[e], down);
    }
    size_t size = (size_t)n * (size_t)d;
    float *x = random_floats(size), *got = guarded(size), *want = guarded(size), *others = random_floats(size),
          *again = guarded(size);
    for (size_t i = 0; i < size && accumulate; i++) got[i] = want[i] = again[i] = random_float();
    RUN(s.fast, mix_experts, got, x, n, &w.experts, accumulate, NULL);
    RUN(s.plain, mix_experts, want, x, n, &taken.experts, accumulate, NULL);
    double error = error_of(got, want, size);
    /* in f32 the errors of two sums, one over the values of the other */
    check(error < (const double[]){ 2 * TOLERANCE, ROUNDED, INTEGERS }[computing],
          "%s mix_experts n %d, d %d, dtype %d: error %.2g", s.fast.name, n, d, dtype, error);
    memcpy(others, x, (size_t)(n / 2) * (size_t)d * sizeof *x); /* the rows behind choose other experts */
    RUN(s.fast, mix_experts, again, others, n, &w.experts, accumulate, NULL);
    CHECK_FREED(memcmp(got, again, (size_t)(n / 2) * (size_t)d * sizeof *got) == 0,
                "%s mix_experts n %d, d %d, dtype %d: rows depend on those beside them", s.fast.name, n, d, dtype);
}

static void test_spoilt_router(side fast, float bad)
{
    expert_weights w;
    float x[16], y[16];
    random_experts(&w, 16, fast.stream->config->expert_ffn, LAZY_F32, false);
    ((float *)w.experts.router.part[0].data)[16 * random_int(0, EXPERTS - 1) + 3] = bad;
    for (int i = 0; i < 16; i++) x[i] = -1;
    RUN(fast, mix_experts, y, x, 1, &w.experts, false, NULL);
    for (int i = 0; i < 16; i++) check(isnan(y[i]), "%s mix_experts: a router's %g is not noticed", fast.name, bad);
    all_freed();
}

static void test_experts(const char *variant)
{
    seed = 1; /* its data depend on no other test */
    for (int k = 1; k <= EXPERTS; k += 2) {
        lazy_config config = { .n_heads = 1, .n_kv_heads = 1, .head_dim = 2, .ffn = 1, .n_experts = EXPERTS };
        config.expert_ffn = k == 5 ? 256 : 44;
        config.experts_per_token = k;
        config.normed_experts = k > 1;
        config.gelu = k == 3;
        sides s = open_sides(variant, &config, 3);
        for (int i = 0; i < 24; i += each) {
            int n = i % 4 == 0 ? UNPACKED_ROWS_LIMIT + random_int(1, 80) : random_int(1, i % 4 == 1 ? 4 : 60);
            test_mix_experts(s, n, random_int(1, 100), k == 5 ? LAZY_F32 : (lazy_dtype)(i % 3), false, i % 2);
        }
        test_mix_experts(s, 12, 1024, LAZY_BF16, false, true);
        for (int i = 0; k == 5 && i < 4 * LAZY_N_DTYPES; i += each)
            test_mix_experts(s,
                             i % 4 < 2    ? 1 + i % 4
                             : i % 4 == 2 ? random_int(3, 60)
                                          : UNPACKED_ROWS_LIMIT + 9,
                             256, (lazy_dtype)(i / 4), i % 8 > 3, i % 2);
        test_spoilt_router(s.fast, NAN);
        test_spoilt_router(s.fast, INFINITY);
        test_spoilt_router(s.fast, -INFINITY);
        close_sides(s);
    }
}

/* Logits of n rows, with a cap and without; what is not finite becomes NaN, and it alone. */
static void test_logits(sides s, int n, int vocab, float cap)
{
    lazy_matrix w = random_matrix(1, vocab, 64, LAZY_F32, false, false);
    size_t size = (size_t)(n * vocab);
    float *x = random_floats((size_t)n * 64), *got = guarded(size), *want = guarded(size);
    int bad = random_int(0, vocab - 1), n_wrong = 0;
    s.config->logit_cap = cap;
    RUN(s.fast, logits, got, x, n, &w, NULL);
    lazy_matrix taken = weights_as_operands(&w, false);
    float *x_taken = as_operands(x, n, 64);
    RUN(s.plain, logits, want, x_taken, n, &taken, NULL);
    double error = error_of(got, want, size);
    check(error < TOLERANCE, "%s logits n %d, vocab %d, cap %g: error %.2g", s.fast.name, n, vocab, cap, error);
    ((float *)w.part[0].data)[bad * 64] = INFINITY;
    RUN(s.fast, logits, got, x, n, &w, NULL);
    for (int i = 0; i < n * vocab; i++) n_wrong += isfinite(got[i]) == (i % vocab == bad);
    CHECK_FREED(n_wrong == 0, "%s logits n %d, vocab %d, cap %g: Inf is lost or spreads", s.fast.name, n, vocab, cap);
    s.config->logit_cap = 0;
}

void test_products(const char *variant, const lazy_config *shapes, size_t n_shapes)
{
    seed = 1; /* its data depend on no other file */
    sides s = open_sides(variant, &shapes[0], 2);
    test_plain_products(s);
    for (int vocab = 1; vocab <= 40; vocab += each) test_logits(s, vocab % 3 + 1, vocab, vocab % 2 ? 0 : 1.5f);
    test_quantized_products(s);
    for (int n = 1; n <= 2 * UNPACKED_ROWS_LIMIT; n += n < 8 ? 1 : 40) {
        if (computing == LAZY_COMPUTE_INT8) test_rounded_weights(s.fast, n);
        for (int dtype = 0; dtype < LAZY_N_DTYPES; dtype++)
            test_spoilt_products(s.fast, n, (lazy_dtype)dtype, n % 2 ? NAN : INFINITY);
    }
    close_sides(s);
    test_fixed_products(variant);
    for (size_t i = 0; i < n_shapes; i++) test_gated_products(variant, &shapes[i]);
    test_any_threads(variant);
    test_short_gates(variant);
    if (computing == LAZY_COMPUTE_F32) test_long_gates(variant);
    test_experts(variant);
}
