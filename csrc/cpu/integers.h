/* integers.h — groups of 32 integers of 8 bits, for int8_template.h and fixed_template.h: those of quantized weights, and rounding to them.
 *
 * The including file defines DOT_BYTES and DOT_GROUP(sum, unsigned, signed): sum plus the products of
 * four bytes, in vectors of LANES words and of 8; LARGER_INTS(a, b) and LARGEST_LANE(ints); LOW_BYTES(the ints of a group);
 * TWICE(address), 16 bytes in both halves of 8 words; BYTES_OF_BITS(word), 32 bytes of 0 or 1. */
#include <float.h>
#include <math.h>

#pragma GCC diagnostic ignored "-Wpsabi" /* about passing vectors of 32 bytes: all functions that do are inlined */

typedef int32_t words __attribute__((vector_size(32))); /* the bytes of a group */
typedef uint32_t unsigned_words __attribute__((vector_size(32)));
typedef uint32_t unsigned_ints __attribute__((vector_size(4 * LANES)));
typedef int32_t loose_words __attribute__((vector_size(32), aligned(1), may_alias));

enum { WORDS = LAZY_GROUP / 4, ZERO_POINT = 128 };

INLINE words words_at(const void *p) { return *(const loose_words *)p; }
INLINE words splat_bytes(int byte) { return (int32_t)((uint32_t)byte * 0x01010101u) - (words){ 0 }; }
INLINE eight splat_eight(float x) { return x - (eight){ 0 }; }

INLINE float sum_eight(const eight *e)
{
    four f = SHUFFLE(four, *e, *e, 0, 1, 2, 3) + SHUFFLE(four, *e, *e, 4, 5, 6, 7);
    return (f[0] + f[2]) + (f[1] + f[3]);
}

/* ---- rounding --------------------------------------------------------------------------- */

INLINE int32_t largest_magnitude_bits(const vec value[GROUP_VECTORS])
{
    ints largest = { 0 };
#pragma GCC unroll 8
    for (int v = 0; v < GROUP_VECTORS; v++) largest = LARGER_INTS((ints)value[v] & 0x7fffffff, largest);
    return LARGEST_LANE(largest);
}

/* To nearest, ties away from 0; of NaN anything. */
INLINE ints round_half(vec doubled)
{
    ints whole = __builtin_convertvector(doubled, ints); /* towards 0 */
    return (ints)((unsigned_ints)whole + 1 + (unsigned_ints)(whole >> 31)) >> 1;
}

/* Rounds a group to signed bytes. */
INLINE words round_group(float *scale, const vec value[GROUP_VECTORS])
{
    int32_t top = largest_magnitude_bits(value);
    float most;
    memcpy(&most, &top, sizeof most);
    *scale = isfinite(most) ? most / 127.0f : NAN;
    float twice_inverse = *scale >= FLT_MIN ? 1.0f / *scale * 2.0f : 0.0f;
    ints rounded[GROUP_VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < GROUP_VECTORS; v++) rounded[v] = round_half(value[v] * twice_inverse);
    return LOW_BYTES(rounded);
}

/* ---- groups of weights ------------------------------------------------------------------ */

INLINE bool has_offset(lazy_dtype dtype) { return dtype == LAZY_Q4_1 || dtype == LAZY_Q5_1 || dtype == LAZY_Q4_K || dtype == LAZY_Q5_K; }

/* The number subtracted from a format's unsigned integers. */
INLINE int zero_point(lazy_dtype dtype)
{
    switch (dtype) {
    case LAZY_Q4_0: return 8;
    case LAZY_Q5_0: return 16;
    case LAZY_Q6_K: return 32;
    case LAZY_Q4_1:
    case LAZY_Q5_1:
    case LAZY_Q4_K:
    case LAZY_Q5_K: return 0;
    default: return ZERO_POINT;
    }
}

/* The unsigned integers of group g of a block. */
INLINE words integers_of(const void *block, lazy_dtype dtype, int g)
{
    const words nibble = splat_bytes(15), half = { 0, 0, 0, 0, 4, 4, 4, 4 };
    switch (dtype) {
    case LAZY_Q8_0: return words_at(((const lazy_q8_0 *)block)->q) ^ splat_bytes(ZERO_POINT);
    case LAZY_Q4_0: return TWICE(((const lazy_q4_0 *)block)->q) >> half & nibble;
    case LAZY_Q4_1: return TWICE(((const lazy_q4_1 *)block)->q) >> half & nibble;
    case LAZY_Q5_0:
    case LAZY_Q5_1: {
        const uint8_t *fifth = dtype == LAZY_Q5_0 ? ((const lazy_q5_0 *)block)->fifth : ((const lazy_q5_1 *)block)->fifth;
        uint32_t bits;
        memcpy(&bits, fifth, sizeof bits);
        return (TWICE(fifth + sizeof bits) >> half & nibble) | BYTES_OF_BITS(bits) << 4;
    }
    case LAZY_Q4_K: return words_at(((const lazy_q4_k *)block)->q + LAZY_GROUP * (g / 2)) >> 4 * (g % 2) & nibble;
    case LAZY_Q5_K: {
        const lazy_q5_k *b = block;
        return (words_at(b->q + LAZY_GROUP * (g / 2)) >> 4 * (g % 2) & nibble) | (words_at(b->fifth) >> g & 0x01010101) << 4;
    }
    default: {
        const lazy_q6_k *b = block;
        words low = words_at(b->low + 64 * (g / 4) + LAZY_GROUP * (g % 2)) >> 4 * (g % 4 / 2),
              high = words_at(b->high + LAZY_GROUP * (g / 4)) >> 2 * (g % 4);
        return (low & nibble) | (high & 0x03030303) << 4;
    }
    }
}
