"""Sweeps: the divergence from dense, spaces, what is written, the Pareto front and the best setting."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import markdown, untimed

import lazyllm
from lazyllm.commands import main as cli
from lazyllm.evaluation.generated.tasks import TASKS as RULER
from lazyllm.evaluation.generated.tasks import generate, prompt_encoder
from lazyllm.evaluation.measures import forced_logits, greedy_answer, kl_divergence
from lazyllm.evaluation.results import ITEMS, MANIFEST, new_manifest, opened_run
from lazyllm.evaluation.summary import Interval
from lazyllm.pruning import Pruning
from lazyllm.sampling import log_softmax
from lazyllm.scoring import Scoring
from lazyllm.sweeps.points import Frame, Point, front, plot_points
from lazyllm.sweeps.sweep import settings_of

SPACE = {"stages": [{1: 0.6, 3: 0.3}, {2: 0.9}], "smooth": [1, 3]}
TASKS = {"datasets": ["niah_single_1", "niah_single_2"], "max_length": 560, "limit": 2, "wrapper": "none"}
OWN = {"datasets": None, "max_length": None, "limit": None, "prompts": ["x"]}


def sweep(llm: lazyllm.LLM, space: Any, **options: Any) -> lazyllm.Sweep:
    return lazyllm.sweep(llm, space, **{**TASKS, "warm_ups": 0, "progress": False, **options})


@pytest.fixture(scope="module")
def swept(llm: lazyllm.LLM, tmp_path_factory: pytest.TempPathFactory) -> lazyllm.Sweep:
    return sweep(llm, SPACE, out=tmp_path_factory.mktemp("sweep"))


def first_of(llm: lazyllm.LLM, result: lazyllm.Sweep, setting: str) -> tuple[list[int], dict[str, Any]]:
    """The token ids of the first item of niah_single_2, and its row."""
    encode = prompt_encoder(llm.tokenizer, "none")
    (item,) = generate("niah_single_2", encode, 560, 1, 0)
    ids = encode(RULER["niah_single_2"].template.format(**item), item["answer_prefix"])
    (row,) = (row for row in result.rows if (row["setting"], row["item"]) == (setting, item["_id"]))
    return ids, dict(row)


# ---- the divergence ------------------------------------------------------------------------------


def test_divergence_by_hand() -> None:
    p, q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.25, 0.5])
    by_hand = 0.5 * math.log(2) + 0.25 * math.log(1) + 0.25 * math.log(0.5)
    back = 0.25 * math.log(0.5) + 0.5 * math.log(2)
    shifted = np.stack([np.log(p) + 300, np.log(q) - 300]), np.log(np.stack([q, p]))
    assert kl_divergence(*shifted) == pytest.approx([by_hand, back], rel=1e-12)


def test_divergence_is_in_double_precision_and_never_below_zero() -> None:
    logits = np.random.default_rng(0).normal(0, 4, (50, 300)).astype(np.float32)
    near = np.nextafter(logits, np.float32(99))
    assert log_softmax(logits).dtype == np.float64
    assert (kl_divergence(logits, logits) == 0).all()
    assert (kl_divergence(logits, near) >= 0).all()
    assert kl_divergence(logits, near).max() < 1e-12
    far = np.array([0.0, -2000.0], np.float32)
    assert kl_divergence(far, far) == 0
    assert kl_divergence(np.zeros(2), far) == pytest.approx(1000 - math.log(2))


def test_the_answer_forced_is_the_one_that_dense_generates(llm: lazyllm.LLM) -> None:
    ids = list(range(5, 90))
    answer, logits = greedy_answer(llm.session(), ids, 12, llm.eos_token_ids)
    assert answer == llm.generate(ids, max_new_tokens=12).token_ids
    assert (logits == np.array(list(forced_logits(llm.session(), ids, answer)))).all()
    assert greedy_answer(llm.session(), ids, 12, {answer[3]})[0] == answer[: answer.index(answer[3]) + 1]
    other, before = greedy_answer(llm.session(), ids, 12, {answer[0]}, never_first=[answer[0]])
    assert other[0] == logits[0].argsort()[-2]
    assert (before[0] == logits[0]).all()
    assert greedy_answer(llm.session(), ids, 12, {answer[0]})[0] == answer[:1]


def test_divergence_of_a_line_is_that_of_its_logits(llm: lazyllm.LLM, swept: lazyllm.Sweep) -> None:
    setting = Pruning({1: 0.6, 3: 0.3})
    ids, row = first_of(llm, swept, setting.label)
    answer = llm.generate(ids, max_new_tokens=16).token_ids
    dense, pruned = (np.array(list(forced_logits(llm.session(method), ids, answer))) for method in (None, setting))
    assert row["forced_tokens"] == len(answer)
    assert row["kl"] == pytest.approx(kl_divergence(dense, pruned).mean())
    assert row["kl_by_token"] == pytest.approx(kl_divergence(dense, pruned), abs=1e-6)
    assert row["agreement"] == (dense.argmax(1) == pruned.argmax(1)).mean()
    assert row["flops"] == setting.flops(llm.config, len(ids))
    session = llm.session(setting)
    for token in [ids, *([token_id] for token_id in answer[:-1])]:
        session.forward(token, generated=token is not ids)
    assert row["computed"] == pytest.approx(session.computed, abs=1e-6)
    assert row["reached_top"] == pytest.approx(session.reached_top, abs=1e-6)


def test_a_users_prompts_are_measured_by_their_divergence(llm: lazyllm.LLM, tmp_path: Path) -> None:
    setting, ids = Pruning({1: 0.6, 3: 0.3}), list(range(5, 90))
    run = partial(lazyllm.sweep, llm, setting, tokens=5, out=tmp_path, warm_ups=0, progress=False)
    made = run(prompts=[ids, ids[10:]])
    for row, given in zip(made.rows[1::2], (ids, ids[10:]), strict=True):
        answer = llm.generate(given, max_new_tokens=5).token_ids
        dense, pruned = (np.array(list(forced_logits(llm.session(it), given, answer))) for it in (None, setting))
        assert (row["dataset"], row["setting"]) == ("own prompts", setting.label)
        assert row["kl"] == pytest.approx(kl_divergence(dense, pruned).mean())
    assert made[setting.label].prompts == 2
    assert len(run(prompts=[ids, ids[10:], ids[20:]]).rows) == 6
    with pytest.raises(ValueError, match="prompt 1"):
        run(prompts=[ids[1:]])


def test_dense_lies_at_zero_and_agrees_with_itself(swept: lazyllm.Sweep) -> None:
    rows = [row for row in swept.rows if row["setting"] == "dense"]
    assert len(rows) == 4
    assert all(row["kl"] == 0 and row["agreement"] == 1 for row in rows)
    assert swept["dense"].kl == Interval(0, 0, 0)
    assert swept["dense"].counted_speedup == swept["dense"].ttft_speedup == 1
    strong, weak = swept["{1: 0.6, 3: 0.3}"], swept["{2: 0.9}"]
    assert strong.kl.value > weak.kl.value > 0
    assert strong.counted_speedup > weak.counted_speedup > 1


def test_tokens_dropped_after_the_last_layer_count_in_answers_of_one_token(llm: lazyllm.LLM) -> None:
    rows = sweep(llm, ["snapkv:keep=0.5", "snapkv:keep=1"], tokens=1, limit=1).rows
    marked = {row["setting"]: row["changed_nothing"] for row in rows}
    assert marked == {"dense": False, "SnapKV(keep=0.5)": False, "SnapKV(keep=1.0)": True}


# ---- spaces --------------------------------------------------------------------------------------


def test_axes_are_combined_and_dense_comes_first(llm: lazyllm.LLM, swept: lazyllm.Sweep) -> None:
    scorings = [Scoring(smooth=smooth) for smooth in (1, 3)]
    pruned = [Pruning(stages, scoring=scoring) for stages in ({1: 0.6, 3: 0.3}, {2: 0.9}) for scoring in scorings]
    assert [point.pruning for point in swept] == [Pruning(), *pruned]
    one_stage = settings_of({"keep": np.array([0.25, 0.5]), "layer": range(2), "sink": (4,)})
    stages = [{0: 0.25}, {1: 0.25}, {0: 0.5}, {1: 0.5}]
    assert list(one_stage.values()) == [Pruning(), *(Pruning(stage, sink=4) for stage in stages)]


def test_a_wrong_space_or_option_is_refused_before_work_starts(llm: lazyllm.LLM, tmp_path: Path) -> None:
    for space, options, words in (
        ({"stages": [{1: 0.5}], "smoth": [1]}, {}, "no field 'smoth'; its fields are stages"),
        ({"smooth": [1, 3]}, {}, 'either "stages" or both "layer" and "keep".*it has smooth'),
        ({"stages": [{1: 0.5}], "keep": [0.5], "layer": [1]}, {}, "it has stages, keep, layer"),
        ({"stages": {1: 0.5}}, {}, r"stages must be a list of values to try, such as \[\{1: 0.5\}\]"),
        ({"layer": [1], "keep": 0.5}, {}, r"keep must be a list of values to try, such as \[0.5\], not 0.5"),
        ({"stages": [{1: 0.5}], "smooth": []}, {}, "no setting is given"),
        ({"stages": [{1: 0.5}], "smooth": [1, 2]}, {}, "smooth must be odd"),
        ({"layer": [1, 5], "keep": [0.5]}, {}, "layer 5 is out of reach: it must be below 5"),
        ({"layer": [1, 1], "keep": [0.5]}, {}, "given twice"),
        (["dense"], {}, "holds dense alone"),
        (SPACE, {"measure": "f1"}, "measure must be kl, score or both, not 'f1'"),
        (SPACE, {"tokens": 0}, "tokens must be from 1"),
        (SPACE, {"datasets": ["niah_single"]}, "did you mean niah_single"),
        (SPACE, {"templates": "x"}, "templates is for LongBench's own items"),
        (SPACE, {**OWN, "prompts": "x"}, "prompts must be a list such as"),
        (SPACE, {**OWN, "measure": "score"}, "have no scores"),
        (SPACE, {**OWN, "prompts": []}, "one at least"),
        (SPACE, {**OWN, "limit": 3}, "limit is for LongBench's items"),
        (SPACE, {**OWN, "prompts": [[1] * 590]}, "prompt 1 has 590 tokens; with 16 of an answer"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            sweep(llm, space, out=tmp_path / "sweep", **options)
        assert not (tmp_path / "sweep").exists()


# ---- what is written -----------------------------------------------------------------------------


def test_a_sweep_is_a_folder_with_a_report(swept: lazyllm.Sweep) -> None:
    assert swept.folder is not None
    names = {path.name for path in swept.folder.iterdir()}
    assert names >= {MANIFEST, ITEMS, "report.md", "settings.csv", "pareto.png"}
    report = (swept.folder / "report.md").read_text(encoding="utf-8")
    assert all(f"| {point.setting} | " in report for point in swept)
    assert "![](pareto.png)" in report
    assert "- forced tokens: 16" in report
    assert "score" not in swept.table.heads


def test_a_sweep_that_was_cut_short_goes_on(llm: lazyllm.LLM, swept: lazyllm.Sweep, tmp_path: Path) -> None:
    assert swept.folder is not None
    lines = (swept.folder / ITEMS).read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / MANIFEST).write_bytes((swept.folder / MANIFEST).read_bytes())
    (tmp_path / ITEMS).write_text("".join(lines[:7]) + lines[7][:20], encoding="utf-8")
    resumed = sweep(llm, SPACE, out=tmp_path)
    assert untimed(resumed.rows) == untimed(swept.rows)
    assert resumed.rows[:7] == swept.rows[:7]
    again = lazyllm.Sweep.read(tmp_path)
    assert (again.rows, repr(again)) == (resumed.rows, repr(resumed))
    assert [point.pruning for point in again] == [point.pruning for point in resumed]


def test_a_folder_of_another_measure_is_refused(swept: lazyllm.Sweep, llm: lazyllm.LLM, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match='measure is "kl", not "both"; forced tokens is 16, not 8'):
        sweep(llm, SPACE, out=swept.folder, tokens=8, measure="both")
    manifest = new_manifest("x", {"measure": "attention"}, {})
    with opened_run(tmp_path, manifest), pytest.raises(ValueError, match="no sweep, but the measure 'attent"):
        lazyllm.Sweep.read(tmp_path)


def test_a_sweep_without_a_folder_leaves_none(
    llm: lazyllm.LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    result = sweep(llm, ["static:layer=1,keep=0.5"], limit=1)
    assert list(tmp_path.iterdir()) == []
    assert result.folder is None
    with pytest.raises(ValueError, match="give the sweep one with out="):
        result.report()
    assert result.plot().name == "pareto.png"
    assert (tmp_path / "pareto.png").read_bytes().startswith(b"\x89PNG")


def test_scores_come_beside_the_divergence(llm: lazyllm.LLM, swept: lazyllm.Sweep) -> None:
    both = sweep(llm, SPACE, measure="both", max_new_tokens=4, limit=2)
    score = sweep(llm, SPACE, measure="score", max_new_tokens=4, limit=2)
    assert [row["kl"] for row in both.rows] == [row["kl"] for row in swept.rows]
    assert [row["prediction"] for row in both.rows] == [row["prediction"] for row in score.rows]
    assert [point.counted_speedup for point in score] == [point.counted_speedup for point in swept]
    pairs = zip(untimed(swept.rows), untimed(score.rows), strict=True)
    assert untimed(both.rows) == [{**forced, **scored} for forced, scored in pairs]
    assert "KL" not in score.table.heads
    assert {"KL", "score"} <= set(both.table.heads)
    assert not any(math.isnan(point.score.value) for point in both)


def test_methods_compared_with_are_measured_too(llm: lazyllm.LLM) -> None:
    result = sweep(llm, ["random:keep=0.5", lazyllm.StaticPruning(1, 0.5), "compress:ratio=0.5"], limit=1)
    _, random, static, compress = result
    assert not result.summary.failed
    assert all(point.kl.value > 0 for point in (random, static, compress))
    assert random.counted_speedup > static.counted_speedup > 1
    assert math.isnan(compress.counted_speedup)
    assert random.computed == pytest.approx(0.5, abs=0.002)


def test_an_item_that_fails_counts_nowhere(llm: lazyllm.LLM, tmp_path: Path) -> None:
    result = sweep(llm, [Pruning({1: 0.5})], tokens=300, out=tmp_path)
    assert len(result.summary.failed) == len(result.rows) == 8
    assert all("the model's context is 600" in row["error"] for row in result.rows)
    assert [point.failed for point in result] == [4, 4]
    assert "Failed items" in (tmp_path / "report.md").read_text(encoding="utf-8")
    assert len(result.pareto()) == 0
    with pytest.raises(ValueError, match="no result of dense"):
        result.best()


# ---- what it comes to ----------------------------------------------------------------------------


def exact(value: float) -> Interval:
    return Interval(value, value, value)


def point(setting: str, kl: float, speedup: float, agreement: float = 1.0, score: float = math.nan) -> Point:
    quality = {"score": exact(score), "kl": exact(kl), "agreement": exact(agreement)}
    return Point(setting, Pruning(), 2, **quality, ttft_speedup=speedup)


POINTS = [point("dense", 0.0, 1.0), point("slow", 0.0, 0.9), point("good", 0.01, 2.0, 0.99)]
POINTS += [point("beaten", 0.02, 2.0, 0.995), point("fast", 0.2, 3.0, 0.9), point("twin", 0.2, 3.0, 0.9)]
POINTS += [point("unmeasured", 0.0, math.nan)]


def names(points: Sequence[Point]) -> list[str]:
    return [point.setting for point in points]


def test_the_front_is_what_nothing_beats() -> None:
    assert names(front(POINTS)) == ["dense", "good", "fast", "twin"]
    assert names(front(list(reversed(POINTS)))) == ["dense", "good", "twin", "fast"]
    scores = (40, 41, 30, 39, 20, 20, 99)
    scored = [replace(point, score=exact(score)) for point, score in zip(POINTS, scores, strict=True)]
    assert names(front(scored)) == ["slow", "dense", "beaten", "fast", "twin"]


def best_of(points: list[Point], max_drop: float) -> str:
    result = object.__new__(lazyllm.Sweep)
    result.compared = Frame(points)
    return result.best(max_drop).setting


def test_settings_are_compared_on_the_prompts_that_all_have(swept: lazyllm.Sweep) -> None:
    """One setting has a prompt less than the others: without it, dense and the others change too."""
    short = swept[1].setting
    lost = next(row for row in swept.rows if row["setting"] == short)
    rest = [row for row in swept.rows if row is not lost]
    result = lazyllm.Sweep(rest, swept.manifest, None, {point.setting: point.pruning for point in swept})
    assert [point.prompts for point in result] == [3 if point.setting == short else 4 for point in result]
    assert [point.prompts for point in result.compared] == [3] * len(result)
    gone = lost["dataset"], lost["item"]
    for point in result.pareto():
        rows = [row for row in rest if row["setting"] == point.setting]
        kl = [row["kl"] for row in rows if (row["dataset"], row["item"]) != gone]
        assert point.kl.value == pytest.approx(np.mean(kl))
    assert [point.kl for point in swept.compared] == [point.kl for point in swept]


def test_the_best_is_the_fastest_within_the_drop() -> None:
    scored = [point("dense", 0, 1, score=40), point("a", 9, 2, 0, 39.5), point("b", 0, 3, 1, 38.5)]
    for points, drop, best in (
        (POINTS, 0.0, "dense"),
        (POINTS, 0.006, "beaten"),
        (POINTS, 0.0101, "good"),
        (POINTS, 0.2, "fast"),
        (scored, 0.01, "a"),
        (scored, 0.02, "b"),
    ):
        assert best_of(points, drop) == best
    for wrong in (-0.1, math.nan):
        with pytest.raises(ValueError, match="max_drop must be"):
            best_of(POINTS, wrong)


def test_intervals_and_median_are_over_prompts(swept: lazyllm.Sweep) -> None:
    point = swept[1]
    rows, dense = ([row for row in swept.rows if row["setting"] == name] for name in (point.setting, "dense"))
    kl = [row["kl"] for row in rows]
    assert point.prompts == len(kl) == 4
    half = 3.1824 * np.std(kl, ddof=1) / 2  # three degrees of freedom
    bounds = np.mean(kl), max(0.0, np.mean(kl) - half), np.mean(kl) + half
    assert point.kl == pytest.approx(bounds, rel=1e-4)
    assert point.kl_median == np.median(kl)
    assert point.agreement.high <= 1
    assert point.agreement.value == pytest.approx(np.mean([row["agreement"] for row in rows]))
    ttft, of_dense = (sum(row["timing"]["ttft"] for row in of) for of in (rows, dense))
    assert (point.ttft, point.ttft_speedup) == pytest.approx((ttft / 4, of_dense / ttft))


def test_a_frame_prints_and_turns_into_pandas(swept: lazyllm.Sweep, tmp_path: Path) -> None:
    import pandas

    frame = swept.to_frame()
    frame.to_parquet(tmp_path / "sweep.parquet")
    read = pandas.read_parquet(tmp_path / "sweep.parquet")["pruning"]
    assert [lazyllm.parse_method(text) for text in read] == [point.pruning for point in swept]
    assert list(frame["setting"]) == names(swept)
    assert list(frame["kl"]) == [point.kl.value for point in swept]
    columns = "kl_low kl_high agreement ttft ttft_speedup counted_speedup computed reached_top"
    assert set(columns.split()) <= set(frame.columns)
    assert "score" not in frame.columns
    lines = repr(swept).splitlines()
    assert len(lines) == 1 + len(swept)
    assert len({len(line) for line in lines}) == 1
    assert repr(swept) in swept.text()
    assert lines[0].split("  ")[0] == "setting"
    assert "<td>{2: 0.9}</td>" in swept._repr_html_()
    assert names(swept.pareto()) == names(front(swept))
    assert swept["{2: 0.9}"] is swept[3]
    assert repr(swept[3]).splitlines()[1].startswith("{2: 0.9}  ")
    assert swept[np.int64(1)] == swept[1]
    with pytest.raises(KeyError, match="not among the settings dense, "):
        swept["nonsense"]


def test_a_picture_of_any_points(tmp_path: Path) -> None:
    for points in POINTS, [], POINTS[-1:], [point("dense", 0, 1, score=50)]:
        file = plot_points(points, "title", tmp_path / "p.png")
        assert file.read_bytes().startswith(b"\x89PNG")
        file.unlink()


@pytest.mark.usefixtures("no_bars")
def test_the_command_prints_the_table(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["sweep", "--model", str(folder), "--out", str(tmp_path / "out"), "--threads", "1"]
    call += ["--wrapper", "none", "--datasets", "niah_single_1", "--limit", "1", "--max-length", "560"]
    call += ["--tokens", "3"]
    assert cli.main([*call, "--space", '{"layer": [1, 2], "keep": [0.5]}']) == 0
    out = capsys.readouterr().out
    assert "{2: 0.5}  " in out
    assert "Conditions" not in out
    assert not markdown(out)
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text(encoding="utf-8"))
    assert list(manifest["conditions"]["settings"]) == ["dense", "{1: 0.5}", "{2: 0.5}"]
    assert cli.main([*call, "--pruning", '{"1": 0.5}', "--pruning", '{"2": 0.5}']) == 0
    for wrong, words in (
        ([], "give --space, or --speedup or --pruning"),
        (["--space", "{}", "--pruning", "dense"], "give --space, or --speedup or --pruning"),
        (["--space", "{"], "--space is not JSON"),
    ):
        assert cli.main([*call, *wrong]) == 2
        assert words in capsys.readouterr().err
