/* backend_cpu.c — the CPU backend: its instruction sets, its memory, and the table of ops. */
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

#include "../error.h"
#include "../memory.h"
#include "cpu.h"

/* ---- the instruction sets of this machine -------------------------------------------------- */

enum { AVX2 = 1, AVX512 = 2, VNNI = 4, BF16 = 8, AMX = 16, I8MM = 32, AVX_VNNI = 64 };

#if defined(__x86_64__)
/* AMX's tiles are a process's only after it has asked for them, as Linux has it. */
static bool ask_for_tiles(void)
{
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18, AMX_BF16 = 1 << 22 };
    unsigned a, b, c, d = 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && d & AMX_BF16 &&
           syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
#endif

static unsigned features(void)
{
    unsigned found = 0;
#if defined(__x86_64__)
    unsigned a, b, c = 0, d;
    __get_cpuid(1, &a, &b, &c, &d); /* clang 14 does not take "f16c" below */
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && c & bit_F16C) found |= AVX2;
    if (found && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl"))
        found |= AVX512;
    if (found & AVX512 && __builtin_cpu_supports("avx512vnni")) found |= VNNI;
    if (found & AVX512 && __builtin_cpu_supports("avx512bf16")) found |= BF16;
    /* clang 14 does not take "avxvnni" above */
    if (found && __get_cpuid_count(7, 1, &a, &b, &c, &d) && a & 1 << 4) found |= AVX_VNNI;
    if (found & BF16 && ask_for_tiles()) found |= AMX;
#ifdef LAZY_EMULATED_BF16
    if (found & AVX512) found |= BF16 | AMX;
#endif
#elif defined(__aarch64__)
    enum { HAS_I8MM = 1 << 13, HAS_BF16 = 1 << 14 }; /* as Linux has them */
    unsigned long all = getauxval(AT_HWCAP2);
    if (all & HAS_I8MM) found |= I8MM;
    if (all & HAS_BF16) found |= BF16;
#endif
    return found;
}

/* The best first. */
static const struct {
    unsigned needs;
    lazy_arithmetic arithmetic;
} all[] = {
#define KERNELS(needs, isa, compute, kernels, products, fewest, few)                                                   \
    {                                                                                                                  \
        needs, { isa, LAZY_COMPUTE_##compute, &lazy_kernels_##kernels, &lazy_##products, fewest, few }                 \
    }
#define PRODUCTS(name) &lazy_products_##name
#if defined(__x86_64__)
    KERNELS(VNNI | AMX, "amx", INT8, avx512_amx, products_avx512_int8, PRODUCTS(avx512_fixed8), NULL),
    KERNELS(AMX, "amx", BF16, avx512_amx, kernels_avx512_amx.products, PRODUCTS(avx512_stored_5),
            PRODUCTS(avx512_bf16_halves)),
    KERNELS(AMX, "amx", F32, avx512, kernels_avx512.products, NULL, PRODUCTS(avx512_stored)),
    KERNELS(VNNI | BF16, "avx512", INT8, avx512_bf16, products_avx512_int8, PRODUCTS(avx512_fixed8), NULL),
    KERNELS(VNNI, "avx512", INT8, avx512, products_avx512_int8, PRODUCTS(avx512_fixed8), NULL),
    KERNELS(VNNI | BF16, "avx512", BF16, avx512_bf16, kernels_avx512_bf16.products, PRODUCTS(avx512_fixed16),
            PRODUCTS(avx512_bf16_stored)),
    KERNELS(BF16, "avx512", BF16, avx512_bf16, kernels_avx512_bf16.products, NULL, PRODUCTS(avx512_bf16_stored)),
    KERNELS(VNNI, "avx512", F32, avx512, kernels_avx512.products, PRODUCTS(avx512_fixed24), PRODUCTS(avx512_stored)),
    KERNELS(AVX512, "avx512", F32, avx512, kernels_avx512.products, NULL, PRODUCTS(avx512_stored)),
    KERNELS(AVX_VNNI, "avxvnni", INT8, avx2, products_avxvnni_int8, PRODUCTS(avxvnni_fixed8), NULL),
    KERNELS(AVX_VNNI, "avxvnni", F32, avx2, kernels_avx2.products, PRODUCTS(avxvnni_fixed24), PRODUCTS(avx2_stored)),
    KERNELS(AVX2, "avx2", INT8, avx2, products_avx2_int8, PRODUCTS(avx2_fixed8), NULL),
    KERNELS(AVX2, "avx2", F32, avx2, kernels_avx2.products, PRODUCTS(avx2_fixed24), PRODUCTS(avx2_stored)),
#elif defined(__aarch64__)
    KERNELS(I8MM | BF16, "neon", INT8, neon_bf16, products_neon_int8, PRODUCTS(neon_fixed8), NULL),
    KERNELS(I8MM, "neon", INT8, neon, products_neon_int8, PRODUCTS(neon_fixed8), NULL),
    KERNELS(I8MM | BF16, "neon", BF16, neon_bf16, kernels_neon_bf16.products, PRODUCTS(neon_fixed16),
            PRODUCTS(neon_stored)),
    KERNELS(BF16, "neon", BF16, neon_bf16, kernels_neon_bf16.products, NULL, PRODUCTS(neon_stored)),
    KERNELS(I8MM, "neon", F32, neon, kernels_neon.products, PRODUCTS(neon_fixed24), PRODUCTS(neon_stored)),
    KERNELS(0, "neon", F32, neon, kernels_neon.products, NULL, PRODUCTS(neon_stored)),
#endif
    KERNELS(0, "generic", F32, generic, kernels_generic.products, NULL, PRODUCTS(generic_stored)),
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
    static const char *const isas[] = { "amx", "avx512", "avxvnni", "avx2", "neon", "generic" };
    static const char *names[sizeof isas / sizeof *isas + 1];
    int n = 0;
    for (size_t i = 0; i < sizeof isas / sizeof *isas; i++)
        if (lazy_arithmetic_find(isas[i], LAZY_COMPUTE_F32)) names[n++] = isas[i];
    return names;
}

/* ---- memory, opening, closing ------------------------------------------------------------ */

int lazy_cpu_alloc(lazy_backend *backend, void **out, size_t bytes, const char *what, lazy_error *err)
{
    return lazy_spare_alloc(&((lazy_cpu *)backend)->spare, out, bytes, false, what, err);
}

int lazy_cpu_alloc_sparse(lazy_backend *backend, void **out, size_t bytes, const char *what, lazy_error *err)
{
    return lazy_spare_alloc(&((lazy_cpu *)backend)->spare, out, bytes, true, what, err);
}

void lazy_cpu_free(lazy_backend *backend, void *memory) { lazy_spare_free(memory); }
void lazy_cpu_keep(lazy_backend *backend, void *memory) { lazy_spare_keep(&((lazy_cpu *)backend)->spare, memory); }

void lazy_cpu_close(lazy_backend *backend)
{
    lazy_cpu *cpu = (lazy_cpu *)backend;
    lazy_pool_close(cpu->pool);
    lazy_spare_empty(&cpu->spare);
    lazy_free(cpu->scratch);
    lazy_free(cpu);
}

int lazy_cpu_copy(lazy_stream *stream, void *to, const void *from, size_t bytes, lazy_error *err)
{
    memcpy(to, from, bytes);
    return LAZY_OK;
}

/* Weights are read where they are mapped: the system drops pages that do not fit, and reads them again. */
#define ENTRY(op) .op = lazy_cpu_##op,
static const lazy_ops ops = { .upload = lazy_cpu_copy, .download = lazy_cpu_copy, LAZY_CPU_OPS(ENTRY) };

/* The value of LAZYLLM_CPU: an instruction set, or NULL for the best one. */
static const char *requested_isa(void)
{
    const char *requested = getenv("LAZYLLM_CPU");
    return requested && *requested ? requested : NULL;
}

const char *lazy_cpu_variant_used(lazy_compute compute)
{
    const lazy_arithmetic *arithmetic = lazy_arithmetic_find(requested_isa(), compute);
    return arithmetic ? arithmetic->products->name : NULL;
}

int lazy_cpu_open(lazy_backend **out, int threads, lazy_compute compute, lazy_dtype kv, lazy_error *err)
{
    *out = NULL;
    const char *isa = requested_isa();
    const lazy_arithmetic *in_f32 = lazy_arithmetic_find(isa, LAZY_COMPUTE_F32),
                          *arithmetic = lazy_arithmetic_find(isa, compute);
    if (!in_f32)
        return lazy_fail(err, LAZY_DEVICE,
                         "LAZYLLM_CPU is \"%s\", which this machine cannot run; it runs \"%s\" and slower ones", isa,
                         lazy_cpu_variants()[0]);
    if (!arithmetic)
        return lazy_fail(err, LAZY_DEVICE,
                         "compute is %s, which needs the instructions %s; the kernels here are those of %s: use f32",
                         compute == LAZY_COMPUTE_BF16 ? "bf16" : "int8",
                         compute == LAZY_COMPUTE_BF16 ? "AVX512-BF16, or BF16 of ARM"
                                                      : "AVX512-VNNI, AVX2 without AVX-512, or I8MM of ARM",
                         in_f32->isa);

    lazy_cpu *cpu;
    int code = lazy_alloc_zeroed(&cpu, 1, "the CPU backend", err);
    if (code) return code;
    cpu->base = (lazy_backend){ .ops = &ops, .name = "cpu", .threads = threads, .kv = kv, .row_chunk = ROW_CHUNK };
    cpu->base.variant = arithmetic->products->name;
    cpu->base.activations = LAZY_F32;
    cpu->arithmetic = arithmetic;
    cpu->in_f32 = in_f32->products;
    code = lazy_alloc(&cpu->scratch, (size_t)(threads - 1) * WORKER_SCRATCH, "the workers' scratch", err);
    if (!code) code = lazy_pool_open(&cpu->pool, threads, err);
    if (code) lazy_cpu_close(&cpu->base);
    else *out = &cpu->base;
    return code;
}
