/* error.h — how a failure is told: a code and a sentence; the first one wins. */
#ifndef LAZY_ERROR_H
#define LAZY_ERROR_H

#include "lazyllm.h"

/* Fills err (if it is not NULL and still clean) and returns code, so that `return lazy_fail(…)` reads well. */
__attribute__((format(printf, 3, 4))) int lazy_fail(lazy_error *err, lazy_code code, const char *format, ...);

/* Puts where it happened in front of what happened: "layer 7 down projection: …". Returns the code. */
__attribute__((format(printf, 2, 3))) int lazy_fail_in(lazy_error *err, const char *format, ...);

#endif
