/* ceilings.c — the peak rates of the CPU: multiply-adds in registers, and reading memory. */
#include "ceilings.h"

#include <stdatomic.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../../csrc/cpu/cpu.h"

enum { RANDOM = 64, CHAINS = 12 /* enough to hide the latency, and they fit the registers */ };

/* One instruction set and arithmetic. What the functions return has no use but to keep the compiler from removing the
 * work. */
typedef struct peak {
    const char *name; /* as a backend's variant */
    float (*multiply_adds)(const float *random /* (RANDOM,) */, int steps);
    float (*read)(const void *memory, size_t bytes);
    int per_step; /* multiply-adds of a step */
} peak;

/* steps times CHAINS of `chain[i] = NEXT`; a, b: operands. */
#define MULTIPLY_ADDS(NAME, TARGET, VECTOR, NEXT)                                                                      \
    TARGET static float multiply_adds_##NAME(const float *random, int steps)                                           \
    {                                                                                                                  \
        VECTOR chain[CHAINS], a, b, total = { 0 };                                                                     \
        memcpy(&a, random + 16, sizeof a);                                                                             \
        memcpy(&b, random + RANDOM / 2, sizeof b);                                                                     \
        for (int i = 0; i < CHAINS; i++) memcpy(&chain[i], random + i, sizeof a);                                      \
        for (int step = 0; step < steps; step++)                                                                       \
            _Pragma("GCC unroll 12") for (int i = 0; i < CHAINS; i++) chain[i] = NEXT;                                 \
        for (int i = 0; i < CHAINS; i++) total += chain[i];                                                            \
        return (float)total[0];                                                                                        \
    }

/* Reads in four streams, which the hardware prefetches well. */
#define READ(NAME, TARGET, VECTOR)                                                                                     \
    TARGET static float read_##NAME(const void *memory, size_t bytes)                                                  \
    {                                                                                                                  \
        size_t n = bytes / sizeof(VECTOR) / 4;                                                                         \
        const VECTOR *from = memory;                                                                                   \
        VECTOR sum[4] = { { 0 } };                                                                                     \
        for (size_t i = 0; i < n; i++)                                                                                 \
            _Pragma("GCC unroll 4") for (size_t s = 0; s < 4; s++) sum[s] += from[s * n + i];                          \
        VECTOR total = sum[0] + sum[1] + sum[2] + sum[3];                                                              \
        return total[0];                                                                                               \
    }

typedef float floats4 __attribute__((vector_size(16), aligned(4)));

/* a chain alternates between a value and b minus the value */
#define ALTERNATE(v) chain[i] * ((v){ 0 } - 0x1.fffffep-1f) + b

MULTIPLY_ADDS(generic, , floats4, ALTERNATE(floats4))
READ(generic, , floats4)

#if defined(__x86_64__)
#define AVX2        __attribute__((target("avx2,fma")))
#define AVX_VNNI    __attribute__((target("avx2,fma,avxvnni")))
#define AVX512      __attribute__((target("avx2,fma,avx512f")))
#define AVX512_BF16 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512bf16")))
#define AVX512_AMX  __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,amx-tile,amx-bf16")))
#define AVX512_INT8 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512vnni")))

typedef float floats8 __attribute__((vector_size(32), aligned(4)));
typedef int32_t ints8 __attribute__((vector_size(32), aligned(4)));
typedef float floats16 __attribute__((vector_size(64), aligned(4)));
typedef int32_t ints16 __attribute__((vector_size(64), aligned(4)));

MULTIPLY_ADDS(avx2, AVX2, floats8, ALTERNATE(floats8))
READ(avx2, AVX2, floats8)
MULTIPLY_ADDS(avx2_int8, AVX2, ints8, chain[i] + (ints8)_mm256_madd_epi16((__m256i)a, (__m256i)(b + step)))
MULTIPLY_ADDS(avxvnni_int8, AVX_VNNI, ints8, (ints8)_mm256_dpbusd_avx_epi32((__m256i)chain[i], (__m256i)a, (__m256i)b))
MULTIPLY_ADDS(avx512, AVX512, floats16, ALTERNATE(floats16))
READ(avx512, AVX512, floats16)
MULTIPLY_ADDS(avx512_bf16, AVX512_BF16, floats16,
              (floats16)_mm512_dpbf16_ps((__m512)chain[i], (__m512bh)a, (__m512bh)b))
MULTIPLY_ADDS(avx512_int8, AVX512_INT8, ints16, (ints16)_mm512_dpbusd_epi32((__m512i)chain[i], (__m512i)a, (__m512i)b))

enum { TILES = 4, TILE_ADDS = 16 * 16 * 32 };

AVX512_AMX static float multiply_adds_avx512_amx(const float *random, int steps)
{
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shapes = { .palette = 1 };
    float sums[16][16];
    for (int tile = 0; tile < 8; tile++) {
        shapes.rows[tile] = 16;
        shapes.row_bytes[tile] = 64;
    }
    _tile_loadconfig(&shapes);
    _tile_loadd(4, random, 0); /* one row, sixteen times */
    _tile_loadd(5, random + RANDOM / 2, 0);
    _tile_loadd(6, random + RANDOM / 4, 0);
    _tile_loadd(7, random + 1, 0);
    for (int step = 0; step < steps; step++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, sizeof *sums);
    _tile_release();
    return sums[0][0];
}
#endif

static const peak peaks[] = {
#if defined(__x86_64__)
    { "avx512_int8", multiply_adds_avx512_int8, read_avx512, 64 * CHAINS },
    { "avx512_amx", multiply_adds_avx512_amx, read_avx512, TILES *TILE_ADDS },
    { "avx512_bf16", multiply_adds_avx512_bf16, read_avx512, 32 * CHAINS },
    { "avx512", multiply_adds_avx512, read_avx512, 16 * CHAINS },
    { "avxvnni_int8", multiply_adds_avxvnni_int8, read_avx2, 32 * CHAINS },
    { "avx2_int8", multiply_adds_avx2_int8, read_avx2, 16 * CHAINS },
    { "avx2", multiply_adds_avx2, read_avx2, 8 * CHAINS },
#endif
    { "generic", multiply_adds_generic, read_generic, 4 * CHAINS },
};

typedef struct ceiling {
    const peak *peak;
    const float *random;
    const char *memory;
    size_t bytes; /* of a task */
    _Atomic float sink;
} ceiling;

enum { TASKS_PER_THREAD = 16, STEPS = 200 * 1000 };

static const peak *peak_of(const lazy_backend *backend)
{
    const peak *p = peaks;
    while (strcmp(p->name, backend->variant) != 0 && strcmp(p->name, "generic") != 0) p++;
    return p;
}

static void multiply_add(void *job, int task, int worker)
{
    (void)task, (void)worker;
    ceiling *t = job;
    t->sink = t->peak->multiply_adds(t->random, STEPS);
}

int ceiling_multiply_adds(lazy_stream *stream, double *flops, lazy_error *err)
{
    uint32_t words[RANDOM], state = 1; /* both halves of each, as bf16, and with them the whole as f32 are ±0.5 … ±1 */
    for (int i = 0; i < RANDOM; i++) {
        state = state * 1664525u + 1013904223u;
        words[i] = (state & 0x807f807fu) | 0x3f003f00u;
    }
    float random[RANDOM];
    memcpy(random, words, sizeof random);
    ceiling t = { .peak = peak_of(stream->backend), .random = random };
    int tasks = TASKS_PER_THREAD * stream->backend->threads;
    *flops = 2.0 * t.peak->per_step * STEPS * tasks;
    return lazy_cpu_run(stream, multiply_add, &t, tasks, err);
}

static void read_part(void *job, int task, int worker)
{
    (void)worker;
    ceiling *t = job;
    t->sink = t->peak->read(t->memory + (size_t)task * t->bytes, t->bytes);
}

int ceiling_read(lazy_stream *stream, const void *memory, size_t bytes, lazy_error *err)
{
    int tasks = TASKS_PER_THREAD * stream->backend->threads;
    size_t part = bytes / (size_t)tasks / sizeof(float) * sizeof(float);
    ceiling t = { .peak = peak_of(stream->backend), .memory = memory, .bytes = part };
    return lazy_cpu_run(stream, read_part, &t, tasks, err);
}
