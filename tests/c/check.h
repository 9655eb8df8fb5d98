/* check.h — for tests in C and C++: counts what holds and prints what does not, random numbers, the error of values. */
#pragma once

#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

__attribute__((weak)) int passed, failed; /* of all files of a program, and all its threads */

/* Describes the current test; printed with each failure. */
static __thread char subject[600];

__attribute__((format(printf, 1, 2))) static inline void now(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(subject, sizeof subject, format, args);
    va_end(args);
}

__attribute__((format(printf, 2, 3))) static inline void check(bool good, const char *format, ...)
{
    __atomic_fetch_add(good ? &passed : &failed, 1, __ATOMIC_RELAXED);
    if (good) return;
    char text[600];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    printf("FAILED %s%s%s\n", subject, *subject ? ": " : "", text);
}

/* The last line of a test program, and its exit status. */
static inline int checked(void)
{
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}

/* ---- random numbers --------------------------------------------------------------------- */

__attribute__((weak)) uint64_t seed = 1;

static inline uint32_t random_bits(void)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 32);
}

static inline int random_int(int low, int high) { return low + (int)(random_bits() % (uint32_t)(high - low + 1)); }
static inline float random_float(void) { return (float)((double)random_bits() / 2147483648.0 - 1.0); }

/* ---- errors ----------------------------------------------------------------------------- */

/* Largest difference, divided by the largest value, or by min_scale if that is greater; infinite if there is a NaN. */
static inline double error_above(double min_scale, const float *got, const float *want, size_t n)
{
    double worst = 0, largest = min_scale;
    for (size_t i = 0; i < n; i++) {
        if (isnan(got[i]) || isnan(want[i])) return INFINITY;
        worst = fmax(worst, fabs((double)got[i] - want[i]));
        largest = fmax(largest, fabs(want[i]));
    }
    return worst / largest;
}
