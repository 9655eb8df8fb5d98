/* avx2_integers.h — products of integers by AVX2, for integers.h, int8_template.h and fixed_template.h. */
#include "avx2.h"

/* Sums of two products fit 16 bits if the unsigned bytes are 128 at most. */
#define DOT_GROUP(sum, u, s)                                                                                           \
    ((sum) + (words)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)(u), (__m256i)(s)), _mm256_set1_epi16(1)))
#define LARGER_INTS(a, b) ((ints)_mm256_max_epi32((__m256i)(a), (__m256i)(b)))
/* of 8 words, f16 in their low halves */
#define WIDEN_LOW_HALVES(v)                                                                                            \
    ((vec)_mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128((__m256i)((v) & 0xffff)),                            \
                                           _mm256_extracti128_si256((__m256i)((v) & 0xffff), 1))))
#define DOT_WIDE_GROUP(sum, u, s)                                                                                      \
    ((sum) + (words)_mm256_madd_epi16((__m256i)((u) & 0x00ff00ff), LOW_OF_SIGNED(s)) +                                 \
     (words)_mm256_madd_epi16(_mm256_srli_epi16((__m256i)(u), 8), _mm256_srai_epi16((__m256i)(s), 8)))
#define LOW_OF_SIGNED(s) _mm256_srai_epi16(_mm256_slli_epi16((__m256i)(s), 8), 8)
/* of 4 vectors */
#define LOW_BYTES(v)                                                                                                   \
    ((words)_mm256_permutevar8x32_epi32(                                                                               \
        _mm256_packus_epi16(_mm256_packus_epi32((__m256i)((v)[0] & 255), (__m256i)((v)[1] & 255)),                     \
                            _mm256_packus_epi32((__m256i)((v)[2] & 255), (__m256i)((v)[3] & 255))),                    \
        _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)))

#define VALUES_PER_WORD      2
#define DOT_WORDS(sum, u, s) ((sum) + (ints)_mm256_madd_epi16((__m256i)(u), (__m256i)(s)))
