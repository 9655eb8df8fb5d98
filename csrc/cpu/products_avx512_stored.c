/* products_avx512_stored.c — quantized weights as stored times few rows of x in f32, for AVX-512 (F, BW, VL). */
#if defined(__x86_64__)
#include "avx512.h"
TARGET("avx2,fma,f16c,avx512f,avx512bw,avx512vl")

#define VARIANT  avx512_stored
#define DOT_ROWS 6
#include "stored_template.h"

/* For more rows tiles of AMX are faster. */
DEFINE_FEW_ROWS(avx512_stored_5, PER_OPERAND, 1, 5, AS_STORED(TAKEN));

END_TARGET
#endif
