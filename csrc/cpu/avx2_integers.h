/* avx2_integers.h — what products of integers have in common by AVX2 and by AVX-VNNI, for integers.h. */
#include "avx2.h"

#define LARGER_INTS(a, b) ((ints)_mm256_max_epi32((__m256i)(a), (__m256i)(b)))
/* of 8 words, f16 in their low halves */
#define WIDEN_LOW_HALVES(v)                                                                                            \
    ((vec)_mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128((__m256i)((v) & 0xffff)),                            \
                                           _mm256_extracti128_si256((__m256i)((v) & 0xffff), 1))))
/* of 4 vectors */
#define LOW_BYTES(v)                                                                                                   \
    ((words)_mm256_permutevar8x32_epi32(                                                                               \
        _mm256_packus_epi16(_mm256_packus_epi32((__m256i)((v)[0] & 255), (__m256i)((v)[1] & 255)),                     \
                            _mm256_packus_epi32((__m256i)((v)[2] & 255), (__m256i)((v)[3] & 255))),                    \
        _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)))
