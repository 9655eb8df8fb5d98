/* mapping.h — a file of weights, mapped read-only, that other programs may change while it is in use. */
#pragma once

#include <time.h>

#include "lazyllm.h"

struct lazy_mapped; /* what the signal handler knows of a mapping */

typedef struct lazy_mapping {
    const unsigned char *data; /* (bytes,) */
    uint64_t bytes;
    char *path;
    int file;
    struct timespec modified;
    struct lazy_mapped *mapped;
} lazy_mapping;

/* Maps the file. From the first call on, reading where a file has been cut short gives zeros in place of a SIGBUS that
 * ends the process; a SIGBUS elsewhere is left to the handler that was there before. */
int lazy_mapping_open(lazy_mapping *mapping, const char *path, lazy_error *err);
void lazy_mapping_close(lazy_mapping *mapping); /* may be zeroed */

/* Fails if the file has been written to or cut short since it was opened: what has been read from it may be wrong. */
int lazy_mapping_check(const lazy_mapping *mapping, lazy_error *err);
