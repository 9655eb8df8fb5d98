/* kernels_generic.c — the kernels for the baseline instruction set of the architecture. */
#define VARIANT             generic
#define ISA                 generic
#define LANES               4
#define TILE_ROWS           6
#define TILE_VECTORS        2
#define DOT_ROWS            2
#define MAX_UNPACKED_HALVES 6
#define MAX_UNPACKED_OTHERS 6
#include "rows_template.h"
#include "linear_template.h"
#include "attention_template.h"
