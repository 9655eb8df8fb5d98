/* pool.h — the threads of a CPU backend. The caller works too. */
#ifndef LAZY_POOL_H
#define LAZY_POOL_H

#include "../lazyllm.h"

typedef struct lazy_pool lazy_pool;

/* One task of a job. worker: 0 … threads-1, each running one task at a time, so that it may own scratch memory. */
typedef void (*lazy_task)(void *job, int task, int worker);

/* What is polled while a job runs; NULL poll: nothing. */
typedef struct lazy_poll {
    const lazy_watch *watch;
    int layers_done, n_layers;
} lazy_poll;

int lazy_pool_open(lazy_pool **out, int threads, lazy_error *err);
void lazy_pool_close(lazy_pool *pool);

/* Runs tasks 0 … n-1, in any order on any thread; returns once all are done, or LAZY_CANCELLED (with tasks left out)
 * when the poll asks to stop. Jobs of several callers follow one another; one that a poll starts runs on its caller alone.
 * A forked child starts threads of its own. */
int lazy_pool_run(lazy_pool *pool, lazy_task task, void *job, int n, lazy_poll poll);

#endif
