/* kernels_generic.c — the kernels for the baseline instruction set of the architecture. */
#define VARIANT generic
#include "generic.h"
#include "kernels_template.h"
