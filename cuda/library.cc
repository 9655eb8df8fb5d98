/* library.cc — the only exported symbol of liblazyllm_cuda: opens a device, or describes devices, driver and cuBLAS. */
#include <cstdio>
#include <cstring>

#include "cuda.h"

extern "C" {
#include "../csrc/cuda_library.h"
}

#ifndef LAZY_CUDA_ARCHITECTURES
#define LAZY_CUDA_ARCHITECTURES "an unknown architecture"
#endif

namespace
{
int look(lazy_cuda_facts *facts, const char *const *libraries, int n_libraries, lazy_error *err)
{
    int driver = 0, runtime = 0;
    int code = lazy_cuda_count_devices(&facts->n_devices, err);
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

const lazy_cuda_library library = {
    LAZY_CUDA_VERSION, sizeof(lazy_ops), LAZY_CUDA_ARCHITECTURES, lazy_cuda_open, look, lazy_cuda_read,
};
} // namespace

extern "C" __attribute__((visibility("default"))) const lazy_cuda_library *lazy_cuda_library_get(void)
{
    return &library;
}
