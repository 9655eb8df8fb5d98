/* products_avx512_fixed16.c — products of quantized weights with few rows of x in 16 bits, for AVX-512 (F, BW, VL, VNNI). */
#if defined(__x86_64__)
#include <immintrin.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")
#endif

#define VARIANT  avx512_fixed16
#define DIGITS   2
#define DOT_ROWS 2
#define MAX_ROWS 2
#include "avx512_vnni.h"
#include "fixed_template.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
