#include "memory.h"

#include <stdlib.h>
#include <string.h>

#include "error.h"

enum { ALIGNMENT = 64 };

int lazy_alloc(void **out, size_t count, size_t size, const char *what, lazy_error *err)
{
    *out = NULL;
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes) || bytes > SIZE_MAX - ALIGNMENT)
        return lazy_fail(err, LAZY_MEMORY, "%s: %zu items of %zu bytes are more than can be addressed", what, count, size);
    bytes = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (bytes == 0) bytes = ALIGNMENT;
    *out = aligned_alloc(ALIGNMENT, bytes);
    if (!*out) return lazy_fail(err, LAZY_MEMORY, "%s: could not get %zu bytes", what, bytes);
    return LAZY_OK;
}

int lazy_alloc_zeroed(void **out, size_t count, size_t size, const char *what, lazy_error *err)
{
    int code = lazy_alloc(out, count, size, what, err);
    if (code == LAZY_OK) memset(*out, 0, count * size);
    return code;
}

void lazy_free(void *memory) { free(memory); }
