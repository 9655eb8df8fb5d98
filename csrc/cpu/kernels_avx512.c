/* kernels_avx512.c — the kernels for AVX-512 (F, BW, VL). */
#if defined(__x86_64__)
#include "avx512.h"
TARGET("avx2,fma,f16c,avx512f,avx512bw,avx512vl")

#define VARIANT             avx512
#define TILE_ROWS           14
#define DOT_ROWS            6
#define MAX_UNPACKED_HALVES 160
#define MAX_UNPACKED_OTHERS 64
#include "rows_template.h"
#include "linear_template.h"
#include "attention_template.h"

END_TARGET
#endif
