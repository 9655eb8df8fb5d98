"""The paper's tables and figures: settings that match, files that are written, no work done twice."""

import csv
import json
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import PROMPTS, benchmark, markdown, model_folder
from matplotlib.figure import Figure

import lazyllm
from lazyllm import CLAA, FastKV, GemFilter
from lazyllm.commands.main import main
from lazyllm.evaluation.longbench.datasets import CATEGORIES
from lazyllm.evaluation.results import ITEMS
from lazyllm.reproduce import reproduce
from lazyllm.reproduce.pages import first_token
from lazyllm.reproduce.paper import BASELINE, LAZY, METHODS, OTHER, SETUPS, PaperSetup, preset_of, rivals
from lazyllm.reproduce.reproduction import TARGETS

OPTIONS: dict[str, Any] = {"max_length": 120, "max_new_tokens": 3, "seeds": 2, "speedup": 1.4}
OPTIONS |= {"warm_ups": 0, "progress": False}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures take most of the time: the reports of runs have none."""
    monkeypatch.setattr(lazyllm.longbench.Run, "plot", lambda run: import_module("no matplotlib"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prompts = {name: PROMPTS[name] for name in ("qasper", "lcc")}
    return benchmark(tmp_path_factory.mktemp("longbench"), 2, prompts)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("Llama-2-7b-chat-hf"))


@pytest.fixture(scope="module")
def llm(model: Path) -> lazyllm.LLM:
    return lazyllm.load(model, device="cpu", threads=1)


# ---- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("speedup", [1.1, 1.4, 1.9])
def test_rivals_promise_the_same_speedup(llm: lazyllm.LLM, speedup: float) -> None:
    methods = rivals(llm.config, 1000, speedup, seeds=3)
    assert list(methods) == list(METHODS.values())
    assert len(set(methods["Random Token Drop"])) == len(methods["Random Token Drop"]) == 3
    assert not hasattr(methods.pop("Prompt Compression")[0], "speedup")
    for method in (method for group in methods.values() for method in group):
        assert speedup <= method.speedup(llm.config, 1000) < 1.02 * speedup


def test_keeps_are_the_largest_that_will_do(llm: lazyllm.LLM) -> None:
    (method,) = rivals(llm.config, 1000, 1.5, 1, ["random"])["Random Token Drop"]
    assert replace(method, keep=method.keep + 1e-3).speedup(llm.config, 1000) < 1.5
    (all_kept,) = rivals(llm.config, 1000, 1.0, 1, ["random"])["Random Token Drop"]
    assert all_kept.keep == 1.0
    with pytest.raises(ValueError, match="a speedup of 1000 is out of reach"):
        rivals(llm.config, 1000, 1000.0, 1, ["static"])


def test_rivals_of_one_stage_stand_where_their_authors_have_them_or_below(llm: lazyllm.LLM) -> None:
    """30 layers. The layer falls when the least keep would not reach the speedup, and skips windows."""
    shape = {"n_layers": 30, "hidden": 576, "n_heads": 9, "n_kv_heads": 3, "head_dim": 64, "ffn": 1536}
    shape |= {"vocab": 49152}
    model = replace(llm.config, **shape, windows=(0,) * 30, expert_layers=(0,) * 30)
    local = replace(model, windows=(0, 512, 512) * 10)

    def rival(config: Any, speedup: float) -> Any:
        ((rival,),) = rivals(config, 3500, speedup, 1, [method.name]).values()
        return rival

    for method, least, depth in ((FastKV, 0.2, 14), (CLAA, 0.2, 14), (GemFilter, 0.1, 12)):
        assert rival(model, 1.3).layer == depth
        assert rival(local, 1.3).layer == 12
        assert all(rival(model, speedup).keep >= least for speedup in (1.3, 2.0, 3.0))
        above = method(rival(model, 3.0).layer + 1, least)
        assert rival(model, 3.0).speedup(model, 3500) >= 3.0 > above.speedup(model, 3500)


def test_presets_are_known_by_name(llm: lazyllm.LLM, tmp_path: Path) -> None:
    assert preset_of(llm) == "llama-2-7b-chat"
    other = lazyllm.load(model_folder(tmp_path), device="cpu", threads=1)
    assert preset_of(other) == OTHER


@pytest.mark.parametrize("setup", [setup for setup in SETUPS.values() if setup.paper_model])
def test_the_paper_has_every_cell(setup: PaperSetup) -> None:
    cells = setup.published
    methods = (BASELINE, *(METHODS[name] for name in ("random", "static", "compress", "lazyllm")))
    assert set(cells) == {(category, method) for category in CATEGORIES for method in methods}
    for (_, method), row in cells.items():
        assert len(row) == (4 if method == LAZY else 2)
    speeds = [float(cells[category, LAZY]["TTFT speedup"][:-1]) for category in CATEGORIES]
    assert np.mean(speeds) == pytest.approx(setup.speedup, abs=0.05)


def test_the_first_tokens_time_by_hand() -> None:
    def row(ttft: float, seconds: float, n_new: int) -> dict[str, Any]:
        timing = {"ttft": ttft, "seconds": seconds}
        return {"timing": timing, "new_tokens": n_new, "prompt_tokens": 100 * n_new}

    cells = first_token([row(2.0, 3.0, 11), row(4.0, 6.0, 21)])
    assert [*cells.values()] == ["1600", "16", "30.0", "67 %"]  # a step takes 0.1 s


# ---- whole ---------------------------------------------------------------------------------------


def read_csv(file: Path) -> list[list[str]]:
    return [*csv.reader(file.read_text().splitlines())]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "methods" / ITEMS).read_text().splitlines()]


def test_everything_is_made_and_nothing_twice(
    llm: lazyllm.LLM, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = reproduce(llm, list(TARGETS), out=tmp_path, data=data, **OPTIONS)
    assert {path.stem for path in made.files} == set(TARGETS)
    assert all(path.stat().st_size > 100 for path in made.files)
    assert made.failed == 0
    runs = {folder.name: (folder / ITEMS).read_bytes() for folder in tmp_path.iterdir() if folder.is_dir()}
    assert set(runs) == {"dense", "methods", "strengths", "places"}
    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: None)
    again = ["table1", "figure1", "figure5", "figure6"]
    assert reproduce(llm, again, out=tmp_path, data=data, **OPTIONS)
    assert runs == {name: (tmp_path / name / ITEMS).read_bytes() for name in runs}

    heads, *rows = read_csv(tmp_path / "table1.csv")
    paper = ["paper: score", "paper: TTFT speedup"]
    assert heads == ["category", "method", "score [95 %]", "paired difference [95 %]", "TTFT speedup", *paper]
    assert len(rows) == 3 * 9  # two categories and all, nine methods
    code = {row[1]: row for row in rows if row[0] == "Code Completion (1 of 2 data sets)"}
    assert code["LazyLLM"][-2:] == ["53.30", "1.94x"]
    assert code["LazyLLM, recommended"][-2:] == ["", ""]
    assert code["Random Token Drop"][2].count("±") == 1
    dense, *rows = (row[1:] for row in read_csv(tmp_path / "figure5.csv") if row[0] == "All")
    assert [row[0] for row in rows] == [f"{speed}x" for speed in (1.2, 1.4, 1.6, 1.8) for _ in range(8)]
    assert (dense[:2], dense[3], dense[-3:]) == (["", "Baseline"], "", ["1.00x", "1.00x", "100.00%"])
    assert next(row for row in rows if row[:2] == ["1.8x", "FastKV"])[-1] != "100.00%"
    work = next(row for row in read_csv(tmp_path / "table2.csv") if row[1] == "LazyLLM")
    assert work[0] == "Single-Document QA (1 of 3 data sets)"
    assert work[-2:] == ["87.31%", "1.34x"]
    text = (tmp_path / "table1.md").read_text()
    assert "preset llama-2-7b-chat: 1.4x by counted work for 120 prompt tokens" in text
    assert "4 items of 2 data sets, answers cut at 3 tokens; times are cold." in text
    assert "shares and speedups are of all items together" in text
    assert "PromptCompression" in (tmp_path / "methods" / "report.md").read_text()
    first = read_csv(tmp_path / "figure1.csv")
    assert [cells[0].partition(" (")[0] for cells in first[1:]] == ["Single-Document QA", "Code Completion", "All"]
    assert first[-1][2] == "3"
    assert text.partition("|")[0].strip("# ").split("\n")[0] in made.text
    assert "|" not in made.text
    assert {row["wrapper"] for row in rows_of(tmp_path)} == {"none", "llama-2"}  # none for code


def test_failed_items_are_told(llm: lazyllm.LLM, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lazyllm.evaluation.longbench.tasks import LongBench

    def failing(tasks: LongBench, name: str, *rest: Any) -> Any:
        return 1 / 0 if name == "lcc" else score(tasks, name, *rest)

    score = LongBench.score
    monkeypatch.setattr(LongBench, "score", failing)
    asked = {**OPTIONS, "limit": 1, "methods": ["lazyllm", "static"]}
    made = reproduce(llm, "table1", out=tmp_path / "part", data=data, **asked)
    assert made.failed == 3
    assert "3 results failed and are in no figure." in (tmp_path / "part" / "table1.md").read_text()
    with pytest.raises(ValueError, match=r"every item of the run failed; .*items\.jsonl has the errors"):
        reproduce(llm, "table1", out=tmp_path / "all", data=data, datasets=["lcc"], **asked)


def test_a_named_preset_wraps_as_its_model_does(tmp_path: Path, data: Path) -> None:
    other = lazyllm.load(model_folder(tmp_path), device="cpu", threads=1)
    asked = {**OPTIONS, "limit": 1, "methods": "lazyllm", "max_length": 400}
    for chat, wrapper in [(None, "xgen"), ("none", "none")]:
        out = tmp_path / wrapper
        reproduce(other, "table1", out=out, data=data, preset="xgen-7b-8k-inst", wrapper=chat, **asked)
        assert {row["wrapper"] for row in rows_of(out) if row["dataset"] == "qasper"} == {wrapper}


def test_what_does_not_exist_is_refused_before_work(llm: lazyllm.LLM, data: Path, tmp_path: Path) -> None:
    for targets, options, words in [
        (["table1", "table3"], {}, "a target must be table1, table2, .* not 'table3'"),
        ("table1", {"seeds": 0}, "seeds must be from 1"),
        ("table1", {"preset": "llama"}, "preset must be llama-2-7b-chat, .* not 'llama'"),
        ("table1", {"methods": ["lazyllm", "magic"]}, "a method must be random, static, .* not 'magic'"),
    ]:
        with pytest.raises(ValueError, match=words):
            reproduce(llm, targets, out=tmp_path, data=data, **{**OPTIONS, **options})
    assert not list(tmp_path.iterdir())


def test_the_command_runs_the_chosen_methods_and_prints_its_tables(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], no_bars: None
) -> None:
    asked = "table1 table2 --methods lazyllm,gemfilter --datasets niah_single_1 --limit 1 "
    asked += "--max-length 560 --max-new-tokens 2 --speedup 1.3"
    folder = ["--model", str(model), "--out", str(tmp_path), "--device", "cpu", "--warm-ups", "0"]
    assert main(["reproduce", *asked.split(), *folder]) == 0
    out = capsys.readouterr().out
    assert "Table 2" in out
    assert not markdown(out)
    assert f"wrote {tmp_path / 'table2.csv'}" in out
    assert {re.split(r"[(\d]", row["setting"])[0] for row in rows_of(tmp_path)} == {"dense", "GemFilter", "{"}
    names = [row[1] for row in read_csv(tmp_path / "table1.csv")[1:4]]
    assert names == ["Baseline", "GemFilter", "LazyLLM"]
