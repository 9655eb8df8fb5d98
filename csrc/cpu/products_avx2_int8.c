/* products_avx2_int8.c — products of int8 for AVX2. */
#if defined(__x86_64__)
#include "avx2_dots.h"

#define VARIANT   avx2_int8
#define TILE_ROWS 4
#include "int8_template.h"

END_TARGET
#endif
