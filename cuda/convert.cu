#include "convert.h"

#include "values.h"

namespace
{
float wide(const void *from, lazy_dtype type, size_t i)
{
    switch (type) {
    case LAZY_F16: return __half2float(static_cast<const __half *>(from)[i]);
    case LAZY_BF16: return __bfloat162float(static_cast<const __nv_bfloat16 *>(from)[i]);
    case LAZY_F32:
    default: break; /* quantized weights are not converted */
    }
    return static_cast<const float *>(from)[i];
}
} // namespace

void lazy_cuda_convert(void *to, lazy_dtype to_type, const void *from, lazy_dtype from_type, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        float value = wide(from, from_type, i);
        switch (to_type) {
        case LAZY_F16: static_cast<__half *>(to)[i] = __float2half(value); break;
        case LAZY_BF16: static_cast<__nv_bfloat16 *>(to)[i] = __float2bfloat16(value); break;
        case LAZY_F32:
        default: static_cast<float *>(to)[i] = value; break;
        }
    }
}
