"""Threads and forks: the model is shared, a session is not."""

import ctypes
import multiprocessing
import os
import platform
import re
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from conftest import Alarm
from folders import WIDE

from lazyllm import _core

SHAPE = tiny.Shape(seed=8, n_layers=5)
STAGES = tiny.pruning([(0, 0.5)])


@pytest.fixture
def made(tmp_path: Path) -> tiny.Tiny:
    return tiny.build(SHAPE, tmp_path)


def logits_of(model: _core.Model, made: tiny.Tiny) -> np.ndarray:
    return model.session(STAGES).forward(made.ids(tiny.fewer_if_sanitized(200)))


def test_threads_share_a_model(made: tiny.Tiny) -> None:
    model = made.load(threads=2)
    want = logits_of(model, made)
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda _: logits_of(model, made), range(40)):
            np.testing.assert_array_equal(got, want)


def test_a_session_refuses_a_second_thread(made: tiny.Tiny) -> None:
    session = made.load().session(None)
    inside, leave = threading.Event(), threading.Event()

    def wait(layers_done: int, n_layers: int) -> None:
        inside.set()
        leave.wait()

    first = threading.Thread(target=session.forward, args=(made.ids(5),), kwargs={"watch": wait})
    first.start()
    try:
        assert inside.wait(10)
        for use in (lambda: session.forward([1]), lambda: session.reserve(10), lambda: session.depths):
            with pytest.raises(RuntimeError, match="in use: a call on it is under way"):
                use()
    finally:
        leave.set()
        first.join()
    assert session.length == 5
    session.forward([1])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_a_pass_has_drawn_is_known_before_another_can_run(made: tiny.Tiny, temperature: float) -> None:
    """The memo of a policy is thrown away after the pass, and its finalizer may run the next pass."""

    class Last:
        def __del__(self) -> None:
            drawn.append(session.drawn)
            session.forward([1], generated=True)

    def keep(session: _core.Session, view: dict[str, Any], memo: dict[str, Any]) -> tuple[np.ndarray, int]:
        if not drawn:
            memo.setdefault("last", Last())
        return np.arange(view["n_in_play"], dtype=np.float32), -1

    drawn: list[int | None] = []
    session = made.load().session(tiny.pruning([(0, 0.5)], policy=keep))
    token = session.advance(made.ids(9), _core.Sampler(temperature, 1.0, 0, 3))
    assert drawn == [token]
    assert (session.length, session.drawn) == (10, None)


def fewest_threads(wanted: int) -> int:
    """Threads of this process once as few as `wanted` are left: one that was joined may still be leaving."""
    for _ in range(100):
        n = len(os.listdir("/proc/self/task"))
        if n <= wanted:
            break
        time.sleep(0.01)
    return n


def test_two_threads_of_a_forked_child_start_its_workers_once(made: tiny.Tiny) -> None:
    """A second start would replace the pool's lock while it is held, and leave the first workers waiting."""
    model = made.load(threads=3)
    want = logits_of(model, made)

    def use_twice(answer: Connection) -> None:
        gate = threading.Barrier(4)

        def use(_: int) -> np.ndarray:
            gate.wait()
            return logits_of(model, made)

        with ThreadPoolExecutor(4) as pool:
            same = [np.array_equal(got, want) for got in pool.map(use, range(4))]
        answer.send((same, fewest_threads(3)))

    context = multiprocessing.get_context("fork")
    for _ in range(10):
        ours, theirs = context.Pipe()
        child = context.Process(target=use_twice, args=(theirs,))
        child.start()
        try:
            assert ours.poll(30), "the forked child gave no answer"
            same, n_threads = ours.recv()
        finally:
            child.kill()
            child.join()
        assert same == [True] * 4
        assert n_threads == 3  # its main thread and the model's workers
    np.testing.assert_array_equal(logits_of(model, made), want)


def test_watches_may_use_models_and_nest(tmp_path: Path) -> None:
    """A watch of one model runs another long enough to be watched between the tasks of one op, and then the first."""
    made = tiny.build(replace(WIDE, n_layers=4), tmp_path)
    first, second = made.load(threads=1), made.load(threads=1)
    want = logits_of(first, made)
    seen, layers = [], []

    def inner(done: int, total: int) -> None:
        seen.append(logits_of(first, made))

    def outer(done: int, total: int) -> None:
        layers.append(done)
        if not seen:
            second.session(None).forward(made.ids(tiny.fewer_if_sanitized(1500)), watch=inner)
            seen.append(logits_of(first, made))

    first.session(None).forward(made.ids(tiny.fewer_if_sanitized(2000)), watch=outer)
    assert len(seen) > 1
    for got in seen:
        np.testing.assert_array_equal(got, want)
    assert layers == sorted({*layers})
    assert layers[-1] == 4


def test_a_thread_with_nothing_to_ask_does_without_the_lock_of_python(tmp_path: Path) -> None:
    """Off the main thread there are no signals to look for."""
    made = tiny.build(replace(WIDE, n_layers=4), tmp_path)
    session, ids = made.load(threads=1).session(None), made.ids(tiny.fewer_if_sanitized(2000))
    inside = threading.Event()

    def run() -> None:
        inside.set()
        session.forward(ids)

    thread, interval = threading.Thread(target=run), sys.getswitchinterval()
    sys.setswitchinterval(1000)  # from now on a thread gives the lock up by itself only
    try:
        thread.start()
        inside.wait()
        assert thread.ident is not None
        clock, deadline = time.pthread_getcpuclockid(thread.ident), time.monotonic() + 20
        worked = 0.0
        while worked < 0.05 and time.monotonic() < deadline:
            worked = time.clock_gettime(clock)
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    assert worked >= 0.05


@pytest.mark.parametrize("ends", [True, False])
def test_a_fork_within_a_pass_ends_the_pass_in_the_child(tmp_path: Path, ends: bool, alarm: Alarm) -> None:
    """A signal handler forks while workers hold tasks; the child has no workers and cannot wait for them.

    A fork between two ops interrupts no task: the child then finishes the pass, with the parent's logits.
    """
    shape = tiny.Shape(n_layers=2, hidden=512, n_heads=8, n_kv_heads=8, head_dim=64, ffn=2048, context=4096)
    made = tiny.build(shape, tmp_path)
    model, children, ids = made.load(threads=3), [], made.ids(tiny.fewer_if_sanitized(3000))

    def fork() -> None:
        children.append(os.fork())
        if ends and children[0] == 0:
            raise KeyboardInterrupt

    session = model.session(None)
    start = time.perf_counter()
    want = model.session(None).forward(ids)
    alarm(fork, (time.perf_counter() - start) / 8)  # well before the pass ends, on any machine
    logits = refused = None
    try:
        logits = session.forward(ids)
    except (KeyboardInterrupt, RuntimeError) as error:
        refused = error
    if children == [0]:
        good = isinstance(refused, KeyboardInterrupt if ends else RuntimeError)
        good |= not ends and logits is not None and np.array_equal(logits, want)
        os._exit(0 if good and np.isfinite(model.session(None).forward([1, 2])).all() else 1)
    assert len(children) == 1, "the pass ended before the signal"
    assert refused is None
    for _ in range(300):
        ended, status = os.waitpid(children[0], os.WNOHANG)
        if ended:
            break
        time.sleep(0.1)
    else:
        os.kill(children[0], signal.SIGKILL)
        os.waitpid(children[0], 0)
        pytest.fail("the forked child hangs")
    assert status == 0


def test_workers_block_every_signal_but_those_of_their_own_faults(made: tiny.Tiny) -> None:
    """A fault whose signal is blocked ends the process without faulthandler's lines."""
    before = set(os.listdir("/proc/self/task"))
    model = made.load(threads=3)
    workers = set(os.listdir("/proc/self/task")) - before
    assert len(workers) == model.threads - 1
    unblocked = {signal.SIGBUS, signal.SIGSEGV, signal.SIGFPE, signal.SIGILL}
    for worker in workers:
        free = never_blocked = {signal.SIGKILL, signal.SIGSTOP}
        while free == never_blocked:  # the thread has not begun
            text = Path(f"/proc/self/task/{worker}/status").read_text()
            blocked = int(re.findall(r"SigBlk:\s+(\w+)", text)[0], 16)
            free = {number for number in range(1, 32) if not blocked >> (number - 1) & 1}
        assert free - never_blocked == unblocked


@pytest.mark.skipif(platform.machine() != "x86_64", reason="sets bits of MXCSR")
def test_workers_treat_denormals_as_their_caller_does(tmp_path: Path) -> None:
    """A caller may flush denormals to 0, as torch.set_flush_denormal does: then its workers do, too."""
    shape = tiny.Shape(n_heads=8, n_kv_heads=8, hidden=64, context=8192)
    sharp = {name: 30 * array for name, array in tiny.random_weights(shape).items() if "q_proj" in name}
    made = tiny.build(shape, tmp_path, sharp)
    ids = made.ids(tiny.fewer_if_sanitized(6000))

    def scores(model: _core.Model) -> np.ndarray:
        session = model.session(STAGES)
        session.trace = True
        session.forward(ids)
        return session.last_trace[0]["scores"]

    one_thread, four_threads = made.load(threads=1), made.load(threads=4)
    found: list[np.ndarray] = []

    def flushing() -> None:
        flush_denormals()
        found.extend([scores(one_thread), *(scores(four_threads) for _ in range(6))])

    thread = threading.Thread(target=flushing)
    thread.start()
    thread.join()
    assert not np.array_equal(scores(one_thread), found[0]), "no score is small enough"
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


def flush_denormals() -> None:
    """Sets flush-to-zero and denormals-are-zero for this thread."""
    libm = ctypes.CDLL("libm.so.6")
    environment = (ctypes.c_uint32 * 8)()  # fenv_t of x86-64: MXCSR is its last word
    libm.fegetenv(environment)
    environment[7] |= 0x8040
    libm.fesetenv(environment)
