"""Ctrl-C stops a pass within a second and leaves the model as it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ANSWER_IN_TIME = 1.0
SCRIPT = """
import json, sys, time
import lazyllm

llm = lazyllm.load(sys.argv[1])
n_prompt, n_new = int(sys.argv[2]), int(sys.argv[3])
question = "What is the capital of France?"
before = llm.generate(question, chat=True, max_new_tokens=12).token_ids
pruning = lazyllm.Pruning({10: 0.7, 20: 0.5})
session = llm.session(pruning)
ids = [100 + i % 20000 for i in range(n_prompt)]
print("started", flush=True)
try:
    session.ask(ids, max_new_tokens=n_new, progress=False)
    caught = None
except KeyboardInterrupt as error:
    caught = time.monotonic()
    partial = error.generation.token_ids if hasattr(error, "generation") else []
length = session.length
goes_on = not partial or llm.generate(ids, pruning, max_new_tokens=len(partial)).token_ids == partial
session.forward([5])
after = llm.generate(question, chat=True, max_new_tokens=12).token_ids
same = before == after and goes_on
print(json.dumps({"caught": caught, "partial": len(partial), "length": length, "same": same}))
"""


def heed_ctrl_c() -> None:
    """In the child: a shell that runs the tests in the background has told its children to ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def interrupted(arguments: list[str], wait: float) -> tuple[float, int, str, str]:
    """Runs Python and sends SIGINT `wait` seconds after its first line: when that was, and how it ended."""
    environment = {**os.environ, "LAZYLLM_PROGRESS": "0"}
    child = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=heed_ctrl_c,
    )
    assert child.stdout is not None
    first = child.stdout.readline()
    time.sleep(wait)
    sent = time.monotonic()
    child.send_signal(signal.SIGINT)
    try:
        out, err = child.communicate(timeout=120)
    finally:
        child.kill()
    return sent, child.returncode, first + out, err


@pytest.mark.skipif(sys.platform == "win32", reason="SIGINT to one process is POSIX")
@pytest.mark.parametrize(
    ("n_prompt", "n_new", "wait"), [(8000, 1, 1.0), (10, 8000, 2.0)], ids=["prefill", "decode"]
)
def test_ctrl_c_stops_a_pass(
    demo_model: Path, n_prompt: int, n_new: int, wait: float, sanitized: bool
) -> None:
    sent, code, out, err = interrupted(["-c", SCRIPT, str(demo_model), str(n_prompt), str(n_new)], wait)
    assert code == 0, err
    report = json.loads(out.splitlines()[-1])
    assert report["caught"] is not None, "the pass ended before Ctrl-C came"
    assert report["caught"] - sent < ANSWER_IN_TIME * (10 if sanitized else 1)
    assert report["length"] == (n_prompt + report["partial"] - 1 if n_new > 1 else 0)
    assert report["same"]


@pytest.mark.skipif(sys.platform == "win32", reason="SIGINT to one process is POSIX")
def test_ctrl_c_ends_the_command(demo_model: Path) -> None:
    launch = (
        "import sys; print('started', flush=True); "
        "from lazyllm.commands.main import main; sys.exit(main(sys.argv[1:]))"
    )
    arguments = [
        "generate",
        "--model",
        str(demo_model),
        "--prompt",
        "word " * 7000,
        "--max-new-tokens",
        "900",
    ]
    _, code, out, err = interrupted(["-c", launch, *arguments], wait=3.0)
    assert (code, err) == (130, "lazyllm: interrupted\n")
    assert out.startswith("started")
