/* kernels_generic.c — the kernels for the baseline instruction set of the architecture. */
#define VARIANT generic
#include "generic.h"
#include "rows_template.h"
#include "linear_template.h"
#include "attention_template.h"
