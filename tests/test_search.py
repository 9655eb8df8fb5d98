"""Searches: what is proposed, what is never run, resumption, what the settings come to."""

import json
import math
import sys
import warnings
from collections.abc import Callable
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
from lazyllm.evaluation.measures import Divergence, forced_logits, greedy_answer, kl_divergence
from lazyllm.evaluation.results import ITEMS
from lazyllm.llm import LLM
from lazyllm.methods.preset import Preset
from lazyllm.searching import search as module
from lazyllm.searching.search import SPEEDUPS, Search
from lazyllm.searching.space import Space

pytestmark = pytest.mark.usefixtures("no_pictures")
LOW, HIGH = 1.3, 2.0
N_PROMPTS, LENGTH, BUDGET = 4, 60, 8


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    letters = np.random.default_rng(0).integers(97, 123, (N_PROMPTS, LENGTH))
    return ["".join(map(chr, row)) for row in letters]


@pytest.fixture(scope="module")
def search(llm: LLM, prompts: list[str]) -> Callable[..., Search]:
    defaults = {"llm": llm, "prompts": prompts, "speedup": (LOW, HIGH), "budget": BUDGET, "progress": False}
    return lambda **options: lazyllm.search(**{**defaults, **options})


@pytest.fixture(scope="module")
def finished(search: Callable[..., Search], tmp_path_factory: pytest.TempPathFactory) -> Search:
    """A search that nothing disturbed."""
    return search(out=tmp_path_factory.mktemp("search"))


def divergences(found: Search) -> dict[tuple[str, str], float]:
    return {(row["setting"], row["item"]): row["kl"] for row in found.rows}


# ---- the space -------------------------------------------------------------------------------------


@pytest.fixture(params=[((0,), None), ((24, 24, 0), None), ((0,), (2, 1))], ids=["full", "windows", "head"])
def space(request: pytest.FixtureRequest, llm: LLM) -> Space:
    pattern, head = request.param
    windows = tuple(pattern[layer % len(pattern)] for layer in range(30))
    config = replace(llm.config, n_layers=30, windows=windows, expert_layers=(0,) * 30, induction_head=head)
    return Space(config, 1000, 1.5, 3.0)


def random_study(seed: int = 0) -> Any:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(directions=["minimize", "maximize"], sampler=optuna.samplers.RandomSampler(seed=seed))


def test_proposals_are_valid_by_construction(space: Space) -> None:
    study = random_study()
    proposals = [(space.proposed(trial), trial.params) for trial in (study.ask() for _ in range(60))]
    valid = [(pruning, point) for pruning, point in proposals if pruning]
    assert len(valid) > 50
    assert len({pruning for pruning, _ in valid}) == len(valid)
    assert {len(pruning.stages) for pruning, _ in valid} == {1, 2, 3, 4}
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


def test_the_starts_are_the_settings_of_numbers(space: Space) -> None:
    study = random_study(1)
    for level, start in zip(space.levels, space.starts(), strict=True):
        study.enqueue_trial(start)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # Optuna warns of a parameter out of its range
            proposed = space.proposed(study.ask())
        expected = Pruning.for_speedup(level, space.config, space.n_prompt)
        assert proposed is not None
        assert [layer for layer, _ in proposed.stages] == [layer for layer, _ in expected.stages]
        keeps = [[keep for _, keep in pruning.stages] for pruning in (expected, proposed)]
        assert np.allclose(*keeps, atol=0.01)
        assert replace(proposed, stages=()) == replace(expected, stages=())


def test_bad_input_is_refused_before_work(search: Callable[..., Search], tmp_path: Path) -> None:
    for options, words in (
        ({"speedup": (2.0, 1.5)}, r"speedup must rise from above 1, .*, not \(2, 1\.5\)"),
        ({"speedup": (1.0, 1.5)}, r"speedup must rise from above 1"),
        ({"speedup": 2.0}, r"speedup must be a range such as \(1.5, 3.0\), not 2.0"),
        ({"speedup": (1.5, 90)}, "a speedup of .* is out of reach"),
        ({"budget": 0}, "budget must be from 1"),
        ({"prompts": ["One", "Two"]}, "prompts must be at least 3, not 2"),
        ({"prompts": "One"}, "prompts must be a list such as"),
        ({"prompts": ["One", "Two", ""]}, "prompt 3: the prompt is empty"),
        ({"warm_ups": 1}, "no option 'warm_ups'"),
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


# ---- what is tried ---------------------------------------------------------------------------------


def test_settings_are_new_and_measured_on_every_prompt(finished: Search, llm: LLM, prompts: list[str]) -> None:
    assert finished[0].setting == "dense"
    assert len(finished) == len({point.pruning for point in finished}) == 1 + BUDGET
    assert all(point.prompts == N_PROMPTS for point in finished)
    ids = llm.generate(prompts[0], chat=True, max_new_tokens=1).prompt_ids
    space = Space(llm.config, len(ids), LOW, HIGH)
    layers = [[layer for layer, _ in point.pruning.stages] for point in finished[1:6]]
    numbers = [Pruning.for_speedup(level, llm.config, len(ids)) for level in space.levels]
    assert layers == [[layer for layer, _ in pruning.stages] for pruning in numbers]
    point = finished[1]
    assert point.counted_speedup == round(space.speedup(point.pruning), 2)
    answer, logits = greedy_answer(llm.session(), ids, 16, llm.eos_token_ids)
    pruned = np.array(list(forced_logits(llm.session(point.pruning), ids, answer)))
    expected = kl_divergence(logits, pruned).mean()
    assert divergences(finished)[point.setting, "prompt 1"] == pytest.approx(expected)


def test_the_sampler_learns_of_the_logarithm(finished: Search) -> None:
    assert finished.study is not None
    told = [trial.values for trial in finished.study.trials if trial.values]
    expected = [[math.log10(point.kl.value), point.counted_speedup] for point in finished[1:]]
    assert np.allclose(told, expected)


def test_generated_prompts_are_of_all_kinds_and_lengths(
    search: Callable[..., Search], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = lazyllm.load(model_folder(tmp_path, replace(SHAPE, context=1100)), device="cpu", threads=1)
    monkeypatch.setattr(module, "TOKENS", 1)
    found = search(llm=long, prompts=None, budget=1)
    assert {row["dataset"] for row in found.rows} == {
        f"{task}@{length}"
        for task in ("niah_single_2", "niah_multikey_1", "niah_multivalue")
        for length in (1024, 1100)
    }
    assert [point.prompts for point in found] == [12, 12]


def test_invalid_settings_and_duplicates_never_run(
    search: Callable[..., Search], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Pruning({1: 0.5}), Pruning({1: 0.4})
    proposals = iter([None, first, None, first, second, None, *[second, first] * 100])
    monkeypatch.setattr(Space, "starts", lambda self: [])
    monkeypatch.setattr(Space, "proposed", lambda self, trial: next(proposals))
    monkeypatch.setattr(module, "ATTEMPTS", 10)
    with pytest.warns(UserWarning, match="no new setting was found in 10 attempts"):
        found = search(budget=3)
    assert [point.pruning for point in found] == [Pruning(), first, second]


# ---- resumption ------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 6, 7 * N_PROMPTS])
def test_an_interrupted_search_goes_on(
    search: Callable[..., Search], finished: Search, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """No result is lost or counted twice, and the settings are those of a search that nothing disturbed."""
    ran: list[Any] = []
    measure = Divergence.__call__

    def stop_after(count: int) -> None:
        def measured(self: Divergence, llm: LLM, tasks: Any, trial: Any) -> dict[str, Any]:
            if len(ran) == count:
                raise KeyboardInterrupt
            ran.append(trial.key)
            return measure(self, llm, tasks, trial)

        monkeypatch.setattr(Divergence, "__call__", measured)

    stop_after(after)
    with pytest.raises(KeyboardInterrupt):
        search(out=tmp_path)
    assert len(Search.read(tmp_path).rows) == after
    stop_after(10**6)
    found = search(out=tmp_path)
    assert divergences(found) == divergences(finished)
    assert len(ran) == len({*ran}) == (1 + BUDGET) * N_PROMPTS
    longer = search(out=tmp_path, budget=BUDGET + 1)
    assert divergences(finished).items() < divergences(longer).items()
    assert len(ran) == (2 + BUDGET) * N_PROMPTS


def test_other_prompts_in_the_same_folder_are_refused(
    search: Callable[..., Search], finished: Search, prompts: list[str]
) -> None:
    with pytest.raises(ValueError, match=r'prompts sha256 is "\w+", not "\w+"'):
        search(out=finished.folder, prompts=[*prompts[1:], "another"])


def test_a_failed_item_ends_a_search_by_name(search: Callable[..., Search], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Divergence, "__call__", lambda *_: 1 / 0)
    with pytest.raises(RuntimeError, match="own prompts prompt 1, dense: ZeroDivisionError"):
        search()


# ---- results ---------------------------------------------------------------------------------------


LOSS = {1.0: 0.0, 1.5: 0.1, 1.6: 0.3, 1.8: 0.2, 2.0: 0.25, 2.1: 0.25, 2.4: 0.9, 2.5: 0.8}


@pytest.fixture
def planted() -> Search:
    """Settings by speedup and divergence."""
    settings = {str(speedup): Pruning({1: 1 / speedup}) for speedup in LOSS}
    row = {"dataset": "own prompts", "environment": "e", "agreement": 1.0, "changed_nothing": False, "flops": 1}
    row |= {"computed": 1.0, "reached_top": 1.0, "timing": {"ttft": 1.0, "seconds": 1.0}}
    rows = [
        {**row, "setting": str(speedup), "item": str(item), "kl": kl + item * kl / 4}
        for speedup, kl in LOSS.items()
        for item in (-1, 0, 1)
    ]
    conditions = {"measure": "kl", SPEEDUPS: {str(speedup): speedup for speedup in LOSS}}
    return Search(rows, {"model": "tiny", "conditions": conditions}, None, settings)


def test_front_best_and_picture_by_hand(planted: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [point.counted_speedup for point in planted.pareto()] == [1.0, 1.5, 1.8, 2.1, 2.5]
    for wished, speedup in ((0.9, 1.0), (1.2, 1.5), (1.8, 1.8), (1.803, 1.8), (1.81, 2.1), (2.5, 2.5)):
        assert planted.best(speedup=wished).counted_speedup == speedup
    with pytest.raises(ValueError, match=r"no setting has a speedup of 2\.6; the fastest has 2\.50"):
        planted.best(speedup=2.6)
    assert planted.to_frame().counted_speedup.tolist() == [*LOSS]
    assert [row[0] for row in planted.table.rows] == [point.setting for point in planted.pareto()]
    drawn: list[Any] = []
    monkeypatch.undo()  # of no_pictures
    monkeypatch.setattr("lazyllm.sweeps.points.plot_scores", lambda *values: drawn.extend(values))
    planted.plot("search.png")
    assert [[dot.speedup for dot in dots] for dots in (drawn[0], drawn[-1])] == [[*LOSS], [1.0, 1.5, 1.8, 2.1, 2.5]]


def test_a_search_opens_again_and_is_a_sweep_too(finished: Search) -> None:
    assert finished.folder is not None
    again = Search.read(finished.folder)
    assert (again.rows, repr(again)) == (finished.rows, repr(finished))
    assert lazyllm.Sweep.read(finished.folder).rows == finished.rows
    assert "counted speedup" in (finished.folder / "report.md").read_text()


def test_the_preset_is_a_setting_with_evidence(finished: Search, llm: LLM) -> None:
    preset = finished.preset(speedup=1.5)
    assert preset.pruning == finished.best(speedup=1.5).pruning
    speedup = preset.pruning.speedup(llm.config, finished.manifest["conditions"]["prompt tokens"])
    assert preset.speedup == round(speedup, 2)
    assert preset.mismatch(llm.checkpoint, progress=False) is None
    assert preset.table.heads == ["setting", "counted speedup", "KL from dense"]
    assert len(preset.table.rows) == len(finished.pareto())


def test_the_command(
    folder: Path, prompts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], no_bars: None
) -> None:
    """With two workers, as one process would."""
    files = []
    for number, text in enumerate(prompts):
        (tmp_path / f"{number}.txt").write_text(text)
        files += ["--prompt-file", str(tmp_path / f"{number}.txt")]
    call = ["search", "--model", str(folder), "--out", str(tmp_path / "out"), "--device", "cpu", *files]
    options = ["--speedup", "1.3,2", "--budget", "3", "--preset", "1.4", "--workers", "1"]
    assert cli.main([*call, *options]) == 0
    printed = capsys.readouterr().out
    assert "Settings: quality" in printed
    assert f"wrote {tmp_path / 'out'}\nwrote {tmp_path / 'out' / 'preset.json'}\n" in printed
    found = Search.read(tmp_path / "out")
    assert (tmp_path / "out" / ITEMS).exists()
    assert Preset.load(tmp_path / "out" / "preset.json") == found.preset(speedup=1.4)
    assert json.loads((tmp_path / "out" / "preset.json").read_text())["evidence"]["prompts"]["search"] == 4
    assert cli.main([*call, "--speedup", "1.3,2", "--budget", "3", "--preset", "2.5"]) == 2
    assert "no setting has a speedup of 2.5; the fastest has" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main([*call, "--speedup", "fast"])
    assert "argument --speedup: invalid speedups value: 'fast'" in capsys.readouterr().err
