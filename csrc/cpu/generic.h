/* generic.h — what the kernels for the baseline instruction set of an architecture have in common, emulations included. */
#define ISA                 generic
#define LANES               4
#define TILE_ROWS           6
#define TILE_VECTORS        2
#define DOT_ROWS            2
#define MAX_UNPACKED_HALVES 6
#define MAX_UNPACKED_OTHERS 6
