/* kernels_quantized.h — the part of the templates that reads quantized weights; format.h says what their blocks are. A value is one
 * integer times a scale, and an offset in some formats; it is rounded once, as by lazy_widen. */

enum { GROUP_VECTORS = LAZY_GROUP / LANES, HALF_VECTORS = GROUP_VECTORS / 2 };

#ifndef BYTES_AT
#define BYTES_AT(p)        widen_bytes(p)
#define SIGNED_BYTES_AT(p) widen_signed_bytes(p)

INLINE ints widen_bytes(const uint8_t *p)
{
    uint8_t v __attribute__((vector_size(LANES)));
    memcpy(&v, p, sizeof v);
    return __builtin_convertvector(v, ints);
}

INLINE ints widen_signed_bytes(const int8_t *p)
{
    int8_t v __attribute__((vector_size(LANES)));
    memcpy(&v, p, sizeof v);
    return __builtin_convertvector(v, ints);
}
#endif
INLINE vec splat_f16(const uint16_t *p) { return splat(lazy_f16[*p]); }

INLINE vec counting(void)
{
    vec v;
    for (int lane = 0; lane < LANES; lane++) v[lane] = (float)lane;
    return v;
}

/* The factor and the offset of a block's integers: a format of one group to a block has one factor and one offset. The others
 * have factors[0 … 7] and [8 … 15] for the groups; LAZY_Q6_K has factors for every 16 values and nothing to add. */
typedef struct scales {
    vec factor, offset;
    float factors[16];
} scales;

/* lazy_k_scales of a lazy_q4_k or lazy_q5_k; both begin with scale, min and packed. */
INLINE void unpack_k_scales(uint8_t unpacked[16], const void *block)
{
    typedef uint32_t quad __attribute__((vector_size(16)));
    quad head;
    memcpy(&head, block, sizeof head);
    quad low = SHUFFLE(quad, head, head, 1, 3, 2, 3) >> (quad){ 0, 0, 0, 4 }, high = SHUFFLE(quad, head, head, 0, 1, 0, 2) >> 2;
    quad all = (low & (quad){ 0x3f3f3f3f, 0x0f0f0f0f, 0x3f3f3f3f, 0x0f0f0f0f }) | (high & (quad){ 0, 0x30303030, 0, 0x30303030 });
    memcpy(unpacked, &all, sizeof all);
}

INLINE void read_k_scales(scales *s, const void *block)
{
    const uint16_t *head = block;
    uint8_t unpacked[16];
    unpack_k_scales(unpacked, block);
    vec factor = splat_f16(head), offset = -splat_f16(head + 1);
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += LANES) {
        vec times = i + LANES <= 8 ? factor : i >= 8 ? offset : choose(counting() < 8.0f, factor, offset);
        store(s->factors + i, __builtin_convertvector(BYTES_AT(unpacked + i), vec) * times);
    }
}

INLINE void read_scales(scales *s, const void *block, lazy_dtype dtype)
{
    if (dtype == LAZY_Q6_K) {
        const lazy_q6_k *b = block;
        vec factor = splat_f16(&b->scale);
#pragma GCC unroll 4
        for (int i = 0; i < 16; i += LANES) store(s->factors + i, __builtin_convertvector(SIGNED_BYTES_AT(b->scales + i), vec) * factor);
    } else if (dtype == LAZY_Q5_K || dtype == LAZY_Q4_K) {
        read_k_scales(s, block);
    } else { /* the others begin with the scale */
        s->factor = splat_f16((const uint16_t *)block);
        if (dtype == LAZY_Q4_1) s->offset = splat_f16(&((const lazy_q4_1 *)block)->min);
        if (dtype == LAZY_Q5_1) s->offset = splat_f16(&((const lazy_q5_1 *)block)->min);
    }
    if (lazy_formats[dtype].values > LAZY_GROUP) __asm__("" : "+m"(s->factors)); /* broadcasts from memory cost less than from a register */
}

typedef uint8_t bytes __attribute__((vector_size(LAZY_GROUP)));
typedef uint8_t loose_bytes __attribute__((vector_size(LAZY_GROUP), aligned(1), may_alias)); /* anywhere in memory */

/* The address of group g's integers: in the block, or of LAZY_Q5_K and LAZY_Q6_K in `room` (32 bytes), one to a byte. */
INLINE const uint8_t *group_at(uint8_t *room, const void *block, lazy_dtype dtype, int g)
{
    bytes q;
    switch (dtype) {
    case LAZY_Q8_0: return (const uint8_t *)((const lazy_q8_0 *)block)->q;
    case LAZY_Q4_0: return ((const lazy_q4_0 *)block)->q;
    case LAZY_Q4_1: return ((const lazy_q4_1 *)block)->q;
    case LAZY_Q5_0: return ((const lazy_q5_0 *)block)->q;
    case LAZY_Q5_1: return ((const lazy_q5_1 *)block)->q;
    case LAZY_Q4_K: return ((const lazy_q4_k *)block)->q + LAZY_GROUP * (g / 2);
    case LAZY_Q5_K: {
        const lazy_q5_k *b = block;
        q = (*(const loose_bytes *)(b->q + LAZY_GROUP * (g / 2)) >> 4 * (g % 2) & 15) | (*(const loose_bytes *)(b->fifth) >> g & 1) << 4;
        break;
    }
    default: {
        const lazy_q6_k *b = block;
        bytes low = *(const loose_bytes *)(b->low + 64 * (g / 4) + LAZY_GROUP * (g % 2)) >> 4 * (g % 4 / 2) & 15,
              high = *(const loose_bytes *)(b->high + LAZY_GROUP * (g / 4)) >> 2 * (g % 4) & 3;
        q = (low | high << 4) - 32;
    }
    }
    memcpy(room, &q, sizeof q);
    return room;
}

/* LANES integers, the v-th ones of group g, from the address above. Where they have 4 bits, the other bits are anything. */
INLINE ints integers(const uint8_t *q, lazy_dtype dtype, int g, int v)
{
    if (dtype == LAZY_Q8_0 || dtype == LAZY_Q5_K || dtype == LAZY_Q6_K) return SIGNED_BYTES_AT((const int8_t *)q + v * LANES);
    if (dtype == LAZY_Q4_K) return BYTES_AT(q + v * LANES) >> 4 * (g % 2);
    ints low = BYTES_AT(q + v % HALF_VECTORS * LANES) >> 4 * (v / HALF_VECTORS);
    if (dtype == LAZY_Q4_0 || dtype == LAZY_Q4_1) return low;
    int32_t fifth; /* before q in the block */
    memcpy(&fifth, q - sizeof fifth, sizeof fifth);
    ints lane;
    for (int i = 0; i < LANES; i++) lane[i] = v * LANES + i;
    ints five_bits = (low & 15) | ((fifth - (ints){ 0 }) >> lane & 1) << 4;
    return dtype == LAZY_Q5_0 ? five_bits - 16 : five_bits;
}

/* Values v LANES … of group g. */
INLINE vec widen_group(const uint8_t *q, lazy_dtype dtype, const scales *s, int g, int v)
{
    ints whole = integers(q, dtype, g, v);
    bool has_offset = dtype == LAZY_Q4_1 || dtype == LAZY_Q5_1 || dtype == LAZY_Q4_K || dtype == LAZY_Q5_K;
    vec factor = s->factor, offset = s->offset;
    if (dtype == LAZY_Q6_K) factor = splat(s->factors[2 * g + v * LANES / 16]);
    if (dtype == LAZY_Q4_K || dtype == LAZY_Q5_K) {
        factor = splat(s->factors[g]);
        offset = splat(s->factors[8 + g]);
    }
    if (dtype == LAZY_Q4_0 || dtype == LAZY_Q4_1 || dtype == LAZY_Q4_K) {
#ifdef LOOK_UP
        return LOOK_UP(has_offset ? counting() * factor + offset : (counting() - 8.0f) * factor, whole);
#else
        whole &= 15;
        if (dtype == LAZY_Q4_0) whole -= 8;
#endif
    }
    vec value = __builtin_convertvector(whole, vec);
    return has_offset ? value * factor + offset : value * factor;
}

INLINE void widen_blocks(float *y, const void *x, lazy_dtype dtype, int n)
{
    const char *block = x;
    for (; n > 0; n -= lazy_formats[dtype].values, block += lazy_formats[dtype].bytes) {
        scales s;
        read_scales(&s, block, dtype);
#pragma GCC unroll 8
        for (int g = 0; g < lazy_formats[dtype].values / LAZY_GROUP; g++) {
            uint8_t room[LAZY_GROUP];
            const uint8_t *q = group_at(room, block, dtype, g);
#pragma GCC unroll 8
            for (int v = 0; v < GROUP_VECTORS; v++, y += LANES) store(y, widen_group(q, dtype, &s, g, v));
        }
    }
}
