"""Ctrl-C stops a pass within a second and leaves the model as it was."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import Alarm

import lazyllm
from lazyllm.generation import Request

QUESTION = "What is the capital of France?"
LAUNCH = """
import sys
from lazyllm.commands.main import main
from lazyllm.llm import LLM

stream = LLM.stream

def announced(*given, **named):
    print("started", flush=True)
    return stream(*given, **named)

LLM.stream = announced
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(("n_prompt", "n_new"), [(8000, 1), (10, 8000)], ids=["prefill", "decode"])
def test_ctrl_c_stops_a_pass(demo_model: Path, n_prompt: int, n_new: int, alarm: Alarm, sanitized: bool) -> None:
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
    assert time.monotonic() - sent[0] < (10 if sanitized else 1)
    answer = getattr(stopped.value, "generation", None)
    if n_new == 1:
        assert session.length == 0
    else:
        assert answer is not None
        assert session.length == n_prompt + len(answer.token_ids) - 1
        n_new = len(answer.token_ids)
        assert llm.generate(ids, pruning, max_new_tokens=n_new).token_ids == answer.token_ids
    session.forward([5])
    assert llm.generate(QUESTION, chat=True, max_new_tokens=12).token_ids == want


def heed_ctrl_c() -> None:
    """In the child: a shell that runs the tests in the background has told its children to ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_ends_the_command(demo_model: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, "generate", "--model", str(demo_model), "--prompt", "word " * 7000],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "LAZYLLM_PROGRESS": "0"},
        preexec_fn=heed_ctrl_c,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "started\n"
    child.send_signal(signal.SIGINT)
    try:
        _, error = child.communicate(timeout=120)
    finally:
        child.kill()
    assert (child.returncode, error) == (130, "lazyllm: interrupted\n")
