#include "memory.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "error.h"

enum { ALIGNMENT = 64, HUGE_PAGE = 2 * 1024 * 1024, LARGE = 2 * HUGE_PAGE };

int lazy_alloc_bytes(void **out, size_t count, size_t size, const void *from, const char *what, lazy_error *err)
{
    *out = NULL;
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes) || bytes > SIZE_MAX - ALIGNMENT)
        return lazy_fail(err, LAZY_MEMORY, "%s: %zu items of %zu bytes are more than can be addressed", what, count,
                         size);
    size_t alignment = bytes < LARGE ? ALIGNMENT : HUGE_PAGE, copied = bytes;
    bytes = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (bytes == 0) bytes = ALIGNMENT;
    if (posix_memalign(out, alignment, bytes)) *out = NULL;
    if (!*out) return lazy_fail(err, LAZY_MEMORY, "%s: could not get %zu bytes", what, bytes);
    if (bytes >= LARGE) lazy_use_huge_pages(*out, bytes);
    if (from && copied) memcpy(*out, from, copied);
    return LAZY_OK;
}

int lazy_alloc_zeroed_bytes(void **out, size_t count, size_t size, const char *what, lazy_error *err)
{
    int code = lazy_alloc_bytes(out, count, size, NULL, what, err);
    if (code == LAZY_OK) memset(*out, 0, count * size);
    return code;
}

void lazy_free(void *memory) { free(memory); }

void lazy_use_huge_pages(void *memory, size_t bytes)
{
    madvise(memory, bytes, MADV_HUGEPAGE); /* may fail: small pages do as well */
}

void lazy_use_small_pages(void *memory, size_t bytes)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = ((uintptr_t)memory + page - 1) / page * page;
    uintptr_t end = ((uintptr_t)memory + bytes) / page * page;
    madvise((void *)begin, end - begin, MADV_NOHUGEPAGE); /* may fail: huge pages do, too */
    madvise((void *)begin, end - begin, MADV_DONTNEED);   /* pages may have been written before */
}
