#include "memory.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "error.h"

/* Large blocks ask for huge pages: rows of a cache lie pages apart, and finding a page can cost more than reading the row. */
enum { ALIGNMENT = 64, HUGE_PAGE = 2 * 1024 * 1024 };

int lazy_alloc(void **out, size_t count, size_t size, const char *what, lazy_error *err)
{
    *out = NULL;
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes) || bytes > SIZE_MAX - ALIGNMENT)
        return lazy_fail(err, LAZY_MEMORY, "%s: %zu items of %zu bytes are more than can be addressed", what, count, size);
    size_t alignment = bytes < 2 * HUGE_PAGE ? ALIGNMENT : HUGE_PAGE;
    bytes = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (bytes == 0) bytes = ALIGNMENT;
    if (posix_memalign(out, alignment, bytes)) *out = NULL;
    if (!*out) return lazy_fail(err, LAZY_MEMORY, "%s: could not get %zu bytes", what, bytes);
    if (alignment == HUGE_PAGE) madvise(*out, bytes, MADV_HUGEPAGE); /* a wish: refused, nothing is lost */
    return LAZY_OK;
}

int lazy_alloc_zeroed(void **out, size_t count, size_t size, const char *what, lazy_error *err)
{
    int code = lazy_alloc(out, count, size, what, err);
    if (code == LAZY_OK) memset(*out, 0, count * size);
    return code;
}

void lazy_free(void *memory) { free(memory); }
