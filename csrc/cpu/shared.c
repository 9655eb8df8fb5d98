/* shared.c — memory that a session shares with its forks, page by page.
 *
 * It is a file that lies in memory. The session that opens it is its owner and writes into the file. A fork maps parts
 * of the file privately: it sees the file's page until it writes there, when the system copies that page for it alone.
 * The rest of the fork's memory is not the file's, because the system puts an empty page into a file where a private
 * mapping of it is written first. So a fork costs two mappings a part, and memory only for the pages that it writes.
 * The file ends with its last mapping. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "../error.h"
#include "../memory.h"
#include "cpu.h"

typedef struct memory_file {
    int fd;
    size_t bytes;
    atomic_int n_mappings; /* of this process */
    atomic_bool foreign;   /* mapped in another process too, for ever: nobody tells when that one ends */
} memory_file;

typedef struct mapping {
    lazy_shared base;
    memory_file *file;
    int n_parts;          /* of the file, mapped one by one */
    struct mapping *next; /* in the list of owners */
} mapping;

/* A child process must not write into its parent's files: fork() makes all owners' mappings private in the child. */
static pthread_mutex_t owners_lock = PTHREAD_MUTEX_INITIALIZER; /* of the list, and of every `owner` */
static mapping *owners;
enum { MOST_PARTS = 1 << 14 }; /* of all forks: Linux allows a process 65,530 mappings */
static atomic_int n_parts;
static pthread_once_t handlers_once = PTHREAD_ONCE_INIT;
static int handlers_failed;

static void unlist_owner(mapping *m)
{
    mapping **at = &owners;
    while (*at && *at != m) at = &(*at)->next;
    if (*at) *at = m->next;
    m->base.owner = false;
}

/* Maps the file at m->base.data, or anywhere if that is NULL. sharing: MAP_SHARED or MAP_PRIVATE */
static bool map_file(mapping *m, int sharing)
{
    const int flags = sharing | MAP_NORESERVE | (m->base.data ? MAP_FIXED : 0);
    void *data = mmap(m->base.data, m->file->bytes, PROT_READ | PROT_WRITE, flags, m->file->fd, 0);
    if (data == MAP_FAILED) return false;
    m->base.data = data;
    lazy_use_small_pages(data, m->file->bytes); /* with huge ones a single row would take two megabytes */
    return true;
}

/* Maps the parts of the file, and empty memory of its size around them; the whole file if there are too many parts. */
static bool map_parts(mapping *m, const lazy_stretch *parts, int n)
{
    const int access = PROT_READ | PROT_WRITE, flags = MAP_PRIVATE | MAP_NORESERVE;
    m->n_parts = n;
    if (atomic_fetch_add(&n_parts, n) + n > MOST_PARTS) return map_file(m, MAP_PRIVATE);
    char *data = mmap(NULL, m->file->bytes, access, flags | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) return false;
    m->base.data = data;
    lazy_use_small_pages(data, m->file->bytes);
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    for (const lazy_stretch *part = parts; part < parts + n; part++) {
        size_t begin = part->begin / page * page;
        if (begin < part->end &&
            mmap(data + begin, part->end - begin, access, flags | MAP_FIXED, m->file->fd, (off_t)begin) == MAP_FAILED)
            return false;
    }
    return true;
}

static void before_fork(void)
{
    pthread_mutex_lock(&owners_lock);
    for (mapping *m = owners; m; m = m->next) atomic_store(&m->file->foreign, true);
}

static void after_fork(void) { pthread_mutex_unlock(&owners_lock); }

static void after_fork_in_child(void)
{
    while (owners) {
        if (!map_file(owners, MAP_PRIVATE)) abort(); /* else a pass in the child would change the parent's session */
        unlist_owner(owners);
    }
    pthread_mutex_unlock(&owners_lock);
}

static void install_handlers(void) { handlers_failed = pthread_atfork(before_fork, after_fork, after_fork_in_child); }

/* An unnamed file in memory, which takes room where it is written: its descriptor, or -1 and errno. */
static int create_file(size_t bytes)
{
    struct rlimit most;
    if (getrlimit(RLIMIT_FSIZE, &most) == 0 && bytes > most.rlim_cur) { /* beyond it a signal would end the process */
        errno = EFBIG;
        return -1;
    }
    int fd = memfd_create("lazyllm", MFD_CLOEXEC);
    if (fd < 0 || !ftruncate(fd, (off_t)bytes)) return fd;
    int reason = errno;
    close(fd);
    errno = reason;
    return -1;
}

static int refuse_bytes(size_t bytes, lazy_error *err)
{
    return lazy_fail(err, LAZY_MEMORY, "shared memory: could not get %zu bytes: %s", bytes, strerror(errno));
}

void lazy_cpu_shared_close(lazy_shared *shared)
{
    if (!shared) return;
    mapping *m = (mapping *)shared;
    pthread_mutex_lock(&owners_lock);
    unlist_owner(m);
    pthread_mutex_unlock(&owners_lock);
    if (m->base.data) munmap(m->base.data, m->file->bytes);
    atomic_fetch_sub(&n_parts, m->n_parts);
    if (m->file && atomic_fetch_sub(&m->file->n_mappings, 1) == 1) {
        if (m->file->fd >= 0) close(m->file->fd);
        lazy_free(m->file);
    }
    lazy_free(m);
}

int lazy_cpu_shared_open(lazy_backend *backend, lazy_shared **out, size_t bytes, lazy_error *err)
{
    mapping *m;
    *out = NULL;
    pthread_once(&handlers_once, install_handlers);
    if (handlers_failed) return lazy_fail(err, LAZY_MEMORY, "shared memory: %s", strerror(handlers_failed));
    int code = lazy_alloc_zeroed(&m, 1, "a mapping", err);
    if (code) return code;
    code = lazy_alloc_zeroed(&m->file, 1, "a mapping", err);
    if (!code) {
        *m->file = (memory_file){ .fd = create_file(bytes), .bytes = bytes, .n_mappings = 1 };
        if (m->file->fd < 0 || !map_file(m, MAP_SHARED)) code = refuse_bytes(bytes, err);
    }
    if (code) {
        lazy_cpu_shared_close(&m->base);
        return code;
    }
    m->base.owner = true;
    pthread_mutex_lock(&owners_lock);
    m->next = owners;
    owners = m;
    pthread_mutex_unlock(&owners_lock);
    *out = &m->base;
    return LAZY_OK;
}

int lazy_cpu_shared_join(lazy_shared **out, const lazy_shared *from, const lazy_stretch *parts, int n, lazy_error *err)
{
    mapping *m;
    *out = NULL;
    int code = lazy_alloc_zeroed(&m, 1, "a mapping", err);
    if (code) return code;
    m->file = ((const mapping *)from)->file;
    atomic_fetch_add(&m->file->n_mappings, 1);
    if (map_parts(m, parts, n)) *out = &m->base;
    else {
        code = refuse_bytes(m->file->bytes, err);
        lazy_cpu_shared_close(&m->base);
    }
    return code;
}

int lazy_cpu_shared_leave(lazy_shared *shared, lazy_error *err)
{
    mapping *m = (mapping *)shared;
    if (!shared->owner || (atomic_load(&m->file->n_mappings) == 1 && !atomic_load(&m->file->foreign))) return LAZY_OK;
    pthread_mutex_lock(&owners_lock);
    bool mapped = map_file(m, MAP_PRIVATE);
    int reason = errno;
    if (mapped) unlist_owner(m);
    pthread_mutex_unlock(&owners_lock);
    return mapped ? LAZY_OK
                  : lazy_fail(err, LAZY_MEMORY, "shared memory: could not map it privately: %s", strerror(reason));
}
