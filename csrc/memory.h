/* memory.h — aligned, checked allocation on the host. */
#pragma once

#include "lazyllm.h"

/* *out = room for `count` items of its type, aligned to 64; NULL on failure. `what` names the buffer in the error. */
#define lazy_alloc(out, count, what, err)                                                                              \
    lazy_alloc_bytes((void **)(out), (size_t)(count), sizeof **(out), NULL, what, err)
#define lazy_alloc_zeroed(out, count, what, err)                                                                       \
    lazy_alloc_zeroed_bytes((void **)(out), (size_t)(count), sizeof **(out), what, err)
#define lazy_alloc_copy(out, from, count, what, err)                                                                   \
    lazy_alloc_bytes((void **)(out), (size_t)(count), sizeof **(out), from, what, err)

/* count * size bytes: a copy of `from`, unless that is NULL. */
int lazy_alloc_bytes(void **out, size_t count, size_t size, const void *from, const char *what, lazy_error *err);
int lazy_alloc_zeroed_bytes(void **out, size_t count, size_t size, const char *what, lazy_error *err);
void lazy_free(void *memory);

/* Asks for huge pages, as lazy_alloc_bytes does for blocks of 4 MiB and more: a TLB miss can cost more than reading the
 * row behind it. */
void lazy_use_huge_pages(void *memory, size_t bytes);

/* Makes memory that nobody has written to yet use small pages only, of which those never written take no physical
 * memory, and drops the pages that it has. */
void lazy_use_small_pages(void *memory, size_t bytes);
