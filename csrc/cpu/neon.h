/* neon.h — what the kernels for NEON have in common, for the templates. */
#include <arm_neon.h>

#include "target.h"

#define ISA           neon
#define LANES         4
#define TILE_VECTORS  2
#define HALVES_AT(p)  vld1_u16(p)
#define WIDEN_F16(p)  ((vec)vcvt_f32_f16(vreinterpret_f16_u16(HALVES_AT(p))))
#define WIDEN_BF16(p) ((vec)vshlq_n_u32(vmovl_u16(HALVES_AT(p)), 16))
