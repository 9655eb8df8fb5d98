"""Forks share memory with the session that they were made of. Nothing shows in the other, in any process."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from children import python
from tiny import Shape, Tiny, pruning, shared_bytes

SHAPE = Shape(seed=9, n_layers=5)
STAGES = pruning([(0, 0.7), (1, 0.5), (3, 0.2)], memory=0.5)
PARTS = ("keys", "values", "aux", "remembered")
ON_CPU = pytest.mark.skipif(tiny.DEVICE != "cpu", reason="forks share memory on the CPU only")


def state(session: Any) -> list[Any]:
    """All that the session knows of its tokens."""
    rows = [session.state(part, layer) for part in PARTS for layer in range(SHAPE.n_layers)]
    tokens = [session.ids, session.depths, session.kinds, session.gone]
    return [None if array is None else (array.shape, array.tobytes()) for array in [*tokens, *rows]]


class Recorded:
    """A session and its calls; another one with the same calls is in the same state, to the bit."""

    def __init__(self, made: Tiny, model: Any, session: Any = None, calls: tuple[Any, ...] = ()) -> None:
        self.made, self.model, self.calls = made, model, list(calls)
        self.session = model.session(STAGES) if session is None else session

    def _do(self, name: str, *arguments: Any) -> Recorded:
        self.calls.append((name, arguments))
        getattr(self.session, name)(*arguments)
        return self

    def read(self, count: int, seed: int) -> Recorded:
        return self._do("forward", self.made.ids(count, seed))

    def write(self, *tokens: int) -> Recorded:
        for token in tokens:
            self._do("forward", [token], True)
        return self

    def truncate(self, n: int) -> Recorded:
        return self._do("truncate", n)

    def fork(self) -> Recorded:
        return Recorded(self.made, self.model, self.session.fork(), tuple(self.calls))

    def check(self) -> None:
        alone = self.model.session(STAGES)
        for name, arguments in self.calls:
            getattr(alone, name)(*arguments)
        assert state(self.session) == state(alone)
        step = alone.forward([5], generated=True)
        np.testing.assert_array_equal(self.session.fork().forward([5], generated=True), step)
        np.testing.assert_array_equal(self.session.forward([5], generated=True), step)
        self.calls.append(("forward", ([5], True)))


# ---- one process -----------------------------------------------------------------------------------------


def forks_of_forks(base: Recorded) -> list[Recorded]:
    """Each of them owns some rows of its own: new tokens, and such that it has revived."""
    line = [base]
    for k in range(5):
        line.append(line[-1].fork().write(k, 10 + k).read(3, k))
    line[2].truncate(25).read(12, 9)
    line.append(line[2].fork().write(8))
    base.truncate(20).read(20, 1)
    line.append(base.fork())
    base.truncate(5).read(40, 8)
    return [line[3].fork().truncate(42), *line]


def the_session_ends_first(base: Recorded) -> list[Recorded]:
    fork = base.fork().write(1)
    later = fork.fork()
    base.session = None
    gc.collect()
    other = Recorded(base.made, base.model).read(40, 3)  # which may get the memory that was freed
    return [fork.write(2), later, later.fork().truncate(30).read(8, 1), other]


def the_session_grows(base: Recorded) -> list[Recorded]:
    fork = base.fork()
    base.read(150, 1)
    return [base.fork().write(1), base, fork.read(170, 2), fork.fork()]


SCENARIOS = [forks_of_forks, the_session_ends_first, the_session_grows]


def run(scenario: Callable[[Recorded], list[Recorded]], made: Tiny, threads: int = 2) -> None:
    for recorded in scenario(Recorded(made, made.load(threads=threads)).read(40, 0).write(1)):
        recorded.check()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return tiny.build(SHAPE, tmp_path_factory.mktemp("forks"))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_nothing_shows_in_another(made: Tiny, scenario: Callable[[Recorded], list[Recorded]]) -> None:
    run(scenario, made)


def test_a_fork_of_an_empty_session_traces_as_it_does(made: Tiny) -> None:
    session = made.load().session(None)
    session.trace = True
    assert session.fork().trace


def test_what_is_restored_into_a_session_shows_in_no_fork(made: Tiny) -> None:
    base = Recorded(made, made.load()).read(40, 0)
    fork = base.fork()
    base.session.set_state("keys", 0, np.zeros_like(base.session.state("keys", 0)))
    fork.check()
    assert not base.session.state("keys", 0).any()


def test_sessions_and_forks_run_in_threads(made: Tiny) -> None:
    """Each goes its own way while others begin and end."""
    base = Recorded(made, made.load(threads=2)).read(40, 0)

    def go(number: int, recorded: Recorded) -> Recorded:
        for k in range(4):
            recorded.write(number).fork().write(k)
            recorded.truncate(30 - k).read(6, number + k)
        return recorded

    line = [base.fork() for _ in range(4)]
    with ThreadPoolExecutor(5) as pool:
        for recorded in pool.map(go, range(5), [base, *line]):
            recorded.check()


def in_child(work: Callable[[], None]) -> Callable[[], int]:
    """A forked child, which does the work when the call returned here is made: that gives its exit status."""
    ours, theirs = multiprocessing.Pipe()
    child = os.fork()
    if not child:
        try:
            ours.close()  # or the child would wait for ever for a parent that has failed
            theirs.recv()
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def go() -> int:
        ours.send(None)
        return os.waitpid(child, 0)[1]

    return go


def test_a_session_goes_on_in_a_child_process(made: Tiny) -> None:
    """Neither process sees what the other writes, again or for the first time."""
    model = made.load(threads=2)
    base, alone = Recorded(made, model).read(40, 0), Recorded(made, model).read(40, 7)
    fork = base.fork().write(1)
    alone.fork()  # which ends at once: nobody but its owner has this memory then
    line = [base, alone, fork]

    def go_on() -> None:
        line.extend([base.fork().write(4), alone.fork()])
        for recorded in (base, alone):
            recorded.write(2).check()
            recorded.truncate(30).read(9, 2)
        fork.truncate(25).read(6, 3)
        for recorded in [*line, base.fork()]:
            recorded.check()

    later, sooner = in_child(go_on), in_child(go_on)
    base.write(7)
    alone.write(7)
    assert sooner() == 0
    for recorded in line:
        recorded.check()
    line.append(base.fork().write(7))
    base.truncate(20).read(20, 5)
    alone.truncate(20).read(20, 5)
    fork.write(3)
    assert later() == 0
    for recorded in [*line, base.fork(), alone.fork().read(3, 1)]:
        recorded.check()


# ---- memory ----------------------------------------------------------------------------------------------

TOKENS = 4096
LARGE = Shape(n_layers=12, hidden=64, n_heads=4, n_kv_heads=4, head_dim=64, ffn=64, context=16 * TOKENS)
ROWS = 2 * LARGE.n_layers * LARGE.n_kv_heads * TOKENS * LARGE.head_dim * 4  # bytes of K and V
MEASURE = """
import pickle, sys
import numpy as np
from lazyllm import _core

config, path, tensors, shape, n = pickle.load(sys.stdin.buffer)
model = _core.Model(config, [path], tensors, threads=2)
model.session(None).forward(np.arange(9))

def read(file, name):
    with open(file) as lines:
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))

session = model.session(None)
layers, heads, width = shape
ids, none = np.arange(n, dtype=np.int32) % 90, np.zeros(n, np.uint8)
session.set_tokens(ids, none, np.full(n, layers, np.int32), none)
rows = np.random.default_rng(0).standard_normal((heads, n, width), np.float32)
for layer in range(layers):
    for part in ("keys", "values"):
        session.set_state(part, layer, rows)
session.forward([1], generated=True)
before = read("/proc/self/smaps_rollup", "Pss:")
forks = [session.fork() for _ in range(10)]
for fork in forks:
    for token in range(5):
        fork.forward([token], generated=True)
forked = read("/proc/self/smaps_rollup", "Pss:") - before
model.session(None).reserve(8 * n, n)  # makes the RoPE table, which the model keeps
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before = read("/proc/self/status", "VmHWM")
session.reserve(8 * n, n)
session.forward([1], generated=True)
grown = read("/proc/self/status", "VmHWM") - before
assert session.fork_bytes < session.bytes_for(8 * n) - layers * heads * n * width * 8
print(forked, grown)
"""


@ON_CPU
@pytest.mark.skipif(tiny.SANITIZED, reason="a sanitizer's shadow memory counts as resident")
def test_forks_and_growth_take_little_memory(tmp_path: Path) -> None:
    """Ten forks take a tenth of what they share; a session that grows does not hold its caches twice."""
    large = tiny.build(LARGE, tmp_path)
    shape = LARGE.n_layers, LARGE.n_kv_heads, LARGE.head_dim
    given = pickle.dumps((large.config, str(large.path), large.tensors, shape, TOKENS))
    forked, grown = python(MEASURE, given=given).split()
    assert int(forked) < ROWS / 10
    assert int(grown) < ROWS / 20, grown


@ON_CPU
def test_what_a_fork_writes_takes_no_shared_memory(tmp_path: Path) -> None:
    large = tiny.build(Shape(n_layers=4, n_kv_heads=2, head_dim=64, context=4096), tmp_path)
    session = large.load(threads=1).session(None)
    session.forward(large.ids(100))
    before = shared_bytes()
    fork = session.fork()
    shared = shared_bytes() - before
    assert shared >= 2 * 4 * 2 * 64 * 4 * 100
    fork.forward(large.ids(900))
    fork.fork().forward(large.ids(900))
    assert shared_bytes() == before + shared


WITHOUT = """
import resource, sys
from pathlib import Path
import test_session_forks as forks

made = forks.tiny.build(forks.SHAPE, Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, -1))
for scenario in forks.SCENARIOS:
    forks.run(scenario, made, threads=1)
base = forks.Recorded(made, made.load(threads=1)).read(9, 0)
fork = base.fork()
print("memfd:lazyllm" in open("/proc/self/maps").read())
resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))  # for what `make coverage` writes at the end
"""


@ON_CPU
def test_where_memory_cannot_be_shared_it_is_copied(tmp_path: Path) -> None:
    assert python(WITHOUT, tmp_path) == "False\n"


FULL = """
import resource, sys
from pathlib import Path
import tiny

made = tiny.build(tiny.Shape(n_layers=40, n_kv_heads=4, head_dim=16, context=1 << 22), Path(sys.argv[1]))
model = made.load(threads=1)
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, -1))  # K and V of the whole context would be 80 GiB
session = model.session(None)
session.forward(range(40))
session.fork().forward([1])
try:
    session.reserve(1 << 20)
except MemoryError as error:
    print(error)
"""


@ON_CPU
@pytest.mark.skipif(tiny.SANITIZED, reason="a sanitizer reserves more address space itself")
def test_a_session_needs_no_address_space_for_the_whole_context(tmp_path: Path) -> None:
    assert "could not get" in python(FULL, tmp_path)
