"""Searches: what is proposed, what is never run, early stops, resumption, processes that share one study."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import SHAPE, model_folder

import lazyllm
from lazyllm.calibration.curves import lost_by_stage, seeing_layers
from lazyllm.calibration.schedule import Losses, schedules
from lazyllm.commands import main as cli
from lazyllm.evaluation.divergence import kl_divergence
from lazyllm.evaluation.teacher_forcing import forced_logits, greedy_answer
from lazyllm.llm import LLM
from lazyllm.methods import Preset
from lazyllm.pruning import Mass, Pruning
from lazyllm.searching import search as module
from lazyllm.searching import study as study_module
from lazyllm.searching.early_stop import EVERY, is_worse, rival_of
from lazyllm.searching.prompts import Reference, References, Result, measured, prompts_of
from lazyllm.searching.search import Search
from lazyllm.searching.space import Space
from lazyllm.searching.starts import DENSE_SHARES, FOR_CURVES, calibrated
from lazyllm.searching.study import JOURNAL, Record, Study, opened
from lazyllm.support.json_text import json_digest

LOW, HIGH = 1.3, 2.0
N_PROMPTS, LENGTH, BUDGET = 7, 60, 11


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here loses power, and one test looks at the picture."""
    monkeypatch.setattr(os, "fsync", lambda number: None)
    monkeypatch.setattr(Search, "plot", lambda self: None)


@pytest.fixture
def no_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is given as `start` comes before proposals."""
    monkeypatch.setattr(Space, "starts", lambda self: [])
    monkeypatch.setattr(module, "calibrated", lambda *_: [])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return lazyllm.load(model, device="cpu", threads=1)


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    letters = np.random.default_rng(0).integers(97, 123, (N_PROMPTS, LENGTH))
    return ["".join(map(chr, row)) for row in letters]


@pytest.fixture
def search(llm: LLM, prompts: list[str]) -> Callable[..., Search]:
    return lambda **options: lazyllm.search(
        **{
            "llm": llm,
            "prompts": prompts,
            "speedup": (LOW, HIGH),
            "budget": BUDGET,
            "progress": False,
            **options,
        }
    )


@pytest.fixture(scope="module")
def made(llm: LLM, prompts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Search:
    """A search that nothing disturbed."""
    out = tmp_path_factory.mktemp("search")
    return lazyllm.search(llm, prompts, (LOW, HIGH), BUDGET, out=out, progress=False)


def outcome(found: Search) -> list[tuple[Any, ...]]:
    return [(one.pruning, one.results, one.done, one.stopped) for one in found]


def trials_of(folder: Path) -> list[Any]:
    return list(opened(folder).trials)


# ---- the space -------------------------------------------------------------------------------------


@pytest.fixture(params=[(0,), (24, 24, 0)], ids=["full", "windows"])
def space(request: pytest.FixtureRequest, llm: LLM) -> Space:
    windows = tuple(request.param[layer % len(request.param)] for layer in range(30))
    return Space(replace(llm.config, n_layers=30, windows=windows), 1000, 1.5, 3.0)


def random_study(seed: int = 0) -> Any:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(
        directions=["minimize", "maximize"], sampler=optuna.samplers.RandomSampler(seed=seed)
    )


def test_proposals_are_valid_by_construction(space: Space) -> None:
    study = random_study()
    several = [space.proposed(study.ask()) for _ in range(100)]
    proposed = [one for one in several if one]
    assert len(proposed) > 95
    assert len({*proposed}) > 90
    assert Counter(len(one.stages) for one in proposed).keys() == {1, 2, 3}
    for one, trial in ((one, trial) for one, trial in zip(several, study.trials, strict=True) if one):
        speedup = one.speedup(space.config, space.n_prompt)
        assert space.levels[trial.params["speedup level"]] <= speedup
        assert speedup == pytest.approx(space.levels[trial.params["speedup level"]], rel=0.01)
        assert {layer for layer, _ in one.stages} <= {*seeing_layers(space.config)}
        assert all(keep < 1 for _, keep in one.stages)
        assert len(one.stages) <= trial.params["stages"]
    assert {one.memory for one in proposed} == {0.0, 0.95}
    assert {one.layers for one in proposed} == {1, 3, 5, 8}


def test_a_proposal_outside_of_the_range_is_none(space: Space) -> None:
    """A dozen tokens can be cut in coarse steps only, which miss a narrow range."""
    narrow, study = replace(space, n_prompt=12, low=1.5, high=1.52), random_study(2)
    several = [narrow.proposed(study.ask()) for _ in range(60)]
    inside = [one.speedup(narrow.config, 12) for one in several if one]
    assert 0 < len(inside) < 60
    assert all(1.5 <= one <= 1.01 * 1.52 for one in inside)


def test_the_parameters_of_a_setting_give_the_setting_back(space: Space) -> None:
    """Starting points are mapped as near as steps allow, so that the sampler learns from them."""
    study = random_study(1)
    starts = [*space.starts(), *filter(None, (space.proposed(study.ask()) for _ in range(30)))]
    assert len(starts) > 30
    for one in starts:
        study.enqueue_trial(space.parameters(one))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # Optuna warns of a parameter out of its range
            again = space.proposed(study.ask())
        assert again is not None
        layers = [[layer for layer, _ in each.stages] for each in (one, again)]
        assert np.allclose(*layers, atol=1)
        keeps = [[keep for _, keep in each.stages] for each in (one, again)]
        assert np.allclose(*keeps, atol=0.06)
        assert abs(again.smooth - one.smooth) <= 4
        assert replace(again, stages=(), smooth=one.smooth) == replace(one, stages=())


def test_the_first_settings_are_those_of_for_speedup(space: Space) -> None:
    starts = space.starts()
    speedups = [1.5, 1.875, 2.25, 2.625, 3.0]
    assert [space.speedup(one) for one in starts] == pytest.approx(speedups, rel=0.01)
    assert all(one == one.recommended(space.n_prompt) for one in starts)


def test_a_neighbour_differs_in_its_speedup_one_option_or_one_place(space: Space) -> None:
    random = np.random.default_rng(0)
    for start in space.starts():
        mine = space.parameters(start)
        for _ in range(40):
            other = space.neighbour(start, random)
            changed = [name for name in mine if other[name] != mine[name]]
            assert len(changed) == 1
            assert changed[0] != "stages"
            assert 0 <= other["speedup level"] < 5
            assert abs(other["speedup level"] - mine["speedup level"]) <= 1
    several = [space.neighbour(start, random) for _ in range(200)]
    assert {name for one in several for name in mine if one[name] != mine[name]} == set(mine) - {"stages"}


def test_every_second_proposal_is_a_neighbour_of_the_front(
    search: Callable[..., Search], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, Pruning]] = []
    original = Space.neighbour

    def neighbour(self: Space, pruning: Pruning, random: np.random.Generator) -> dict[str, Any]:
        found = Search.read(tmp_path)
        asked.append((len(found), pruning))
        assert pruning in [one.pruning for one in found.pareto()]
        return original(self, pruning, random)

    monkeypatch.setattr(Space, "neighbour", neighbour)
    search(out=tmp_path, budget=BUDGET + 3)
    n_starts = len(json.loads((tmp_path / "calibrated.json").read_text())) + 5
    assert n_starts < BUDGET
    assert [count for count, _ in asked] == [n for n in range(n_starts, BUDGET + 3) if n % 2]


def test_the_next_settings_are_calibrated_on_the_first_prompts(
    llm: LLM, prompts: list[str], made: Search, tmp_path: Path
) -> None:
    several = prompts_of(llm, prompts, 16)
    space = Space(llm.config, int(np.median([len(ids) for ids in several])), LOW, HIGH)
    losses = Losses.of_prompts([lost_by_stage(llm, ids) for ids in several[:FOR_CURVES]], llm.config)
    expected = {
        one
        for speedup in space.levels
        for one in schedules(losses, llm.config, space.n_prompt, speedup, DENSE_SHARES)
        if space.holds(one)
    }
    starts = calibrated(llm, several, space, tmp_path / "calibrated.json", False)
    assert set(starts) == expected
    assert calibrated(llm, [], space, tmp_path / "calibrated.json", False) == starts
    new = [one for one in starts if one not in space.starts()]
    n_starts = len(space.starts())
    assert new
    assert [one.pruning for one in made][n_starts : n_starts + len(new)] == new


@pytest.mark.parametrize(
    ("start", "words"),
    [
        ({1: 0.99}, r"start: Pruning\({1: 0.99}\) has a counted speedup of 0\.999 at 80 prompt"),
        ("random:keep=0.5", "start: random:keep=0.5 is no schedule"),
        (None, "start: None is no schedule"),
        ({40: 0.5}, "layer 40 is out of reach"),
        ("nowhere.json", "nowhere.json"),
    ],
)
def test_starting_points_are_checked_by_name(
    search: Callable[..., Search], tmp_path: Path, start: Any, words: str
) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        search(start=[start], out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_starting_points_run_first_as_they_are(search: Callable[..., Search], made: Search) -> None:
    preset = made.preset(speedup=1.5)
    own = Pruning({1: 0.5, 2: Mass(0.9, keep_max=0.4)}, smooth=7)  # outside of the space in every way
    found = search(start=[own, preset, own], budget=3)
    assert [one.pruning for one in found] == [own, preset.pruning, search(budget=1)[0].pruning]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"speedup": (2.0, 1.5)}, r"speedup must rise from above 1, .*, not \(2, 1\.5\)"),
        ({"speedup": (1.0, 1.5)}, r"speedup must rise from above 1"),
        ({"speedup": 2.0}, "speedup must be the least and the greatest wished"),
        ({"speedup": (1.5, 90)}, "a speedup of 90 is out of reach"),
        ({"budget": 0}, "budget must be from 1"),
        ({"seed": -1}, "seed must be from 0"),
        ({"prompts": ["One", "Two"]}, "prompts must be at least 3, not 2"),
        ({"prompts": "One"}, "prompts must be a list of prompts, not one text"),
        ({"prompts": ["One", "Two", ""]}, "prompt 3: the prompt is empty"),
    ],
)
def test_bad_input_is_refused_before_work(
    search: Callable[..., Search], tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        search(out=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_without_optuna_the_error_names_the_extra(
    search: Callable[..., Search], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match=r"a search needs optuna: pip install 'lazyllm-engine\[search\]'"):
        search()


# ---- prompts ---------------------------------------------------------------------------------------


def test_divergence_and_same_answer_by_hand(llm: LLM, tmp_path: Path) -> None:
    ids, pruning = list(range(5, 90)), Pruning({1: 0.3, 3: 0.2})
    reference = References(llm, [ids], 6, tmp_path / "dense", False)[0]
    answer, logits = greedy_answer(llm.session(), ids, 6, llm.eos_token_ids)
    assert reference.answer == answer
    assert (reference.logits == logits).all()
    pruned = np.array(list(forced_logits(llm, ids, answer, pruning)))
    result = measured(llm, pruning, reference)
    assert result.kl == pytest.approx(kl_divergence(logits, pruned).mean())
    assert result.same == (pruned.argmax(axis=1) == answer).all()
    assert measured(llm, Pruning(), reference) == Result(0.0, True)
    other = [*answer[:-1], int(logits[-1].argsort()[-2])]
    assert not measured(llm, Pruning(), Reference(ids, other, logits)).same


def test_dense_runs_once(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    References(llm, [[1, 2, 3], [4, 5]], 2, tmp_path / "dense", False)
    monkeypatch.setattr("lazyllm.searching.prompts.greedy_answer", None)
    again = References(llm, [[1, 2, 3], [4, 5]], 2, tmp_path / "dense", False)
    assert [again[number].prompt for number in range(len(again))] == [[1, 2, 3], [4, 5]]
    assert not [*tmp_path.rglob("*.partial")]


def test_generated_prompts_are_of_all_kinds_in_turn(tmp_path: Path) -> None:
    long = lazyllm.load(model_folder(tmp_path, replace(SHAPE, context=1100)), device="cpu", threads=1)
    several = prompts_of(long, None, 16)
    assert len(several) == len({json_digest([ids]) for ids in several}) == 12
    assert [len(ids) > 930 for ids in several] == [False, False, False, True, True, True] * 2


# ---- what is never run -----------------------------------------------------------------------------


class Counted:
    """A measure that counts what it ran, and may fail after a number of runs."""

    def __init__(self, most: int = 10**6, kl: Callable[[Pruning, int], float] | None = None) -> None:
        self.ran: list[tuple[Pruning, tuple[int, ...]]] = []
        self._most, self._kl = most, kl

    def __call__(self, llm: LLM, pruning: Pruning, reference: Reference) -> Result:
        if len(self.ran) == self._most:
            raise KeyboardInterrupt
        self.ran.append((pruning, tuple(reference.prompt)))
        if self._kl is None:
            return measured(llm, pruning, reference)
        return Result(self._kl(pruning, sum(one == pruning for one, _ in self.ran) - 1), False)


@pytest.mark.usefixtures("no_starts")
def test_invalid_settings_and_duplicates_never_run(
    search: Callable[..., Search], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposals = [None, Pruning({1: 0.5}), None, Pruning({1: 0.5}), Pruning({1: 0.4}), None, Pruning({1: 0.4})]
    left = iter([*proposals, *[Pruning({1: 0.5})] * 1000])
    original = Space.proposed

    def proposed(self: Space, trial: Any) -> Pruning | None:
        original(self, trial)
        return next(left)

    monkeypatch.setattr(Space, "proposed", proposed)
    monkeypatch.setattr(study_module, "ATTEMPTS", 10)
    monkeypatch.setattr(module, "measured", counted := Counted())
    with pytest.warns(UserWarning, match="no new setting was found in 10 attempts"):
        made = search(out=tmp_path, budget=3)
    assert len(made) == 2
    assert Counter(one for one, _ in counted.ran) == {Pruning({1: keep}): N_PROMPTS for keep in (0.5, 0.4)}
    assert len(Search.read(tmp_path)) == 2
    refused = [one.user_attrs["refused"] for one in trials_of(tmp_path) if "refused" in one.user_attrs]
    assert refused[:4] == ["outside of the range"] * 2 + ["the same as trial 1", "outside of the range"]


# ---- early stops -----------------------------------------------------------------------------------


def record(number: int, speedup: float, kl: Sequence[float], done: bool = True) -> Record:
    results = tuple(Result(one, one < 0.1) for one in kl)
    return Record(number, Pruning({1: 0.5}, sink=number), speedup, results, done, not done)


def test_the_rival_is_the_best_that_is_as_fast() -> None:
    records = [
        record(0, 1.5, [0.1] * 4),
        record(1, 2.0, [0.2] * 4),
        record(2, 2.2, [0.15] * 4),
        record(3, 2.5, [0.01] * 3, done=False),
    ]
    assert rival_of(1.4, records) is records[0]
    assert rival_of(1.6, records) is records[2]
    assert rival_of(2.2, records) is records[2]
    assert rival_of(2.3, records) is None
    assert rival_of(2.204, records) is records[2]  # 2.20 as well


def test_worse_is_a_paired_difference_beyond_its_error() -> None:
    easy_and_hard = [0.01, 1.0, 0.2, 0.02, 0.02, 0.02]
    rival = record(0, 2.0, [*easy_and_hard, 5.0, 5.0])

    def times(*factors: float) -> list[Result]:
        return [Result(factor * kl, False) for factor, kl in zip(factors, easy_and_hard, strict=False)]

    assert is_worse(
        times(1.1, 1.12, 1.11), rival
    )  # small beside the spread of the prompts, but on all of them
    assert not is_worse(times(1.1, 1.3, 0.8), rival)  # in the mean, but not beyond its error
    assert not is_worse(times(0.5, 0.5, 0.5), rival)
    assert not is_worse(times(1.0, 1.0, 1.0), rival)
    assert not is_worse(times(2.0, 0.7, 2.0, 2.0, 2.0, 2.0), rival)  # typically worse, but not in the mean
    assert is_worse(times(2.0, 0.99, 2.0, 2.0, 2.0, 2.0), rival)


@pytest.mark.usefixtures("no_starts")
def test_a_setting_that_is_worse_stops_early(
    search: Callable[..., Search], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad, late, faster = (Pruning({1: keep}) for keep in (0.4, 0.41, 0.42, 0.3))
    losses = {
        good: lambda number: 0.1 + 0.01 * number,
        bad: lambda number: 0.5 + 0.02 * number,
        late: lambda number: 0.1 + 0.01 * number + (0.02, -0.02, 0.02, 0.5, 0.51, 0.59)[number],
        faster: lambda number: 9.0,
    }
    monkeypatch.setattr(module, "measured", counted := Counted(kl=lambda one, number: losses[one](number)))
    found = search(start=[good, bad, late, faster], budget=4, out=tmp_path)
    runs = Counter(one for one, _ in counted.ran)
    assert runs == {good: N_PROMPTS, bad: EVERY, late: 2 * EVERY, faster: N_PROMPTS}
    assert [one.stopped for one in found] == [False, True, True, False]
    assert [one.pruning for one in found.finished] == [good, faster]
    assert "2 settings on 7 prompts, 2 stopped early" in found.text()
    states = [trial.state.name for trial in trials_of(tmp_path)]
    assert states == ["COMPLETE", "PRUNED", "PRUNED", "COMPLETE"]


# ---- resumption ------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 3, 3 * N_PROMPTS + 2])
def test_an_interrupted_search_ends_like_an_undisturbed_one(
    search: Callable[..., Search], made: Search, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    monkeypatch.setattr(module, "measured", first := Counted(most=after))
    with pytest.raises(KeyboardInterrupt):
        search(out=tmp_path)
    monkeypatch.setattr(module, "measured", then := Counted())
    found = search(out=tmp_path)
    assert outcome(found) == outcome(made)
    assert len(first.ran) == after
    assert len({*first.ran, *then.ran}) == len(first.ran) + len(then.ran)  # nothing ran twice
    assert outcome(search(out=tmp_path)) == outcome(made)
    assert outcome(search(out=tmp_path, budget=BUDGET + 1))[:-1] == outcome(made)


def test_an_incomplete_last_line_is_dropped(search: Callable[..., Search], tmp_path: Path) -> None:
    search(out=tmp_path, budget=2)
    with (tmp_path / JOURNAL).open("a") as file:
        file.write('{"op_code": 8, "wor')
    assert len(search(out=tmp_path, budget=3)) == 3


def test_another_model_other_prompts_and_another_range_are_refused(
    search: Callable[..., Search], prompts: list[str], tmp_path: Path
) -> None:
    search(out=tmp_path / "out", budget=1)
    (tmp_path / "other").mkdir()
    other = lazyllm.load(model_folder(tmp_path / "other", replace(SHAPE, seed=9)), device="cpu", threads=1)
    for options, words in (
        (
            {"llm": other},
            r"holds a search under other conditions: model was \S+ and is now other; model sha256",
        ),
        (
            {"prompts": [*prompts[1:], "another"]},
            r"other conditions: prompts sha256 was \w+ and is now \w+\. Give",
        ),
        ({"speedup": (LOW, 1.9)}, r"speedup was \[1\.3, 2\.0\] and is now \[1\.3, 1\.9\]"),
        ({"seed": 1}, "seed was 0 and is now 1"),
    ):
        with pytest.raises(ValueError, match=words):
            search(out=tmp_path / "out", **options)
    assert len(Search.read(tmp_path / "out")) == 1


# ---- processes -------------------------------------------------------------------------------------


@pytest.fixture
def begin(model: Path, prompts: list[str]) -> Callable[[Path, int], Any]:
    """Starts a process that searches in a folder; forked, since importing takes longer than the search."""

    def work(out: Path, budget: int) -> None:
        llm = lazyllm.load(model, device="cpu", threads=1)
        lazyllm.search(llm, prompts, (LOW, HIGH), budget, out=out, progress=False)

    def start(out: Path, budget: int) -> Any:
        process = multiprocessing.get_context("fork").Process(target=work, args=(out, budget))
        process.start()
        return process

    return start


def test_two_processes_share_one_study(begin: Any, tmp_path: Path) -> None:
    both = [begin(tmp_path / "out", 14) for _ in range(2)]
    for one in both:
        one.join(60)
        assert one.exitcode == 0
    trials = [one for one in trials_of(tmp_path / "out") if one.state.name != "FAIL"]
    assert len(trials) == 14
    assert len({one.user_attrs["setting"] for one in trials}) == 14
    assert {one.state.name for one in trials} <= {"COMPLETE", "PRUNED"}
    assert len({one.user_attrs["worker"] for one in trials}) == 2
    assert all(len(one.results) == N_PROMPTS for one in Search.read(tmp_path / "out").finished)
    assert not [*(tmp_path / "out" / "workers").iterdir()]


@pytest.mark.parametrize("number", [1, 9])
def test_a_setting_that_was_queued_and_not_run_is_queued_once(
    number: int, search: Callable[..., Search], made: Search, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that ends between the two leaves the search that an undisturbed one makes."""
    import optuna

    plain, queued = optuna.Study.ask, itertools.count()

    def ask(study: Any) -> Any:
        states = {one.state.name for one in study.get_trials(deepcopy=False)}
        if "WAITING" in states and next(queued) == number:
            raise KeyboardInterrupt
        return plain(study)

    with monkeypatch.context() as patched:
        patched.setattr(optuna.Study, "ask", ask)
        with pytest.raises(KeyboardInterrupt):
            search(out=tmp_path)
    assert outcome(search(out=tmp_path)) == outcome(made)


def test_a_search_that_ended_at_any_moment_goes_on_as_if_it_had_not(
    search: Callable[..., Search], made: Search, tmp_path: Path
) -> None:
    """All that a killed process leaves is the first lines of the journal."""
    assert made.folder is not None
    written = (made.folder / JOURNAL).read_bytes().splitlines(keepends=True)
    for n_lines in range(4, len(written), 5):  # 5: each kind of line, as a trial writes about 22
        out = tmp_path / str(n_lines)
        shutil.copytree(made.folder, out)
        (out / JOURNAL).write_bytes(b"".join(written[:n_lines]))
        assert outcome(search(out=out)) == outcome(made), written[n_lines - 1]


def test_what_a_killed_process_had_begun_goes_on(
    begin: Any, search: Callable[..., Search], made: Search, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    running = begin(out, BUDGET)
    while lines(out) < 60:  # in the middle of a trial or between two
        assert running.is_alive()
        time.sleep(0.001)
    os.kill(running.pid, signal.SIGKILL)
    running.join()
    begun = sum(len(one.results) for one in Search.read(out))
    assert 0 < begun < sum(len(one.results) for one in made)
    monkeypatch.setattr(module, "measured", counted := Counted())
    assert outcome(search(out=out)) == outcome(made)
    assert begun + len(counted.ran) == sum(len(one.results) for one in made)


def lines(out: Path) -> int:
    journal = out / JOURNAL
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def test_what_a_living_process_runs_is_left_to_it(
    search: Callable[..., Search], made: Search, llm: LLM, tmp_path: Path
) -> None:
    space = Space(llm.config, made.conditions["prompt tokens"], LOW, HIGH)
    with Study(tmp_path, made.conditions) as other:
        claim = other.claim(space, space.starts(), BUDGET, 0)
        assert claim is not None
        found = search(out=tmp_path, budget=4)
        assert len(found) == 3
        assert claim.pruning not in [one.pruning for one in found]
        claim.add(Result(0.5, False))
    found = search(out=tmp_path, budget=4)
    assert claim.pruning in [one.pruning for one in found]
    assert len(found) == 4


# ---- results ---------------------------------------------------------------------------------------

SPACE_CONDITIONS = {"model": "tiny", "model sha256": "0", "prompts": 3, "prompt tokens": 60}


def planted() -> Search:
    loss = {1.5: 0.1, 1.6: 0.3, 1.8: 0.2, 2.0: 0.25, 2.1: 0.25, 2.4: 0.9, 2.5: 0.8}
    records = [record(n, speed, [kl - 0.05, kl, kl + 0.05]) for n, (speed, kl) in enumerate(loss.items())]
    records.append(record(len(records), 3.0, [0.0], done=False))
    return Search(records, SPACE_CONDITIONS, None)


def test_front_and_best_by_hand() -> None:
    found = planted()
    assert [one.speedup for one in found.pareto()] == [1.5, 1.8, 2.1, 2.5]
    assert found.best(speedup=1.0).speedup == 1.5
    assert found.best(speedup=1.8).speedup == 1.8
    assert found.best(speedup=1.81).speedup == 2.1
    assert found.best(max_loss=0.2001).speedup == 1.8
    assert found.best(max_loss=0.79).speedup == 2.1
    assert found.best(max_loss=5).speedup == 2.5
    nearly = [record(20, 2.001, [0.1] * 3), record(21, 2.003, [0.2] * 3), record(22, 2.01, [0.3] * 3)]
    front = Search(nearly, SPACE_CONDITIONS, None).pareto()
    assert [one.speedup for one in front] == [2.001, 2.01]
    assert front.best(speedup=2.003).speedup == 2.001  # the front has neither 2.003 nor another 2.00
    assert front.best(speedup=2.01).speedup == 2.01
    for options, words in (
        ({"speedup": 2.6}, r"no setting has a speedup of 2\.6; the fastest has 2\.50"),
        ({"max_loss": 0.01}, r"no setting loses at most 0\.01 nats per token; the least is 0\.1000"),
    ):
        with pytest.raises(ValueError, match=words):
            found.best(**options)
    for wrong in ({}, {"speedup": 2.0, "max_loss": 0.1}):
        with pytest.raises(TypeError, match="either speedup or max_loss"):
            found.best(**wrong)
    with pytest.raises(ValueError, match="no finished trial"):
        Search([found[7]], SPACE_CONDITIONS, None).best(speedup=2)


@pytest.mark.parametrize("seed", range(5))
def test_the_front_is_that_of_brute_force(seed: int) -> None:
    draws = np.random.default_rng(seed)
    several = [
        record(number, float(speed), [float(kl)] * 2)
        for number, (speed, kl) in enumerate(draws.integers(1, 8, (25, 2)))
    ]
    front = Search(several, SPACE_CONDITIONS, None).pareto()
    for one in several:
        beaten = any(
            other.speedup >= one.speedup
            and other.loss <= one.loss
            and (other.speedup, other.loss) != (one.speedup, one.loss)
            for other in several
        )
        assert beaten == ((one.speedup, one.loss) not in [(each.speedup, each.loss) for each in front])
    assert [one.speedup for one in front] == sorted({one.speedup for one in front})


def test_the_frame_has_a_row_for_each_setting() -> None:
    frame = planted().to_frame()
    assert frame.speedup.tolist() == [1.5, 1.6, 1.8, 2.0, 2.1, 2.4, 2.5, 3.0]
    assert frame.on_front.tolist() == [True, False, True, False, True, False, True, False]
    assert frame.stopped.tolist() == [False] * 7 + [True]
    assert frame.kl[0] == pytest.approx(0.1)
    assert frame.kl_low[0] == 0.0  # a divergence is never below
    assert frame.same[0] == pytest.approx(1 / 3)


def test_a_search_opens_again(made: Search) -> None:
    assert made.folder is not None
    again = Search.read(made.folder)
    assert (outcome(again), again.conditions) == (outcome(made), made.conditions)
    assert repr(again) == made.text()
    assert "<table>" in again._repr_html_()
    assert (again[np.int64(0)], list(again[:2])) == (again[0], [again[0], again[1]])
    assert isinstance(again[:2], Search)
    with pytest.raises(FileNotFoundError, match="holds no search"):
        Search.read(made.folder / "dense")


def test_the_picture_shows_finished_settings_and_dense(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    drawn: list[Any] = []
    original = module.plot_pareto
    monkeypatch.setattr(module, "plot_pareto", lambda *given: drawn.append(given) or original(*given))
    file = planted().plot(tmp_path / "search.png")
    assert file.read_bytes().startswith(b"\x89PNG")
    dots, front = drawn[0][:2]
    assert [(dot.speedup, round(dot.value, 6)) for dot in dots[:2]] == [(1.0, 0.0), (1.5, 0.1)]
    assert [dot.speedup for dot in dots] == [1.0, 1.5, 1.6, 1.8, 2.0, 2.1, 2.4, 2.5]
    assert [dot.speedup for dot in front] == [1.0, 1.5, 1.8, 2.1, 2.5]


def test_the_preset_is_a_setting_with_evidence(made: Search, llm: LLM, tmp_path: Path) -> None:
    preset = made.preset(speedup=1.5)
    assert preset.pruning == made.best(speedup=1.5).pruning
    assert preset.speedup == pytest.approx(
        preset.pruning.speedup(llm.config, made.conditions["prompt tokens"]), abs=1e-4
    )
    again = Preset.load(preset.save(tmp_path / "preset.json"))
    assert again == preset
    assert preset.mismatch(llm.checkpoint, progress=False) is None
    ids = list(range(5, 60))
    assert (
        llm.generate(ids, again, max_new_tokens=3).token_ids
        == llm.generate(ids, preset.pruning, max_new_tokens=3).token_ids
    )
    heads = preset.table.heads
    assert heads == ["setting", "counted speedup", "KL from dense"]
    assert len(preset.table.rows) == len(made.pareto())
    assert [row[0] for row in preset.table.rows if row[0].startswith("*")] == [f"* {str(preset)[8:-1]}"]
    with pytest.raises(ValueError, match="a preset of a search has no curves"):
        preset.plot()


def test_the_command(
    model: Path,
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
    call = ["search", "--model", str(model), "--out", str(tmp_path / "out"), "--device", "cpu", *files]
    options = ["--speedup", "1.3,2", "--budget", "3", "--start", '{"1": 0.4}', "--preset", "1.4"]
    assert cli.main([*call, *options]) == 0
    told = capsys.readouterr().out
    assert "Settings on the front" in told
    assert f"wrote {tmp_path / 'out'}\nwrote {tmp_path / 'out' / 'preset.json'}\n" in told
    found = Search.read(tmp_path / "out")
    assert found[0].pruning == Pruning({1: 0.4})
    assert Preset.load(tmp_path / "out" / "preset.json") == found.preset(speedup=1.4)
    assert json.loads((tmp_path / "out" / "preset.json").read_text())["evidence"]["prompts"]["search"] == 7
    assert cli.main([*call, "--speedup", "1.3,2", "--preset", "2.5"]) == 2
    assert "--preset must be at most 2, the end of the range of speedups, not 2.5" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main([*call, "--speedup", "fast"])
    assert "'fast' is no pair of numbers such as 1.5,3" in capsys.readouterr().err
