/* format.h — the formats of weights: the layout of their blocks, the values in f32, and rounding to them.
 *
 * A row of a matrix is a number of whole blocks. The quantized formats are those of GGUF files: values are integers
 * times a scale of their group, the K formats' scales are small integers times one of the block. Numbers of 16 bits are
 * f16, little-endian. */
#pragma once

#include <math.h>
#include <string.h>

#include "lazyllm.h"

enum { LAZY_N_DTYPES = LAZY_Q6_K + 1 };

typedef struct lazy_q8_0 { /* value i: scale * q[i] */
    uint16_t scale;
    int8_t q[32];
} lazy_q8_0;

typedef struct lazy_q4_0 { /* value i: scale * (low 4 bits of q[i] - 8); value 16 + i: by the high 4 bits */
    uint16_t scale;
    uint8_t q[16];
} lazy_q4_0;

typedef struct lazy_q4_1 { /* value i: scale * (low 4 bits of q[i]) + min; value 16 + i: by the high 4 bits */
    uint16_t scale, min;
    uint8_t q[16];
} lazy_q4_1;

typedef struct lazy_q5_0 { /* as lazy_q4_0 with integers of 5 bits, less 16; bit i of fifth is bit 4 of value i */
    uint16_t scale;
    uint8_t fifth[4], q[16];
} lazy_q5_0;

typedef struct lazy_q5_1 { /* as lazy_q4_1 with integers of 5 bits */
    uint16_t scale, min;
    uint8_t fifth[4], q[16];
} lazy_q5_1;

/* 8 groups of 32 values: scale * s * integer - min * m. Groups 2j and 2j + 1 are in the low and high 4 bits of
 * q[32 j …]. s and m of a group have 6 bits: of groups g < 4 the low bits of packed[g] and packed[4 + g]; of groups 4 +
 * g the low and high 4 bits of packed[8 + g], and above them the high 2 bits of packed[g] and packed[4 + g]. */
typedef struct lazy_q4_k {
    uint16_t scale, min;
    uint8_t packed[12], q[128];
} lazy_q4_k;

typedef struct lazy_q5_k { /* as lazy_q4_k; bit g of fifth[i] is bit 4 of value i of group g */
    uint16_t scale, min;
    uint8_t packed[12], fifth[32], q[128];
} lazy_q5_k;

/* 8 groups of 32 values: scale * scales[2g + i / 16] * (integer - 32). Group 4h + j has its low 4 bits in the half j /
 * 2 of low[64 h + 32 (j % 2) …], and the other two in bits 2j and 2j + 1 of high[32 h …]. */
typedef struct lazy_q6_k {
    uint8_t low[128], high[64];
    int8_t scales[16];
    uint16_t scale;
} lazy_q6_k;

enum { LAZY_GROUP = 32 };

typedef struct lazy_format {
    const char *name;  /* in safetensors and GGUF files */
    int values, bytes; /* of a block */
    int align;         /* of its first byte */
    int zero_point;    /* a value is (unsigned integer - zero_point) * scale, plus an offset in some formats */
    bool has_offset;
} lazy_format;

static const lazy_format lazy_formats[LAZY_N_DTYPES] = {
    [LAZY_F32] = { "F32", 1, 4, 4, 0, false },
    [LAZY_F16] = { "F16", 1, 2, 2, 0, false },
    [LAZY_BF16] = { "BF16", 1, 2, 2, 0, false },
    [LAZY_Q8_0] = { "Q8_0", 32, sizeof(lazy_q8_0), 2, 128, false },
    [LAZY_Q4_0] = { "Q4_0", 32, sizeof(lazy_q4_0), 2, 8, false },
    [LAZY_Q4_1] = { "Q4_1", 32, sizeof(lazy_q4_1), 2, 0, true },
    [LAZY_Q5_0] = { "Q5_0", 32, sizeof(lazy_q5_0), 2, 16, false },
    [LAZY_Q5_1] = { "Q5_1", 32, sizeof(lazy_q5_1), 2, 0, true },
    [LAZY_Q4_K] = { "Q4_K", 256, sizeof(lazy_q4_k), 2, 0, true },
    [LAZY_Q5_K] = { "Q5_K", 256, sizeof(lazy_q5_k), 2, 0, true },
    [LAZY_Q6_K] = { "Q6_K", 256, sizeof(lazy_q6_k), 2, 32, false },
};

/* work(format) for each format of integers of fewer than 8 bits. */
#define LAZY_BELOW_8_BITS(work) work(Q4_0) work(Q4_1) work(Q5_0) work(Q5_1) work(Q4_K) work(Q5_K) work(Q6_K)

enum { LAZY_LONGEST_BLOCK = 256 }; /* values; every block's number divides it */

static inline bool lazy_is_quantized(lazy_dtype dtype) { return lazy_formats[dtype].values > 1; }

/* Bytes of so many values, which are whole blocks. */
static inline size_t lazy_row_bytes(lazy_dtype dtype, int values)
{
    return (size_t)(values / lazy_formats[dtype].values) * (size_t)lazy_formats[dtype].bytes;
}

/* False if there is no format of that name. */
bool lazy_format_find(const char *name, lazy_dtype *dtype);

/* y[i] = value i, in f32; n values are whole blocks. Each value is rounded once. */
void lazy_widen(float *y, const void *blocks, lazy_dtype dtype, int n);

/* To nearest, ties to even. */
uint16_t lazy_narrow_f16(float value);

/* Rounds n values to LAZY_F32, F16 or BF16, to nearest, ties to even. False if a finite value became infinite. */
bool lazy_narrow(void *to, const float *x, lazy_dtype dtype, int n);

/* Rounds n values, whole blocks, to LAZY_Q8_0 or LAZY_Q4_1. */
void lazy_quantize(void *blocks, const float *x, lazy_dtype dtype, int n);

/* The value of every f16 by its bits, once lazy_format_prepare has been called. */
extern float lazy_f16[1 << 16];
void lazy_format_prepare(void);

static inline float lazy_widen_f16(uint16_t half)
{
    /* exponent and fraction, shifted to their places in f32, give the value times 2^-112, subnormals included */
    uint32_t word = (half & 0x7fffu) << 13;
    float value;
    memcpy(&value, &word, sizeof value);
    value *= 0x1p112f;
    if ((half & 0x7c00u) == 0x7c00u) value = half & 0x3ffu ? NAN : INFINITY;
    return half & 0x8000u ? -value : value;
}

static inline float lazy_widen_bf16(uint16_t half)
{
    uint32_t word = (uint32_t)half << 16;
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
}
