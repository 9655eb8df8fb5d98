/* pool.c — every caller works on its own job; the pool's workers are divided evenly among the callers.
 *
 * A client is active from its first job until it has been idle for GRACE_NS. With k active clients, k threads are the
 * callers' own, and threads - k workers help them; other workers sleep, so that no more threads run than were asked for
 * (with more clients than threads, the callers alone run). An assignment is kept between the jobs of a client: a decode
 * step is hundreds of short jobs, and a worker that took a task of a prefill in each gap would be away for most. */
#include "pool.h"

#include <fenv.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <unistd.h>

#include "../error.h"
#include "../memory.h"
#include "../numeric.h"

/* Fields that one thread writes often lie in a cache line of their own. */
#define OWN_LINE _Alignas(64)

/* A thread that waits spins for about as long as a wake-up would take, then sleeps. */
enum { SPINS = 4000, POLL_EVERY_NS = 10 * 1000 * 1000, GRACE_NS = 2 * 1000 * 1000 };

struct lazy_pool_client {
    lazy_pool *pool;
    lazy_pool_client *next; /* in the list of active clients; this and the following are guarded by the pool's lock */
    pthread_t caller;       /* of the last job */
    int64_t closed_at;      /* when the last job ended */
    lazy_task task;
    void *job;
    int n;
    fenv_t floats; /* the caller's floating-point settings, for the workers: flushing denormals to 0 changes results */
    atomic_bool cancelled;
    atomic_bool open; /* a job is under way; the fields of the job are written while it is false and no worker inside */

    OWN_LINE atomic_int next_task;
};

typedef struct worker {
    OWN_LINE lazy_pool *pool;
    int index; /* 1 … threads-1 */
    pthread_t thread;
    unsigned seen;                      /* generation when it last looked for a job */
    _Atomic(lazy_pool_client *) client; /* the one it helps, or NULL; written under the lock */
    _Atomic(lazy_pool_client *) inside; /* the one whose job it may be at: neither is freed nor changed meanwhile */
} worker;

struct lazy_pool {
    int threads;     /* the caller included */
    int started;     /* threads that run */
    worker *workers; /* (threads,) entry 0 is unused */
    atomic_int pid;  /* of the threads' process; negative while a forked child's first caller starts its own */

    pthread_mutex_t lock; /* held for a few instructions only, never while a task or a poll runs */
    pthread_cond_t work;  /* workers with a client sleep here */
    pthread_cond_t spare; /* workers without one */
    lazy_pool_client *active;
    int sleeping; /* on `work` */

    OWN_LINE atomic_int n_active;
    atomic_bool quit;            /* written under the lock */
    _Atomic unsigned generation; /* changes under the lock whenever there may be something to do for a waiting worker */
};

static void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* ---- active clients, under the lock ----------------------------------------------------- */

/* Divides the workers that may run among the active clients, in order of their arrival. */
static void assign_workers(lazy_pool *pool)
{
    int n_active = 0;
    for (lazy_pool_client *c = pool->active; c; c = c->next) n_active++;
    atomic_store(&pool->n_active, n_active);
    lazy_pool_client *client = pool->active;
    for (int i = 1; i < pool->threads; i++) {
        bool runs = n_active && i <= pool->threads - n_active;
        atomic_store(&pool->workers[i].client, runs ? client : NULL);
        if (runs) client = client->next ? client->next : pool->active;
    }
    atomic_fetch_add(&pool->generation, 1);
    pthread_cond_broadcast(&pool->work);
    pthread_cond_broadcast(&pool->spare);
}

/* Takes clients off the list that are idle for a while, or whose caller is now, in this thread, at another's job. */
static bool drop_idle(lazy_pool *pool)
{
    bool dropped = false;
    int64_t now = now_ns();
    for (lazy_pool_client **at = &pool->active; *at;) {
        lazy_pool_client *c = *at;
        bool idle =
            !atomic_load(&c->open) && (now - c->closed_at > GRACE_NS || pthread_equal(c->caller, pthread_self()));
        if (idle) *at = c->next;
        else at = &c->next;
        dropped = dropped || idle;
    }
    return dropped;
}

static void activate(lazy_pool_client *client)
{
    lazy_pool *pool = client->pool;
    for (lazy_pool_client *c = pool->active; c; c = c->next)
        if (c == client) return;
    drop_idle(pool);
    lazy_pool_client **end = &pool->active;
    while (*end) end = &(*end)->next;
    *end = client;
    client->next = NULL;
    assign_workers(pool);
}

/* ---- workers ---------------------------------------------------------------------------- */

/* Called under the lock, or by a worker that is inside. */
static bool has_tasks(lazy_pool_client *c)
{
    return c && atomic_load(&c->open) && !atomic_load(&c->cancelled) && atomic_load(&c->next_task) < c->n;
}

static bool take_task(lazy_pool_client *c, int *task)
{
    if (atomic_load_explicit(&c->cancelled, memory_order_relaxed)) return false;
    return (*task = atomic_fetch_add(&c->next_task, 1)) < c->n;
}

static void sleep_until_called(worker *w)
{
    lazy_pool *pool = w->pool;
    bool spare = !atomic_load(&w->client);
    if (!spare) pool->sleeping++;
    pthread_cond_wait(spare ? &pool->spare : &pool->work, &pool->lock);
    if (!spare) pool->sleeping--;
}

/* Enters the job of the worker's client if it has tasks; no lock, since all workers come at once. Who frees a client
 * takes it from the workers first, and who ends a job closes it first; both then wait until no worker is inside. So
 * either this worker sees the change, or they see it inside. */
static bool enter_job(worker *w)
{
    lazy_pool_client *client = atomic_load(&w->client);
    atomic_store(&w->inside, client);
    if (client && atomic_load(&w->client) == client && has_tasks(client)) return true;
    atomic_store(&w->inside, NULL);
    return false;
}

/* Waits until the worker is inside a job that has tasks; NULL when the pool closes. */
static lazy_pool_client *next_job(worker *w)
{
    lazy_pool *pool = w->pool;
    for (int spins = 0; !atomic_load(&pool->quit);) {
        while (spins < SPINS && atomic_load_explicit(&pool->generation, memory_order_relaxed) == w->seen) {
            relax();
            spins++;
        }
        if (spins == SPINS) {
            pthread_mutex_lock(&pool->lock);
            while (!atomic_load(&pool->quit) && !has_tasks(atomic_load(&w->client))) sleep_until_called(w);
            pthread_mutex_unlock(&pool->lock);
            spins = 0;
        }
        w->seen = atomic_load(&pool->generation); /* before entering, so that a job opened later is not missed */
        if (enter_job(w)) return atomic_load(&w->inside);
    }
    return NULL;
}

/* Waits until no worker is inside the client's job. */
static void wait_outside(lazy_pool_client *c)
{
    lazy_pool *pool = c->pool;
    for (int i = 1, spins = 0; i < pool->started; i++)
        while (atomic_load(&pool->workers[i].inside) == c) {
            if (spins++ < SPINS) relax();
            else sched_yield();
        }
}

static void *run_worker(void *argument)
{
    worker *w = argument;
    for (lazy_pool_client *c; (c = next_job(w));) {
        int task;
        fesetenv(&c->floats);
        while (atomic_load_explicit(&w->client, memory_order_relaxed) == c && take_task(c, &task))
            c->task(c->job, task, w->index);
        atomic_store(&w->inside, NULL);
    }
    return NULL;
}

/* ---- opening, closing ------------------------------------------------------------------- */

/* Signals are the program's business: the workers take none but those of their own faults. */
static int start_worker(worker *w)
{
    const int faults[] = { SIGBUS, SIGSEGV, SIGFPE, SIGILL }; /* no handler sees what is blocked; see mapping.h */
    sigset_t all, before;
    sigfillset(&all);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) sigdelset(&all, faults[i]);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&w->thread, NULL, run_worker, w);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return failed;
}

static int start_threads(lazy_pool *pool, lazy_error *err)
{
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->work, NULL);
    pthread_cond_init(&pool->spare, NULL);
    pool->active = NULL;
    atomic_store(&pool->quit, false);
    pool->sleeping = 0;
    atomic_store(&pool->n_active, 0);
    for (pool->started = 1; pool->started < pool->threads; pool->started++) {
        worker *w = &pool->workers[pool->started];
        *w = (worker){ .pool = pool, .index = pool->started };
        if (start_worker(w))
            return lazy_fail(err, LAZY_MEMORY, "thread %d of %d could not be started", pool->started + 1,
                             pool->threads);
    }
    return LAZY_OK;
}

int lazy_pool_open(lazy_pool **out, int threads, lazy_error *err)
{
    *out = NULL;
    lazy_pool *pool;
    int code = lazy_alloc_zeroed(&pool, 1, "the thread pool", err);
    if (code) return code;
    pool->threads = threads;
    code = lazy_alloc_zeroed(&pool->workers, threads, "the thread pool", err);
    if (!code) {
        code = start_threads(pool, err);
        atomic_store(&pool->pid, (int)getpid());
    }
    if (code) lazy_pool_close(pool);
    else *out = pool;
    return code;
}

static bool lives_here(lazy_pool *pool) { return atomic_load(&pool->pid) == (int)getpid(); }

void lazy_pool_close(lazy_pool *pool)
{
    if (!pool) return;
    if (lives_here(pool)) { /* a forked child has no workers to wait for */
        pthread_mutex_lock(&pool->lock);
        atomic_store(&pool->quit, true);
        atomic_fetch_add(&pool->generation, 1);
        pthread_cond_broadcast(&pool->work);
        pthread_cond_broadcast(&pool->spare);
        pthread_mutex_unlock(&pool->lock);
        for (int i = 1; i < pool->started; i++) pthread_join(pool->workers[i].thread, NULL);
        pthread_mutex_destroy(&pool->lock);
        pthread_cond_destroy(&pool->work);
        pthread_cond_destroy(&pool->spare);
    }
    lazy_free(pool->workers);
    lazy_free(pool);
}

int lazy_pool_client_open(lazy_pool_client **out, lazy_pool *pool, lazy_error *err)
{
    int code = lazy_alloc_zeroed(out, 1, "a place in the thread pool", err);
    if (!code) (*out)->pool = pool;
    return code;
}

void lazy_pool_client_close(lazy_pool_client *client)
{
    if (!client) return;
    lazy_pool *pool = client->pool;
    if (lives_here(pool)) {
        pthread_mutex_lock(&pool->lock);
        for (lazy_pool_client **at = &pool->active; *at; at = &(*at)->next)
            if (*at == client) {
                *at = client->next;
                assign_workers(pool);
                break;
            }
        pthread_mutex_unlock(&pool->lock);
        wait_outside(client);
    }
    lazy_free(client);
}

/* In a forked child, which has the calling thread alone: starts new threads, or as many as it gets. */
static void restart_after_fork(lazy_pool *pool)
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

/* ---- running a job ---------------------------------------------------------------------- */

static void open_job(lazy_pool_client *c, lazy_task task, void *job, int n)
{
    lazy_pool *pool = c->pool;
    pthread_mutex_lock(&pool->lock);
    c->task = task;
    c->job = job;
    c->n = n;
    fegetenv(&c->floats);
    c->caller = pthread_self();
    atomic_store(&c->next_task, 0);
    atomic_store(&c->cancelled, false);
    atomic_store(&c->open, true);
    activate(c);
    atomic_fetch_add(&pool->generation, 1);
    if (pool->sleeping) pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
}

static void close_job(lazy_pool_client *c)
{
    pthread_mutex_lock(&c->pool->lock);
    atomic_store(&c->open, false); /* no worker enters any more */
    c->closed_at = now_ns();
    pthread_mutex_unlock(&c->pool->lock);
    wait_outside(c);
}

static void abandon_job(void *client)
{
    lazy_pool_client *c = client;
    atomic_store(&c->cancelled, true);
    close_job(c);
}

/* Python ends a thread that asks for the GIL while the interpreter shuts down: the poll may not return, but then the
 * workers must leave the job, which lies on this thread's stack. */
static bool ask_to_stop(lazy_pool_client *c, lazy_poll poll)
{
    int stop;
    pthread_cleanup_push(abandon_job, c);
    stop = poll.watch->poll(poll.watch->context, poll.layers_done, poll.n_layers);
    pthread_cleanup_pop(0);
    return stop != 0;
}

int lazy_pool_run(lazy_pool_client *c, lazy_task task, void *job, int n, lazy_poll poll)
{
    if (n < 2) { /* not worth waking a worker */
        if (n) task(job, 0, 0);
        return LAZY_OK;
    }
    lazy_pool *pool = c->pool;
    restart_after_fork(pool);
    open_job(c, task, job, n);
    int64_t polled = now_ns();
    for (int i; take_task(c, &i);) {
        task(job, i, 0);
        if (atomic_load_explicit(&pool->n_active, memory_order_relaxed) > 1) { /* workers of idle clients can help */
            pthread_mutex_lock(&pool->lock);
            if (drop_idle(pool)) assign_workers(pool);
            pthread_mutex_unlock(&pool->lock);
        }
        if (!poll.watch || now_ns() - polled < POLL_EVERY_NS) continue;
        pid_t here = getpid();
        bool stop = ask_to_stop(c, poll);
        if (getpid() != here)
            return stop ? LAZY_CANCELLED : LAZY_UNUSABLE; /* a forked child: the workers' tasks are lost */
        if (stop) atomic_store(&c->cancelled, true);
        polled = now_ns();
    }
    close_job(c);
    return atomic_load(&c->cancelled) ? LAZY_CANCELLED : LAZY_OK;
}
