/* amx.h — products of bf16 in AMX's tiles, in place of the register tiles of linear_template.h and
 * attention_template.h. Eight tiles: the sums of two by two, two of rows of a, two of columns of b. */

enum { AMX_DEPTH = 16, AMX_SIDE = 2 * LANES }; /* operands that a tile is deep; rows and columns of two tiles */

/* c[r, j] (+)= sum over i < k of a[r, i] * b[i, j], i in operands; at most AMX_SIDE rows and columns */
typedef struct amx_product {
    float *c;
    int64_t c_stride;
    const operand *a;
    int64_t a_row, a_lower, a_step; /* from a row to the next, to row LANES, to operand AMX_DEPTH */
    const operand *b;
    int64_t b_stride;
    int k, rows, cols;
    bool accumulate;
} amx_product;

/* What LDTILECFG reads. */
typedef struct amx_shapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} amx_shapes;

static void amx_shape(amx_shapes *shapes, int tile, int rows, int cols)
{
    if (rows <= 0 || cols <= 0) return;
    shapes->rows[tile] = (uint8_t)min_int(rows, LANES);
    shapes->row_bytes[tile] = (uint16_t)(4 * min_int(cols, LANES));
}

static void amx_configure(int rows, int cols, int depth)
{
    amx_shapes shapes = { .palette = 1 };
    for (int i = 0; i < 2; i++) {
        int below = rows - i * LANES, beside = cols - i * LANES;
        amx_shape(&shapes, 2 * i, below, cols);
        amx_shape(&shapes, 2 * i + 1, below, cols - LANES);
        amx_shape(&shapes, 4 + i, below, depth);
        amx_shape(&shapes, 6 + i, depth, beside);
    }
    _tile_loadconfig(&shapes);
}

#define AMX_SUMS(work)                                                                                                 \
    work(0, p->c);                                                                                                     \
    if (two_cols) work(1, p->c + LANES);                                                                               \
    if (two_rows) work(2, p->c + LANES * p->c_stride);                                                                 \
    if (two_rows && two_cols) work(3, p->c + LANES * p->c_stride + LANES)

/* `steps` tiles from operand `first` on. */
INLINE void amx_steps(const amx_product *p, int first, int steps, const bool two_rows, const bool two_cols)
{
    const int64_t c_bytes = 4 * p->c_stride, a_bytes = 4 * p->a_row, b_bytes = 4 * p->b_stride;
    const operand *a = p->a + first / AMX_DEPTH * p->a_step, *b = p->b + first * p->b_stride;
#define CLEAR(tile, at) _tile_zero(tile)
#define LOAD(tile, at)  _tile_loadd(tile, at, c_bytes)
#define STORE(tile, at) _tile_stored(tile, at, c_bytes)
    if (p->accumulate || first) {
        AMX_SUMS(LOAD);
    } else {
        AMX_SUMS(CLEAR);
    }
    for (; steps > 0; steps--, a += p->a_step, b += AMX_DEPTH * p->b_stride) {
        _tile_loadd(4, a, a_bytes);
        _tile_loadd(6, b, b_bytes);
        _tile_dpbf16ps(0, 4, 6);
        if (two_cols) {
            _tile_loadd(7, b + LANES, b_bytes);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (two_rows) {
            _tile_loadd(5, a + p->a_lower, a_bytes);
            _tile_dpbf16ps(2, 5, 6);
            if (two_cols) _tile_dpbf16ps(3, 5, 7);
        }
    }
    AMX_SUMS(STORE);
#undef CLEAR
#undef LOAD
#undef STORE
}

static void amx_multiply_from(const amx_product *p, int first, int steps)
{
    if (p->rows > LANES && p->cols > LANES) amx_steps(p, first, steps, true, true);
    else if (p->rows > LANES) amx_steps(p, first, steps, true, false);
    else if (p->cols > LANES) amx_steps(p, first, steps, false, true);
    else amx_steps(p, first, steps, false, false);
}

/* n rows, of which each tile of a and of c follows the one above. */
static void amx_multiply_rows(amx_product p, int n, int first, int depth, int steps)
{
    for (int shaped = 0; n > 0; n -= p.rows, p.a += 2 * p.a_lower, p.c += AMX_SIDE * p.c_stride) {
        p.rows = min_int(n, AMX_SIDE);
        if (p.rows != shaped) amx_configure(shaped = p.rows, p.cols, depth);
        amx_multiply_from(&p, first, steps);
    }
}

static void amx_multiply(const amx_product *p, int n)
{
    int rest = p->k % AMX_DEPTH, whole = p->k - rest;
    if (whole) amx_multiply_rows(*p, n, 0, AMX_DEPTH, whole / AMX_DEPTH);
    if (rest) amx_multiply_rows(*p, n, whole, rest, 1);
    _tile_release();
}

static void amx_tile(float *c, int64_t c_stride, const void *a, int64_t a_stride, const void *panel, lazy_dtype dtype,
                     int k, int rows, int cols, bool accumulate)
{
    amx_multiply(&(amx_product){ c, c_stride, a, a_stride, LANES * a_stride, AMX_DEPTH, panel, TILE_COLS,
                                 ceil_div(k, PER_OPERAND), .cols = cols, .accumulate = accumulate },
                 rows);
}

static void amx_key_columns(float *s, int width, const void *key, const void *q, const void *value, int n, int d)
{
    int k = ceil_div(d, PER_OPERAND);
    amx_multiply(&(amx_product){ s, width, key, k, LANES * k, AMX_DEPTH, q, TILE_COLS, k, .cols = width }, n);
}

/* (n, width) powers as operands, in place: of each AMX_DEPTH operands a row for every column, after each other. */
static const operand *amx_powers(float *p, int width, int n)
{
    pair_powers(p, width, n);
    for (int first = 0; first < ceil_div(n, PER_OPERAND); first += AMX_DEPTH) {
        vec v[TILE_VECTORS][LANES];
        float *block = p + first * width;
        for (int at = 0; at < width / LANES; at++) {
            EACH(i, LANES) v[at][i] = load(block + i * width + at * LANES);
            transpose(v[at]);
        }
        for (int at = 0; at < width / LANES; at++)
            EACH(i, LANES) store(block + (at * LANES + i) * AMX_DEPTH, v[at][i]);
    }
    return (const operand *)p;
}

static void amx_value_columns(float *o, float *powers, int width, int cols, const void *values, int64_t stride, int n,
                              int d)
{
    const operand *p = amx_powers(powers, width, n);
    for (int i = 0; i < d; i += TILE_COLS)
        amx_multiply(&(amx_product){ o + i, d, p, AMX_DEPTH, LANES * AMX_DEPTH, AMX_DEPTH * width,
                                     (const operand *)values + i, stride, ceil_div(n, PER_OPERAND),
                                     .cols = min_int(d - i, TILE_COLS), .accumulate = true },
                     cols);
}
