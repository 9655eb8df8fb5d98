/* error.h — errors: a code and a message. The first error is kept. */
#pragma once

#include "lazyllm.h"

/* Writes the error unless err is NULL or holds one already. Returns the code. */
__attribute__((format(printf, 3, 4))) int lazy_fail(lazy_error *err, lazy_code code, const char *format, ...);

/* The same for arguments. */
#define lazy_invalid(err, ...) lazy_fail(err, LAZY_INVALID, __VA_ARGS__)

/* Prepends a place to the message, unless err is NULL or there is no error: "layer 7: …". Returns the code. */
__attribute__((format(printf, 3, 4))) int lazy_fail_in(lazy_error *err, int code, const char *format, ...);
