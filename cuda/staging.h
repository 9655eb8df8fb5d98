/* staging.h — copies from and to the host through pinned memory, so that the host may overwrite what it uploads and
 * need not wait for the device. */
#ifndef LAZY_CUDA_STAGING_H
#define LAZY_CUDA_STAGING_H

#include <cuda_runtime_api.h>

extern "C" {
#include "../csrc/lazyllm.h"
}

/* A ring: a slot is written again when the device has copied it. */
struct lazy_staging {
    static constexpr int SLOTS = 2;
    static constexpr size_t SLOT_BYTES = 512 << 10; /* a decode step after 58,000 tokens uploads as much */

    char *memory;              /* (SLOTS, SLOT_BYTES) pinned */
    cudaEvent_t copied[SLOTS]; /* after the last upload from each slot */
    int next;                  /* slot */
};

/* On failure, and for a staging of zeros, lazy_staging_close frees what there is. */
int lazy_staging_open(lazy_staging *staging, lazy_error *err);
void lazy_staging_close(lazy_staging *staging);

#endif
