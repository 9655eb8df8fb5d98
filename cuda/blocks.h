/* blocks.h — quantized weights on the device, where they are as csrc/format.h describes them: 16 values of a block at a
 * time, widened exactly.
 *
 * These 16, a unit, are two runs of 8 values whose integers lie in the same bytes, lazy_gap<B> apart: rows of x are
 * read 16 bytes a thread. Blocks of some formats begin at any even address: their words are put together from aligned
 * ones, of which the last may end 2 bytes past the block. */
#pragma once

#include <type_traits>

#include "values.h"

enum { LAZY_UNIT = 16 };

/* Values of a block, 1 of a type that is none; then what csrc/format.h calls zero_point. */
template <class B> constexpr int lazy_block_values = sizeof(B) < 16 ? 1 : sizeof(B) < 128 ? 32 : 256;
template <class B> constexpr int lazy_gap = lazy_block_values<B> == 32 ? 16 : 32;
template <> constexpr int lazy_gap<lazy_q8_0> = 8;
template <> constexpr int lazy_gap<lazy_q6_k> = 64;
template <class B> constexpr float lazy_zero_point = 0.0f;
template <> constexpr float lazy_zero_point<lazy_q8_0> = 128.0f;
template <> constexpr float lazy_zero_point<lazy_q4_0> = 8.0f;
template <> constexpr float lazy_zero_point<lazy_q5_0> = 16.0f;
template <> constexpr float lazy_zero_point<lazy_q6_k> = 32.0f;

struct lazy_unit {
    uint32_t q[4];             /* integers, one to a byte: of the first run, then of the second */
    float scale[2], offset[2]; /* of each run; no offset where there is a zero point */
};

/* to = 4 N bytes of a block, in loads as wide as the alignment of all blocks of the format allows */
template <class B, int N>
__device__ __forceinline__ void lazy_load_words(uint32_t (&to)[N], const B &, const void *from)
{
    if constexpr (sizeof(B) % 8 == 0 && N == 2) {
        uint2 both = *static_cast<const uint2 *>(from);
        to[0] = both.x;
        to[1] = both.y;
        return;
    }
    uint32_t shift = sizeof(B) % 4 ? 8 * ((uintptr_t)from & 2) : 0;
    auto *words = reinterpret_cast<const uint32_t *>(static_cast<const char *>(from) - shift / 8);
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

/* Loads the scales of groups 2 j and 2 j + 1 of a lazy_q4_k or lazy_q5_k. */
template <class B> __device__ __forceinline__ void lazy_load_scales(lazy_unit &unit, const B &block, int j)
{
    uint4 head = reinterpret_cast<const uint4 &>(block); /* scale and min, then packed */
    int shift = 16 * (j % 2);
    uint32_t scales = head.y >> shift, mins = head.z >> shift, low = head.w >> shift;
    scales = j < 2 ? scales : (low & 0x0f0f) | (scales >> 2 & 0x3030);
    mins = j < 2 ? mins : (low >> 4 & 0x0f0f) | (mins >> 2 & 0x3030);
#pragma unroll
    for (int run = 0; run < 2; run++) {
        unit.scale[run] = lazy_half_at((uint16_t)head.x) * (float)(scales >> 8 * run & 63);
        unit.offset[run] = -(lazy_half_at((uint16_t)(head.x >> 16)) * (float)(mins >> 8 * run & 63));
    }
}

/* Unit i of a block. */
template <class B> __device__ __forceinline__ lazy_unit lazy_unit_of(const B &block, int i)
{
    constexpr bool Q8_0 = std::is_same_v<B, lazy_q8_0>, Q5_K = std::is_same_v<B, lazy_q5_k>,
                   Q6_K = std::is_same_v<B, lazy_q6_k>, LONG = lazy_block_values<B> == 256,
                   Q5 = std::is_same_v<B, lazy_q5_0> || std::is_same_v<B, lazy_q5_1>;
    lazy_unit unit;
    uint32_t low[2] = {}, high[2] = {}, fifth[1] = {};
    if constexpr (LONG && !Q6_K) lazy_load_scales(unit, block, i / 4);
    else unit.scale[0] = unit.scale[1] = lazy_half_at(block.scale);
    if constexpr (!LONG && lazy_zero_point<B> == 0.0f) unit.offset[0] = unit.offset[1] = lazy_half_at(block.min);
    if constexpr (Q8_0) lazy_load_words(unit.q, block, block.q + 16 * i);
    else if constexpr (!Q6_K) lazy_load_words(low, block, block.q + 8 * i);
    if constexpr (Q5) lazy_load_words(fifth, block, block.fifth);
    if constexpr (Q5_K) lazy_load_words(high, block, block.fifth + i % 4 * 8);
    if constexpr (Q6_K) {
        const int8_t *scales = block.scales + i / 8 * 8 + i % 8 / 2;
        unit.scale[0] *= (float)scales[0];
        unit.scale[1] *= (float)scales[4];
        lazy_load_words(low, block, block.low + 8 * i);
        lazy_load_words(high, block, block.high + i / 8 * 32 + i % 4 * 8);
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
        uint32_t &q = unit.q[k];
        int run = k / 2, half = k % 2;
        q = Q8_0 ? q ^ 0x80808080 : low[half] >> 4 * run & 0x0f0f0f0f;
        if (Q5_K) q |= (high[half] >> (i / 4 * 2 + run) & 0x01010101) << 4;
        if (Q6_K) q |= (high[half] >> (i / 4 % 2 * 2 + 4 * run) & 0x03030303) << 4;
        /* the factor moves bits 0 … 3 to the lowest bits of four bytes */
        if (Q5) q |= ((fifth[0] >> (8 * i + 16 * run + 4 * half) & 15) * 0x00204081 & 0x01010101) << 4;
    }
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

/* The same of weights that are not quantized, of which a unit is 16 bytes. */
template <class T, int N> __device__ __forceinline__ int lazy_widen_unit(float (&values)[N], const T *row, int u)
{
    static_assert(N == 16 / sizeof(T), "a unit is one load");
    lazy_pack<T> unit = reinterpret_cast<const lazy_pack<T> *>(row)[u];
#pragma unroll
    for (int i = 0; i < N; i++) values[i] = lazy_wide(unit.value[i]);
    return u * N;
}

/* Where value i of a unit is in the row, behind the unit's first. */
template <class B> __device__ constexpr int lazy_place_in_unit(int i) { return i / 8 * lazy_gap<B> + i % 8; }

/* launch(a value of the format's type), or of T for weights that are not quantized. */
template <class T, class F> auto lazy_with_format(lazy_dtype dtype, F launch)
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
    default: return launch(T{});
    }
}
