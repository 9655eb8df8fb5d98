/* test_system.c — what the core takes from the system: threads, memory, files, child processes, and the number of
 * cores. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../../csrc/cpu/cpu.h"
#include "../../csrc/error.h"
#include "../../csrc/mapping.h"
#include "../../csrc/memory.h"
#include "../../csrc/numeric.h"
#include "check.h"

/* ---- threads ---------------------------------------------------------------------------- */

enum { TASKS = 1000, ROUNDS = 50 };

/* A pool with a client. */
typedef struct place {
    lazy_pool *pool;
    lazy_pool_client *client;
} place;

static void must(int code, const lazy_error *err)
{
    if (!code) return;
    printf("%s\n", err->message);
    exit(1);
}

static place open_place(int threads)
{
    place p;
    lazy_error err = { 0 };
    must(lazy_pool_open(&p.pool, threads, &err) || lazy_pool_client_open(&p.client, p.pool, &err), &err);
    return p;
}

static void close_place(place p)
{
    lazy_pool_client_close(p.client);
    lazy_pool_close(p.pool);
}

typedef struct counting {
    lazy_pool *pool;
    lazy_task task;
    int rounds;
    int started, done[TASKS], n_done; /* the last two: by task, and of slow tasks */
} counting;

static void count_task(void *job, int task, int worker) { ((counting *)job)->done[task]++; }

static void *run_jobs(void *argument)
{
    counting *c = argument;
    lazy_pool_client *client;
    if (lazy_pool_client_open(&client, c->pool, NULL)) return NULL;
    for (int round = 0; round < c->rounds; round++) lazy_pool_run(client, c->task, c, TASKS, (lazy_poll){ 0 });
    lazy_pool_client_close(client);
    return NULL;
}

/* A poll that waits for another thread, which runs a job of its own. */
static int run_beside(void *context, int layers_done, int n_layers)
{
    pthread_t other;
    pthread_create(&other, NULL, run_jobs, context);
    pthread_join(other, NULL);
    return 0;
}

static int stop_at_once(void *context, int layers_done, int n_layers) { return 1; }

/* Takes 2 ms and counts itself in *job. */
static void slow_task(void *job, int task, int worker)
{
    struct timespec nap = { 0, 2 * 1000 * 1000 };
    nanosleep(&nap, NULL);
    __atomic_fetch_add((int *)job, 1, __ATOMIC_RELAXED);
}

static void long_task(void *job, int task, int worker)
{
    __atomic_fetch_add(&((counting *)job)->started, 1, __ATOMIC_RELAXED);
    slow_task(&((counting *)job)->n_done, task, worker);
}

/* Short jobs, one after another, do not wait for another client's long job. */
static void test_short_jobs_beside_a_long_one(void)
{
    place p = open_place(2);
    counting job = { .pool = p.pool, .task = long_task, .rounds = 1 };
    pthread_t other;
    pthread_create(&other, NULL, run_jobs, &job);
    while (!__atomic_load_n(&job.started, __ATOMIC_RELAXED)) nanosleep(&(struct timespec){ 0, 1000 * 1000 }, NULL);
    counting counts = { 0 };
    for (int i = 0; i < ROUNDS; i++) lazy_pool_run(p.client, count_task, &counts, 4, (lazy_poll){ 0 });
    int done = __atomic_load_n(&job.n_done, __ATOMIC_RELAXED);
    pthread_join(other, NULL);
    check(counts.done[3] == ROUNDS && done < TASKS / 2,
          "%d short jobs beside a long one: %d of its %d tasks were done first", ROUNDS, done, TASKS);
    check(job.n_done == TASKS, "a long job beside short ones: %d of %d tasks were done", job.n_done, TASKS);
    close_place(p);
}

static void test_pool(void)
{
    enum { CALLERS = 3 };
    for (int threads = 1; threads <= 4; threads++) {
        place p = open_place(threads);
        counting jobs[CALLERS];
        pthread_t callers[CALLERS];
        for (int i = 0; i < CALLERS; i++) {
            jobs[i] = (counting){ .pool = p.pool, .task = count_task, .rounds = ROUNDS };
            pthread_create(&callers[i], NULL, run_jobs, &jobs[i]);
        }
        for (int i = 0; i < CALLERS; i++) pthread_join(callers[i], NULL);
        bool once = true;
        for (int i = 0; i < CALLERS * TASKS; i++) once = once && jobs[i / TASKS].done[i % TASKS] == ROUNDS;
        check(once, "pool of %d: three callers, each task once a round", threads);

        int done = 0;
        counting beside = { .pool = p.pool, .task = count_task, .rounds = ROUNDS };
        lazy_watch waits = { run_beside, &beside }, stops = { stop_at_once, NULL };
        int code = lazy_pool_run(p.client, slow_task, &done, 20, (lazy_poll){ &waits, 0, 1 });
        check(code == LAZY_OK && done == 20 && beside.done[0] > 0, "pool of %d: a poll that waits for another caller",
              threads);

        done = 0;
        code = lazy_pool_run(p.client, slow_task, &done, TASKS, (lazy_poll){ &stops, 0, 1 });
        check(code == LAZY_CANCELLED && done < TASKS, "pool of %d: stopped after %d of %d tasks", threads, done, TASKS);
        done = 0;
        code = lazy_pool_run(p.client, slow_task, &done, 2, (lazy_poll){ 0 });
        check(code == LAZY_OK && done == 2, "pool of %d: a job after one that was stopped", threads);
        close_place(p);
    }
}

/* ---- shared memory ---------------------------------------------------------------------- */

enum { SHARED_BYTES = 1 << 20, PLACES = 3 }; /* bytes are written at three places, pages apart */

static void put(lazy_shared *shared, const char *text)
{
    for (int i = 0; i < PLACES; i++)
        if (text[i] != ' ') shared->data[i * (SHARED_BYTES / PLACES)] = text[i];
}

static bool holds_text(const lazy_shared *shared, const char *text)
{
    bool same = true;
    for (int i = 0; i < PLACES; i++)
        same = same && (text[i] == '?' || shared->data[i * (SHARED_BYTES / PLACES)] == text[i]);
    return same;
}

static lazy_shared *joined_parts(const lazy_shared *from, const lazy_stretch *parts, int n)
{
    lazy_shared *shared;
    lazy_error err = { 0 };
    must(lazy_cpu_shared_join(&shared, from, parts, n, &err), &err);
    return shared;
}

static lazy_shared *joined(const lazy_shared *from)
{
    return joined_parts(from, &(lazy_stretch){ 0, SHARED_BYTES }, 1);
}

static lazy_shared *opened_shared(void)
{
    lazy_shared *shared;
    lazy_error err = { 0 };
    must(lazy_cpu_shared_open(NULL, &shared, SHARED_BYTES, &err), &err);
    return shared;
}

static void test_shared_in_parts(void)
{
    enum { TOO_MANY = 1 << 15, SECOND = SHARED_BYTES / PLACES };
    static lazy_stretch many[TOO_MANY];
    lazy_shared *owner = opened_shared();
    put(owner, "abc");
    lazy_shared *fork_a = joined_parts(owner, (lazy_stretch[]){ { 0, 1 }, { 1, 1 }, { SECOND, SECOND + 1 } }, 3);
    check(holds_text(fork_a, "ab\0"), "shared memory: a fork has the parts that it joins");
    put(fork_a, "x y");
    check(holds_text(fork_a, "xby") && holds_text(owner, "abc"),
          "shared memory: a fork writes for itself in all parts");
    lazy_shared *fork_b = joined_parts(owner, many, TOO_MANY);
    check(holds_text(fork_b, "abc"), "shared memory: too many parts are mapped as a whole");
    lazy_cpu_shared_close(fork_b);
    lazy_cpu_shared_close(fork_a);
    lazy_cpu_shared_close(owner);
}

static void *share_and_close(void *argument)
{
    bool *good = argument;
    *good = true;
    for (int round = 0; round < ROUNDS; round++) {
        lazy_shared *owner = opened_shared();
        put(owner, "abc");
        lazy_shared *fork_a = joined(owner);
        put(fork_a, " x ");
        lazy_shared *later = joined(fork_a);
        *good = *good && lazy_cpu_shared_leave(owner, NULL) == LAZY_OK;
        lazy_cpu_shared_close(owner);
        *good = *good && holds_text(fork_a, "axc") && holds_text(later, "abc");
        lazy_cpu_shared_close(fork_a);
        lazy_cpu_shared_close(later);
    }
    return NULL;
}

static void test_shared_by_threads(void)
{
    enum { SHARING_THREADS = 4 };
    pthread_t threads[SHARING_THREADS];
    bool good[SHARING_THREADS];
    for (int i = 0; i < SHARING_THREADS; i++) pthread_create(&threads[i], NULL, share_and_close, &good[i]);
    for (int i = 0; i < SHARING_THREADS; i++) {
        pthread_join(threads[i], NULL);
        check(good[i], "shared memory: thread %d of %d", i, SHARING_THREADS);
    }
}

/* ---- memory ----------------------------------------------------------------------------- */

static char *allocated(size_t bytes)
{
    char *memory;
    if (lazy_alloc_bytes((void **)&memory, bytes, 1, NULL, "a buffer", NULL)) exit(1);
    return memory;
}

/* malloc hands out again what was written and freed, up to the size of the largest block that was ever freed. */
static void test_small_pages(void)
{
    enum { BYTES = 6 << 20, PAGE = 4096, PAGES = BYTES / PAGE };
    static unsigned char resident[PAGES];
    int n_resident = 0;
    lazy_free(allocated(4 * BYTES));
    char *memory = allocated(BYTES);
    memset(memory, 1, BYTES);
    lazy_free(memory);
    memory = allocated(BYTES);
    lazy_use_small_pages(memory, BYTES);
    check(mincore(memory, BYTES, resident) == 0, "small pages: which are there is not known");
    for (int i = 0; i < PAGES; i++) n_resident += resident[i] & 1;
    check(n_resident == 0, "small pages: %d of %d are there before any is written", n_resident, PAGES);
    lazy_free(memory);
}

enum { BLOCK = 500 << 10, SMALL_BLOCK = 50 << 10, REGION = 32 << 20, REST = 8 << 20 /* of the allocator */ };

static char *block_of(lazy_spare *spare, size_t bytes, bool sparse)
{
    void *block = NULL;
    check(lazy_spare_alloc(spare, &block, bytes, sparse, "a block", NULL) == 0, "spare: no block of %zu bytes", bytes);
    check((uintptr_t)block % 64 == 0, "spare: a block of %zu bytes is not aligned", bytes);
    return block;
}

static size_t mapped_bytes(void)
{
    size_t pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    check(file && fscanf(file, "%zu", &pages) == 1, "spare: what is mapped is not known");
    if (file) fclose(file);
    return pages * (size_t)sysconf(_SC_PAGESIZE);
}

static int resident_pages(const char *block)
{
    enum { MOST = BLOCK / 4096 };
    static unsigned char resident[MOST];
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    int n = 0;
    check(mincore((void *)((uintptr_t)block / page * page), BLOCK, resident) == 0, "spare: what is there is not known");
    for (size_t i = 0; i < BLOCK / page; i++) n += resident[i] & 1;
    return n;
}

/* Blocks of several regions, of which some are freed and come again. */
static void test_spare(void)
{
    enum { BLOCKS = 160 };
    static lazy_spare spare;
    static char *blocks[BLOCKS];
    int n_same = 0;
    const size_t mapped = mapped_bytes();
    for (int i = 0; i < BLOCKS; i++) {
        blocks[i] = block_of(&spare, i % 3 ? BLOCK : SMALL_BLOCK, false);
        memset(blocks[i], i, i % 3 ? BLOCK : SMALL_BLOCK);
    }
    for (int i = 1; i < BLOCKS; i += 2) {
        char *before = blocks[i];
        lazy_spare_keep(&spare, before);
        blocks[i] = block_of(&spare, i % 3 ? BLOCK - 1 : SMALL_BLOCK, false);
        n_same += blocks[i] == before && i % 3;
        memset(blocks[i], i, i % 3 ? BLOCK - 1 : SMALL_BLOCK);
    }
    for (int i = 0; i < BLOCKS; i++) {
        check(blocks[i][0] == (char)i && blocks[i][SMALL_BLOCK - 1] == (char)i &&
                  (i % 3 == 0 || blocks[i][BLOCK - 2] == (char)i),
              "spare: block %d was written by another", i);
        lazy_spare_keep(&spare, blocks[i]);
    }
    if (!LAZY_SPARE_BYTES) return; /* the allocator's blocks: a sanitizer watches them */
    check(n_same == 53, "spare: %d of 53 freed blocks came again", n_same);
    check(lazy_spare_empty(&spare) && !lazy_spare_empty(&spare), "spare: blocks are left");
    check(mapped_bytes() < mapped + REST, "spare: %zu bytes are left mapped", mapped_bytes() - mapped);
}

static void test_sparse_blocks(void)
{
    enum { BLOCKS = 600 };
    static lazy_spare spare;
    static char *blocks[BLOCKS];
    if (!LAZY_SPARE_BYTES) return;
    const size_t mapped = mapped_bytes();
    for (int i = 0; i < BLOCKS; i++) blocks[i] = block_of(&spare, BLOCK, true);
    for (int i = 0; i < BLOCKS; i++) check(resident_pages(blocks[i]) <= 2, "spare: a sparse block is not");
    for (int i = 0; i < BLOCKS; i++) lazy_spare_keep(&spare, blocks[i]);
    check(mapped_bytes() < mapped + LAZY_SPARE_BYTES + REGION + REST, "spare: %zu bytes are kept",
          mapped_bytes() - mapped);
    lazy_spare_empty(&spare);
    lazy_spare_keep(&spare, block_of(&spare, BLOCK, true));
    char *kept = spare.blocks[0], *dense = block_of(&spare, BLOCK, false), *sparse = block_of(&spare, BLOCK, true);
    check(dense != kept, "spare: a sparse block came as another");
    check(sparse == kept, "spare: a sparse block did not come again");
    lazy_spare_free(dense);
    lazy_spare_free(sparse);
    lazy_spare_empty(&spare);
    check(mapped_bytes() < mapped + REST, "spare: %zu bytes are left mapped", mapped_bytes() - mapped);
}

/* ---- child processes beside threads at work ----------------------------------------------- */

static char mapped_path[] = "/tmp/lazyllm-mapped-XXXXXX";

static bool map_file(void)
{
    lazy_mapping mapping = { 0 };
    int code = lazy_mapping_open(&mapping, mapped_path, NULL);
    lazy_mapping_close(&mapping);
    return code == LAZY_OK;
}

static void *map_file_until(void *ends)
{
    while (!atomic_load((atomic_bool *)ends)) map_file();
    return NULL;
}

static atomic_int n_pauses;

/* Holds a thread where it is for a moment. Not for longer: fork() waits for malloc. */
static void pause_here(int number)
{
    int64_t end = now_ns() + 1000 * 1000;
    atomic_fetch_add(&n_pauses, 1);
    while (now_ns() < end) continue;
}

/* A child of a process whose other thread is somewhere within a call makes that call too: what the thread holds stays
 * held in it. */
static void test_forks_beside_a_thread(void)
{
    enum { FORKS = 20, SECONDS = 10 };
    atomic_bool ends = false;
    int file = mkstemp(mapped_path), status = 0;
    if (file < 0 || write(file, "text", 4) != 4) exit(1);
    close(file);
    pthread_t thread;
    signal(SIGUSR1, pause_here);
    pthread_create(&thread, NULL, map_file_until, &ends);
    for (int i = 0; i < FORKS && !status; i++) {
        int before = atomic_load(&n_pauses);
        pthread_kill(thread, SIGUSR1);
        while (atomic_load(&n_pauses) == before) sched_yield();
        pid_t child = fork();
        if (!child) {
            alarm(SECONDS);
            _exit(map_file() ? 0 : 1);
        }
        if (waitpid(child, &status, 0) != child) status = -1;
    }
    check(!status, "a child beside a thread that maps a file ended with %d; with %d it hung", status, SIGALRM);
    atomic_store(&ends, true);
    pthread_join(thread, NULL);
    signal(SIGUSR1, SIG_DFL);
    unlink(mapped_path);
}

/* ---- errors ----------------------------------------------------------------------------- */

static void test_places_of_errors(void)
{
    lazy_error err = { 0 };
    check(lazy_fail_in(NULL, LAZY_CANCELLED, "layer %d", 7) == LAZY_CANCELLED,
          "an error's code where no message is wanted");
    int code = lazy_fail_in(&err, lazy_fail(&err, LAZY_MEMORY, "none"), "layer %d", 7);
    check(code == LAZY_MEMORY && strcmp(err.message, "layer 7: none") == 0, "an error's place: %s", err.message);
}

int main(void)
{
    test_pool();
    test_short_jobs_beside_a_long_one();
    test_shared_in_parts();
    test_shared_by_threads();
    test_small_pages();
    test_spare();
    test_sparse_blocks();
    test_forks_beside_a_thread();
    test_places_of_errors();
    return checked();
}
