/* features.c — the instruction sets of this machine, and the number of cores that this process may use. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

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

static FILE *open_in(const char *folder, const char *name)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return fopen(path, "re");
}

/* The number at the beginning of a file, or `otherwise`. */
static long long read_number(const char *folder, const char *name, long long otherwise)
{
    long long number;
    FILE *file = open_in(folder, name);
    if (!file) return otherwise;
    if (fscanf(file, "%lld", &number) != 1) number = otherwise;
    fclose(file);
    return number;
}

int lazy_cgroup_cores(const char *folder)
{
    long long quota = 0, period = 0;
    FILE *file = open_in(folder, "cpu.max");
    if (file) {
        if (fscanf(file, "%lld %lld", &quota, &period) != 2) quota = 0; /* "max" means no limit */
        fclose(file);
    } else { /* version 1 */
        quota = read_number(folder, "cpu/cpu.cfs_quota_us", 0);
        period = read_number(folder, "cpu/cpu.cfs_period_us", 0);
    }
    return quota > 0 && period > 0 ? (int)((quota + period - 1) / period) : 0;
}

/* The first of the processors that share a core with this one, by a list such as "0,64" or "0-1"; -1 without one. */
static int first_sibling(const char *folder, int cpu)
{
    static const char *const lists[] = { "core_cpus_list", "thread_siblings_list" }; /* the second before Linux 5.3 */
    char name[64];
    long long first = -1;
    for (size_t i = 0; i < sizeof lists / sizeof *lists && first < 0; i++) {
        snprintf(name, sizeof name, "cpu%d/topology/%s", cpu, lists[i]);
        first = read_number(folder, name, -1);
    }
    return first <= cpu ? (int)first : -1; /* else the list lacks this processor */
}

int lazy_count_cores(const char *folder, const bool *usable, int n)
{
    bool counted[CPU_SETSIZE] = { false }; /* by a core's first processor, usable or not */
    int cpus = 0, cores = 0;
    bool known = n <= CPU_SETSIZE;
    for (int cpu = 0; cpu < n; cpu++) {
        if (!usable[cpu]) continue;
        cpus++;
        int first = known ? first_sibling(folder, cpu) : -1;
        known = first >= 0;
        if (!known) continue;
        cores += !counted[first];
        counted[first] = true;
    }
    return known ? cores : cpus;
}

int lazy_cpu_cores(void)
{
    cpu_set_t set;
    bool usable[CPU_SETSIZE];
    int cores = (int)sysconf(_SC_NPROCESSORS_ONLN);
    if (sched_getaffinity(0, sizeof set, &set) == 0) {
        for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) usable[cpu] = CPU_ISSET(cpu, &set);
        cores = lazy_count_cores("/sys/devices/system/cpu", usable, CPU_SETSIZE);
    }
    int limit = lazy_cgroup_cores("/sys/fs/cgroup");
    if (limit && limit < cores) cores = limit;
    return cores < 1 ? 1 : cores;
}
