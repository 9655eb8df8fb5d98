"""`min_tokens="auto"`: the profile of a machine, its file, and the number that is resolved from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import SHAPE

import lazyllm
from lazyllm import LLM, Drop, Mass, Policy, Preset, Pruning, forecast
from lazyllm.forecast import Forecast
from lazyllm.machine.profile import Costs, Habits, fitted_line, fitted_revival
from lazyllm.session import Session
from lazyllm.support.json_text import json_digest

STAGES = Pruning({1: 0.4, 3: 0.2})
AUTO = replace(STAGES, min_tokens="auto")
IDS = [40 + i % 97 for i in range(300)]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LAZYLLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def llm(folder: Path, cache: Path) -> LLM:
    return lazyllm.load(folder, threads=1)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The measurements so far, in order."""
    seen: list[str] = []
    for name in ("_measured", "_habits"):
        whole = getattr(Forecast, name)

        def noted(self: Forecast, *args: Any, name: str = name, whole: Any = whole) -> Any:
            seen.append(name)
            return whole(self, *args)

        monkeypatch.setattr(Forecast, name, noted)
    return seen


def profile_file(cache: Path) -> Path:
    (file,) = (cache / "profiles").glob("*.json")
    return file


# ---- the fit ---------------------------------------------------------------------------------------


def test_the_fit_recovers_what_was_planted() -> None:
    operations, keys = [1e7, 5e7, 3e8], [300.0, 1200.0, 4800.0]
    prefills = [(x, 0.02 + 3e-11 * x) for x in operations]
    steps = [(x, 0.008 + 4e-7 * x) for x in keys]
    costs = Costs.fitted(prefills, steps)
    assert (costs.start, costs.operation) == pytest.approx((0.02, 3e-11))
    assert (costs.step, costs.key) == pytest.approx((0.008, 4e-7))


def test_no_fitted_cost_is_negative() -> None:
    falling, late = [(1.0, 3.0), (2.0, 2.0), (4.0, 1.0)], [(1.0, 0.5), (2.0, 2.0), (4.0, 5.0)]
    start, slope = fitted_line(falling)
    assert slope == 0
    assert 1.0 < start < 3.0
    start, slope = fitted_line(late)
    assert start == 0
    assert 0.5 < slope < 1.25
    assert fitted_line([(3.0, 6.0)])[1] >= 0  # a single length


def test_the_revived_share_recovers_its_exponent() -> None:
    shares = [Habits(0.2, 0.0).revived(t) for t in range(1, 33)]
    assert fitted_revival(shares) == pytest.approx(0.2)
    assert fitted_revival([0.0] * 9) == 0
    assert fitted_revival([1.0] * 9) > 5
    assert Habits(0.2, 0.0).revived(0) == 0


# ---- the decision, on a clock that planted times drive -----------------------------------------------


class Planted:
    """Seconds of passes: a prefill's operations, a decode step, and more for one that prunes or revives."""

    operation, step = 1e-6, 0.5

    def __init__(self, overhead: float) -> None:
        self.overhead = overhead
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def passed(self, session: Session, generated: bool) -> None:
        counts = session.last_pass
        if generated:
            pruned = counts[-1, 0] < counts[0, 0]
            self.now += self.step + self.overhead * pruned
        else:
            self.now += self.operation * Pruning().pass_flops(session.llm.config, counts)


@pytest.fixture
def planted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Planted:
    times = Planted(request.param)
    forward = Session.forward

    def timed(self: Session, ids: Any, generated: bool = False, progress: bool = True) -> np.ndarray:
        logits = forward(self, ids, generated, progress)
        times.passed(self, generated)
        return logits

    monkeypatch.setattr(Session, "forward", timed)
    monkeypatch.setattr(forecast, "perf_counter", times.clock)
    return times


OVERHEADS = [0.0, 0.002, 0.02, 1e6]


@pytest.mark.parametrize("planted", OVERHEADS, indirect=True)
def test_the_decision_follows_the_planted_times(planted: Planted, llm: LLM) -> None:
    found = llm.forecast.min_tokens(STAGES, 16)
    costs, habits = llm.forecast._known(STAGES, progress=False)
    assert costs.operation == pytest.approx(planted.operation)
    assert (costs.step, habits.overhead) == pytest.approx((planted.step, planted.overhead))
    assert 0 < habits.revival < 3

    def saved(n: int, n_new: int) -> float:
        dropped = Pruning().flops(llm.config, n) - STAGES.flops(llm.config, n)
        return planted.operation * dropped * n_new**-habits.revival - (n_new - 1) * planted.overhead

    if planted.overhead == OVERHEADS[-1]:
        assert found == SHAPE.context + 1
        return
    assert saved(found, 16) > 0
    tried = [n for n in llm.forecast._lengths() if n < found]
    assert saved(tried[-1], 16) <= 0
    assert found <= 1.1 * tried[-1] + 1  # an eighth of an octave
    assert llm.forecast.min_tokens(STAGES, 64) >= found
    assert llm.forecast.min_tokens(STAGES, 1) <= found


@pytest.mark.parametrize("planted", [0.02], indirect=True)
def test_the_predicted_speedup_is_that_of_the_planted_times(planted: Planted, llm: LLM) -> None:
    assert llm.forecast.speedup(STAGES, 200, 1) == pytest.approx(STAGES.speedup(llm.config, 200))
    frozen = replace(STAGES, decode="frozen")
    dense, pruned = (planted.operation * one.flops(llm.config, 200) for one in (Pruning(), frozen))
    habits = llm.forecast._known(frozen, progress=False)[1]
    assert habits.revival == 0
    steps = 9 * (planted.step + habits.overhead)
    assert llm.forecast.speedup(frozen, 200, 10) == pytest.approx(
        (dense + 9 * planted.step) / (pruned + steps)
    )


def test_what_a_mass_keeps_is_measured(llm: LLM) -> None:
    mass = Pruning({1: Mass(0.5), 3: 0.9})
    _, habits = llm.forecast._known(mass, progress=False)
    (kept,) = habits.kept
    assert 0 < kept < 1
    assert forecast._with_keeps(mass.stages, habits.kept) == ((1, kept), (3, min(kept, 0.9)))
    assert llm.forecast.speedup(mass, 500, 1) > 1.02


@pytest.mark.parametrize("decode", ["same", "frozen", {}, {4: 0.1}], ids=str)
def test_steps_read_no_keys_of_what_is_gone(llm: LLM, decode: Any) -> None:
    setting = Pruning({1: Drop(0.5), 3: 0.2}, decode=decode)
    session = llm.session(setting)
    session.forward(IDS)
    session.forward([5], generated=True)
    one_per_key = Costs(0.0, 0.0, 0.0, 1.0)
    read = llm.forecast._seconds(one_per_key, Habits(0.0, 0.0), setting, len(IDS), 2)
    assert read == session.last_pass[:, 0].sum()


def test_nothing_to_prune_needs_no_profile(llm: LLM, cache: Path) -> None:
    assert llm.session(Pruning(min_tokens="auto")).pruning == Pruning()
    assert not cache.exists()


def test_windows_bound_the_keys_that_a_step_reads(llm: LLM) -> None:
    windowed = replace(llm.config, windows=(8, 0) * (SHAPE.n_layers // 2))
    model = Forecast(llm)
    model._config = windowed
    assert model._keys(np.full(SHAPE.n_layers, 100.0)) == SHAPE.n_layers / 2 * (8 + 100)


# ---- the resolved number -----------------------------------------------------------------------------


@pytest.fixture
def from_100(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Resolves every setting to 100; the lengths of the answers that were asked about."""
    asked: list[int] = []

    def min_tokens(self: Forecast, pruning: Pruning, n_new: int, progress: bool = True) -> int:
        asked.append(n_new)
        return 100

    monkeypatch.setattr(Forecast, "min_tokens", min_tokens)
    return asked


def test_the_number_reaches_the_core_and_the_answer(llm: LLM, from_100: list[int]) -> None:
    short, long = llm.generate([IDS[:99], IDS[:100]], AUTO, max_new_tokens=1, progress=False)
    assert short.passes["in_play"].tolist() == [99] * SHAPE.n_layers
    assert long.passes["in_play"].tolist() == [100, 100, 40, 40, 20, 20]
    assert short.pruning == long.pruning == replace(STAGES, min_tokens=100)
    assert long.token_ids == llm.generate(IDS[:100], long.pruning, max_new_tokens=1).token_ids
    stream = llm.stream(IDS[:50], AUTO, max_new_tokens=7)
    assert stream.finished().pruning == replace(STAGES, min_tokens=100)
    session = llm.session(AUTO)
    assert session.pruning == replace(STAGES, min_tokens=100)
    assert from_100 == [1, 7, 64]


def test_a_preset_is_resolved_too(llm: LLM, from_100: list[int]) -> None:
    preset = Preset(AUTO, 2.0, "tiny", json_digest(0), {}, {})
    with pytest.warns(UserWarning, match="the preset was made for tiny"):
        answer = llm.generate(IDS[:50], preset, max_new_tokens=2)
    assert isinstance(answer.pruning, Preset)
    assert answer.pruning.pruning.min_tokens == 100
    assert AUTO.min_tokens == preset.pruning.min_tokens == "auto"


@pytest.mark.parametrize("measure", ["score", "kl"])
def test_runs_resolve_it_for_the_limit_of_each_task(
    llm: LLM, from_100: list[int], tmp_path: Path, measure: Any
) -> None:
    asked: dict[str, Any] = {"datasets": ["niah_single_1"], "max_length": 580, "limit": 2, "tokens": 2}
    asked |= {"max_new_tokens": 9, "chat": "none", "warm_ups": 0, "progress": False}
    settings = [AUTO, replace(STAGES, min_tokens=100), STAGES]
    made = lazyllm.sweep(llm, settings, measure=measure, out=tmp_path, **asked)
    assert not made.summary.failed
    assert from_100 == [9, 9]
    by_setting = [
        [{**row, "setting": "", "timing": {}} for row in made.rows if row["setting"] == str(one)]
        for one in settings[:2]
    ]
    assert by_setting[0] == [{**row, "min_tokens": 100} for row in by_setting[1]]


def test_runs_count_the_work_of_the_number(llm: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Forecast, "min_tokens", lambda *_, **__: SHAPE.context + 1)
    made = lazyllm.longbench.run_ruler(
        llm,
        [None, AUTO],
        out=tmp_path,
        tasks=["niah_single_1"],
        lengths=[560],
        count=1,
        chat="none",
        warm_ups=0,
        progress=False,
    )
    dense, auto = made.rows
    assert auto["flops"] == dense["flops"]


def test_a_number_is_not_resolved(llm: LLM, from_100: list[int]) -> None:
    for setting in (None, STAGES, replace(STAGES, min_tokens=7), lazyllm.FastKV(2, 0.5)):
        llm.session(setting)
    assert not from_100


def test_the_stages_are_checked_before_anything_is_measured(llm: LLM, measured: list[str]) -> None:
    with pytest.raises(ValueError, match="layer 5 is out of reach"):
        llm.generate(IDS, Pruning({5: 0.5}, min_tokens="auto"))
    assert not measured


def test_a_policy_takes_numbers_only() -> None:
    class Mine(Policy):
        def score(self, view: Any) -> Any:
            return view.positions

    with pytest.raises(ValueError, match="min_tokens of Mine must be a whole number, not 'auto'"):
        Mine({1: 0.5}, min_tokens="auto")  # type: ignore[arg-type]


# ---- the file ----------------------------------------------------------------------------------------


def test_a_profile_is_measured_once(folder: Path, llm: LLM, cache: Path, measured: list[str]) -> None:
    first = llm.session(AUTO).pruning
    assert llm.session(AUTO).pruning == first
    assert lazyllm.load(folder, threads=1).session(AUTO).pruning == first
    assert measured == ["_measured", "_habits"]
    lazyllm.load(folder, threads=1).session(replace(AUTO, smooth=3))  # has habits of its own
    assert measured == ["_measured", "_habits", "_habits"]
    table = json.loads(profile_file(cache).read_text())
    assert len(table["habits"]) == 2
    assert all(value >= 0 for value in table["costs"].values())
    assert 0 <= llm.session(AUTO).pruning.min_tokens <= SHAPE.context + 1  # type: ignore[attr-defined]


DAMAGES = {
    "cut": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "no JSON object": lambda text: "[1, 2]",
    "negative": lambda text: text.replace('"step": ', '"step": -1'),
    "not a number": lambda text: text.replace('"step": ', '"step": NaN, "was": '),
    "a field is missing": lambda text: text.replace('"operation"', '"operations"'),
    "text of another kind": lambda text: text.replace('"texts": [\n  [', '"texts": [\n  [0.5, '),
    "text of another vocabulary": lambda text: text.replace('"texts": [\n  [', '"texts": [\n  [300, '),
    "no text": lambda text: text.replace('"texts": [\n  [', '"texts": [\n  [], ['),
    "another format": lambda text: text.replace('"format": 1', '"format": 0'),
    "another core": lambda text: text.replace('"core sha256": "', '"core sha256": "0'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_stale_file_is_measured_anew(
    damage: str, folder: Path, llm: LLM, cache: Path, measured: list[str]
) -> None:
    llm.session(AUTO)
    file = profile_file(cache)
    damaged = DAMAGES[damage](whole := file.read_text())
    assert damaged != whole
    file.write_text(damaged)
    lazyllm.load(folder, threads=1).session(AUTO)
    assert measured == ["_measured", "_habits"] * 2
    assert json.loads(file.read_text()).keys() == json.loads(whole).keys()


def test_other_versions_weights_and_threads_have_their_own(
    folder: Path, llm: LLM, cache: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm.session(AUTO)
    with monkeypatch.context() as patch:
        patch.setattr(lazyllm, "__version__", "0.0.9")
        assert "will be measured anew" in lazyllm.info()["profiles"][0]
        lazyllm.load(folder, threads=1).session(AUTO)
    assert len(measured) == 4
    weights = folder / "model.safetensors"
    os.utime(weights, ns=(0, weights.stat().st_mtime_ns + 1))
    lazyllm.load(folder, threads=1).session(AUTO)
    assert len(measured) == 6
    profile_file(cache)  # it replaced the other ones
    lazyllm.load(folder, threads=2).session(AUTO)
    assert len(measured) == 8
    assert len(list((cache / "profiles").glob("*.json"))) == 2


def test_info_names_the_profiles(llm: LLM, cache: Path) -> None:
    assert lazyllm.info()["profiles"].startswith('none; min_tokens="auto"')
    llm.session(AUTO)
    (line,) = lazyllm.info()["profiles"]
    assert f"{llm.config.name or llm.checkpoint.path.name} on cpu with 1 threads, 20" in line
    assert "anew" not in line
    profile_file(cache).write_text("{")
    assert "damaged" in lazyllm.info()["profiles"][0]


PROGRAM = """
import sys, lazyllm
llm = lazyllm.load(sys.argv[1], threads=1)
print(llm.forecast._known(lazyllm.Pruning({1: 0.4, 3: 0.2}, smooth=int(sys.argv[2])), progress=False)[0])
"""


def test_processes_that_measure_at_once_share_one_profile(folder: Path, cache: Path) -> None:
    started = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, str(folder), smooth], stdout=subprocess.PIPE)
        for smooth in ("1", "1", "3")
    ]
    told = {process.communicate(timeout=60)[0] for process in started}
    assert [process.returncode for process in started] == [0, 0, 0]
    assert len(told) == 1
    assert len(json.loads(profile_file(cache).read_text())["habits"]) == 2


def test_a_cache_that_cannot_be_written_is_named(llm: LLM, cache: Path) -> None:
    cache.write_text("not a folder")
    with pytest.raises(OSError, match=str(cache)):
        llm.session(AUTO)
