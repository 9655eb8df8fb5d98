/* fixed_template.h — the source of products of quantized weights with few rows of x; kernels.h specifies each function.
 *
 * A row of x is rounded by groups of 32 values to integers of DIGITS bytes, times a scale. Weights keep their integers;
 * with one byte, those in F32, F16 and BF16 are rounded to LAZY_Q8_0. Sums of products are exact within a group: the
 * products with each byte of x are added by an instruction that multiplies bytes, from the highest byte to the lowest.
 * A sum is then converted to f32, multiplied by both scales and added to those of earlier groups. A NaN or an Inf makes
 * the scale of its group NaN.
 *
 * With two bytes and more the scale is a power of two, and the largest value of a group has 15 or 23 bits and a sign:
 * rounding x so changes it by at most 2^-15 or 2^-23 of that value (1.004 times that, where the bytes need one bit
 * more).
 *
 * The including file defines what vectors.h, quantized.h and integers.h ask for. It defines VARIANT and ISA; DIGITS;
 * DOT_ROWS; MAX_ROWS, of x; and WIDEN_HALVES(words), the values of 16 f16, or where LANES is 8 WIDEN_LOW_HALVES(words),
 * the values of the 8 in the low halves, or where it is 4 WIDEN_LOW_HALVES(words, i), of four of them. */
#include "vectors.h"
#include "integers.h"

enum { STRETCH = LAZY_LONGEST_BLOCK / LAZY_GROUP, SCALE_VECTORS = 2 * STRETCH / LANES };

/* The longest block's values of a row of x, 0 behind its end. */
typedef struct stretch {
    int32_t bytes[STRETCH][DIGITS][WORDS]; /* of the integers: four to a word, the highest ones first */
    int32_t zero_sums[STRETCH][WORDS];     /* of the integers that share a word, times the zero point of LAZY_Q6_K */
    int32_t zero_sum[STRETCH]; /* with one byte: of the group's integers, times the zero point of LAZY_Q8_0 */
    float scales[STRETCH], sums[STRETCH]; /* of the groups; sums of the values; SCALE_VECTORS in all */
} stretch;

typedef int32_t operand;
enum { STRETCH_OPERANDS = sizeof(stretch) / sizeof(operand) };

/* wide: the integers have 8 bits */
INLINE words dot_digits(words sum, words integers, const int32_t bytes[DIGITS][WORDS], const bool wide)
{
    EACH(d, DIGITS) {
        if (d) sum = (words)((unsigned_words)sum << 8);
        sum = wide ? DOT_WIDE_GROUP(sum, integers, words_at(bytes[d])) : DOT_GROUP(sum, integers, words_at(bytes[d]));
    }
    return sum;
}

INLINE float float_of_bits(int32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Writes the bytes of a group and gives its scale. */
INLINE float round_group_to_digits(int32_t bytes[DIGITS][WORDS], const vec value[GROUP_VECTORS])
{
#if DIGITS == 1
    float scale;
    words rounded = round_group(&scale, value);
    memcpy(bytes[0], &rounded, sizeof rounded);
    return scale;
#else
    enum { FRACTION = 23, BIAS = 127, BITS = 8 * DIGITS - 1, SMALLEST = BITS + 1, INFINITE = 0xff << FRACTION };
    int32_t top = largest_magnitude_bits(value);
    uint32_t carried = (uint32_t)top + 0x10101; /* above 0x7f7f7f 2^-23, bytes from -128 to 127 need one bit more */
    int exponent = max_int((int32_t)carried >> FRACTION, SMALLEST) - BITS + 1; /* of a NaN anything */
    float twice_inverse = float_of_bits((2 * BIAS + 1 - exponent) << FRACTION);
    ints rounded[GROUP_VECTORS];
    EACH(v, GROUP_VECTORS) rounded[v] = round_half(value[v] * twice_inverse);
#pragma GCC unroll 4
    for (int d = DIGITS - 1; d >= 0; d--) {
        words low = LOW_BYTES(rounded);
        memcpy(bytes[d], &low, sizeof low);
        EACH(v, GROUP_VECTORS) rounded[v] = (ints)((unsigned_ints)rounded[v] + 128) >> 8; /* the byte was signed */
    }
    if (top == 0) return 0.0f; /* the least scale times one of weights would be subnormal, which takes 100 cycles */
    return top < INFINITE ? float_of_bits(exponent << FRACTION) : NAN;
#endif
}

static void convert(void *to, const float *from, int k)
{
    stretch *s = to;
    for (int g = 0; k > 0 || g; k -= LAZY_GROUP, from += LAZY_GROUP) {
        vec value[GROUP_VECTORS];
        EACH(v, GROUP_VECTORS) value[v] = load_part(from + v * LANES, k - v * LANES, 0.0f);
        s->scales[g] = round_group_to_digits(s->bytes[g], value);
        words sums = dot_digits((words){ 0 }, splat_bytes(1), s->bytes[g], false);
        eight wide = __builtin_convertvector(sums, eight);
        sums = (words)((unsigned_words)sums * (unsigned)lazy_formats[LAZY_Q6_K].zero_point);
        memcpy(s->zero_sums[g], &sums, sizeof sums);
        float sum = sum_eight(&wide);
        s->zero_sum[g] = DIGITS == 1 ? (int32_t)sum * ZERO_POINT : 0;
        s->sums[g] = sum * s->scales[g];
        g = (g + 1) % STRETCH;
        s += !g;
    }
}

/* ---- scales ----------------------------------------------------------------------------- */

/* The scales of n groups of a row of weights, then the offsets that their values have; of LAZY_Q6_K the scales of 16
 * half groups. In long blocks they are integers, which the block's own scale and offset multiply. */
INLINE void scales_at(vec s[SCALE_VECTORS], const char *row, lazy_dtype dtype, int n)
{
    if (lazy_formats[dtype].values > LAZY_GROUP) {
        EACH(v, SCALE_VECTORS) s[v] = integer_scales(row, dtype, v * LANES);
        return;
    }
    words halves; /* pairs of a scale and the two bytes behind it, which are the offset if there is one */
    EACH(g, STRETCH) {
        int32_t pair;
        memcpy(&pair, row + min_int(g, n - 1) * lazy_formats[dtype].bytes, sizeof pair);
        halves[g] = pair;
    }
    const float zero = -(float)lazy_formats[dtype].zero_point;
    const bool has_offset = lazy_formats[dtype].has_offset;
#if LANES == 16
    vec both = WIDEN_HALVES(halves);
    s[0] = has_offset ? SHUFFLE(vec, both, both, 0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15)
                      : SHUFFLE(vec, both, both, 0, 2, 4, 6, 8, 10, 12, 14, 0, 2, 4, 6, 8, 10, 12, 14) *
                            (vec){ 1, 1, 1, 1, 1, 1, 1, 1, zero, zero, zero, zero, zero, zero, zero, zero };
#elif LANES == 8
    s[0] = WIDEN_LOW_HALVES(halves);
    s[1] = has_offset ? WIDEN_LOW_HALVES((words)((unsigned_words)halves >> 16)) : s[0] * zero;
#else
    words offsets = (words)((unsigned_words)halves >> 16);
    s[0] = WIDEN_LOW_HALVES(halves, 0);
    s[1] = WIDEN_LOW_HALVES(halves, 1);
    s[2] = has_offset ? WIDEN_LOW_HALVES(offsets, 0) : s[0] * zero;
    s[3] = has_offset ? WIDEN_LOW_HALVES(offsets, 1) : s[1] * zero;
#endif
}

/* Each scale of the x's 8 groups, twice. */
INLINE void scales_of_halves(vec s[SCALE_VECTORS], const float *x)
{
#if LANES == 16
    s[0] = SHUFFLE(vec, load(x), load(x), 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
#elif LANES == 8
    s[0] = SHUFFLE(vec, load(x), load(x), 0, 0, 1, 1, 2, 2, 3, 3);
    s[1] = SHUFFLE(vec, load(x), load(x), 4, 4, 5, 5, 6, 6, 7, 7);
#else
    EACH(v, SCALE_VECTORS) s[v] = SHUFFLE(vec, load(x + 2 * v), load(x + 2 * v), 0, 0, 1, 1);
#endif
}

/* ---- products --------------------------------------------------------------------------- */

/* Not Q8_0 with 24 bits of x: sums would need 34. Nor Q4_0, where stored_template.h has a table, in less time. */
#if DIGITS == 3
#define Q8_0_AS_STORED(work)
#else
#define Q8_0_AS_STORED(work) work(Q8_0)
#endif
#if DIGITS > 1 && defined(LOOK_UP)
#define Q4_0_AS_STORED(work)
#else
#define Q4_0_AS_STORED(work) work(Q4_0)
#endif
#define OTHERS_AS_STORED(work) work(Q4_1) work(Q5_0) work(Q5_1) work(Q4_K) work(Q5_K) work(Q6_K)
#define AS_STORED(work)        Q8_0_AS_STORED(work) Q4_0_AS_STORED(work) OTHERS_AS_STORED(work)
#define FORM                   LAZY_Q8_0

static void form_row(void *to, const char *row, lazy_dtype dtype, int k)
{
    if (DIGITS == 1) round_row(to, row, dtype, k);
}

#include "dots.h"

/* These subtract the zero point before converting sums; as an offset, large beside values, it would cost bits. */
INLINE bool is_exact(lazy_dtype dtype) { return dtype == LAZY_Q6_K || (DIGITS == 1 && dtype == LAZY_Q8_0); }

typedef float factors[DOT_ROWS][4][16]; /* of rows of x and columns: the products of their scales, group by group */

/* Stores the factors of a stretch of n groups and adds the products with the offsets. */
INLINE void begin_stretch(factors factor, eight sum[][4], const dot_products *t, int n, const int rows, const int cols)
{
    const bool long_block = lazy_formats[t->dtype].values > LAZY_GROUP;
    EACH(c, cols) {
        const char *weights = t->w + c * t->spacing;
        vec scale[SCALE_VECTORS], x[SCALE_VECTORS];
        if (long_block || n >= STRETCH) scales_at(scale, weights, t->dtype, STRETCH);
        else scales_at(scale, weights, t->dtype, n);
        EACH(r, rows) {
            const float *of_x = ((const stretch *)(t->x + r * t->x_stride))->scales;
            EACH(v, SCALE_VECTORS) x[v] = load(of_x + v * LANES);
            if (t->dtype == LAZY_Q6_K) scales_of_halves(x, of_x);
            EACH(v, SCALE_VECTORS) store(factor[r][c] + v * LANES, scale[v] * x[v]);
            if (is_exact(t->dtype)) continue;
            eight offsets;
            memcpy(&offsets, factor[r][c] + STRETCH, sizeof offsets);
            sum[r][c] += long_block ? offsets * splat_eight(offset_of_block(weights)) : offsets;
        }
    }
    /* broadcasts from memory cost less than from a register */
    __asm__("" : "+m"(*(float(*)[sizeof(factors) / 4]) factor));
}

/* Adds the products of group g of the stretch, which is group `in_block` of the blocks at t->w. */
INLINE void add_group(eight sum[][4], const dot_products *t, factors factor, int g, const int in_block, const int rows,
                      const int cols)
{
    const int bytes = lazy_formats[t->dtype].bytes * LAZY_GROUP / lazy_formats[t->dtype].values, at = in_block * bytes;
    const bool long_block = lazy_formats[t->dtype].values > LAZY_GROUP;
    enum { LINE = 56 }; /* of 64 bytes; blocks begin anywhere */
    words integers[4];
    EACH(c, cols) {
        const char *block = t->w + c * t->spacing;
        if (!long_block) __builtin_prefetch(block + FETCH_AHEAD);
        else if (at == 0 || at / LINE > (at - bytes) / LINE)
            __builtin_prefetch(block + at + 2 * FETCH_AHEAD, 0, 2); /* into the L2 cache */
        integers[c] = integers_of(block, t->dtype, in_block);
    }
    EACH(r, rows) {
        const stretch *x = (const stretch *)(t->x + r * t->x_stride);
        words zero_sums = words_at(x->zero_sums[g]), start = { 0 };
        if (DIGITS == 1 && t->dtype == LAZY_Q8_0) start = (words){ -x->zero_sum[g] };
        EACH(c, cols) {
            words product = dot_digits(start, integers[c], x->bytes[g], t->dtype == LAZY_Q8_0);
            eight scale = splat_eight(factor[r][c][g]);
            if (t->dtype == LAZY_Q6_K) {
                product -= zero_sums;
                scale = SHUFFLE(eight, splat_eight(factor[r][c][2 * g]), splat_eight(factor[r][c][2 * g + 1]), 0, 1, 2,
                                3, 8, 9, 10, 11);
            }
            sum[r][c] += __builtin_convertvector(product, eight) * scale;
        }
    }
}

INLINE void dots_of(dot_products t, const int rows, const int cols)
{
    const int bytes = lazy_formats[t.dtype].bytes;
    eight sum[DOT_ROWS][4];
    EACH(r, rows)
        EACH(c, cols) sum[r][c] = (eight){ 0 };
    for (int left = ceil_div(t.k, LAZY_GROUP); left > 0; left -= STRETCH, t.x += STRETCH_OPERANDS) {
        factors factor;
        begin_stretch(factor, sum, &t, left, rows, cols);
        if (lazy_formats[t.dtype].values == LAZY_GROUP) {
            for (int g = 0; g < min_int(left, STRETCH); g++, t.w += bytes) add_group(sum, &t, factor, g, 0, rows, cols);
            continue;
        }
        eight in_block[DOT_ROWS][4] = { 0 };
        EACH(g, STRETCH) add_group(in_block, &t, factor, g, g, rows, cols);
        EACH(r, rows)
            EACH(c, cols) sum[r][c] += in_block[r][c] * splat_eight(scale_of_block(t.w + c * t.spacing, t.dtype));
        t.w += bytes;
    }
    EACH(r, rows)
        EACH(c, cols) {
            float *out = t.y + r * t.y_stride + c * t.y_spacing, total = sum_eight(&sum[r][c]);
            *out = t.accumulate ? *out + total : total;
        }
}

DEFINE_FEW_ROWS(VARIANT, LAZY_LONGEST_BLOCK, STRETCH_OPERANDS, MAX_ROWS,
                AS_STORED(TAKEN)[LAZY_F32] = DIGITS == 1, [LAZY_F16] = DIGITS == 1, [LAZY_BF16] = DIGITS == 1);
