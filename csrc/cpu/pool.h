/* pool.h — the threads of a CPU backend, shared by all sessions that run on it. */
#pragma once

#include "../lazyllm.h"

typedef struct lazy_pool lazy_pool;

/* One session's place in the pool. It has at most one job at a time. */
typedef struct lazy_pool_client lazy_pool_client;

/* One task of a job. worker: 0 is the thread that called lazy_pool_run, 1 … threads-1 are the pool's. Each runs one
 * task at a time, so scratch memory may be kept per worker, and for worker 0 per client. */
typedef void (*lazy_task)(void *job, int task, int worker);

/* The callback polled while a job runs, on the calling thread with no lock held; watch NULL: none. */
typedef struct lazy_poll {
    const lazy_watch *watch;
    int layers_done, n_layers;
} lazy_poll;

int lazy_pool_open(lazy_pool **out, int threads, lazy_error *err);
void lazy_pool_close(lazy_pool *pool); /* once its last client is closed; NULL is fine */

int lazy_pool_client_open(lazy_pool_client **out, lazy_pool *pool, lazy_error *err);
void lazy_pool_client_close(lazy_pool_client *client); /* NULL is fine */

/* Runs tasks 0 … n-1 in any order on the calling thread and the workers assigned to the client. Returns once all are
 * done, or LAZY_CANCELLED with tasks left out when the poll asks to stop. In a forked child the first call starts new
 * threads; a job whose poll forked ends there as LAZY_UNUSABLE, if the poll did not ask to stop. */
int lazy_pool_run(lazy_pool_client *client, lazy_task task, void *job, int n, lazy_poll poll);
