"""Memory that runs out: MemoryError, and a session that goes on as if the call had not been made."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

# Every allocation of the core is a posix_memalign, but for memory that forks share, which is a file's.
SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>

static int left = -1, failures; /* left: allocations that succeed before one fails; below 0: all */

void fail_after(int n) { left = n, failures = 0; }
int failures_made(void) { return failures; }

int posix_memalign(void **out, size_t alignment, size_t size)
{
    static int (*real)(void **, size_t, size_t);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "posix_memalign");
    if (left >= 0 && left-- == 0) return failures++, ENOMEM;
    return real(out, alignment, size);
}

int memfd_create(const char *name, unsigned flags)
{
    static int (*real)(const char *, unsigned);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "memfd_create");
    if (left >= 0 && left-- == 0) return failures++, errno = ENFILE, -1;
    return real(name, flags);
}
"""
SCRIPT = """
import ctypes, sys
from itertools import count
from pathlib import Path
import numpy as np
import tiny
from lazyllm import _core

shim = ctypes.CDLL(None)
made = tiny.build(tiny.Shape(n_layers=6), Path(sys.argv[1]))
model = made.load(threads=2)
first, second = made.ids(40), made.ids(200, seed=1)
stages = tiny.pruning([(0, 0.75), (1, 0.5), (3, 0.25)], sink=1, protect=[(3, 5)], smooth=3)

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

def session_of(pruning, *before):
    session = model.session(pruning)
    session.trace = True
    for ids in before:
        session.forward(ids)
    return session

def check(pruning, before, call):
    wanted = session_of(pruning, *before)
    want, runs = call(wanted), len(wanted.last_trace)
    after = wanted.forward([7], generated=True)
    refused = lost = 0
    for session, got in each_failure(lambda: session_of(pruning, *before), call):
        if got is None:  # refused: nothing has changed
            refused += 1
            assert session.length == sum(map(len, before))
            got = call(session)
        else:
            try:
                assert len(session.last_trace) == runs
            except MemoryError as error:
                assert str(error) == "there was no memory for the trace of the last pass"
                lost += 1
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(session.forward([7], generated=True), after)
        assert session.last_trace
    assert refused >= 20 and lost > 0, (refused, lost)

for opening in (lambda _: made.load(threads=2), lambda _: model.session(stages)):
    results = [result for _, result in each_failure(lambda: None, opening)]
    assert len(results) > 5 and results[-1] is not None and set(results[:-1]) == {None}
want = session_of(stages, first, second).forward([7], generated=True)
for already_shared in (False, True):
    def prepare():
        session = session_of(stages, first)
        return session, session.fork() if already_shared else None
    copied = 0
    for (session, _), fork in each_failure(prepare, lambda prepared: prepared[0].fork()):
        copied += fork is not None  # the last, and those that cannot share memory
        for one in filter(None, (fork, session)):
            one.forward(second)
            np.testing.assert_array_equal(one.forward([7], generated=True), want)
    assert copied == (2 if already_shared else 5), copied
check(stages, [], lambda session: session.forward(second))
check(stages, [first], lambda session: session.forward(second))
check(stages, [first], lambda session: session.advance(second, _core.Sampler(0.8, 1.0, 0, 1)))
check(None, [first], lambda session: session.surprisal(second))
print("done")
"""


def test_each_allocation_may_fail(tmp_path: Path, sanitized: bool) -> None:
    if sanitized:
        pytest.skip("replaces posix_memalign, as the sanitizer does")
    source, shim, folder = tmp_path / "shim.c", tmp_path / "shim.so", tmp_path / "model"
    folder.mkdir()
    source.write_text(SHIM)
    compiler = (sysconfig.get_config_var("CC") or "cc").split()
    subprocess.run([*compiler, "-shared", "-fPIC", str(source), "-o", str(shim), "-ldl"], check=True)
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder)],
        env={**os.environ, "LD_PRELOAD": str(shim), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
