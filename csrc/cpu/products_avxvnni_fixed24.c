/* products_avxvnni_fixed24.c — quantized weights times few rows of x in 24 bits, for AVX-VNNI. */
#if defined(__x86_64__)
#include "avxvnni_dots.h"

#define VARIANT  avxvnni_fixed24
#define DIGITS   3
#define DOT_ROWS 2
#define MAX_ROWS 2
#include "fixed_template.h"

END_TARGET
#endif
