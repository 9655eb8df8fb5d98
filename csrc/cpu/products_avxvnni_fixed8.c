/* products_avxvnni_fixed8.c — quantized weights times few rows of x in 8 bits, for AVX-VNNI. */
#if defined(__x86_64__)
#include "avxvnni_dots.h"

#define VARIANT  avxvnni_fixed8
#define DIGITS   1
#define DOT_ROWS 2
#define MAX_ROWS 8
#include "fixed_template.h"

END_TARGET
#endif
