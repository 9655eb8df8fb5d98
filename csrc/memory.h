/* memory.h — aligned, checked allocation on the host. */
#ifndef LAZY_MEMORY_H
#define LAZY_MEMORY_H

#include "lazyllm.h"

/* count * size bytes on a 64-byte boundary, not zeroed; *out stays NULL on failure. `what` names it in the error. */
int lazy_alloc(void **out, size_t count, size_t size, const char *what, lazy_error *err);
int lazy_alloc_zeroed(void **out, size_t count, size_t size, const char *what, lazy_error *err);
void lazy_free(void *memory);

#endif
