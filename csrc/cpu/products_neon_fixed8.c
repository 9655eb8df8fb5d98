/* products_neon_fixed8.c — quantized weights times few rows of x in 8 bits, for NEON (I8MM). */
#if defined(__aarch64__)
#include "neon_i8mm.h"

#define VARIANT  neon_fixed8
#define DIGITS   1
#define DOT_ROWS 4
#define MAX_ROWS 8
#include "fixed_template.h"

END_TARGET
#endif
