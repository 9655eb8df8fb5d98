/* products_neon_int8.c — products of int8 for NEON (I8MM). */
#if defined(__aarch64__)
#include "neon_i8mm.h"

#define VARIANT   neon_int8
#define TILE_ROWS 7
#include "int8_template.h"

END_TARGET
#endif
