/* products_avx512_fixed8.c — quantized weights times few rows of x in 8 bits, for AVX-512 (F, BW, VL, VNNI). */
#if defined(__x86_64__)
#include "avx512_vnni.h"

#define VARIANT  avx512_fixed8
#define DIGITS   1
#define DOT_ROWS 4
#define MAX_ROWS 8
#include "fixed_template.h"

END_TARGET
#endif
