"""Signals in every phase, child processes, and the end of a process while threads compute."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from children import python
from folders import model_folder

import lazyllm
from lazyllm import _core

SIZES = {"n_layers": 12, "hidden": 256, "n_heads": 8, "n_kv_heads": 8, "head_dim": 32, "ffn": 1024}
WIDE = tiny.Shape(vocab=300, **SIZES, context=4096)
STAGES = {2: 0.6, 6: 0.3}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that is large enough to be interrupted within each phase."""
    return model_folder(tmp_path_factory.mktemp("wide"), WIDE)


def test_other_processes_import_the_same_core() -> None:
    """Sanitizers, coverage and mutants have a core of their own, which the other tests here must run."""
    code = "from lazyllm import _core; print(_core.__file__)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert Path(told.strip()).samefile(_core.__file__)


PHASES: dict[str, Callable[[lazyllm.LLM], Any]] = {
    "load": lambda llm: lazyllm.load(llm.checkpoint.path, threads=2, weights="q4").config.n_layers,
    "prefill": lambda llm: llm.session(STAGES).forward(tiny_ids(tiny.fewer_if_sanitized(1200))),
    "decode": lambda llm: llm.generate(tiny_ids(50), STAGES, max_new_tokens=tiny.fewer_if_sanitized(100)).token_ids,
}


def tiny_ids(n: int) -> list[int]:
    return np.random.default_rng(1).integers(0, WIDE.vocab, n).tolist()


class Enough(Exception):
    pass


@pytest.fixture
def raising() -> Iterator[None]:
    """Handlers of SIGTERM and SIGUSR1 that raise."""

    def stop(number: int, frame: Any) -> None:
        raise Enough

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_handler_may_raise_in_each_phase(wide: Path, phase: str, number: int, raising: None) -> None:
    """Its exception comes out, and the model computes as before; test_interrupt.py has how soon."""
    llm, work = lazyllm.load(wide, device="cpu", threads=2), PHASES[phase]
    want = work(llm)
    start = time.perf_counter()
    work(llm)
    seconds = time.perf_counter() - start
    for share in (1 / 2, 1 / 4, 1 / 8):  # the machine may be quicker than before
        sender, ended = threading.Timer(seconds * share, os.kill, (os.getpid(), number)), False
        try:
            sender.start()
            work(llm)
            ended = True
            sender.join()
        except Enough:
            if not ended:
                break
    else:
        pytest.fail("the phase went on to its end")
    np.testing.assert_array_equal(work(llm), want)


def wait_for_a_signal(phase: str, folder: Path) -> None:
    """Starts a model's workers while signals are let through, then blocks one and waits for it."""
    llm = lazyllm.load(folder, device="cpu", threads=2)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    at_work = threading.Thread(target=PHASES[phase], args=(llm,))
    at_work.start()
    time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGUSR1)
    came = signal.sigtimedwait({signal.SIGUSR1}, 10)
    at_work.join()
    sys.exit(0 if came and came.si_signo == signal.SIGUSR1 else 3)


@pytest.mark.parametrize("phase", PHASES)
def test_workers_take_no_signal_that_the_process_waits_for(
    wide: Path, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")  # NumPy's own threads would take it
    child = multiprocessing.get_context("spawn").Process(target=wait_for_a_signal, args=(phase, wide))
    child.start()
    child.join(60)
    assert child.exitcode == 0, f"the process ended with {child.exitcode}; -10 is SIGUSR1"


def prefill_of(folder: Path) -> Any:
    return PHASES["prefill"](lazyllm.load(folder, device="cpu", threads=1))


def test_spawned_processes_load_their_own(wide: Path) -> None:
    llm = lazyllm.load(wide, device="cpu", threads=1)
    for what in (llm, llm.core, llm.session(), llm.session().core):
        with pytest.raises(TypeError, match=r"cannot (be copied or )?pickle"):
            pickle.dumps(what)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        np.testing.assert_array_equal(pool.apply(prefill_of, (wide,)), prefill_of(wide))


LEAVE = """
import sys, threading, time
import lazyllm

class Slow(lazyllm.Policy):
    def score(self, view):
        time.sleep(0.001)
        return view.attention().mean(axis=(0, 1))

llm = lazyllm.load(sys.argv[1], device="cpu", threads=2)
ids = [i % 300 for i in range(400)]
begun = [threading.Event() for _ in range(4)]

def work(i):
    while True:
        llm.generate(ids, {2: 0.5} if i % 2 else Slow({2: 0.5, 6: 0.3}), max_new_tokens=2, progress=False)
        begun[i].set()

for i in range(4):
    threading.Thread(target=work, args=(i,), daemon=True).start()
for one in begun:
    one.wait()
time.sleep(float(sys.argv[2]))
"""


def test_a_process_ends_while_daemon_threads_compute(wide: Path) -> None:
    for delay in (0, 0.05):
        assert python(LEAVE, wide, delay) == ""


def test_python_without_its_lock_is_refused() -> None:
    """A free-threaded Python turns the lock on for a module such as this, unless it is told not to."""
    script = "import sys; sys._is_gil_enabled = lambda: False; import lazyllm._core"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ImportError: lazyllm needs the GIL: leave out PYTHON_GIL=0 and -X gil=0" in done.stderr
