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

/* The next slot, once the device has copied it. */
static int take(lazy_staging *staging, char **slot, cudaEvent_t *copied, lazy_error *err)
{
    *slot = staging->memory + (size_t)staging->next * staging->SLOT_BYTES;
    *copied = staging->copied[staging->next];
    staging->next = (staging->next + 1) % staging->SLOTS;
    return lazy_cuda_check(cudaEventSynchronize(*copied), "waiting for an upload", err);
}

int lazy_cuda_upload(lazy_stream *stream, void *to, const void *from, size_t bytes, lazy_error *err)
{
    lazy_cuda_stream *s = lazy_cuda_scratch(stream);
    int code = lazy_cuda_enter(stream->backend, err);
    lazy_cuda_forget_ranges(stream);
    for (size_t done = 0, n; done < bytes && !code; done += n) {
        char *slot;
        cudaEvent_t copied;
        n = std::min(bytes - done, lazy_staging::SLOT_BYTES);
        if ((code = take(&s->staging, &slot, &copied, err))) break;
        memcpy(slot, (const char *)from + done, n);
        cudaError_t failed = cudaMemcpyAsync((char *)to + done, slot, n, cudaMemcpyHostToDevice, s->queue);
        code = lazy_cuda_check(failed ? failed : cudaEventRecord(copied, s->queue), "upload", err);
    }
    return code;
}

int lazy_cuda_download(lazy_stream *stream, void *to, const void *from, size_t bytes, lazy_error *err)
{
    lazy_cuda_stream *s = lazy_cuda_scratch(stream);
    int code = lazy_cuda_enter(stream->backend, err);
    for (size_t done = 0, n; done < bytes && !code; done += n) {
        char *slot;
        cudaEvent_t copied;
        n = std::min(bytes - done, lazy_staging::SLOT_BYTES);
        if ((code = take(&s->staging, &slot, &copied, err))) break;
        code = lazy_cuda_check(cudaMemcpyAsync(slot, (const char *)from + done, n, cudaMemcpyDeviceToHost, s->queue),
                               "download", err);
        if (!code) code = lazy_cuda_wait(stream, err);
        if (!code) memcpy((char *)to + done, slot, n);
    }
    return code;
}
