/* kernels_generic_bf16.c — products of bf16 without instructions for them: slow, for tests. */
#define VARIANT generic_bf16
#define ISA     generic
#define OPERANDS_BF16
#define LANES               4
#define TILE_ROWS           6
#define TILE_VECTORS        2
#define DOT_ROWS            2
#define MAX_UNPACKED_HALVES 6
#define MAX_UNPACKED_OTHERS 6
#include "kernels_template.h"
