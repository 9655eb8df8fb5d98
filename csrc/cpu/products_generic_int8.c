/* products_generic_int8.c — products of int8 without instructions for them: slow, for tests. */
#define VARIANT             generic_int8
#define ISA                 generic
#define LANES               4
#define TILE_ROWS           6
#define TILE_VECTORS        2
#define DOT_ROWS            2
#define MAX_UNPACKED_HALVES 6
#define MAX_UNPACKED_OTHERS 6
#include "int8_template.h"
