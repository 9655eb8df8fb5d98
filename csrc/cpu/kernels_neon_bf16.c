/* kernels_neon_bf16.c — the kernels for NEON with products of bf16 (BFDOT). */
#if defined(__aarch64__)
#include "neon.h"
TARGET("arch=armv8.2-a+bf16")

#define VARIANT             neon_bf16
#define TILE_ROWS           14
#define DOT_ROWS            6
#define MAX_UNPACKED_HALVES 12
#define MAX_UNPACKED_OTHERS 24
#define OPERANDS_BF16
#define PAIR_PRODUCTS(sum, a, b) ((vec)vbfdotq_f32((float32x4_t)(sum), (bfloat16x8_t)(a), (bfloat16x8_t)(b)))
#define NEIGHBOURS(first, second)                                                                                      \
    ((vec)vcvtq_high_bf16_f32(vcvtq_low_bf16_f32((float32x4_t)(first)), (float32x4_t)(second)))
#define HALVES_OF(v)           vmovl_u16(vreinterpret_u16_bf16(vcvt_bf16_f32((float32x4_t)(v))))
#define INTERLEAVED(low, high) ((vec)vorrq_u32(HALVES_OF(low), vshlq_n_u32(HALVES_OF(high), 16)))
#include "linear_template.h"
#include "attention_template.h"

END_TARGET
#endif
