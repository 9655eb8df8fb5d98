/* ranges.h — for attention and scores: the keys that each row attends to, and the scale and cap of its dot products. */
#ifndef LAZY_CUDA_RANGES_H
#define LAZY_CUDA_RANGES_H

#include <cmath>

#include "values.h"

/* (*out)[r] = the part of in_play that row r attends to: rows[r] - window < position <= rows[r]. Computed only if the
 * stream's last ranges are of other rows or keys. */
int lazy_cuda_find_ranges(lazy_stream *stream, const lazy_attending *a, const lazy_key_range **out, lazy_error *err);

/* log2(e) / sqrt(query_scalar): the softmax uses powers of 2. */
static inline float lazy_cuda_scale(const lazy_config *c)
{
    return (float)(M_LOG2E / sqrt(c->query_scalar ? (double)c->query_scalar : c->head_dim));
}

/* The cap on the products so scaled; 0: none. */
static inline float lazy_cuda_cap(const lazy_config *c) { return (float)M_LOG2E * c->attention_cap; }

#endif
