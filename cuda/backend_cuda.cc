/* backend_cuda.cc — the backend of a CUDA device: memory, weights, streams, the table of ops, and the only symbol that
 * liblazyllm_cuda exports. */
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda.h"

extern "C" {
#include "../csrc/memory.h"
}

#ifndef LAZY_CUDA_ARCHITECTURES
#define LAZY_CUDA_ARCHITECTURES "an unknown architecture"
#endif

enum { ROW_CHUNK = 4096, MIN_CAPABILITY = 8 /* first with bf16 on tensor cores */ };

int lazy_cuda_check(cudaError_t code, const char *what, lazy_error *err)
{
    if (code == cudaSuccess) return LAZY_OK;
    cudaGetLastError(); /* clears the error, which the next launch would otherwise report again */
    return lazy_fail(err, LAZY_DEVICE, "%s: %s (%s)", what, cudaGetErrorString(code), cudaGetErrorName(code));
}

int lazy_cuda_enter(lazy_backend *backend, lazy_error *err)
{
    return lazy_cuda_check(cudaSetDevice(lazy_cuda_of(backend)->device), "selecting the device", err);
}

/* ---- memory ----------------------------------------------------------------------------- */
/* The backend's pool keeps what sessions free, so that the next session need not map memory again. It is used in the
 * order of the default stream, which computes nothing. */

static int open_pool(lazy_cuda *cuda, lazy_error *err)
{
    cudaMemPoolProps properties = {};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location = { cudaMemLocationTypeDevice, cuda->device };
    uint64_t kept = UINT64_MAX;
    cudaError_t failed = cudaMemPoolCreate(&cuda->pool, &properties);
    if (!failed) failed = cudaMemPoolSetAttribute(cuda->pool, cudaMemPoolAttrReleaseThreshold, &kept);
    return lazy_cuda_check(failed, "opening a pool of memory", err);
}

/* *left = bytes that can be allocated. */
static cudaError_t free_bytes(const lazy_cuda *cuda, size_t *left, size_t *total)
{
    uint64_t reserved = 0, used = 0;
    cudaError_t failed = cudaMemGetInfo(left, total);
    if (!failed) failed = cudaMemPoolGetAttribute(cuda->pool, cudaMemPoolAttrReservedMemCurrent, &reserved);
    if (!failed) failed = cudaMemPoolGetAttribute(cuda->pool, cudaMemPoolAttrUsedMemCurrent, &used);
    *left += reserved - used;
    return failed;
}

int lazy_cuda_alloc(lazy_backend *backend, void **out, size_t bytes, const char *what, lazy_error *err)
{
    *out = nullptr;
    int code = lazy_cuda_enter(backend, err);
    if (code) return code;
    const lazy_cuda *cuda = lazy_cuda_of(backend);
    cudaError_t failed = cudaMallocFromPoolAsync(out, bytes ? bytes : 1, cuda->pool, nullptr);
    if (!failed) failed = cudaStreamSynchronize(nullptr); /* sessions' streams do not wait for the default stream */
    if (failed != cudaErrorMemoryAllocation) return lazy_cuda_check(failed, what, err);
    cudaGetLastError(); /* clears the error: running out of memory is not sticky */
    size_t left = 0, total = 0;
    free_bytes(cuda, &left, &total);
    return lazy_fail(err, LAZY_MEMORY, "%s: %zu bytes requested; %s has %zu of %zu left", what, bytes, backend->name,
                     left, total);
}

void lazy_cuda_free(lazy_backend *backend, void *memory)
{
    if (!memory || lazy_cuda_enter(backend, nullptr) != LAZY_OK) return;
    cudaDeviceSynchronize(); /* queued kernels may still use it */
    cudaFreeAsync(memory, nullptr);
}

int lazy_cuda_admit(lazy_backend *backend, uint64_t bytes, const char *what, lazy_error *err)
{
    size_t left = 0, total = 0;
    int code = lazy_cuda_enter(backend, err);
    if (!code) code = lazy_cuda_check(free_bytes(lazy_cuda_of(backend), &left, &total), "asking for free memory", err);
    if (code || bytes <= left) return code;
    return lazy_fail(err, LAZY_MEMORY, "%s take %.2f GiB; %s has %.2f of %.2f GiB left", what,
                     (double)bytes / (1 << 30), backend->name, (double)left / (1 << 30), (double)total / (1 << 30));
}

/* ---- weights ---------------------------------------------------------------------------- */

/* The type in which the device has weights of this type. */
static lazy_dtype held_type(const lazy_cuda *cuda, lazy_dtype stored)
{
    return lazy_is_quantized(stored) ? stored : cuda->type;
}

/* to[i] = from[i], n values of f32, f16 or bf16 in host memory */
static void convert(void *to, lazy_dtype to_type, const void *from, lazy_dtype from_type, size_t n)
{
    const uint16_t *halves = static_cast<const uint16_t *>(from);
    for (size_t i = 0; i < n; i++) {
        float value = from_type == LAZY_F16    ? lazy_widen_f16(halves[i])
                      : from_type == LAZY_BF16 ? lazy_widen_bf16(halves[i])
                                               : static_cast<const float *>(from)[i];
        if (to_type == LAZY_F16) static_cast<__half *>(to)[i] = __float2half(value);
        else if (to_type == LAZY_BF16) static_cast<__nv_bfloat16 *>(to)[i] = __float2bfloat16(value);
        else static_cast<float *>(to)[i] = value;
    }
}

static int upload_part(lazy_cuda *cuda, char *to, const lazy_part *part, int cols, lazy_error *err)
{
    size_t n = (size_t)part->rows * (size_t)cols;
    lazy_dtype held = held_type(cuda, part->dtype);
    size_t bytes = (size_t)part->rows * lazy_row_bytes(held, cols);
    if (part->dtype == held)
        return lazy_cuda_check(cudaMemcpy(to, part->data, bytes, cudaMemcpyHostToDevice), "weights", err);
    void *converted;
    int code = lazy_alloc_bytes(&converted, n, lazy_float_bytes(cuda->type), nullptr, "converted weights", err);
    if (code) return code;
    convert(converted, cuda->type, part->data, part->dtype, n);
    code = lazy_cuda_check(cudaMemcpy(to, converted, bytes, cudaMemcpyHostToDevice), "weights", err);
    lazy_free(converted);
    return code;
}

/* The matrix in device memory from `at` on: neighbours that are held in one type are one part. place(part, address) is
 * called for every part as it is stored. *end: of the matrix. */
template <class F>
static lazy_matrix laid_out(const lazy_cuda *cuda, const lazy_matrix &stored, size_t at, size_t *end, F place)
{
    lazy_matrix held = stored;
    held.n_parts = 0;
    for (int i = 0; i < stored.n_parts; i++) {
        const lazy_part &part = stored.part[i];
        lazy_dtype type = held_type(cuda, part.dtype);
        if (held.n_parts && held.part[held.n_parts - 1].dtype == type) held.part[held.n_parts - 1].rows += part.rows;
        else held.part[held.n_parts++] = { (void *)(at = lazy_cuda_aligned(at)), part.rows, type };
        place(part, (char *)at);
        at += (size_t)part.rows * lazy_row_bytes(type, stored.cols);
    }
    *end = at;
    return held;
}

/* Copies the matrices, one after the other, into one block of device memory, which the first owns until unbind. */
int lazy_cuda_bind(lazy_backend *backend, lazy_matrix *matrices, int n, lazy_error *err)
{
    lazy_cuda *cuda = lazy_cuda_of(backend);
    size_t at = 0, widened = (size_t)matrices->rows * lazy_row_bytes(cuda->type, matrices->cols);
    for (int i = 0; i < n; i++) laid_out(cuda, matrices[i], at, &at, [](const lazy_part &, char *) {});
    void *memory;
    int code = lazy_cuda_alloc(backend, &memory, lazy_cuda_aligned(at), "weights", err);
    at = (size_t)memory;
    for (int i = 0; i < n && !code; i++)
        matrices[i] = laid_out(cuda, matrices[i], at, &at, [&](const lazy_part &part, char *to) {
            if (!code) code = upload_part(cuda, to, &part, matrices[i].cols, err);
            if (lazy_is_quantized(part.dtype))
                cuda->panel_bytes = std::max(cuda->panel_bytes, std::min<size_t>(widened, LAZY_PANEL_BYTES));
        });
    /* A copy from pageable memory may return before its last bytes have arrived, and sessions' streams do not wait for
     * the default stream. */
    if (!code) code = lazy_cuda_check(cudaStreamSynchronize(nullptr), "weights", err);
    if (code) lazy_cuda_free(backend, memory);
    return code;
}

void lazy_cuda_unbind(lazy_backend *backend, lazy_matrix *matrix)
{
    lazy_cuda_free(backend, const_cast<void *>(matrix->part[0].data));
}

/* ---- streams ---------------------------------------------------------------------------- */

/* A buffer of the scratch, and its size. */
struct scratch {
    void **memory;
    size_t bytes;
};

static size_t panel_bytes(const lazy_cuda *cuda, int n_rows)
{
    return n_rows > lazy_few_rows(cuda) ? cuda->panel_bytes : 0;
}

/* All buffers, for passes of up to n_rows rows over up to n_tokens tokens. */
static std::array<scratch, 18> scratch_of(lazy_cuda_stream *s, int n_rows, int n_tokens)
{
    const lazy_config *c = s->base.config;
    const lazy_cuda *cuda = lazy_cuda_of(s->base.backend);
    size_t rows = (size_t)n_rows, chunk = std::min<size_t>(rows, ROW_CHUNK), d = (size_t)c->head_dim,
           width = lazy_float_bytes(cuda->type), k = (size_t)c->experts_per_token, ffn = (size_t)c->expert_ffn,
           blocks = (size_t)n_tokens / LAZY_TOKEN_BLOCK + 1, partials = lazy_cuda_max_partials(c, cuda, n_rows);
    return { { { (void **)&s->full.of_row, rows * sizeof *s->full.of_row },
               { (void **)&s->local.of_row, rows * sizeof *s->local.of_row },
               { (void **)&s->partial, partials * (d + 2) * sizeof *s->partial },
               { (void **)&s->tickets, partials * sizeof *s->tickets },
               { &s->panel, panel_bytes(cuda, n_rows) },
               { &s->gate_up, chunk * 2 * std::max((size_t)c->ffn, ffn) * width },
               { (void **)&s->softmaxes, lazy_cuda_max_softmaxes(c, n_rows, n_tokens) * sizeof *s->softmaxes },
               { (void **)&s->products, (size_t)c->n_heads * (size_t)n_tokens * sizeof *s->products },
               { (void **)&s->orders, blocks * LAZY_TOKEN_BLOCK * sizeof *s->orders },
               { &s->of_blocks, blocks * 8 },
               { (void **)&s->router_logits, chunk * (size_t)c->n_experts * sizeof *s->router_logits },
               { (void **)&s->weights, chunk * k * sizeof *s->weights },
               { (void **)&s->chosen, chunk * k * sizeof *s->chosen },
               { (void **)&s->places, chunk * k * sizeof *s->places },
               { (void **)&s->counts, (size_t)c->n_experts * sizeof *s->counts },
               { (void **)&s->sorted_rows, chunk * k * sizeof *s->sorted_rows },
               { &s->expert_rows, std::max(chunk, LAZY_PAIR_ROWS * k) * ffn * width },
               { &s->expert_states, chunk * k * (size_t)c->hidden * width } } };
}

void lazy_cuda_stream_close(lazy_stream *stream)
{
    if (!stream) return;
    lazy_cuda_stream *s = lazy_cuda_scratch(stream);
    if (lazy_cuda_enter(stream->backend, nullptr) == LAZY_OK) {
        if (s->queue) cudaStreamSynchronize(s->queue); /* queued kernels may still read what is freed below */
        lazy_gemm_leave(lazy_cuda_of(stream->backend)->gemm, s->queue);
        for (cudaEvent_t copied : s->staging.copied)
            if (copied) cudaEventDestroy(copied);
        cudaFreeHost(s->staging.memory);
        for (const scratch &part : scratch_of(s, 0, 0)) lazy_cuda_free(stream->backend, *part.memory);
        lazy_cuda_free(stream->backend, s->choice);
        cudaFreeHost(s->found);
        if (s->reached) cudaEventDestroy(s->reached);
        if (s->queue) cudaStreamDestroy(s->queue);
    }
    lazy_free(s);
}

int lazy_cuda_stream_open(lazy_backend *backend, const lazy_config *config, lazy_stream **out, lazy_error *err)
{
    lazy_cuda_stream *s;
    int code = lazy_alloc_zeroed(&s, 1, "a stream", err);
    if (code) return code;
    s->base.backend = backend;
    s->base.config = config;
    code = lazy_cuda_enter(backend, err);
    if (!code) code = lazy_cuda_alloc(backend, (void **)&s->choice, sizeof *s->choice, "a choice", err);
    if (!code) {
        cudaError_t failed = cudaStreamCreateWithFlags(&s->queue, cudaStreamNonBlocking);
        if (!failed) failed = cudaMallocHost((void **)&s->staging.memory, s->staging.SLOTS * s->staging.SLOT_BYTES);
        for (cudaEvent_t &copied : s->staging.copied)
            if (!failed) failed = cudaEventCreateWithFlags(&copied, cudaEventDisableTiming);
        if (!failed) failed = cudaMallocHost((void **)&s->found, sizeof *s->found);
        if (!failed) failed = cudaEventCreateWithFlags(&s->reached, cudaEventDisableTiming);
        if (!failed) failed = cudaMemsetAsync(s->choice, 0, sizeof *s->choice, s->queue);
        code = lazy_cuda_check(failed, "opening a stream", err);
    }
    if (!code) s->found->bad_score = LAZY_NO_BAD_SCORE;
    if (code) lazy_cuda_stream_close(&s->base);
    else *out = &s->base;
    return code;
}

uint64_t lazy_cuda_scratch_bytes(const lazy_stream *stream, int n_rows, int n_tokens)
{
    uint64_t sum = sizeof(lazy_choice);
    for (const scratch &part : scratch_of(lazy_cuda_scratch(const_cast<lazy_stream *>(stream)), n_rows, n_tokens))
        sum += part.bytes;
    return sum;
}

/* Each buffer of the scratch is freed before the next one grows; those that have grown when another cannot are merely
 * larger than needed. */
int lazy_cuda_reserve(lazy_stream *stream, int n_rows, int n_tokens, lazy_error *err)
{
    lazy_cuda_stream *s = lazy_cuda_scratch(stream);
    int code = lazy_cuda_enter(stream->backend, err);
    if (code || (n_rows <= s->rows && n_tokens <= s->tokens)) return code;
    n_rows = std::max(n_rows, s->rows);
    n_tokens = std::max(n_tokens, s->tokens);
    lazy_cuda_forget_ranges(stream);
    for (const scratch &part : scratch_of(s, n_rows, n_tokens)) {
        void *larger;
        if ((code = lazy_cuda_alloc(stream->backend, &larger, part.bytes, "a stream's scratch", err))) return code;
        lazy_cuda_free(stream->backend, *part.memory);
        *part.memory = larger;
        if (larger != s->tickets) continue;
        code = lazy_cuda_check(cudaMemsetAsync(larger, 0, part.bytes, s->queue), "clearing a stream's scratch", err);
        if (code) return code;
    }
    s->rows = n_rows;
    s->tokens = n_tokens;
    s->panel_bytes = panel_bytes(lazy_cuda_of(stream->backend), n_rows);
    return LAZY_OK;
}

int lazy_cuda_copy(lazy_stream *stream, void *to, const void *from, size_t bytes, lazy_error *err)
{
    int code = lazy_cuda_enter(stream->backend, err);
    if (code) return code;
    return lazy_cuda_check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, lazy_cuda_scratch(stream)->queue),
                           "copy", err);
}

/* `stream` goes on once all that is queued on `other` is done. */
static int wait_for(lazy_stream *stream, lazy_stream *other, lazy_error *err)
{
    cudaEvent_t reached = lazy_cuda_scratch(other)->reached;
    int code = lazy_cuda_enter(other->backend, err);
    if (!code) code = lazy_cuda_check(cudaEventRecord(reached, lazy_cuda_scratch(other)->queue), "an event", err);
    if (!code) code = lazy_cuda_enter(stream->backend, err);
    return code ? code
                : lazy_cuda_check(cudaStreamWaitEvent(lazy_cuda_scratch(stream)->queue, reached, 0), "an event", err);
}

int lazy_cuda_send(lazy_stream *stream, lazy_stream *to, const lazy_parcel *parcels, int n, lazy_error *err)
{
    cudaStream_t queue = lazy_cuda_scratch(stream)->queue;
    const int here = lazy_cuda_of(stream)->device, there = lazy_cuda_of(to)->device;
    int code = wait_for(stream, to, err);
    for (int i = 0; i < n && !code; i++)
        if (parcels[i].bytes)
            code = lazy_cuda_check(
                cudaMemcpyPeerAsync(parcels[i].to, there, parcels[i].from, here, parcels[i].bytes, queue),
                "a copy to another device", err);
    lazy_cuda_forget_ranges(to);
    return code ? code : wait_for(to, stream, err);
}

/* ---- copies from and to the host -------------------------------------------------------- */

/* The next slot of the staging, once the device has copied it. */
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

int lazy_cuda_wait(lazy_stream *stream, lazy_error *err)
{
    lazy_cuda_stream *s = lazy_cuda_scratch(stream);
    int code = lazy_cuda_check(cudaStreamSynchronize(s->queue), "waiting for the device", err);
    lazy_bad_score bad = s->found->bad_score;
    if (code || bad == LAZY_NO_BAD_SCORE) return code;
    s->found->bad_score = LAZY_NO_BAD_SCORE;
    return lazy_fail(
        err, LAZY_CHECKPOINT,
        "in layer %d: the score of the token at position %d is not a number; the weights before it are damaged",
        (int)(bad >> 32), (int)(bad & INT32_MAX));
}

/* ---- the device ------------------------------------------------------------------------- */

void lazy_cuda_close(lazy_backend *backend)
{
    lazy_cuda *cuda = lazy_cuda_of(backend);
    if (lazy_cuda_enter(backend, nullptr) == LAZY_OK) lazy_gemm_close(cuda->gemm);
    if (cuda->pool) cudaMemPoolDestroy(cuda->pool);
    lazy_free(cuda);
}

static lazy_ops table_of_ops()
{
    lazy_ops ops = {};
#define ENTRY(op) ops.op = lazy_cuda_##op;
    LAZY_CUDA_OPS(ENTRY)
#undef ENTRY
    return ops;
}

static int describe(lazy_cuda *cuda, lazy_error *err)
{
    static const char *const types[] = { "f32", "f16", "bf16" }; /* indexed by lazy_dtype */
    cudaDeviceProp properties;
    int code =
        lazy_cuda_check(cudaGetDeviceProperties(&properties, cuda->device), "asking for the device's properties", err);
    if (code) return code;
    if (properties.major < MIN_CAPABILITY)
        return lazy_fail(err, LAZY_DEVICE, "%s, cuda:%d, has compute capability %d.%d; at least %d.0 is needed",
                         properties.name, cuda->device, properties.major, properties.minor, MIN_CAPABILITY);
    cuda->capability = 10 * properties.major + properties.minor;
    cuda->processors = properties.multiProcessorCount;
    cuda->shared_bytes = properties.sharedMemPerMultiprocessor;
    const char *wgmma = getenv("LAZYLLM_CUDA_WGMMA");
    cuda->wgmma = cuda->capability == 90 && cuda->type != LAZY_F32 && !(wgmma && strcmp(wgmma, "0") == 0);
    snprintf(cuda->name, sizeof cuda->name, "cuda:%d", cuda->device);
    snprintf(cuda->variant, sizeof cuda->variant, "%s, sm_%d%d, %s%s", properties.name, properties.major,
             properties.minor, types[cuda->type], cuda->wgmma ? ", wgmma" : "");
    return LAZY_OK;
}

/* *n = how many devices there are. Without a driver, or with one that is too old for this build, the error names the
 * way out. */
static int count_devices(int *n, lazy_error *err)
{
    const int needed = CUDART_VERSION / 1000; /* minor versions of one major version are compatible */
    int driver = 0;
    *n = 0;
    cudaDriverGetVersion(&driver);
    if (driver == 0) return lazy_fail(err, LAZY_DEVICE, "no CUDA driver is installed");
    if (driver / 1000 < needed)
        return lazy_fail(err, LAZY_DEVICE,
                         "the driver is for CUDA %d.%d, and the CUDA core was built for %d.0 or later (driver %s or "
                         "later): update the driver, "
                         "or install again with nvcc %d.x: CUDA_HOME=/usr/local/cuda-%d LAZYLLM_CUDA=1 pip install .",
                         driver / 1000, driver % 1000 / 10, needed, needed == 12 ? "525" : "580", driver / 1000,
                         driver / 1000);
    return lazy_cuda_check(cudaGetDeviceCount(n), "counting devices", err);
}

int lazy_cuda_open(lazy_backend **out, const lazy_cuda_options *options, lazy_error *err)
{
    static const lazy_ops ops = table_of_ops();
    *out = nullptr;
    int n_devices = 0;
    const lazy_cublas *cublas;
    int code = count_devices(&n_devices, err);
    if (!code && options->device >= n_devices)
        code = lazy_fail(err, LAZY_DEVICE, "there is no cuda:%d: this machine has %d", options->device, n_devices);
    if (!code) code = lazy_cublas_load(&cublas, options->libraries, options->n_libraries, err);
    if (code) return code;
    lazy_cuda *cuda;
    if ((code = lazy_alloc_zeroed(&cuda, 1, "the CUDA backend", err))) return code;
    cuda->device = options->device;
    cuda->type = options->type;
    cuda->base = { &ops, cuda->name, cuda->variant, 1, cuda->type, cuda->type, ROW_CHUNK };
    code = describe(cuda, err);
    if (!code) code = lazy_cuda_enter(&cuda->base, err);
    if (!code) code = open_pool(cuda, err);
    if (!code) code = lazy_gemm_open(&cuda->gemm, cublas, err);
    if (code) lazy_cuda_close(&cuda->base);
    else *out = &cuda->base;
    return code;
}

/* ---- the library ------------------------------------------------------------------------ */

static int look(lazy_cuda_facts *facts, const char *const *libraries, int n_libraries, lazy_error *err)
{
    int driver = 0, runtime = 0;
    int code = count_devices(&facts->n_devices, err);
    if (code) return code;
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    snprintf(facts->versions, sizeof facts->versions, "driver for CUDA %d.%d, runtime %d.%d", driver / 1000,
             driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    size_t length = 0;
    for (int i = 0; i < facts->n_devices && length < sizeof facts->devices; i++) {
        cudaDeviceProp properties;
        if ((code = lazy_cuda_check(cudaGetDeviceProperties(&properties, i), "asking for a device's properties", err)))
            return code;
        length += (size_t)snprintf(facts->devices + length, sizeof facts->devices - length,
                                   "%scuda:%d %s, %.0f GiB, sm_%d%d", i ? ", " : "", i, properties.name,
                                   (double)properties.totalGlobalMem / (1 << 30), properties.major, properties.minor);
    }
    const lazy_cublas *cublas;
    lazy_error missing = {};
    if (lazy_cublas_load(&cublas, libraries, n_libraries, &missing) == LAZY_OK)
        snprintf(facts->cublas, sizeof facts->cublas, "cuBLASLt %zu.%zu.%zu from %s", cublas->version / 10000,
                 cublas->version / 100 % 100, cublas->version % 100, cublas->file);
    else snprintf(facts->cublas, sizeof facts->cublas, "%.*s", LAZY_CUDA_TEXT - 1, missing.message);
    return LAZY_OK;
}

extern "C" __attribute__((visibility("default"))) const lazy_cuda_library *lazy_cuda_library_get(void)
{
    static const lazy_cuda_library library = {
        LAZY_CUDA_VERSION, sizeof(lazy_ops), LAZY_CUDA_ARCHITECTURES, lazy_cuda_open, look, lazy_cuda_read,
    };
    return &library;
}
