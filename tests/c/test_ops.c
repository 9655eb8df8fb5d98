/* test_ops.c — every op of the CPU backend against its plain reference, on each instruction set this machine runs, in
 * f32 and, where it has kernels for it, in bf16 and int8. The plain reference gets x and weights as they are after the
 * kernels' rounding. Only the powers of attention in bf16, and x in 16 bits of fixed point, are rounded on one side
 * alone.
 *
 * Fresh random data, outputs poisoned with NaN, guard words before and after each of them, odd shapes. Prints what
 * failed, then "N passed, N failed". With `fastest` as argument: on the fastest instruction set and in one shape of
 * layers, which is enough to have all its code run on several threads. */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../../csrc/cpu/cpu.h"
#include "../../csrc/error.h"
#include "../../csrc/format.h"
#include "check.h"
#include "reference.h"

/* ---- random data and guarded memory ----------------------------------------------------- */

static uint64_t seed = 1;

static uint32_t random_bits(void)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 32);
}

static int random_int(int low, int high) { return low + (int)(random_bits() % (uint32_t)(high - low + 1)); }
static float random_float(void) { return (float)((double)random_bits() / 2147483648.0 - 1.0); }

static lazy_compute computing;
static lazy_dtype keeping; /* K and V */

enum { GUARDS = 16 };
static const uint32_t GUARD = 0x7fc0dead; /* a NaN of our own */

static struct block {
    uint32_t *memory;
    bool guarded;
    size_t n; /* words between the guards */
} blocks[1000];
static size_t n_blocks;

__attribute__((noinline)) static void *block_of(size_t bytes, bool guarded, size_t n)
{
    if (n_blocks == sizeof blocks / sizeof *blocks) abort();
    uint32_t *memory = malloc(bytes);
    blocks[n_blocks++] = (struct block){ memory, guarded, n };
    return memory;
}

/* Memory of the test under way, without guards: a sanitizer sees what is read behind its end. */
static void *room(size_t bytes) { return block_of(bytes, false, 0); }

/* n words of the test under way between guards, poisoned with NaN. */
static void *guarded(size_t n)
{
    uint32_t *memory = block_of((n + 2 * GUARDS) * sizeof *memory, true, n);
    for (size_t i = 0; i < n + 2 * GUARDS; i++) memory[i] = GUARD;
    return memory + GUARDS;
}

/* Frees the memory of the test under way. True if all guards are whole. */
static bool all_freed(void)
{
    bool whole = true;
    for (const struct block *b = blocks; b < blocks + n_blocks; b++) {
        for (size_t i = 0; b->guarded && i < GUARDS; i++)
            whole = whole && b->memory[i] == GUARD && b->memory[GUARDS + b->n + i] == GUARD;
        free(b->memory);
    }
    n_blocks = 0;
    return whole;
}

static float *random_floats(size_t n)
{
    float *data = room((n + 1) * sizeof *data);
    for (size_t i = 0; i < n; i++) {
        data[i] = random_float();
        if (computing == LAZY_COMPUTE_F32) continue; /* with int8, attention is in bf16 */
        uint32_t bits;
        memcpy(&bits, &data[i], sizeof bits);
        bits &= 0xffff0000;
        memcpy(&data[i], &bits, sizeof bits);
    }
    return data;
}

/* Largest difference as a share of the largest value; NaN anywhere gives infinity. */
static double error_of(const float *got, const float *want, size_t n)
{
    double worst = 0, largest = 1e-30;
    for (size_t i = 0; i < n; i++) {
        if (isnan(got[i]) || isnan(want[i])) return INFINITY;
        worst = fmax(worst, fabs((double)got[i] - want[i]));
        largest = fmax(largest, fabs(want[i]));
    }
    return worst / largest;
}

static const double TOLERANCE = 3e-6; /* of f32 sums against sums in double */
static const double FIXED =
    1e-3; /* where x is rounded to 16 bits of fixed point; test_fixed_products has the bound of each sum */
static const double ROUNDED = 1e-2;  /* where powers in attention, or rows between two products, are rounded to bf16 */
static const double INTEGERS = 3e-2; /* where rows are rounded to integers of 8 bits before each of two products */

/* ---- the two sides ---------------------------------------------------------------------- */

enum { MAX_ROWS = 512, MAX_COLS = 5120, MAX_TOKENS = 20000 };

typedef struct side {
    lazy_backend *backend;
    lazy_stream *stream;
    lazy_config *config;
} side;

static side open_side(const char *variant, const lazy_config *config, int threads)
{
    side s = { .config = malloc(sizeof *config) };
    lazy_error err = { 0 };
    *s.config = *config;
    s.config->hidden = MAX_COLS; /* products of any number of columns up to it; a multiple of 1024, as some of them */
    if (computing != LAZY_COMPUTE_F32)
        s.config->query_scalar = (float)(64 * M_LOG2E * M_LOG2E); /* q is scaled by 1/8 */
    int code;
    if (strcmp(variant, "reference") == 0) {
        code = reference_open(&s.backend, keeping, &err);
    } else {
        setenv("LAZYLLM_CPU", variant, 1);
        code = lazy_cpu_open(&s.backend, threads, computing, keeping, &err);
    }
    if (code || s.backend->ops->stream_open(s.backend, s.config, &s.stream, &err) ||
        s.backend->ops->reserve(s.stream, MAX_ROWS, MAX_TOKENS, &err)) {
        printf("%s: %s\n", variant, err.message);
        exit(1);
    }
    return s;
}

static void close_side(side s)
{
    s.backend->ops->stream_close(s.stream);
    s.backend->ops->close(s.backend);
    free(s.config);
}

/* ---- products --------------------------------------------------------------------------- */

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
        uint16_t *half =
            room((n + 1) * sizeof *half); /* bf16: ±0.5 to 2; f16, and with it scales: -2 to 2, of 8 bits for bf16 */
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

/* Products of so few rows of x that x is rounded to fixed point, and weights keep the integers of their blocks. */
static bool in_fixed_point(side fast, const lazy_matrix *w, int n)
{
    const lazy_products *fixed = cpu_of(fast.stream)->arithmetic->fixed;
    bool takes = fixed && n <= fixed->max_unpacked_others;
    for (int i = 0; i < w->n_parts; i++) takes = takes && fixed->formats[w->part[i].dtype];
    return takes;
}

/* A copy of w as products take it: in bf16, values of blocks are rounded to bf16, if not in fixed point; in int8,
 * values that are not in blocks are rounded to LAZY_Q8_0. Shares w's bias. */
static lazy_matrix weights_as_operands(const lazy_matrix *w, bool fixed)
{
    lazy_matrix copy = *w;
    int padded = (w->cols + LAZY_GROUP - 1) / LAZY_GROUP * LAZY_GROUP;
    float *wide = room((size_t)padded * sizeof *wide);
    char *rounded = room((size_t)padded * sizeof *wide);
    for (int i = 0; i < w->n_parts; i++) {
        lazy_part *part = &copy.part[i];
        size_t bytes = lazy_row_bytes(part->dtype, w->cols);
        lazy_dtype to = part->dtype;
        if (computing == LAZY_COMPUTE_BF16 && lazy_is_quantized(to) && !fixed) to = LAZY_BF16;
        if (computing == LAZY_COMPUTE_INT8 && !lazy_is_quantized(to)) to = LAZY_Q8_0;
        if (to == part->dtype) {
            part->data = memcpy(room((size_t)part->rows * bytes + 1), part->data, (size_t)part->rows * bytes);
            continue;
        }
        float *values = room((size_t)part->rows * (size_t)w->cols * sizeof *values);
        for (int r = 0; r < part->rows; r++) {
            memset(wide, 0, (size_t)padded * sizeof *wide);
            reference_widen(wide, (const char *)part->data + (size_t)r * bytes, part->dtype, w->cols);
            if (to == LAZY_BF16) lazy_narrow(rounded, wide, to, padded);
            else lazy_quantize(rounded, wide, to, padded);
            reference_widen(wide, rounded, to, padded);
            memcpy(values + (size_t)r * (size_t)w->cols, wide, (size_t)w->cols * sizeof *values);
        }
        part->data = values;
        part->dtype = LAZY_F32;
    }
    return copy;
}

static void test_matmul(side fast, side plain, int n, int parts, int rows, int cols, lazy_dtype dtype, bool mixed,
                        bool biased, bool accumulate)
{
    lazy_matrix w = random_matrix(parts, rows, cols, dtype, mixed, biased);
    size_t size = (size_t)n * (size_t)w.rows;
    float *x = random_floats((size_t)n * (size_t)cols), *got = guarded(size), *want = guarded(size),
          *before = random_floats(size);
    if (accumulate) {
        memcpy(got, before, size * sizeof *got);
        memcpy(want, before, size * sizeof *want);
    }
    fast.backend->ops->matmul(fast.stream, got, x, n, &w, accumulate, NULL);
    bool fixed = in_fixed_point(fast, &w, n);
    lazy_matrix taken = weights_as_operands(&w, fixed);
    float *x_taken = as_operands(x, n, cols);
    plain.backend->ops->matmul(plain.stream, want, x_taken, n, &taken, accumulate, NULL);
    double error = error_of(got, want, size);
    check(error < (computing == LAZY_COMPUTE_BF16 && fixed ? FIXED : TOLERANCE),
          "%s matmul n %d, %d parts, rows %d, cols %d, dtype %d%s%s%s: error %.2g", fast.backend->variant, n, parts,
          w.rows, cols, dtype, mixed ? ", mixed" : "", biased ? ", bias" : "", accumulate ? ", accumulated" : "",
          error);
    check(all_freed(), "%s matmul n %d, rows %d, cols %d: wrote outside its output", fast.backend->variant, n, w.rows,
          cols);
}

/* Columns of one block, of several, and so many that they are packed in several stretches. */
static void test_quantized_products(side fast, side plain)
{
    uint64_t before = seed; /* a further format changes no other test's data */
    for (int dtype = LAZY_Q8_0; dtype < LAZY_N_DTYPES; dtype++) {
        int block = lazy_formats[dtype].values, long_row = 1024 / block * block + 5 * block;
        for (int n = 1; n <= 20; n++)
            test_matmul(fast, plain, n, 1, random_int(1, 50), block * (n < 3 ? 1 : random_int(1, 12)),
                        (lazy_dtype)dtype, false, n % 5 == 0, n % 2);
        for (int i = 0; i < 6; i++)
            test_matmul(fast, plain, i % 2 ? UNPACKED_ROWS_LIMIT + random_int(1, 80) : random_int(1, 60),
                        random_int(1, 3), random_int(1, 70), block * random_int(1, 12), (lazy_dtype)dtype, false,
                        i % 3 == 0, i % 4 == 0);
        test_matmul(fast, plain, UNPACKED_ROWS_LIMIT + 3, 1, 37, long_row, (lazy_dtype)dtype, false, false, true);
        test_matmul(fast, plain, UNPACKED_ROWS_LIMIT + 20, 3, 21, 1280, (lazy_dtype)dtype, true, true, false);
        test_matmul(fast, plain, 5, 3, 21, 512, (lazy_dtype)dtype, true, false, true);
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
        reference_widen(wide, w.part[0].data, (lazy_dtype)dtype, 75 * cols);
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
        fast.backend->ops->matmul(fast.stream, got, x, n, &floats, false, NULL);
        fast.backend->ops->matmul(fast.stream, want, x, n, &blocks, false, NULL);
        check(memcmp(got, want, size * sizeof *got) == 0,
              "%s matmul n %d, cols %d: other products than those of blocks of 8 bits", fast.backend->variant, n, cols);
        check(all_freed(), "%s matmul n %d, cols %d: wrote outside its output", fast.backend->variant, n, cols);
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
    fast.backend->ops->matmul(fast.stream, y, x, n, &w, false, NULL);
    for (int i = 0; i < n * ROWS; i++) n_wrong += isfinite(y[i]) == (i / ROWS == row || i % ROWS == column);
    check(n_wrong == 0, "%s matmul n %d, dtype %d: %g is lost or spreads to %d products", fast.backend->variant, n,
          dtype, bad, n_wrong);
    check(all_freed(), "%s matmul n %d, dtype %d: wrote outside its output", fast.backend->variant, n, dtype);
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

/* Quantized weights with few rows, which matmul leaves to the fixed products where it can. */
static void test_quantized_dots(const char *variant)
{
    enum { ROWS = 13, MOST = 8 };
    const lazy_products *products = lazy_arithmetic_find(variant, computing)->products;
    for (int dtype = LAZY_Q8_0; computing != LAZY_COMPUTE_INT8 && dtype < LAZY_N_DTYPES; dtype++)
        for (int n = 1; n <= MOST; n++) {
            int cols = lazy_formats[dtype].values * random_int(1, 9);
            lazy_matrix w = random_matrix(1, ROWS, cols, (lazy_dtype)dtype, false, false);
            lazy_matrix taken = weights_as_operands(&w, false);
            float *x = random_floats((size_t)(n * cols)), *wide = room((size_t)(ROWS * cols) * sizeof *wide),
                  want[MOST * ROWS];
            reference_widen(wide, taken.part[0].data, taken.part[0].dtype, ROWS * cols);
            for (int i = 0; i < n * ROWS; i++) {
                double sum = 0;
                for (int k = 0; k < cols; k++) sum += (double)x[i / ROWS * cols + k] * wide[i % ROWS * cols + k];
                want[i] = (float)sum;
            }
            float *y = dots_of(products, x, n, w.part[0].data, (lazy_dtype)dtype, ROWS, cols);
            double error = error_of(y, want, (size_t)(n * ROWS));
            check(error < TOLERANCE, "%s dots n %d, %s, cols %d: error %.2g", products->name, n,
                  lazy_formats[dtype].name, cols, error);
            check(all_freed(), "%s dots n %d, cols %d: wrote outside operands, room or output", products->name, n,
                  cols);
        }
}

/* Rounding to fixed point changes each value of x by at most a share of the largest one of its group, whatever the
 * groups' sizes are: zeros, subnormals and the largest numbers among them. */
static void test_fixed_products(const char *variant)
{
    enum { ROWS = 9, MOST = 8 };
    const lazy_products *products = lazy_arithmetic_find(variant, computing)->fixed;
    for (int dtype = LAZY_Q8_0; products && dtype < LAZY_N_DTYPES; dtype++)
        for (int i = 0; i < 60 && products->formats[dtype]; i++) {
            int n = i % products->max_unpacked_others + 1, cols = lazy_formats[dtype].values * random_int(1, 20);
            double share = computing == LAZY_COMPUTE_F32    ? 0x1p-23
                           : computing == LAZY_COMPUTE_BF16 ? 0x1p-15
                                                            : 1.0 / 254;
            lazy_matrix w = random_matrix(1, ROWS, cols, (lazy_dtype)dtype, false, false);
            float *x = random_floats((size_t)(n * cols)), *wide = room((size_t)(ROWS * cols) * sizeof *wide), sizes[5];
            for (int k = 0; k < 5; k++) sizes[k] = ldexpf(1.0f, random_int(-149, 100));
            for (int k = 0; k < n * cols; k++)
                x[k] *= k % 7 ? sizes[k / 32 % 5] : k / 32 % 4 ? 0.001f * sizes[k / 32 % 5] : 0.0f;
            reference_widen(wide, w.part[0].data, (lazy_dtype)dtype, ROWS * cols);
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

static void test_products(side fast, side plain)
{
    for (int n = 1; n <= 130; n++)
        test_matmul(fast, plain, n, 1, random_int(1, 130), random_int(1, 130), (lazy_dtype)(n % 3), false, n % 5 == 0,
                    n % 2);
    for (int i = 0; i < 20; i++)
        test_matmul(fast, plain, random_int(1, 70), random_int(1, 3), random_int(1, 60), random_int(1, 130),
                    (lazy_dtype)(i % 3), i % 2, i % 3 == 0, i % 4 == 0);
    test_matmul(fast, plain, 3, 2, 40, 5000, LAZY_BF16, false, false, false);
    test_matmul(fast, plain, 33, 1, 40, 5000, LAZY_BF16, false, true, true);
    /* enough rows to pack the weights: in one stretch and several, rows that are copied first, blocks by rows and by
     * columns */
    for (int i = 0; i < 20; i++)
        test_matmul(fast, plain, UNPACKED_ROWS_LIMIT + random_int(1, 80), random_int(1, 3), random_int(1, 130),
                    random_int(1, 130), (lazy_dtype)(i % 3), i % 2, i % 3 == 0, i % 4 == 0);
    test_matmul(fast, plain, UNPACKED_ROWS_LIMIT + 1, 1, 37, 1024, LAZY_F16, false, false, true);
    test_matmul(fast, plain, UNPACKED_ROWS_LIMIT + 5, 1, 33, 2048, LAZY_F32, false, true, false);
    test_matmul(fast, plain, UNPACKED_ROWS_LIMIT + 40, 2, 30, 2100, LAZY_BF16, true, true, true);
    test_matmul(fast, plain, 500, 3, 70, 96, LAZY_F16, false, true, false);
}

static void test_gated(side fast, side plain, int n, int cols)
{
    const lazy_config *c = fast.stream->config;
    lazy_matrix w = random_matrix(1, 2 * c->ffn, cols, LAZY_BF16, false, false);
    size_t size = (size_t)n * (size_t)c->ffn;
    float *x = random_floats((size_t)n * (size_t)cols), *got = guarded(size), *want = guarded(size);
    for (size_t i = 0; i < (size_t)n * (size_t)cols; i += 17) x[i] *= 16; /* gates far from 0, too */
    fast.backend->ops->gated(fast.stream, got, x, n, &w, NULL);
    lazy_matrix taken = weights_as_operands(&w, false);
    float *x_taken = as_operands(x, n, cols);
    plain.backend->ops->gated(plain.stream, want, x_taken, n, &taken, NULL);
    double error = error_of(got, want, size);
    check(error < TOLERANCE, "%s gated n %d, cols %d: error %.2g", fast.backend->variant, n, cols, error);
    check(all_freed(), "%s gated n %d: wrote outside its output", fast.backend->variant, n);
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

static void test_mix_experts(side fast, side plain, int n, int d, lazy_dtype dtype, bool mixed, bool accumulate)
{
    expert_weights w, taken;
    random_experts(&w, d, fast.stream->config->expert_ffn, dtype, mixed);
    taken.experts = (lazy_experts){ w.experts.router, taken.gate_up, taken.down };
    bool fixed_gate = true, fixed_down = true; /* if all experts can be */
    for (int e = 0; e < EXPERTS; e++) {
        fixed_gate = fixed_gate && in_fixed_point(fast, &w.gate_up[e], n);
        fixed_down = fixed_down && in_fixed_point(fast, &w.down[e], n);
    }
    for (int e = 0; e < EXPERTS; e++) {
        taken.gate_up[e] = weights_as_operands(&w.gate_up[e], fixed_gate);
        taken.down[e] = weights_as_operands(&w.down[e], fixed_down);
    }
    size_t size = (size_t)n * (size_t)d;
    float *x = random_floats(size), *got = guarded(size), *want = guarded(size), *others = random_floats(size),
          *again = guarded(size);
    for (size_t i = 0; i < size && accumulate; i++) got[i] = want[i] = again[i] = random_float();
    fast.backend->ops->mix_experts(fast.stream, got, x, n, &w.experts, accumulate, NULL);
    plain.backend->ops->mix_experts(plain.stream, want, x, n, &taken.experts, accumulate, NULL);
    double error = error_of(got, want, size);
    check(error < (computing == LAZY_COMPUTE_F32    ? TOLERANCE
                   : computing == LAZY_COMPUTE_BF16 ? ROUNDED
                                                    : INTEGERS),
          "%s mix_experts n %d, d %d, dtype %d: error %.2g", fast.backend->variant, n, d, dtype, error);
    memcpy(others, x, (size_t)(n / 2) * (size_t)d * sizeof *x); /* the rows behind choose other experts */
    fast.backend->ops->mix_experts(fast.stream, again, others, n, &w.experts, accumulate, NULL);
    check(memcmp(got, again, (size_t)(n / 2) * (size_t)d * sizeof *got) == 0,
          "%s mix_experts n %d, d %d, dtype %d: rows depend on those beside them", fast.backend->variant, n, d, dtype);
    check(all_freed(), "%s mix_experts n %d, d %d: wrote outside its output", fast.backend->variant, n, d);
}

static void test_spoilt_router(side fast, float bad)
{
    expert_weights w;
    float x[16], y[16];
    random_experts(&w, 16, fast.stream->config->expert_ffn, LAZY_F32, false);
    ((float *)w.experts.router.part[0].data)[16 * random_int(0, EXPERTS - 1) + 3] = bad;
    for (int i = 0; i < 16; i++) x[i] = -1;
    fast.backend->ops->mix_experts(fast.stream, y, x, 1, &w.experts, false, NULL);
    for (int i = 0; i < 16; i++)
        check(isnan(y[i]), "%s mix_experts: a router's %g is not noticed", fast.backend->variant, bad);
    all_freed();
}

static void test_experts(const char *variant)
{
    uint64_t before = seed; /* these change no other test's data */
    for (int k = 1; k <= EXPERTS; k += 2) {
        lazy_config config = { .n_layers = 1,
                               .n_heads = 1,
                               .n_kv_heads = 1,
                               .head_dim = 2,
                               .ffn = 1,
                               .n_experts = EXPERTS,
                               .expert_ffn = k == 5 ? 256 : 44,
                               .experts_per_token = k,
                               .normed_experts = k > 1,
                               .gelu = k == 3 };
        side fast = open_side(variant, &config, 3), plain = open_side("reference", &config, 1);
        for (int i = 0; i < 24; i++) {
            int n = i % 4 == 0 ? UNPACKED_ROWS_LIMIT + random_int(1, 80) : random_int(1, i % 4 == 1 ? 4 : 60);
            test_mix_experts(fast, plain, n, random_int(1, 100), k == 5 ? LAZY_F32 : (lazy_dtype)(i % 3), false, i % 2);
        }
        test_mix_experts(fast, plain, 12, 1024, LAZY_BF16, false, true);
        for (int i = 0; k == 5 && i < 4 * LAZY_N_DTYPES; i++)
            test_mix_experts(fast, plain,
                             i % 4 < 2    ? 1 + i % 4
                             : i % 4 == 2 ? random_int(3, 60)
                                          : UNPACKED_ROWS_LIMIT + 9,
                             256, (lazy_dtype)(i / 4), i % 8 > 3, i % 2);
        test_spoilt_router(fast, NAN);
        test_spoilt_router(fast, INFINITY);
        test_spoilt_router(fast, -INFINITY);
        close_side(plain);
        close_side(fast);
    }
    seed = before;
}

static void test_rmsnorm(side fast, side plain, int n, int d)
{
    size_t size = (size_t)n * (size_t)d;
    float *x = random_floats(size), *weight = random_floats((size_t)d), *got = guarded(size), *want = guarded(size);
    /* few values may differ from their mean by its rounding alone */
    bool layer_norm = d >= 8 && random_int(0, 1), accumulate = !layer_norm && random_int(0, 1);
    fast.config->layer_norm = plain.config->layer_norm = layer_norm;
    for (size_t i = 0; i < size; i++) x[i] += layer_norm;
    for (size_t i = 0; i < size && accumulate; i++) got[i] = want[i] = random_float();
    fast.backend->ops->rmsnorm(fast.stream, got, x, n, d, weight, 1e-5f, accumulate, NULL);
    plain.backend->ops->rmsnorm(plain.stream, want, x, n, d, weight, 1e-5f, accumulate, NULL);
    double error = error_of(got, want, size);
    check(error < TOLERANCE, "%s %s n %d, d %d: error %.2g", fast.backend->variant,
          layer_norm ? "layer norm" : "rmsnorm", n, d, error);
    fast.config->layer_norm = plain.config->layer_norm = false;
    check(all_freed(), "%s rmsnorm n %d, d %d: wrote outside its output", fast.backend->variant, n, d);
}

/* Values whose squares overflow f32 are finite all the same, and so is their norm. */
static void test_large_norm(side fast, side plain)
{
    enum { D = 37 };
    float x[D], weight[D], got[D], want[D];
    for (int i = 0; i < D; i++) {
        x[i] = random_float() * 1e25f;
        weight[i] = random_float();
    }
    fast.backend->ops->rmsnorm(fast.stream, got, x, 1, D, weight, 1e-5f, false, NULL);
    plain.backend->ops->rmsnorm(plain.stream, want, x, 1, D, weight, 1e-5f, false, NULL);
    double error = error_of(got, want, D);
    check(error < TOLERANCE, "%s rmsnorm of values near 1e25: error %.2g", fast.backend->variant, error);
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
        s.backend->ops->rmsnorm(s.stream, want, x, n, d, weight, 1e-5f, false, NULL);
        for (int32_t noted = 3; noted <= 9; noted += 6) {
            int32_t first_bad = noted, expected = isfinite(values[v]) ? noted : min_int(noted, 7);
            s.backend->ops->checked_rmsnorm(s.stream, got, x, n, d, weight, 1e-5f, 7, &first_bad, NULL);
            check(first_bad == expected, "%s checked_rmsnorm n %d, d %d, a value of %g, %d noted: %d instead of %d",
                  s.backend->variant, n, d, values[v], noted, first_bad, expected);
            check(memcmp(got, want, size * sizeof *got) == 0, "%s checked_rmsnorm n %d, d %d: other bits than rmsnorm",
                  s.backend->variant, n, d);
        }
        x[at] = kept;
    }
    check(all_freed(), "%s checked_rmsnorm n %d, d %d: wrote outside its output", s.backend->variant, n, d);
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

/* Every 16-bit pattern, in vectors and one by one: subnormals, both infinities and NaN among them. */
static void test_widening(const char *variant)
{
    enum { ALL = 1 << 16 };
    static uint16_t halves[ALL];
    static float vectors[ALL];
    void (*widen)(float *, const void *, lazy_dtype, int) =
        lazy_arithmetic_find(variant, computing)->kernels->rows->widen_row;
    for (int i = 0; i < ALL; i++) halves[i] = (uint16_t)i;
    for (int is_bf16 = 0; is_bf16 < 2; is_bf16++) {
        lazy_dtype dtype = is_bf16 ? LAZY_BF16 : LAZY_F16;
        int fraction_bits = is_bf16 ? 7 : 10, exponent_mask = is_bf16 ? 0xff : 0x1f, bias = is_bf16 ? 127 : 15,
            n_wrong = 0, first_wrong = 0;
        widen(vectors, halves, dtype, ALL);
        for (int i = 0; i < ALL; i++) {
            int exponent = i >> fraction_bits & exponent_mask, fraction = i & ((1 << fraction_bits) - 1);
            double size = exponent == exponent_mask ? (fraction ? NAN : INFINITY)
                          : exponent ? ldexp((1 << fraction_bits) + fraction, exponent - bias - fraction_bits)
                                     : ldexp(fraction, 1 - bias - fraction_bits);
            float want = (float)(i & 0x8000 ? -size : size), single;
            widen(&single, &halves[i], dtype, 1);
            bool right = isnan(want)
                             ? isnan(single) && isnan(vectors[i])
                             : memcmp(&single, &want, sizeof want) == 0 && memcmp(&vectors[i], &want, sizeof want) == 0;
            if (!right && n_wrong++ == 0) first_wrong = i;
        }
        check(n_wrong == 0, "%s widening of %s: %d patterns are wrong, 0x%04x the first", variant,
              is_bf16 ? "bf16" : "f16", n_wrong, first_wrong);
    }
}

/* The kernels' values of quantized weights are those of reference_widen, to the bit: extreme scales, negative ones and
 * 0 among them. */
static void test_dequantization(const char *variant)
{
    enum { BLOCKS = 500 };
    uint64_t before = seed;
    static uint8_t data[BLOCKS * sizeof(lazy_q6_k)];
    static float got[BLOCKS * LAZY_LONGEST_BLOCK], want[BLOCKS * LAZY_LONGEST_BLOCK];
    for (int dtype = LAZY_Q8_0; dtype < LAZY_N_DTYPES; dtype++) {
        int n = BLOCKS * lazy_formats[dtype].values, n_wrong = 0;
        for (size_t i = 0; i < sizeof data; i++) data[i] = (uint8_t)random_bits();
        lazy_arithmetic_find(variant, computing)->kernels->rows->widen_row(got, data, (lazy_dtype)dtype, n);
        reference_widen(want, data, (lazy_dtype)dtype, n);
        for (int i = 0; i < n; i++)
            n_wrong += isnan(want[i]) ? !isnan(got[i]) : memcmp(&got[i], &want[i], sizeof *got) != 0;
        check(n_wrong == 0, "%s widening of %s: %d of %d values are wrong", variant, lazy_formats[dtype].name, n_wrong,
              n);
    }
    seed = before;
}

static void test_surprisal(side fast, side plain, int n, int vocab)
{
    float *logits = random_floats((size_t)n * (size_t)vocab), *got = guarded((size_t)n), *want = guarded((size_t)n);
    int32_t *ids = room((size_t)n * sizeof *ids);
    for (int r = 0; r < n; r++) {
        ids[r] = random_int(0, vocab - 1);
        for (int v = 0; v < vocab; v++)
            logits[(int64_t)r * vocab + v] = 30.0f * logits[(int64_t)r * vocab + v] - 50.0f * (float)(r % 3);
    }
    plain.backend->ops->surprisal(plain.stream, want, logits, n, vocab, ids, NULL); /* leaves them as they are */
    fast.backend->ops->surprisal(fast.stream, got, logits, n, vocab, ids, NULL);
    double error = error_of(got, want, (size_t)n);
    check(error < TOLERANCE, "%s surprisal n %d, vocab %d: error %.2g", fast.backend->variant, n, vocab, error);
    check(all_freed(), "%s surprisal n %d, vocab %d: wrote outside its output", fast.backend->variant, n, vocab);
}

/* Logits that are no number, or infinite, may not pass for a surprisal. */
static void test_bad_surprisal(side fast)
{
    const float bad[] = { NAN, INFINITY };
    for (int i = 0; i < 2; i++) {
        float logits[] = { 1.0f, 2.0f, bad[i], 0.5f }, surprisal = 0.0f;
        fast.backend->ops->surprisal(fast.stream, &surprisal, logits, 1, 4, (int32_t[]){ 1 }, NULL);
        check(!isfinite(surprisal), "%s surprisal beside a logit of %g: %g", fast.backend->variant, bad[i], surprisal);
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
        fast.backend->ops->argmax(fast.stream, &got, logits, vocab, NULL);
        check(got == want, "%s argmax of %d, %d of them bad: %d instead of %d", fast.backend->variant, vocab, n_bad,
              got, want);
    }
}

/* ---- attention -------------------------------------------------------------------------- */

/* An ascending random subset of n of 0 … length-1 that holds the last one. */
static int32_t *random_positions(int n, int length)
{
    int32_t *positions = room((size_t)n * sizeof *positions);
    int left = n - 1, out = 0;
    for (int i = 0; i < length - 1; i++)
        if (random_int(1, length - 1 - i) <= left) {
            positions[out++] = i;
            left--;
        }
    positions[n - 1] = length - 1;
    return positions;
}

/* n of the m tokens in play, the last one among them. */
static int32_t *random_rows(int n, const int32_t *in_play, int m)
{
    int32_t *rows = random_positions(n, m);
    for (int r = 0; r < n; r++) rows[r] = in_play[rows[r]];
    return rows;
}

static void test_attention(side fast, side plain, int n, int m, int length)
{
    float cap = random_int(0, 1) ? 0 : 0.5f + fabsf(random_float());
    fast.config->attention_cap = plain.config->attention_cap = cap;
    int window = random_int(0, 1) ? INT32_MAX : random_int(1, length);
    const lazy_config *c = fast.stream->config;
    size_t d = (size_t)c->head_dim, kv_size = (size_t)length * (size_t)c->n_kv_heads * d,
           size = (size_t)n * (size_t)c->n_heads * d;
    size_t qkv_size = (size_t)n * (size_t)(c->n_heads + 2 * c->n_kv_heads) * d;
    int32_t *in_play = random_positions(m, length), *rows = random_rows(n, in_play, m);
    float *qkv = random_floats(qkv_size), *k = random_floats(kv_size), *v = random_floats(kv_size),
          *got = guarded(size), *want = guarded(size);
    float peaked = computing != LAZY_COMPUTE_F32 ? 4 : 3; /* rows; errors of shares grow with the products */
    for (size_t i = 0; i < qkv_size; i++) qkv[i] *= peaked;
    lazy_kv kv = { k, v, length };
    fast.stream->scores_follow = random_int(0, 1);
    fast.backend->ops->attention(fast.stream, got, qkv, rows, n, kv, in_play, m, window, NULL);
    plain.backend->ops->attention(plain.stream, want, qkv, rows, n, kv, in_play, m, window, NULL);
    double error = error_of(got, want, size);
    check(error < (computing != LAZY_COMPUTE_F32 ? ROUNDED : TOLERANCE),
          "%s attention n %d, m %d, length %d, window %d, head %zu, cap %g: error %.2g", fast.backend->variant, n, m,
          length, window, d, cap, error);

    int queries = random_int(0, 2) ? random_int(1, 20) : 1, first_asking = rows[random_int(0, n - 1)];
    lazy_pooling pooling = random_int(0, 1) ? LAZY_POOLING_MAX : LAZY_POOLING_MEAN;
    bool reads_keys = !fast.stream->scores_follow || (queries > 1 && first_asking < rows[n - 1] && n > 1);
    float *scores = guarded((size_t)m), *expected = guarded((size_t)m);
    plain.backend->ops->scores(plain.stream, expected, qkv, rows, n, queries, pooling, first_asking, kv, in_play, m,
                               window, NULL);
    if (!reads_keys) memset(k, 0xff, kv_size * sizeof *k);
    fast.backend->ops->scores(fast.stream, scores, qkv, rows, n, queries, pooling, first_asking, kv, in_play, m, window,
                              NULL);
    error = error_of(scores, expected, (size_t)m);
    double sum = 0;
    for (int j = 0; j < m; j++) sum += scores[j];
    check(error < TOLERANCE, "%s scores n %d, m %d, window %d, cap %g, queries %d, pooling %d: error %.2g",
          fast.backend->variant, n, m, window, cap, queries, pooling, error);
    check(pooling == LAZY_POOLING_MAX || fabs(sum - 1) < 1e-5, "%s scores n %d, m %d, queries %d: sum %.8g, not 1",
          fast.backend->variant, n, m, queries, sum);
    check(all_freed(), "%s attention and scores n %d, m %d: wrote outside their outputs", fast.backend->variant, n, m);
}

static void test_rotate(side fast, side plain, int n, bool normed)
{
    const lazy_config *c = fast.stream->config;
    size_t d = (size_t)c->head_dim, qkv_size = (size_t)n * (size_t)(c->n_heads + 2 * c->n_kv_heads) * d;
    int length = 2 * n + 3;
    size_t kv_size = (size_t)length * (size_t)c->n_kv_heads * d;
    int32_t *rows = random_positions(n, length);
    float *from = random_floats(qkv_size), *of_q = random_floats((size_t)length * d),
          *of_k = random_floats((size_t)length * d), *weight = random_floats((size_t)c->n_heads * d);
    float *q[2], *k[2], *v[2];
    side sides[] = { fast, plain };
    for (int i = 0; i < 2; i++) {
        q[i] = guarded(qkv_size);
        k[i] = guarded(kv_size);
        v[i] = guarded(kv_size);
        memcpy(q[i], from, qkv_size * sizeof *from);
        memset(k[i], 0, kv_size * sizeof *from);
        memset(v[i], 0, kv_size * sizeof *from);
        sides[i].backend->ops->rotate(sides[i].stream, q[i], rows, n, (lazy_kv){ k[i], v[i], length }, of_q, of_k,
                                      normed ? weight : NULL, normed ? weight : NULL, 1e-6f, NULL);
    }
    size_t q_width = (size_t)c->n_heads * d, width = qkv_size / (size_t)n;
    double error = fmax(error_of(k[0], k[1], kv_size), error_of(v[0], v[1], kv_size));
    for (int r = 0; r < n; r++)
        error = fmax(error, error_of(q[0] + (size_t)r * width, q[1] + (size_t)r * width, q_width));
    check(error < TOLERANCE, "%s rotate n %d, head %zu%s%s: error %.2g", fast.backend->variant, n, d,
          normed ? ", normed" : "", c->layer_norm ? " by layer norm" : "", error);
    check(all_freed(), "%s rotate n %d: wrote outside its outputs", fast.backend->variant, n);
}

/* ---- K and V of 16 bits ----------------------------------------------------------------- */

/* Rounding goes to the nearest of two neighbours, halfway between them to the even one, beyond the last one to
 * infinity. */
static void test_narrowing(lazy_dtype dtype)
{
    const char *name = lazy_formats[dtype].name;
    const uint16_t infinity = dtype == LAZY_BF16 ? 0x7f80 : 0x7c00;
    int n_wrong = 0;
    double low = 0, step = 0;
    for (uint16_t half = 0; half < infinity; half++, low += step) {
        float next;
        reference_widen(&next, &(uint16_t){ (uint16_t)(half + 1) }, dtype, 1);
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
    reference_widen(back, got, dtype, 2);
    check(fits && isnan(back[0]) && back[1] == -INFINITY, "rounding NaN and -Inf to %s: %g and %g", name, back[0],
          back[1]);
}

/* n values of `keeping`, in guarded memory; n is even. */
static void *kept(const float *values, size_t n)
{
    void *data = guarded(n * lazy_row_bytes(keeping, 1) / sizeof(uint32_t));
    lazy_narrow(data, values, keeping, (int)n);
    return data;
}

/* Output and scores of attention with K and V of that type: (n, H D) and (m,). The data are the same in each call. */
static float *attended(const char *variant, const lazy_config *c, lazy_dtype type, int n, int m, int length,
                       int threads)
{
    keeping = type;
    uint64_t before = seed;
    size_t d = (size_t)c->head_dim, kv_size = (size_t)length * (size_t)c->n_kv_heads * d,
           size = (size_t)n * (size_t)c->n_heads * d;
    float *qkv = random_floats((size_t)n * (size_t)(c->n_heads + 2 * c->n_kv_heads) * d), *k = random_floats(kv_size),
          *v = random_floats(kv_size), *y = room((size + (size_t)m) * sizeof *y);
    for (size_t i = 0; i < kv_size; i++) { /* to 8 bits, which every type has */
        k[i] = roundf(k[i] * 128) / 128;
        v[i] = roundf(v[i] * 128) / 128;
    }
    lazy_kv kv = { kept(k, kv_size), kept(v, kv_size), length };
    int32_t *in_play = random_positions(m, length), *rows = random_rows(n, in_play, m);
    int window = random_int(0, 1) ? INT32_MAX : random_int(1, length);
    side s = open_side(variant, c, threads);
    s.stream->scores_follow = n % 2;
    s.backend->ops->attention(s.stream, y, qkv, rows, n, kv, in_play, m, window, NULL);
    s.backend->ops->scores(s.stream, y + size, qkv, rows, n, n / 2 + 1, LAZY_POOLING_MEAN, 0, kv, in_play, m, window,
                           NULL);
    close_side(s);
    keeping = LAZY_F32;
    seed = before;
    return y;
}

/* Attention and scores read the same numbers from any type that holds them: on any number of threads and, where heads
 * are whole vectors, to the bit. */
static void test_kept_attention(const char *variant)
{
    const struct {
        int heads, group, head_dim;
    } shapes[] = { { 9, 3, 64 }, { 6, 6, 80 }, { 2, 1, 40 }, { 4, 2, 10 }, { 14, 14, 128 } };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        lazy_config config = {
            .n_layers = 1, .hidden = 8, .n_heads = shapes[i].heads, .head_dim = shapes[i].head_dim, .ffn = 8
        };
        config.n_kv_heads = config.n_heads / shapes[i].group;
        const int numbers[] = { 1, 2, 5, 20, SPLIT_KEYS_ROWS + 20 };
        bool whole_vectors = shapes[i].head_dim % 16 == 0;
        for (size_t k = 0; k < sizeof numbers / sizeof *numbers; k++) {
            int n = numbers[k], m = random_int(n, 600), length = k % 2 ? m : m + random_int(0, 20);
            size_t size = (size_t)n * (size_t)(config.n_heads * config.head_dim) + (size_t)m;
            float *want = attended(variant, &config, LAZY_F32, n, m, length, 1);
            for (lazy_dtype type = LAZY_F16; type <= LAZY_BF16; type++) {
                float *got = attended(variant, &config, type, n, m, length, 3);
                double error = error_of(got, want, size),
                       tolerance = computing == LAZY_COMPUTE_F32 ? TOLERANCE : ROUNDED;
                check(whole_vectors ? memcmp(got, want, size * sizeof *got) == 0 : error < tolerance,
                      "%s attention n %d, m %d of %d, head %d: K and V in %s differ from F32 by %.2g", variant, n, m,
                      length, config.head_dim, lazy_formats[type].name, error);
            }
            check(all_freed(), "%s attention n %d, m %d of %d: wrote to K or V or outside its output", variant, n, m,
                  length);
        }
    }
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
    *code = s.backend->ops->rotate(s.stream, qkv, rows, n, (lazy_kv){ both, both + words, n }, rope, rope, norm,
                                   value != 0 ? NULL : norm, 1e-6f, err);
    close_side(s);
    keeping = LAZY_F32;
    seed = before;
    return both;
}

/* The values kept are those of f32, rounded once. A finite value beyond the type's range is refused, others are not. */
static void test_kept_rows(const char *variant)
{
    const lazy_config config = { .n_layers = 1, .hidden = 8, .n_heads = 4, .n_kv_heads = 2, .head_dim = 22, .ffn = 8 };
    int code;
    for (lazy_dtype type = LAZY_F16; type <= LAZY_BF16; type++) {
        for (int n = 1; n < 20; n += 6) {
            size_t size = 2 * (size_t)n * 2 * 22;
            lazy_error err = { 0 };
            float *exact = rotated(variant, &config, LAZY_F32, n, 0, false, &code, &err);
            uint16_t *got = rotated(variant, &config, type, n, 0, false, &code, &err),
                     *want = room(size * sizeof *want);
            lazy_narrow(want, exact, type, (int)size);
            check(code == LAZY_OK && memcmp(got, want, size * sizeof *got) == 0,
                  "%s rotate n %d: K or V in %s is not what F32 rounds to", variant, n, lazy_formats[type].name);
            check(all_freed(), "%s rotate n %d: wrote outside K and V", variant, n);
        }
        const float largest = type == LAZY_F16 ? 65504.0f : 0x1.fep127f,
                    beyond = type == LAZY_F16 ? 65520.0f : 0x1.ffp127f;
        const float values[] = { largest, nextafterf(beyond, 0), beyond, -beyond, FLT_MAX, INFINITY, NAN };
        for (size_t i = 0; i < 2 * sizeof values / sizeof *values; i++) {
            lazy_error err = { 0 };
            bool refused = isfinite(values[i / 2]) && fabsf(values[i / 2]) >= beyond;
            rotated(variant, &config, type, 13, values[i / 2], i % 2, &code, &err);
            check(code == (refused ? LAZY_INVALID : LAZY_OK) &&
                      (!refused || strstr(err.message, "a key or value is beyond")),
                  "%s rotate of %g in %s: code %d, \"%s\"", variant, values[i / 2], lazy_formats[type].name, code,
                  err.message);
            check(all_freed(), "%s rotate of %g: wrote outside K and V", variant, values[i / 2]);
        }
    }
}

/* ---- selection and bookkeeping ---------------------------------------------------------- */

/* rank of token j among the free ones: how many come before it by (score, position) */
static int rank_of(int j, const float *scores, const uint8_t *flags, const int32_t *in_play, int m)
{
    int rank = 0;
    for (int i = 0; i < m; i++)
        if (flags[in_play[i]] == LAZY_PRUNABLE && (scores[i] > scores[j] || (scores[i] == scores[j] && i < j))) rank++;
    return rank;
}

static void test_select(side fast, int m)
{
    int length = m + random_int(0, m), n_free = 0, levels = random_int(1, 2 * m);
    int32_t *in_play = random_positions(m, length), *kept = guarded((size_t)m);
    uint8_t *flags = room((size_t)length);
    float *scores = room((size_t)m * sizeof *scores);
    for (int i = 0; i < length; i++)
        flags[i] = (uint8_t)random_int(0, 9) > 1 ? LAZY_PRUNABLE : (uint8_t)random_int(0, 3);
    for (int j = 0; j < m; j++) {
        scores[j] = (float)random_int(0, levels) / (float)levels / (float)m; /* many ties */
        n_free += flags[in_play[j]] == LAZY_PRUNABLE;
    }
    int budget = random_int(0, n_free), n = 0;
    float lowered = random_int(0, 1) ? 0.0f : 0.5f / (float)m; /* some scores below 0 */
    for (int j = 0; j < m; j++) scores[j] -= lowered;
    fast.backend->ops->select(fast.stream, kept, in_play, scores, m, flags, budget, NULL);
    bool same = true;
    for (int j = 0; j < m; j++)
        if (flags[in_play[j]] != LAZY_PRUNABLE || rank_of(j, scores, flags, in_play, m) < budget)
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
            if (flags[in_play[j]] == LAZY_PRUNABLE && rank_of(j, scores, flags, in_play, m) == expected)
                held += scores[j];
    fast.backend->ops->mass(fast.stream, &by_mass, in_play, scores, m, flags, share, NULL);
    check(by_mass == expected, "mass %g of m %d: %d, not %d", share, m, by_mass, expected);

    lazy_error err = { 0 };
    scores[random_int(0, m - 1)] = NAN;
    int code = fast.backend->ops->select(fast.stream, in_play, in_play, scores, m, flags, 0, &err);
    check(code == LAZY_CHECKPOINT && strstr(err.message, "position"), "select with a NaN: code %d, \"%s\"", code,
          err.message);
    check(all_freed(), "select m %d: wrote outside its output", m);
}

/* Attention-like scores: some are equal, some are tiny beside their neighbours. */
static void test_smooth(side fast, side plain, int m, int width)
{
    float *scores = room((size_t)m * sizeof *scores), *got = guarded((size_t)m), *want = guarded((size_t)m);
    for (int j = 0; j < m; j++)
        scores[j] = random_int(0, 3) ? exp2f(-(float)random_int(0, 120)) * fabsf(random_float()) : 1.0f;
    for (int j = 0; j < m / 2 && width % 4 == 1; j++) scores[j] = 0; /* behind the window */
    fast.backend->ops->smooth(fast.stream, got, scores, m, width, NULL);
    plain.backend->ops->smooth(plain.stream, want, scores, m, width, NULL);
    double error = 0;
    for (int j = 0; j < m; j++) error = fmax(error, want[j] > 0 ? fabs(got[j] / (double)want[j] - 1) : got[j] != 0);
    check(error < 1.2e-7, "smooth m %d, width %d: relative error %.2g", m, width, error);

    for (int j = 0; j < m; j++) scores[j] = 0x1.fffffep-20f;
    fast.backend->ops->smooth(fast.stream, got, scores, m, width, NULL);
    check(memcmp(got, scores, (size_t)m * sizeof *got) == 0, "smooth m %d, width %d: equal scores do not stay equal", m,
          width);

    int bad = random_int(0, m - 1);
    scores[bad] = NAN;
    fast.backend->ops->smooth(fast.stream, got, scores, m, width, NULL);
    bool spread = true;
    for (int j = 0; j < m; j++) spread = spread && isnan(got[j]) == (abs(j - bad) <= width / 2);
    check(spread, "smooth m %d, width %d: a NaN is in the windows around it and nowhere else", m, width);
    check(all_freed(), "smooth m %d: wrote outside its output", m);
}

static void test_average(side fast, int m, int n)
{
    float *mean = guarded((size_t)m), *want = room((size_t)m * sizeof *want);
    double *sum = memset(room((size_t)m * sizeof *sum), 0, (size_t)m * sizeof *sum);
    for (int i = 1; i <= n; i++) {
        float *scores = random_floats((size_t)m);
        fast.backend->ops->average(fast.stream, mean, scores, m, i, NULL);
        for (int j = 0; j < m; j++) sum[j] += scores[j];
    }
    for (int j = 0; j < m; j++) want[j] = (float)(sum[j] / n);
    check(error_of(mean, want, (size_t)m) < TOLERANCE, "average m %d of %d", m, n);
    check(all_freed(), "average m %d: wrote outside its output", m);
}

/* Without Aux, what ends is gone and what goes on is whole. */
static void test_regroup_for_good(side fast, int length)
{
    int n_new = random_int(1, length);
    float *x = random_floats((size_t)length), *y = guarded((size_t)n_new);
    int32_t *rows = random_positions(length, length), *new_rows = random_positions(n_new, length), n_revived = -1;
    fast.backend->ops->regroup(fast.stream, y, new_rows, n_new, x, rows, length, NULL, 1, &n_revived, NULL);
    bool own = n_revived == 0;
    for (int i = 0; i < n_new; i++) own = own && y[i] == x[new_rows[i]];
    check(own, "regroup without Aux, %d to %d", length, n_new);
    check(all_freed(), "regroup without Aux, %d to %d: wrote outside its output", length, n_new);
}

/* Rows leave for Aux and come back: after any number of regroupings each row still holds its own token's values. */
static void test_regroup(side fast, int length, int d)
{
    size_t size = (size_t)length * (size_t)d;
    float *aux = guarded(size), *x = guarded(size), *y = guarded(size);
    int32_t n_revived;
    int n = length;
    int32_t *rows = random_positions(length, length);
    for (size_t i = 0; i < size; i++) x[i] = (float)i; /* row p holds p*d … p*d+d-1 */
    bool own = true, counted = true;
    for (int round = 0; round < 8; round++) {
        int n_new = random_int(1, length), expected = 0;
        int32_t *new_rows = random_positions(n_new, length);
        for (int i = 0, r = 0; i < n_new; i++) {
            while (r < n && rows[r] < new_rows[i]) r++;
            expected += r == n || rows[r] != new_rows[i];
        }
        fast.backend->ops->regroup(fast.stream, y, new_rows, n_new, x, rows, n, aux, d, &n_revived, NULL);
        for (int i = 0; i < n_new; i++)
            for (int k = 0; k < d; k++)
                own = own && y[(size_t)i * (size_t)d + (size_t)k] == (float)(new_rows[i] * d + k);
        counted = counted && n_revived == expected;
        rows = new_rows;
        n = n_new;
        float *swap = x;
        x = y;
        y = swap;
    }
    check(own, "regroup length %d, d %d: a row holds another token's values", length, d);
    check(counted, "regroup length %d, d %d: counted the revived ones wrongly", length, d);
    check(all_freed(), "regroup length %d, d %d: wrote outside its outputs", length, d);
}

/* ---- all -------------------------------------------------------------------------------- */

static void test_gated_products(const char *variant, const lazy_config *config)
{
    side fast = open_side(variant, config, 3), plain = open_side("reference", config, 1);
    for (int n = 1; n <= 40; n += 3) test_gated(fast, plain, n, config->hidden);
    for (int i = 0; i < 6; i++)
        test_gated(fast, plain, UNPACKED_ROWS_LIMIT + random_int(1, 80),
                   i == 3   ? 1024
                   : i == 5 ? 2100
                            : random_int(1, 130));
    close_side(plain);
    close_side(fast);
}

static void test_rows_and_attention(const char *variant, const lazy_config *config)
{
    side fast = open_side(variant, config, 3), plain = open_side("reference", config, 1);
    for (int n = 1; n <= 40; n += 3) {
        test_rmsnorm(fast, plain, n, random_int(1, 200));
        test_checked_norm(fast, n, random_int(1, 200));
        fast.config->layer_norm = true;
        test_checked_norm(fast, n, random_int(1, 200));
        fast.config->layer_norm = false;
        test_checked_norm(plain, n, random_int(1, 200));
        test_rotate(fast, plain, n, n % 2);
        fast.config->layer_norm = plain.config->layer_norm = !config->wide_qk_norm && !config->late_qk_norm;
        test_rotate(fast, plain, n, n % 4 < 3);
        fast.config->layer_norm = plain.config->layer_norm = false;
    }
    for (int i = 0; i < 30; i++) {
        int m = random_int(1, 300), n = random_int(1, m);
        test_attention(fast, plain, i % 2 ? n : (n + 15) / 16, m, m + random_int(0, 50));
    }
    test_attention(fast, plain, 3, 2500, 2600);
    test_attention(fast, plain, 1, 2501, 2600);
    test_attention(fast, plain, SPLIT_KEYS_ROWS, 1100, 1200);
    test_attention(fast, plain, SPLIT_KEYS_ROWS + 1, 1100, 1200);
    test_attention(fast, plain, 250, 600, 600);
    close_side(plain);
    close_side(fast);
}

/* The same product by one thread and by several: each sum has an order of its own, so all are equal to the bit,
 * whichever columns went through the streams together. */
static void test_any_threads(const char *variant)
{
    const lazy_config config = { .n_layers = 1, .n_heads = 1, .n_kv_heads = 1, .head_dim = 2, .ffn = 9 };
    enum { NUMBERS = 6 };
    const int numbers[NUMBERS] = { 1, 2, 3, 5, 16, 40 };
    side sides[NUMBERS];
    for (int t = 0; t < NUMBERS; t++) sides[t] = open_side(variant, &config, numbers[t]);
    for (int i = 0; i < 40; i++) {
        lazy_dtype dtype = (lazy_dtype)(i % LAZY_N_DTYPES);
        int n = i % 5 == 0 ? random_int(UNPACKED_ROWS_LIMIT + 1, 400) : random_int(1, i % 5 == 1 ? 2 : 60),
            cols = lazy_is_quantized(dtype) ? 256 * random_int(1, 3) : random_int(1, 75);
        lazy_matrix w = random_matrix(3, 4 * random_int(1, 60) + 1 + i % 3, cols, dtype, false, false);
        size_t size = (size_t)n * (size_t)w.rows;
        float *x = random_floats((size_t)n * (size_t)cols), *alone = guarded(size), *shared = guarded(size);
        for (int t = 0; t < NUMBERS; t++) {
            sides[t].backend->ops->matmul(sides[t].stream, t == 0 ? alone : shared, x, n, &w, false, NULL);
            check(t == 0 || memcmp(alone, shared, size * sizeof *x) == 0,
                  "%s matmul n %d, rows %d, cols %d: %d threads differ from one", variant, n, w.rows, cols, numbers[t]);
        }
        check(all_freed(), "%s matmul n %d, cols %d: wrote outside its output", variant, n, cols);
    }
    for (int t = 0; t < NUMBERS; t++) close_side(sides[t]);
}

/* Rows so short that one task could take hundreds of panels: gate and up of a block must still fit beside them. */
static void test_short_gates(const char *variant)
{
    bool wide = lazy_arithmetic_find(variant, computing)->products->tile_rows > 6;
    lazy_config config = { .n_layers = 1, .n_heads = 1, .n_kv_heads = 1, .head_dim = 2, .ffn = wide ? 18240 : 45000 };
    side fast = open_side(variant, &config, 1), plain = open_side("reference", &config, 1);
    test_gated(fast, plain, wide ? UNPACKED_ROWS_LIMIT + 1 : 33, wide ? 16 : 8);
    close_side(plain);
    close_side(fast);
}

/* Heads as wide as the engine takes, more heads on one key than a task holds, more tokens than one chunk each of the
 * most. */
static void test_extremes(const char *variant)
{
    const struct {
        lazy_config config;
        int n, m;
    } cases[] = {
        { { .n_layers = 1, .hidden = 8, .n_heads = 2, .n_kv_heads = 1, .head_dim = 512, .ffn = 8 }, 90, 300 },
        { { .n_layers = 1, .hidden = 8, .n_heads = 400, .n_kv_heads = 1, .head_dim = 6, .ffn = 8 }, 70, 300 },
        { { .n_layers = 1, .hidden = 8, .n_heads = 3, .n_kv_heads = 3, .head_dim = 4, .ffn = 8 }, 5, MAX_TOKENS - 7 },
        { { .n_layers = 1, .hidden = 8, .n_heads = 30, .n_kv_heads = 3, .head_dim = 4, .ffn = 8 }, 1, MAX_TOKENS - 7 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        side fast = open_side(variant, &cases[i].config, 2), plain = open_side("reference", &cases[i].config, 1);
        test_attention(fast, plain, cases[i].n, cases[i].m, cases[i].m + 7);
        close_side(plain);
        close_side(fast);
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
    s.backend->ops->attention(s.stream, y, qkv, in_play + length - n, n, (lazy_kv){ k, v, length }, in_play, length,
                              INT32_MAX, NULL);
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
    const lazy_config config = { .n_layers = 1, .hidden = 8, .n_heads = 2, .n_kv_heads = 1, .head_dim = 24, .ffn = 8 };
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

/* Columns (rows x heads) that fill parts of a vector, whole vectors and panels; contiguous and scattered tokens; heads
 * that are not a multiple of a vector. */
static void test_columns(const char *variant)
{
    const struct {
        int heads, group, head_dim;
    } shapes[] = { { 1, 1, 64 }, { 6, 3, 80 }, { 5, 5, 96 }, { 2, 1, 40 }, { 4, 2, 10 } };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        lazy_config config = {
            .n_layers = 1, .hidden = 8, .n_heads = shapes[i].heads, .head_dim = shapes[i].head_dim, .ffn = 8
        };
        config.n_kv_heads = config.n_heads / shapes[i].group;
        side fast = open_side(variant, &config, 2), plain = open_side("reference", &config, 1);
        for (int n = 2; n <= 35; n++) {
            int m = random_int(n, 700);
            test_attention(fast, plain, n, m, n % 2 ? m : m + random_int(0, 20));
        }
        close_side(plain);
        close_side(fast);
    }
    test_spoilt_attention(variant, 2, 700);
    test_spoilt_attention(variant, 20, 700);
    test_spoilt_attention(variant, SPLIT_KEYS_ROWS + 20, 700);
}

static void test_all_products(const char *variant, const lazy_config *shapes, size_t n_shapes)
{
    side fast = open_side(variant, &shapes[0], 2), plain = open_side("reference", &shapes[0], 1);
    test_products(fast, plain);
    test_quantized_products(fast, plain);
    for (int n = 1; n <= 2 * UNPACKED_ROWS_LIMIT; n += n < 8 ? 1 : 40) {
        if (computing == LAZY_COMPUTE_INT8) test_rounded_weights(fast, n);
        for (int dtype = 0; dtype < LAZY_N_DTYPES; dtype++)
            test_spoilt_products(fast, n, (lazy_dtype)dtype, n % 2 ? NAN : INFINITY);
    }
    close_side(plain);
    close_side(fast);
    test_quantized_dots(variant);
    test_fixed_products(variant);
    for (size_t i = 0; i < n_shapes; i++) test_gated_products(variant, &shapes[i]);
    test_any_threads(variant);
    test_short_gates(variant);
    test_experts(variant);
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
    check(worst < 2e-7, "%s tanh: error %.2g", fast.backend->variant, worst);
}

/* Logits of n rows, with a cap and without; what is not finite becomes NaN, and it alone. */
static void test_logits(side fast, side plain, int n, int vocab, float cap)
{
    lazy_matrix w = random_matrix(1, vocab, 64, LAZY_F32, false, false);
    size_t size = (size_t)(n * vocab);
    float *x = random_floats((size_t)n * 64), *got = guarded(size), *want = guarded(size);
    int bad = random_int(0, vocab - 1), n_wrong = 0;
    fast.config->logit_cap = plain.config->logit_cap = cap;
    fast.backend->ops->logits(fast.stream, got, x, n, &w, NULL);
    plain.backend->ops->logits(plain.stream, want, x, n, &w, NULL);
    double error = error_of(got, want, size);
    check(error < TOLERANCE, "%s logits n %d, vocab %d, cap %g: error %.2g", fast.backend->variant, n, vocab, cap,
          error);
    ((float *)w.part[0].data)[bad * 64] = INFINITY;
    fast.backend->ops->logits(fast.stream, got, x, n, &w, NULL);
    for (int i = 0; i < n * vocab; i++) n_wrong += isfinite(got[i]) == (i % vocab == bad);
    check(n_wrong == 0, "%s logits n %d, vocab %d, cap %g: Inf is lost or spreads", fast.backend->variant, n, vocab,
          cap);
    fast.config->logit_cap = plain.config->logit_cap = 0;
    check(all_freed(), "%s logits n %d, vocab %d: wrote outside its output", fast.backend->variant, n, vocab);
}

static void test_other_ops(const char *variant, const lazy_config *shapes, size_t n_shapes)
{
    side fast = open_side(variant, &shapes[0], 2), plain = open_side("reference", &shapes[0], 1);
    test_large_norm(fast, plain);
    for (int n = 1; n <= 40; n++) test_surprisal(fast, plain, n, n == 40 ? 50000 : random_int(1, 300));
    test_bad_surprisal(fast);
    test_argmax(fast);
    test_tanh(fast);
    for (int vocab = 1; vocab <= 40; vocab++) test_logits(fast, plain, vocab % 3 + 1, vocab, vocab % 2 ? 0 : 1.5f);
    close_side(plain);
    close_side(fast);
    test_online_softmax(variant);
    test_widening(variant);
    test_dequantization(variant);
    for (size_t i = 0; i < n_shapes; i++) test_rows_and_attention(variant, &shapes[i]);
    test_extremes(variant);
    test_columns(variant);
    test_kept_attention(variant);
    test_kept_rows(variant);
}

int main(int argc, char **argv)
{
    bool fastest = argc == 2 && strcmp(argv[1], "fastest") == 0;
    if (argc > 1 && !fastest) {
        fprintf(stderr, "usage: %s [fastest]\n", argv[0]);
        return 2;
    }
    const lazy_config shapes[] = {
        { .n_layers = 1, .hidden = 24, .n_heads = 4, .n_kv_heads = 2, .head_dim = 8, .ffn = 40 },
        { .n_layers = 1,
          .hidden = 70,
          .n_heads = 3,
          .n_kv_heads = 1,
          .head_dim = 64,
          .ffn = 33,
          .gelu = true,
          .wide_qk_norm = true },
        { .n_layers = 1, .hidden = 33, .n_heads = 2, .n_kv_heads = 2, .head_dim = 80, .ffn = 100 },
        { .n_layers = 1,
          .hidden = 64,
          .n_heads = 8,
          .n_kv_heads = 2,
          .head_dim = 128,
          .ffn = 64,
          .query_scalar = 100,
          .gelu = true,
          .late_qk_norm = true },
    };
    size_t n_shapes = fastest ? 1 : sizeof shapes / sizeof *shapes;
    for (const char *const *variant = lazy_cpu_variants(); *variant; variant++) {
        for (computing = LAZY_COMPUTE_F32; computing <= LAZY_COMPUTE_INT8; computing++) {
            if (!lazy_arithmetic_find(*variant, computing)) continue;
            test_all_products(*variant, shapes, n_shapes);
            if (computing != LAZY_COMPUTE_INT8)
                test_other_ops(*variant, shapes, n_shapes); /* with int8, they are those of bf16 or f32 */
        }
        if (fastest) break;
    }
    if (!lazy_arithmetic_find(NULL, LAZY_COMPUTE_BF16)) printf("SKIPPED bf16: this processor has no AVX512-BF16\n");
    if (!lazy_arithmetic_find(NULL, LAZY_COMPUTE_INT8)) printf("SKIPPED int8: this processor has no AVX512-VNNI\n");
    computing = LAZY_COMPUTE_F32;
    side any = open_side("generic", &shapes[0], 1), plain = open_side("reference", &shapes[0], 1);
    for (int m = 1; m <= 130; m++) {
        test_select(any, m);
        test_smooth(any, plain, m, 2 * random_int(0, 20) + 1);
        test_regroup(any, m, random_int(1, 9));
        test_regroup_for_good(any, m);
        test_average(any, m, random_int(1, 40));
    }
    test_smooth(any, plain, MAX_TOKENS, 4095);
    test_smooth(any, plain, MAX_TOKENS, 2 * MAX_TOKENS + 1);
    test_smooth(any, plain, 10, INT32_MAX);
    close_side(plain);
    close_side(any);
    test_kept_attention("reference");
    test_kept_rows("reference");
    test_narrowing(LAZY_F16);
    test_narrowing(LAZY_BF16);
    return checked();
}
