/* sets.c — operations on ascending lists of positions. */
#include <string.h>

#include "cpu.h"

int lazy_cpu_mark(lazy_stream *stream, int32_t *depth, const int32_t *rows, int n, int value, lazy_error *err)
{
    for (int r = 0; r < n; r++) depth[rows[r]] = value;
    return LAZY_OK;
}

int lazy_cpu_filter(lazy_stream *stream, int32_t *out, int *n_out, const int32_t *positions, int n,
                    const int32_t *depth, int low, int high, lazy_error *err)
{
    int found = 0;
    for (int i = 0; i < n; i++) {
        int32_t position = positions[i];
        if (depth[position] >= low && depth[position] <= high) out[found++] = position;
    }
    if (n_out) *n_out = found;
    return LAZY_OK;
}

int lazy_cpu_regroup(lazy_stream *stream, void *y, const int32_t *new_rows, int n_new, const void *x,
                     const int32_t *rows, int n, void *aux, int d, int32_t *n_revived, lazy_error *err)
{
    size_t bytes = (size_t)d * sizeof(float);
    int r = 0;
    for (int i = 0; i <= n_new; i++) {
        int next = i < n_new ? new_rows[i] : INT32_MAX;
        for (; r < n && rows[r] < next; r++)
            if (aux)
                memcpy((float *)aux + (int64_t)rows[r] * d, (const float *)x + (int64_t)r * d,
                       bytes); /* the row is dropped */
        if (i == n_new) break;
        bool kept = r < n && rows[r] == next;
        memcpy((float *)y + (int64_t)i * d,
               kept ? (const float *)x + (int64_t)r * d : (const float *)aux + (int64_t)next * d, bytes);
        r += kept;
        *n_revived += !kept;
    }
    return LAZY_OK;
}
