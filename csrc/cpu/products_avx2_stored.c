/* products_avx2_stored.c — quantized weights as stored times few rows of x in f32, for AVX2. */
#if defined(__x86_64__)
#include "avx2.h"
TARGET("avx2,fma,f16c")

#define VARIANT  avx2_stored
#define DOT_ROWS 3
#include "stored_template.h"

END_TARGET
#endif
