/* fake_cudart.cc — the CUDA runtime where kernels run on the CPU: linked in its place, against its real prototypes.
 *
 * Everything is done before the call returns. Device memory is the heap's, each allocation of just its size and full of NaNs at first;
 * under ASan, the host that touches it other than through these calls is reported. Streams that are captured keep their work as
 * closures for the graph. The device is an sm_80 of few multiprocessors.
 *
 *   LAZYLLM_CUDA_FAKE_CAPABILITY   its compute capability; 80
 *   LAZYLLM_CUDA_FAKE_DEVICES   how many devices there are; 1
 *   LAZYLLM_CUDA_FAKE_MEMORY    bytes of memory of each; 8 GiB
 *
 * What tests look at and set, while nothing runs: the variables cuda_on_cpu_… below. */
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

#include "cuda_on_cpu.h"

#undef gridDim /* a kernel's; here they are members */
#undef blockDim

extern "C" {
unsigned long long cuda_on_cpu_launches; /* kernels and products started by themselves */
unsigned long long cuda_on_cpu_graphs;   /* graphs started */
unsigned long long cuda_on_cpu_changes;  /* nodes of executable graphs set anew */
int cuda_on_cpu_refuse;                  /* the how many-th launch from now on fails, of a graph or not; 0: none */
int cuda_on_cpu_refuse_graphs;           /* no graph can be made or changed */
}

namespace
{

using work = std::function<void()>;
using work_clock = std::chrono::steady_clock;

/* In the order of the calls. */
struct node_list {
    std::vector<work> steps;
    std::vector<std::vector<size_t>> behind; /* of each, what must run before it */
};

/* What the streams that take part in a capture were given to do, in the order of the calls. */
struct capture {
    CUstream_st *origin;
    cudaStreamCaptureMode mode;
    std::thread::id thread;
    bool broken;
    std::vector<work> steps;
};

struct allocation {
    size_t bytes;
    int device;
};

} // namespace

struct CUstream_st {
    int device;
    bool waits_for_null_stream;
    std::shared_ptr<capture> captured;
};

struct CUevent_st {
    int device;
    bool timed, recorded;
    work_clock::time_point time;
    std::weak_ptr<capture> captured; /* in which it was recorded last */
};

struct CUgraphNode_st {
    CUgraph_st *graph;
    size_t index;
};

struct CUgraph_st {
    node_list list;
    std::vector<std::unique_ptr<CUgraphNode_st>> nodes; /* those that were added one by one */
};

struct CUgraphExec_st {
    node_list list;
    CUgraph_st *made_from;
};

namespace
{

std::mutex device_mutex; /* guards all below, and that one thing runs at a time */
std::map<uintptr_t, allocation> device_memory, pinned_memory;
std::map<uintptr_t, size_t> registered_memory;
std::vector<CUstream_st *> streams;
std::vector<std::shared_ptr<capture>> captures;
std::map<const void *, cuda_on_cpu::call_maker *> kernels;

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

/* Lets the host touch device memory, or not. */
void let_touch([[maybe_unused]] uintptr_t start, [[maybe_unused]] size_t bytes, [[maybe_unused]] bool allowed)
{
#ifdef __SANITIZE_ADDRESS__
    if (allowed) ASAN_UNPOISON_MEMORY_REGION((void *)start, bytes);
    else ASAN_POISON_MEMORY_REGION((void *)start, bytes);
#endif
}

void let_touch_all(bool allowed)
{
    for (auto &[start, a] : device_memory) let_touch(start, a.bytes, allowed);
}

void run_now(const work &step)
{
    let_touch_all(true);
    step();
    let_touch_all(false);
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

/* Whether all of the range is where a copy says it is. */
bool is_where(const void *address, size_t bytes, bool on_device)
{
    return on_device ? is_device_range(address, bytes) : address && !allocation_of(address);
}

bool may_copy(const void *to, const void *from, size_t bytes, cudaMemcpyKind kind)
{
    bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (kind == cudaMemcpyDefault) to_device = allocation_of(to), from_device = allocation_of(from);
    return bytes == 0 || (is_where(to, bytes, to_device) && is_where(from, bytes, from_device));
}

/* What waits for the device, or may, is refused while a capture goes on that it could disturb, and spoils that capture. */
bool disturbs_a_capture()
{
    bool disturbs = false;
    for (auto &c : captures)
        if (c->mode == cudaStreamCaptureModeGlobal ||
            (c->mode == cudaStreamCaptureModeThreadLocal && c->thread == std::this_thread::get_id()))
            disturbs = c->broken = true;
    return disturbs;
}

cudaError_t enqueue(cudaStream_t stream, work step)
{
    if (!stream) {
        for (CUstream_st *s : streams)
            if (s->captured && s->waits_for_null_stream) {
                s->captured->broken = true;
                return cudaErrorStreamCaptureImplicit;
            }
    } else if (stream->captured) {
        if (stream->captured->broken) return cudaErrorStreamCaptureInvalidated;
        stream->captured->steps.push_back(std::move(step));
        return cudaSuccess;
    }
    run_now(step);
    return cudaSuccess;
}

cudaError_t copy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream)
{
    if (!may_copy(to, from, bytes, kind)) return cudaErrorInvalidValue;
    if (bytes == 0) return cudaSuccess;
    return enqueue(stream, [=] { memmove(to, from, bytes); });
}

cudaError_t fill(void *memory, int value, size_t bytes, cudaStream_t stream)
{
    if (bytes == 0) return cudaSuccess;
    if (!is_device_range(memory, bytes)) return cudaErrorInvalidValue;
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

/* Whether this is the launch that is to fail. */
static bool refuses() { return cuda_on_cpu_refuse && --cuda_on_cpu_refuse == 0; }

void cuda_on_cpu::enroll(const void *kernel, call_maker *maker)
{
    std::lock_guard hold(device_mutex);
    kernels[kernel] = maker;
}

cudaError_t cuda_on_cpu::submit(cudaStream_t stream, std::function<void()> step)
{
    std::lock_guard hold(device_mutex);
    if (refuses()) return result(cudaErrorLaunchOutOfResources);
    cuda_on_cpu_launches++;
    if (!is_device(current_device)) return result(cudaErrorNoDevice);
    if (stream && stream->device != current_device) return result(cudaErrorInvalidResourceHandle);
    return result(enqueue(stream, std::move(step)));
}

/* ---- devices ---- */

cudaError_t cudaGetDeviceCount(int *count)
{
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

cudaError_t cudaGetDevice(int *device)
{
    *device = current_device;
    return result(n_devices() ? cudaSuccess : cudaErrorNoDevice);
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *prop, int device)
{
    if (!is_device(device)) return result(cudaErrorInvalidDevice);
    *prop = {};
    snprintf(prop->name, sizeof prop->name, "CUDA on the CPU");
    prop->major = (int)setting("LAZYLLM_CUDA_FAKE_CAPABILITY", 80) / 10;
    prop->minor = (int)setting("LAZYLLM_CUDA_FAKE_CAPABILITY", 80) % 10;
    prop->totalGlobalMem = total_memory();
    prop->sharedMemPerBlock = 48 * 1024;
    prop->sharedMemPerBlockOptin = cuda_on_cpu::MAX_SHARED_BYTES;
    prop->sharedMemPerMultiprocessor = cuda_on_cpu::MAX_SHARED_BYTES + 1024;
    prop->reservedSharedMemPerBlock = 1024;
    prop->regsPerBlock = prop->regsPerMultiprocessor = 64 * 1024;
    prop->warpSize = cuda_on_cpu::WARP;
    prop->maxThreadsPerBlock = prop->maxThreadsDim[0] = prop->maxThreadsDim[1] = cuda_on_cpu::MAX_THREADS;
    prop->maxThreadsDim[2] = 64;
    prop->maxGridSize[0] = INT32_MAX;
    prop->maxGridSize[1] = prop->maxGridSize[2] = UINT16_MAX;
    prop->maxThreadsPerMultiProcessor = 2048;
    prop->maxBlocksPerMultiProcessor = 32;
    prop->multiProcessorCount = 2;
    prop->l2CacheSize = 1 << 20;
    prop->unifiedAddressing = prop->concurrentKernels = prop->asyncEngineCount = 1;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attr, int device)
{
    cudaDeviceProp prop;
    cudaError_t code = cudaGetDeviceProperties(&prop, device);
    if (code != cudaSuccess) return code;
    switch (attr) {
    case cudaDevAttrComputeCapabilityMajor: *value = prop.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = prop.minor; break;
    case cudaDevAttrMultiProcessorCount: *value = prop.multiProcessorCount; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = (int)prop.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)prop.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = (int)prop.sharedMemPerMultiprocessor; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = prop.regsPerBlock; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = prop.maxThreadsPerBlock; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = prop.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxGridDimX: *value = prop.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: *value = prop.maxGridSize[1]; break;
    case cudaDevAttrMaxGridDimZ: *value = prop.maxGridSize[2]; break;
    case cudaDevAttrWarpSize: *value = prop.warpSize; break;
    case cudaDevAttrL2CacheSize: *value = prop.l2CacheSize; break;
    case cudaDevAttrIntegrated: *value = prop.integrated; break;
    case cudaDevAttrUnifiedAddressing: *value = prop.unifiedAddressing; break;
    case cudaDevAttrMemoryPoolsSupported: *value = prop.memoryPoolsSupported; break;
    default: return result(cudaErrorInvalidValue);
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize()
{
    std::lock_guard hold(device_mutex);
    return result(disturbs_a_capture() ? cudaErrorStreamCaptureUnsupported : cudaSuccess);
}

cudaError_t cudaDriverGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }

cudaError_t cudaFuncSetAttribute(const void *function, cudaFuncAttribute attribute, int value)
{
    if (!function) return result(cudaErrorInvalidDeviceFunction);
    bool fits = attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || (value >= 0 && (size_t)value <= cuda_on_cpu::MAX_SHARED_BYTES);
    return result(fits ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n_blocks, const void *, int, size_t, unsigned)
{
    return *n_blocks = 1, cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n_blocks, const void *, int, size_t) { return *n_blocks = 1, cudaSuccess; }

/* ---- errors ---- */

cudaError_t cudaGetLastError()
{
    cudaError_t code = last_error;
    last_error = cudaSuccess;
    return code;
}

cudaError_t cudaPeekAtLastError() { return last_error; }

static const struct {
    cudaError_t code;
    const char *name, *text;
} errors[] = {
    { cudaSuccess, "cudaSuccess", "no error" },
    { cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument" },
    { cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory" },
    { cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument" },
    { cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function" },
    { cudaErrorLaunchOutOfResources, "cudaErrorLaunchOutOfResources", "too many resources requested for launch" },
    { cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported" },
    { cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected" },
    { cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal" },
    { cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle" },
    { cudaErrorNotReady, "cudaErrorNotReady", "device not ready" },
    { cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered",
      "part or all of the requested memory range is already mapped" },
    { cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered", "pointer does not correspond to a registered memory region" },
    { cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing" },
    { cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture" },
    { cudaErrorStreamCaptureUnmatched, "cudaErrorStreamCaptureUnmatched", "capture was not initiated in this stream" },
    { cudaErrorStreamCaptureImplicit, "cudaErrorStreamCaptureImplicit",
      "operation would make the legacy stream depend on a capturing blocking stream" },
    { cudaErrorStreamCaptureWrongThread, "cudaErrorStreamCaptureWrongThread",
      "attempt to terminate a thread-local capture sequence from another thread" },
    { cudaErrorIllegalState, "cudaErrorIllegalState", "the operation cannot be performed in the present state" },
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
    if (disturbs_a_capture()) return result(cudaErrorStreamCaptureUnsupported);
    cudaError_t code = bytes <= free_memory(current_device) ? allocate(out, bytes, 256) : cudaErrorMemoryAllocation;
    if (code != cudaSuccess || !*out) return result(code);
    device_memory[(uintptr_t)*out] = { bytes, current_device };
    let_touch((uintptr_t)*out, bytes, false);
    return cudaSuccess;
}

cudaError_t cudaFree(void *memory)
{
    std::lock_guard hold(device_mutex);
    if (!memory) return cudaSuccess;
    if (disturbs_a_capture()) return result(cudaErrorStreamCaptureUnsupported);
    auto found = device_memory.find((uintptr_t)memory);
    if (found == device_memory.end()) return result(cudaErrorInvalidValue);
    let_touch(found->first, found->second.bytes, true);
    device_memory.erase(found);
    free(memory);
    return cudaSuccess;
}

cudaError_t cudaMallocHost(void **out, size_t bytes)
{
    std::lock_guard hold(device_mutex);
    if (!out) return result(cudaErrorInvalidValue);
    if (!is_device(current_device)) return result(cudaErrorNoDevice);
    if (disturbs_a_capture()) return result(cudaErrorStreamCaptureUnsupported);
    cudaError_t code = allocate(out, bytes, 4096);
    if (code == cudaSuccess && *out) pinned_memory[(uintptr_t)*out] = { bytes, current_device };
    return result(code);
}

cudaError_t cudaFreeHost(void *memory)
{
    std::lock_guard hold(device_mutex);
    if (!memory) return cudaSuccess;
    if (disturbs_a_capture()) return result(cudaErrorStreamCaptureUnsupported);
    if (!pinned_memory.erase((uintptr_t)memory)) return result(cudaErrorInvalidValue);
    free(memory);
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void *memory, size_t bytes, unsigned)
{
    std::lock_guard hold(device_mutex);
    if (!memory || !bytes || allocation_of(memory)) return result(cudaErrorInvalidValue);
    bool is_new = registered_memory.emplace((uintptr_t)memory, bytes).second;
    return result(is_new ? cudaSuccess : cudaErrorHostMemoryAlreadyRegistered);
}

cudaError_t cudaHostUnregister(void *memory)
{
    std::lock_guard hold(device_mutex);
    return result(registered_memory.erase((uintptr_t)memory) ? cudaSuccess : cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream)
{
    std::lock_guard hold(device_mutex);
    return result(copy(to, from, bytes, kind, stream));
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind)
{
    std::lock_guard hold(device_mutex);
    return result(disturbs_a_capture() ? cudaErrorStreamCaptureUnsupported : copy(to, from, bytes, kind, NULL));
}

cudaError_t cudaMemsetAsync(void *memory, int value, size_t bytes, cudaStream_t stream)
{
    std::lock_guard hold(device_mutex);
    return result(fill(memory, value, bytes, stream));
}

cudaError_t cudaMemset(void *memory, int value, size_t bytes)
{
    std::lock_guard hold(device_mutex);
    return result(disturbs_a_capture() ? cudaErrorStreamCaptureUnsupported : fill(memory, value, bytes, NULL));
}

/* ---- streams and events ---- */

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags)
{
    std::lock_guard hold(device_mutex);
    if (!is_device(current_device)) return result(cudaErrorNoDevice);
    *out = new CUstream_st{ current_device, !(flags & cudaStreamNonBlocking), NULL };
    streams.push_back(*out);
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    std::lock_guard hold(device_mutex);
    auto found = std::find(streams.begin(), streams.end(), stream);
    if (found == streams.end()) return result(cudaErrorInvalidResourceHandle);
    if (stream->captured) stream->captured->broken = true;
    if (stream->captured && stream->captured->origin == stream)
        captures.erase(std::find(captures.begin(), captures.end(), stream->captured));
    streams.erase(found);
    delete stream;
    return cudaSuccess;
}

static cudaError_t wait_for(cudaStream_t stream)
{
    std::lock_guard hold(device_mutex);
    if (stream && stream->captured) {
        stream->captured->broken = true;
        return result(cudaErrorStreamCaptureUnsupported);
    }
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return wait_for(stream); }
cudaError_t cudaStreamQuery(cudaStream_t stream) { return wait_for(stream); }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags)
{
    if (!is_device(current_device)) return result(cudaErrorNoDevice);
    *out = new CUevent_st{ current_device, !(flags & cudaEventDisableTiming), false, {}, {} };
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *out) { return cudaEventCreateWithFlags(out, cudaEventDefault); }

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    if (!event) return result(cudaErrorInvalidResourceHandle);
    delete event;
    return cudaSuccess;
}

/* In a capture, the event only says what another stream that waits for it is to join. */
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    std::lock_guard hold(device_mutex);
    if (!event || (stream && stream->device != event->device)) return result(cudaErrorInvalidResourceHandle);
    event->captured.reset();
    if (stream && stream->captured) {
        event->captured = stream->captured;
        return result(stream->captured->broken ? cudaErrorStreamCaptureInvalidated : cudaSuccess);
    }
    return result(enqueue(stream, [event] {
        event->time = work_clock::now();
        event->recorded = true;
    }));
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned)
{
    std::lock_guard hold(device_mutex);
    if (!event) return result(cudaErrorInvalidResourceHandle);
    std::shared_ptr<capture> joined = event->captured.lock();
    if (!joined) return cudaSuccess;
    if (!stream || (stream->captured && stream->captured != joined)) {
        joined->broken = true;
        return result(cudaErrorStreamCaptureInvalidated);
    }
    stream->captured = joined;
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    std::lock_guard hold(device_mutex);
    if (!event) return result(cudaErrorInvalidResourceHandle);
    return result(event->captured.expired() ? cudaSuccess : cudaErrorStreamCaptureUnsupported);
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end)
{
    std::lock_guard hold(device_mutex);
    for (cudaEvent_t event : { start, end })
        if (!event || !event->timed || !event->recorded) return result(cudaErrorInvalidResourceHandle);
    *milliseconds = std::chrono::duration<float, std::milli>(end->time - start->time).count();
    return cudaSuccess;
}

/* ---- graphs ---- */

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode)
{
    std::lock_guard hold(device_mutex);
    if (!stream) return result(cudaErrorStreamCaptureUnsupported);
    if (stream->captured) return result(cudaErrorIllegalState);
    stream->captured = std::make_shared<capture>(capture{ stream, mode, std::this_thread::get_id(), false, {} });
    captures.push_back(stream->captured);
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    std::lock_guard hold(device_mutex);
    *graph = NULL;
    std::shared_ptr<capture> ended = stream ? stream->captured : NULL;
    if (!ended) return result(cudaErrorIllegalState);
    if (ended->origin != stream) return result(cudaErrorStreamCaptureUnmatched);
    if (ended->mode != cudaStreamCaptureModeRelaxed && ended->thread != std::this_thread::get_id())
        return result(cudaErrorStreamCaptureWrongThread);
    for (CUstream_st *s : streams)
        if (s->captured == ended) s->captured.reset();
    captures.erase(std::find(captures.begin(), captures.end(), ended));
    if (ended->broken) return result(cudaErrorStreamCaptureInvalidated);
    *graph = new CUgraph_st;
    for (work &step : ended->steps) {
        size_t index = (*graph)->list.steps.size();
        (*graph)->list.steps.push_back(std::move(step));
        (*graph)->list.behind.push_back(index ? std::vector<size_t>{ index - 1 } : std::vector<size_t>());
    }
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status)
{
    std::lock_guard hold(device_mutex);
    bool captures = stream && stream->captured;
    *status = !captures                  ? cudaStreamCaptureStatusNone
              : stream->captured->broken ? cudaStreamCaptureStatusInvalidated
                                         : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}

cudaError_t cudaGraphCreate(cudaGraph_t *graph, unsigned)
{
    *graph = new CUgraph_st;
    return cudaSuccess;
}

static cudaError_t launch_of(cuda_on_cpu::launch *out, const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared_bytes)
{
    std::lock_guard hold(device_mutex);
    auto found = kernels.find(kernel);
    if (found == kernels.end()) return cudaErrorInvalidDeviceFunction;
    *out = { kernel, grid, block, shared_bytes, found->second(kernel, arguments) };
    return cuda_on_cpu::check(*out);
}

static cudaError_t launch_of(cuda_on_cpu::launch *out, const cudaKernelNodeParams *node)
{
    return launch_of(out, node->func, node->gridDim, node->blockDim, node->kernelParams, node->sharedMemBytes);
}

cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared_bytes, cudaStream_t stream)
{
    cuda_on_cpu::launch l;
    cudaError_t code = launch_of(&l, kernel, grid, block, arguments, shared_bytes);
    return code != cudaSuccess ? result(code) : cuda_on_cpu::submit(stream, [l] { cuda_on_cpu::run(l); });
}

cudaError_t cudaGraphAddKernelNode(cudaGraphNode_t *out, cudaGraph_t graph, const cudaGraphNode_t *behind, size_t n_behind,
                                   const cudaKernelNodeParams *node)
{
    cuda_on_cpu::launch l;
    cudaError_t code = graph ? launch_of(&l, node) : cudaErrorInvalidValue;
    std::vector<size_t> before;
    for (size_t i = 0; i < n_behind && code == cudaSuccess; i++) {
        if (behind[i]->graph != graph) code = cudaErrorInvalidValue;
        else before.push_back(behind[i]->index);
    }
    if (code != cudaSuccess) return result(code);
    graph->nodes.push_back(std::make_unique<CUgraphNode_st>(CUgraphNode_st{ graph, graph->list.steps.size() }));
    graph->list.steps.push_back([l] { cuda_on_cpu::run(l); });
    graph->list.behind.push_back(before);
    *out = graph->nodes.back().get();
    return cudaSuccess;
}

cudaError_t cudaGraphExecKernelNodeSetParams(cudaGraphExec_t graph, cudaGraphNode_t node, const cudaKernelNodeParams *fresh)
{
    cuda_on_cpu::launch l;
    cudaError_t code = graph && node && node->graph == graph->made_from ? launch_of(&l, fresh) : cudaErrorInvalidValue;
    if (code == cudaSuccess && cuda_on_cpu_refuse_graphs) code = cudaErrorNotSupported;
    if (code != cudaSuccess) return result(code);
    std::lock_guard hold(device_mutex);
    graph->list.steps[node->index] = [l] { cuda_on_cpu::run(l); };
    cuda_on_cpu_changes++;
    return cudaSuccess;
}

/* Of the nodes that nothing keeps back, the one added last: so that a dependency left out shows. */
static void run_nodes(const node_list &list)
{
    std::vector<bool> done(list.steps.size());
    for (size_t n_done = 0; n_done < done.size(); n_done++) {
        size_t next = done.size() - 1;
        while (done[next] || !std::all_of(list.behind[next].begin(), list.behind[next].end(), [&](size_t i) { return done[i]; })) next--;
        list.steps[next]();
        done[next] = true;
    }
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long)
{
    if (!graph) return result(cudaErrorInvalidValue);
    if (cuda_on_cpu_refuse_graphs) return result(cudaErrorNotSupported);
    *out = new CUgraphExec_st{ graph->list, graph };
    return cudaSuccess;
}

cudaError_t cudaGraphUpload(cudaGraphExec_t graph, cudaStream_t) { return result(graph ? cudaSuccess : cudaErrorInvalidValue); }

cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream)
{
    std::lock_guard hold(device_mutex);
    if (!graph) return result(cudaErrorInvalidValue);
    if (refuses()) return result(cudaErrorLaunchOutOfResources);
    cuda_on_cpu_graphs++;
    return result(enqueue(stream, [list = graph->list] { run_nodes(list); }));
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    if (!graph) return result(cudaErrorInvalidValue);
    delete graph;
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph)
{
    if (!graph) return result(cudaErrorInvalidValue);
    delete graph;
    return cudaSuccess;
}
