/* attention_template.h — the source of attention in columns, for the operands of linear_template.h; lazy_kernels in
 * kernels.h specifies each function. */

static void convert_key(void *to, const void *key, lazy_dtype dtype, int d)
{
    BY_FLOAT_TYPE(convert_any(to, key, type, d));
}

/* ---- attention in columns --------------------------------------------------------------- */

/* Prefetches the next strip's keys and the values: a tile reads more rows at a time than the hardware prefetches. */
INLINE void key_columns_of(float *s, const operand *key, const operand *q, const operand *value, int n, int d,
                           const int vectors)
{
    const int width = vectors * LANES, k = ceil_div(d, PER_OPERAND);
    for (int strips = ceil_div(n, TILE_ROWS), rows; n > 0;
         n -= rows, s += rows * width, key += rows * k, value += rows * k) {
        rows = ceil_div(n, strips);
        strips--;
        down_rows[vectors - 1][rows - 1](
            &(tile_product){ s, width, key, k, 1, q, TILE_COLS, k, width, false, { key + rows * k, value } });
    }
}

static void key_columns(float *s, int width, const void *key, const void *q, const void *value, int n, int d)
{
    if (width == LANES) key_columns_of(s, key, q, value, n, d, 1);
    else key_columns_of(s, key, q, value, n, d, TILE_VECTORS);
}

/* Values of neighbouring tokens come together in an operand, and so must the powers that they are multiplied by. */
INLINE void pair_values_of(float *to, const void *first, const void *second, lazy_dtype dtype, int d)
{
#ifdef OPERANDS_BF16
    for (int i = 0; i < d; i += LANES) {
        vec high = second ? widen_part(second, dtype, i, d) : splat(0.0f);
        store_part(to + i, INTERLEAVED(widen_part(first, dtype, i, d), high), d - i);
    }
#else
    widen_any(to, first, dtype, d);
#endif
}

static void pair_values(void *to, const void *first, const void *second, lazy_dtype dtype, int d)
{
    BY_FLOAT_TYPE(pair_values_of(to, first, second, type, d));
}

/* (n, width) powers as operands, in place. */
INLINE const operand *pair_powers(float *p, int width, int n)
{
#ifdef OPERANDS_BF16
    for (int j = 0; j < n; j += 2)
        for (int c = 0; c < width; c += LANES) {
            vec high = j + 1 < n ? load(p + (j + 1) * width + c) : splat(0.0f);
            store(p + j / 2 * width + c, INTERLEAVED(load(p + j * width + c), high));
        }
#endif
    return (const operand *)p;
}

INLINE void value_columns_of(float *o, const operand *p, int width, int cols, const operand *value, int64_t stride,
                             int n, int d, int here, const int vectors)
{
    for (int strips = ceil_div(cols, TILE_ROWS), rows; cols > 0; cols -= rows, o += rows * d, p += rows) {
        rows = ceil_div(cols, strips);
        strips--;
        across_columns[vectors - 1][rows - 1](
            &(tile_product){ o, d, p, 1, width, value, stride, n, here, true, { NULL } });
    }
}

static void value_columns(float *o, float *powers, int width, int cols, const void *values, int64_t stride, int n,
                          int d)
{
    const operand *p = pair_powers(powers, width, n), *value = values;
    int steps = ceil_div(n, PER_OPERAND);
    for (int i = 0; i < d; i += TILE_COLS) {
        int here = d - i < TILE_COLS ? d - i : TILE_COLS;
        if (here <= LANES) value_columns_of(o + i, p, width, cols, value + i, stride, steps, d, here, 1);
        else value_columns_of(o + i, p, width, cols, value + i, stride, steps, d, here, TILE_VECTORS);
    }
}

#define DEFINE_KERNELS(variant, rows_of_tile, packing_, halves, others, key_unit_, tile_, dots_, key_columns_,         \
                       value_columns_)                                                                                 \
    const lazy_kernels JOIN(lazy_kernels_, variant) = {                                                                \
        .products = {                                                                                                  \
            .name = STRING(variant),                                                                                   \
            .unit = PER_OPERAND,                                                                                       \
            .row_operands = 1,                                                                                         \
            .panel_operands = 1,                                                                                       \
            .tile_rows = rows_of_tile,                                                                                 \
            .tile_cols = TILE_COLS,                                                                                    \
            .packing = packing_,                                                                                       \
            .max_unpacked_halves = halves,                                                                             \
            .max_unpacked_others = others,                                                                             \
            .convert = convert,                                                                                        \
            .pack = pack,                                                                                              \
            .tile = tile_,                                                                                             \
            .dots = dots_,                                                                                             \
        },                                                                                                             \
        .rows = &JOIN(lazy_rows_, ISA),                                                                                \
        .lanes = LANES,                                                                                                \
        .key_unit = key_unit_,                                                                                         \
        .convert_key = convert_key,                                                                                    \
        .pair_values = pair_values,                                                                                    \
        .key_columns = key_columns_,                                                                                   \
        .value_columns = value_columns_,                                                                               \
    }
DEFINE_KERNELS(VARIANT, TILE_ROWS, 24 * PER_OPERAND, MAX_UNPACKED_HALVES, MAX_UNPACKED_OTHERS, PER_OPERAND, tile, dots,
               key_columns, value_columns);
