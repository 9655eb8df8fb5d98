/* products_avxvnni_int8.c — products of int8 for AVX-VNNI. */
#if defined(__x86_64__)
#include "avxvnni_dots.h"

#define VARIANT   avxvnni_int8
#define TILE_ROWS 6
#include "int8_template.h"

END_TARGET
#endif
