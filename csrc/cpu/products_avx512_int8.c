/* products_avx512_int8.c — products of int8 for AVX-512 (F, BW, VL, VNNI). */
#if defined(__x86_64__)
#include <immintrin.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")
#endif

#define VARIANT             avx512_int8
#define TILE_ROWS           7
#define DOT_ROWS            4
#define MAX_UNPACKED_HALVES 8
#define MAX_UNPACKED_OTHERS 8
#define ROUND_F16(v)        ((vec)_mm512_cvtph_ps(_mm512_cvtps_ph((__m512)(v), _MM_FROUND_TO_NEAREST_INT)))
#include "avx512_vnni.h"
#include "int8_template.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
