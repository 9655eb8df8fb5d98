/* spare.h — memory that sessions have freed, kept for the next ones. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#ifndef LAZY_SPARE_BYTES
#define LAZY_SPARE_BYTES ((size_t)256 << 20)
#endif

enum { LAZY_SPARE_BLOCKS = 1024 };

/* May be zeroed, and is then empty. */
typedef struct lazy_spare {
    atomic_flag lock;
    void *blocks[LAZY_SPARE_BLOCKS]; /* (n,) of lazy_alloc_bytes, the oldest first */
    int n;
    size_t bytes; /* of all of them, at most LAZY_SPARE_BYTES */
} lazy_spare;

/* A block of so many bytes or up to twice as many; NULL: there is none. */
void *lazy_spare_take(lazy_spare *, size_t bytes);
/* Takes over memory of lazy_alloc_bytes, or NULL. */
void lazy_spare_keep(lazy_spare *, void *memory);
/* Frees all of it; false if there was none. */
bool lazy_spare_empty(lazy_spare *);
