"""Searches: what is proposed, what is never run, early stops, resumption, processes that share one study."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from folders import SHAPE, model_folder

import lazyllm
from lazyllm import Pruning
from lazyllm.commands import main as cli
from lazyllm.evaluation.divergence import DenseAnswer, forced_logits, greedy_answer, kl_divergence
from lazyllm.llm import LLM
from lazyllm.methods.preset import Preset
from lazyllm.scoring import Scoring
from lazyllm.searching import search as module
from lazyllm.searching.search import (
    EVERY,
    FACTS,
    FINISHED,
    JOURNAL,
    KL,
    SETTING,
    STOPPED,
    Search,
    created,
    divergence,
    is_worse,
    prompts_of,
    trials,
)
from lazyllm.searching.space import Space

LOW, HIGH = 1.3, 2.0
N_PROMPTS, LENGTH, BUDGET = 7, 60, 8


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here loses power, and one test looks at the picture."""
    monkeypatch.setattr(os, "fsync", lambda number: None)
    monkeypatch.setattr(Search, "plot", lambda self: None)


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    letters = np.random.default_rng(0).integers(97, 123, (N_PROMPTS, LENGTH))
    return ["".join(map(chr, row)) for row in letters]


@pytest.fixture
def search(llm: LLM, prompts: list[str]) -> Callable[..., Search]:
    defaults = {"llm": llm, "prompts": prompts, "speedup": (LOW, HIGH), "budget": BUDGET, "progress": False}
    return lambda **options: lazyllm.search(**{**defaults, **options})


@pytest.fixture(scope="module")
def finished(llm: LLM, prompts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Search:
    """A search that nothing disturbed."""
    out = tmp_path_factory.mktemp("search")
    return lazyllm.search(llm, prompts, (LOW, HIGH), BUDGET, out=out, progress=False)


def outcome(found: Search) -> list[tuple[Any, ...]]:
    """The setting, the divergences and the state of each trial that has ended."""
    ended = trials(found.study, FINISHED, STOPPED)
    return [(trial.user_attrs[SETTING], trial.user_attrs[KL], trial.state) for trial in ended]


def settings(found: Search) -> set[str]:
    return {setting for setting, _, _ in outcome(found)}


def starts_of(found: Search) -> set[str]:
    """The first settings of a search that nothing disturbed: those of numbers."""
    return {setting for setting, _, _ in outcome(found)[:5]}


# ---- the space -------------------------------------------------------------------------------------


@pytest.fixture(params=[(0,), (24, 24, 0)], ids=["full", "windows"])
def space(request: pytest.FixtureRequest, llm: LLM) -> Space:
    windows = tuple(request.param[layer % len(request.param)] for layer in range(30))
    return Space(replace(llm.config, n_layers=30, windows=windows, expert_layers=(0,) * 30), 1000, 1.5, 3.0)


def random_study(seed: int = 0) -> Any:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(
        directions=["minimize", "maximize"], sampler=optuna.samplers.RandomSampler(seed=seed)
    )


def test_proposals_are_valid_by_construction(space: Space) -> None:
    study = random_study()
    proposals = [(space.proposed(trial), trial.params) for trial in (study.ask() for _ in range(60))]
    valid = [(pruning, point) for pruning, point in proposals if pruning]
    assert len(valid) > 50
    assert len({pruning for pruning, _ in valid}) == len(valid)
    assert {len(pruning.stages) for pruning, _ in valid} == {1, 2, 3}
    for pruning, point in valid:
        level = space.levels[point["speedup level"]]
        assert level <= space.speedup(pruning) <= 1.01 * level
        assert all(not space.config.windows[layer] and layer < 29 for layer, _ in pruning.stages)
        assert all(keep <= 1 for _, keep in pruning.stages)
        assert len(pruning.stages) <= point["stages"]
    for option, values in {"memory": {0.0, 0.95}, "layers": {1, 3, 5, 8}, "queries": {1, 16, 32}}.items():
        assert {getattr(pruning.scoring, option) for pruning, _ in valid} == values


def test_a_proposal_outside_of_the_range_is_none(space: Space) -> None:
    """A dozen tokens can be cut in coarse steps only, which miss a narrow range."""
    narrow, study = replace(space, n_prompt=12, low=1.5, high=1.52), random_study(2)
    speedups = [narrow.speedup(setting) for _ in range(60) if (setting := narrow.proposed(study.ask()))]
    assert 0 < len(speedups) < 60
    assert all(1.5 <= speedup <= 1.01 * 1.52 for speedup in speedups)


def test_the_parameters_of_a_setting_give_the_setting_back(space: Space) -> None:
    """The sampler learns by them from the starts, whose smoothing is none of its steps."""
    study, starts = random_study(1), space.starts()
    assert [space.speedup(start) for start in starts] == pytest.approx(space.levels, rel=0.01)
    assert all(start.scoring.queries == Scoring.recommended().queries for start in starts)
    for setting in [*starts, *filter(None, (space.proposed(study.ask()) for _ in range(30)))]:
        study.enqueue_trial(space.parameters(setting))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # Optuna warns of a parameter out of its range
            again = space.proposed(study.ask())
        assert again is not None
        assert [layer for layer, _ in again.stages] == [layer for layer, _ in setting.stages]
        keeps = [[keep for _, keep in pruning.stages] for pruning in (setting, again)]
        assert np.allclose(*keeps, atol=0.01)
        assert abs(again.scoring.smooth - setting.scoring.smooth) <= 4
        scoring = replace(again.scoring, smooth=setting.scoring.smooth)
        assert replace(again, stages=(), scoring=scoring) == replace(setting, stages=())


def test_bad_input_is_refused_before_work(search: Callable[..., Search], tmp_path: Path) -> None:
    for options, words in (
        ({"speedup": (2.0, 1.5)}, r"speedup must rise from above 1, .*, not \(2, 1\.5\)"),
        ({"speedup": (1.0, 1.5)}, r"speedup must rise from above 1"),
        ({"speedup": 2.0}, r"speedup must be a range such as \(1.5, 3.0\), not 2.0"),
        ({"speedup": (1.5, 90)}, "a speedup of 90 is out of reach"),
        ({"budget": 0}, "budget must be from 1"),
        ({"prompts": ["One", "Two"]}, "prompts must be at least 3, not 2"),
        ({"prompts": "One"}, "prompts must be a list of prompts, not one text"),
        ({"prompts": ["One", "Two", ""]}, "prompt 3: the prompt is empty"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            search(out=tmp_path / "out", **options)
        assert not (tmp_path / "out").exists()


def test_without_optuna_the_error_names_the_extra(
    search: Callable[..., Search], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match=r"optuna: pip install 'lazyllm-engine\[search\]'"):
        search()


# ---- trials ----------------------------------------------------------------------------------------


def test_the_divergence_by_hand(llm: LLM) -> None:
    ids, pruning = list(range(5, 90)), Pruning({1: 0.3, 3: 0.2})
    answer, logits = greedy_answer(llm.session(), ids, 6, llm.eos_token_ids)
    pruned = np.array(list(forced_logits(llm.session(pruning), ids, answer)))
    reference = DenseAnswer(answer, logits)
    assert divergence(llm, pruning, ids, reference) == pytest.approx(kl_divergence(logits, pruned).mean())
    assert divergence(llm, Pruning(), ids, reference) == 0


def test_generated_prompts_are_of_all_kinds_in_turn(tmp_path: Path) -> None:
    long = lazyllm.load(model_folder(tmp_path, replace(SHAPE, context=1100)), device="cpu", threads=1)
    generated = prompts_of(long, None)
    assert len(generated) == len({tuple(ids) for ids in generated}) == 12
    assert [len(ids) > 930 for ids in generated] == [False, False, False, True, True, True] * 2


class Counted:
    """A divergence that counts what it ran, and may fail after a number of runs."""

    def __init__(self, most: int = 10**6, kl: Callable[[Pruning, int], float] | None = None) -> None:
        self.ran: list[Pruning] = []
        self._most, self._kl = most, kl

    def __call__(self, llm: LLM, pruning: Pruning, ids: Sequence[int], reference: DenseAnswer) -> float:
        if len(self.ran) == self._most:
            raise KeyboardInterrupt
        self.ran.append(pruning)
        if self._kl is None:
            return divergence(llm, pruning, ids, reference)
        return self._kl(pruning, self.ran.count(pruning) - 1)


def test_invalid_settings_and_duplicates_never_run(
    search: Callable[..., Search], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Pruning({1: 0.5}), Pruning({1: 0.4})
    proposals = iter([None, first, None, first, second, None, *[second, first] * 100])
    monkeypatch.setattr(Space, "starts", lambda self: [])
    monkeypatch.setattr(Space, "proposed", lambda self, trial: next(proposals))
    monkeypatch.setattr(module, "ATTEMPTS", 10)
    monkeypatch.setattr(module, "divergence", counted := Counted(kl=lambda pruning, number: 0.1))
    with pytest.warns(UserWarning, match="no new setting was found in 10 attempts"):
        found = search(out=tmp_path, budget=3)
    assert [point.pruning for point in found] == [first, second]
    assert Counter(counted.ran) == {first: N_PROMPTS, second: N_PROMPTS}


@pytest.mark.parametrize(
    ("factors", "worse"),
    [
        ((1.1, 1.12, 1.11), True),  # small beside the spread of the prompts, but on all of them
        ((1.1, 1.3, 0.8), False),  # in the mean, but not beyond its error
        ((0.5, 0.5, 0.5), False),
        ((1.0, 1.0, 1.0), False),
        ((2.0, 0.7, 2.0, 2.0, 2.0, 2.0), False),  # typically worse, but not in the mean
        ((2.0, 0.99, 2.0, 2.0, 2.0, 2.0), True),
    ],
)
def test_worse_is_a_paired_difference_beyond_its_error(factors: tuple[float, ...], worse: bool) -> None:
    easy_and_hard = [0.01, 1.0, 0.2, 0.02, 0.02, 0.02]
    kl = [factor * other for factor, other in zip(factors, easy_and_hard, strict=False)]
    assert is_worse(kl, [[*easy_and_hard, 0.01, 0.01], [9.0] * 8]) == worse
    assert not is_worse(kl, [])


def test_a_setting_that_is_worse_stops_early(
    search: Callable[..., Search], monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad, late, faster = settings = [Pruning({1: keep}) for keep in (0.4, 0.41, 0.42, 0.3)]
    monkeypatch.setattr(Space, "starts", lambda self: settings)
    losses = {
        good: lambda number: 0.1 + 0.01 * number,
        bad: lambda number: 0.5 + 0.02 * number,
        late: lambda number: 0.1 + 0.01 * number + (0.02, -0.02, 0.02, 0.5, 0.51, 0.59)[number],
        faster: lambda number: 9.0,
    }
    monkeypatch.setattr(module, "divergence", counted := Counted(kl=lambda one, number: losses[one](number)))
    found = search(budget=4)
    assert Counter(counted.ran) == {good: N_PROMPTS, bad: EVERY, late: 2 * EVERY, faster: N_PROMPTS}
    assert [len(kl) for _, kl, _ in outcome(found)] == [N_PROMPTS, EVERY, 2 * EVERY, N_PROMPTS]
    assert [point.pruning for point in found] == [point.pruning for point in found.pareto()] == [good, faster]
    assert "2 settings on 7 prompts, 2 more stopped early" in found.text()


# ---- resumption ------------------------------------------------------------------------------------


def test_the_same_search_tries_the_same_settings(search: Callable[..., Search], finished: Search) -> None:
    assert outcome(search()) == outcome(finished)


@pytest.mark.parametrize("after", [0, 3, 6 * N_PROMPTS])
def test_an_interrupted_search_goes_on(
    search: Callable[..., Search],
    finished: Search,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    after: int,
) -> None:
    """No result is lost or counted twice; what was interrupted runs anew, a start of the search included."""
    monkeypatch.setattr(module, "divergence", Counted(most=after))
    with pytest.raises(KeyboardInterrupt):
        search(out=tmp_path)
    kept = outcome(Search.read(tmp_path))
    assert len(kept) >= after // N_PROMPTS
    monkeypatch.setattr(module, "divergence", counted := Counted())
    found = search(out=tmp_path)
    assert len(outcome(found)) == len(settings(found)) == BUDGET
    assert outcome(found)[: len(kept)] == kept
    assert len(counted.ran) == sum(len(kl) for _, kl, _ in outcome(found)[len(kept) :])
    assert starts_of(finished) <= settings(found)
    before = outcome(found)
    assert outcome(search(out=tmp_path, budget=BUDGET + 1))[:-1] == before


@pytest.mark.parametrize("share", [0.3, 0.8])
def test_a_search_that_was_killed_goes_on(
    search: Callable[..., Search], finished: Search, tmp_path: Path, share: float
) -> None:
    """All that a killed process leaves is the beginning of the journal, its last line perhaps in part, and
    the journal's lock."""
    assert finished.folder is not None
    journal = (finished.folder / JOURNAL).read_bytes()
    (tmp_path / JOURNAL).write_bytes(journal[: int(share * len(journal))])
    (tmp_path / f"{JOURNAL}.lock").touch()
    kept = outcome(Search.read(tmp_path))
    assert kept == outcome(finished)[: len(kept)]
    found = search(out=tmp_path)
    assert outcome(found)[: len(kept)] == kept
    assert len(outcome(found)) == len(settings(found)) == BUDGET
    assert starts_of(finished) <= settings(found)


def test_a_search_under_other_conditions_is_refused_by_name(
    search: Callable[..., Search], folder: Path, prompts: list[str], tmp_path: Path
) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    other.mkdir()
    search(out=out, budget=1)
    other_model = lazyllm.load(model_folder(other, replace(SHAPE, seed=9)), device="cpu", threads=1)
    other_keys = lazyllm.load(folder, device="cpu", threads=1, kv="bf16")
    for options, words in (
        ({"llm": other_model}, r"holds a search under other conditions: model sha256 is \S+, not \S+\. Give"),
        ({"llm": other_keys}, r'kernels is "\w+", not "\w+, K and V in bf16"'),
        ({"prompts": [*prompts[1:], "another"]}, r'prompts sha256 is "\w+", not "\w+"\. Give'),
        ({"speedup": (LOW, 1.9)}, r"speedup is \[1\.3, 2\.0\], not \[1\.3, 1\.9\]"),
    ):
        with pytest.raises(ValueError, match=words):
            search(out=out, budget=2, **options)
    assert len(Search.read(out)) == 1


# ---- processes -------------------------------------------------------------------------------------


def test_two_processes_share_one_study(folder: Path, prompts: list[str], tmp_path: Path) -> None:
    """Forked, since importing takes longer than the search."""

    def work() -> None:
        llm = lazyllm.load(folder, device="cpu", threads=1)
        lazyllm.search(llm, prompts, (LOW, HIGH), 10, out=tmp_path, progress=False)

    both = [multiprocessing.get_context("fork").Process(target=work) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
        assert process.exitcode == 0
    found = Search.read(tmp_path)
    assert 9 <= len(outcome(found)) == len(settings(found)) <= 11
    assert all(point.prompts == N_PROMPTS for point in found)


def test_what_a_living_process_runs_is_left_to_it(
    search: Callable[..., Search], llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process, here a call within a trial, neither runs its setting nor takes it for left over."""
    within: list[set[str]] = []

    def beside(*arguments: Any) -> float:
        monkeypatch.setattr(module, "divergence", divergence)
        within.append(settings(search(out=tmp_path, budget=4)))
        return divergence(*arguments)

    monkeypatch.setattr(module, "divergence", beside)
    found = search(out=tmp_path, budget=4)
    assert len(within[0]) == 3
    assert len(outcome(found)) == len(settings(found)) == 4
    assert within[0] < settings(found)


# ---- results ---------------------------------------------------------------------------------------


@pytest.fixture
def planted() -> Search:
    """Settings by speedup and divergence; the last one was stopped."""
    study = created(None)
    conditions = {"model sha256": "0", "lazyllm": "1", "packages": {}}
    study.set_user_attr(FACTS, {"model": "tiny", "prompts": 3, "prompt tokens": 60, "conditions": conditions})
    loss = {1.5: 0.1, 1.6: 0.3, 1.8: 0.2, 2.0: 0.25, 2.1: 0.25, 2.4: 0.9, 2.5: 0.8, 3.0: 0.0}
    for number, (speedup, kl) in enumerate(loss.items()):
        trial = study.ask()
        trial.set_user_attr(SETTING, Pruning({1: 0.5}, sink=number).to_json())
        trial.set_user_attr(KL, [kl - 0.05, kl, kl + 0.05])
        study.tell(
            trial,
            **({"state": optuna.trial.TrialState.PRUNED} if speedup == 3 else {"values": [kl, speedup]}),
        )
    return Search(study, None)


def test_front_best_and_frame_by_hand(planted: Search) -> None:
    assert [point.counted_speedup for point in planted.pareto()] == [1.5, 1.8, 2.1, 2.5]
    for wished, speedup in ((1.0, 1.5), (1.8, 1.8), (1.803, 1.8), (1.81, 2.1), (2.5, 2.5)):
        assert planted.best(speedup=wished).counted_speedup == speedup
    with pytest.raises(ValueError, match=r"no setting has a speedup of 2\.6; the fastest has 2\.50"):
        planted.best(speedup=2.6)
    frame = planted.to_frame()
    assert frame.counted_speedup.tolist() == [1.5, 1.6, 1.8, 2.0, 2.1, 2.4, 2.5]
    assert frame.kl[0] == pytest.approx(0.1)
    assert frame.kl_low[0] == 0.0  # a divergence is never below
    assert not {"score", "ttft", "ttft_speedup"} & set(frame.columns)
    planted._points = ()
    with pytest.raises(ValueError, match="no finished trial"):
        planted.best(speedup=2)


def test_a_search_opens_again(finished: Search) -> None:
    assert finished.folder is not None
    again = Search.read(finished.folder)
    assert (outcome(again), again.facts) == (outcome(finished), finished.facts)
    assert repr(again) == finished.text()
    assert "<table>" in again._repr_html_()
    with pytest.raises(FileNotFoundError, match="holds no search"):
        Search.read(finished.folder / "elsewhere")


def test_the_picture_shows_finished_settings_and_dense(
    planted: Search, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    drawn: list[Any] = []
    monkeypatch.setattr("lazyllm.sweeps.points.plot_pareto", lambda *given, **more: drawn.extend(given))
    planted.plot(tmp_path / "search.png")
    assert [(dot.speedup, round(dot.value, 6)) for dot in drawn[0][:2]] == [(1.0, 0.0), (1.5, 0.1)]
    assert [dot.speedup for dot in drawn[0]] == [1.0, 1.5, 1.6, 1.8, 2.0, 2.1, 2.4, 2.5]
    assert [dot.speedup for dot in drawn[1]] == [1.0, 1.5, 1.8, 2.1, 2.5]
    assert drawn[5] == tmp_path / "search.png"


def test_the_preset_is_a_setting_with_evidence(finished: Search, llm: LLM, tmp_path: Path) -> None:
    preset = finished.preset(speedup=1.5)
    assert preset.pruning == finished.best(speedup=1.5).pruning
    speedup = preset.pruning.speedup(llm.config, finished.facts["prompt tokens"])
    assert preset.speedup == round(speedup, 2)
    again = Preset.load(preset.save(tmp_path / "preset.json"))
    assert again == preset
    assert preset.mismatch(llm.checkpoint, progress=False) is None
    assert preset.table.heads == ["setting", "counted speedup", "KL from dense"]
    assert len(preset.table.rows) == len(finished.pareto())
    assert [row[0] for row in preset.table.rows if row[0].startswith("*")] == [f"* {preset.label}"]


def test_the_command(
    folder: Path,
    prompts: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LAZYLLM_PROGRESS", "0")
    files = []
    for number, text in enumerate(prompts):
        (tmp_path / f"{number}.txt").write_text(text)
        files += ["--prompt-file", str(tmp_path / f"{number}.txt")]
    call = ["search", "--model", str(folder), "--out", str(tmp_path / "out"), "--device", "cpu", *files]
    options = ["--speedup", "1.3,2", "--budget", "3", "--preset", "1.4"]
    assert cli.main([*call, *options]) == 0
    printed = capsys.readouterr().out
    assert "Settings: quality" in printed
    assert f"wrote {tmp_path / 'out'}\nwrote {tmp_path / 'out' / 'preset.json'}\n" in printed
    found = Search.read(tmp_path / "out")
    assert Preset.load(tmp_path / "out" / "preset.json") == found.preset(speedup=1.4)
    assert json.loads((tmp_path / "out" / "preset.json").read_text())["evidence"]["prompts"]["search"] == 7
    assert cli.main([*call, "--speedup", "1.3,2", "--budget", "3", "--preset", "2.5"]) == 2
    assert "no setting has a speedup of 2.5; the fastest has" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main([*call, "--speedup", "fast"])
    assert "argument --speedup: invalid speedups value: 'fast'" in capsys.readouterr().err
