/* ceilings.h — the peak rates of the CPU, which benchmarks compare the ops with. */
#ifndef CEILINGS_H
#define CEILINGS_H

#include "../../csrc/backend.h"

/* Multiply-adds in registers, in the arithmetic of the backend's products; *flops: their number, each counted as two */
int ceiling_multiply_adds(lazy_stream *, double *flops, lazy_error *);
/* Reads memory once. */
int ceiling_read(lazy_stream *, const void *memory, size_t bytes, lazy_error *);

#endif
