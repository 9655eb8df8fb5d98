/* avx512_vnni.h — products of integers by AVX-512, for integers.h, int8_template.h and fixed_template.h. */
#include "avx512.h"
TARGET("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")

#define VALUES_PER_WORD      4
#define DOT_WORDS(sum, u, s) ((ints)_mm512_dpbusd_epi32((__m512i)(sum), (__m512i)(u), (__m512i)(s)))
#define DOT_GROUP(sum, u, s) ((words)_mm256_dpbusd_epi32((__m256i)(sum), (__m256i)(u), (__m256i)(s)))
#define DOT_WIDE_GROUP       DOT_GROUP
#define LARGER_INTS(a, b)    ((ints)_mm512_max_epi32((__m512i)(a), (__m512i)(b)))
#define LARGEST_LANE(v)      _mm512_reduce_max_epi32((__m512i)(v))
#define LOW_BYTES(v)                                                                                                   \
    ((words)_mm256_set_m128i(_mm512_cvtepi32_epi8((__m512i)(v)[1]), _mm512_cvtepi32_epi8((__m512i)(v)[0])))
#define WIDEN_HALVES(v) ((vec)_mm512_cvtph_ps((__m256i)(v)))
