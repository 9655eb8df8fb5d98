#include "cublas.h"

#include <mutex>

#ifdef LAZY_CUDA_ON_CPU

int lazy_cublas_load(const lazy_cublas **out, const char *const *, int, lazy_error *)
{
    static const lazy_cublas table = { "cuda_on_cpu", cublasLtGetVersion(),
#define ADDRESS(name, symbol) symbol,
                                       LAZY_CUBLAS_FUNCTIONS(ADDRESS)
#undef ADDRESS
    };
    *out = &table;
    return LAZY_OK;
}

#else

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

extern "C" {
#include "../csrc/error.h"
}

static const char *const SONAMES[] = { "libcublasLt.so.13", "libcublasLt.so.12" };
static constexpr size_t OLDEST = 120000;

/* A message of bounded length; append() truncates. */
struct text {
    char words[280];
    size_t length;
};

__attribute__((format(printf, 2, 3))) static void append(text *t, const char *format, ...)
{
    if (t->length >= sizeof t->words - 1) return;
    va_list args;
    va_start(args, format);
    int added = vsnprintf(t->words + t->length, sizeof t->words - t->length, format, args);
    va_end(args);
    if (added > 0) t->length += (size_t)added;
}

/* Fills the table from a loaded library. On failure, appends the reason to `trouble`. */
static bool fill(lazy_cublas *table, void *library, text *trouble)
{
#define LOOK_UP(name, symbol)                                                                                          \
    table->name = reinterpret_cast<decltype(&symbol)>(dlsym(library, #symbol));                                        \
    if (!table->name) {                                                                                                \
        append(trouble, "it has no %s", #symbol);                                                                      \
        return false;                                                                                                  \
    }
    LAZY_CUBLAS_FUNCTIONS(LOOK_UP)
#undef LOOK_UP
    table->version = table->get_version();
    if (table->version < OLDEST) {
        append(trouble, "it is version %zu.%zu, and at least 12.0 is needed", table->version / 10000,
               table->version / 100 % 100);
        return false;
    }
    int driver = 0;
    cudaDriverGetVersion(&driver);
    if (driver && table->version / 10000 > (size_t)driver / 1000) {
        append(trouble, "it is version %zu.%zu, and the driver is for CUDA %d.%d", table->version / 10000,
               table->version / 100 % 100, driver / 1000, driver % 1000 / 10);
        return false;
    }
    Dl_info found;
    table->file = dladdr(reinterpret_cast<void *>(table->create), &found) && found.dli_fname ? found.dli_fname : "";
    return true;
}

static bool try_file(lazy_cublas *table, const char *file, int flags, text *trouble)
{
    void *library = dlopen(file, RTLD_NOW | RTLD_LOCAL | flags);
    if (library) return fill(table, library, trouble);
    const char *reason = dlerror(); /* always read, so that a later dlerror() does not report it */
    append(trouble, "%s", reason ? reason : "no reason given");
    return false;
}

/* Like try_file for one of several candidates: ignores a missing file, and records the first existing file that cannot
 * be used. */
static bool try_place(lazy_cublas *table, const char *file, text *unusable)
{
    text trouble = {};
    if (try_file(table, file, 0, &trouble)) return true;
    if (unusable->length == 0 && access(file, F_OK) == 0)
        append(unusable, " %s cannot be used: %.100s.", file, trouble.words);
    return false;
}

static bool find(lazy_cublas *table, const char *const *places, int n_places, lazy_error *err)
{
    text trouble = {}, unusable = {};
    const char *file = getenv("LAZYLLM_CUBLAS");
    if (file && *file) {
        if (try_file(table, file, 0, &trouble)) return true;
        lazy_fail(err, LAZY_DEVICE,
                  "LAZYLLM_CUBLAS=%s: %s; set it to the full path of a libcublasLt.so.13 or .12, or unset it", file,
                  trouble.words);
        return false;
    }
    for (const char *soname : SONAMES) {
        if (try_file(table, soname, RTLD_NOLOAD, &trouble)) return true;
    }
    for (int i = 0; i < n_places; i++) {
        if (try_place(table, places[i], &unusable)) return true;
    }
    for (const char *soname : SONAMES) {
        if (try_file(table, soname, 0, &trouble)) return true;
    }
    const char *home = getenv("CUDA_HOME");
    if (home && *home) {
        for (const char *soname : SONAMES) {
            char file[4096];
            int length = snprintf(file, sizeof file, "%s/lib64/%s", home, soname);
            if (length > 0 && (size_t)length < sizeof file && try_place(table, file, &unusable)) return true;
        }
    }

    text searched = {};
    for (int i = 0; i < n_places; i++) append(&searched, "%s, ", places[i]);
    lazy_fail(err, LAZY_DEVICE,
              "cuBLAS was not found: `pip install nvidia-cublas` (nvidia-cublas-cu12 for a driver older than 580), or "
              "set LAZYLLM_CUBLAS "
              "to the full path of libcublasLt.so.13 or .12.%s "
              "Looked for one already loaded, %sthe loader's, CUDA_HOME (%s)",
              unusable.words, searched.words, home && *home ? home : "not set");
    return false;
}

int lazy_cublas_load(const lazy_cublas **out, const char *const *places, int n_places, lazy_error *err)
{
    static std::mutex lock;
    static lazy_cublas table;
    static bool loaded;
    std::lock_guard<std::mutex> hold(lock);
    *out = nullptr;
    if (!loaded && !find(&table, places, n_places, err)) return LAZY_DEVICE;
    loaded = true;
    *out = &table;
    return LAZY_OK;
}

#endif
