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

enum { MAX_VARIANTS = 4 };

#if defined(__x86_64__)
/* clang 14 does not take "f16c" in __builtin_cpu_supports. */
static bool has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C;
}
#endif

static bool runs(const lazy_products *products)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    if (products->formats[LAZY_Q4_0] || products == &lazy_products_avx512_int8) return avx512 && __builtin_cpu_supports("avx512vnni");
    if (products == &lazy_kernels_avx512_bf16.products) return avx512 && __builtin_cpu_supports("avx512bf16");
    if (products == &lazy_kernels_avx512.products) return avx512;
    if (products == &lazy_kernels_avx2.products) return avx2;
#endif
    return strcmp(products->isa, "generic") == 0;
}

/* The best first. */
static const lazy_kernels *const all_kernels[] = {
#if defined(__x86_64__)
    &lazy_kernels_avx512_bf16,
    &lazy_kernels_avx512,
    &lazy_kernels_avx2,
#endif
    &lazy_kernels_generic,
};

static lazy_compute compute_of(const lazy_kernels *kernels) { return kernels->products.group == 2 ? LAZY_COMPUTE_BF16 : LAZY_COMPUTE_F32; }

static bool is_wanted(const lazy_products *products, const char *isa)
{
    return (!isa || strcmp(isa, products->isa) == 0) && runs(products);
}

const lazy_kernels *lazy_kernels_find(const char *isa, lazy_compute compute)
{
    lazy_format_prepare();
    if (compute == LAZY_COMPUTE_INT8) {
        if (!lazy_products_find(isa, compute)) return NULL;
        const lazy_kernels *bf16 = lazy_kernels_find(isa, LAZY_COMPUTE_BF16);
        return bf16 ? bf16 : lazy_kernels_find(isa, LAZY_COMPUTE_F32);
    }
    for (size_t i = 0; i < sizeof all_kernels / sizeof *all_kernels; i++)
        if (compute_of(all_kernels[i]) == compute && is_wanted(&all_kernels[i]->products, isa)) return all_kernels[i];
    return NULL;
}

const lazy_products *lazy_products_find(const char *isa, lazy_compute compute)
{
    lazy_format_prepare();
    if (compute != LAZY_COMPUTE_INT8) {
        const lazy_kernels *kernels = lazy_kernels_find(isa, compute);
        return kernels ? &kernels->products : NULL;
    }
#if defined(__x86_64__)
    if (is_wanted(&lazy_products_avx512_int8, isa)) return &lazy_products_avx512_int8;
#endif
    return NULL;
}

const lazy_products *lazy_fixed_products_find(const char *isa, lazy_compute compute)
{
#if defined(__x86_64__)
    static const lazy_products *const fixed[] = {
        [LAZY_COMPUTE_F32] = &lazy_products_avx512_fixed24,
        [LAZY_COMPUTE_BF16] = &lazy_products_avx512_fixed16,
        [LAZY_COMPUTE_INT8] = &lazy_products_avx512_fixed8,
    };
    if (strcmp(isa, fixed[compute]->isa) == 0 && runs(fixed[compute])) return fixed[compute];
#endif
    (void)isa, (void)compute;
    return NULL;
}

const char *const *lazy_cpu_variants(void)
{
    static const char *names[MAX_VARIANTS + 1];
    int n = 0;
    for (size_t i = 0; i < sizeof all_kernels / sizeof *all_kernels; i++)
        if (compute_of(all_kernels[i]) == LAZY_COMPUTE_F32 && runs(&all_kernels[i]->products)) names[n++] = all_kernels[i]->products.isa;
    return names;
}

static FILE *open_in(const char *folder, const char *name)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return fopen(path, "re");
}

/* The number at the beginning of a file; 0 where there is none. */
static long long read_number(const char *folder, const char *name)
{
    long long number = 0;
    FILE *file = open_in(folder, name);
    if (!file) return 0;
    if (fscanf(file, "%lld", &number) != 1) number = 0;
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
        quota = read_number(folder, "cpu/cpu.cfs_quota_us");
        period = read_number(folder, "cpu/cpu.cfs_period_us");
    }
    return quota > 0 && period > 0 ? (int)((quota + period - 1) / period) : 0;
}

/* Sets list[0 … n-1] to the processors of a list such as "0,64" or "0-1,4" in a file; false if it has no such list. */
static bool read_cpu_list(const char *path, bool *list, int n)
{
    memset(list, 0, (size_t)n * sizeof *list);
    FILE *file = fopen(path, "re");
    if (!file) return false;
    int first, last, found = 0;
    for (int end = ','; end == ',' && fscanf(file, "%d", &first) == 1; found++) {
        last = first;
        end = fgetc(file);
        if (end == '-') {
            if (fscanf(file, "%d", &last) != 1) break;
            end = fgetc(file);
        }
        for (int cpu = first < 0 ? 0 : first; cpu <= last && cpu < n; cpu++) list[cpu] = true;
    }
    fclose(file);
    return found > 0;
}

/* The processors that share a core with this one. */
static bool read_siblings(const char *folder, int cpu, bool *siblings, int n)
{
    static const char *const names[] = { "core_cpus_list", "thread_siblings_list" }; /* the second before Linux 5.3 */
    char path[512];
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        snprintf(path, sizeof path, "%s/cpu%d/topology/%s", folder, cpu, names[i]);
        if (read_cpu_list(path, siblings, n) && siblings[cpu]) return true;
    }
    return false;
}

int lazy_count_cores(const char *folder, const bool *usable, int n)
{
    bool siblings[CPU_SETSIZE];
    int cpus = 0, cores = 0;
    bool known = n <= CPU_SETSIZE;
    for (int cpu = 0; cpu < n; cpu++) {
        if (!usable[cpu]) continue;
        cpus++;
        known = known && read_siblings(folder, cpu, siblings, n);
        int first = 0; /* the usable processor that stands for the core */
        while (known && !(usable[first] && siblings[first])) first++;
        cores += first == cpu;
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
