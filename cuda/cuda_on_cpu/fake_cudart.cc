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
#include <utility>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

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
int cuda_on_cpu_refuse;                  /* n: the n-th launch from now fails; 0: none */
unsigned long long cuda_on_cpu_bytes;    /* of device memory that is allocated */
unsigned long long cuda_on_cpu_peak;     /* the most of them since a test last set it */
}

namespace
{

using work = std::function<void()>;
struct allocation {
    size_t bytes;
    int device;
};

/* Work in the order in which it runs. */
struct work_queue {
    std::deque<work> waiting;
    size_t n_done;
};

} // namespace

struct CUstream_st {
    int device;
    std::shared_ptr<work_queue> queue;
};

/* The first n pieces of work of a queue. */
struct CUevent_st {
    std::shared_ptr<work_queue> queue;
    size_t n;
};

namespace
{

std::mutex device_mutex; /* guards everything below, and serialises device work */
std::map<uintptr_t, allocation> device_memory, pinned_memory;
std::vector<CUstream_st *> streams;
std::vector<CUevent_st *> events;
/* of the default stream, and of streams that wait for it: their work runs in the order of the calls */
const std::shared_ptr<work_queue> default_queue = std::make_shared<work_queue>();

thread_local int current_device;
thread_local cudaError_t last_error;

cudaError_t result(cudaError_t code)
{
    if (code != cudaSuccess) last_error = code;
    return code;
}

size_t setting(const char *name, size_t otherwise)
{
    const char *value = getenv(name);
    return value ? strtoull(value, NULL, 10) : otherwise;
}

int n_devices() { return (int)setting("LAZYLLM_CUDA_FAKE_DEVICES", 1); }
bool is_device(int device) { return device >= 0 && device < n_devices(); }
size_t total_memory() { return setting("LAZYLLM_CUDA_FAKE_MEMORY", (size_t)8 << 30); }

size_t free_memory(int device)
{
    size_t used = 0;
    for (auto &[start, a] : device_memory)
        if (a.device == device) used += a.bytes;
    size_t total = total_memory();
    return used < total ? total - used : 0;
}

/* Allows or forbids host access to device memory, under ASan. */
void allow_host([[maybe_unused]] uintptr_t start, [[maybe_unused]] size_t bytes, [[maybe_unused]] bool allowed)
{
#ifdef __SANITIZE_ADDRESS__
    if (allowed) ASAN_UNPOISON_MEMORY_REGION((void *)start, bytes);
    else ASAN_POISON_MEMORY_REGION((void *)start, bytes);
#endif
}

void allow_host_everywhere(bool allowed)
{
    for (auto &[start, a] : device_memory) allow_host(start, a.bytes, allowed);
}

void run_now(const work &step)
{
    allow_host_everywhere(true);
    step();
    allow_host_everywhere(false);
}

const std::map<uintptr_t, allocation>::value_type *allocation_of(const void *address)
{
    auto after = device_memory.upper_bound((uintptr_t)address);
    if (after == device_memory.begin()) return NULL;
    auto &found = *std::prev(after);
    return (uintptr_t)address - found.first < found.second.bytes ? &found : NULL;
}

bool is_device_range(const void *address, size_t bytes)
{
    auto found = allocation_of(address);
    return found && bytes <= found->first + found->second.bytes - (uintptr_t)address;
}

/* True if the whole range is in device memory, or `address` in host memory, as the copy claims. */
bool is_located(const void *address, size_t bytes, bool on_device)
{
    return on_device ? is_device_range(address, bytes) : address && !allocation_of(address);
}

bool is_pinned(const void *address)
{
    auto after = pinned_memory.upper_bound((uintptr_t)address);
    return after != pinned_memory.begin() &&
           (uintptr_t)address - std::prev(after)->first < std::prev(after)->second.bytes;
}

void count_copy(const void *to, const void *from)
{
    bool up = !allocation_of(from), down = !allocation_of(to);
    cuda_on_cpu_uploads += up;
    cuda_on_cpu_downloads += down;
    cuda_on_cpu_pageable += (up && !is_pinned(from)) || (down && !is_pinned(to));
}

bool may_copy(const void *to, const void *from, size_t bytes, cudaMemcpyKind kind)
{
    bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (kind == cudaMemcpyDefault) to_device = allocation_of(to), from_device = allocation_of(from);
    return bytes == 0 || (is_located(to, bytes, to_device) && is_located(from, bytes, from_device));
}

const std::shared_ptr<work_queue> &queue_of(cudaStream_t stream) { return stream ? stream->queue : default_queue; }

/* Runs the work that waits, up to the n-th piece of all. */
void finish(work_queue &queue, size_t n = SIZE_MAX)
{
    while (!queue.waiting.empty() && queue.n_done < n) {
        run_now(queue.waiting.front());
        queue.waiting.pop_front();
        queue.n_done++;
    }
}

void finish_all()
{
    finish(*default_queue);
    for (CUstream_st *stream : streams) finish(*stream->queue);
}

cudaError_t enqueue(cudaStream_t stream, work step)
{
    queue_of(stream)->waiting.push_back(std::move(step));
    return cudaSuccess;
}

cudaError_t copy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream)
{
    if (!may_copy(to, from, bytes, kind)) return cudaErrorInvalidValue;
    if (bytes == 0) return cudaSuccess;
    count_copy(to, from);
    return enqueue(stream, [=] { memmove(to, from, bytes); });
}

cudaError_t fill(void *memory, int value, size_t bytes, cudaStream_t stream)
{
    if (bytes == 0) return cudaSuccess;
    if (!is_device_range(memory, bytes)) return cudaErrorInvalidValue;
    cuda_on_cpu_memsets++;
    return enqueue(stream, [=] { memset(memory, value, bytes); });
}

cudaError_t allocate(void **out, size_t bytes, size_t alignment)
{
    *out = NULL;
    if (bytes == 0) return cudaSuccess;
    if (posix_memalign(out, alignment, bytes)) return cudaErrorMemoryAllocation;
    memset(*out, 0xFF, bytes);
    return cudaSuccess;
}

} // namespace

/* True for the launch that cuda_on_cpu_refuse selects. */
static bool refuses() { return cuda_on_cpu_refuse && --cuda_on_cpu_refuse == 0; }

cudaError_t cuda_on_cpu::submit(cudaStream_t stream, const std::function<void()> &step, unsigned long long blocks)
{
    std::lock_guard hold(device_mutex);
    if (refuses()) return result(cudaErrorLaunchOutOfResources);
    cuda_on_cpu_launches++;
    cuda_on_cpu_widest = std::max(cuda_on_cpu_widest, blocks);
    if (!is_device(current_device)) return result(cudaErrorNoDevice);
    if (stream && stream->device != current_device) return result(cudaErrorInvalidResourceHandle);
    return result(enqueue(stream, step));
}

/* ---- devices ---- */

static int driver_version() { return (int)setting("LAZYLLM_CUDA_FAKE_DRIVER", CUDART_VERSION); }

cudaError_t cudaGetDeviceCount(int *count)
{
    *count = 0;
    if (driver_version() / 1000 < CUDART_VERSION / 1000) return result(cudaErrorInsufficientDriver);
    *count = n_devices();
    return result(*count ? cudaSuccess : cudaErrorNoDevice);
}

cudaError_t cudaSetDevice(int device)
{
    if (!n_devices()) return result(cudaErrorNoDevice);
    if (!is_device(device)) return result(cudaErrorInvalidDevice);
    current_device = device;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *prop, int device)
{
    if (!is_device(device)) return result(cudaErrorInvalidDevice);
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
    std::lock_guard hold(device_mutex);
    cuda_on_cpu_waits++;
    finish_all();
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) { return *version = driver_version(), cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }

cudaError_t cudaFuncSetAttribute(const void *function, cudaFuncAttribute attribute, int value)
{
    if (!function) return result(cudaErrorInvalidDeviceFunction);
    bool fits = attribute != cudaFuncAttributeMaxDynamicSharedMemorySize ||
                (value >= 0 && (size_t)value <= cuda_on_cpu::MAX_SHARED_BYTES);
    return result(fits ? cudaSuccess : cudaErrorInvalidValue);
}

/* ---- errors ---- */

cudaError_t cudaGetLastError()
{
    cudaError_t code = last_error;
    last_error = cudaSuccess;
    return code;
}

static const struct {
    cudaError_t code;
    const char *name, *text;
} errors[] = {
    { cudaSuccess, "cudaSuccess", "no error" },
    { cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument" },
    { cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory" },
    { cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function" },
    { cudaErrorLaunchOutOfResources, "cudaErrorLaunchOutOfResources", "too many resources requested for launch" },
    { cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported" },
    { cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected" },
    { cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal" },
    { cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle" },
    { cudaErrorNotReady, "cudaErrorNotReady", "device not ready" },
    { cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver",
      "CUDA driver version is insufficient for CUDA runtime version" },
};

const char *cudaGetErrorName(cudaError_t code)
{
    for (auto &e : errors)
        if (e.code == code) return e.name;
    return "unrecognized error code";
}

const char *cudaGetErrorString(cudaError_t code)
{
    for (auto &e : errors)
        if (e.code == code) return e.text;
    return "unrecognized error code";
}

/* ---- memory ---- */

cudaError_t cudaMemGetInfo(size_t *free, size_t *total)
{
    std::lock_guard hold(device_mutex);
    if (!is_device(current_device)) return result(cudaErrorNoDevice);
    *free = free_memory(current_device);
    *total = total_memory();
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **out, size_t bytes)
{
    std::lock_guard hold(device_mutex);
    if (!out) return result(cudaErrorInvalidValue);
    if (!is_device(current_device)) return result(cudaErrorNoDevice);
    cudaError_t code = bytes <= free_memory(current_device) ? allocate(out, bytes, 256) : cudaErrorMemoryAllocation;
    if (code != cudaSuccess || !*out) return result(code);
    device_memory[(uintptr_t)*out] = { bytes, current_device };
    cuda_on_cpu_bytes += bytes;
    cuda_on_cpu_peak = std::max(cuda_on_cpu_peak, cuda_on_cpu_bytes);
    allow_host((uintptr_t)*out, bytes, false);
    return cudaSuccess;
}

static cudaError_t free_device(void *memory)
{
    auto found = device_memory.find((uintptr_t)memory);
    if (found == device_memory.end()) return result(cudaErrorInvalidValue);
    allow_host(found->first, found->second.bytes, true);
    cuda_on_cpu_bytes -= found->second.bytes;
    device_memory.erase(found);
    free(memory);
    return cudaSuccess;
}

cudaError_t cudaFree(void *memory)
{
    std::lock_guard hold(device_mutex);
    if (!memory) return cudaSuccess;
    finish_all();
    return free_device(memory);
}

/* A pool keeps nothing: what is freed from it is gone at once, though kernels that use it may not have run yet. */
cudaError_t cudaMemPoolCreate(cudaMemPool_t *pool, const cudaMemPoolProps *properties)
{
    *pool = (cudaMemPool_t)(uintptr_t)(properties->location.id + 1);
    return cudaSuccess;
}

cudaError_t cudaMemPoolDestroy(cudaMemPool_t) { return cudaSuccess; }
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void *) { return cudaSuccess; }

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void *value)
{
    *static_cast<uint64_t *>(value) = 0;
    return cudaSuccess;
}

cudaError_t cudaMallocFromPoolAsync(void **out, size_t bytes, cudaMemPool_t, cudaStream_t)
{
    return cudaMalloc(out, bytes);
}

cudaError_t cudaFreeAsync(void *memory, cudaStream_t)
{
    std::lock_guard hold(device_mutex);
    return free_device(memory);
}

cudaError_t cudaMallocHost(void **out, size_t bytes)
{
    std::lock_guard hold(device_mutex);
    if (!out) return result(cudaErrorInvalidValue);
    if (!is_device(current_device)) return result(cudaErrorNoDevice);
    cudaError_t code = allocate(out, bytes, 4096);
    if (code == cudaSuccess && *out) pinned_memory[(uintptr_t)*out] = { bytes, current_device };
    return result(code);
}

cudaError_t cudaFreeHost(void *memory)
{
    std::lock_guard hold(device_mutex);
    if (!memory) return cudaSuccess;
    finish_all();
    if (!pinned_memory.erase((uintptr_t)memory)) return result(cudaErrorInvalidValue);
    free(memory);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream)
{
    std::lock_guard hold(device_mutex);
    return result(copy(to, from, bytes, kind, stream));
}

/* On a GPU, the last transfers to the device may still be under way on return. */
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind)
{
    std::lock_guard hold(device_mutex);
    cuda_on_cpu_waits++;
    if (kind != cudaMemcpyHostToDevice || bytes == 0) {
        cudaError_t code = copy(to, from, bytes, kind, NULL);
        finish(*default_queue);
        return result(code);
    }
    if (!may_copy(to, from, bytes, kind)) return result(cudaErrorInvalidValue);
    count_copy(to, from);
    const char *first = static_cast<const char *>(from);
    return enqueue(
        NULL, [to, source = std::vector<char>(first, first + bytes)] { memcpy(to, source.data(), source.size()); });
}

cudaError_t cudaMemsetAsync(void *memory, int value, size_t bytes, cudaStream_t stream)
{
    std::lock_guard hold(device_mutex);
    return result(fill(memory, value, bytes, stream));
}

cudaError_t cudaMemset(void *memory, int value, size_t bytes)
{
    std::lock_guard hold(device_mutex);
    return result(fill(memory, value, bytes, NULL));
}

/* ---- streams and events ---- */

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags)
{
    std::lock_guard hold(device_mutex);
    if (!is_device(current_device)) return result(cudaErrorNoDevice);
    *out = new CUstream_st{ current_device,
                            flags & cudaStreamNonBlocking ? std::make_shared<work_queue>() : default_queue };
    streams.push_back(*out);
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    std::lock_guard hold(device_mutex);
    auto found = std::find(streams.begin(), streams.end(), stream);
    if (found == streams.end()) return result(cudaErrorInvalidResourceHandle);
    finish(*stream->queue);
    streams.erase(found);
    delete stream;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    std::lock_guard hold(device_mutex);
    cuda_on_cpu_waits++;
    finish(*queue_of(stream));
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned)
{
    std::lock_guard hold(device_mutex);
    if (!is_device(current_device)) return result(cudaErrorNoDevice);
    *out = new CUevent_st{ default_queue, 0 };
    events.push_back(*out);
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    std::lock_guard hold(device_mutex);
    auto found = std::find(events.begin(), events.end(), event);
    if (found == events.end()) return result(cudaErrorInvalidResourceHandle);
    events.erase(found);
    delete event;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    std::lock_guard hold(device_mutex);
    event->queue = queue_of(stream);
    event->n = event->queue->n_done + event->queue->waiting.size();
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned)
{
    std::lock_guard hold(device_mutex);
    return result(enqueue(stream, [queue = event->queue, n = event->n] { finish(*queue, n); }));
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    std::lock_guard hold(device_mutex);
    cuda_on_cpu_waits += event->queue->n_done < event->n;
    finish(*event->queue, event->n);
    return cudaSuccess;
}
