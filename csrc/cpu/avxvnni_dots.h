/* avxvnni_dots.h — products of integers by AVX-VNNI, for integers.h, int8_template.h and fixed_template.h. */
#include "avx2_integers.h"
TARGET("avx2,fma,f16c,avxvnni")

#define VALUES_PER_WORD      4
#define DOT_WORDS(sum, u, s) ((ints)_mm256_dpbusd_avx_epi32((__m256i)(sum), (__m256i)(u), (__m256i)(s)))
#define DOT_GROUP(sum, u, s) ((words)_mm256_dpbusd_avx_epi32((__m256i)(sum), (__m256i)(u), (__m256i)(s)))
#define DOT_WIDE_GROUP       DOT_GROUP
