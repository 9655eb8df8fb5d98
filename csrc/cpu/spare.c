/* spare.c — blocks of memory for sessions. Those of up to 4 MiB lie side by side in larger mappings, so that the system
 * can give them huge pages: a TLB miss can take longer than reading the row behind it. Those of a session that ends are
 * kept, because getting a new page takes the system longer than most passes take to fill it. */
#define _GNU_SOURCE
#include "spare.h"

#include <sys/mman.h>
#include <unistd.h>

#include "../memory.h"

enum {
    LEAST_KEPT = 128 << 10,
    REGION = 32 << 20,
    LARGEST_OF_REGION = 4 << 20, /* larger ones have huge pages by themselves */
    HEADER = 64,                 /* bytes in front of a block */
};

typedef struct header {
    size_t bytes; /* with the header; 0: too few to be kept */
    bool sparse, mapped;
} header;

static header *header_of(void *block) { return (header *)((char *)block - HEADER); }

/* Nobody waits for the lock: a child process may have been forked while it was held. */
static bool locked(lazy_spare *spare) { return !atomic_flag_test_and_set_explicit(&spare->lock, memory_order_acquire); }
static void unlock(lazy_spare *spare) { atomic_flag_clear_explicit(&spare->lock, memory_order_release); }

/* All pages of a mapping are of one kind from the beginning: neighbours of one kind count as one mapping, of which a
 * process may have 65,530, and the system gives a huge page only where the mapping has all of it. */
static void *map(size_t bytes, bool sparse)
{
    void *pages = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) return NULL;
    if (sparse) lazy_use_small_pages(pages, bytes);
    else lazy_use_huge_pages(pages, bytes);
    return pages;
}

static void drop(lazy_region *region)
{
    if (region->bytes) munmap(region->pages, region->bytes);
    region->bytes = 0;
}

/* The next pages of a region; NULL if there are none. */
static void *take_pages(lazy_spare *spare, size_t bytes, bool sparse)
{
    if (!locked(spare)) return NULL;
    lazy_region *region = &spare->regions[sparse];
    if (bytes > region->bytes) {
        drop(region);
        region->pages = map(REGION, sparse);
        region->bytes = region->pages ? REGION : 0;
    }
    void *pages = region->pages;
    if (pages) {
        region->pages += bytes;
        region->bytes -= bytes;
    }
    unlock(spare);
    return pages;
}

static void *take(lazy_spare *spare, int i)
{
    void *block = spare->blocks[i];
    spare->bytes -= header_of(block)->bytes;
    for (spare->n--; i < spare->n; i++) spare->blocks[i] = spare->blocks[i + 1];
    return block;
}

/* A kept block of this kind and so many bytes with its header, or up to twice as many. */
static void *find_kept(lazy_spare *spare, size_t bytes, bool sparse)
{
    if (!locked(spare)) return NULL;
    int best = -1;
    size_t least = 2 * bytes + 1;
    for (int i = 0; i < spare->n; i++) {
        const header *h = header_of(spare->blocks[i]);
        if (h->sparse != sparse || h->bytes < bytes || h->bytes >= least) continue;
        best = i;
        least = h->bytes;
    }
    void *block = best < 0 ? NULL : take(spare, best);
    unlock(spare);
    return block;
}

static void *map_block(lazy_spare *spare, size_t bytes, bool sparse)
{
    header *h = NULL;
    if (bytes <= LARGEST_OF_REGION) h = take_pages(spare, bytes, sparse);
    else if (sparse) h = map(bytes, true);
    if (!h) return NULL;
    *h = (header){ bytes, sparse, true };
    return (char *)h + HEADER;
}

int lazy_spare_alloc(lazy_spare *spare, void **out, size_t bytes, bool sparse, const char *what, lazy_error *err)
{
    *out = NULL;
    if (!LAZY_SPARE_BYTES || bytes > SIZE_MAX / 4) return lazy_alloc_bytes(out, bytes, 1, NULL, what, err);
    if (bytes >= LEAST_KEPT) {
        const size_t page = (size_t)sysconf(_SC_PAGESIZE), whole = (bytes + HEADER + page - 1) / page * page;
        *out = find_kept(spare, whole, sparse);
        if (!*out) *out = map_block(spare, whole, sparse);
        if (*out) return LAZY_OK;
    }
    header *h;
    int code = lazy_alloc_bytes((void **)&h, bytes + HEADER, 1, NULL, what, err);
    if (code && lazy_spare_empty(spare)) code = lazy_alloc_bytes((void **)&h, bytes + HEADER, 1, NULL, what, err);
    if (code) return code;
    *h = (header){ .bytes = bytes > LARGEST_OF_REGION ? bytes + HEADER : 0 };
    *out = (char *)h + HEADER;
    return LAZY_OK;
}

void lazy_spare_free(void *block)
{
    if (!LAZY_SPARE_BYTES || !block) {
        lazy_free(block);
        return;
    }
    header *h = header_of(block);
    if (h->mapped) munmap(h, h->bytes);
    else lazy_free(h);
}

void lazy_spare_keep(lazy_spare *spare, void *block)
{
    const size_t bytes = LAZY_SPARE_BYTES && block ? header_of(block)->bytes : 0;
    if (!bytes || bytes > LAZY_SPARE_BYTES || !locked(spare)) {
        lazy_spare_free(block);
        return;
    }
    while (spare->n == LAZY_SPARE_BLOCKS || spare->bytes + bytes > LAZY_SPARE_BYTES) lazy_spare_free(take(spare, 0));
    spare->blocks[spare->n++] = block;
    spare->bytes += bytes;
    unlock(spare);
}

bool lazy_spare_empty(lazy_spare *spare)
{
    if (!locked(spare)) return false;
    const bool some = spare->n > 0;
    while (spare->n) lazy_spare_free(take(spare, 0));
    drop(&spare->regions[false]);
    drop(&spare->regions[true]);
    unlock(spare);
    return some;
}
