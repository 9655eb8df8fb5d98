"""Files of strangers: each of the faults in faults.py is refused with the file's name and what is wrong, in
seconds and with little memory."""

import contextlib
import faulthandler
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import faults
import numpy as np
import pytest
from families import RECORDED
from faults import Fault
from folders import model_folder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toys import as_gguf, write_gguf

import lazyllm
from benchmarks.suites.memory import STATUS, bytes_in
from lazyllm import Preset, Pruning
from lazyllm.checkpoints import chat
from lazyllm.checkpoints.gguf import convert

SECONDS = 60  # after which the whole run ends with a traceback: nothing may hang
# bytes beside twice those of the files, for what a library loads when it is first used, and a sanitizer keeps
SPARE = (512 if os.environ.get("LAZYLLM_SANITIZED") else 48) << 20
TABLES = {"folder": faults.FOLDER, "sharded": faults.SHARDED, "gguf": faults.GGUF}
TABLES |= {"session": faults.SESSION, "preset": faults.PRESET}
CANDIDATE = {"pruning": {"stages": [[1, 0.5]]}, "speedup": 2.0}


def opened(path: Path) -> lazyllm.LLM:
    """A model that has done what needs each of its files."""
    llm = lazyllm.load(path, device="cpu", threads=1)
    if llm.checkpoint.tokenizer and llm.tokenizer.template:
        llm.tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    return llm


@contextmanager
def bounded(path: Path) -> Iterator[None]:
    """Ends a run that hangs; fails if more than twice the bytes of the files were taken."""
    files = [path] if path.is_file() else list(path.iterdir())
    most = 2 * sum(file.stat().st_blocks * 512 for file in files) + SPARE
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    Path("/proc/self/clear_refs").write_text("5")  # the highest use so far is forgotten
    before = bytes_in(STATUS, "VmRSS")
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
    assert bytes_in(STATUS, "VmHWM") - before <= most


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of each kind of file, which opens."""
    place = tmp_path_factory.mktemp("whole")
    folder, gguf = model_folder(place / "folder"), write_gguf(place / "model.gguf", *as_gguf("llama1"))
    session = opened(folder).session(Pruning({1: 0.6, 3: 0.3}))
    session.ask([{"role": "user", "content": "Hello"}], chat=True, max_new_tokens=3)
    session.save(place / "kept")
    evidence = {"candidates": [CANDIDATE], "prompts": {}}
    preset = Preset(Pruning({1: 0.5}), 2.0, "a model", "0" * 64, {}, evidence).save(place / "preset.json")
    files = {"folder": folder, "sharded": RECORDED / "families" / "llama2", "gguf": gguf}
    return files | {"session": place / "kept", "preset": preset}


@pytest.fixture(scope="module")
def llm(whole: dict[str, Path]) -> lazyllm.LLM:
    return opened(whole["folder"])


def copied(source: Path, to: Path) -> Path:
    if source.is_file():
        return Path(shutil.copy(source, to))
    return shutil.copytree(source, to / source.name, dirs_exist_ok=True)


def test_what_is_whole_opens(whole: dict[str, Path], llm: lazyllm.LLM) -> None:
    for kind in ("folder", "sharded", "gguf"):
        opened(whole[kind]).core.session(None).forward([1, 2, 3])
    assert llm.restore(whole["session"]).ask("And?", chat=True, max_new_tokens=2).token_ids
    assert Preset.load(whole["preset"]).speedup == 2.0


@pytest.mark.parametrize(
    ("kind", "fault"), [pytest.param(kind, fault, id=fault.name) for kind, table in TABLES.items() for fault in table]
)
def test_faults(
    kind: str, fault: Fault, whole: dict[str, Path], llm: lazyllm.LLM, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(chat, "CHARACTERS", 10**6)
    place = copied(whole[kind], tmp_path)
    file = place / fault.file if place.is_dir() else place
    fault.change(file)
    open_it = {"session": llm.restore, "preset": Preset.load}.get(kind, opened)
    with bounded(place), pytest.raises(ValueError, match=fault.words) as caught:
        open_it(place)
    assert str(file) in str(caught.value)


def with_bytes(changes: list[tuple[int, int]], length: int | None = None) -> faults.Change:
    def change(contents: bytes) -> bytes:
        data = bytearray(contents)
        for place, byte in changes:
            data[place % len(data)] = byte
        return bytes(data[:length])

    return faults.rewritten(change)


BYTES = st.lists(st.tuples(st.integers(0, 9000), st.integers(0, 255)), min_size=1, max_size=4)
NAMES = st.sampled_from(["gone", "kinds", "depths"])
FLAGS = st.lists(st.tuples(NAMES, st.integers(0, 26), st.integers(1, 27), st.integers(0, 6)), min_size=1, max_size=4)


@pytest.mark.parametrize("name", [faults.WEIGHTS, faults.VOCABULARY, faults.FILE])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(st.builds(with_bytes, BYTES, st.none() | st.integers(0, 66_000)))
def test_damaged_files_are_refused_or_work(
    whole: dict[str, Path], tmp_path: Path, name: str, change: faults.Change
) -> None:
    place = copied(whole["gguf" if name == faults.FILE else "folder"], tmp_path)
    change(place if place.is_file() else place / name)
    with contextlib.suppress(ValueError):
        model = opened(place)
        assert all(token < model.config.vocab for token in model.tokenizer.encode("the quick brown fox"))
        model.core.session(None).forward([1, 2, 3])
    with contextlib.suppress(ValueError), tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        if place.is_file():
            convert(place, folder, progress=False)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given((st.builds(with_bytes, BYTES).map(faults.resealed)) | FLAGS.map(faults.flagged))
def test_damaged_sessions_are_refused_or_go_on(
    whole: dict[str, Path], llm: lazyllm.LLM, tmp_path: Path, change: faults.Change
) -> None:
    """The digest is made anew, as the author of a file can."""
    path = copied(whole["session"], tmp_path)
    change(path)
    with contextlib.suppress(ValueError):
        restored = llm.restore(path)
        restored.forward([1, 2, 3])
        assert (np.diff(restored.last_pass[:, 0]) <= 0).all()
        restored.ask("And?", chat=True, max_new_tokens=2)


def test_a_template_without_an_end_can_be_interrupted(alarm: Any) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    endless = "{% for _ in range(99999) %}" * 3 + "{% endfor %}" * 3
    alarm(interrupt, 0.1)
    with pytest.raises(KeyboardInterrupt):
        chat.ChatTemplate(endless, Path("endless.jinja"), {}).render([], True)
