/* kernels_avx2.c — the kernels for AVX2. */
#if defined(__x86_64__)
#include "avx2.h"
TARGET("avx2,fma,f16c")

#define VARIANT             avx2
#define TILE_ROWS           6
#define DOT_ROWS            3
#define MAX_UNPACKED_HALVES 12
#define MAX_UNPACKED_OTHERS 24
#include "rows_template.h"
#include "linear_template.h"
#include "attention_template.h"

END_TARGET
#endif
