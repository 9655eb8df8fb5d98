/* format.c — blocks of every format made from any bytes: each value once, within the block; rounding to a block and
 * back. */
#include "../../csrc/format.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static void require(bool holds, const char *what)
{
    if (holds) return;
    fprintf(stderr, "%s\n", what);
    abort();
}

/* Rounding changes a value by at most a step; what is no finite number makes its group NaN. */
static void round_and_back(const float *x, int n, lazy_dtype dtype)
{
    char *blocks = malloc(lazy_row_bytes(dtype, n));
    float *y = malloc((size_t)n * sizeof *y);
    lazy_quantize(blocks, x, dtype, n);
    lazy_widen(y, blocks, dtype, n);
    for (int g = 0; g < n; g += LAZY_GROUP) {
        double low = 0, high = 0;
        bool finite = true;
        for (int i = g; i < g + LAZY_GROUP; i++) {
            finite = finite && isfinite(x[i]);
            low = x[i] < low ? x[i] : low;
            high = x[i] > high ? x[i] : high;
        }
        double most = high > -low ? high : -low, step = dtype == LAZY_Q8_0 ? most / 127 : (high - low) / 15;
        bool fits = most < 6e4 && (high - low) / 15 < 6e4; /* scales are f16 */
        for (int i = g; i < g + LAZY_GROUP; i++) {
            if (!finite) require(isnan(y[i]), "a group with a value that is not finite has a finite one");
            else if (fits)
                require(fabs((double)y[i] - x[i]) <= step * 0.51 + most * 0x1p-9 + 0x1p-18,
                        "rounded by more than a step");
        }
    }
    free(blocks);
    free(y);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (!size) return 0;
    lazy_dtype dtype = (lazy_dtype)(data[0] % LAZY_N_DTYPES);
    const lazy_format *format = &lazy_formats[dtype];
    size_t n_blocks = (size - 1) / (size_t)format->bytes;
    if (!n_blocks) return 0;
    int n = (int)n_blocks * format->values;
    unsigned char *blocks = malloc(n_blocks * (size_t)format->bytes); /* of exactly this size */
    memcpy(blocks, data + 1, n_blocks * (size_t)format->bytes);
    float *values = malloc((size_t)n * sizeof *values);
    memset(values, 0x5a, (size_t)n * sizeof *values);
    lazy_widen(values, blocks, dtype, n);
    n = n / LAZY_GROUP * LAZY_GROUP;
    round_and_back(values, n, LAZY_Q8_0);
    round_and_back(values, n, LAZY_Q4_1);
    free(values);
    free(blocks);
    return 0;
}
