/* kernels_generic_bf16.c — products of bf16 without instructions for them: slow, for tests. */
#define VARIANT generic_bf16
#define OPERANDS_BF16
#include "generic.h"
#include "linear_template.h"
#include "attention_template.h"
