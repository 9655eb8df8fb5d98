/* emulated_bf16.h — AVX512-BF16 and AMX on processors that have AVX-512 alone, by Intel's description of the
 * instructions: numbers below the normal ones count as zero. Included before a file of the core, in place of the
 * compiler's intrinsics. */
#pragma once

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LAZY_EMULATED_BF16

typedef uint32_t emulated_words __attribute__((vector_size(64)));
typedef float emulated_floats __attribute__((vector_size(64)));

static inline float emulated_normal(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }

static inline float emulated_widened(uint32_t half)
{
    uint32_t bits = half << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return emulated_normal(x);
}

static inline uint16_t emulated_narrowed(float x)
{
    uint32_t bits;
    x = emulated_normal(x);
    memcpy(&bits, &x, sizeof bits);
    if (isnan(x)) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline float emulated_fma(float a, float b, float c) { return emulated_normal(fmaf(a, b, c)); }

#define EMULATED static inline __attribute__((target("avx512f,fma")))

EMULATED __m512 emulated_dpbf16(__m512 sum, emulated_words a, emulated_words b)
{
    emulated_floats s = (emulated_floats)sum;
    for (int i = 0; i < 16; i++) {
        s[i] = emulated_fma(emulated_widened(a[i] >> 16), emulated_widened(b[i] >> 16), emulated_normal(s[i]));
        s[i] = emulated_fma(emulated_widened(a[i] & 0xffff), emulated_widened(b[i] & 0xffff), s[i]);
    }
    return (__m512)s;
}

EMULATED __m512 emulated_cvtne2(emulated_floats high, emulated_floats low)
{
    uint16_t halves[32];
    for (int i = 0; i < 16; i++) {
        halves[i] = emulated_narrowed(low[i]);
        halves[16 + i] = emulated_narrowed(high[i]);
    }
    __m512 packed;
    memcpy(&packed, halves, sizeof packed);
    return packed;
}

EMULATED __m256i emulated_cvtne(emulated_floats x)
{
    uint16_t halves[16];
    for (int i = 0; i < 16; i++) halves[i] = emulated_narrowed(x[i]);
    __m256i packed;
    memcpy(&packed, halves, sizeof packed);
    return packed;
}

/* ---- AMX -------------------------------------------------------------------------------- */

typedef struct emulated_tile {
    int rows, bytes;
    uint32_t word[16][16];
} emulated_tile;

static __thread emulated_tile emulated_tiles[8];

static inline void emulated_loadconfig(const void *config)
{
    const uint8_t *at = config;
    for (int i = 0; i < 8; i++) {
        uint16_t bytes;
        memcpy(&bytes, at + 16 + 2 * i, sizeof bytes);
        emulated_tiles[i] = (emulated_tile){ .rows = at[48 + i], .bytes = bytes };
        if (at[0] != 1 || at[48 + i] > 16 || bytes > 64 || !at[48 + i] != !bytes) __builtin_trap();
    }
}

/* The tile, which must have been configured. */
static inline emulated_tile *emulated_at(int tile)
{
    if (!emulated_tiles[tile].rows) __builtin_trap();
    return &emulated_tiles[tile];
}

static inline void emulated_release(void) { memset(emulated_tiles, 0, sizeof emulated_tiles); }

static inline void emulated_clear(int tile) { memset(emulated_at(tile)->word, 0, sizeof emulated_tiles->word); }

static inline void emulated_load(int tile, const void *from, int64_t stride)
{
    emulated_clear(tile);
    for (int r = 0; r < emulated_tiles[tile].rows; r++)
        memcpy(emulated_tiles[tile].word[r], (const char *)from + r * stride, (size_t)emulated_tiles[tile].bytes);
}

static inline void emulated_store(int tile, void *to, int64_t stride)
{
    for (int r = 0; r < emulated_at(tile)->rows; r++)
        memcpy((char *)to + r * stride, emulated_tiles[tile].word[r], (size_t)emulated_tiles[tile].bytes);
}

static inline void emulated_dot(int sums, int left, int right)
{
    emulated_tile *c = emulated_at(sums), *a = emulated_at(left), *b = emulated_at(right);
    if (c->rows != a->rows || c->bytes != b->bytes || a->bytes != 4 * b->rows) __builtin_trap();
    for (int r = 0; r < c->rows; r++)
        for (int j = 0; j < c->bytes / 4; j++) {
            float even = 0.0f, odd = 0.0f, sum;
            for (int i = 0; i < b->rows; i++) {
                uint32_t x = a->word[r][i], y = b->word[i][j];
                even = emulated_fma(emulated_widened(x & 0xffff), emulated_widened(y & 0xffff), even);
                odd = emulated_fma(emulated_widened(x >> 16), emulated_widened(y >> 16), odd);
            }
            memcpy(&sum, &c->word[r][j], sizeof sum);
            sum = emulated_normal(emulated_normal(sum) + emulated_normal(even + odd));
            memcpy(&c->word[r][j], &sum, sizeof sum);
        }
}

#define _mm512_dpbf16_ps(sum, a, b)    emulated_dpbf16(sum, (emulated_words)(a), (emulated_words)(b))
#define _mm512_cvtne2ps_pbh(high, low) emulated_cvtne2((emulated_floats)(high), (emulated_floats)(low))
#define _mm512_cvtneps_pbh(x)          emulated_cvtne((emulated_floats)(x))
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(config)        emulated_loadconfig(config)
#define _tile_release()                 emulated_release()
#define _tile_zero(tile)                emulated_clear(tile)
#define _tile_loadd(tile, from, stride) emulated_load(tile, from, stride)
#define _tile_stored(tile, to, stride)  emulated_store(tile, to, stride)
#define _tile_dpbf16ps(c, a, b)         emulated_dot(c, a, b)
