/* kernels_quantized.h — the part of kernels_template.h that reads quantized weights; format.h says what their blocks are. A value is one
 * integer times a scale, and an offset in some formats; it is rounded once, as by lazy_widen. */

enum { GROUP_VECTORS = LAZY_GROUP / LANES, HALF_VECTORS = GROUP_VECTORS / 2 };

#ifndef BYTES_AT
#define BYTES_AT(p)        widen_bytes(p)
#define SIGNED_BYTES_AT(p) widen_signed_bytes(p)

INLINE ints widen_bytes(const uint8_t *p)
{
    ints v;
    for (int lane = 0; lane < LANES; lane++) v[lane] = p[lane];
    return v;
}

INLINE ints widen_signed_bytes(const int8_t *p)
{
    ints v;
    for (int lane = 0; lane < LANES; lane++) v[lane] = p[lane];
    return v;
}
#endif
#ifndef SPLAT_F16
#define SPLAT_F16(p) splat(lazy_widen_f16(*(p)))
#endif

/* What one block multiplies its integers by and adds to them: a format of one group to a block has one factor and one offset, the others
 * have them for each group, and LAZY_Q6_K for every 16 values. */
typedef struct scales {
    vec factor, offset;
    float factors[16], offsets[8];
} scales;

INLINE void read_k_scales(scales *s, const uint16_t *scale, const uint16_t *min, const uint8_t packed[12])
{
    uint8_t unpacked[16];
    lazy_k_scales(unpacked, packed);
    float factor = SPLAT_F16(scale)[0], offset = -SPLAT_F16(min)[0];
    for (int g = 0; g < 8; g++) s->factors[g] = factor * (float)unpacked[g];
    for (int g = 0; g < 8; g++) s->offsets[g] = offset * (float)unpacked[8 + g];
}

INLINE void read_scales(scales *s, const void *block, lazy_dtype dtype)
{
    if (dtype == LAZY_Q6_K) {
        const lazy_q6_k *b = block;
        float factor = SPLAT_F16(&b->scale)[0];
        for (int i = 0; i < 16; i++) s->factors[i] = factor * (float)b->scales[i];
    } else if (dtype == LAZY_Q5_K) {
        const lazy_q5_k *b = block;
        read_k_scales(s, &b->scale, &b->min, b->packed);
    } else if (dtype == LAZY_Q4_K) {
        const lazy_q4_k *b = block;
        read_k_scales(s, &b->scale, &b->min, b->packed);
    } else { /* the others begin with the scale */
        s->factor = SPLAT_F16((const uint16_t *)block);
        if (dtype == LAZY_Q4_1) s->offset = SPLAT_F16(&((const lazy_q4_1 *)block)->min);
        if (dtype == LAZY_Q5_1) s->offset = SPLAT_F16(&((const lazy_q5_1 *)block)->min);
    }
}

/* Vector v of 32 integers: the low 4 bits from q, as in lazy_q4_0, bit 4 from `fifth`. */
INLINE ints five_bits(const uint8_t *q, const uint8_t *fifth, int v)
{
    ints low = BYTES_AT(q + v % HALF_VECTORS * LANES) >> 4 * (v / HALF_VECTORS), bit;
    int32_t word;
    memcpy(&word, fifth, sizeof word);
    for (int lane = 0; lane < LANES; lane++) bit[lane] = v * LANES + lane;
    return (low & 15) | ((word - (ints){ 0 }) >> bit & 1) << 4;
}

/* The integers of vector v of group g. Where they have 4 bits, the other bits are anything. */
INLINE ints integers(const void *block, lazy_dtype dtype, int g, int v)
{
    if (dtype == LAZY_Q8_0) return SIGNED_BYTES_AT(((const lazy_q8_0 *)block)->q + v * LANES);
    if (dtype == LAZY_Q4_0) return BYTES_AT(((const lazy_q4_0 *)block)->q + v % HALF_VECTORS * LANES) >> 4 * (v / HALF_VECTORS);
    if (dtype == LAZY_Q4_1) return BYTES_AT(((const lazy_q4_1 *)block)->q + v % HALF_VECTORS * LANES) >> 4 * (v / HALF_VECTORS);
    if (dtype == LAZY_Q5_0) return five_bits(((const lazy_q5_0 *)block)->q, ((const lazy_q5_0 *)block)->fifth, v) - 16;
    if (dtype == LAZY_Q5_1) return five_bits(((const lazy_q5_1 *)block)->q, ((const lazy_q5_1 *)block)->fifth, v);
    if (dtype == LAZY_Q4_K) return BYTES_AT(((const lazy_q4_k *)block)->q + LAZY_GROUP * (g / 2) + v * LANES) >> 4 * (g % 2);
    if (dtype == LAZY_Q5_K) {
        const lazy_q5_k *b = block;
        ints low = BYTES_AT(b->q + LAZY_GROUP * (g / 2) + v * LANES) >> 4 * (g % 2), fifth = BYTES_AT(b->fifth + v * LANES) >> g;
        return (low & 15) | (fifth & 1) << 4;
    }
    const lazy_q6_k *b = block;
    ints low = BYTES_AT(b->low + 64 * (g / 4) + LAZY_GROUP * (g % 2) + v * LANES) >> 4 * (g % 4 / 2),
         high = BYTES_AT(b->high + LAZY_GROUP * (g / 4) + v * LANES) >> 2 * (g % 4);
    return ((low & 15) | (high & 3) << 4) - 32;
}

INLINE vec counting(void)
{
    vec v;
    for (int lane = 0; lane < LANES; lane++) v[lane] = (float)lane;
    return v;
}

/* The values of vector v of group g. */
INLINE vec widen_group(const void *block, lazy_dtype dtype, const scales *s, int g, int v)
{
    ints q = integers(block, dtype, g, v);
    bool has_offset = dtype == LAZY_Q4_1 || dtype == LAZY_Q5_1 || dtype == LAZY_Q4_K || dtype == LAZY_Q5_K;
    vec factor = s->factor, offset = s->offset;
    if (dtype == LAZY_Q6_K) factor = splat(s->factors[2 * g + v * LANES / 16]);
    if (dtype == LAZY_Q4_K || dtype == LAZY_Q5_K) {
        factor = splat(s->factors[g]);
        offset = splat(s->offsets[g]);
    }
    if (dtype == LAZY_Q4_0 || dtype == LAZY_Q4_1 || dtype == LAZY_Q4_K) {
#ifdef LOOK_UP
        return LOOK_UP(has_offset ? counting() * factor + offset : (counting() - 8.0f) * factor, q);
#else
        q &= 15;
        if (dtype == LAZY_Q4_0) q -= 8;
#endif
    }
    vec value = __builtin_convertvector(q, vec);
    return has_offset ? value * factor + offset : value * factor;
}

INLINE void widen_blocks(float *y, const void *x, lazy_dtype dtype, int n)
{
    const char *block = x;
    for (; n > 0; n -= lazy_formats[dtype].values, block += lazy_formats[dtype].bytes) {
        scales s;
        read_scales(&s, block, dtype);
        for (int g = 0; g < lazy_formats[dtype].values / LAZY_GROUP; g++)
#pragma GCC unroll 8
            for (int v = 0; v < GROUP_VECTORS; v++, y += LANES) store(y, widen_group(block, dtype, &s, g, v));
    }
}
