/* kernels_avx512_bf16.c — the kernels for AVX-512 (F, BW, VL, BF16) with products of bf16, by vectors or by AMX. */
#if defined(__x86_64__)
#include "avx512_bf16.h"

#define VARIANT             avx512_bf16
#define TILE_ROWS           14
#define DOT_ROWS            6
#define MAX_UNPACKED_HALVES 112
#define MAX_UNPACKED_OTHERS 112
#include "linear_template.h"
#include "attention_template.h"

/* Few rows of x beside AMX, whose tiles read weights in bf16 more slowly. */
DEFINE_FEW_ROWS(avx512_bf16_halves, PER_OPERAND, 1, DOT_ROWS, TAKEN(BF16));

END_TARGET

TARGET("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512bf16,amx-tile,amx-bf16")
#include "amx.h"
DEFINE_KERNELS(avx512_amx, 4 * AMX_SIDE, 200, AMX_SIDE, AMX_SIDE, AMX_DEPTH *PER_OPERAND, amx_tile, amx_dots,
               amx_key_columns, amx_value_columns);
END_TARGET
#endif
