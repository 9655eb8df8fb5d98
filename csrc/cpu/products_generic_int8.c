/* products_generic_int8.c — products of int8 without instructions for them: slow, for tests. */
#define VARIANT generic_int8
#include "generic.h"
#include "int8_template.h"
