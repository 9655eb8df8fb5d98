/* kernels_neon.c — the kernels for NEON, which every ARM machine of 64 bits has. */
#if defined(__aarch64__)
#include "neon.h"

#define VARIANT             neon
#define TILE_ROWS           14
#define DOT_ROWS            6
#define MAX_UNPACKED_HALVES 12
#define MAX_UNPACKED_OTHERS 24
#include "rows_template.h"
#include "linear_template.h"
#include "attention_template.h"
#endif
