/* convert.h — converts weights between types on the host. */
#ifndef LAZY_CUDA_CONVERT_H
#define LAZY_CUDA_CONVERT_H

#include <stddef.h>

extern "C" {
#include "../csrc/lazyllm.h"
}

/* to[i] = from[i] for i < n, rounded to nearest. */
void lazy_cuda_convert(void *to, lazy_dtype to_type, const void *from, lazy_dtype from_type, size_t n);

#endif
