/* products_avx512_fixed16.c — quantized weights times one row of x in 16 bits, for AVX-512 (F, BW, VL, VNNI). */
#if defined(__x86_64__)
#include "avx512_vnni.h"

#define VARIANT  avx512_fixed16
#define DIGITS   2
#define DOT_ROWS 1
#define MAX_ROWS 1
#include "fixed_template.h"

END_TARGET
#endif
