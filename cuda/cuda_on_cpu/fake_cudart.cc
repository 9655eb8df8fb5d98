/* fake_cudart.cc — replaces the CUDA runtime where kernels run on the CPU; implements the real header's prototypes.
 *
 * A stream is a list of kernels and copies, which run when the host waits for them and not before. So an asynchronous
 * copy reads host memory as late as a GPU may, and work that reads another stream's results without waiting for them
 * gets wrong ones. Only cudaMemcpy to the device reads its source before it returns. Device memory is heap memory: each
 * allocation has exactly the requested size and is filled with NaNs; under ASan, host accesses to it outside these
 * calls are reported. The device is an sm_80.
 *
 * Environment variables (with defaults):
 *   LAZYLLM_CUDA_FAKE_CAPABILITY   compute capability (80)
 *   LAZYLLM_CUDA_FAKE_PROCESSORS   multiprocessors (2)
 *   LAZYLLM_CUDA_FAKE_DEVICES      number of devices (1)
 *   LAZYLLM_CUDA_FAKE_MEMORY       bytes of memory of each device (8 GiB)
 *   LAZYLLM_CUDA_FAKE_DRIVER       CUDA version of the driver, as 1000 major + 10 minor (the headers')
 *
 * Tests read and set the variables cuda_on_cpu_… below while no work runs. */
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include <sanitizer/asan_interface.h>

#include "cuda_on_cpu.h"

#undef gridDim /* macros for kernels; in this file they are members of structs */
#undef blockDim

extern "C" {
unsigned long long cuda_on_cpu_launches; /* kernels and products launched */
unsigned long long cuda_on_cpu_widest;   /* blocks of the widest launch since a test last set it */
unsigned long long cuda_on_cpu_memsets;
unsigned long long cuda_on_cpu_uploads; /* copies from the host, and to it */
unsigned long long cuda_on_cpu_downloads;
unsigned long long cuda_on_cpu_pageable; /* those of them that use memory which is not pinned */
unsigned long long cuda_on_cpu_waits;    /* calls in which the host waits for the device */
unsigned long long cuda_on_cpu_refuse;   /* n: the n-th launch from now fails; 0: none */
unsigned long long cuda_on_cpu_bytes;    /* of device memory that is allocated */
unsigned long long cuda_on_cpu_peak;     /* the most of them since a test last set it */
}

using work = std::function<void()>;

/* Work in the order in which it runs. */
struct work_queue {
    int device; /* EVERY: the default stream's */
    std::deque<work> waiting = {};
    size_t n_done = 0;
};

struct CUstream_st {
    int device;
    std::shared_ptr<work_queue> queue;
};

/* The first n pieces of work of a queue. */
struct CUevent_st {
    int device;
    std::shared_ptr<work_queue> queue;
    size_t n;
};

enum { HOST = -1, EVERY = -2 };

namespace
{
struct allocation {
    size_t bytes;
    int device; /* HOST: pinned */
};

std::mutex device_mutex; /* guards everything below, and serialises device work */
std::map<uintptr_t, allocation> allocations;
std::set<cudaStream_t> streams;
/* of the default stream */
const std::shared_ptr<work_queue> default_queue = std::make_shared<work_queue>(work_queue{ EVERY });

thread_local int current_device;
thread_local cudaError_t last_error;

cudaError_t result(cudaError_t code)
{
    if (code != cudaSuccess) last_error = code;
    return code;
}

/* Runs the body of a function of the runtime; one that returns nothing succeeds. */
template <class F, class... A> cudaError_t locked(F body, A... args)
{
    std::lock_guard hold(device_mutex);
    if constexpr (!std::is_void_v<decltype(body(args...))>) return result(body(args...));
    else return body(args...), cudaSuccess;
}

size_t setting(const char *name, size_t otherwise)
{
    const char *value = getenv(name);
    return value ? strtoull(value, NULL, 10) : otherwise;
}

int n_devices() { return (int)setting("LAZYLLM_CUDA_FAKE_DEVICES", 1); }
int driver_version() { return (int)setting("LAZYLLM_CUDA_FAKE_DRIVER", CUDART_VERSION); }
size_t total_memory() { return setting("LAZYLLM_CUDA_FAKE_MEMORY", (size_t)8 << 30); }

size_t free_memory()
{
    size_t used = 0;
    for (auto &[start, a] : allocations)
        if (a.device == current_device) used += a.bytes;
    return std::max(total_memory(), used) - used;
}

/* Allows or forbids access to device memory; the macros do nothing without ASan. */
void allow(uintptr_t start, size_t bytes, bool allowed)
{
    if (allowed) ASAN_UNPOISON_MEMORY_REGION((void *)start, bytes);
    else ASAN_POISON_MEMORY_REGION((void *)start, bytes);
}

void allow_on(int device, bool allowed)
{
    for (auto &[start, a] : allocations)
        if (a.device == device || (device == EVERY && a.device != HOST)) allow(start, a.bytes, allowed);
}

/* The allocation that holds these bytes, or NULL. */
const allocation *find(const void *address, size_t bytes = 1)
{
    auto after = allocations.upper_bound((uintptr_t)address);
    if (after == allocations.begin()) return NULL;
    auto &[start, a] = *std::prev(after);
    return (uintptr_t)address - start + bytes <= a.bytes ? &a : NULL;
}

/* True if the whole range is in device memory, or `address` in host memory, as the copy claims. */
bool is_located(const void *address, size_t bytes, bool on_device)
{
    const allocation *found = find(address, on_device ? bytes : 1);
    return address && (found && found->device != HOST) == on_device;
}

const std::shared_ptr<work_queue> &queue_of(cudaStream_t stream) { return stream ? stream->queue : default_queue; }

/* Runs the work that waits, up to the n-th piece of all. */
void finish(work_queue &queue, size_t n = SIZE_MAX)
{
    while (!queue.waiting.empty() && queue.n_done < n) {
        allow_on(queue.device, true);
        queue.waiting.front()();
        allow_on(queue.device, false);
        queue.waiting.pop_front();
        queue.n_done++;
    }
}

void finish_all()
{
    finish(*default_queue);
    for (cudaStream_t stream : streams) finish(*stream->queue);
}

cudaError_t enqueue(cudaStream_t stream, work step)
{
    queue_of(stream)->waiting.push_back(std::move(step));
    return cudaSuccess;
}

/* kept: the source is read at once. */
cudaError_t copy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream, bool kept)
{
    bool up = kind == cudaMemcpyHostToDevice, down = kind == cudaMemcpyDeviceToHost;
    if (bytes == 0) return cudaSuccess;
    if (!is_located(to, bytes, !down) || !is_located(from, bytes, !up)) return cudaErrorInvalidValue;
    cuda_on_cpu_uploads += up;
    cuda_on_cpu_downloads += down;
    cuda_on_cpu_pageable += (up && !find(from)) || (down && !find(to));
    if (!kept) return enqueue(stream, [=] { memmove(to, from, bytes); });
    const char *first = static_cast<const char *>(from);
    return enqueue(
        stream, [to, source = std::vector<char>(first, first + bytes)] { memcpy(to, source.data(), source.size()); });
}

cudaError_t allocate(void **out, size_t bytes, int device)
{
    *out = NULL;
    bool fits = device == HOST || bytes <= free_memory();
    if (!fits || posix_memalign(out, 256, bytes)) return cudaErrorMemoryAllocation;
    memset(*out, 0xFF, bytes);
    allocations[(uintptr_t)*out] = { bytes, device };
    if (device == HOST) return cudaSuccess;
    cuda_on_cpu_bytes += bytes;
    cuda_on_cpu_peak = std::max(cuda_on_cpu_peak, cuda_on_cpu_bytes);
    allow((uintptr_t)*out, bytes, false);
    return cudaSuccess;
}

cudaError_t release(void *memory)
{
    auto found = allocations.find((uintptr_t)memory);
    if (found == allocations.end()) return memory ? cudaErrorInvalidValue : cudaSuccess;
    allow(found->first, found->second.bytes, true);
    if (found->second.device != HOST) cuda_on_cpu_bytes -= found->second.bytes;
    allocations.erase(found);
    free(memory);
    return cudaSuccess;
}

cudaError_t release_later(void *memory)
{
    finish_all();
    return release(memory);
}
} // namespace

cudaError_t cuda_on_cpu::submit(cudaStream_t stream, const std::function<void()> &step, unsigned long long blocks)
{
    return locked([&] {
        if (cuda_on_cpu_refuse && --cuda_on_cpu_refuse == 0) return cudaErrorLaunchOutOfResources;
        cuda_on_cpu_launches++;
        cuda_on_cpu_widest = std::max(cuda_on_cpu_widest, blocks);
        if (stream && stream->device != current_device) return cudaErrorInvalidResourceHandle;
        return enqueue(stream, step);
    });
}

/* ---- devices ---- */

cudaError_t cudaGetDeviceCount(int *count)
{
    *count = driver_version() / 1000 < CUDART_VERSION / 1000 ? 0 : n_devices();
    return result(*count ? cudaSuccess : cudaErrorNoDevice);
}

cudaError_t cudaSetDevice(int device)
{
    if (device < 0 || device >= n_devices()) return result(cudaErrorInvalidDevice);
    current_device = device;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *prop, int)
{
    *prop = {};
    snprintf(prop->name, sizeof prop->name, "CUDA on the CPU");
    prop->major = (int)setting("LAZYLLM_CUDA_FAKE_CAPABILITY", 80) / 10;
    prop->minor = (int)setting("LAZYLLM_CUDA_FAKE_CAPABILITY", 80) % 10;
    prop->totalGlobalMem = total_memory();
    prop->sharedMemPerMultiprocessor = cuda_on_cpu::MAX_SHARED_BYTES + 1024;
    prop->multiProcessorCount = (int)setting("LAZYLLM_CUDA_FAKE_PROCESSORS", 2);
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize()
{
    return locked([] {
        cuda_on_cpu_waits++;
        finish_all();
    });
}

cudaError_t cudaDriverGetVersion(int *version) { return *version = driver_version(), cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }

/* ---- errors ---- */

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }

/* Name and text of each that is returned here. */
static const std::map<cudaError_t, std::pair<const char *, const char *>> errors = {
#define ERROR(code, text)                                                                                              \
    {                                                                                                                  \
        code, { #code, text }                                                                                          \
    }
    ERROR(cudaSuccess, "no error"),
    ERROR(cudaErrorInvalidValue, "invalid argument"),
    ERROR(cudaErrorMemoryAllocation, "out of memory"),
    ERROR(cudaErrorLaunchOutOfResources, "too many resources requested for launch"),
    ERROR(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    ERROR(cudaErrorInvalidDevice, "invalid device ordinal"),
    ERROR(cudaErrorInvalidResourceHandle, "invalid resource handle"),
};

const char *cudaGetErrorName(cudaError_t error) { return errors.at(error).first; }
const char *cudaGetErrorString(cudaError_t error) { return errors.at(error).second; }

/* ---- memory ---- */

cudaError_t cudaMemGetInfo(size_t *free, size_t *total)
{
    return locked([&] {
        *free = free_memory();
        *total = total_memory();
    });
}

cudaError_t cudaMalloc(void **out, size_t bytes) { return locked(allocate, out, bytes, current_device); }
cudaError_t cudaMallocHost(void **out, size_t bytes) { return locked(allocate, out, bytes, HOST); }
cudaError_t cudaFree(void *memory) { return locked(release_later, memory); }
cudaError_t cudaFreeHost(void *memory) { return locked(release_later, memory); }

/* A pool keeps nothing: what is freed from it is gone at once, though kernels that use it may not have run yet. */
cudaError_t cudaMemPoolCreate(cudaMemPool_t *, const cudaMemPoolProps *) { return cudaSuccess; }
cudaError_t cudaMemPoolDestroy(cudaMemPool_t) { return cudaSuccess; }
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void *) { return cudaSuccess; }

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void *value)
{
    *static_cast<uint64_t *>(value) = 0;
    return cudaSuccess;
}

cudaError_t cudaMallocFromPoolAsync(void **out, size_t n, cudaMemPool_t, cudaStream_t) { return cudaMalloc(out, n); }
cudaError_t cudaFreeAsync(void *memory, cudaStream_t) { return locked(release, memory); }

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream)
{
    return locked(copy, to, from, bytes, kind, stream, false);
}

/* On a GPU, the last transfers to the device may still be under way on return. */
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind)
{
    return locked([&] {
        bool up = kind == cudaMemcpyHostToDevice;
        cuda_on_cpu_waits++;
        cudaError_t code = copy(to, from, bytes, kind, NULL, up);
        if (!up) finish(*default_queue);
        return code;
    });
}

cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t bytes,
                                cudaStream_t stream)
{
    return locked([&] {
        const allocation *source = find(from, bytes), *target = find(to, bytes);
        if (!source || source->device != from_device || !target || target->device != to_device)
            return cudaErrorInvalidValue;
        return enqueue(stream, [=] {
            allow((uintptr_t)to, bytes, true);
            allow((uintptr_t)from, bytes, true);
            memmove(to, from, bytes);
            allow((uintptr_t)to, bytes, false);
        });
    });
}

cudaError_t cudaMemsetAsync(void *memory, int value, size_t bytes, cudaStream_t stream)
{
    return locked([&] {
        if (!is_located(memory, bytes, true)) return cudaErrorInvalidValue;
        cuda_on_cpu_memsets++;
        return enqueue(stream, [=] { memset(memory, value, bytes); });
    });
}

/* ---- streams and events ---- */

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned /* cudaStreamNonBlocking */)
{
    return locked([&] {
        *out = new CUstream_st{ current_device, std::make_shared<work_queue>(work_queue{ current_device }) };
        streams.insert(*out);
    });
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    return locked([&] {
        finish(*stream->queue);
        streams.erase(stream);
        delete stream;
    });
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    return locked([&] {
        cuda_on_cpu_waits++;
        finish(*queue_of(stream));
    });
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned)
{
    *out = new CUevent_st{ current_device, default_queue, 0 };
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    delete event;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    return locked([&] {
        if (stream->device != event->device) return cudaErrorInvalidResourceHandle;
        event->queue = queue_of(stream);
        event->n = event->queue->n_done + event->queue->waiting.size();
        return cudaSuccess;
    });
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned)
{
    return locked(enqueue, stream, [queue = event->queue, n = event->n] { finish(*queue, n); });
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    return locked([&] {
        cuda_on_cpu_waits += event->queue->n_done < event->n;
        finish(*event->queue, event->n);
    });
}
