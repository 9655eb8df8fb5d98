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

END_TARGET

TARGET("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512bf16,amx-tile,amx-bf16")
#include "amx.h"
DEFINE_KERNELS(avx512_amx, AMX_SIDE, 6, 6, AMX_DEPTH *PER_OPERAND, amx_tile, amx_key_columns, amx_value_columns);
END_TARGET
#endif
