/* products_neon_fixed24.c — quantized weights times few rows of x in 24 bits, for NEON (I8MM). */
#if defined(__aarch64__)
#include "neon_i8mm.h"

#define VARIANT  neon_fixed24
#define DIGITS   3
#define DOT_ROWS 2
#define MAX_ROWS 2
#include "fixed_template.h"

END_TARGET
#endif
