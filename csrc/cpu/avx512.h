/* avx512.h — what the kernels for AVX-512 have in common, for the templates. */
#include "x86.h"
#define ISA                 avx512
#define LANES               16
#define LARGER(a, b)        ((vec)_mm512_max_ps((__m512)(a), (__m512)(b)))
#define HALVES_AT(p)        _mm256_loadu_si256((const __m256i *)(p))
#define WIDEN_F16(p)        ((vec)_mm512_cvtph_ps(HALVES_AT(p)))
#define WIDEN_BF16(p)       ((vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(HALVES_AT(p)), 16))
#define BYTES_AT(p)         ((ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(p))))
#define SIGNED_BYTES_AT(p)  ((ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(p))))
#define LOOK_UP(table, q)   ((vec)_mm512_permutexvar_ps((__m512i)(q), (__m512)(table)))
#define BYTES_OF_BITS(word) ((words)_mm256_maskz_set1_epi8(word, 1))
