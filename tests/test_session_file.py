"""Sessions that are saved and restored: to the bit what they were, or refused by name."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import IDS, STAGES, model_folder
from safetensors import safe_open
from tiny import Shape
from toys import Paper

import lazyllm
from lazyllm import LLM, Drop, Method, Pruning, Scoring
from lazyllm.support.files import whole_file

SETTINGS = {
    "dense": None,
    "stages": STAGES,
    "memory": Pruning({1: 0.6, 3: 0.3}, scoring=Scoring(memory=0.8, layers=2), decode={0: 0.9, 2: 0.2}),
    "for good": Pruning({1: Drop(0.6), 3: 0.3}),
    "frozen": Pruning({1: 0.6}, decode="frozen", min_tokens=20),
    "random": lazyllm.RandomDrop(0.5, 3),
    "static": lazyllm.StaticPruning(2, 0.4),
    "SnapKV": lazyllm.SnapKV(0.6),
    "expected": lazyllm.ExpectedAttention(0.2),
}


def ran(llm: LLM, pruning: Any) -> lazyllm.Session:
    """A session with a prompt, some of its answer, and a follow-up, of which a token waits to be run."""
    session = llm.session(pruning)
    session.ask(IDS, max_new_tokens=6)
    session.ask([5, 6, 7], max_new_tokens=4)
    return session


def later(session: lazyllm.Session) -> tuple[Any, ...]:
    """The session's next results, to the bit."""
    before = session.depths.tolist(), session.kinds.tolist(), session.computed, session.reached_top
    answer = session.ask([9, 8], max_new_tokens=5, trace=True)
    scores = [stage.scores.tolist() for stage in answer.trace.stages]
    logits = session.forward([11, 12, 13]).tobytes()
    return before, answer.token_ids, answer.passes.tolist(), scores, logits, session.depths.tolist()


@pytest.mark.parametrize("name", SETTINGS)
def test_a_restored_session_goes_on_to_the_bit(llm: LLM, tmp_path: Path, name: str) -> None:
    session, file = ran(llm, SETTINGS[name]), tmp_path / "kept.session"
    session.save(file)
    restored = llm.restore(file)
    assert restored.pruning == session.pruning
    assert later(restored) == later(session)
    assert os.listdir(tmp_path) == ["kept.session"]


def test_surprisal_goes_on(llm: LLM, tmp_path: Path) -> None:
    session = llm.session()
    session.surprisal(IDS)
    session.save(tmp_path / "kept")
    restored = llm.restore(tmp_path / "kept")
    np.testing.assert_array_equal(restored.surprisal([5, 6]), session.surprisal([5, 6]))


def test_a_restored_chat_goes_on(llm: LLM, tmp_path: Path) -> None:
    session = llm.session(STAGES)
    session.ask([{"role": "user", "content": "Hello Ä"}], chat=True, max_new_tokens=3)
    session.save(tmp_path / "kept")
    restored = llm.restore(tmp_path / "kept")
    want = session.ask("And you?", chat=True, max_new_tokens=3)
    got = restored.ask("And you?", chat=True, max_new_tokens=3)
    assert (got.prompt_ids, got.token_ids) == (want.prompt_ids, want.token_ids)


@dataclass(frozen=True)
class Shorter(Method):
    """A method of a user's own, which no text stands for."""

    def kept(self, n_prompt: int) -> int:
        return n_prompt - 1

    def ids(self, llm: Any, prompt_ids: list[int], turn: int) -> list[int]:
        return prompt_ids[1:]


@pytest.mark.parametrize("method", [Paper({1: 0.5}), Shorter()], ids=["policy", "method"])
def test_settings_that_are_code_are_given_again(llm: LLM, tmp_path: Path, method: Method) -> None:
    session, file = llm.session(method), tmp_path / "kept"
    session.forward(IDS)
    session.save(file)
    with pytest.raises(ValueError, match="give it as pruning="):
        llm.restore(file)
    with pytest.raises(ValueError, match="a session with pruning"):
        llm.restore(file, Paper({1: 0.4}))
    assert later(llm.restore(file, method)) == later(session)


def test_it_is_a_safetensors_file_of_what_exists_only(tmp_path: Path) -> None:
    shape = Shape(vocab=300, n_layers=5, hidden=128, n_kv_heads=4, head_dim=32, context=700)
    llm = lazyllm.load(model_folder(tmp_path, shape), device="cpu", threads=2)
    session, file = llm.session(Pruning({1: 0.5, 3: 0.2})), tmp_path / "kept"
    session.forward([k % 290 for k in range(600)])
    session.save(file)
    depths = session.depths
    computed = int(depths.sum()) * 2 * 4 * 32 * 4 + int((depths < 5).sum()) * 128 * 4
    assert computed < file.stat().st_size <= 1.02 * computed
    with safe_open(file, framework="np") as opened:
        assert opened.get_tensor("ids").tolist() == [k % 290 for k in range(600)]
        assert opened.get_tensor("depths").tolist() == depths.tolist()
        assert opened.get_tensor("keys.4").shape == (4, 120, 32)
        assert opened.get_tensor("aux.2").shape == (300, 128)
        metadata = opened.metadata()
    assert metadata["format"].startswith("lazyllm session")
    assert json.loads(metadata["session"])["lazyllm"] == lazyllm.__version__


# ---- refused ---------------------------------------------------------------------------------------------


@pytest.fixture
def kept(llm: LLM, tmp_path: Path) -> Path:
    session = llm.session(STAGES)
    session.forward(IDS)
    session.save(tmp_path / "kept")
    return tmp_path / "kept"


def test_a_file_that_was_cut_short_or_changed(llm: LLM, kept: Path) -> None:
    whole = kept.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    edges = [0, 1, 7, 8, 9, header - 1, header, header + 1, len(whole) - 33, len(whole) - 32, len(whole) - 1]
    for place in [*edges, *range(0, len(whole), 997)]:
        changed = bytearray(whole)
        changed[place] ^= 1
        for contents in (whole[:place], changed):
            kept.write_bytes(contents)
            with pytest.raises(ValueError, match=f"{kept} (is damaged|is no session|has {place} bytes)"):
                llm.restore(kept)
    kept.write_bytes(whole + b"\0")
    with pytest.raises(ValueError, match="is damaged"):
        llm.restore(kept)
    kept.unlink()
    with pytest.raises(FileNotFoundError, match="kept"):
        llm.restore(kept)


def test_a_session_of_another_setting(llm: LLM, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"a session with pruning .*; here it is"):
        llm.restore(kept, Pruning({1: 0.6, 3: 0.4}))
    for name, here in (("weights", "q8"), ("compute", "bf16")):
        there = getattr(llm, name)
        with monkeypatch.context() as patch:
            patch.setattr(llm, name, here)
            with pytest.raises(ValueError, match=f"a session with {name} {there}; here it is {here}"):
                llm.restore(kept)


def test_where_nothing_can_be_saved(llm: LLM, kept: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the session is empty"):
        llm.session().save(kept)
    for place in (tmp_path, tmp_path / "nowhere" / "kept"):
        with pytest.raises(OSError, match=str(place)):
            llm.restore(kept).save(place)
    assert os.listdir(tmp_path) == ["kept"]


# ---- not written whole -----------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
import lazyllm

session = lazyllm.load(sys.argv[1], device="cpu", threads=1).session({1: 0.6, 3: 0.3})
session.forward(list(range(100, 200)))
os.fsync = lambda number: os.kill(os.getpid(), signal.SIGKILL)
session.save(sys.argv[2])
"""


def test_a_kill_leaves_the_file_that_was_there(llm: LLM, kept: Path, folder: Path) -> None:
    before = kept.read_bytes()
    child = subprocess.run([sys.executable, "-c", KILLED, str(folder), str(kept)], check=False)
    assert child.returncode == -signal.SIGKILL
    assert kept.read_bytes() == before
    session = ran(llm, STAGES)
    session.save(kept)
    assert llm.restore(kept).length == session.length
    (left,) = set(os.listdir(kept.parent)) - {"kept"}  # by the killed process
    assert left.endswith(".partial")


def test_each_writer_has_a_file_of_its_own(tmp_path: Path) -> None:
    """The last one to end counts, not one that fails; a file of the user with a name like theirs stays."""
    path, like_theirs = tmp_path / "notes", tmp_path / "notes.partial"
    like_theirs.write_text("mine")
    with whole_file(path) as first, whole_file(path) as second:
        first.write(b"first")
        second.write(b"second")
    with contextlib.suppress(OSError), whole_file(path) as third:
        third.write(b"third")
        raise OSError("no space left")
    assert path.read_bytes() == b"first"
    assert like_theirs.read_text() == "mine"
    assert len(os.listdir(tmp_path)) == 2


PROMPT, GENERATED, READ, TOP = 0, 1, 2, 6
HALF = partial(Pruning, {1: 0.5})
KEPT, WAITS, ANSWER = (PROMPT, TOP, 0), (PROMPT, 2, 0), (GENERATED, TOP, 0)


def test_tokens_that_no_calls_lead_to_do_no_harm(llm: LLM) -> None:
    """A file's author can give a session any of them, and any keys and values; a pass over it gives some
    finite numbers."""
    c = llm.config
    for pruning, tokens in (
        (HALF(sink=2), [ANSWER, KEPT, WAITS]),
        (HALF(), [KEPT, (READ, 2, 0), KEPT]),
        (HALF(), [(PROMPT, TOP, 1), (READ, TOP, 0)]),
        (HALF(prune_generated=True), [WAITS, (GENERATED, 0, 1)]),
        (Pruning({0: 0.3}, scoring=Scoring(memory=0.5)), [KEPT, (GENERATED, 1, 0), (GENERATED, TOP, 1)]),
        (Pruning({1: Drop(0.5)}), [(PROMPT, 0, 1), (READ, 0, 1)]),
        (Pruning({1: Drop(0.5), 3: 0.3}), [(PROMPT, 3, 1), (PROMPT, 4, 0)]),
        (HALF(decode="frozen"), [WAITS, (READ, 2, 0)]),
        (None, [(PROMPT, 3, 1)]),
    ):
        core = llm.session(pruning).core
        kinds, depths, gone = map(np.array, zip(*tokens, strict=True))
        core.set_tokens(np.int32(depths), np.uint8(kinds), np.int32(depths), np.uint8(gone))
        for part in ("keys", "values", "aux"):
            for layer in range(TOP):
                if n := core.state_length(part, layer):
                    width = c.hidden if part == "aux" else c.n_kv_heads * c.head_dim
                    core.set_state(part, layer, np.zeros(n * width, np.float32))
        if core.state_length("remembered", 0) == 0 and pruning and pruning.scoring.memory:
            core.set_state("remembered", 0, np.float32([np.nan, -1]))
        for ids, generated in (([5, 6, 7], False), ([8], True)):
            assert np.isfinite(core.forward(ids, generated)).all()
