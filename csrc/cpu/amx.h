/* amx.h — products of bf16 in AMX's tiles, in place of the register tiles and dots of linear_template.h and
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
    __asm__ volatile("" ::"m"(shapes)); /* GCC 12 takes the instruction to read 8 bytes of it */
    _tile_loadconfig(&shapes);
}

#define AMX_SUMS(work)                                                                                                 \
    work(0, p->c);                                                                                                     \
    if (two_cols) work(1, p->c + LANES);                                                                               \
    if (two_rows) work(2, p->c + LANES * p->c_stride);                                                                 \
    if (two_rows && two_cols) work(3, p->c + LANES * p->c_stride + LANES)

/* `steps` tiles from operand `first` on. A tile that is stored more than some 2000 cycles after the last one was takes
 * 1000 cycles, so one is stored now and then that nobody reads. */
INLINE void amx_steps(const amx_product *p, int first, int steps, const bool two_rows, const bool two_cols)
{
    const int64_t c_bytes = 4 * p->c_stride, a_bytes = 4 * p->a_row, b_bytes = 4 * p->b_stride;
    const operand *a = p->a + first / AMX_DEPTH * p->a_step, *b = p->b + first * p->b_stride;
    float unread[LANES][LANES];
#define CLEAR(tile, at) _tile_zero(tile)
#define LOAD(tile, at)  _tile_loadd(tile, at, c_bytes)
#define STORE(tile, at) _tile_stored(tile, at, c_bytes)
    if (p->accumulate || first) {
        AMX_SUMS(LOAD);
    } else {
        AMX_SUMS(CLEAR);
    }
    for (; steps > 0; steps--, a += p->a_step, b += AMX_DEPTH * p->b_stride) {
        if (steps % 8 == 0) _tile_stored(0, unread, sizeof unread[0]);
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

/* ---- few rows of x ---------------------------------------------------------------------- */

/* Weights are the left matrix here and rows of x the right one, so that no weight is transposed. At once are multiplied
 * a strip of AMX_SIDE weights and a panel of LANES rows of x, or where it is `wide` LANES weights and AMX_SIDE rows. */
INLINE int amx_strip(bool wide) { return wide ? LANES : AMX_SIDE; }
INLINE int amx_width(bool wide) { return wide ? AMX_SIDE : LANES; }

/* panel[i, :] = operand i < k of each of n rows of x; zeros for other rows, and up to a multiple of LANES */
static void amx_panel(operand *panel, const operand *x, int64_t x_stride, int n, int k, bool wide)
{
    for (int i = 0; i < k; i += LANES)
        for (int first = 0; first < amx_width(wide); first += LANES) {
            vec v[LANES];
            for (int r = 0; r < LANES; r++) {
                const float *row = (const float *)x + (first + r) * x_stride + i;
                v[r] = first + r < n ? load_part(row, k - i, 0.0f) : splat(0.0f);
            }
            transpose(v);
            EACH(r, LANES) store((float *)panel + (i + r) * amx_width(wide) + first, v[r]);
        }
}

/* Of LANES rows, into the L2 cache. */
INLINE void amx_prefetch(const operand *w, int64_t w_row)
{
    EACH(i, LANES) __builtin_prefetch(w + i * w_row, 0, 2);
}

/* Adds `steps` products of a strip and a panel. They have two sums, of even and of odd steps, because a product waits
 * long for the one before: tiles 0 and 1, and for the lower weights or the right rows of x tiles 2 and 3. With `stored`
 * prefetches as much of the strip behind. */
INLINE void amx_add(const operand *w, int64_t w_row, const operand *panel, int steps, const bool wide,
                    const bool stored)
{
    const int64_t w_bytes = 4 * w_row, bytes = 4 * amx_width(wide), behind = amx_strip(wide) * w_row;
#define STEP_INTO(first, second)                                                                                       \
    _tile_loadd(4, w, w_bytes);                                                                                        \
    if (stored) amx_prefetch(w + behind, w_row);                                                                       \
    _tile_loadd(6, panel, bytes);                                                                                      \
    _tile_dpbf16ps(first, 4, 6);                                                                                       \
    if (wide) {                                                                                                        \
        _tile_loadd(7, panel + LANES, bytes);                                                                          \
        _tile_dpbf16ps(second, 4, 7);                                                                                  \
    } else {                                                                                                           \
        _tile_loadd(5, w + LANES * w_row, w_bytes);                                                                    \
        if (stored) amx_prefetch(w + behind + LANES * w_row, w_row);                                                   \
        _tile_dpbf16ps(second, 5, 6);                                                                                  \
    }                                                                                                                  \
    w += AMX_DEPTH;                                                                                                    \
    panel += AMX_DEPTH * amx_width(wide)
    for (; steps > 1; steps -= 2) {
        STEP_INTO(0, 2);
        STEP_INTO(1, 3);
    }
    if (steps) {
        STEP_INTO(0, 2);
    }
#undef STEP_INTO
}

/* y[r, j] (+)= the sums of rows r < n of x and weights j < cols of a strip */
static void amx_write(float *y, int64_t y_stride, int n, int cols, bool accumulate, bool wide)
{
    float sums[4][LANES][LANES];
    _tile_stored(0, sums[0], sizeof sums[0][0]);
    _tile_stored(1, sums[1], sizeof sums[0][0]);
    _tile_stored(2, sums[2], sizeof sums[0][0]);
    _tile_stored(3, sums[3], sizeof sums[0][0]);
    for (int half = 0; half < 2; half++) {
        vec v[LANES];
        EACH(i, LANES) v[i] = load(sums[2 * half][i]) + load(sums[2 * half + 1][i]);
        transpose(v);
        const int row = wide ? half * LANES : 0, col = wide ? 0 : half * LANES;
        for (int r = 0; r < min_int(LANES, n - row) && col < cols; r++) {
            float *to = y + (row + r) * y_stride + col;
            store_part(to, accumulate ? load_part(to, cols - col, 0.0f) + v[r] : v[r], cols - col);
        }
    }
}

enum { AMX_STEP = AMX_DEPTH * PER_OPERAND }; /* values of a row that are multiplied in one step */

/* The sums of a strip of weights, or of its first `cols` ones, and a panel of k values: in tiles 0 to 3. */
INLINE void amx_multiply_strip(const char *w, int64_t row_bytes, lazy_dtype dtype, int cols, const operand *panel,
                               int k, const bool wide)
{
    enum { FORMED = LAZY_LONGEST_BLOCK }; /* values of a row that become operands at a time */
    operand formed[AMX_SIDE][FORMED / PER_OPERAND];
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (dtype == LAZY_BF16 && row_bytes % (2 * AMX_STEP) == 0 && cols == amx_strip(wide)) {
        amx_add((const operand *)w, row_bytes / 4, panel, k / AMX_STEP, wide, true);
        return;
    }
    for (int kk = 0, here; kk < k; kk += here, panel += FORMED / PER_OPERAND * amx_width(wide)) {
        here = min_int(FORMED, k - kk);
        if (here < FORMED) memset(formed, 0, sizeof formed);
        for (int i = 0; i < cols; i++)
            form_and_prefetch(formed[i], w + i * row_bytes + lazy_row_bytes(dtype, kk), dtype, here,
                              amx_strip(wide) * row_bytes);
        amx_add(formed[0], FORMED / PER_OPERAND, panel, ceil_div(here, AMX_STEP), wide, false);
    }
}

/* dots for as many rows of x as a panel has, or fewer */
INLINE void amx_few(float *y, int64_t y_stride, const operand *x, int64_t x_stride, int n, const char *w,
                    lazy_dtype dtype, int n_cols, int k, bool accumulate, operand *panel, const bool wide)
{
    enum { PART = 4096 }; /* values of a row in the panel */
    const int64_t row_bytes = (int64_t)lazy_row_bytes(dtype, k);
    for (int part = 0; part < k; part += PART) {
        const int len = min_int(PART, k - part);
        const char *from = w + lazy_row_bytes(dtype, part);
        amx_panel(panel, x + part / PER_OPERAND, x_stride, n, ceil_div(len, PER_OPERAND), wide);
        for (int j = 0; j < n_cols; j += amx_strip(wide), from += amx_strip(wide) * row_bytes) {
            const int cols = min_int(amx_strip(wide), n_cols - j);
            amx_multiply_strip(from, row_bytes, dtype, cols, panel, len, wide);
            amx_write(y + j, y_stride, n, cols, accumulate || part, wide);
        }
    }
}

static void amx_dots(float *y, int64_t y_stride, const void *x, int64_t x_stride, int n_rows, const void *w,
                     lazy_dtype dtype, int n_cols, int k, bool accumulate, void *room)
{
    amx_configure(AMX_SIDE, AMX_SIDE, AMX_DEPTH);
    const operand *row = x;
    for (int n; n_rows > 0; n_rows -= n, row += n * x_stride, y += n * y_stride) {
        n = min_int(n_rows, AMX_SIDE);
        if (n > LANES) amx_few(y, y_stride, row, x_stride, n, w, dtype, n_cols, k, accumulate, room, true);
        else amx_few(y, y_stride, row, x_stride, n, w, dtype, n_cols, k, accumulate, room, false);
    }
    _tile_release();
}
