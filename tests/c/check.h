/* check.h — counts what holds and what does not, and prints what does not. */
#pragma once

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>

__attribute__((weak)) int passed, failed; /* of all files of a program */

__attribute__((format(printf, 2, 3))) static inline void check(bool good, const char *format, ...)
{
    if (good) {
        passed++;
        return;
    }
    failed++;
    va_list args;
    va_start(args, format);
    printf("FAILED ");
    vprintf(format, args);
    printf("\n");
    va_end(args);
}

/* The last line of a test program, and its exit status. */
static inline int checked(void)
{
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
