#define _GNU_SOURCE /* dladdr */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cuda_library.h"
#include "error.h"

enum { MAX_PATH = 4096, MAX_THREADS = 1024 };

/* LAZYLLM_CUDA_LIBRARY, or liblazyllm_cuda.so beside the file that holds this code. */
static int library_path(char *path, lazy_error *err)
{
    const char *wish = getenv("LAZYLLM_CUDA_LIBRARY");
    Dl_info here = { 0 };
    if (!(wish && *wish) && (!dladdr((void *)&lazy_device_open, &here) || !here.dli_fname))
        return lazy_fail(err, LAZY_DEVICE, "the core's own file is unknown");
    const char *slash = here.dli_fname ? strrchr(here.dli_fname, '/') : NULL;
    int folder = slash ? (int)(slash - here.dli_fname + 1) : 0,
        length = here.dli_fname ? snprintf(path, MAX_PATH, "%.*sliblazyllm_cuda.so", folder, here.dli_fname)
                                : snprintf(path, MAX_PATH, "%s", wish);
    if (length >= MAX_PATH) return lazy_fail(err, LAZY_DEVICE, "the CUDA core's path has over %d bytes", MAX_PATH);
    if (here.dli_fname && access(path, R_OK))
        return lazy_fail(err, LAZY_DEVICE,
                         "the CUDA core is not part of this install (%s is missing): install again where nvcc is, with "
                         "LAZYLLM_CUDA=1",
                         path);
    return LAZY_OK;
}

/* Never unloaded: its code may still be in use. */
int lazy_cuda_load(const lazy_cuda_library **out, lazy_error *err)
{
    char path[MAX_PATH];
    int code = library_path(path, err);
    if (code) return code;
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!handle) return lazy_fail(err, LAZY_DEVICE, "the CUDA core does not load: %s", dlerror());
    lazy_cuda_library_getter *get = (lazy_cuda_library_getter *)(uintptr_t)dlsym(handle, LAZY_CUDA_SYMBOL);
    const lazy_cuda_library *library = get ? get() : NULL;
    if (!library || library->version != LAZY_CUDA_VERSION || library->ops_bytes != sizeof(lazy_ops))
        return lazy_fail(err, LAZY_DEVICE, "%s is of another version than this core: install lazyllm again", path);
    *out = library;
    return LAZY_OK;
}

/* The N of "cuda:N", 0 for "cuda", -1 for other names. */
static int cuda_ordinal(const char *name)
{
    int ordinal, length = 0;
    if (strcmp(name, "cuda") == 0) return 0;
    if (sscanf(name, "cuda:%4d%n", &ordinal, &length) != 1 || name[length] || ordinal < 0) return -1;
    return ordinal;
}

/* The index of a name, the first one for NULL; -1 if it is none of them. */
static int index_of(const char *name, const char *const *names, int n)
{
    for (int i = 0; i < n; i++)
        if (!name || strcmp(name, names[i]) == 0) return i;
    return -1;
}

int lazy_device_open(lazy_backend **out, const lazy_device *device, lazy_dtype type, lazy_error *err)
{
    *out = NULL;
    static const char *const computes[] = {
        [LAZY_COMPUTE_F32] = "f32", [LAZY_COMPUTE_BF16] = "bf16", [LAZY_COMPUTE_INT8] = "int8"
    };
    static const char *const types[] = { [LAZY_F32] = "f32", [LAZY_F16] = "f16", [LAZY_BF16] = "bf16" };
    int compute = index_of(device->compute, computes, 3), kv = index_of(device->kv, types, 3);
    if (compute < 0) return lazy_invalid(err, "compute is \"%s\"; it must be f32, bf16 or int8", device->compute);
    if (kv < 0) return lazy_invalid(err, "kv is \"%s\"; it must be f32, f16 or bf16", device->kv);
    bool on_cpu = strcmp(device->name, "cpu") == 0;
    if (device->threads < 1 || device->threads > MAX_THREADS)
        return lazy_invalid(err, "threads is %d; it must be 1 to %d", device->threads, MAX_THREADS);
    if (on_cpu) return lazy_cpu_open(out, device->threads, (lazy_compute)compute, (lazy_dtype)kv, err);

    lazy_cuda_options options = { .device = cuda_ordinal(device->name),
                                  .type = type,
                                  .libraries = device->libraries,
                                  .n_libraries = device->n_libraries };
    if (options.device < 0)
        return lazy_invalid(err, "device is \"%s\"; it must be cpu, cuda, cuda:N or cuda:N,M", device->name);
    if (compute != LAZY_COMPUTE_F32)
        return lazy_invalid(err, "compute is for the CPU; a GPU computes in the type of the checkpoint's weights");
    if (kv != LAZY_F32 && kv != (int)type)
        return lazy_invalid(err, "kv is \"%s\"; the CUDA core keeps K and V as %s, in which it computes: leave kv out",
                            types[kv], types[type]);
    const lazy_cuda_library *library;
    int code = lazy_cuda_load(&library, err);
    return code ? code : library->open(out, &options, err);
}

int lazy_devices_open(lazy_backend *out[LAZY_MAX_DEVICES], int *n, const lazy_device *device, lazy_dtype type,
                      lazy_error *err)
{
    lazy_device one = *device;
    int code = LAZY_OK;
    *n = 0;
    for (const char *at = device->name, *comma; at && !code; at = comma ? comma + 1 : NULL) {
        char name[32];
        comma = strchr(at, ',');
        int length = comma ? (int)(comma - at) : (int)strlen(at);
        snprintf(name, sizeof name, "%s%.*s", *n ? "cuda:" : "", length, at);
        one.name = name;
        if (*n == LAZY_MAX_DEVICES)
            return lazy_invalid(err, "device is \"%s\"; it must be at most %d GPUs", device->name, LAZY_MAX_DEVICES);
        code = lazy_device_open(&out[*n], &one, type, err);
        *n += !code;
    }
    if (!code && *n > 1 && !out[0]->ops->send)
        return lazy_invalid(err, "device is \"%s\"; only GPUs share a model's layers", device->name);
    return code;
}

int lazy_cuda_look(char *text, size_t size, const char *const *libraries, int n_libraries, lazy_error *err)
{
    const lazy_cuda_library *library;
    lazy_cuda_facts facts = { 0 };
    int code = lazy_cuda_load(&library, err);
    if (!code) code = library->look(&facts, libraries, n_libraries, err);
    if (code) return code;
    snprintf(text, size, "%s; %s; %s; kernels for %s", facts.devices, facts.versions, facts.cublas,
             library->architectures);
    return LAZY_OK;
}
