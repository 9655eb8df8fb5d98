/* products_generic_stored.c — quantized weights as stored times few rows of x in f32, for any processor. */
#define VARIANT  generic_stored
#define ISA      generic
#define LANES    4
#define DOT_ROWS 2
#include "stored_template.h"
