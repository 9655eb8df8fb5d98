/* target.h — instruction sets for a part of a file. */
#pragma once

/* Compiles what follows for these instruction sets, up to END_TARGET. */
#define PRAGMA(x) _Pragma(#x)
#if defined(__clang__)
#define TARGET(names) PRAGMA(clang attribute push(__attribute__((target(names))), apply_to = function))
#define END_TARGET    _Pragma("clang attribute pop")
#else
#define TARGET(names) PRAGMA(GCC target(names))
#define END_TARGET
#endif
