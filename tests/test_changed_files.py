"""Files of weights that change while they are in use: an error of the pass, never a silently wrong answer."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import IDS, model_folder
from tiny import SANITIZED, Shape

import lazyllm
from lazyllm import CheckpointError
from lazyllm import llm as llm_module
from lazyllm.checkpoints.checkpoint import Checkpoint

WEIGHTS = "model.safetensors"
CHANGED = rf"{WEIGHTS} was changed or could not be read while it was in use; load the model again"
SHAPE = Shape(vocab=300, n_layers=4, hidden=128, n_heads=4, n_kv_heads=4, head_dim=32, ffn=256)  # many pages


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folder(tmp_path, SHAPE)


def overwrite(path: Path, _: int) -> None:
    with path.open("r+b") as file:
        file.seek(-64, os.SEEK_END)
        file.write(b"\7" * 64)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("change", "n_bytes"),
    [(os.truncate, 0), (os.truncate, 4096), (os.truncate, 300_000), (os.truncate, -1), (overwrite, 0)],
    ids=["empty", "a page", "half", "a byte", "overwritten"],
)
def test_a_file_that_changes_between_passes(folder: Path, threads: int, change: Any, n_bytes: int) -> None:
    path = folder / WEIGHTS
    size = path.stat().st_size
    llm = lazyllm.load(folder, device="cpu", threads=threads)
    session = llm.session({1: 0.5})
    session.forward(IDS)
    change(path, n_bytes if n_bytes >= 0 else size + n_bytes)
    for changed in (session, session.fork(), llm.session()):
        length = changed.length
        with pytest.raises(OSError, match=CHANGED):
            changed.forward([5, 6, 7])
        assert changed.length == length


@pytest.mark.parametrize("hashed_before", [False, True])
def test_a_file_that_is_replaced_stays_as_it_was(folder: Path, tmp_path: Path, hashed_before: bool) -> None:
    """By a file of the same size and, as after `cp -p`, the same time of change: sessions know it."""
    old, times = lazyllm.load(folder, device="cpu", threads=1), (folder / WEIGHTS).stat()
    want = old.session().forward(IDS)
    if hashed_before:
        old.checkpoint.weights_digest(progress=False)
    other = model_folder(tmp_path / "other", dataclasses.replace(SHAPE, seed=5)) / WEIGHTS
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    other.rename(folder / WEIGHTS)
    session = old.session()
    np.testing.assert_array_equal(session.forward(IDS), want)
    session.save(tmp_path / "kept", progress=False)
    with pytest.raises(ValueError, match="is a session with model sha256"):
        lazyllm.load(folder, device="cpu", threads=1).restore(tmp_path / "kept")
    assert old.restore(tmp_path / "kept").length == session.length


def test_what_was_written_to_has_no_identity(folder: Path) -> None:
    found = Checkpoint(folder)
    os.utime(folder / WEIGHTS, ns=(0, 0))
    with pytest.raises(OSError, match=f"{WEIGHTS} was written to while it was in use; load the model again"):
        found.weights_digest(progress=False)


def test_a_tokenizer_that_changes_before_it_is_read(folder: Path) -> None:
    llm, added = lazyllm.load(folder, device="cpu", threads=1), folder / "chat_template.jinja"
    added.write_text("{{ messages }}")
    with pytest.raises(OSError, match="the tokenizer was changed after the model was loaded; load it again"):
        llm.generate("hi", max_new_tokens=1)
    added.unlink()
    assert llm.generate("hi", max_new_tokens=1).token_ids


def test_a_file_that_changes_while_it_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, path = llm_module.open_model, folder / WEIGHTS

    def replacing(*arguments: Any) -> Any:
        shutil.copy(path, folder / "new").rename(path)
        return plain(*arguments)

    monkeypatch.setattr(llm_module, "open_model", replacing)
    with pytest.raises(OSError, match=f"{WEIGHTS} was changed while it was loaded; load it again"):
        lazyllm.load(folder, device="cpu")
    found = Checkpoint(folder)
    os.truncate(path, 300_000)
    with pytest.raises(CheckpointError, match="lie past the end of a file of 300000 bytes"):
        plain(found, "cpu", 1, "f32", "auto", "f32")


ELSEWHERE = """
import faulthandler, mmap, os, signal, sys
import lazyllm

faulthandler.disable()
if sys.argv[3] == "handled":
    signal.signal(signal.SIGBUS, lambda number, frame: os.write(1, b"handled") and os._exit(0))
llm = lazyllm.load(sys.argv[1], device="cpu", threads=1)
llm.session().forward([5, 6])
if sys.argv[3] == "sent":
    os.kill(os.getpid(), signal.SIGBUS)
with open(sys.argv[2], "r+b") as file:
    data = mmap.mmap(file.fileno(), 0)
    os.truncate(sys.argv[2], 0)
    if sys.argv[3] == "handled":
        os.kill(os.getpid(), signal.SIGBUS)
    data[5]
"""


@pytest.mark.skipif(SANITIZED, reason="the sanitizer has a handler of its own")
@pytest.mark.parametrize("how", ["read", "sent", "handled"])
def test_other_bus_errors_are_not_ours(folder: Path, tmp_path: Path, how: str) -> None:
    (tmp_path / "other").write_bytes(b"0" * 9000)
    command = [sys.executable, "-c", ELSEWHERE, str(folder), str(tmp_path / "other"), how]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    want = (0, b"handled") if how == "handled" else (-signal.SIGBUS, b"")
    assert (done.returncode, done.stdout) == want, done.stderr
