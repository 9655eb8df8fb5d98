/* avx2.h — what the kernels for AVX2 (with FMA and F16C) have in common, for the templates. */
#include "x86.h"
#define ISA                avx2
#define LANES              8
#define LARGER(a, b)       ((vec)_mm256_max_ps((__m256)(a), (__m256)(b)))
#define HALVES_AT(p)       _mm_loadu_si128((const __m128i *)(p))
#define WIDEN_F16(p)       ((vec)_mm256_cvtph_ps(HALVES_AT(p)))
#define WIDEN_BF16(p)      ((vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(HALVES_AT(p)), 16))
#define BYTES_AT(p)        ((ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p))))
#define SIGNED_BYTES_AT(p) ((ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p))))
