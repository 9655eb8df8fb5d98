/* blocks.h — quantized weights on the device, which stay as they are stored: 16 values of a block at a time, widened
 * exactly.
 *
 * A unit is the 16 values whose integers lie in the same bytes: two runs of 8 values, lazy_gap<B> apart, so that rows
 * of x are read 16 bytes a thread. Where a block begins at any even address, words are read from the aligned ones
 * around them, up to 2 bytes past the block: device memory of weights ends at a multiple of 16. */
#ifndef LAZY_CUDA_BLOCKS_H
#define LAZY_CUDA_BLOCKS_H

#include "values.h"

/* Values of a block, or 1 for a type that is no block; between the runs of a unit; and what is subtracted from
 * integers.
 */
template <class B> constexpr int lazy_block_values = sizeof(B) < 16 ? 1 : sizeof(B) < 128 ? 32 : 256;
template <class B> constexpr int lazy_gap = lazy_block_values<B> == 32 ? 16 : 32;
template <> constexpr int lazy_gap<lazy_q8_0> = 8;
template <> constexpr int lazy_gap<lazy_q6_k> = 64;
template <class B> constexpr float lazy_zero_point = 0.0f;
template <> constexpr float lazy_zero_point<lazy_q8_0> = 128.0f;
template <> constexpr float lazy_zero_point<lazy_q4_0> = 8.0f;
template <> constexpr float lazy_zero_point<lazy_q5_0> = 16.0f;
template <> constexpr float lazy_zero_point<lazy_q6_k> = 32.0f;

enum { LAZY_UNIT = 16 };

struct lazy_unit {
    uint32_t q[4];             /* integers, one to a byte: of the first run, then of the second */
    float scale[2], offset[2]; /* of each run; formats with a zero point have no offsets */
};

/* to = 4 N bytes of a block of B, in loads as wide as the alignment of all blocks allows */
template <class B, int N> __device__ __forceinline__ void lazy_load_words(uint32_t (&to)[N], const uint8_t *from)
{
    if constexpr (sizeof(B) % 8 == 0 && N == 2) {
        uint2 both = *reinterpret_cast<const uint2 *>(from);
        to[0] = both.x;
        to[1] = both.y;
        return;
    }
    uint32_t shift = sizeof(B) % 4 ? 8 * ((uintptr_t)from & 2) : 0;
    const uint32_t *words = reinterpret_cast<const uint32_t *>(from - shift / 8);
    uint32_t low = words[0];
#pragma unroll
    for (int i = 0; i < N; i++) {
        uint32_t high = i + 1 < N || shift ? words[i + 1] : 0;
        to[i] = (uint32_t)(((uint64_t)high << 32 | low) >> shift);
        low = high;
    }
}

__device__ __forceinline__ float lazy_half_at(uint16_t bits)
{
    return __half2float(reinterpret_cast<const __half &>(bits));
}

/* unit.q = 16 integers of 4 bits: the low bits of 8 bytes, then the high ones */
template <class B> __device__ __forceinline__ void lazy_load_nibbles(lazy_unit &unit, const uint8_t *from)
{
    uint32_t bytes[2];
    lazy_load_words<B>(bytes, from);
#pragma unroll
    for (int i = 0; i < 4; i++) unit.q[i] = bytes[i % 2] >> 4 * (i / 2) & 0x0f0f0f0f;
}

/* Adds bit 4 of 16 integers: bits 8 i … of the word, then bits 16 + 8 i …. The factor moves bits 0 … 3 to the lowest
 * bits of four bytes. */
template <class B> __device__ __forceinline__ void lazy_load_fifth_bits(lazy_unit &unit, const uint8_t *from, int i)
{
    uint32_t bits[1];
    lazy_load_words<B>(bits, from);
#pragma unroll
    for (int k = 0; k < 4; k++)
        unit.q[k] |= ((bits[0] >> (8 * i + 16 * (k / 2) + 4 * (k % 2)) & 15) * 0x00204081 & 0x01010101) << 4;
}

__device__ __forceinline__ lazy_unit lazy_unit_of(const lazy_q8_0 &block, int i)
{
    lazy_unit unit;
    unit.scale[0] = unit.scale[1] = lazy_half_at(block.scale);
    lazy_load_words<lazy_q8_0>(unit.q, reinterpret_cast<const uint8_t *>(block.q) + 16 * i);
#pragma unroll
    for (int k = 0; k < 4; k++) unit.q[k] ^= 0x80808080;
    return unit;
}

/* lazy_q4_0, lazy_q4_1, lazy_q5_0 and lazy_q5_1 */
template <class B> __device__ __forceinline__ lazy_unit lazy_unit_of(const B &block, int i)
{
    lazy_unit unit;
    unit.scale[0] = unit.scale[1] = lazy_half_at(block.scale);
    if constexpr (lazy_zero_point<B> == 0.0f) unit.offset[0] = unit.offset[1] = lazy_half_at(block.min);
    lazy_load_nibbles<B>(unit, block.q + 8 * i);
    if constexpr (sizeof(B) > sizeof(lazy_q4_1)) lazy_load_fifth_bits<B>(unit, block.fifth, i);
    return unit;
}

/* Scales and offsets of groups 2 j and 2 j + 1 of a lazy_q4_k or lazy_q5_k; head: its first 16 bytes. */
__device__ __forceinline__ void lazy_set_scales(lazy_unit &unit, const void *block, int j)
{
    uint4 head = *reinterpret_cast<const uint4 *>(block);
    int shift = 16 * (j % 2);
    uint32_t scales = head.y >> shift, mins = head.z >> shift, low = head.w >> shift;
    if (j >= 2) {
        scales = (low & 0x0f0f) | (scales >> 2 & 0x3030);
        mins = (low >> 4 & 0x0f0f) | (mins >> 2 & 0x3030);
    }
    float scale = lazy_half_at((uint16_t)head.x), min = lazy_half_at((uint16_t)(head.x >> 16));
#pragma unroll
    for (int k = 0; k < 2; k++) {
        unit.scale[k] = scale * (float)(scales >> 8 * k & 63);
        unit.offset[k] = -(min * (float)(mins >> 8 * k & 63));
    }
}

__device__ __forceinline__ lazy_unit lazy_unit_of(const lazy_q4_k &block, int i)
{
    lazy_unit unit;
    lazy_set_scales(unit, &block, i / 4);
    lazy_load_nibbles<lazy_q4_k>(unit, block.q + 8 * i);
    return unit;
}

__device__ __forceinline__ lazy_unit lazy_unit_of(const lazy_q5_k &block, int i)
{
    lazy_unit unit;
    lazy_set_scales(unit, &block, i / 4);
    lazy_load_nibbles<lazy_q5_k>(unit, block.q + 8 * i);
    uint32_t fifth[2];
    lazy_load_words<lazy_q5_k>(fifth, block.fifth + 8 * (i % 4));
#pragma unroll
    for (int k = 0; k < 4; k++) unit.q[k] |= (fifth[k % 2] >> (2 * (i / 4) + k / 2) & 0x01010101) << 4;
    return unit;
}

__device__ __forceinline__ lazy_unit lazy_unit_of(const lazy_q6_k &block, int i)
{
    lazy_unit unit;
    int half = i / 8, group = 4 * half + i / 4 % 2; /* of the first run; of the second, group + 2 */
    const int8_t *scales = block.scales + 2 * group + i % 4 / 2;
    unit.scale[0] = lazy_half_at(block.scale) * (float)scales[0];
    unit.scale[1] = lazy_half_at(block.scale) * (float)scales[4];
    lazy_load_nibbles<lazy_q6_k>(unit, block.low + 8 * i);
    uint32_t high[2];
    lazy_load_words<lazy_q6_k>(high, block.high + 32 * half + 8 * (i % 4));
#pragma unroll
    for (int k = 0; k < 4; k++) unit.q[k] |= (high[k % 2] >> (2 * (group % 4) + 4 * (k / 2)) & 0x03030303) << 4;
    return unit;
}

/* Widens unit u of a row of blocks; returns the place in the row of its first run. A byte becomes the low bits of 2^23
 * plus it, which takes a quarter of the time of a conversion on some devices. */
template <class B> __device__ __forceinline__ int lazy_widen_unit(float (&values)[LAZY_UNIT], const B *row, int u)
{
    constexpr int UNITS = lazy_block_values<B> / LAZY_UNIT, PAIRS = lazy_gap<B> / 8;
    lazy_unit unit = lazy_unit_of(row[u / UNITS], u % UNITS);
#pragma unroll
    for (int i = 0; i < LAZY_UNIT; i++) {
        float integer =
            __uint_as_float(__byte_perm(unit.q[i / 4], 0x4b000000, 0x7650 + i % 4)) - (8388608.0f + lazy_zero_point<B>);
        values[i] = integer * unit.scale[i / 8];
        if constexpr (lazy_zero_point<B> == 0.0f) values[i] += unit.offset[i / 8];
    }
    return u / PAIRS * PAIRS * LAZY_UNIT + u % PAIRS * 8;
}

/* launch(a value of the format's type), or of T for weights of the backend's type T. */
template <class T, class F> cudaError_t lazy_with_format(lazy_dtype dtype, F launch)
{
    switch (dtype) {
    case LAZY_Q8_0: return launch(lazy_q8_0{});
    case LAZY_Q4_0: return launch(lazy_q4_0{});
    case LAZY_Q4_1: return launch(lazy_q4_1{});
    case LAZY_Q5_0: return launch(lazy_q5_0{});
    case LAZY_Q5_1: return launch(lazy_q5_1{});
    case LAZY_Q4_K: return launch(lazy_q4_k{});
    case LAZY_Q5_K: return launch(lazy_q5_k{});
    case LAZY_Q6_K: return launch(lazy_q6_k{});
    case LAZY_F32:
    case LAZY_F16:
    case LAZY_BF16:
    default: break;
    }
    return launch(T{});
}

#endif
