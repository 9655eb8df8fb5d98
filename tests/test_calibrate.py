"""Calibration: what survives a stage, the schedules that lose least, trials; presets and their files."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import SHAPE, model_folder
from reference import Reference
from tiny import Tiny, build

import lazyllm
from lazyllm import LLM, Preset, Pruning
from lazyllm.calibration import calibrate as module
from lazyllm.calibration.curves import KEEPS, always_kept, lost_shares, stage_layers, surviving
from lazyllm.calibration.prompts import encoded, split
from lazyllm.calibration.schedule import Losses, Stages, Work, best_schedule, cheapest
from lazyllm.calibration.trials import best, results
from lazyllm.checkpoints import digest
from lazyllm.commands import main as cli
from lazyllm.evaluation.intervals import student_t
from lazyllm.evaluation.results import ITEMS, Key
from lazyllm.evaluation.runner import label_of
from lazyllm.evaluation.tasks import ItemPrompt, Task
from lazyllm.evaluation.trial import Trial
from lazyllm.pruning import SPEEDUP_SHAPES

LONG = replace(SHAPE, context=1100)
SPEEDUP = 1.5
ANSWER = 3  # tokens, in place of the 16 and 48 of a real calibration


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"), LONG)


def shorten(patch: pytest.MonkeyPatch) -> None:
    """A calibration with one generated prompt of each kind and length, and short answers."""
    for name, value in (("FOR_CURVES", 1), ("FOR_TRIALS", 1), ("TOKENS", ANSWER)):
        patch.setattr(module, name, value)
    patch.setattr("lazyllm.calibration.curves.TOKENS", ANSWER)
    patch.setattr("lazyllm.calibration.prompts.MAX_NEW_TOKENS", ANSWER)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch)


@pytest.fixture(scope="module")
def made(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> tuple[Preset, Path]:
    file = tmp_path_factory.mktemp("calibration") / "preset.json"
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch)
        return lazyllm.calibrate(llm, ["One", "Two", "Three"], SPEEDUP, out=file, progress=False), file


# ---- what survives a stage -------------------------------------------------------------------------


def test_surviving_by_hand() -> None:
    scores = np.array([0.0, 0.3, 0.1, 0.4, 0.2, 0.3])
    always = np.array([True, False, False, False, False, True])
    attention = np.array([[9.0, 1, 2, 3, 4, 9], [9.0, 0, 0, 0, 0, 9]])
    # always 0 and 5, then the best: 3, 1, 4, 2
    kept = surviving(scores, attention, always, [1.0, 0.8, 0.5, 0.34, 0.1])
    assert kept[:, 0].tolist() == pytest.approx([1.0, 0.8, 0.3, 0.3, 0.0])
    assert kept[:, 1].tolist() == [1.0] * 5
    ties = surviving(np.zeros(4), np.array([[1.0, 2, 3, 0]]), np.array([False] * 3 + [True]), [0.5])
    assert ties[0, 0] == pytest.approx(1 / 6)


class OnePrompt:
    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def prompt(self, *_: object) -> ItemPrompt:
        return ItemPrompt(self.ids, len(self.ids), False, "none")


def trial(dataset: str = "x") -> Trial:
    return Trial(Key("dense", dataset, "0"), Task(dataset, dataset, 1), {"_id": "0"}, Pruning())


def reference(tiny: Tiny, options: Pruning) -> Reference:
    return Reference(tiny.config, tiny.weights, options.core())


@pytest.mark.parametrize("windows", [(0,), (0, 24, 0)], ids=str)
def test_shares_lost_are_those_of_the_reference(tmp_path: Path, windows: tuple[int, ...]) -> None:
    """Attention and kept tokens by the NumPy reference, which shares no code with engine and calibration."""
    shape = replace(SHAPE, windows=windows, qkv_bias=len(windows) > 1)
    tiny = build(shape, tmp_path)
    llm = lazyllm.load(hugging_face(tmp_path / "model", shape), device="cpu", threads=1)
    ids = np.random.default_rng(5).integers(0, 250, 40).tolist()
    row = lost_shares(llm, OnePrompt(ids), trial())  # type: ignore[arg-type]
    n_layers, options = shape.n_layers, Pruning().recommended()
    every = reference(tiny, Pruning(dict.fromkeys(range(n_layers - 1), 1.0)))
    answer = llm.generate(ids, max_new_tokens=ANSWER).token_ids
    rows = []
    for new, generated in [(ids, False), *(([token], True) for token in answer[:-1])]:
        every.forward(new, generated)
        rows.append([np.asarray(run["scores"])[: len(ids)] for run in every.last_trace[:-1]])
    attention = np.mean(rows, axis=0)
    counts = ~always_kept(options, len(ids))

    assert row["prompt_tokens"] == len(ids)
    layers = stage_layers(llm.config)
    assert layers == [layer for layer in range(n_layers - 2) if not windows[layer % len(windows)]]
    for place, layer in enumerate(layers):
        for number, keep in enumerate(KEEPS[::4]):
            pruned = reference(tiny, replace(options, stages=((layer, keep),)))
            pruned.forward(ids)
            kept = np.isin(np.arange(len(ids)), pruned.last_trace[-1]["in_play"])
            for above in range(layer + 1, n_layers - 1):
                mine = attention[above] * counts
                lost = mine[~kept].sum() / mine.sum()
                assert row["lost"][place][4 * number][above - layer - 1] == pytest.approx(lost, abs=2e-4)


def hugging_face(folder: Path, shape: Any) -> Path:
    folder.mkdir()
    model_folder(folder, shape)
    if any(shape.windows):
        config = json.loads((folder / "config.json").read_text())
        kinds = [
            "sliding_attention" if shape.windows[layer % len(shape.windows)] else "full_attention"
            for layer in range(shape.n_layers)
        ]
        config |= {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "use_sliding_window": True,
            "sliding_window": max(shape.windows),
            "layer_types": kinds,
            "max_window_layers": 0,
        }
        (folder / "config.json").write_text(json.dumps(config))
    return folder


# ---- schedules -------------------------------------------------------------------------------------


def random_losses(seed: int) -> Losses:
    """Losses of stages after four of the seven layers of a model; smaller keeps lose more."""
    draws = np.random.default_rng(seed)
    layers, keeps = (0, 2, 3, 5), (0.8, 0.5, 0.3, 0.1)
    lost = draws.random((len(layers), len(keeps), 7)).cumsum(axis=1) / len(keeps)
    for place, layer in enumerate(layers):
        lost[place, :, : layer + 1] = 0
    return Losses(layers, keeps, lost)


def random_work(seed: int, losses: Losses) -> Work:
    draws = np.random.default_rng(seed + 100)
    dense = draws.random(losses.lost.shape[2])
    pruned = np.array([[keep * one for one in dense] for keep in losses.keeps])
    return Work(dense, pruned, draws.random(len(losses.layers)) / 10)


def by_hand(losses: Losses, work: Work, price: float, stages: Stages, lasting: bool) -> float:
    total = 0.0
    for layer in range(losses.lost.shape[2]):
        below = [(losses.layers.index(p), losses.keeps.index(k)) for p, k in stages if p < layer]
        total += price * (work.pruned[below[-1][1], layer] if below else work.dense[layer])
        for place, keep in below if lasting else below[-1:]:
            total += losses.lost[place, keep, layer] / losses.lost.shape[2]
    return total + price * sum(work.scores[losses.layers.index(p)] for p, _ in stages)


@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_the_cheapest_schedules_are_those_of_brute_force(seed: int, lasting: bool) -> None:
    losses = random_losses(seed)
    work = random_work(seed, losses)
    for price in (0.03, 0.3, 1.0):
        solved = list(cheapest(losses, work, price, lasting, max_stages=3))
        assert len(solved) == 3
        for count, (value, stages) in enumerate(solved, 1):
            every = [
                tuple(zip(layers, keeps, strict=True))
                for layers in combinations(losses.layers, count)
                for keeps in combinations(losses.keeps, count)
            ]
            least = min(by_hand(losses, work, price, one, lasting) for one in every)
            assert stages in every
            assert value == pytest.approx(least, rel=1e-12)
            assert by_hand(losses, work, price, stages, lasting) == pytest.approx(least, rel=1e-12)


def test_the_loss_of_a_schedule_is_that_of_its_worst_stage_in_each_layer() -> None:
    losses = random_losses(0)
    lost = losses.lost
    assert losses.of(()) == losses.of([(6, 0.1)]) == losses.of([(2, 1.0)]) == 0
    assert losses.of([(2, 0.5)]) == pytest.approx(lost[1, 1].mean())
    both = np.maximum(lost[1, 1], lost[3, 3])
    assert losses.of([(2, 0.5), (5, 0.1)]) == pytest.approx(both.mean())
    assert losses.of([(2, 0.4)]) == pytest.approx((lost[1, 1] + lost[1, 2]).mean() / 2)
    assert losses.of([(2, 0.9)]) == pytest.approx(lost[1, 0].mean() / 2)
    assert losses.from_layer(3).layers == (3, 5)
    assert losses.from_layer(3).of([(5, 0.3)]) == losses.of([(5, 0.3)])


def test_counted_work_adds_up_to_those_of_pruning(llm: LLM) -> None:
    options, n = Pruning(scoring=Scoring(queries=16, layers=2)), 1000
    losses = Losses((1, 3), (0.5, 0.2), np.zeros((2, 2, 6)))
    work = Work.counted(losses, llm.config, n, options)
    dense = Pruning().flops(llm.config, n)
    head = 1 - work.dense.sum()
    assert head * dense == pytest.approx(2 * llm.config.hidden * llm.config.vocab)
    whole = work.dense[:2].sum() + work.pruned[0, 2:4].sum() + work.pruned[1, 4:].sum() + head
    scored = replace(options, stages=((1, 0.5), (3, 0.2)))
    assert (whole + work.scores.sum()) * dense == pytest.approx(scored.flops(llm.config, n), rel=0.01)


@pytest.mark.parametrize("speedup", [1.2, 1.5, 2.0])
def test_a_schedule_just_reaches_the_speedup(llm: LLM, speedup: float) -> None:
    draws = np.random.default_rng(1)
    lost = np.sort(draws.random((4, len(KEEPS), 6)), axis=1)
    losses = Losses((0, 1, 2, 3), KEEPS, lost * (np.arange(6) > np.arange(4)[:, None])[:, None])
    stages = best_schedule(losses, llm.config, 1000, Pruning(), speedup)
    assert stages is not None
    assert speedup <= Pruning(stages).speedup(llm.config, 1000) <= 1.01 * speedup
    assert best_schedule(losses, llm.config, 1000, Pruning(), 100.0) is None
    assert best_schedule(losses.from_layer(4), llm.config, 1000, Pruning(), speedup) is None


def test_a_layer_that_keeps_what_matters_gets_the_stage(llm: LLM) -> None:
    lost = np.full((4, len(KEEPS), 6), 0.9) * (np.arange(6) > np.arange(4)[:, None])[:, None]
    lost[2] /= 30
    losses = Losses((0, 1, 2, 3), KEEPS, lost)
    stages = best_schedule(losses, llm.config, 1000, Pruning(), 1.4)
    assert [layer for layer, _ in stages or ()] == [2]


# ---- prompts and trials ----------------------------------------------------------------------------


def test_own_prompts_are_encoded_as_they_are_asked(llm: LLM) -> None:
    chat = [{"role": "user", "content": "Hello"}]
    own = encoded(llm, ["Hello", chat, [5, 6, 7], np.array([8])], new_tokens=4)
    through_template = llm.generate("Hello", chat=True, max_new_tokens=1).prompt_ids
    assert own == {
        "prompt 1": through_template,
        "prompt 2": through_template,
        "prompt 3": [5, 6, 7],
        "prompt 4": [8],
    }
    for_curves, kept_back = split(own)
    assert [*kept_back] == ["prompt 3"]
    assert [*for_curves] == ["prompt 1", "prompt 2", "prompt 4"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prompts": ["One", ""]}, "prompt 2: the prompt is empty"),
        ({"prompts": [[1, 2], [1, 999]]}, "prompt 2: token id 999"),
        ({"prompts": [[1] * 1098]}, "prompt 1 has 1098 tokens; with 3 of an answer .* context of 1100"),
        ({"prompts": [3.5]}, "prompt 1: "),
        ({"prompts": "One"}, "must be a list of prompts"),
        ({"lengths": [900, 1101]}, "length 1101 is more than the model's context of 1100"),
        ({"lengths": [50]}, "length 50 is too short"),
        ({"lengths": 900}, r"lengths must be a list such as \[1024, 2048\], not 900"),
        ({"lengths": []}, "lengths must be at least one number of tokens"),
        ({"lengths": [0]}, "a length must be from 1 to"),
        ({"speedup": 50}, "a speedup of 50 is out of reach"),
        ({"speedup": 0.5}, r"speedup must be at least 1, not 0\.5"),
        ({"out": "preset.txt"}, r"must be a file whose name ends with \.json, not .*preset\.txt"),
        ({"out": "nowhere/preset.json"}, r"no folder .*nowhere"),
    ],
)
def test_what_is_wrong_is_refused_before_work(
    llm: LLM, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    options = {**options, "out": tmp_path / options.get("out", "preset.json")}
    with pytest.raises((ValueError, TypeError, FileNotFoundError), match=words):
        lazyllm.calibrate(llm, **options, progress=False)
    assert list(tmp_path.iterdir()) == []


def test_lengths_are_those_of_the_generated_prompts(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "preset.json"
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))  # no folder beside `out` is needed
    preset = lazyllm.calibrate(llm, speedup=SPEEDUP, lengths=[900], out=out, progress=False)
    rows = [json.loads(line) for line in (tmp_path / "preset.calibration/trials" / ITEMS).open()]
    assert {row["dataset"].partition("@")[2] for row in rows} == {"900"}
    assert preset.evidence["prompts"]["tokens"] <= 900 - ANSWER


def test_results_of_trials_by_hand() -> None:
    baseline, other = Pruning({1: 0.9}), Pruning({1: 0.8})
    rows: list[dict[str, Any]] = []
    for item, scores, kl in (
        ("a", (1, 0, 1), (0.2, 0.1)),
        ("b", (1, 0.5, 1), (0.4, 0.1)),
        ("c", (), (0.6, 0.4)),
    ):
        for place, one in enumerate((Pruning(), baseline, other)):
            row: dict[str, Any] = {"setting": label_of(one), "dataset": "x", "item": item}
            row |= {"score": scores[place]} if scores else {}
            rows.append(row | ({"kl": kl[place - 1]} if place else {}))
    made = results(rows, [baseline, other])
    assert [*made] == [Pruning(), baseline, other]
    assert made[Pruning()] == {"needles": [100.0] * 3}
    assert made[baseline]["needles"] == pytest.approx([25.0, 0.0, 100.0])
    assert made[baseline]["needles_to_dense"] == pytest.approx([-75.0, -100.0, 100.0])
    assert made[other]["needles_to_dense"] == [0.0] * 3
    assert made[baseline]["kl"][0] == pytest.approx(0.4)
    value, low, high = made[other]["kl_to_baseline"]
    assert value == pytest.approx(-0.2)
    half = student_t(2) * 0.1 / math.sqrt(3)
    assert (low, high) == pytest.approx((-0.2 - half, half - 0.2), abs=1e-5)


def test_most_needles_win_then_the_least_divergence() -> None:
    def result(needles: float, kl: float) -> dict[str, Any]:
        return {"needles": [needles, None, None], "kl": [kl, None, None]}

    tried = {Pruning({1: keep}): result(*values) for keep, values in ((0.9, (50, 0.1)), (0.8, (60, 0.3)))}
    dense = {Pruning(): {"needles": [100, None, None]}}
    assert best({**dense, **tried}) == Pruning({1: 0.8})
    assert best({**dense, **tried, Pruning({1: 0.7}): result(60, 0.2)}) == Pruning({1: 0.7})


# ---- the whole -------------------------------------------------------------------------------------


def test_a_calibration_gives_a_preset_with_its_evidence(llm: LLM, made: tuple[Preset, Path]) -> None:
    preset, file = made
    assert preset.model == llm.config.name
    assert preset.speedup == pytest.approx(preset.pruning.speedup(llm.config, 1040), rel=0.02)
    assert preset.speedup >= SPEEDUP
    assert preset.pruning.recommended() == preset.pruning
    assert preset.versions["lazyllm"] == lazyllm.__version__
    evidence = preset.evidence
    # three kinds of needles at 1024 and at 1100 tokens, and two of the own prompts or the one kept back
    assert evidence["prompts"]["curves"] == 8
    assert evidence["prompts"]["trials"] == 7
    dense, baseline, *others = evidence["candidates"]
    assert dense["pruning"]["stages"] == {}
    n = evidence["prompts"]["tokens"]
    for_speedup = Pruning.of_shapes(
        SPEEDUP_SHAPES, SPEEDUP, llm.config, n, lambda schedule: schedule.recommended(n)
    )
    assert Pruning.from_fields(baseline["pruning"]) == for_speedup
    assert all(SPEEDUP <= one["speedup"] <= 1.01 * SPEEDUP for one in (baseline, *others))
    assert preset.pruning in [Pruning.from_fields(one["pruning"]) for one in evidence["candidates"][1:]]
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(file.read_text())["pruning"] == json.loads(preset.pruning.to_json())
    text = repr(preset)
    assert all(word in text for word in (str(preset.pruning), preset.model, "* {", "KL from dense"))


def test_curves_are_those_of_the_worst_prompts(made: tuple[Preset, Path], llm: LLM) -> None:
    preset, file = made
    folder = file.with_suffix(".calibration") / "curves"
    rows = [json.loads(line) for line in (folder / ITEMS).read_text().splitlines()]
    curves = preset.evidence["curves"]
    for place in range(len(curves["layers"])):
        lost = np.array([row["lost"][place] for row in rows])
        two_worst = np.sort(lost, axis=0)[-2:].mean(axis=0)  # of eight prompts
        kept = 1 - two_worst.mean(axis=1)
        assert curves["kept"][place] == pytest.approx(kept, abs=1e-4)


def test_an_interrupted_calibration_goes_on(
    llm: LLM, made: tuple[Preset, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preset, _ = made
    ran: list[str] = []

    def stop_after(count: int) -> None:
        def measured(llm: LLM, tasks: Any, one: Trial) -> dict[str, Any]:
            if len(ran) == count:
                raise KeyboardInterrupt
            ran.append(one.key.item)
            return lost_shares(llm, tasks, one)

        monkeypatch.setattr(module, "lost_shares", measured)

    def again() -> Preset:
        return lazyllm.calibrate(
            llm, ["One", "Two", "Three"], SPEEDUP, out=tmp_path / "preset.json", progress=False
        )

    stop_after(3)
    with pytest.raises(KeyboardInterrupt):
        again()
    assert not (tmp_path / "preset.json").exists()
    stop_after(100)
    assert again() == preset
    assert len(ran) == len({*ran}) == 8
    assert again() == preset
    assert len(ran) == 8
    with pytest.raises(ValueError, match=r"an item prompt 1 of own prompts whose content is not that"):
        lazyllm.calibrate(llm, ["Other"], SPEEDUP, out=tmp_path / "preset.json", progress=False)


def test_a_failed_item_ends_a_calibration_by_name(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> dict[str, Any]:
        raise ValueError("broken")

    monkeypatch.setattr(module, "lost_shares", failing)
    with pytest.raises(RuntimeError, match=r"niah_single_2@1024, .*: ValueError: broken"):
        lazyllm.calibrate(llm, speedup=SPEEDUP, progress=False)


# ---- presets ---------------------------------------------------------------------------------------


def test_a_preset_comes_back_from_its_file(made: tuple[Preset, Path], tmp_path: Path) -> None:
    preset, file = made
    again = Preset.load(preset.save(tmp_path / "copy.json"))
    assert again == preset == Preset.load(file)
    assert (again.versions, json.dumps(again.evidence)) == (preset.versions, json.dumps(preset.evidence))
    assert hash(again) == hash(preset)
    assert repr(again) == repr(preset)
    assert again._repr_html_().count("<tr>") == 1 + len(preset.evidence["candidates"])


def test_a_preset_is_a_setting_everywhere(llm: LLM, made: tuple[Preset, Path], tmp_path: Path) -> None:
    preset, file = made
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
    other = replace(preset, pruning=Pruning({1: 0.5, 4: 0.2}))  # a stage without a curve is drawn too
    assert other.plot(tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(FileNotFoundError, match=r"nowhere\.json"):
        llm.session("nowhere.json")
    swept = lazyllm.sweep(
        llm, [str(file)], datasets=["niah_single_1"], max_length=600, limit=1, warm_ups=0, progress=False
    )
    assert swept[1].setting == str(preset.pruning)
    assert swept[1].pruning == preset
    assert swept[1].counted_speedup > 1


def test_a_preset_shows_no_bar_where_none_is_wanted(
    llm: LLM,
    made: tuple[Preset, Path],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for open_it in (
        lambda progress: llm.generate(["Hi"], made[0], max_new_tokens=1, progress=progress),
        lambda progress: llm.stream("Hi", made[0], max_new_tokens=1, progress=progress).finished(),
        lambda progress: llm.session(made[0], progress=progress),
    ):
        for progress in (False, True):
            monkeypatch.setattr(digest, "_known", {})  # hashed anew
            open_it(progress)
            assert ("hashing the model" in capfd.readouterr().err) == progress


def test_another_model_warns_by_name(
    llm: LLM, made: tuple[Preset, Path], tmp_path: Path, folder: Path
) -> None:
    other_folder = tmp_path / "other"
    other_folder.mkdir()
    other = lazyllm.load(model_folder(other_folder, replace(LONG, seed=9)), device="cpu", threads=1)
    preset, _ = made
    with pytest.warns(UserWarning, match=f"was made for {preset.model}, not for other;"):
        other.session(preset)
    same_name = replace(preset, model="other")
    with pytest.warns(UserWarning, match="was made for other, not for other with other weights"):
        other.session(same_name)
    renamed = tmp_path / "renamed"
    renamed.symlink_to(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lazyllm.load(renamed, threads=1).session(preset)


def changed(file: Path, **fields: Any) -> str:
    return json.dumps({**json.loads(file.read_text()), **fields})


BAD: dict[str, Any] = {
    "is not JSON": lambda file: "{",
    "holds a list": lambda file: "[]",
    "is no preset of format 1": lambda file: '{"10": 0.7}',
    "is no preset of format": lambda file: changed(file, format=2),
    "has no sha256": lambda file: json.dumps(
        {name: value for name, value in json.loads(file.read_text()).items() if name != "sha256"}
    ),
    "has no field 'extra'; it has pruning, speedup": lambda file: changed(file, extra=1),
    "keep of the stage at layer 1 must be": lambda file: changed(file, pruning={"1": 2}),
    "speedup must be a number": lambda file: changed(file, speedup="2"),
    "model must be text, not 3": lambda file: changed(file, model=3),
    "versions must be an object": lambda file: changed(file, versions=[]),
    "evidence is not as calibrate or search writes it": lambda file: changed(file, evidence={}),
    "evidence is not as .*kept needs": lambda file: changed(
        file,
        evidence={
            **json.loads(file.read_text())["evidence"],
            "curves": {"layers": [1], "keeps": [0.5], "kept": [[1, 2]]},
        },
    ),
}


@pytest.mark.parametrize("words", BAD)
def test_a_bad_file_is_refused_by_name(made: tuple[Preset, Path], tmp_path: Path, words: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(BAD[words](made[1]))
    with pytest.raises(ValueError, match=f"bad.json.*{words}"):
        Preset.load(path)


# ---- the command -----------------------------------------------------------------------------------


def test_the_command_writes_a_preset_that_generate_takes(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt, out = tmp_path / "prompt.txt", tmp_path / "preset.json"
    prompt.write_text("One prompt")
    model = ["--model", str(folder), "--threads", "1"]
    more = ["--speedup", str(SPEEDUP), "--prompt-file", str(prompt), "--out", str(out)]
    assert cli.main(["calibrate", *model, *more]) == 0
    preset = Preset.load(out)
    assert capsys.readouterr().out == f"{preset!r}\n\nwrote {out}\n"
    assert preset.evidence["prompts"]["curves"] == 7
    assert cli.main(["generate", *model, "--prompt", "The sea", "--pruning", str(out)]) == 0
    assert str(preset.pruning) in capsys.readouterr().err
    assert cli.main(["calibrate", *model, "--out", str(tmp_path / "preset.txt")]) == cli.USAGE_ERROR
    assert "ends with .json" in capsys.readouterr().err
