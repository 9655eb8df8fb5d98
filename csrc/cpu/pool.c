#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>

#include "../error.h"
#include "../memory.h"

/* Waits are spent spinning for about as long as a wake-up costs, then asleep. */
enum { SPINS = 4000, POLL_EVERY_NS = 10 * 1000 * 1000 };

typedef struct worker {
    lazy_pool *pool;
    int index;
    pthread_t thread;
} worker;

struct lazy_pool {
    int threads;     /* the caller included */
    int started;     /* threads that run */
    worker *workers; /* (threads,) entry 0 is unused */
    atomic_int pid;  /* of the process that the threads live in; its negative while a forked child's first caller starts them */

    pthread_mutex_t turn; /* one job at a time */

    pthread_mutex_t lock; /* guards what follows */
    pthread_cond_t work;
    bool open, quit;
    int sleeping;

    _Atomic unsigned generation; /* of the job, bumped under the lock */
    atomic_int members;          /* workers inside the open job: joined under the lock */
    atomic_int next;
    atomic_bool cancelled;
    lazy_task task;
    void *job;
    int n;
};

static void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * (int64_t)1000000000 + t.tv_nsec;
}

static void work_on(lazy_pool *pool, int index)
{
    int task;
    while (!atomic_load_explicit(&pool->cancelled, memory_order_relaxed) && (task = atomic_fetch_add(&pool->next, 1)) < pool->n)
        pool->task(pool->job, task, index);
}

/* Waits for a job newer than `seen` and joins it; 0 when the pool closes. A job may end before this worker gets there. */
static unsigned join_job(lazy_pool *pool, unsigned seen)
{
    for (int i = 0; i < SPINS && atomic_load_explicit(&pool->generation, memory_order_relaxed) == seen; i++) relax();
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        unsigned generation = atomic_load(&pool->generation);
        if (pool->quit) {
            generation = 0;
        } else if (!pool->open || generation == seen) {
            pool->sleeping++;
            pthread_cond_wait(&pool->work, &pool->lock);
            pool->sleeping--;
            continue;
        } else {
            atomic_fetch_add(&pool->members, 1);
        }
        pthread_mutex_unlock(&pool->lock);
        return generation;
    }
}

static void *run_worker(void *argument)
{
    worker *w = argument;
    unsigned seen = 0;
    while ((seen = join_job(w->pool, seen))) {
        work_on(w->pool, w->index);
        atomic_fetch_sub(&w->pool->members, 1);
    }
    return NULL;
}

static int start_threads(lazy_pool *pool, lazy_error *err)
{
    pthread_mutex_init(&pool->turn, NULL);
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->work, NULL);
    pool->open = pool->quit = false;
    pool->sleeping = 0;
    atomic_store(&pool->members, 0);
    atomic_store(&pool->generation, 0);
    for (pool->started = 1; pool->started < pool->threads; pool->started++) {
        worker *w = &pool->workers[pool->started];
        *w = (worker){ .pool = pool, .index = pool->started };
        if (pthread_create(&w->thread, NULL, run_worker, w))
            return lazy_fail(err, LAZY_MEMORY, "thread %d of %d could not be started", pool->started + 1, pool->threads);
    }
    return LAZY_OK;
}

int lazy_pool_open(lazy_pool **out, int threads, lazy_error *err)
{
    *out = NULL;
    lazy_pool *pool;
    int code = lazy_alloc_zeroed((void **)&pool, 1, sizeof *pool, "the thread pool", err);
    if (code) return code;
    pool->threads = threads;
    code = lazy_alloc_zeroed((void **)&pool->workers, (size_t)threads, sizeof *pool->workers, "the thread pool", err);
    if (code) {
        lazy_free(pool);
        return code;
    }
    code = start_threads(pool, err);
    atomic_store(&pool->pid, (int)getpid());
    if (code) lazy_pool_close(pool);
    else *out = pool;
    return code;
}

void lazy_pool_close(lazy_pool *pool)
{
    if (!pool) return;
    if (atomic_load(&pool->pid) == (int)getpid()) { /* in a forked child there is nobody to wait for */
        pthread_mutex_lock(&pool->lock);
        pool->quit = true;
        pthread_cond_broadcast(&pool->work);
        pthread_mutex_unlock(&pool->lock);
        /* a spinning worker looks at the generation first */
        atomic_fetch_add(&pool->generation, 1);
        for (int i = 1; i < pool->started; i++) pthread_join(pool->workers[i].thread, NULL);
        pthread_mutex_destroy(&pool->turn);
        pthread_mutex_destroy(&pool->lock);
        pthread_cond_destroy(&pool->work);
    }
    lazy_free(pool->workers);
    lazy_free(pool);
}

static void open_job(lazy_pool *pool, lazy_task task, void *job, int n)
{
    pthread_mutex_lock(&pool->lock);
    pool->task = task;
    pool->job = job;
    pool->n = n;
    atomic_store(&pool->next, 0);
    atomic_store(&pool->cancelled, false);
    pool->open = true;
    if (atomic_fetch_add(&pool->generation, 1) + 1 == 0) atomic_store(&pool->generation, 1); /* 0 means quit */
    if (pool->sleeping) pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
}

static void close_job(lazy_pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    pool->open = false; /* nobody joins any more */
    pthread_mutex_unlock(&pool->lock);
    for (int i = 0; atomic_load(&pool->members); i++) {
        if (i < SPINS) relax();
        else sched_yield();
    }
}

/* The pools whose watches this thread is in, innermost first: what a watch runs on one of them is done by its own thread alone. */
typedef struct watching {
    const lazy_pool *pool;
    const struct watching *outer;
} watching;

static _Thread_local const watching *innermost;

static bool is_watching(const lazy_pool *pool)
{
    for (const watching *w = innermost; w; w = w->outer)
        if (w->pool == pool) return true;
    return false;
}

/* The caller's share of the work, with a look at the watch now and then. */
static void work_and_poll(lazy_pool *pool, lazy_poll poll)
{
    int task;
    int64_t polled = now_ns();
    while (!atomic_load_explicit(&pool->cancelled, memory_order_relaxed) && (task = atomic_fetch_add(&pool->next, 1)) < pool->n) {
        pool->task(pool->job, task, 0);
        if (now_ns() - polled < POLL_EVERY_NS) continue;
        polled = now_ns();
        watching here = { pool, innermost };
        innermost = &here;
        if (poll.watch->poll(poll.watch->context, poll.layers_done, poll.n_layers)) atomic_store(&pool->cancelled, true);
        innermost = here.outer;
    }
}

/* In a forked child, where no thread but the caller lives on: starts threads anew, or as many as it gets. */
static void live_here(lazy_pool *pool)
{
    int here = (int)getpid(), pid;
    while ((pid = atomic_load(&pool->pid)) != here) {
        if (pid == -here || !atomic_compare_exchange_strong(&pool->pid, &pid, -here)) {
            sched_yield();
            continue;
        }
        if (start_threads(pool, NULL)) pool->threads = pool->started;
        atomic_store(&pool->pid, here);
    }
}

int lazy_pool_run(lazy_pool *pool, lazy_task task, void *job, int n, lazy_poll poll)
{
    live_here(pool);
    if (is_watching(pool)) { /* between two tasks of the outer job's worker 0, whose scratch is free */
        for (int i = 0; i < n; i++) task(job, i, 0);
        return LAZY_OK;
    }
    pthread_mutex_lock(&pool->turn);
    if (n == 1) { /* not worth waking anybody */
        task(job, 0, 0);
        pthread_mutex_unlock(&pool->turn);
        return LAZY_OK;
    }
    open_job(pool, task, job, n);
    if (poll.watch) work_and_poll(pool, poll);
    else work_on(pool, 0);
    close_job(pool);
    bool cancelled = atomic_load(&pool->cancelled);
    pthread_mutex_unlock(&pool->turn);
    return cancelled ? LAZY_CANCELLED : LAZY_OK;
}
