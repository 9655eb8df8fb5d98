/* x86.h — what the kernels for AVX2 and AVX-512 have in common: the target, and memory widened by one instruction. */
#include <immintrin.h>

/* Compiles what follows for these instruction sets, up to END_TARGET. */
#define PRAGMA(x) _Pragma(#x)
#if defined(__clang__)
#define TARGET(names) PRAGMA(clang attribute push(__attribute__((target(names))), apply_to = function))
#define END_TARGET    _Pragma("clang attribute pop")
#else
#define TARGET(names) PRAGMA(GCC target(names))
#define END_TARGET
#endif

#define TILE_VECTORS 2
#define TWICE(p)     ((words)_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(p))))
