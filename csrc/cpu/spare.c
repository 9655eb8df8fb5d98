/* spare.c — memory that sessions have freed, kept for the next ones: getting a new page takes the system longer than
 * most passes take to fill it. */
#include "spare.h"

#include <malloc.h>

#include "../memory.h"

/* Smaller blocks malloc keeps itself. */
enum { LEAST_BYTES = 128 << 10 };

/* Nobody waits for the lock: a child process may have been forked while it was held. */
static bool locked(lazy_spare *spare) { return !atomic_flag_test_and_set_explicit(&spare->lock, memory_order_acquire); }
static void unlock(lazy_spare *spare) { atomic_flag_clear_explicit(&spare->lock, memory_order_release); }

static void *take(lazy_spare *spare, int i)
{
    void *memory = spare->blocks[i];
    spare->bytes -= malloc_usable_size(memory);
    for (spare->n--; i < spare->n; i++) spare->blocks[i] = spare->blocks[i + 1];
    return memory;
}

void *lazy_spare_take(lazy_spare *spare, size_t bytes)
{
    if (bytes < LEAST_BYTES || !locked(spare)) return NULL;
    int best = -1;
    for (int i = 0; i < spare->n; i++) {
        size_t size = malloc_usable_size(spare->blocks[i]);
        if (size >= bytes && size <= 2 * bytes && (best < 0 || size < malloc_usable_size(spare->blocks[best])))
            best = i;
    }
    void *memory = best < 0 ? NULL : take(spare, best);
    unlock(spare);
    if (memory) lazy_use_huge_pages(memory, bytes); /* it may have been sparse */
    return memory;
}

void lazy_spare_keep(lazy_spare *spare, void *memory)
{
    size_t bytes = memory ? malloc_usable_size(memory) : 0;
    if (bytes < LEAST_BYTES || bytes > LAZY_SPARE_BYTES || !locked(spare)) {
        lazy_free(memory);
        return;
    }
    while (spare->n == LAZY_SPARE_BLOCKS || spare->bytes + bytes > LAZY_SPARE_BYTES) lazy_free(take(spare, 0));
    spare->blocks[spare->n++] = memory;
    spare->bytes += bytes;
    unlock(spare);
}

bool lazy_spare_empty(lazy_spare *spare)
{
    if (!locked(spare)) return false;
    const bool some = spare->n > 0;
    while (spare->n) lazy_free(take(spare, 0));
    unlock(spare);
    return some;
}
