/* spare.h — the memory of sessions. What one has freed is kept for the next ones. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>

#include "../lazyllm.h"

#ifndef LAZY_SPARE_BYTES
#define LAZY_SPARE_BYTES ((size_t)256 << 20) /* 0: all blocks are the allocator's, which a sanitizer watches */
#endif

enum { LAZY_SPARE_BLOCKS = 1024 };

/* May be zeroed, and is then empty. */
typedef struct lazy_spare {
    atomic_flag lock;
    void *blocks[LAZY_SPARE_BLOCKS]; /* (n,) the oldest first */
    int n;
    size_t bytes; /* of all of them, at most LAZY_SPARE_BYTES */
    char *region; /* (region_bytes,) mapped pages of which no block has been made yet */
    size_t region_bytes;
} lazy_spare;

/* *out = a block of so many bytes, aligned to 64. */
int lazy_spare_alloc(lazy_spare *, void **out, size_t bytes, const char *what, lazy_error *);
void lazy_spare_free(lazy_spare *, void *block); /* NULL is fine */
/* For a block that nobody has written to yet: pages that are never written will take no physical memory. */
void lazy_spare_expect_sparse(void *block);
/* Frees all that is kept; false if nothing was. */
bool lazy_spare_empty(lazy_spare *);
