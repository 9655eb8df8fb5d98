/* vectors.h — vectors of LANES floats and the operations on them, for rows_template.h, linear_template.h and
 * int8_template.h.
 *
 * The including file defines LANES and, where the instruction set has them, LARGER(a, b), and HALVES_AT(address) with
 * WIDEN_F16 and WIDEN_BF16. */
#pragma once

#include <string.h>

#include "../format.h"
#include "../numeric.h"
#include "kernels.h"

#define INLINE      static inline __attribute__((always_inline))
#define JOIN_(a, b) a##b
#define JOIN(a, b)  JOIN_(a, b)
#define STRING_(x)  #x
#define STRING(x)   STRING_(x)

/* A loop that is unrolled: i goes from 0 to n - 1, and n is a constant of 16 at most. */
#define EACH(i, n) _Pragma("GCC unroll 16") for (int i = 0; i < (n); i++)

/* One case of a switch, whose value is a constant for the call. */
#define CASE(value, name, call)                                                                                        \
    case value: {                                                                                                      \
        const int name = value;                                                                                        \
        call;                                                                                                          \
        break;                                                                                                         \
    }

/* work(1, …) to work(most, …); most: 1, 2, 3, 4, 6, 7 or 14 */
#define EACH_NUMBER(most, work, ...) JOIN(UP_TO_, most)(work, __VA_ARGS__)
#define UP_TO_1(work, ...)           work(1, __VA_ARGS__)
#define UP_TO_2(work, ...)           UP_TO_1(work, __VA_ARGS__) work(2, __VA_ARGS__)
#define UP_TO_3(work, ...)           UP_TO_2(work, __VA_ARGS__) work(3, __VA_ARGS__)
#define UP_TO_4(work, ...)           UP_TO_3(work, __VA_ARGS__) work(4, __VA_ARGS__)
#define UP_TO_6(work, ...)           UP_TO_4(work, __VA_ARGS__) work(5, __VA_ARGS__) work(6, __VA_ARGS__)
#define UP_TO_7(work, ...)           UP_TO_6(work, __VA_ARGS__) work(7, __VA_ARGS__)
#define UP_TO_9(work, ...)           UP_TO_7(work, __VA_ARGS__) work(8, __VA_ARGS__) work(9, __VA_ARGS__)
#define UP_TO_11(work, ...)          UP_TO_9(work, __VA_ARGS__) work(10, __VA_ARGS__) work(11, __VA_ARGS__)
#define UP_TO_13(work, ...)          UP_TO_11(work, __VA_ARGS__) work(12, __VA_ARGS__) work(13, __VA_ARGS__)
#define UP_TO_14(work, ...)          UP_TO_13(work, __VA_ARGS__) work(14, __VA_ARGS__)

enum { FETCH_AHEAD = 1024 }; /* bytes; about what a stream reads during the latency of memory */

/* Steps of a register tile that are unrolled. Those of a small one are, because counting them takes instructions that
 * a core has too few of where another thread shares it. */
enum { UNROLLED = LANES == 16 ? 1 : 4 };

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float loose_vec __attribute__((vector_size(4 * LANES), aligned(1), may_alias)); /* anywhere in memory */
typedef int32_t ints __attribute__((vector_size(4 * LANES)));

INLINE vec load(const void *p) { return *(const loose_vec *)p; }
INLINE void store(float *p, vec v) { *(loose_vec *)p = v; }
INLINE vec splat(float x) { return x - (vec){ 0 }; }
INLINE vec choose(ints mask, vec yes, vec no) { return (vec)(((ints)yes & mask) | ((ints)no & ~mask)); }

#ifndef LARGER
#define LARGER(a, b) choose((a) > (b), a, b)
#endif

typedef float four __attribute__((vector_size(16)));
typedef float eight __attribute__((vector_size(32)));

/* Lanes of a and b in the order given, as a vector of `type`. GCC 11 lacks __builtin_shufflevector. */
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(type, a, b, ...) ((type)__builtin_shufflevector(a, b, __VA_ARGS__))
#else
#define SHUFFLE(type, a, b, ...)                                                                                       \
    ({                                                                                                                 \
        typedef int32_t lanes_ __attribute__((vector_size(sizeof(a))));                                                \
        __typeof__(a) all_ = __builtin_shuffle(a, b, (lanes_){ __VA_ARGS__ });                                         \
        type first_;                                                                                                   \
        memcpy(&first_, &all_, sizeof first_);                                                                         \
        first_;                                                                                                        \
    })
#endif

INLINE float sum_four(four f) { return (f[0] + f[2]) + (f[1] + f[3]); }

INLINE float sum_eight(const eight *e)
{
    return sum_four(SHUFFLE(four, *e, *e, 0, 1, 2, 3) + SHUFFLE(four, *e, *e, 4, 5, 6, 7));
}

INLINE float sum_lanes(vec v)
{
#if LANES == 16
    eight e = SHUFFLE(eight, v, v, 0, 1, 2, 3, 4, 5, 6, 7) + SHUFFLE(eight, v, v, 8, 9, 10, 11, 12, 13, 14, 15);
    return sum_eight(&e);
#elif LANES == 8
    return sum_eight(&v);
#else
    return sum_four(v);
#endif
}

/* sum_lanes of four vectors, each in the same order of additions. */
INLINE four sum_lanes_of_four(vec a, vec b, vec c, vec d)
{
#if LANES == 16
    vec ab = SHUFFLE(vec, a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
             SHUFFLE(vec, a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    vec cd = SHUFFLE(vec, c, d, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
             SHUFFLE(vec, c, d, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    vec all = SHUFFLE(vec, ab, cd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
              SHUFFLE(vec, ab, cd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    all += SHUFFLE(vec, all, all, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    all += SHUFFLE(vec, all, all, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    return SHUFFLE(four, all, all, 0, 4, 8, 12);
#elif LANES == 8
    vec ab = SHUFFLE(vec, a, b, 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(vec, a, b, 4, 5, 6, 7, 12, 13, 14, 15);
    vec cd = SHUFFLE(vec, c, d, 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(vec, c, d, 4, 5, 6, 7, 12, 13, 14, 15);
    vec all = SHUFFLE(vec, ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) + SHUFFLE(vec, ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
    all += SHUFFLE(vec, all, all, 1, 0, 3, 2, 5, 4, 7, 6);
    return SHUFFLE(four, all, all, 0, 4, 2, 6);
#else
    vec ab = SHUFFLE(vec, a, b, 0, 1, 4, 5) + SHUFFLE(vec, a, b, 2, 3, 6, 7);
    vec cd = SHUFFLE(vec, c, d, 0, 1, 4, 5) + SHUFFLE(vec, c, d, 2, 3, 6, 7);
    return SHUFFLE(four, ab, cd, 0, 2, 4, 6) + SHUFFLE(four, ab, cd, 1, 3, 5, 7);
#endif
}

/* ---- parts of vectors ------------------------------------------------------------------- */

/* The first n lanes from memory, `otherwise` in the others; a whole vector if n >= LANES. */
INLINE vec load_part(const float *p, int n, float otherwise)
{
    if (n >= LANES) return load(p);
    float part[LANES];
    for (int i = 0; i < LANES; i++) part[i] = i < n ? p[i] : otherwise;
    return load(part);
}

INLINE void store_part(float *p, vec v, int n)
{
    if (n >= LANES) {
        store(p, v);
        return;
    }
    float part[LANES];
    store(part, v);
    memcpy(p, part, (size_t)n * sizeof *p);
}

/* ---- transposing ------------------------------------------------------------------------ */

/* Transposes LANES rows of LANES values: afterwards v[i] holds value i of every row. */
INLINE void transpose(vec v[LANES])
{
#if LANES == 16
#define LOW  0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif LANES == 8
#define LOW  0, 8, 1, 9, 2, 10, 3, 11
#define HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define LOW  0, 4, 1, 5
#define HIGH 2, 6, 3, 7
#endif
    /* each round interleaves the first half of the rows with the second half */
    vec from[LANES];
#pragma GCC unroll 4
    for (int round = 1; round < LANES; round *= 2) {
        EACH(i, LANES) from[i] = v[i];
        EACH(i, LANES / 2) {
            v[2 * i] = SHUFFLE(vec, from[i], from[i + LANES / 2], LOW);
            v[2 * i + 1] = SHUFFLE(vec, from[i], from[i + LANES / 2], HIGH);
        }
    }
#undef LOW
#undef HIGH
}

/* ---- widening --------------------------------------------------------------------------- */

INLINE float widen_one(const void *p, lazy_dtype dtype, int i)
{
    if (dtype == LAZY_F32) return ((const float *)p)[i];
    uint16_t half = ((const uint16_t *)p)[i];
    return dtype == LAZY_BF16 ? lazy_widen_bf16(half) : lazy_widen_f16(half);
}

INLINE vec widen(const void *p, lazy_dtype dtype, int i)
{
    if (dtype == LAZY_F32) return load((const float *)p + i);
    const uint16_t *at = (const uint16_t *)p + i;
#ifdef HALVES_AT
    return dtype == LAZY_BF16 ? WIDEN_BF16(at) : WIDEN_F16(at);
#else
    vec v;
    for (int lane = 0; lane < LANES; lane++) v[lane] = widen_one(at, dtype, lane);
    return v;
#endif
}

/* Values i … k-1 in the first lanes, 0 in the others; a whole vector if there are as many. */
INLINE vec widen_part(const void *p, lazy_dtype dtype, int i, int k)
{
    if (i + LANES <= k) return widen(p, dtype, i);
    float part[LANES] = { 0 };
    for (int j = 0; i + j < k; j++) part[j] = widen_one(p, dtype, i + j);
    return load(part);
}

INLINE void widen_any(float *y, const void *x, lazy_dtype dtype, int n)
{
    int i = 0;
    for (; i + LANES <= n; i += LANES) store(y + i, widen(x, dtype, i));
    for (; i < n; i++) y[i] = widen_one(x, dtype, i);
}

/* Makes the call with `dtype`, where its values are no blocks, as a constant: `type`. */
#define BY_FLOAT_TYPE(call)                                                                                            \
    switch (dtype) {                                                                                                   \
        CASE(LAZY_F32, type, call)                                                                                     \
        CASE(LAZY_F16, type, call)                                                                                     \
        CASE(LAZY_BF16, type, call)                                                                                    \
    default: break;                                                                                                    \
    }
