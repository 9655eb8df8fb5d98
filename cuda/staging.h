/* staging.h — uploads through pinned memory, so that the host may overwrite what it uploads and need not wait for the
 * device. */
#ifndef LAZY_CUDA_STAGING_H
#define LAZY_CUDA_STAGING_H

#include <cuda_runtime_api.h>

extern "C" {
#include "../csrc/lazyllm.h"
}

/* A ring: a slot is written again when the device has copied it. */
struct lazy_staging {
    static constexpr int SLOTS = 8;
    static constexpr size_t SLOT_BYTES = 64 << 10;

    char *memory;              /* (SLOTS, SLOT_BYTES) pinned */
    cudaEvent_t copied[SLOTS]; /* after the last copy from each slot */
    int next;                  /* slot */
};

/* On failure, and for a staging of zeros, lazy_staging_close frees what there is. */
int lazy_staging_open(lazy_staging *staging, lazy_error *err);
void lazy_staging_close(lazy_staging *staging);

/* Queues the copy of from[0 … bytes-1] (host) to the device; `from` may be overwritten once this returns. */
int lazy_staging_upload(lazy_staging *staging, void *to, const void *from, size_t bytes, cudaStream_t queue,
                        lazy_error *err);

#endif
