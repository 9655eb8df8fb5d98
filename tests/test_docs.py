"""README and docs: every block of Python runs, on a tiny model, and so do the cheap commands; every command
parses, with settings that exist; links lead somewhere."""

import re
import shlex
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from folders import SHAPE, model_folder

import lazyllm
from lazyllm.commands.main import main, parser
from lazyllm.methods.parsing import as_method
from lazyllm.support.json_text import parse_json
from lazyllm.sweeps.sweep import combined

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = ("lazyllm", "csrc", "cuda", "benchmarks", "tests")
FENCED = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)


def blocks(page: Path, language: str) -> list[str]:
    return [text for name, text in FENCED.findall(page.read_text(encoding="utf-8")) if name == language]


def commands(page: Path) -> list[list[str]]:
    """The words of each `lazyllm …` line; variables of the block are filled in."""
    found = []
    for block in blocks(page, "sh"):
        lines = block.replace("\\\n", " ").splitlines()
        set_here = (re.match(r"(\w+)='(.*)'$", line) for line in lines)
        variables = {match[1]: match[2] for match in set_here if match}
        for line in lines:
            for name, value in variables.items():
                line = line.replace(f"${name}", value.replace('"', '\\"'))
            if line.startswith("lazyllm ") and "…" not in line:
                found.append(shlex.split(line, comments=True)[1:])
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_parse_and_their_settings_exist(page: Path) -> None:
    for words in commands(page):
        if words[0] == "lm-eval":  # the harness' own options
            continue
        args = vars(parser().parse_args(words))
        settings = args.get("pruning", [])
        for setting in settings if isinstance(settings, list) else [settings]:
            if not str(setting).endswith(".json"):  # a preset's file
                as_method(setting)
        if "space" in args:
            assert combined(parse_json(args["space"], "--space"))


NOT_RUN = {
    ("reproduction", 0): "180 conversations; test_turns.py runs the same call on a tiny model",
    ("serve", 0): "needs a server; test_serve.py asks the same",
    ("runs", 0): "needs SLURM; test_workers.py has sweeps on a Dask cluster",
}
TEXT = "The keeper of the lighthouse was Tobias Brandt, who did not sleep well. " * 12
SMALLER: dict[str, dict[str, Any]] = {
    "sweep": {"datasets": ["niah_single_1"], "limit": 1, "max_length": 500, "tokens": 2, "warm_ups": 0},
    "calibrate": {"lengths": [640]},
    "search": {"budget": 3},
}
"""Arguments that calls in examples get beside, or in place of, their own: they mean less work."""


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With layers for all stages of examples, and rows for Q8_0."""
    shape = replace(SHAPE, n_layers=26, ffn=64, context=1400)
    return model_folder(tmp_path_factory.mktemp("model") / "DIR", shape)


@pytest.fixture
def example(deep_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that examples take as given, in a folder with the file that they take as given. Their models
    are a tiny one; for packages that only they use there are stand-ins."""
    load = lazyllm.load
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LAZYLLM_PROGRESS", "0")
    monkeypatch.setattr(lazyllm, "demo_model", lambda: deep_model)
    monkeypatch.setattr(lazyllm, "load", lambda path, **options: load(deep_model, threads=1, **options))
    monkeypatch.setattr("lazyllm.calibration.calibrate.PER_KIND", 1)
    for name, options in SMALLER.items():
        monkeypatch.setattr(lazyllm, name, partial(called, getattr(lazyllm, name), options))
    logged: list[dict[str, float]] = []
    mlflow = {"start_run": lambda run_name: nullcontext(), "log_metrics": logged.append, "logged": logged}
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(**mlflow))
    Path("article.txt").write_text(TEXT)
    prompts = [TEXT[begin : begin + 700] for begin in (0, 20, 40)]
    space = {"layer": [9], "keep": [0.3]}
    return {"__name__": "__main__", "prompt": TEXT, "prompts": prompts, "space": space}


def called(function: Any, options: dict[str, Any], *values: Any, **keywords: Any) -> Any:
    return function(*values, **{**keywords, **options})


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.stem)
def test_python_runs(page: Path, example: dict[str, Any]) -> None:
    for i, block in enumerate(blocks(page, "python")):
        if (page.stem, i) not in NOT_RUN:
            exec(compile(block, f"{page.name}, block {i}", "exec"), example)
    if mlflow := example.get("mlflow"):
        assert mlflow.logged


CALL = re.compile(r"`((?:\w+ = )?(?:llm|lazyllm|load|doc|session|answer|exception)\b[^`…]*\([^`…]*\)[^`…]*)`")
NOT_CALLED = {
    'load(path, compute="bf16")': "needs AVX512-BF16; test_compute.py",
    'load(path, device="cuda")': "needs a GPU; test_cuda.py",
    "lazyllm.from_transformers(model, tokenizer)": "needs transformers; test_from_transformers.py",
    "exception.session.resume()": "needs an interruption; test_processes.py",
    'lazyllm.calibrate(llm, speedup=2.5, out="preset.json")': "runs in calibrate.md",
    'lazyllm.search(llm, prompts, speedup=(1.5, 3.0), out="search")': "runs in search.md",
}


def test_calls_of_the_guide_run(example: dict[str, Any], deep_model: Path) -> None:
    text = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    calls = CALL.findall(text)
    assert len(calls) > 20
    assert NOT_CALLED.keys() <= {*calls}
    llm = lazyllm.load(deep_model)
    questions = ["Who?", "When?", "Where?"]
    names = dict(zip(("q", "q1", "q2"), questions, strict=True)) | {"question": questions[0]}
    names |= {"path": deep_model, "file": Path("file"), "n_prompt": 1000, "pruning": 2.0}
    names |= {"llm": llm, "lazyllm": lazyllm, "load": lazyllm.load, "session": llm.session(2.0)}
    names["session"].ask(TEXT)
    names |= {"text": TEXT, "messages": [{"role": "user", "content": TEXT}], "questions": questions}
    names |= {"answer": llm.generate(TEXT, 2.0, trace=True), "prompts": example["prompts"]}
    for call in calls:
        if call not in NOT_CALLED:
            exec(call, names)
    for setting in re.findall(r"`pruning=([^`…]*)`", text):
        if not setting.endswith('.json"'):
            as_method(eval(setting, names))


ONE = ["--limit", "1", "--max-length", "640", "--datasets", "niah_single_1", "--tokens", "2"]
LESS = {
    "generate": ["--max-new-tokens", "2"],
    "niah": ["--lengths", "640", "--depths", "50", "--warm-ups", "0"],
    "ruler": ["--lengths", "1200", "--count", "1", "--tasks", "niah_single_1", "--warm-ups", "0"],
    "sweep": [*ONE, "--warm-ups", "0"],
    "calibrate": ["--lengths", "640"],
}
"""The commands that are run, and what is added to their arguments and counts in place of the page's own."""
SLOW = {
    "reproduction": "records of measurements",
    "--workers": "test_workers.py runs several",
    "--scheduler": "has no cluster",
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_run(
    page: Path, example: None, deep_model: Path, monkeypatch: pytest.MonkeyPatch, no_pictures: object
) -> None:
    monkeypatch.setattr("lazyllm.checkpoints.pypi_models.demo_model", lambda: deep_model)
    Path("DIR").symlink_to(deep_model)
    for words in commands(page):
        if words[0] in LESS and not SLOW.keys() & {page.stem, *words}:
            assert main([*words, *LESS[words[0]], "--threads", "1"]) == 0


def anchors(page: Path) -> set[str]:
    text = page.read_text(encoding="utf-8")
    heads = [re.sub(r"[^\w\- ]", "", head.strip().lower()) for head in re.findall(r"^#+ (.*)$", text, re.M)]
    return {head.replace(" ", "-") for head in heads} | set(re.findall(r'id="([^"]+)"', text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", page.read_text(encoding="utf-8"))):
        if not target.startswith("https://"):
            path, _, anchor = target.partition("#")
            there = page.parent / path if path else page
            assert there.exists(), target
            assert not anchor or anchor in anchors(there), target


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.stem
)
def test_sources_that_are_named_exist(page: Path) -> None:
    named = re.findall(r"`(?:[\w/]+/)?(\w+\.(?:py|[ch]|cu))`", page.read_text(encoding="utf-8"))
    sources = {file.name for folder in SOURCES for file in (ROOT / folder).rglob("*.*")}
    assert set(named) - sources == set()
