/* memory.h — aligned, checked allocation on the host. */
#ifndef LAZY_MEMORY_H
#define LAZY_MEMORY_H

#include "lazyllm.h"

/* count * size bytes, aligned to 64, not zeroed; *out is NULL on failure. `what` names the buffer in the error. */
int lazy_alloc(void **out, size_t count, size_t size, const char *what, lazy_error *err);
int lazy_alloc_zeroed(void **out, size_t count, size_t size, const char *what, lazy_error *err);
int lazy_alloc_copy(void **out, const void *from, size_t count, size_t size, const char *what,
                    lazy_error *err); /* of `from` */
void lazy_free(void *memory);

/* Makes newly allocated memory use small pages only, and none yet: what it holds is lost. For sparsely written buffers:
 * pages never written take no physical memory. */
void lazy_use_small_pages(void *memory, size_t bytes);

#endif
