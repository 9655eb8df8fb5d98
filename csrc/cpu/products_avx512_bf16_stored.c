/* products_avx512_bf16_stored.c — quantized weights as stored times few rows of x in bf16, for AVX-512 (F, BW, VL,
 * BF16). */
#if defined(__x86_64__)
#include "avx512_bf16.h"

#define VARIANT  avx512_bf16_stored
#define DOT_ROWS 6
#include "stored_template.h"

END_TARGET
#endif
