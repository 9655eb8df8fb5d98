/* quantized.h — the part of the templates that reads quantized weights; format.h says what their blocks are. A group of
 * 32 values is read as unsigned integers, one to a byte; a value is an integer less the format's zero point, times a
 * scale, plus an offset in some formats. It is rounded once, as by lazy_widen.
 *
 * The including file defines what vectors.h asks for and, where the instruction set has them, BYTES_AT and
 * SIGNED_BYTES_AT: as many integers as a vector has; TWICE(address), 16 bytes in both halves of 8 words;
 * BYTES_OF_BITS(word), 32 bytes of 0 or 1; and LOOK_UP(table, ints), by the low 4 bits of each. With OPERANDS_BF16 it
 * defines NEIGHBOURS, as for operands.h. */
#pragma once
#pragma GCC diagnostic ignored "-Wpsabi" /* about passing vectors of 32 bytes: all functions that do are inlined */

enum { GROUP_VECTORS = LAZY_GROUP / LANES, WORDS = LAZY_GROUP / 4 };

typedef int32_t words __attribute__((vector_size(LAZY_GROUP))); /* the bytes of a group */
typedef int32_t loose_words __attribute__((vector_size(LAZY_GROUP), aligned(1), may_alias));

INLINE words words_at(const void *p) { return *(const loose_words *)p; }
INLINE words splat_bytes(int byte) { return (int32_t)((uint32_t)byte * 0x01010101u) - (words){ 0 }; }

#ifndef BYTES_AT
typedef uint8_t loose_bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef int8_t loose_signed_bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
#define BYTES_AT(p)        __builtin_convertvector(*(const loose_bytes *)(p), ints)
#define SIGNED_BYTES_AT(p) __builtin_convertvector(*(const loose_signed_bytes *)(p), ints)
#endif

/* 16 bytes: the low 4 bits of each, then the high ones. */
INLINE words nibbles_at(const void *p)
{
#ifdef TWICE
    return TWICE(p) >> (words){ 0, 0, 0, 0, 4, 4, 4, 4 } & splat_bytes(15);
#else
    int32_t q __attribute__((vector_size(16)));
    memcpy(&q, p, sizeof q);
    __typeof__(q) both[2] = { q & 0x0f0f0f0f, q >> 4 & 0x0f0f0f0f };
    return words_at(both);
#endif
}

#ifndef BYTES_OF_BITS
/* The factor moves bits 0 … 3 to the lowest bits of four bytes. */
#define BYTES_OF_BITS(word)                                                                                            \
    (((((int32_t)(word) - (words){ 0 }) >> (words){ 0, 4, 8, 12, 16, 20, 24, 28 }) & 15) * 0x00204081 & 0x01010101)
#endif

/* ---- integers --------------------------------------------------------------------------- */

/* The unsigned integers of group g of a block. */
INLINE words integers_of(const void *block, lazy_dtype dtype, int g)
{
    const words nibble = splat_bytes(15);
    switch (dtype) {
    case LAZY_Q8_0: return words_at(((const lazy_q8_0 *)block)->q) ^ splat_bytes(128);
    case LAZY_Q4_0: return nibbles_at(((const lazy_q4_0 *)block)->q);
    case LAZY_Q4_1: return nibbles_at(((const lazy_q4_1 *)block)->q);
    case LAZY_Q5_0:
    case LAZY_Q5_1: {
        const uint8_t *fifth =
            dtype == LAZY_Q5_0 ? ((const lazy_q5_0 *)block)->fifth : ((const lazy_q5_1 *)block)->fifth;
        uint32_t bits;
        memcpy(&bits, fifth, sizeof bits);
        return nibbles_at(fifth + sizeof bits) | BYTES_OF_BITS(bits) << 4;
    }
    case LAZY_Q4_K: return words_at(((const lazy_q4_k *)block)->q + LAZY_GROUP * (g / 2)) >> 4 * (g % 2) & nibble;
    case LAZY_Q5_K: {
        const lazy_q5_k *b = block;
        return (words_at(b->q + LAZY_GROUP * (g / 2)) >> 4 * (g % 2) & nibble) | (words_at(b->fifth) >> g & 0x01010101)
                                                                                     << 4;
    }
    default: {
        const lazy_q6_k *b = block;
        words low = words_at(b->low + 64 * (g / 4) + LAZY_GROUP * (g % 2)) >> 4 * (g % 4 / 2),
              high = words_at(b->high + LAZY_GROUP * (g / 4)) >> 2 * (g % 4);
        return (low & nibble) | (high & 0x03030303) << 4;
    }
    }
}

/* ---- scales ----------------------------------------------------------------------------- */

INLINE vec counting(void)
{
    vec v;
    for (int lane = 0; lane < LANES; lane++) v[lane] = (float)lane;
    return v;
}

/* The factors that a long block has for its integer scales and, where it has any, for its offsets. */
INLINE float scale_of_block(const void *block, lazy_dtype dtype)
{
    return lazy_f16[dtype == LAZY_Q6_K ? ((const lazy_q6_k *)block)->scale : *(const uint16_t *)block];
}
INLINE float offset_of_block(const void *block) { return -lazy_f16[((const uint16_t *)block)[1]]; }

/* Integer scales i … i + LANES - 1 of a long block: of 8 groups, then their offsets; of LAZY_Q6_K's 16 half groups. */
INLINE vec integer_scales(const void *block, lazy_dtype dtype, int i)
{
    if (dtype == LAZY_Q6_K)
        return __builtin_convertvector(SIGNED_BYTES_AT(((const lazy_q6_k *)block)->scales + i), vec);
    /* a lazy_q4_k or lazy_q5_k: both begin with scale, min and packed */
    typedef uint32_t quad __attribute__((vector_size(16)));
    quad head;
    memcpy(&head, block, sizeof head);
    quad low = SHUFFLE(quad, head, head, 1, 3, 2, 3) >> (quad){ 0, 0, 0, 4 },
         high = SHUFFLE(quad, head, head, 0, 1, 0, 2) >> 2;
    quad all = (low & (quad){ 0x3f3f3f3f, 0x0f0f0f0f, 0x3f3f3f3f, 0x0f0f0f0f }) |
               (high & (quad){ 0, 0x30303030, 0, 0x30303030 });
    uint8_t unpacked[16];
    memcpy(unpacked, &all, sizeof all);
    return __builtin_convertvector(BYTES_AT(unpacked + i), vec);
}

/* The scales of a block's groups, from OFFSETS on their offsets; of LAZY_Q6_K the scales of its half groups. */
typedef float scales[16];
enum { OFFSETS = 8 };

INLINE void read_scales(scales s, const void *block, lazy_dtype dtype)
{
    const uint16_t *head = block;
    if (lazy_formats[dtype].values == LAZY_GROUP) {
        s[0] = lazy_f16[head[0]];
        if (lazy_formats[dtype].has_offset) s[OFFSETS] = lazy_f16[head[1]];
        return;
    }
    vec scale = splat(scale_of_block(block, dtype)),
        offset = lazy_formats[dtype].has_offset ? splat(offset_of_block(block)) : scale;
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += LANES) {
        vec factor = i + LANES <= OFFSETS ? scale
                     : i >= OFFSETS       ? offset
                                          : choose(counting() < (float)OFFSETS, scale, offset);
        store(s + i, integer_scales(block, dtype, i) * factor);
    }
    __asm__("" : "+m"(*(float(*)[16])s)); /* broadcasts from memory cost less than from a register */
}

/* ---- values ----------------------------------------------------------------------------- */

/* The address of group g's integers: in the block where they have 4 or 8 bits, else one to a byte in `room` (32,). */
INLINE const uint8_t *group_at(uint8_t *room, const void *block, lazy_dtype dtype, int g)
{
    switch (dtype) {
    case LAZY_Q8_0: return (const uint8_t *)((const lazy_q8_0 *)block)->q;
    case LAZY_Q4_0: return ((const lazy_q4_0 *)block)->q;
    case LAZY_Q4_1: return ((const lazy_q4_1 *)block)->q;
    case LAZY_Q4_K: return ((const lazy_q4_k *)block)->q + LAZY_GROUP * (g / 2);
    default: break;
    }
    words integers = integers_of(block, dtype, g);
    memcpy(room, &integers, sizeof integers);
    /* bytes in memory are widened by fewer instructions than those in a register */
    __asm__("" : "+m"(*(uint8_t(*)[LAZY_GROUP])room));
    return room;
}

/* Values v LANES … of group g, from the address above. */
INLINE vec widen_group(const uint8_t *q, lazy_dtype dtype, const scales s, int g, int v)
{
    enum { HALF_VECTORS = GROUP_VECTORS / 2 };
    const lazy_format *format = &lazy_formats[dtype];
    const bool in_halves = dtype == LAZY_Q4_0 || dtype == LAZY_Q4_1;
    vec scale = splat(s[dtype == LAZY_Q6_K ? 2 * g + v * LANES / 16 : g]), value;
    ints integers = dtype == LAZY_Q8_0 ? SIGNED_BYTES_AT((const int8_t *)q + v * LANES)
                    : in_halves        ? BYTES_AT(q + v % HALF_VECTORS * LANES) >> 4 * (v / HALF_VECTORS)
                                       : BYTES_AT(q + v * LANES);
    if (dtype == LAZY_Q4_K) integers >>= 4 * (g % 2);
    if (in_halves || dtype == LAZY_Q4_K) {
#ifdef LOOK_UP
        vec table = (counting() - (float)format->zero_point) * scale;
        return LOOK_UP(format->has_offset ? counting() * scale + s[OFFSETS + g] : table, integers);
#endif
        integers &= 15;
    }
    value = __builtin_convertvector(dtype == LAZY_Q8_0 ? integers : integers - format->zero_point, vec);
    return format->has_offset ? value * scale + s[OFFSETS + g] : value * scale;
}

/* Vectors of values that make one of operands, and that one: of group g, from vector v on. */
#ifdef OPERANDS_BF16
enum { STEP_VECTORS = 2 };
INLINE vec group_operands(const uint8_t *q, lazy_dtype dtype, const scales s, int g, int v)
{
    return NEIGHBOURS(widen_group(q, dtype, s, g, v), widen_group(q, dtype, s, g, v + 1));
}
#else
enum { STEP_VECTORS = 1 };
INLINE vec group_operands(const uint8_t *q, lazy_dtype dtype, const scales s, int g, int v)
{
    return widen_group(q, dtype, s, g, v);
}
#endif

/* to[:] = the k values of whole blocks as operands. Prefetches as many bytes from `ahead` bytes further on. */
INLINE void form_blocks(float *to, const char *block, lazy_dtype dtype, int k, int64_t ahead)
{
    const int groups = lazy_formats[dtype].values / LAZY_GROUP, bytes = lazy_formats[dtype].bytes;
    for (; k > 0; k -= lazy_formats[dtype].values, block += bytes) {
        scales s;
        read_scales(s, block, dtype);
        EACH(g, groups) {
            uint8_t room[LAZY_GROUP];
            const uint8_t *q = group_at(room, block, dtype, g);
            __builtin_prefetch(block + g * bytes / groups + ahead);
#pragma GCC unroll 8
            for (int v = 0; v < GROUP_VECTORS; v += STEP_VECTORS, to += LANES)
                store(to, group_operands(q, dtype, s, g, v));
        }
    }
}

/* The same for any quantized type; nothing for others. */
INLINE void form_quantized(void *to, const void *blocks, lazy_dtype dtype, int k, int64_t ahead)
{
#define FORM_BLOCKS(format)                                                                                            \
    case LAZY_##format: form_blocks(to, blocks, LAZY_##format, k, ahead); break;
    switch (dtype) {
        FORM_BLOCKS(Q8_0)
        LAZY_BELOW_8_BITS(FORM_BLOCKS)
    default: break;
    }
#undef FORM_BLOCKS
}
