"""A number as a setting: resolved when the prompt's length is known, and kept by the session from then on."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import SHAPE

import lazyllm
from lazyllm import LLM, PrefixCache, Pruning, Scoring, Speedup
from lazyllm.commands import main as cli
from lazyllm.methods.parsing import as_method
from lazyllm.methods.speedup import SHORTEST
from lazyllm.schedule import SHAPE_LENGTH

pytestmark = pytest.mark.usefixtures("no_pictures")
MODEL = replace(SHAPE, n_layers=8, context=3000)
RNG = np.random.default_rng(5)
IDS = RNG.integers(3, 300, 1200).tolist()


def test_every_form_is_the_same_setting() -> None:
    for setting in (2.0, 2, "2x", " 2.0x ", "2", "2X", Speedup(2.0), {"method": "speedup", "factor": 2}):
        method = as_method(setting)
        assert method == Speedup(2.0)
        assert str(method) == "2x"
        assert as_method(method.to_json()) == method


def test_a_prompt_gets_the_schedule_for_its_length(llm: LLM) -> None:
    schedules = []
    for n in (100, 400, 1200):
        answer = llm.generate(IDS[:n], 2.0, max_new_tokens=2)
        assert answer.pruning == replace(Pruning.for_speedup(2.0, llm, n), min_tokens=SHORTEST)
        assert answer.speedup == pytest.approx(2.0, rel=0.05)
        assert answer.token_ids == llm.generate(IDS[:n], answer.pruning, max_new_tokens=2).token_ids
        schedules.append(answer.pruning.stages)
    assert len(set(schedules)) == 3


def test_a_short_prompt_runs_dense_and_says_so(llm: LLM) -> None:
    answer = llm.generate(IDS[: SHORTEST - 3], 1.5, max_new_tokens=8)
    assert answer.speedup == 1.0
    assert (
        answer.unpruned
        == f"contexts of fewer than {SHORTEST} prompt tokens run dense (min_tokens), and this one has {SHORTEST - 3}"
    )
    assert answer.passes["in_play"][-1] == SHORTEST + 4
    assert not llm.generate(IDS[:SHORTEST], 1.5, max_new_tokens=2).unpruned


def test_a_prompt_too_short_for_a_high_speedup_runs_dense(llm: LLM) -> None:
    """A few tokens stay whatever the keep, which is much of a prompt of a few dozen."""
    highest = Speedup(5.0)
    highest.check(llm.config)
    with pytest.raises(ValueError, match="out of reach"):
        Pruning.for_speedup(5.0, llm, SHORTEST)
    session = llm.session(highest)
    for ids in (IDS[:SHORTEST], [1], IDS[SHORTEST:600], [1], [*IDS, *IDS][: SHAPE_LENGTH - 601]):
        session.forward(ids, generated=len(ids) == 1)
        assert (session.last_pass[:, 0] == session.length).all()
    session.forward([7])
    assert session.last_pass[-1, 0] < 700


def test_a_follow_up_keeps_the_schedule(llm: LLM) -> None:
    session = llm.session(2.0)
    assert session.pruning == Speedup(2.0)
    first = session.ask(IDS[:900], max_new_tokens=2)
    assert session.ask(IDS[900:], max_new_tokens=2).pruning == first.pruning == session.pruning
    assert session.fork().ask(IDS[:50], max_new_tokens=2).pruning == first.pruning
    session.truncate(0)
    assert session.ask(IDS[:300], max_new_tokens=2).pruning != first.pruning


def test_what_was_read_counts_as_part_of_the_prompt(llm: LLM) -> None:
    whole = llm.generate(IDS, 2.0, max_new_tokens=4)
    session = llm.session(2.0)
    session.read(IDS[:800])
    fork = session.fork()
    answer = fork.ask(IDS[800:], max_new_tokens=4)
    assert (answer.pruning, answer.token_ids) == (whole.pruning, whole.token_ids)
    assert session.pruning == Speedup(2.0)
    shorter = session.ask(IDS[800:1000], max_new_tokens=4)
    assert shorter.pruning == llm.generate(IDS[:1000], 2.0, max_new_tokens=1).pruning


def test_a_prefix_cache_serves_prompts_of_different_lengths(llm: LLM) -> None:
    cache = PrefixCache()
    for n in (1200, 1000):
        shared, alone = (llm.generate(IDS[:n], 2.0, max_new_tokens=4, prefix=prefix) for prefix in (cache, None))
        assert (shared.pruning, shared.token_ids) == (alone.pruning, alone.token_ids)


def test_a_saved_session_goes_on(llm: LLM, tmp_path: Any) -> None:
    session = llm.session(2.0)
    session.read(IDS[:800])
    session.save(tmp_path / "read")
    want = session.ask(IDS[800:], max_new_tokens=3)
    session.save(tmp_path / "asked")
    restored = llm.restore(tmp_path / "read")
    assert restored.pruning == Speedup(2.0)
    assert restored.ask(IDS[800:], max_new_tokens=3).token_ids == want.token_ids
    assert llm.restore(tmp_path / "asked").pruning == want.pruning


def test_a_pass_that_fails_leaves_the_setting_open(llm: LLM) -> None:
    session = llm.session(2.0)
    with pytest.raises(ValueError, match="the model's context is 3000"):
        session.ask(IDS * 3)
    want = llm.generate(IDS[:300], 2.0, max_new_tokens=1).pruning
    assert session.ask(IDS[:300], max_new_tokens=1).pruning == want


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (
            0.5,
            ValueError,
            r"above 1, such as 2.0, not 0.5; without a setting all is dense, and a share of tokens to keep",
        ),
        (1.0, ValueError, "must be above 1, such as 2.0, not 1; without a setting all is dense"),
        (True, TypeError, "a speedup must be a number, not True"),
        (50.0, ValueError, r"speedup of 50 is out of reach: .* give at most \d+\.\d\d at 2048 prompt tokens"),
        ("2y", ValueError, "pruning is '2y'; it must be a speedup such as 2x"),
    ],
)
def test_numbers_refused(llm: LLM, number: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        llm.session(number)


def test_the_core_takes_settings_with_the_same_caches_only(llm: LLM) -> None:
    first = Pruning({2: 0.5, 4: 0.3})
    core = llm.session(first).core
    for other in (
        Pruning({2: 0.5}),
        Pruning({2: 0.5, 5: 0.3}),
        Pruning({2: lazyllm.Drop(0.5), 4: 0.3}),
        Pruning({2: 0.5, 4: 0.3}, decode={1: 0.5}),
        Pruning({2: 0.5, 4: 0.3}, scoring=Scoring(memory=0.5)),
        Pruning({2: 0.5, 4: 0.3}, scoring=Scoring(layers=2)),
        Pruning({2: 0.5, 4: 0.3}, scoring=Scoring(queries=8193)),
        Pruning(),
    ):
        with pytest.raises(ValueError, match="the session's caches are for stages after other layers"):
            core.reschedule(other.core())
    core.reschedule(Pruning({2: 0.9, 4: 0.2}, scoring=Scoring(queries=8), sink=2, min_tokens=9).core())


def test_each_item_of_a_run_has_its_own_schedule(llm: LLM, tmp_path: Path) -> None:
    run = lazyllm.longbench.run_niah(
        llm, [None, 2.0], out=tmp_path / "run", lengths=[500, 900], depths=[50], warm_ups=0, progress=False
    )
    dense, pruned = ([row for row in run.rows if row["setting"] == label] for label in ("dense", "2x"))
    for row, whole in zip(pruned, dense, strict=True):
        assert row["pruning"] == str(Speedup(2.0).for_prompt(llm.config, row["prompt_tokens"]))
        assert whole["flops"] / row["flops"] == pytest.approx(2.0, rel=0.02)
    assert len({row["pruning"] for row in pruned}) == 2


@pytest.mark.parametrize("arguments", [["--speedup", "2"], ["--pruning", "2x"]])
def test_the_command_takes_the_number(arguments: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["generate", "--model", str(folder), "--threads", "1", "--max-new-tokens", "1"]
    assert cli.main([*call, "--prompt", "The sea was calm. " * 30, *arguments]) == 0
    assert "} recommended" in capsys.readouterr().err
