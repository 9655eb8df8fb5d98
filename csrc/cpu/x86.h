/* x86.h — what the kernels for AVX2 and AVX-512 have in common: the size of a tile, and memory widened by one
 * instruction. */
#include <immintrin.h>

#include "target.h"

#define TILE_VECTORS 2
#define TWICE(p)     ((words)_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(p))))
