/* numeric.h — small functions that several files need. */
#pragma once

#include <stdint.h>
#include <time.h>

static inline int min_int(int a, int b) { return a < b ? a : b; }
static inline int max_int(int a, int b) { return a > b ? a : b; }
static inline int clamp_int(int x, int low, int high) { return x < low ? low : x > high ? high : x; }
static inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

/* The end of block i of n items, `size` items a block. */
static inline int block_end(int i, int size, int n) { return min_int((i + 1) * size, n); }

/* The size of the first of the fewest parts, equal within one, of at most `most` each. 1025, 1024 -> 513 */
static inline int even_part(int n, int most) { return ceil_div(n, ceil_div(n, most)); }

/* Nanoseconds of the monotonic clock. */
static inline int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * (int64_t)1000000000 + t.tv_nsec;
}
