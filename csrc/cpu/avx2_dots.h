/* avx2_dots.h — products of integers by AVX2, for integers.h, int8_template.h and fixed_template.h. */
#include "avx2_integers.h"
TARGET("avx2,fma,f16c")

/* Sums of two products fit 16 bits if the unsigned bytes are 128 at most. */
#define DOT_GROUP(sum, u, s)                                                                                           \
    ((sum) + (words)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)(u), (__m256i)(s)), _mm256_set1_epi16(1)))
#define DOT_WIDE_GROUP(sum, u, s)                                                                                      \
    ((sum) + (words)_mm256_madd_epi16((__m256i)((u) & 0x00ff00ff), LOW_OF_SIGNED(s)) +                                 \
     (words)_mm256_madd_epi16(_mm256_srli_epi16((__m256i)(u), 8), _mm256_srai_epi16((__m256i)(s), 8)))
#define LOW_OF_SIGNED(s)     _mm256_srai_epi16(_mm256_slli_epi16((__m256i)(s), 8), 8)
#define VALUES_PER_WORD      2
#define DOT_WORDS(sum, u, s) ((sum) + (ints)_mm256_madd_epi16((__m256i)(u), (__m256i)(s)))
