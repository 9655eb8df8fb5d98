/* limits.h — what attention and scores share: how far each row sees, and the scale of its dot products. */
#ifndef LAZY_CUDA_LIMITS_H
#define LAZY_CUDA_LIMITS_H

#include <cmath>

#include "values.h"

/* Fills the stream's limits: how many of in_play are at or before rows[r]. */
int lazy_cuda_limits(lazy_stream *stream, const int32_t *rows, int n, const int32_t *in_play, int m, lazy_error *err);

/* Exponents are to the base 2. */
static inline float lazy_cuda_scale(int head_dim) { return (float)(M_LOG2E / sqrt((double)head_dim)); }

#endif
