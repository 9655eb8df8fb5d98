/* avx512_bf16.h — products of bf16 by AVX-512, for operands.h and quantized.h. */
#include "avx512.h"
TARGET("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512bf16")

#define OPERANDS_BF16
#define PAIR_PRODUCTS(sum, a, b)  ((vec)_mm512_dpbf16_ps((__m512)(sum), (__m512bh)(a), (__m512bh)(b)))
#define NEIGHBOURS(first, second) ((vec)_mm512_cvtne2ps_pbh((__m512)(second), (__m512)(first)))
#define HALVES_OF(v)              _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)(v)))
#define INTERLEAVED(low, high)    ((vec)_mm512_or_si512(HALVES_OF(low), _mm512_slli_epi32(HALVES_OF(high), 16)))
