/* products_avx512_int8.c — products of int8 for AVX-512 (F, BW, VL, VNNI). */
#if defined(__x86_64__)
#include <immintrin.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")
#endif

#define VARIANT              avx512_int8
#define TILE_ROWS            7
#define DOT_ROWS             4
#define MAX_UNPACKED_HALVES  8
#define MAX_UNPACKED_OTHERS  8
#define DOT_BYTES(sum, u, s) ((ints)_mm512_dpbusd_epi32((__m512i)(sum), (__m512i)(u), (__m512i)(s)))
#define DOT_GROUP(sum, u, s) ((words)_mm256_dpbusd_epi32((__m256i)(sum), (__m256i)(u), (__m256i)(s)))
#define LARGER_INTS(a, b)    ((ints)_mm512_max_epi32((__m512i)(a), (__m512i)(b)))
#define LARGEST_LANE(v)      _mm512_reduce_max_epi32((__m512i)(v))
#define LOW_BYTES(v)         ((words)_mm256_set_m128i(_mm512_cvtepi32_epi8((__m512i)(v)[1]), _mm512_cvtepi32_epi8((__m512i)(v)[0])))
#define ROUND_F16(v)         ((vec)_mm512_cvtph_ps(_mm512_cvtps_ph((__m512)(v), _MM_FROUND_TO_NEAREST_INT)))
#define TWICE(p)             ((words)_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(p))))
#define BYTES_OF_BITS(word)  ((words)_mm256_maskz_set1_epi8(word, 1))
#include "avx512.h"
#include "int8_template.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
