"""Runs of LongBench: what is written, resumed after kills, refused under other conditions, reported."""

import json
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from folders import PROMPTS, benchmark, benchmark_item, model_folder, untimed

import lazyllm
from lazyllm import longbench
from lazyllm.evaluation.longbench.tasks import LongBench, find_templates
from lazyllm.evaluation.results import ITEMS, MANIFEST, Manifest, new_manifest, opened_run, read_rows
from lazyllm.evaluation.summary import token_use_by_setting

pytestmark = pytest.mark.usefixtures("no_pictures")
CELL = {"setting": "a", "dataset": "b", "item": "ü", "content": "1"}
SETTINGS = ["dense", '{"1": 0.5, "3": 0.2}', '{"2": 0.9}']


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return benchmark(tmp_path_factory.mktemp("longbench"), 4)


def change(file: Path, fields: dict[str, Any]) -> None:
    """Replaces fields of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def manifest(conditions: dict[str, Any]) -> Manifest:
    return new_manifest("a model", conditions, {})


def run(llm: lazyllm.LLM, data: Path | None, out: Path, **options: Any) -> longbench.Run:
    asked = {"pruning": SETTINGS, "max_length": 80, "warm_ups": 0, "progress": False, **options}
    return longbench.run(llm, asked.pop("pruning"), data=data, out=out, **asked)


# ---- what is written -----------------------------------------------------------------------------


def test_every_item_has_a_line_for_every_setting(
    llm: lazyllm.LLM, data: Path, tmp_path: Path, no_pictures: Callable[[], None]
) -> None:
    no_pictures()
    made = run(llm, data, tmp_path)
    assert len(made.rows) == len(PROMPTS) * 4 * len(SETTINGS)
    for row in made.rows:
        assert 0 <= row["score"] <= 1
        assert 0 < row["timing"]["ttft"] <= row["timing"]["seconds"]
        assert row["prompt_tokens"] > 0
        assert row["new_tokens"] <= 6
        assert 0 < row["reached_top"] <= row["computed"] <= 1
    pruned = next(row for row in made.rows if row["setting"] != "dense")
    assert list(pruned["used"]) == ["0", "2", "4"]
    assert made.manifest["conditions"]["prompts"] == dict.fromkeys(PROMPTS, "not official")
    assert made.summary.items == dict.fromkeys(PROMPTS, 4)
    assert set(made.scores()) == {row["setting"] for row in made.rows}
    frame = made.to_frame()
    assert frame["score"].tolist() == [row["score"] for row in made.rows]
    frame.to_parquet(tmp_path / "rows.parquet")
    text = (tmp_path / "report.md").read_text()
    assert "paired difference to dense" in text
    assert repr(made) == f"<Run {tmp_path}: {made.heading}>"
    table = made.text().split("\n\n")[2].splitlines()
    assert len({len(line) for line in table}) == 1
    for name in ("scores.csv", "speed.csv", "scores.png"):
        assert (tmp_path / name).stat().st_size > 100
    before = (tmp_path / ITEMS).read_bytes()
    run(llm, data, tmp_path)
    assert (tmp_path / ITEMS).read_bytes() == before


def test_settings_that_change_nothing_are_marked(llm: lazyllm.LLM, data: Path, tmp_path: Path) -> None:
    settings: dict[Any, bool] = {
        None: False,
        lazyllm.Pruning({1: 0.5}): False,
        lazyllm.Pruning({1: 0.5}, min_tokens=1000): True,
        lazyllm.Pruning(decode={1: 0.5}): False,  # prefill is dense's, what follows is not
        lazyllm.Pruning({1: 1.0}): True,
        lazyllm.StaticPruning(1, 0.5): False,
        lazyllm.StaticPruning(1, 1.0): True,
        lazyllm.SnapKV(0.5): False,  # prefill is dense's here too
        lazyllm.RandomDrop(0.5): False,
        lazyllm.RandomDrop(1.0): True,
        lazyllm.PromptCompression(0.0): True,
    }
    made = run(llm, data, tmp_path, pruning=[*settings], datasets=["lcc"], limit=1, max_length=400)
    assert all(row["new_tokens"] > 1 for row in made.rows)
    marked = {row["setting"]: row["changed_nothing"] for row in made.rows}
    assert marked == {setting.label if setting else "dense": nothing for setting, nothing in settings.items()}
    assert sum(made.summary.values(setting, "changed_nothing").sum() for setting in made.summary.settings) == 5
    grows_to_it = made.rows[0]["prompt_tokens"] + 2  # with the answer
    late = lazyllm.Pruning({1: 0.5}, min_tokens=grows_to_it, prune_generated=True)
    grown = run(llm, data, tmp_path, pruning=late, datasets=["lcc"], limit=1, max_length=400).rows[-1]
    assert grown["changed_nothing"] is False


def test_compression_takes_what_the_cut_has_left_of_the_context(
    llm: lazyllm.LLM, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All settings see the same part of the document, and their counts are shares of the whole prompt."""
    monkeypatch.setattr(lazyllm.PromptCompression, "compress", lambda self, model, text: text[: len(text) // 2])
    settings = ["dense", "compress:ratio=0.5"]
    options: dict[str, Any] = {"datasets": ["qasper"], "limit": 1, "wrapper": "none"}
    dense, shorter = run(llm, data, tmp_path, pruning=settings, **options).rows
    assert dense["cut"]
    assert shorter["cut"]
    assert dense["prompt_tokens"] == shorter["prompt_tokens"] == dense["used"]["0"][0] == 80
    prompt = find_templates(data).prompt(benchmark_item("qasper", 0)).encode()  # one token for each byte
    left = (prompt[:40] + prompt[-40:]).decode()
    context = left.removeprefix("Read. ").removesuffix(" Question: where is the cat ? Answer:")
    n_left = shorter["used"]["0"][0]
    assert n_left == 80 - len(context) + len(context) // 2
    assert shorter["computed"] == shorter["reached_top"] == pytest.approx(n_left / 80, abs=1e-6)
    assert shorter["timing"]["compressing"] > 0
    assert not shorter["changed_nothing"]


def test_an_answer_on_samsum_begins_neither_with_an_end_nor_with_a_line_break(
    llm: lazyllm.LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The benchmark's script generates with min_length 1. Later both end the answer."""
    folder = benchmark(tmp_path / "data", 1)
    (folder / "samsum.jsonl").write_text(json.dumps(benchmark_item("samsum", 0)) + "\n")
    (folder / "dataset2prompt.json").write_text(json.dumps({"samsum": "{context}{input}"}))
    (folder / "dataset2maxlen.json").write_text(json.dumps({"samsum": 6}))
    prompt = llm.tokenizer.encode(benchmark_item("samsum", 0)["context"] + "where is the cat ?")
    ranked = [int(token) for token in llm.session().forward(prompt).argsort()[::-1]]
    end, newline, first = ranked[:3]
    encode = llm.tokenizer.encode

    def marked(text: str, add_special: bool = True) -> list[int]:
        return [newline] if text == "\n" else encode(text, add_special)

    monkeypatch.setattr(llm.tokenizer, "eos_token_ids", (end,))
    monkeypatch.setattr(llm.tokenizer, "encode", marked)
    options = {"pruning": None, "max_length": 400, "wrapper": "none", "datasets": ["samsum"]}
    (row,) = run(llm, folder, tmp_path / "run", **options).rows
    session = llm.session()
    session.forward(prompt)
    expected = [first]
    while len(expected) < 6 and expected[-1] not in (end, newline):
        expected.append(int(session.forward(expected[-1:], generated=True).argmax()))
    assert row["new_tokens"] == len(expected)
    assert row["prediction"] == llm.tokenizer.decode([i for i in expected if i not in (end, newline)])


def test_a_failed_item_is_an_error_row_and_the_same_call_runs_it_again(
    llm: lazyllm.LLM, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(name: str) -> Callable[..., Any]:
        whole = getattr(LongBench, name)

        def failing(*arguments: Any) -> Any:
            if arguments[3]["_id"] == "lcc-0":
                raise ValueError(f"no {name}")
            return whole(*arguments)

        return failing

    options: dict[str, Any] = {"pruning": None, "datasets": ["lcc"]}
    for name, warm_ups in (("prompt", 2), ("score", 0)):  # a prompt fails in the warm-up, too
        with monkeypatch.context() as patched:
            patched.setattr(LongBench, name, fails(name))
            result = run(llm, data, tmp_path / name, warm_ups=warm_ups, **options)
        (bad,) = result.summary.failed
        assert (bad["item"], bad["error"]) == ("lcc-0", f"ValueError: no {name}")
        assert "score" not in bad
        assert len(result.summary.rows) == 3
        assert "lcc-0" in (tmp_path / name / "report.md").read_text()
        other = run(llm, data, tmp_path / name, **{**options, "pruning": SETTINGS[2]})
        assert other.summary.failed == [bad]  # another setting leaves it
        again = run(llm, data, tmp_path / name, **options)
        assert len(again.summary.rows) == len(again.rows) == 8


def test_a_broken_device_or_model_ends_the_run(
    llm: lazyllm.LLM, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, error in (("score", lazyllm.DeviceError), ("prompt", lazyllm.CheckpointError), ("prompt", OSError)):

        def broken(*_: object, error: type[Exception] = error) -> float:
            raise error("the device is gone")

        with monkeypatch.context() as patched:
            patched.setattr(LongBench, place, broken)
            with pytest.raises(error, match="the device is gone"):
                run(llm, data, tmp_path, warm_ups=1)
        assert not read_rows(tmp_path)


def test_each_setting_is_warmed_at_its_own_length(
    llm: lazyllm.LLM, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, seen = lazyllm.LLM.generate, []

    def recording(self: lazyllm.LLM, prompt: Any, pruning: Any = None, **options: Any) -> Any:
        seen.append((pruning or lazyllm.Pruning(), len(prompt)))
        return whole(self, prompt, pruning, **options)

    monkeypatch.setattr(lazyllm.LLM, "generate", recording)
    made = run(llm, data, tmp_path, datasets=["qasper"], limit=2, warm_ups=2, max_length=400)
    length = made.rows[0]["prompt_tokens"]
    short = [(lazyllm.Pruning(), length)] * 2  # at most 512 tokens
    assert seen == [*short, *((lazyllm.parse_method(setting), length) for setting in SETTINGS)]
    assert "warm, after 2 short runs and one of each setting" in (tmp_path / "report.md").read_text()
    seen.clear()
    run(llm, data, tmp_path / "cold", datasets=["qasper"], limit=1)
    assert not seen


# ---- generated tasks -----------------------------------------------------------------------------


def test_niah_draws_a_heat_map_of_every_depth_and_length(
    llm: lazyllm.LLM, tmp_path: Path, no_pictures: Callable[[], None]
) -> None:
    no_pictures()
    places: dict[str, Any] = {"lengths": [550, 600], "depths": [0, 50, 100]}
    quiet: dict[str, Any] = {"wrapper": "none", "warm_ups": 0, "progress": False}
    result = longbench.run_niah(llm, SETTINGS[:2], out=tmp_path, **places, **quiet)
    assert len(result.rows) == 2 * 2 * 3
    assert all(row["prompt_tokens"] <= 600 - 128 for row in result.rows)
    assert (tmp_path / "heat_map.png").stat().st_size > 1000
    assert "![](heat_map.png)" in (tmp_path / "report.md").read_text()


def test_token_use_ends_at_what_the_cache_holds(llm: lazyllm.LLM, data: Path, tmp_path: Path) -> None:
    """It is left out where generated tokens are pruned too."""
    setting = SETTINGS[1]
    made = run(llm, data, tmp_path, datasets=["qasper"], limit=1, pruning=setting)
    row = made.rows[0]
    prompt = json.loads((data / "qasper.jsonl").read_text().splitlines()[0])
    ids = longbench.prompt_ids(llm.tokenizer, prompt, 80, templates=find_templates(data))
    session = llm.session(lazyllm.parse_method(setting))
    tokens = [int(session.forward(ids).argmax())]
    while len(tokens) < row["new_tokens"]:
        tokens.append(int(session.forward([tokens[-1]], generated=True).argmax()))
    depths = session.depths[session.kinds == 0]
    assert len(tokens) > 1
    assert list(row["used"]) == ["0", "2", "4"]
    for layer, series in row["used"].items():
        assert len(series) == len(tokens)
        assert series[-1] == (depths > int(layer)).sum()
    generated_too = lazyllm.Pruning({1: 0.5}, prune_generated=True)
    row = run(llm, data, tmp_path, pruning=generated_too, datasets=["lcc"], limit=1).rows[-1]
    assert row["used"] is None
    assert not token_use_by_setting([row])


# ---- refused -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(llm: lazyllm.LLM, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that other conditions leave as it is."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "matplotlib", None)
        return run(llm, data, tmp_path_factory.mktemp("finished"), limit=1).folder


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_length": 70}, "under other conditions than this one: max length is 80, not 70"),
        ({"max_new_tokens": 3}, "cap on new tokens is null, not 3"),
        ({"wrapper": "none"}, 'wrapper is "template", not "none"'),
        ({"edit_sim": "levenshtein"}, 'edit similarity is "difflib", not "levenshtein"'),
        ({"data": None, "datasets": ["niah_single_1"], "max_length": 560}, 'is "LongBench", not "ruler"'),
        ({"model": {"config.json": {"rms_norm_eps": 1e-4}}}, "model sha256 is"),
        ({"model": {"tokenizer_config.json": {"chat_template": "{{ messages }}"}}}, "tokenizer sha256 is"),
        ({"limits": 5}, "prompts sha256, qasper is"),
    ],
    ids=str,
)
def test_other_conditions_in_the_same_folder_are_refused(
    llm: lazyllm.LLM, data: Path, tmp_path: Path, finished: Path, options: dict[str, Any], words: str
) -> None:
    before = (finished / MANIFEST).read_bytes(), (finished / ITEMS).read_bytes()
    options = {"limit": 1, "data": data, **options}
    if "limits" in options:
        altered = options["data"] = benchmark(tmp_path / "data", 4)
        change(altered / "dataset2maxlen.json", dict.fromkeys(PROMPTS, options.pop("limits")))
    if "model" in options:
        other = model_folder(tmp_path)
        for name, fields in options.pop("model").items():
            change(other / name, fields)
        llm = lazyllm.load(other, device="cpu", threads=1)
    with pytest.raises(ValueError, match=words):
        run(llm, options.pop("data"), finished, **options)
    assert ((finished / MANIFEST).read_bytes(), (finished / ITEMS).read_bytes()) == before


def test_what_no_item_could_be_run_with_is_refused_before_work(
    llm: lazyllm.LLM, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rapidfuzz", None)
    niah, ruler = longbench.run_niah, longbench.run_ruler
    refused: list[tuple[Callable[..., Any], dict[str, Any], type[Exception], str]] = [
        (run, {"pruning": [None, lazyllm.Pruning({5: 0.5})]}, ValueError, "6 layers"),
        (run, {"edit_sim": "levenshtein"}, ImportError, "needs the package rapidfuzz: pip install"),
        (run, {"pruning": 50}, ValueError, "a speedup of 50 is out of reach"),
        (run, {"edit_sim": "levenstein"}, ValueError, "edit_sim must be difflib or levenshtein"),
        (run, {"warm_ups": -1}, ValueError, "warm_ups must be from 0"),
        (run, {"wrapper": "loud"}, ValueError, "wrapper must be .*, not 'loud'"),
        (run, {"limit": 0}, ValueError, "limit must be from 1"),
        (run, {"datasets": ["qasper", "musique"]}, FileNotFoundError, "lacks musique; it holds qasper"),
        (run, {"data": None, "templates": "x"}, ValueError, "templates is for LongBench's own items and needs"),
        (run, {"data": None, "edit_sim": "levenshtein"}, ValueError, "edit_sim is for LongBench's own items"),
        (run, {"data": None, "datasets": ["hotpotqa"]}, ValueError, "hotpotqa is of LongBench and needs"),
        (run, {"datasets": "trec"}, TypeError, r'datasets must be a list such as \["trec"\], not \'trec\''),
        (run, {"dataset": ["trec"]}, TypeError, r"run has no option 'dataset'; did you mean datasets\?"),
        (niah, {"model": "path", "lengths": [600]}, TypeError, "llm must be an open model such as lazyllm.load"),
        (niah, {"depth": [50]}, TypeError, r"run_niah has no option 'depth'; did you mean depths\?"),
        (niah, {"lengths": [600, 601]}, ValueError, "length 601, a prompt and its answer, is more than"),
        (ruler, {"lengths": 600}, TypeError, r"lengths must be a list such as \[1024, 4096\], not 600"),
    ]
    for function, options, error, words in refused:
        place = {"data": data} if function is run else {"wrapper": "none"}
        with pytest.raises(error, match=words):
            function(options.pop("model", llm), out=tmp_path / "run", **{**place, **options})
        assert not (tmp_path / "run").exists()
    (model_folder(tmp_path / "model") / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ValueError, match="has no chat template"):
        run(lazyllm.load(tmp_path / "model"), data, tmp_path / "run", wrapper="template")
    assert not (tmp_path / "run").exists()


def test_a_folder_without_results_takes_other_conditions(tmp_path: Path) -> None:
    with opened_run(tmp_path, manifest({"limit": 1})):
        pass
    with opened_run(tmp_path, manifest({"limit": 2})) as folder:
        folder.append(CELL, {})
    with pytest.raises(ValueError, match="limit is 2, not 1"), opened_run(tmp_path, manifest({"limit": 1})):
        pass
    (tmp_path / MANIFEST).unlink()
    with pytest.raises(FileNotFoundError, match=r"holds no run: there is no manifest\.json"):
        longbench.Run(tmp_path)


def test_two_runs_at_once_and_runs_without_answers_are_refused(tmp_path: Path) -> None:
    with opened_run(tmp_path, manifest({"measure": "kl"})):
        with pytest.raises(RuntimeError, match="another process"), opened_run(tmp_path, manifest({})):
            pass
        with pytest.raises(ValueError, match="no scored answers but the measure 'kl'"):
            longbench.Run(tmp_path)


def test_a_line_that_is_no_result_is_named_and_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    (tmp_path / ITEMS).write_text('{"setting": "a"}\n{"setting": "b"}\n')
    with pytest.raises(ValueError, match=r"items\.jsonl, line 1"):
        read_rows(tmp_path)
    (tmp_path / ITEMS).unlink()
    with opened_run(tmp_path, manifest({})) as folder:
        row = folder.append(CELL, {"threads": 1})
    with (tmp_path / ITEMS).open("ab") as file:
        file.write('{"setting": "a", "dataset": "ü'.encode()[:-1])
    with opened_run(tmp_path, manifest({})) as folder:
        assert folder.rows == [row]
        folder.append({**CELL, "item": "2"}, {"threads": 1})
    assert len((tmp_path / ITEMS).read_text().splitlines()) == 2


def test_a_full_disk_keeps_what_was_written(llm: lazyllm.LLM, tmp_path: Path) -> None:
    """A limit on the size of files stands for it: a part of a row still fits."""
    data, calm, hurt = benchmark(tmp_path / "data", 3), tmp_path / "calm", tmp_path / "hurt"
    run(llm, data, calm)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size(calm) // 2, hard))
    try:
        with pytest.raises(OSError, match=r"rows before are kept.*items\.jsonl"):
            run(llm, data, hurt)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert 0 < len((hurt / ITEMS).read_bytes().splitlines()) < len(read_rows(calm))
    run(llm, data, hurt)
    assert untimed(read_rows(hurt)) == untimed(read_rows(calm))


def test_killed_at_random_moments_and_resumed_it_ends_like_an_undisturbed_run(llm: lazyllm.LLM, tmp_path: Path) -> None:
    data, calm, hurt = benchmark(tmp_path / "data", 12), tmp_path / "calm", tmp_path / "hurt"
    run(llm, data, calm)
    moments = random.Random(3)
    for _ in range(5):
        before, child = size(hurt), os.fork()
        if child == 0:
            try:
                run(llm, data, hurt)
            finally:
                os._exit(1)
        while size(hurt) == before:
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "the run ended before it could be killed"
            time.sleep(0.002)
        time.sleep(moments.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "the run ended before it could be killed"
    run(llm, data, hurt)
    assert untimed(read_rows(hurt)) == untimed(read_rows(calm))


def size(folder: Path) -> int:
    path = folder / ITEMS
    return path.stat().st_size if path.exists() else 0
