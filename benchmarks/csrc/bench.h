/* bench.h — one op on random data, prepared once and run repeatedly. Weights of 192 KiB and more are never in the CPU's
 * caches when a run begins. benchmarks/measuring/bench.py calls these functions and has the same structures. */
#ifndef BENCH_H
#define BENCH_H

#include "../../csrc/backend.h"

typedef struct bench bench;

typedef struct bench_shape {
    int n;          /* rows computed */
    int m;          /* tokens in play */
    int rows, cols; /* of the weights: y[n, rows] = x[n, cols] W^T */
    int window;     /* of attention and scores; 0: none */
    int n_heads, n_kv_heads, head_dim;
    const char *dtype; /* format of the weights: "bf16", "q8_0" */
} bench_shape;

/* op: "multiply_adds" (on a GPU a product of n, rows and cols) and "read" (rows x cols of dtype): the machine's
 * ceilings; "matmul"; "gated": rows / 2 outputs; "attention" and "scores": the last n of m tokens; "select": half of m
 * tokens; "regroup": m rows of cols values, half of which are dropped; "rmsnorm": n rows of cols values; "embed": n
 * rows from a table of rows x cols; "rotate": n rows of heads, q and k normed; "argmax" of `rows` logits. */
int bench_open(bench **out, const char *op, const bench_shape *shape, const lazy_device *device, lazy_error *err);
void bench_close(bench *);
int bench_run(bench *, double *seconds, lazy_error *err);
/* Runs once and returns how many jobs the CPU's threads got, or a code; *tasks: the number of tasks of each. 0 jobs on
 * a GPU. */
int bench_count(bench *, const int **tasks, lazy_error *err);
double
bench_flops(const bench *); /* of one run; a multiply-add counts as two; multiply_adds knows it after its first run */
double bench_bytes(const bench *); /* that one run must read */

#endif
