/* operands.h — operands of products in f32 or bf16, for linear_template.h and stored_template.h.
 *
 * The including file defines what vectors.h asks for. With OPERANDS_BF16, products are of bf16, and it defines
 * PAIR_PRODUCTS(sum, a, b); NEIGHBOURS(first, second): (first[0], first[1]), (first[2], first[3]), …; and
 * INTERLEAVED(low, high): (low[0], high[0]), (low[1], high[1]), …. */
#include "vectors.h"

/* 4 bytes: one f32, or two neighbouring values in bf16, the first in the low half. */
#ifdef OPERANDS_BF16
typedef int32_t operand;
enum { PER_OPERAND = 2 };

INLINE vec multiply_add(vec sum, vec a, vec b) { return PAIR_PRODUCTS(sum, a, b); }
INLINE vec splat_operand(operand x) { return (vec)(x - (ints){ 0 }); }

/* LANES operands: values i … i + 2 LANES - 1. */
INLINE vec operands(const void *p, lazy_dtype dtype, int i)
{
    if (dtype == LAZY_BF16) return load((const uint16_t *)p + i);
    return NEIGHBOURS(widen(p, dtype, i), widen(p, dtype, i + LANES));
}

#else
typedef float operand;
enum { PER_OPERAND = 1 };
INLINE vec multiply_add(vec sum, vec a, vec b) { return sum + a * b; }
INLINE vec splat_operand(operand x) { return splat(x); }
INLINE vec operands(const void *p, lazy_dtype dtype, int i) { return widen(p, dtype, i); }
#endif

enum { STEP = PER_OPERAND * LANES }; /* values in a vector of operands */

/* Values i … k-1, fewer than STEP, then zeros. */
INLINE vec operands_part(const void *p, lazy_dtype dtype, int i, int k)
{
    float part[STEP] = { 0 };
    for (int j = 0; i + j < k; j++) part[j] = widen_one(p, dtype, i + j);
    return operands(part, LAZY_F32, 0);
}

INLINE void convert_any(void *to, const void *from, lazy_dtype dtype, int k)
{
    int i = 0;
    for (operand *out = to; i < k; i += STEP, out += LANES) {
        if (i + STEP <= k) {
            store((float *)out, operands(from, dtype, i));
            continue;
        }
        vec part = operands_part(from, dtype, i, k);
        memcpy(out, &part, (size_t)ceil_div(k - i, PER_OPERAND) * sizeof *out);
    }
}

static void convert(void *to, const float *from, int k) { convert_any(to, from, LAZY_F32, k); }
