#include "error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

int lazy_fail(lazy_error *err, lazy_code code, const char *format, ...)
{
    if (err && err->code == LAZY_OK) {
        va_list args;
        va_start(args, format);
        err->code = code;
        vsnprintf(err->message, sizeof err->message, format, args);
        va_end(args);
    }
    return code;
}

int lazy_fail_in(lazy_error *err, int code, const char *format, ...)
{
    if (!code || !err) return code;
    char what[sizeof err->message];
    memcpy(what, err->message, sizeof what);
    va_list args;
    va_start(args, format);
    int where = vsnprintf(err->message, sizeof err->message, format, args);
    va_end(args);
    if (where >= 0 && (size_t)where < sizeof err->message)
        snprintf(err->message + where, sizeof err->message - (size_t)where, ": %s", what);
    return code;
}
