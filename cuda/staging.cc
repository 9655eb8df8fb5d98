#include "staging.h"

#include <algorithm>
#include <cstring>

#include "cuda.h"

int lazy_staging_open(lazy_staging *staging, lazy_error *err)
{
    int code = lazy_cuda_check(cudaMallocHost((void **)&staging->memory, staging->SLOTS * staging->SLOT_BYTES),
                               "pinned memory", err);
    for (cudaEvent_t &copied : staging->copied)
        if (!code) code = lazy_cuda_check(cudaEventCreateWithFlags(&copied, cudaEventDisableTiming), "an event", err);
    return code;
}

void lazy_staging_close(lazy_staging *staging)
{
    for (cudaEvent_t copied : staging->copied)
        if (copied) cudaEventDestroy(copied);
    cudaFreeHost(staging->memory);
}

int lazy_staging_upload(lazy_staging *staging, void *to, const void *from, size_t bytes, cudaStream_t queue,
                        lazy_error *err)
{
    cudaError_t code = cudaSuccess;
    for (size_t done = 0, n; done < bytes && !code; done += n) {
        n = std::min(bytes - done, staging->SLOT_BYTES);
        char *slot = staging->memory + (size_t)staging->next * staging->SLOT_BYTES;
        cudaEvent_t copied = staging->copied[staging->next];
        staging->next = (staging->next + 1) % staging->SLOTS;
        code = cudaEventSynchronize(copied);
        if (code) break;
        memcpy(slot, (const char *)from + done, n);
        code = cudaMemcpyAsync((char *)to + done, slot, n, cudaMemcpyHostToDevice, queue);
        if (!code) code = cudaEventRecord(copied, queue);
    }
    return lazy_cuda_check(code, "upload", err);
}
