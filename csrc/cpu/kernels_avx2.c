/* kernels_avx2.c — the kernels for AVX2, FMA and F16C. */
#if defined(__x86_64__)
#include "x86.h"
TARGET("avx2,fma,f16c")

#define VARIANT             avx2
#define ISA                 avx2
#define LANES               8
#define TILE_ROWS           6
#define DOT_ROWS            3
#define MAX_UNPACKED_HALVES 12
#define MAX_UNPACKED_OTHERS 12
#define LARGER(a, b)        ((vec)_mm256_max_ps((__m256)(a), (__m256)(b)))
#define HALVES_AT(p)        _mm_loadu_si128((const __m128i *)(p))
#define WIDEN_F16(p)        ((vec)_mm256_cvtph_ps(HALVES_AT(p)))
#define WIDEN_BF16(p)       ((vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(HALVES_AT(p)), 16))
#define BYTES_AT(p)         ((ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p))))
#define SIGNED_BYTES_AT(p)  ((ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p))))
#include "rows_template.h"
#include "linear_template.h"
#include "attention_template.h"

END_TARGET
#endif
