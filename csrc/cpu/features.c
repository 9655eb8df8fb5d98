/* features.c — the instruction sets of this machine. */
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "../format.h"
#include "cpu.h"

#if defined(__x86_64__)
/* clang 14 does not take "f16c" in __builtin_cpu_supports. */
static bool has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C;
}
#endif

enum { AVX2 = 1, AVX512 = 2, VNNI = 4, BF16 = 8 };

static unsigned features(void)
{
    unsigned found = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c()) found |= AVX2;
    if (found && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl"))
        found |= AVX512;
    if (found & AVX512 && __builtin_cpu_supports("avx512vnni")) found |= VNNI;
    if (found & AVX512 && __builtin_cpu_supports("avx512bf16")) found |= BF16;
#endif
    return found;
}

/* The best first. */
static const struct {
    unsigned needs;
    lazy_arithmetic arithmetic;
} all[] = {
#if defined(__x86_64__)
#define ENTRY(needs, isa, compute, kernels, products, fixed)                                                           \
    {                                                                                                                  \
        needs, { isa, LAZY_COMPUTE_##compute, &lazy_kernels_##kernels, &lazy_##products, fixed }                       \
    }
    ENTRY(VNNI | BF16, "avx512", INT8, avx512_bf16, products_avx512_int8, &lazy_products_avx512_fixed8),
    ENTRY(VNNI, "avx512", INT8, avx512, products_avx512_int8, &lazy_products_avx512_fixed8),
    ENTRY(VNNI | BF16, "avx512", BF16, avx512_bf16, kernels_avx512_bf16.products, &lazy_products_avx512_fixed16),
    ENTRY(BF16, "avx512", BF16, avx512_bf16, kernels_avx512_bf16.products, NULL),
    ENTRY(VNNI, "avx512", F32, avx512, kernels_avx512.products, &lazy_products_avx512_fixed24),
    ENTRY(AVX512, "avx512", F32, avx512, kernels_avx512.products, NULL),
    ENTRY(AVX2, "avx2", F32, avx2, kernels_avx2.products, NULL),
#endif
    { 0, { "generic", LAZY_COMPUTE_F32, &lazy_kernels_generic, &lazy_kernels_generic.products, NULL } },
};

const lazy_arithmetic *lazy_arithmetic_find(const char *isa, lazy_compute compute)
{
    lazy_format_prepare();
    const unsigned found = features();
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        const lazy_arithmetic *a = &all[i].arithmetic;
        if ((all[i].needs & ~found) == 0 && a->compute == compute && (!isa || strcmp(isa, a->isa) == 0)) return a;
    }
    return NULL;
}

const char *const *lazy_cpu_variants(void)
{
    static const char *const isas[] = { "avx512", "avx2", "generic" };
    static const char *names[sizeof isas / sizeof *isas + 1];
    int n = 0;
    for (size_t i = 0; i < sizeof isas / sizeof *isas; i++)
        if (lazy_arithmetic_find(isas[i], LAZY_COMPUTE_F32)) names[n++] = isas[i];
    return names;
}
