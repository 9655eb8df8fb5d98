/* integers.h — rounding groups of 32 values to integers of 8 bits, for int8_template.h and fixed_template.h.
 *
 * The including file defines DOT_GROUP(sum, unsigned, signed): sum plus the products of four bytes, in vectors of 8
 * words, where the unsigned ones are 128 at most, and DOT_WIDE_GROUP for any; LARGER_INTS(a, b) and, where the
 * instruction set has it, LARGEST_LANE(ints); LOW_BYTES(the ints of a group). */
#include <float.h>
#include <math.h>

#include "quantized.h"

typedef uint32_t unsigned_words __attribute__((vector_size(LAZY_GROUP)));
typedef uint32_t unsigned_ints __attribute__((vector_size(4 * LANES)));

enum { ZERO_POINT = 128 };

INLINE eight splat_eight(float x) { return x - (eight){ 0 }; }

#ifndef LARGEST_LANE
INLINE int32_t largest_lane(ints v)
{
    int32_t largest = v[0];
    for (int lane = 1; lane < LANES; lane++) largest = max_int(largest, v[lane]);
    return largest;
}
#define LARGEST_LANE(v) largest_lane(v)
#endif

INLINE int32_t largest_magnitude_bits(const vec value[GROUP_VECTORS])
{
    ints largest = { 0 };
    EACH(v, GROUP_VECTORS) largest = LARGER_INTS((ints)value[v] & 0x7fffffff, largest);
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
    EACH(v, GROUP_VECTORS) rounded[v] = round_half(value[v] * twice_inverse);
    return LOW_BYTES(rounded);
}

/* to[:] = the k values of a row of weights, rounded as by lazy_quantize; behind its end zeros. */
INLINE void round_row_of(lazy_q8_0 *to, const void *row, lazy_dtype dtype, int k)
{
    for (int i = 0; i < k; i += LAZY_GROUP, to++) {
        vec value[GROUP_VECTORS];
        float scale;
        EACH(v, GROUP_VECTORS) value[v] = widen_part(row, dtype, i + v * LANES, k);
        words rounded = round_group(&scale, value);
        to->scale = lazy_narrow_f16(scale);
        memcpy(to->q, &rounded, sizeof rounded);
    }
}

static void round_row(void *to, const void *row, lazy_dtype dtype, int k)
{
    BY_FLOAT_TYPE(round_row_of(to, row, type, k));
}
