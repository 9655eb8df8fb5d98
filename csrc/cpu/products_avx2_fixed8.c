/* products_avx2_fixed8.c — quantized weights times few rows of x in 8 bits, for AVX2. */
#if defined(__x86_64__)
#include "avx2_dots.h"

#define VARIANT  avx2_fixed8
#define DIGITS   1
#define DOT_ROWS 2
#define MAX_ROWS 8
#include "fixed_template.h"

END_TARGET
#endif
