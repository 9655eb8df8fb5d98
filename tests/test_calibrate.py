"""Calibration: the schedules that are tried, trials, resumption; presets and their files."""

import json
import math
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import SHAPE, model_folder

import lazyllm
from lazyllm import LLM, Preset, Pruning
from lazyllm.calibration import calibrate as module
from lazyllm.calibration.calibrate import candidates, measurements, rank
from lazyllm.commands import main as cli
from lazyllm.evaluation.own_prompts import OWN, encoded
from lazyllm.evaluation.results import ITEMS
from lazyllm.evaluation.summary import DENSE_LABEL, Summary, student_t
from lazyllm.evaluation.trial import Trial
from lazyllm.schedule import shape
from lazyllm.scoring import Scoring
from lazyllm.support import files
from lazyllm.sweeps.sweep import measure_of

MODEL = replace(SHAPE, context=1100)
SPEEDUP = 1.5
ANSWER = 3  # tokens, in place of the 16 and 48 of a real calibration


@pytest.fixture(scope="module", autouse=True)
def short() -> Iterator[None]:
    """Calibrations with one generated prompt of each kind and length, and short answers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PER_KIND", 1)
        patch.setattr(module, "TOKENS", ANSWER)
        patch.setattr("lazyllm.calibration.prompts.TOKENS", ANSWER)
        patch.setattr("lazyllm.calibration.prompts.MAX_NEW_TOKENS", ANSWER)
        yield


@pytest.fixture(scope="module")
def calibrated(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> tuple[Preset, Path]:
    file = tmp_path_factory.mktemp("calibration") / "preset.json"
    return lazyllm.calibrate(llm, ["One", "Two", "Three"], SPEEDUP, out=file, progress=False), file


# ---- schedules -------------------------------------------------------------------------------------


def test_a_shape_by_hand() -> None:
    keeps = shape(0.6, 2.0, [(0.5, 0.4), (0.2, 0.5)])
    assert [*keeps] == pytest.approx([0.3, 0.3 + 0.5 * 0.7, 0.65 + 0.2 * 0.35])
    assert [*keeps.values()] == pytest.approx([1.0, 0.4, 0.2])


@pytest.mark.parametrize("speedup", [1.2, 1.5, 2.0, 2.5])
def test_candidates_just_reach_the_speedup_with_first_stages_at_several_depths(llm: LLM, speedup: float) -> None:
    config = replace(llm.config, n_layers=30, windows=(0,) * 30, expert_layers=(0,) * 30)
    first, *others = dict.fromkeys(candidates(speedup, config, 1000))
    assert first == Pruning.for_speedup(speedup, config, 1000)
    for pruning in (first, *others):
        assert pruning.scoring.queries == Scoring.recommended().queries
        assert speedup <= pruning.speedup(config, 1000) <= 1.01 * speedup
    assert len({pruning.stages[0][0] for pruning in others}) == len(others) >= 3


def test_what_is_out_of_reach_is_not_tried(llm: LLM) -> None:
    assert len({*candidates(2.1, llm.config, 80)}) == 1
    with pytest.raises(ValueError, match="a speedup of 50 is out of reach"):
        next(candidates(50, llm.config, 80))


# ---- prompts and trials ----------------------------------------------------------------------------


def test_own_prompts_are_encoded_as_they_are_asked(llm: LLM) -> None:
    chat = [{"role": "user", "content": "Hello"}]
    own = encoded(llm, ["Hello", chat, [5, 6, 7], np.array([8])])
    through_template = llm.generate("Hello", chat=True, max_new_tokens=1).prompt_ids
    assert list(own) == [f"prompt {number}" for number in (1, 2, 3, 4)]
    assert list(own.values()) == [through_template, through_template, [5, 6, 7], [8]]


def test_what_is_wrong_is_refused_before_work(llm: LLM, tmp_path: Path) -> None:
    for options, words in (
        ({"prompts": ["One", ""]}, "prompt 2: the prompt is empty"),
        ({"prompts": [[1, 2], [1, 999]]}, "prompt 2: token id 999"),
        ({"prompts": [[1] * 1098]}, "prompt 1 has 1098 tokens; with 3 of an answer .* context of 1100"),
        ({"prompts": [3.5]}, "prompt 1: "),
        ({"prompts": "One"}, "must be a list such as"),
        ({"lengths": [900, 1101]}, "length 1101, a prompt and its answer, is more than the model's context of 1100"),
        ({"lengths": [50]}, "length is 50; item 0 of niah_single_2 needs at least 475 tokens"),
        ({"lengths": 900}, r"lengths must be a list such as \[1024, 4096\], not 900"),
        ({"lengths": []}, "lengths must be at least one number of tokens"),
        ({"speedup": 50}, "a speedup of 50 is out of reach"),
        ({"speedup": 0.5}, r"speedup must be at least 1, not 0\.5"),
        ({"out": "preset.txt"}, r"must be a file whose name ends with \.json, not .*preset\.txt"),
    ):
        options = {**options, "out": tmp_path / options.get("out", "preset.json")}
        with pytest.raises((ValueError, TypeError, FileNotFoundError), match=words):
            lazyllm.calibrate(llm, **options, progress=False)
        assert list(tmp_path.iterdir()) == []
    (tmp_path / "made.json").mkdir()
    with pytest.raises(ValueError, match=r"must be a file .*made\.json"):
        lazyllm.calibrate(llm, out=tmp_path / "made.json")


def test_measurements_by_hand() -> None:
    baseline, other = Pruning({1: 0.9}), Pruning({1: 0.8})
    labels = (DENSE_LABEL, baseline.label, other.label)
    rows: list[dict[str, Any]] = []
    for item, scores, kl in (
        ("a", (1, 0, 1), (0.0, 0.2, 0.1)),
        ("b", (1, 0.5, 1), (0.0, 0.4, 0.1)),
        ("c", (None, None, None), (0.0, 0.6, 0.4)),
    ):
        for label, score, loss in zip(labels, scores, kl, strict=True):
            row = {"setting": label, "dataset": "x", "item": item, "environment": "e", "kl": loss}
            rows.append(row | ({} if score is None else {"score": score}))
    summary = Summary(rows, category=str)
    assert measurements(summary, DENSE_LABEL) == {"needles": (100.0,) * 3}
    of_baseline, of_other = (measurements(summary, pruning.label) for pruning in (baseline, other))
    assert of_baseline["needles"] == pytest.approx([25.0, 0.0, 100.0])
    assert of_baseline["needles_to_dense"] == pytest.approx([-75.0, -100.0, 100.0])
    assert of_other["needles_to_dense"] == (0.0,) * 3
    half = student_t(2) * 0.2 / math.sqrt(3)
    assert of_baseline["kl"] == pytest.approx([0.4, max(0, 0.4 - half), 0.4 + half], abs=1e-5)


def test_most_needles_win_then_the_least_divergence() -> None:
    results = [{"needles": [needles], "kl": [kl]} for needles, kl in ((50, 0.1), (60, 0.3), (60, 0.2))]
    assert max(results, key=rank) == results[2]
    assert max(results[:2], key=rank) == results[1]


# ---- the whole -------------------------------------------------------------------------------------


def test_a_calibration_gives_a_preset_with_its_evidence(llm: LLM, calibrated: tuple[Preset, Path]) -> None:
    preset, file = calibrated
    assert preset.model == llm.config.name
    assert preset.pruning.scoring.queries == Scoring.recommended().queries
    assert preset.versions["lazyllm"] == lazyllm.__version__
    n = preset.evidence["prompts"]["tokens"]
    # three kinds of needles at 1024 and at 1100 tokens, and three of the user's
    assert preset.evidence["prompts"]["trials"] == 9
    dense, *others = preset.evidence["candidates"]
    assert dense["pruning"]["stages"] == {}
    tried = [Pruning.from_fields(candidate["pruning"]) for candidate in others]
    assert tried == [*dict.fromkeys(candidates(SPEEDUP, llm.config, n))]
    speedups = {pruning: candidate["speedup"] for pruning, candidate in zip(tried, others, strict=True)}
    assert all(SPEEDUP <= speedup <= 1.01 * SPEEDUP for speedup in speedups.values())
    assert preset.speedup == speedups[preset.pruning]
    assert rank(others[tried.index(preset.pruning)]) == max(map(rank, others))
    rows = [json.loads(line) for line in (file.with_suffix(".calibration") / ITEMS).open()]
    assert len(rows) == 9 * (1 + len(tried))
    assert all(("score" in row) == (row["dataset"] != OWN) and "kl" in row for row in rows)
    assert json.loads(file.read_text())["pruning"] == json.loads(preset.pruning.to_json())
    text = repr(preset)
    assert str(preset) == text
    assert all(word in text for word in (preset.label, preset.model, "* {", "KL from dense"))


def test_an_interrupted_calibration_goes_on(
    llm: LLM, calibrated: tuple[Preset, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preset, _ = calibrated
    ran: list[Any] = []
    measure, most = measure_of("both", ANSWER), [10]

    def measured(llm: LLM, tasks: Any, trial: Trial) -> dict[str, Any]:
        if len(ran) == most[0]:
            raise KeyboardInterrupt
        ran.append(trial.key)
        return measure(llm, tasks, trial)

    def calibrate(*prompts: str) -> Preset:
        return lazyllm.calibrate(llm, prompts, SPEEDUP, out=tmp_path / "preset.json", progress=False)

    monkeypatch.setattr(module, "measure_of", lambda *_: measured)
    with pytest.raises(KeyboardInterrupt):
        calibrate("One", "Two", "Three")
    assert not (tmp_path / "preset.json").exists()
    most[0] = 1000
    for _ in range(2):
        assert calibrate("One", "Two", "Three") == preset
        assert len(ran) == len({*ran}) == 9 * len(preset.evidence["candidates"])
    with pytest.raises(ValueError, match=r"an item prompt 1 of own prompts whose content is not that"):
        calibrate("Other")


def test_a_failed_item_ends_a_calibration_by_name(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> dict[str, Any]:
        raise ValueError("broken")

    monkeypatch.setattr(module, "measure_of", lambda *_: failing)
    with pytest.raises(RuntimeError, match=r"niah_single_2@1024 .*: ValueError: broken"):
        lazyllm.calibrate(llm, speedup=SPEEDUP, progress=False)


# ---- presets ---------------------------------------------------------------------------------------


def test_a_preset_comes_back_from_its_file(calibrated: tuple[Preset, Path], tmp_path: Path) -> None:
    preset, file = calibrated
    again = Preset.load(preset.save(tmp_path / "copy.json"))
    assert again == preset == Preset.load(file)
    assert (again.versions, json.dumps(again.evidence)) == (preset.versions, json.dumps(preset.evidence))
    assert hash(again) == hash(preset)
    assert repr(again) == repr(preset)
    assert again._repr_html_().count("<tr>") == 1 + len(preset.evidence["candidates"])


def test_a_preset_is_a_setting_everywhere(llm: LLM, calibrated: tuple[Preset, Path]) -> None:
    preset, file = calibrated
    ids = list(range(5, 200))
    want = llm.generate(ids, preset.pruning, max_new_tokens=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for setting in (preset, file, str(file)):
            answer = llm.generate(ids, setting, max_new_tokens=4)
            assert answer.token_ids == want.token_ids
            assert (answer.passes == want.passes).all()
    assert lazyllm.parse_method(str(file)) == preset
    assert lazyllm.parse_method(preset.to_json()) == preset.pruning
    with pytest.raises(FileNotFoundError, match=r"nowhere\.json"):
        llm.session("nowhere.json")
    less: dict[str, Any] = {"max_length": 600, "limit": 1, "warm_ups": 0, "progress": False}
    point = lazyllm.sweep(llm, [str(file)], datasets=["niah_single_1"], **less)[1]
    assert (point.setting, point.pruning) == (preset.label, preset)
    assert preset.label == preset.pruning.label
    assert point.counted_speedup > 1


def test_a_preset_shows_no_bar_where_none_is_wanted(
    llm: LLM, calibrated: tuple[Preset, Path], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    preset, options = calibrated[0], {"max_new_tokens": 1}
    for progress in (False, True):
        for open_it in (
            lambda shown: llm.generate(["Hi"], preset, progress=shown, **options),
            lambda shown: llm.stream("Hi", preset, progress=shown, **options).finished(),
            lambda shown: llm.session(preset, progress=shown),
        ):
            monkeypatch.setattr(files, "known_digests", {})  # hashed anew
            open_it(progress)
            assert ("hashing the model" in capfd.readouterr().err) == progress


def test_another_model_warns_by_name(llm: LLM, calibrated: tuple[Preset, Path], tmp_path: Path, folder: Path) -> None:
    other = lazyllm.load(model_folder(tmp_path / "other", replace(MODEL, seed=9)), device="cpu", threads=1)
    preset, _ = calibrated
    with pytest.warns(UserWarning, match=f"was made for {preset.model}, not for other;"):
        other.session(preset)
    with pytest.warns(UserWarning, match="was made for other, not for other with other weights"):
        other.session(replace(preset, model="other"))
    renamed = tmp_path / "renamed"
    renamed.symlink_to(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lazyllm.load(renamed, threads=1).session(preset)


def test_the_command_writes_a_preset_that_generate_takes(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt, out = tmp_path / "prompt.txt", tmp_path / "preset.json"
    prompt.write_text("One prompt")
    model = ["--model", str(folder), "--threads", "1"]
    more = ["--speedup", str(SPEEDUP), "--prompt-file", str(prompt), "--out", str(out)]
    assert cli.main(["calibrate", *model, *more, "--lengths", "900"]) == 0
    preset = Preset.load(out)
    assert capsys.readouterr().out == f"{preset!r}\n\nwrote {out}\n"
    assert preset.evidence["prompts"]["trials"] == 4
    assert 700 < preset.evidence["prompts"]["tokens"] <= 900 - ANSWER
    assert cli.main(["generate", *model, "--prompt", "The sea", "--pruning", str(out)]) == 0
    assert preset.label in capsys.readouterr().err
