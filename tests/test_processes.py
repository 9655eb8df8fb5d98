"""Signals, child processes, and the end of a process while threads compute."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import python
from conftest import Alarm
from folders import WIDE, model_folder

import lazyllm
from lazyllm import _core
from lazyllm.generation import Request


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("wide"), WIDE)


def test_other_processes_import_the_same_core() -> None:
    """Sanitizers, coverage and mutants have a core of their own, which the other tests here must run."""
    code = "from lazyllm import _core; print(_core.__file__)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert Path(told.strip()).samefile(_core.__file__)


QUESTION = "What is the capital of France?"


@pytest.mark.parametrize(("n_prompt", "n_new"), [(8000, 1), (10, 8000)], ids=["prefill", "decode"])
def test_ctrl_c_stops_a_pass(demo_model: Path, n_prompt: int, n_new: int, alarm: Alarm) -> None:
    """Within a second, and leaves the model as it was."""
    llm, pruning = lazyllm.load(demo_model), lazyllm.Pruning({10: 0.7, 20: 0.5})
    want = llm.generate(QUESTION, chat=True, max_new_tokens=12).token_ids
    session, ids = llm.session(pruning), [100 + i % 20000 for i in range(n_prompt)]
    sent: list[float] = []

    def ctrl_c() -> None:  # as Python's handler of SIGINT does
        sent.append(time.monotonic())
        raise KeyboardInterrupt

    stream = session.answer(ids, Request(n_new, progress=False))
    if n_new > 1:
        next(stream)  # the prompt has been run
    alarm(ctrl_c, 0.3)
    with pytest.raises(KeyboardInterrupt) as stopped:
        stream.finished()
    assert time.monotonic() - sent[0] < 1
    answer = getattr(stopped.value, "generation", None)
    if n_new == 1:
        assert session.length == 0
    else:
        assert answer is not None
        n_new = len(answer.token_ids)
        assert session.length == n_prompt + n_new - 1
        assert llm.generate(ids, pruning, max_new_tokens=n_new).token_ids == answer.token_ids
    session.forward([5])
    assert llm.generate(QUESTION, chat=True, max_new_tokens=12).token_ids == want


LAUNCH = """
import signal, sys
from lazyllm.commands.main import main
from lazyllm.llm import LLM

stream = LLM.stream
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell has children in the background ignore

def announced(*given, **named):
    print("started", flush=True)
    return stream(*given, **named)

LLM.stream = announced
sys.exit(main(sys.argv[1:]))
"""


def test_ctrl_c_ends_the_command(demo_model: Path) -> None:
    given = ["generate", "--model", str(demo_model), "--prompt", "word " * 7000]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, "LAZYLLM_PROGRESS": "0"}
    with subprocess.Popen([sys.executable, "-c", LAUNCH, *given], env=environment, **pipes) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "started\n"
        child.send_signal(signal.SIGINT)
        try:
            _, error = child.communicate(timeout=120)
        finally:
            child.kill()
    assert (child.returncode, error) == (130, "lazyllm: interrupted\n")


def prefill_of(folder: Path) -> Any:
    return lazyllm.load(folder, device="cpu", threads=1).session({2: 0.6, 6: 0.3}).forward(range(200))


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
for event in begun:
    event.wait()
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
