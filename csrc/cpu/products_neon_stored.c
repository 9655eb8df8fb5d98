/* products_neon_stored.c — quantized weights as stored times few rows of x in f32, for NEON. */
#if defined(__aarch64__)
#include "neon.h"

#define VARIANT  neon_stored
#define DOT_ROWS 6
#include "stored_template.h"
#endif
