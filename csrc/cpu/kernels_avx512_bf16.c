/* kernels_avx512_bf16.c — the kernels for AVX-512 (F, BW, VL, BF16) with products of bf16, by vectors or by AMX. */
#if defined(__x86_64__)
#include "avx512.h"
TARGET("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512bf16")

#define VARIANT             avx512_bf16
#define TILE_ROWS           14
#define DOT_ROWS            6
#define MAX_UNPACKED_HALVES 112
#define MAX_UNPACKED_OTHERS 48
#define OPERANDS_BF16
#define PAIR_PRODUCTS(sum, a, b)  ((vec)_mm512_dpbf16_ps((__m512)(sum), (__m512bh)(a), (__m512bh)(b)))
#define NEIGHBOURS(first, second) ((vec)_mm512_cvtne2ps_pbh((__m512)(second), (__m512)(first)))
#define HALVES_OF(v)              _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)(v)))
#define INTERLEAVED(low, high)    ((vec)_mm512_or_si512(HALVES_OF(low), _mm512_slli_epi32(HALVES_OF(high), 16)))
#include "linear_template.h"
#include "attention_template.h"

END_TARGET

TARGET("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512bf16,amx-tile,amx-bf16")
#include "amx.h"
DEFINE_KERNELS(avx512_amx, AMX_SIDE, 6, 6, AMX_DEPTH *PER_OPERAND, amx_tile, amx_key_columns, amx_value_columns);
END_TARGET
#endif
