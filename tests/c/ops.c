/* ops.c — what ops.h declares. */
#include "ops.h"

lazy_compute computing;
lazy_dtype keeping;
int each = 1;

enum { GUARDS = 16 };
static const uint32_t GUARD = 0x7fc0dead; /* a NaN of our own */

static struct block {
    uint32_t *memory;
    bool guarded;
    size_t n; /* words between the guards */
} blocks[1000];
static size_t n_blocks;

__attribute__((noinline)) static void *block_of(size_t bytes, bool guarded, size_t n)
{
    if (n_blocks == sizeof blocks / sizeof *blocks) abort();
    uint32_t *memory = malloc(bytes);
    blocks[n_blocks++] = (struct block){ memory, guarded, n };
    return memory;
}

void *room(size_t bytes) { return block_of(bytes, false, 0); }

void *guarded(size_t n)
{
    uint32_t *memory = block_of((n + 2 * GUARDS) * sizeof *memory, true, n);
    for (size_t i = 0; i < n + 2 * GUARDS; i++) memory[i] = GUARD;
    return memory + GUARDS;
}

bool all_freed(void)
{
    bool whole = true;
    for (const struct block *b = blocks; b < blocks + n_blocks; b++) {
        for (size_t i = 0; b->guarded && i < GUARDS; i++)
            whole = whole && b->memory[i] == GUARD && b->memory[GUARDS + b->n + i] == GUARD;
        free(b->memory);
    }
    n_blocks = 0;
    return whole;
}

float *random_floats(size_t n)
{
    float *data = room((n + 1) * sizeof *data);
    for (size_t i = 0; i < n; i++) {
        data[i] = random_float();
        if (computing == LAZY_COMPUTE_F32) continue; /* with int8, attention is in bf16 */
        uint32_t bits;
        memcpy(&bits, &data[i], sizeof bits);
        bits &= 0xffff0000;
        memcpy(&data[i], &bits, sizeof bits);
    }
    return data;
}

int32_t *random_positions(int n, int length)
{
    int32_t *positions = room((size_t)n * sizeof *positions);
    int n_chosen = 0;
    for (int i = 0; i < length - 1; i++)
        if (random_int(1, length - 1 - i) < n - n_chosen) positions[n_chosen++] = i;
    positions[n - 1] = length - 1;
    return positions;
}

double error_of(const float *got, const float *want, size_t n) { return error_above(1e-30, got, want, n); }

/* A backend, and a stream of it for layers of that configuration. */
static side side_of(const char *variant, lazy_config *config, int threads)
{
    side s = { .config = config, .name = variant };
    lazy_error err = { 0 };
    int code;
    if (strcmp(variant, "reference") == 0) {
        code = reference_open(&s.backend, keeping, &err);
    } else {
        setenv("LAZYLLM_CPU", variant, 1);
        code = lazy_cpu_open(&s.backend, threads, computing, keeping, &err);
    }
    if (code || s.backend->ops->stream_open(s.backend, config, &s.stream, &err) ||
        RUN(s, reserve, MAX_ROWS, MAX_TOKENS, &err)) {
        printf("%s: %s\n", variant, err.message);
        exit(1);
    }
    return s;
}

side open_side(const char *variant, const lazy_config *config, int threads)
{
    lazy_config *copy = memcpy(malloc(sizeof *copy), config, sizeof *copy);
    copy->hidden = MAX_COLS; /* products of any number of columns up to it; a multiple of 1024, as some of them */
    if (computing != LAZY_COMPUTE_F32) copy->query_scalar = (float)(64 * M_LOG2E * M_LOG2E); /* q is scaled by 1/8 */
    return side_of(variant, copy, threads);
}

static void close_backend(side s)
{
    s.backend->ops->stream_close(s.stream);
    s.backend->ops->close(s.backend);
}

void close_side(side s)
{
    close_backend(s);
    free(s.config);
}

sides open_sides(const char *variant, const lazy_config *config, int threads)
{
    side fast = open_side(variant, config, threads);
    return (sides){ fast, side_of("reference", fast.config, 1), fast.config };
}

void close_sides(sides s)
{
    close_backend(s.plain);
    close_side(s.fast);
}
