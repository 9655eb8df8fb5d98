/* kernels_generic.c — the kernels in what every machine of the architecture runs. */
#define VARIANT      generic
#define LANES        4
#define TILE_ROWS    6
#define TILE_VECTORS 2
#define DOT_ROWS     2
#define FEW_PRODUCTS 6
#include "kernels_template.h"
