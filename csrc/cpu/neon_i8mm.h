/* neon_i8mm.h — products of integers by NEON (USDOT), for integers.h, int8_template.h and fixed_template.h. */
#include "neon.h"
TARGET("arch=armv8.2-a+i8mm")

#define VALUES_PER_WORD        4
#define DOT_WORDS(sum, u, s)   ((ints)vusdotq_s32((int32x4_t)(sum), (uint8x16_t)(u), (int8x16_t)(s)))
#define QUARTET(v, i)          SHUFFLE(int32x4_t, v, v, 4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3)
#define DOT_HALF(sum, u, s, i) vusdotq_s32(QUARTET(sum, i), (uint8x16_t)QUARTET(u, i), (int8x16_t)QUARTET(s, i))
#define DOT_GROUP(sum, u, s)   SHUFFLE(words, DOT_HALF(sum, u, s, 0), DOT_HALF(sum, u, s, 1), 0, 1, 2, 3, 4, 5, 6, 7)
#define DOT_WIDE_GROUP         DOT_GROUP
#define LARGER_INTS(a, b)      ((ints)vmaxq_s32((int32x4_t)(a), (int32x4_t)(b)))
#define LARGEST_LANE(v)        vmaxvq_s32((int32x4_t)(v))
/* of 8 vectors */
#define LOW_HALVES(v, i)       vmovn_s16(vcombine_s16(vmovn_s32((int32x4_t)(v)[i]), vmovn_s32((int32x4_t)(v)[(i) + 1])))
#define LOW_QUARTERS(v, i)     ((int32x4_t)vcombine_s8(LOW_HALVES(v, i), LOW_HALVES(v, (i) + 2)))
#define LOW_BYTES(v)           SHUFFLE(words, LOW_QUARTERS(v, 0), LOW_QUARTERS(v, 4), 0, 1, 2, 3, 4, 5, 6, 7)
#define WIDEN_LOW_HALVES(v, i) ((vec)vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32((uint32x4_t)QUARTET(v, i)))))
