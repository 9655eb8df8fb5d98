/* stored_template.h — the source of products in f32 or bf16 of quantized weights, as they are stored, with few rows of
 * x; kernels.h specifies each function.
 *
 * The including file defines what operands.h and quantized.h ask for; VARIANT; and DOT_ROWS (4 DOT_ROWS sums must fit
 * the registers). */
#include "operands.h"
#include "quantized.h"

enum { MAX_ROWS = 2 * DOT_ROWS }; /* of x: for more, weights become operands once rather than again */

/* All formats where a table widens values of 4 bits; else those that are quick to widen again for some rows of x. */
#ifdef LOOK_UP
#define AS_STORED(work) work(Q8_0) LAZY_BELOW_8_BITS(work)
#else
#define AS_STORED(work) work(Q8_0) work(Q4_0)
#endif
#define FORM LAZY_F32

static void form_row(void *to, const char *row, lazy_dtype dtype, int k) { /* there are no others */ }

#include "dots.h"

INLINE void dots_of(dot_products t, const int rows, const int cols)
{
    const lazy_format *format = &lazy_formats[t.dtype];
    const int groups = format->values / LAZY_GROUP;
    vec sum[DOT_ROWS][4];
    EACH(r, rows)
        EACH(c, cols) sum[r][c] = splat(0.0f);
    for (const operand *x = t.x, *end = x + t.k / PER_OPERAND; x < end; t.w += format->bytes) {
        scales s[4];
        EACH(c, cols) read_scales(s[c], t.w + c * t.spacing, t.dtype);
        EACH(g, groups) {
            uint8_t room[4][LAZY_GROUP];
            const uint8_t *q[4];
            EACH(c, cols) {
                const char *block = t.w + c * t.spacing;
                q[c] = group_at(room[c], block, t.dtype, g);
                __builtin_prefetch(block + g * format->bytes / groups + FETCH_AHEAD / 2); /* these bytes take longer */
            }
#pragma GCC unroll 8
            for (int v = 0; v < GROUP_VECTORS; v += STEP_VECTORS, x += LANES) {
                vec wide[4];
                EACH(c, cols) wide[c] = group_operands(q[c], t.dtype, s[c], g, v);
                EACH(r, rows) {
                    vec values = load(x + r * t.x_stride);
                    EACH(c, cols) sum[r][c] = multiply_add(sum[r][c], wide[c], values);
                }
            }
        }
    }
    EACH(r, rows) write_dots(t.y + r * t.y_stride, &t, sum[r], cols);
}

DEFINE_FEW_ROWS(VARIANT, PER_OPERAND, 1, MAX_ROWS, AS_STORED(TAKEN));
