/* backend_cuda.cc — the backend of a CUDA device: memory, weights, streams, and the table of ops. */
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "convert.h"
#include "cuda.h"

extern "C" {
#include "../csrc/memory.h"
}

namespace
{
enum { ROW_CHUNK = 4096, MIN_CAPABILITY = 8 /* first with bf16 on tensor cores */ };

/* ---- memory ----------------------------------------------------------------------------- */
/* The backend's pool keeps what sessions free, so that the next session need not map memory again. It is used in the
 * order of the default stream, which computes nothing. */

int open_pool(lazy_cuda *cuda, lazy_error *err)
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
cudaError_t free_bytes(const lazy_cuda *cuda, size_t *left, size_t *total)
{
    uint64_t reserved = 0, used = 0;
    cudaError_t failed = cudaMemGetInfo(left, total);
    if (!failed) failed = cudaMemPoolGetAttribute(cuda->pool, cudaMemPoolAttrReservedMemCurrent, &reserved);
    if (!failed) failed = cudaMemPoolGetAttribute(cuda->pool, cudaMemPoolAttrUsedMemCurrent, &used);
    *left += reserved - used;
    return failed;
}

int allocate(lazy_backend *backend, void **out, size_t bytes, const char *what, lazy_error *err)
{
    *out = nullptr;
    int code = lazy_cuda_enter(backend, err);
    if (code) return code;
    const lazy_cuda *cuda = reinterpret_cast<const lazy_cuda *>(backend);
    cudaError_t failed = cudaMallocFromPoolAsync(out, bytes ? bytes : 1, cuda->pool, nullptr);
    if (!failed) failed = cudaStreamSynchronize(nullptr); /* sessions' streams do not wait for the default stream */
    if (failed != cudaErrorMemoryAllocation) return lazy_cuda_check(failed, what, err);
    cudaGetLastError(); /* clears the error: running out of memory is not sticky */
    size_t left = 0, total = 0;
    free_bytes(cuda, &left, &total);
    return lazy_fail(err, LAZY_MEMORY, "%s: %zu bytes requested; %s has %zu of %zu left", what, bytes, backend->name,
                     left, total);
}

void release(lazy_backend *backend, void *memory)
{
    if (!memory || lazy_cuda_enter(backend, nullptr) != LAZY_OK) return;
    cudaDeviceSynchronize(); /* queued kernels may still use it */
    cudaFreeAsync(memory, nullptr);
}

int admit(lazy_backend *backend, uint64_t bytes, const char *what, lazy_error *err)
{
    size_t left = 0, total = 0;
    int code = lazy_cuda_enter(backend, err);
    const lazy_cuda *cuda = reinterpret_cast<const lazy_cuda *>(backend);
    if (!code) code = lazy_cuda_check(free_bytes(cuda, &left, &total), "asking for free memory", err);
    if (code || bytes <= left) return code;
    return lazy_fail(err, LAZY_MEMORY, "%s take %.2f GiB; %s has %.2f of %.2f GiB left", what,
                     (double)bytes / (1 << 30), backend->name, (double)left / (1 << 30), (double)total / (1 << 30));
}

/* ---- weights ---------------------------------------------------------------------------- */

/* The type in which the device has weights of this type. */
lazy_dtype held_type(const lazy_cuda *cuda, lazy_dtype stored)
{
    return lazy_is_quantized(stored) ? stored : cuda->type;
}

int upload_part(lazy_cuda *cuda, char *to, const lazy_part *part, int cols, lazy_error *err)
{
    size_t n = (size_t)part->rows * (size_t)cols;
    lazy_dtype held = held_type(cuda, part->dtype);
    size_t bytes = (size_t)part->rows * lazy_row_bytes(held, cols);
    if (part->dtype == held)
        return lazy_cuda_check(cudaMemcpy(to, part->data, bytes, cudaMemcpyHostToDevice), "weights", err);
    void *converted;
    int code = lazy_alloc_bytes(&converted, n, lazy_float_bytes(cuda->type), nullptr, "converted weights", err);
    if (code) return code;
    lazy_cuda_convert(converted, cuda->type, part->data, part->dtype, n);
    code = lazy_cuda_check(cudaMemcpy(to, converted, bytes, cudaMemcpyHostToDevice), "weights", err);
    lazy_free(converted);
    return code;
}

/* The matrix in device memory from `at` on: neighbours that are held in one type are one part. place(part, address) is
 * called for every part as it is stored. *end: of the matrix. */
template <class F>
lazy_matrix laid_out(const lazy_cuda *cuda, const lazy_matrix &stored, size_t at, size_t *end, F place)
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
int bind(lazy_backend *backend, lazy_matrix *matrices, int n, lazy_error *err)
{
    lazy_cuda *cuda = reinterpret_cast<lazy_cuda *>(backend);
    size_t at = 0, widened = (size_t)matrices->rows * lazy_row_bytes(cuda->type, matrices->cols);
    for (int i = 0; i < n; i++) laid_out(cuda, matrices[i], at, &at, [](const lazy_part &, char *) {});
    void *memory;
    int code = allocate(backend, &memory, lazy_cuda_aligned(at), "weights", err);
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
    if (code) release(backend, memory);
    return code;
}

void unbind(lazy_backend *backend, lazy_matrix *matrix) { release(backend, const_cast<void *>(matrix->part[0].data)); }

/* ---- streams ---------------------------------------------------------------------------- */

/* A buffer of the scratch, and its size. */
struct scratch {
    void **memory;
    size_t bytes;
};

size_t panel_bytes(const lazy_cuda *cuda, int n_rows) { return n_rows > LAZY_GEMV_BLOCK_ROWS ? cuda->panel_bytes : 0; }

/* All buffers, for passes of up to n_rows rows over up to n_tokens tokens. */
std::array<scratch, 18> scratch_of(lazy_cuda_stream *s, int n_rows, int n_tokens)
{
    const lazy_config *c = s->base.config;
    const lazy_cuda *cuda = lazy_cuda_of(&s->base);
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
               { &s->expert_rows, std::max(chunk, LAZY_GEMV_ROWS * k) * ffn * width },
               { &s->expert_states, chunk * k * (size_t)c->hidden * width } } };
}

void close_stream(lazy_stream *stream)
{
    if (!stream) return;
    lazy_cuda_stream *s = lazy_cuda_scratch(stream);
    if (lazy_cuda_enter(stream->backend, nullptr) == LAZY_OK) {
        if (s->queue) cudaStreamSynchronize(s->queue); /* queued kernels may still read what is freed below */
        lazy_gemm_leave(lazy_cuda_of(stream)->gemm, s->queue);
        lazy_staging_close(&s->staging);
        for (const scratch &part : scratch_of(s, 0, 0)) release(stream->backend, *part.memory);
        release(stream->backend, s->choice);
        cudaFreeHost(s->found);
        if (s->queue) cudaStreamDestroy(s->queue);
    }
    lazy_free(s);
}

int open_stream(lazy_backend *backend, const lazy_config *config, lazy_stream **out, lazy_error *err)
{
    lazy_cuda_stream *s;
    int code = lazy_alloc_zeroed(&s, 1, "a stream", err);
    if (code) return code;
    s->base.backend = backend;
    s->base.config = config;
    code = lazy_cuda_enter(backend, err);
    if (!code)
        code = lazy_cuda_check(cudaStreamCreateWithFlags(&s->queue, cudaStreamNonBlocking), "opening a stream", err);
    if (!code) code = lazy_staging_open(&s->staging, err);
    if (!code) code = lazy_cuda_check(cudaMallocHost((void **)&s->found, sizeof *s->found), "pinned memory", err);
    if (!code) s->found->bad_score = LAZY_NO_BAD_SCORE;
    if (!code) code = allocate(backend, (void **)&s->choice, sizeof *s->choice, "a choice", err);
    if (!code)
        code = lazy_cuda_check(cudaMemsetAsync(s->choice, 0, sizeof *s->choice, s->queue), "clearing the choice", err);
    if (code) close_stream(&s->base);
    else *out = &s->base;
    return code;
}

uint64_t scratch_bytes(const lazy_stream *stream, int n_rows, int n_tokens)
{
    uint64_t sum = sizeof(lazy_choice);
    for (const scratch &part : scratch_of(lazy_cuda_scratch(const_cast<lazy_stream *>(stream)), n_rows, n_tokens))
        sum += part.bytes;
    return sum;
}

/* Each buffer of the scratch is freed before the next one grows; those that have grown when another cannot are merely
 * larger than needed. */
int reserve(lazy_stream *stream, int n_rows, int n_tokens, lazy_error *err)
{
    lazy_cuda_stream *s = lazy_cuda_scratch(stream);
    int code = lazy_cuda_enter(stream->backend, err);
    if (code || (n_rows <= s->rows && n_tokens <= s->tokens)) return code;
    n_rows = std::max(n_rows, s->rows);
    n_tokens = std::max(n_tokens, s->tokens);
    lazy_cuda_forget_ranges(stream);
    for (const scratch &part : scratch_of(s, n_rows, n_tokens)) {
        void *larger;
        if ((code = allocate(stream->backend, &larger, part.bytes, "a stream's scratch", err))) return code;
        release(stream->backend, *part.memory);
        *part.memory = larger;
        if (larger != s->tickets) continue;
        code = lazy_cuda_check(cudaMemsetAsync(larger, 0, part.bytes, s->queue), "clearing a stream's scratch", err);
        if (code) return code;
    }
    s->rows = n_rows;
    s->tokens = n_tokens;
    s->panel_bytes = panel_bytes(lazy_cuda_of(stream), n_rows);
    return LAZY_OK;
}

int copy(lazy_stream *stream, void *to, const void *from, size_t bytes, lazy_error *err)
{
    int code = lazy_cuda_enter(stream->backend, err);
    if (code) return code;
    return lazy_cuda_check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, lazy_cuda_scratch(stream)->queue),
                           "copy", err);
}

/* ---- the device ------------------------------------------------------------------------- */

void close_backend(lazy_backend *backend)
{
    lazy_cuda *cuda = reinterpret_cast<lazy_cuda *>(backend);
    if (lazy_cuda_enter(backend, nullptr) == LAZY_OK) lazy_gemm_close(cuda->gemm);
    if (cuda->pool) cudaMemPoolDestroy(cuda->pool);
    lazy_free(cuda);
}

lazy_ops table_of_ops()
{
    lazy_ops ops = {};
    ops.alloc = allocate;
    ops.free = release;
    ops.admit = admit;
    ops.bind = bind;
    ops.unbind = unbind;
    ops.close = close_backend;
    ops.stream_open = open_stream;
    ops.stream_close = close_stream;
    ops.reserve = reserve;
    ops.scratch_bytes = scratch_bytes;
    ops.upload = lazy_cuda_upload;
    ops.download = lazy_cuda_download;
    ops.copy = copy;
    ops.embed = lazy_cuda_embed;
    ops.rmsnorm = lazy_cuda_rmsnorm;
    ops.checked_rmsnorm = lazy_cuda_checked_rmsnorm;
    ops.matmul = lazy_cuda_matmul;
    ops.gated = lazy_cuda_gated;
    ops.mix_experts = lazy_cuda_mix_experts;
    ops.rotate = lazy_cuda_rotate;
    ops.attention = lazy_cuda_attention;
    ops.logits = lazy_cuda_logits;
    ops.surprisal = lazy_cuda_surprisal;
    ops.argmax = lazy_cuda_argmax;
    ops.scores = lazy_cuda_scores;
    ops.share = lazy_cuda_share;
    ops.largest = lazy_cuda_largest;
    ops.remember = lazy_cuda_remember;
    ops.average = lazy_cuda_average;
    ops.smooth = lazy_cuda_smooth;
    ops.mass = lazy_cuda_mass;
    ops.select = lazy_cuda_select;
    ops.mark = lazy_cuda_mark;
    ops.filter = lazy_cuda_filter;
    ops.regroup = lazy_cuda_regroup;
    return ops;
}

const lazy_ops cuda_ops = table_of_ops();

int describe(lazy_cuda *cuda, lazy_error *err)
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
} // namespace

int lazy_cuda_enter(const lazy_backend *backend, lazy_error *err)
{
    return lazy_cuda_check(cudaSetDevice(reinterpret_cast<const lazy_cuda *>(backend)->device), "selecting the device",
                           err);
}

int lazy_cuda_check(cudaError_t code, const char *what, lazy_error *err)
{
    if (code == cudaSuccess) return LAZY_OK;
    cudaGetLastError(); /* clears the error, which the next launch would otherwise report again */
    return lazy_fail(err, LAZY_DEVICE, "%s: %s (%s)", what, cudaGetErrorString(code), cudaGetErrorName(code));
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
        "after layer %d: the score of the token at position %d is not a number; the weights before it are damaged",
        (int)(bad >> 32), (int)(bad & INT32_MAX));
}

int lazy_cuda_count_devices(int *n, lazy_error *err)
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
    *out = nullptr;
    int n_devices = 0;
    const lazy_cublas *cublas;
    int code = lazy_cuda_count_devices(&n_devices, err);
    if (!code && options->device >= n_devices)
        code = lazy_fail(err, LAZY_DEVICE, "there is no cuda:%d: this machine has %d", options->device, n_devices);
    if (!code) code = lazy_cublas_load(&cublas, options->libraries, options->n_libraries, err);
    if (code) return code;
    lazy_cuda *cuda;
    if ((code = lazy_alloc_zeroed(&cuda, 1, "the CUDA backend", err))) return code;
    cuda->device = options->device;
    cuda->type = options->type;
    cuda->base.ops = &cuda_ops;
    cuda->base.name = cuda->name;
    cuda->base.variant = cuda->variant;
    cuda->base.threads = 1;
    cuda->base.activations = cuda->base.kv = cuda->type;
    cuda->base.row_chunk = ROW_CHUNK;
    code = describe(cuda, err);
    if (!code) code = lazy_cuda_enter(&cuda->base, err);
    if (!code) code = open_pool(cuda, err);
    if (!code) code = lazy_gemm_open(&cuda->gemm, cublas, err);
    if (code) close_backend(&cuda->base);
    else *out = &cuda->base;
    return code;
}
