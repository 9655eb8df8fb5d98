#include "format.h"

#include <float.h>
#include <pthread.h>

#include "cpu/kernels.h"

float lazy_f16[1 << 16];

static void fill_f16(void)
{
    for (int bits = 0; bits < 1 << 16; bits++) lazy_f16[bits] = lazy_widen_f16((uint16_t)bits);
}

void lazy_format_prepare(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, fill_f16);
}

bool lazy_format_find(const char *name, lazy_dtype *dtype)
{
    for (int i = 0; i < LAZY_N_DTYPES; i++)
        if (strcmp(name, lazy_formats[i].name) == 0) {
            *dtype = (lazy_dtype)i;
            return true;
        }
    return false;
}

void lazy_widen(float *y, const void *blocks, lazy_dtype dtype, int n)
{
    lazy_format_prepare();
    lazy_rows_generic.widen_row(y, blocks, dtype, n);
}

/* ---- rounding to a block ---------------------------------------------------------------- */

uint16_t lazy_narrow_f16(float value)
{
    uint32_t word, magnitude;
    memcpy(&word, &value, sizeof word);
    uint16_t sign = (uint16_t)(word >> 16 & 0x8000u);
    magnitude = word & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return sign | 0x7e00u;  /* NaN */
    if (magnitude >= 0x477ff000u) return sign | 0x7c00u; /* 65520 and more round to infinity */
    if (magnitude < 0x38800000u) { /* below 2^-14, a multiple of 2^-24: adding 1/2 rounds at that bit */
        float shifted = fabsf(value) + 0.5f;
        memcpy(&word, &shifted, sizeof word);
        return sign | (uint16_t)(word - 0x3f000000u);
    }
    return sign | (uint16_t)((magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13);
}

static uint16_t narrow_bf16(float value)
{
    uint32_t word;
    memcpy(&word, &value, sizeof word);
    if (isnan(value)) return (uint16_t)(word >> 16 | 0x40u);
    return (uint16_t)((word + 0x7fffu + (word >> 16 & 1u)) >> 16);
}

bool lazy_narrow(void *to, const float *x, lazy_dtype dtype, int n)
{
    uint16_t *halves = to;
    const unsigned infinity = dtype == LAZY_BF16 ? 0x7f80u : 0x7c00u; /* the exponent's bits */
    int n_lost = 0;
    if (dtype == LAZY_F32) {
        memcpy(to, x, (size_t)n * sizeof *x);
        return true;
    }
    for (int i = 0; i < n; i++) {
        halves[i] = dtype == LAZY_BF16 ? narrow_bf16(x[i]) : lazy_narrow_f16(x[i]);
        n_lost += (halves[i] & infinity) == infinity && isfinite(x[i]);
    }
    return n_lost == 0;
}

/* 1 / scale; 0 below FLT_MIN, where the f16 scale is 0. *spoilt: x has a NaN or Inf, and the scale becomes NaN. */
static float inverse_of(float scale, const float *x, bool *spoilt)
{
    float zero = 0.0f;
    for (int i = 0; i < LAZY_GROUP; i++) zero += x[i] * 0.0f;
    *spoilt = isnan(zero);
    return scale >= FLT_MIN && !*spoilt ? 1.0f / scale : 0.0f;
}

static void quantize_q8_0(lazy_q8_0 *block, const float *x)
{
    float largest = 0.0f;
    for (int i = 0; i < LAZY_GROUP; i++) largest = fabsf(x[i]) > largest ? fabsf(x[i]) : largest;
    bool spoilt;
    float scale = largest / 127.0f, inverse = inverse_of(scale, x, &spoilt);
    block->scale = lazy_narrow_f16(spoilt ? NAN : scale);
    for (int i = 0; i < LAZY_GROUP; i++) { /* to nearest, ties away from 0 */
        float scaled = spoilt ? 0.0f : x[i] * inverse, whole = (float)(int)scaled, rest = scaled - whole;
        block->q[i] = (int8_t)(whole + (float)(rest >= 0.5f) - (float)(rest <= -0.5f));
    }
}

static void quantize_q4_1(lazy_q4_1 *block, const float *x)
{
    float low = x[0], high = x[0];
    for (int i = 1; i < LAZY_GROUP; i++) {
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
    }
    bool spoilt;
    float scale = (high - low) / 15.0f, inverse = inverse_of(scale, x, &spoilt);
    uint8_t q[LAZY_GROUP];
    for (int i = 0; i < LAZY_GROUP; i++) {
        float scaled = spoilt ? 0.0f : (x[i] - low) * inverse + 0.5f;
        q[i] = (uint8_t)(scaled < 15.0f ? scaled : 15.0f);
    }
    block->scale = lazy_narrow_f16(spoilt ? NAN : scale);
    block->min = lazy_narrow_f16(low);
    for (int i = 0; i < LAZY_GROUP / 2; i++) block->q[i] = (uint8_t)(q[i] | q[LAZY_GROUP / 2 + i] << 4);
}

void lazy_quantize(void *blocks, const float *x, lazy_dtype dtype, int n)
{
    for (int i = 0; i < n; i += LAZY_GROUP) {
        if (dtype == LAZY_Q8_0) quantize_q8_0((lazy_q8_0 *)blocks + i / LAZY_GROUP, x + i);
        else quantize_q4_1((lazy_q4_1 *)blocks + i / LAZY_GROUP, x + i);
    }
}
