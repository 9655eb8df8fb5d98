#include "mapping.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "error.h"
#include "memory.h"

/* ---- reading where a file has been cut short -------------------------------------------- */

/* Used again, never freed: a handler may look at any time. No lock: a process may fork while a thread maps a file. */
typedef struct lazy_mapped {
    atomic_uintptr_t begin; /* 0: free; UINTPTR_MAX: taken, and not filled yet */
    size_t bytes;
    atomic_bool lost; /* zeros have taken the place of a part of the file */
    struct lazy_mapped *next;
} lazy_mapped;

static _Atomic(lazy_mapped *) all_mapped;
static struct sigaction before;
static uintptr_t page_bytes;

/* Puts zeros from the address on, if it is in a mapping. Allowed in a signal handler: mmap is a plain system call. */
static bool put_zeros(uintptr_t address)
{
    for (lazy_mapped *m = atomic_load(&all_mapped); m; m = m->next) {
        uintptr_t begin = atomic_load(&m->begin), page = address / page_bytes * page_bytes;
        if (!begin || address < begin || address - begin >= m->bytes) continue;
        atomic_store(&m->lost, true);
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
        return mmap((void *)page, begin + m->bytes - page, PROT_READ, flags, -1, 0) != MAP_FAILED;
    }
    return false;
}

static void handle_bus_error(int number, siginfo_t *info, void *context)
{
    int error = errno;
    bool by_access = info->si_code > 0; /* not sent by a program */
    if (by_access && put_zeros((uintptr_t)info->si_addr)) {
        errno = error;
        return;
    }
    if (before.sa_flags & SA_SIGINFO) {
        before.sa_sigaction(number, info, context);
    } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
        before.sa_handler(number);
    } else {
        sigaction(SIGBUS, &before, NULL); /* the access, tried again, ends the process */
        if (!by_access) raise(number);
    }
}

static void install_handler(void)
{
    page_bytes = (uintptr_t)sysconf(_SC_PAGESIZE);
    struct sigaction action = { .sa_sigaction = handle_bus_error, .sa_flags = SA_SIGINFO | SA_ONSTACK };
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, &before);
}

static int announce(lazy_mapping *mapping, lazy_error *err)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, install_handler);
    lazy_mapped *m = atomic_load(&all_mapped);
    while (m && !atomic_compare_exchange_strong(&m->begin, &(uintptr_t){ 0 }, UINTPTR_MAX)) m = m->next;
    if (!m) {
        int code = lazy_alloc_zeroed(&m, 1, "the list of mappings", err);
        if (code) return code;
        atomic_init(&m->begin, UINTPTR_MAX);
        m->next = atomic_load(&all_mapped);
        while (!atomic_compare_exchange_weak(&all_mapped, &m->next, m)) continue;
    }
    m->bytes = mapping->bytes;
    atomic_store(&m->lost, false);
    atomic_store(&m->begin, (uintptr_t)mapping->data);
    mapping->mapped = m;
    return LAZY_OK;
}

/* ---- mappings --------------------------------------------------------------------------- */

int lazy_mapping_open(lazy_mapping *mapping, const char *path, lazy_error *err)
{
    int file = open(path, O_RDONLY | O_CLOEXEC), code = LAZY_OK;
    struct stat info;
    void *data = MAP_FAILED;
    if (file < 0 || fstat(file, &info)) code = lazy_fail(err, LAZY_IO, "%s: %s", path, strerror(errno));
    else if (info.st_size <= 0) code = lazy_fail(err, LAZY_CHECKPOINT, "%s: the file is empty", path);
    else if ((data = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, file, 0)) == MAP_FAILED)
        code = lazy_fail(err, LAZY_IO, "%s: %s", path, strerror(errno));
    else lazy_use_huge_pages(data, (size_t)info.st_size); /* where the file system reads files into such pages */
    if (code) {
        if (file >= 0) close(file);
        return code;
    }
    *mapping = (lazy_mapping){ .data = data, .bytes = (uint64_t)info.st_size, .file = file, .modified = info.st_mtim };
    code = lazy_alloc_copy(&mapping->path, path, strlen(path) + 1, "a path", err);
    if (!code) code = announce(mapping, err);
    if (code) lazy_mapping_close(mapping);
    return code;
}

void lazy_mapping_close(lazy_mapping *mapping)
{
    if (!mapping->data) return;
    if (mapping->mapped) atomic_store(&mapping->mapped->begin, 0);
    munmap((void *)mapping->data, mapping->bytes);
    close(mapping->file);
    lazy_free(mapping->path);
    *mapping = (lazy_mapping){ 0 };
}

int lazy_mapping_check(const lazy_mapping *mapping, lazy_error *err)
{
    struct stat info;
    bool changed = atomic_load(&mapping->mapped->lost);
    if (!fstat(mapping->file, &info))
        changed |= (uint64_t)info.st_size != mapping->bytes || info.st_mtim.tv_sec != mapping->modified.tv_sec ||
                   info.st_mtim.tv_nsec != mapping->modified.tv_nsec;
    if (!changed) return LAZY_OK;
    return lazy_fail(err, LAZY_IO, "%s was changed or could not be read while it was in use; load the model again",
                     mapping->path);
}
