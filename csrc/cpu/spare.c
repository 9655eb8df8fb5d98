/* spare.c — blocks of memory for sessions. Large ones are mapped, so that the system can give huge pages to those that
 * lie side by side: a TLB miss can take longer than reading the row behind it. Freed ones are kept, because getting
 * a new page takes the system longer than most passes take to fill it. */
#define _GNU_SOURCE
#include "spare.h"

#include <sys/mman.h>
#include <unistd.h>

#include "../memory.h"

enum {
    LEAST_MAPPED = 128 << 10,
    REGION = 32 << 20,
    LARGEST_OF_REGION = 4 << 20,
    HEADER = 64, /* bytes in front of a block */
};

typedef struct header {
    size_t mapped; /* bytes with the header; 0: it is the allocator's */
    bool kept;     /* from an earlier session */
} header;

static header *header_of(void *block) { return (header *)((char *)block - HEADER); }

/* Nobody waits for the lock: a child process may have been forked while it was held. */
static bool locked(lazy_spare *spare) { return !atomic_flag_test_and_set_explicit(&spare->lock, memory_order_acquire); }
static void unlock(lazy_spare *spare) { atomic_flag_clear_explicit(&spare->lock, memory_order_release); }

static void *map_pages(size_t bytes)
{
    void *pages = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) return NULL;
    lazy_use_huge_pages(pages, bytes);
    return pages;
}

static void drop_region(lazy_spare *spare)
{
    if (spare->region_bytes) munmap(spare->region, spare->region_bytes);
    spare->region_bytes = 0;
}

/* The next pages of a region that is mapped as a whole, since the system gives a huge page only where all of it is. */
static void *take_of_region(lazy_spare *spare, size_t bytes)
{
    if (bytes > LARGEST_OF_REGION || !locked(spare)) return NULL;
    if (bytes > spare->region_bytes) {
        drop_region(spare);
        spare->region = map_pages(REGION);
        spare->region_bytes = spare->region ? REGION : 0;
    }
    void *pages = spare->region;
    if (pages) {
        spare->region += bytes;
        spare->region_bytes -= bytes;
    }
    unlock(spare);
    return pages;
}

static void *map_block(lazy_spare *spare, size_t bytes)
{
    char *base = take_of_region(spare, bytes);
    if (!base) base = map_pages(bytes);
    if (!base) return NULL;
    *(header *)base = (header){ .mapped = bytes };
    return base + HEADER;
}

static void release(void *block)
{
    header *h = header_of(block);
    if (h->mapped) munmap(h, h->mapped);
    else lazy_free(h);
}

static void *take(lazy_spare *spare, int i)
{
    void *block = spare->blocks[i];
    spare->bytes -= header_of(block)->mapped;
    for (spare->n--; i < spare->n; i++) spare->blocks[i] = spare->blocks[i + 1];
    return block;
}

/* A kept block of so many mapped bytes, or up to twice as many. */
static void *find_kept(lazy_spare *spare, size_t bytes)
{
    if (!locked(spare)) return NULL;
    int best = -1;
    size_t least = 2 * bytes + 1;
    for (int i = 0; i < spare->n; i++) {
        size_t mapped = header_of(spare->blocks[i])->mapped;
        if (mapped < bytes || mapped >= least) continue;
        best = i;
        least = mapped;
    }
    void *block = best < 0 ? NULL : take(spare, best);
    unlock(spare);
    if (!block) return NULL;
    header_of(block)->kept = true;
    lazy_use_huge_pages(header_of(block), least); /* it may have been sparse */
    return block;
}

int lazy_spare_alloc(lazy_spare *spare, void **out, size_t bytes, const char *what, lazy_error *err)
{
    *out = NULL;
    if (bytes >= LEAST_MAPPED && bytes <= SIZE_MAX / 4 && LAZY_SPARE_BYTES) {
        const size_t page = (size_t)sysconf(_SC_PAGESIZE), whole = (bytes + HEADER + page - 1) / page * page;
        *out = find_kept(spare, whole);
        if (!*out) *out = map_block(spare, whole);
        if (!*out && lazy_spare_empty(spare)) *out = map_block(spare, whole);
    }
    if (*out) return LAZY_OK;
    char *base;
    int code = lazy_alloc(&base, bytes < SIZE_MAX - HEADER ? bytes + HEADER : bytes, what, err);
    if (code) return code;
    *(header *)base = (header){ 0 };
    *out = base + HEADER;
    return LAZY_OK;
}

void lazy_spare_free(lazy_spare *spare, void *block)
{
    if (!block) return;
    const size_t bytes = header_of(block)->mapped;
    if (!bytes || bytes > LAZY_SPARE_BYTES || !locked(spare)) {
        release(block);
        return;
    }
    while (spare->n == LAZY_SPARE_BLOCKS || spare->bytes + bytes > LAZY_SPARE_BYTES) release(take(spare, 0));
    spare->blocks[spare->n++] = block;
    spare->bytes += bytes;
    unlock(spare);
}

void lazy_spare_expect_sparse(void *block)
{
    const header *h = header_of(block);
    /* getting the pages of a small one again takes longer than they are worth */
    if (h->mapped > (h->kept ? LARGEST_OF_REGION : 0)) lazy_use_small_pages(block, h->mapped - HEADER);
}

bool lazy_spare_empty(lazy_spare *spare)
{
    if (!locked(spare)) return false;
    const bool some = spare->n > 0;
    while (spare->n) release(take(spare, 0));
    drop_region(spare);
    unlock(spare);
    return some;
}
