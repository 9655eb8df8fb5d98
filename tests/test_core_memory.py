"""Memory that runs out: MemoryError, and a session as if the call had not been made. Its estimated bytes."""

import subprocess
import sysconfig
from pathlib import Path

import pytest
from children import python
from tiny import SANITIZED

# Every allocation of the core is a posix_memalign here, where it cannot map blocks, but for memory that forks
# share, which is a file's; every one of its binding to Python is one of Python's domain "mem". A block of the core
# has its size and a mark in its last bytes, by which those not yet freed are counted.
SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static int left = -1, failures; /* left: allocations that succeed before one fails; below 0: all */
static atomic_int live;
static atomic_llong bytes;

void fail_after(int n) { left = n, failures = 0; }
int failures_made(void) { return failures; }
int live_blocks(void) { return live; }
long long live_bytes(void) { return bytes; }

static int fails(void) { return left >= 0 && left-- == 0 && ++failures; }

enum { MARK = 16 }; /* bytes */
static uint64_t *mark_of(void *block) { return (uint64_t *)((char *)block + malloc_usable_size(block)) - 1; }
static uint64_t mark(void *block) { return (uint64_t)(uintptr_t)block ^ 0x5a5a1234abcd9876; }

int posix_memalign(void **out, size_t alignment, size_t size)
{
    static int (*real)(void **, size_t, size_t);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "posix_memalign");
    if (fails()) return ENOMEM;
    int code = real(out, alignment, size + MARK);
    if (code) return code;
    uint64_t *end = mark_of(*out);
    end[0] = mark(*out);
    end[-1] = size;
    live++;
    bytes += (long long)size;
    return code;
}

/* Refuses the core to map blocks, which it then allocates. */
void *mmap(void *at, size_t size, int access, int flags, int file, off_t offset)
{
    static void *(*real)(void *, size_t, int, int, int, off_t);
    Dl_info caller;
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "mmap");
    if (flags == (MAP_PRIVATE | MAP_ANONYMOUS) && dladdr(__builtin_return_address(0), &caller) &&
        strstr(caller.dli_fname, "_core"))
        return MAP_FAILED;
    return real(at, size, access, flags, file, offset);
}

extern void __libc_free(void *);
void free(void *block)
{
    if (block && (uintptr_t)block % 64 == 0 && *mark_of(block) == mark(block)) {
        uint64_t *end = mark_of(block);
        end[0] = 0;
        live--;
        bytes -= (long long)end[-1];
    }
    __libc_free(block);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*run)(void *), void *argument)
{
    static int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "pthread_create");
    return fails() ? EAGAIN : real(thread, attr, run, argument);
}

typedef struct allocator {
    void *context;
    void *(*malloc)(void *, size_t);
    void *(*calloc)(void *, size_t, size_t);
    void *(*realloc)(void *, void *, size_t);
    void (*free)(void *, void *);
} allocator;
enum { DOMAIN_MEM = 1 };
static allocator python;

static void *try_malloc(void *c, size_t size) { return fails() ? NULL : python.malloc(c, size); }
static void *try_calloc(void *c, size_t n, size_t size) { return fails() ? NULL : python.calloc(c, n, size); }
static void *try_realloc(void *c, void *old, size_t n) { return fails() ? NULL : python.realloc(c, old, n); }

void watch_python(void)
{
    void (*get)(int, allocator *), (*set)(int, allocator *);
    *(void **)&get = dlsym(RTLD_DEFAULT, "PyMem_GetAllocator");
    *(void **)&set = dlsym(RTLD_DEFAULT, "PyMem_SetAllocator");
    get(DOMAIN_MEM, &python);
    allocator failing = { python.context, try_malloc, try_calloc, try_realloc, python.free };
    set(DOMAIN_MEM, &failing);
}

int memfd_create(const char *name, unsigned flags)
{
    static int (*real)(const char *, unsigned);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "memfd_create");
    if (fails()) return errno = ENFILE, -1;
    return real(name, flags);
}
"""
SCRIPT = """
import ctypes, gc, sys
from itertools import count
from pathlib import Path
import numpy as np
import tiny
from lazyllm import _core

shim = ctypes.CDLL(None)
shim.live_bytes.restype = ctypes.c_longlong
shim.watch_python()
local = tiny.Shape(n_layers=6, windows=(0, 9), local_theta=500.0)
kinds = {"plain": tiny.Shape(n_layers=6), "windows": local}
experts = dict(n_experts=3, experts_per_token=2, expert_ffn=24, expert_layers=(1, 0))
kinds["experts"] = tiny.Shape(n_layers=6, **experts)
biased = tiny.Shape(n_layers=2, hidden=64, ffn=64, qkv_bias=True, o_bias=True, qk_norm=True, post_norms=True)
built = {name: tiny.build(shape, Path(sys.argv[1])) for name, shape in (kinds | {"biased": biased}).items()}
checkpoint = built["plain"]
checkpoint.load()  # what Python imports for it is not the core's
first, second = checkpoint.ids(40), checkpoint.ids(200, seed=1)
stages = tiny.pruning([(0, 0.75), (1, 0.5), (3, 0.25)], sink=1, protect=[(3, 5)], smooth=3)
heavy = tiny.pruning([(0, 0.3), (2, 0.2, True), (3, 0.1)], memory=0.8, layers=2, decode=[(1, 0.9), (3, 0.2)])

def each_failure(prepare, call):
    # (prepared, call(prepared) or None) with each allocation of the call failing in turn, and once without
    for n in count():
        prepared = prepare()
        shim.fail_after(n)
        try:
            result = call(prepared)
        except MemoryError:
            result = None
        failures = shim.failures_made()
        shim.fail_after(-1)
        yield prepared, result
        if not failures:
            return

def refused(call, least):
    # all calls but the last fail, and leave nothing behind
    gc.collect()
    before = shim.live_blocks()
    results = [result for _, result in each_failure(lambda: None, lambda _: call())]
    assert len(results) > least and results[-1] is not None and set(map(type, results[:-1])) == {type(None)}
    last = results.pop()
    kept = shim.live_blocks()
    del last
    gc.collect()
    assert kept > before == shim.live_blocks(), (before, kept, shim.live_blocks())

def check_estimate(pruning):
    # blocks are multiples of 64 bytes, and so are these numbers of tokens: the estimate is exact
    taken = []
    for room in (64, 384):
        session = model.session(pruning)
        before = shim.live_bytes()
        session.reserve(room)
        taken.append(shim.live_bytes() - before)
    assert taken[1] - taken[0] == session.bytes_for(384) - session.bytes_for(64), (taken, pruning)

def check_keys_of_a_policy():
    # where only some layers have grown, or no longer RoPE table was made, a policy reads the keys of its layer
    seen = []

    def score(core, view, memo):
        seen.append(core.view("keys", 0, len(first)).tobytes())
        return np.zeros(view["n_in_play"], np.float32), -1

    rules = tiny.pruning([(3, 0.5)], policy=score)
    for session, _ in each_failure(lambda: session_of(rules, first), lambda session: session.reserve(512)):
        del seen[:-1]
        session.forward([5], generated=True)
        assert len(set(seen)) == 1

def session_of(pruning, *before):
    session = model.session(pruning)
    session.trace = True
    for ids in before:
        session.forward(ids)
    return session

def state_of(session):
    parts = "keys", "values", "aux", "remembered", "logits"
    known = [session.state(part, layer) for part in parts for layer in range(6)]
    arrays = session.ids, session.kinds, session.depths, session.gone
    return [None if array is None else array.tobytes() for array in [*arrays, *known]]

def check(pruning, before, call, least=20):
    gc.collect()
    blocks = shim.live_blocks()
    wanted = session_of(pruning, *before)
    untouched = state_of(wanted)
    want, runs = call(wanted), len(wanted.last_trace)
    after = wanted.forward([7], generated=True)
    refused = 0
    for session, got in each_failure(lambda: session_of(pruning, *before), call):
        if got is None:  # refused: nothing has changed
            refused += 1
            assert state_of(session) == untouched
            got = call(session)
        else:
            assert len(session.last_trace) == runs
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(session.forward([7], generated=True), after)
        assert session.last_trace
    assert refused >= least
    del session, wanted
    gc.collect()
    assert shim.live_blocks() == blocks, "a call that failed has left blocks behind"

def restored(session):
    new = model.session(heavy)
    new.set_tokens(session.ids, session.kinds, session.depths, session.gone)
    for layer in range(6):
        for part in ("keys", "values", "aux", "remembered"):
            if session.state_length(part, layer):
                new.set_state(part, layer, session.state(part, layer))
    return new

def check_forks(already_shared, fewest):
    # a fork that gets no memory is refused, or one that shares none; the session is as before
    def prepare():
        session = session_of(stages, first)
        return session, session.fork() if already_shared else None

    want = session_of(stages, first, second).forward([7], generated=True)
    n_forks = 0
    for (session, _), fork in each_failure(prepare, lambda prepared: prepared[0].fork()):
        n_forks += fork is not None
        for holder in filter(None, (fork, session)):
            holder.forward(second)
            np.testing.assert_array_equal(holder.forward([7], generated=True), want)
    assert n_forks == fewest, n_forks

for name in built:
    refused(lambda: built[name].load(threads=3), 10)
for weights in ("q8", "q4"):
    refused(lambda: built["biased"].load(weights=weights), 10)
refused(lambda: _core.Sampler(0.8, 0.9, 5, 1), 0)
for name in kinds:
    model = built[name].load(threads=2)
    fresh = lambda: built[name].load(threads=2).session(stages)
    for session, got in each_failure(fresh, lambda session: session.forward(first)):
        got = session.forward(first) if got is None else got
        np.testing.assert_array_equal(got, session_of(stages, first).logits)
    model.session(None).reserve(400)  # makes the RoPE table, which the model keeps
    whole = session_of(heavy, first)
    for pruning in (None, stages, heavy):
        refused(lambda: model.session(pruning), 10)
        check_estimate(pruning)
    check_keys_of_a_policy()
    check_forks(False, 5)
    check_forks(True, 2)
    refused(lambda: restored(whole), 40)
    np.testing.assert_array_equal(restored(whole).forward(second), whole.fork().forward(second))
    check(stages, [], lambda session: session.forward(second))
    check(stages, [first], lambda session: session.forward(second))
    check(heavy, [first], lambda session: session.forward(second))
    check(heavy, [first], lambda session: session.forward([5], generated=True), least=1)
    check(stages, [first], lambda session: session.advance(second, _core.Sampler(0.8, 0.9, 3, 1)))
    check(None, [first], lambda session: session.surprisal(second))
    del whole, model
print("done")
"""


@pytest.mark.skipif(SANITIZED, reason="replaces posix_memalign, as the sanitizer does")
def test_each_allocation_may_fail(tmp_path: Path) -> None:
    source, shim, folder = tmp_path / "shim.c", tmp_path / "shim.so", tmp_path / "model"
    folder.mkdir()
    source.write_text(SHIM)
    compiler = (sysconfig.get_config_var("CC") or "cc").split()
    subprocess.run([*compiler, "-shared", "-fPIC", str(source), "-o", str(shim), "-ldl"], check=True)
    assert python(SCRIPT, folder, LD_PRELOAD=str(shim)) == "done\n"
