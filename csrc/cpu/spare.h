/* spare.h — the memory of sessions. That of one that has ended is kept for the next ones. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>

#include "../lazyllm.h"

#ifndef LAZY_SPARE_BYTES
#define LAZY_SPARE_BYTES ((size_t)256 << 20) /* 0: all blocks are the allocator's, which a sanitizer watches */
#endif

enum { LAZY_SPARE_BLOCKS = 1024 };

/* Mapped pages of which no block has been made yet. */
typedef struct lazy_region {
    char *pages;
    size_t bytes;
} lazy_region;

/* May be zeroed, and is then empty. */
typedef struct lazy_spare {
    atomic_flag lock;
    void *blocks[LAZY_SPARE_BLOCKS]; /* (n,) the oldest first */
    int n;
    size_t bytes;           /* of all of them, at most LAZY_SPARE_BYTES */
    lazy_region regions[2]; /* in huge pages; in small ones */
} lazy_spare;

/* *out = a block of so many bytes, aligned to 64. sparse: in small pages, so that those never written to take no
 * physical memory. */
int lazy_spare_alloc(lazy_spare *, void **out, size_t bytes, bool sparse, const char *what, lazy_error *);
void lazy_spare_free(void *block);               /* NULL is fine */
void lazy_spare_keep(lazy_spare *, void *block); /* frees it for the next session */
/* Frees all that is kept; false if nothing was. */
bool lazy_spare_empty(lazy_spare *);
