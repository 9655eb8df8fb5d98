/* ops.h — data, guarded memory and the two sides of every test of ops: a kernel's and the plain reference's. */
#pragma once

#include <float.h>
#include <stdlib.h>
#include <string.h>

#include "../../csrc/cpu/cpu.h"
#include "../../csrc/error.h"
#include "../../csrc/format.h"
#include "check.h"
#include "reference.h"

extern lazy_compute computing;
extern lazy_dtype keeping; /* K and V */
extern int each;           /* of like cases, one of so many is tested */

/* ---- random data and guarded memory ----------------------------------------------------- */

float *random_floats(size_t n); /* of 8 bits where products are in bf16 */

/* An ascending random subset of n of 0 … length-1 that holds the last one. */
int32_t *random_positions(int n, int length);

/* Memory of the test under way, without guards: a sanitizer sees what is read behind its end. */
void *room(size_t bytes);

/* n words of the test under way between guards, poisoned with NaN. */
void *guarded(size_t n);

/* Frees the memory of the test under way. True if all guards are whole. */
bool all_freed(void);

/* The last check of a test, and that it has written nothing outside its outputs. */
#define CHECK_FREED(good, ...) (check(good, __VA_ARGS__), check(all_freed(), "written outside: " __VA_ARGS__))

/* Largest difference as a share of the largest value; NaN anywhere gives infinity. */
double error_of(const float *got, const float *want, size_t n);

static const double TOLERANCE = 3e-6; /* of f32 sums against sums in double */
static const double FIXED = 1e-3;     /* where x has 16 bits of fixed point; test_fixed_products bounds each sum */
static const double ROUNDED = 1e-2;   /* where powers in attention, or rows between two products, are rounded to bf16 */
static const double INTEGERS = 3e-2;  /* where rows are rounded to integers of 8 bits before each of two products */

/* ---- the two sides ---------------------------------------------------------------------- */

enum {
    MAX_ROWS = 512,
    MAX_COLS = 5120,
    MAX_TOKENS = 20000,
    UNPACKED_ROWS_LIMIT = 160, /* the largest max_unpacked_halves and _others of any instruction set */
};

typedef struct side {
    lazy_backend *backend;
    lazy_stream *stream;
    lazy_config *config;
    const char *name; /* of the instruction set */
} side;

side open_side(const char *variant, const lazy_config *config, int threads);
void close_side(side s);

typedef struct sides {
    side fast, plain;
    lazy_config *config; /* of both */
} sides;

sides open_sides(const char *variant, const lazy_config *config, int threads);
void close_sides(sides s);

#define RUN(side, op, ...) (side).backend->ops->op((side).stream, __VA_ARGS__)

/* ---- the tests, on one instruction set; `shapes` of layers are tried one after the other --- */

void test_products(const char *variant, const lazy_config *shapes, size_t n_shapes);
void test_rows(const char *variant, const lazy_config *shapes, size_t n_shapes);
void test_attention(const char *variant, const lazy_config *shapes, size_t n_shapes);
void test_kept_rows(const char *variant); /* K and V of 16 bits, written and read */
void test_selection(void);
void test_narrowing(lazy_dtype dtype);
