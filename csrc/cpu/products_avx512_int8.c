/* products_avx512_int8.c — products of int8 for AVX-512 (F, BW, VL, VNNI). */
#if defined(__x86_64__)
#include "avx512_vnni.h"

#define VARIANT   avx512_int8
#define TILE_ROWS 7
#include "int8_template.h"

END_TARGET
#endif
