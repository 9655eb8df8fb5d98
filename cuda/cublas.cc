#include "cublas.h"

#include <dlfcn.h>
#include <mutex>
#include <stdlib.h>
#include <string>
#include <unistd.h>

extern "C" {
#include "../csrc/error.h"
}

namespace
{
const char *const SONAMES[] = { "libcublasLt.so.13", "libcublasLt.so.12" };
const size_t OLDEST = 120000;

std::string version_text(size_t version)
{
    return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100);
}

/* Fills the table from a library; returns why that is impossible, or "". */
std::string load(lazy_cublas *table, const char *file, int flags = 0)
{
    void *library = dlopen(file, RTLD_NOW | RTLD_LOCAL | flags);
    const char *reason = dlerror(); /* always read, so that a later dlerror() does not report it */
    if (!library) return reason ? reason : "no reason given";
#define LOOK_UP(result, member, symbol, parameters)                                                                    \
    table->member = reinterpret_cast<decltype(table->member)>(dlsym(library, #symbol));                                \
    if (!table->member) return "it has no " #symbol;
    LAZY_CUBLAS_FUNCTIONS(LOOK_UP)
#undef LOOK_UP
    table->version = table->get_version();
    std::string it_is = "it is version " + version_text(table->version);
    if (table->version < OLDEST) return it_is + ", and at least 12.0 is needed";
    int driver = 0;
    cudaDriverGetVersion(&driver);
    if (driver && table->version / 10000 > (size_t)driver / 1000)
        return it_is + ", and the driver is for CUDA " + std::to_string(driver / 1000) + "." +
               std::to_string(driver % 1000 / 10);
    Dl_info found;
    table->file = dladdr(reinterpret_cast<void *>(table->create), &found) && found.dli_fname ? found.dli_fname : "";
    return "";
}

bool find(lazy_cublas *table, const char *const *places, int n_places, lazy_error *err)
{
    std::string unusable, searched;
    if (const char *file = getenv("LAZYLLM_CUBLAS"); file && *file) {
        std::string trouble = load(table, file);
        if (trouble.empty()) return true;
        lazy_fail(err, LAZY_DEVICE,
                  "LAZYLLM_CUBLAS=%s: %s; set it to the full path of a libcublasLt.so.13 or .12, or unset it", file,
                  trouble.c_str());
        return false;
    }
    /* ignores a missing file, and records the first existing file that cannot be used */
    auto try_place = [&](const std::string &file) {
        std::string trouble = load(table, file.c_str());
        if (!trouble.empty() && unusable.empty() && access(file.c_str(), F_OK) == 0)
            unusable = " " + file + " cannot be used: " + trouble.substr(0, 100) + ".";
        return trouble.empty();
    };
    for (const char *soname : SONAMES)
        if (load(table, soname, RTLD_NOLOAD).empty()) return true;
    for (int i = 0; i < n_places; i++) {
        if (try_place(places[i])) return true;
        searched += std::string(places[i]) + ", ";
    }
    for (const char *soname : SONAMES)
        if (load(table, soname).empty()) return true;
    const char *home = getenv("CUDA_HOME");
    for (const char *soname : SONAMES)
        if (home && *home && try_place(std::string(home) + "/lib64/" + soname)) return true;
    lazy_fail(err, LAZY_DEVICE,
              "cuBLAS was not found: `pip install nvidia-cublas` (nvidia-cublas-cu12 for a driver older than 580), or "
              "set LAZYLLM_CUBLAS to the full path of libcublasLt.so.13 or .12.%.280s "
              "Looked for one already loaded, %.280sthe loader's, CUDA_HOME (%s)",
              unusable.c_str(), searched.c_str(), home && *home ? home : "not set");
    return false;
}
} // namespace

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
