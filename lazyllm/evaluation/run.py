"""Runs of LongBench and of generated tasks: `run`, `run_ruler`, `run_niah`, and the result `Run`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from lazyllm.evaluation.generated.ruler import TASKS
from lazyllm.evaluation.generated.tasks import (
    DEPTHS,
    NIAH,
    RULER,
    GeneratedTasks,
    needles_found,
    niah_items,
    prompt_encoder,
    ruler_items,
    task_and_length,
)
from lazyllm.evaluation.longbench.datasets import DATA_SETS
from lazyllm.evaluation.longbench.items import GET
from lazyllm.evaluation.longbench.tasks import LongBench
from lazyllm.evaluation.manifest import SCORE, read_manifest
from lazyllm.evaluation.options import EDIT_SIM, DataKeywords, DataOptions, RunKeywords, RunOptions
from lazyllm.evaluation.report import report_text, run_tables, write_report
from lazyllm.evaluation.results import read_rows
from lazyllm.evaluation.runner import checked_settings, run_items
from lazyllm.evaluation.summary import DENSE, Summary
from lazyllm.evaluation.tasks import Tasks
from lazyllm.evaluation.token_use import token_use_by_setting
from lazyllm.llm import LLM, checked_llm
from lazyllm.method import Method
from lazyllm.methods import PruningInput
from lazyllm.pictures.figure import Dot
from lazyllm.pictures.needle_map import plot_needle_map
from lazyllm.pictures.scores import plot_scores
from lazyllm.pictures.token_use import plot_token_use
from lazyllm.support import frames
from lazyllm.support.files import user_path

if TYPE_CHECKING:
    import pandas

PICTURE, NEEDLE_MAP, TOKEN_USE = "scores.png", "heat_map.png", "token_use.png"
GENERATED_COUNT = 5


def category_of(name: str) -> str:
    """The category of a LongBench data set or of a generated task at a length."""
    return DATA_SETS[name].category if name in DATA_SETS else TASKS[task_and_length(name)[0]].category


class Run:
    """The results in a folder, of a run that has ended or was interrupted."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = user_path(folder)
        self.manifest: dict[str, Any] = read_manifest(self.folder)
        if (measure := self.manifest["conditions"]["measure"]) != SCORE:
            raise ValueError(f"{self.folder} holds no scored answers but the measure {measure!r}")
        self.rows: list[dict[str, Any]] = read_rows(self.folder)

    def __repr__(self) -> str:
        n_failed = len(self.summary.failed)
        failed = f", {n_failed} failed" if n_failed else ""
        return f"<Run {self.folder}: {len(self.rows)} rows{failed}, {len(self.summary.settings)} settings>"

    @cached_property
    def summary(self) -> Summary:
        return Summary(self.rows, category_of)

    def scores(self) -> dict[str, dict[str, float]]:
        """By setting: the score of each data set, 0 to 100, rounded to 0.01 like the benchmark's own."""
        names = self.summary.datasets
        return {
            one: {name: round(self.summary.score(one, name), 2) for name in names}
            for one in self.summary.settings
        }

    def to_frame(self) -> pandas.DataFrame:
        """One row per item and setting, and environment if several timed it; needs pandas."""
        made: pandas.DataFrame = frames.pandas().json_normalize(self.rows)
        return made

    def plot(self, file: str | Path | None = None) -> Path:
        """Draws the score against the speedup of the first token; needs matplotlib."""
        summary = self.summary
        families = {
            one: f"{common}, {len(several)} seeds"
            for common, several in summary.seeded.items()
            for one in several
        }
        dots = []
        for setting in summary.settings:
            speed, mean = summary.speed(setting, "ttft"), summary.mean(setting)
            speedup = speed.of_sums if speed else nan
            dots.append(Dot(families.get(setting, setting), speedup, mean.value, mean.low, mean.high))
        title = f"{self.manifest['model']}: {len(summary.datasets)} data sets, {len(summary.rows)} results"
        return plot_scores(dots, DENSE, user_path(file) if file else self.folder / PICTURE, title)

    @property
    def _heading(self) -> str:
        return f"{self.manifest['model']}: {len(self.summary.rows)} results"

    def text(self) -> str:
        """The tables of the report, aligned for a terminal."""
        tables = run_tables(self.summary, self.manifest)
        return report_text(self._heading, tables, self.summary.failed)

    def report(self) -> Path:
        """Writes report.md, the tables and, with matplotlib, the pictures."""
        rows = self.summary.rows
        try:
            pictures = [self.plot().name]
            if panels := token_use_by_setting(rows):
                pictures.append(plot_token_use(panels, self.folder / TOKEN_USE).name)
            if self.manifest["conditions"].get("tasks") == NIAH and rows:
                pictures.insert(0, plot_needle_map(needles_found(rows), self.folder / NEEDLE_MAP).name)
        except ImportError:
            pictures = []
        tables = run_tables(self.summary, self.manifest)
        return write_report(self.folder, self._heading, tables, pictures, self.summary, self.manifest)


def run(
    llm: LLM,
    pruning: PruningInput | Sequence[PruningInput] = None,
    *,
    out: str | Path,
    **options: Unpack[DataKeywords],
) -> Run:
    """Runs LongBench under one or several settings and writes manifest, results and report to `out`.

    A run that was interrupted continues where it stopped, and one that has ended takes more settings and
    items in the same folder. `pruning`: settings or their texts; None is dense.

    Items: `data` is a folder, zip or parquet file of the benchmark, or hub:OWNER/NAME; None generates tasks
    of RULER's kinds, prompt and answer of `max_length` tokens. `datasets` names data sets or generated tasks.
    `limit` takes the first items of each data set, `sample` draws as many with a fixed seed;
    `min_item_length` and `max_item_length` select by LongBench's own length. `prompts`: a file such as
    dataset2prompt.json, in place of the one in the data's folder or the official one.

    Prompts and answers: `max_length` tokens per prompt (default 3500), `max_new_tokens` as a cap on the
    benchmark's limits, `chat` is the wrapper (auto, none, llama-2, xgen or template), `edit_sim` scores code
    (difflib, as with the benchmark's own requirements, or levenshtein).

    Runs: `warm_ups` short untimed runs (default 5), after which each setting runs once untimed; 0 is none of
    both. `retry_failed` runs the items again that failed, `progress` shows a bar. `on_row`: a function, or a
    list of functions, called with each new row.

    Workers: `workers` processes on this machine, or the address of a Dask `scheduler`; `worker_device` and
    `worker_threads` are those of each of them. docs/runs.md has more on them, and on folders that grow.
    """
    settings, given = checked_settings(pruning), DataOptions.of(options, run)
    return completed_run(llm, settings, tasks_of(checked_llm(llm), given), out, given)


def tasks_of(llm: LLM, options: DataOptions) -> Tasks:
    """LongBench from the user's files; without data, generated tasks."""
    if options.data is not None:
        return LongBench(options)
    needs_data = {
        "sample": options.sample,
        "min_item_length": options.min_item_length,
        "max_item_length": options.max_item_length,
        "prompts": options.prompts,
        "edit_sim": None if options.edit_sim == EDIT_SIM else options.edit_sim,
    }
    if given := [name for name, value in needs_data.items() if value is not None]:
        raise ValueError(
            f"{given[0]} is for LongBench's own items and needs data; without data, tasks are generated; "
            + GET
        )
    if known := [name for name in options.datasets or () if name in DATA_SETS]:
        raise ValueError(
            f"{', '.join(known)} is of LongBench and needs data; without data, tasks are generated: "
            f"{', '.join(TASKS)}; {GET}"
        )
    seed, lengths = 0, [options.max_length]
    count = GENERATED_COUNT if options.limit is None else options.limit
    encode = prompt_encoder(llm.tokenizer, options.chat)
    items = ruler_items(encode, options.datasets, lengths, count, seed)
    selection = {"tasks": options.datasets, "lengths": lengths, "items of each kind": count, "seed": seed}
    return GeneratedTasks(items, RULER, selection, options, options.max_new_tokens)


def run_ruler(
    llm: LLM,
    pruning: PruningInput | Sequence[PruningInput] = None,
    *,
    out: str | Path,
    lengths: Sequence[int],
    tasks: Sequence[str] | None = None,
    count: int = GENERATED_COUNT,
    seed: int = 0,
    prose: str | Path | None = None,
    qa: str | Path | None = None,
    **options: Unpack[RunKeywords],
) -> Run:
    """Runs generated tasks of RULER's kinds: `count` items of each task at each length in tokens, which
    includes chat template and answer.

    `tasks`: None is all. `seed`: of the items. `prose`: a folder of .txt files, the text around the needles;
    None makes one by rule. `qa`: a folder with squad.json and hotpotqa.json, the files that RULER downloads,
    or with triviaqa and hotpotqa of LongBench, for qa_1 and qa_2. The other options are those of `run`.
    """
    settings, given = checked_settings(pruning), RunOptions.of(options, run_ruler)
    encode = prompt_encoder(checked_llm(llm).tokenizer, given.chat)
    items = ruler_items(encode, tasks, lengths, count, seed, prose, qa)
    selection: dict[str, Any] = {"tasks": tasks, "lengths": lengths, "items of each kind": count}
    selection |= {"seed": seed, "prose": prose and str(prose), "qa": qa and str(qa)}
    return completed_run(llm, settings, GeneratedTasks(items, RULER, selection, given), out, given)


def run_niah(
    llm: LLM,
    pruning: PruningInput | Sequence[PruningInput] = None,
    *,
    out: str | Path,
    lengths: Sequence[int],
    depths: Sequence[float] = DEPTHS,
    count: int = 1,
    seed: int = 0,
    prose: str | Path | None = None,
    **options: Unpack[RunKeywords],
) -> Run:
    """Runs one needle at each depth, in percent, of texts of each length; the report has a needle map.

    The text is noise, or with `prose` that of a folder of .txt files. The other options are those of
    `run_ruler`.
    """
    settings, given = checked_settings(pruning), RunOptions.of(options, run_niah)
    encode = prompt_encoder(checked_llm(llm).tokenizer, given.chat)
    items = niah_items(encode, lengths, depths, count, seed, prose)
    selection: dict[str, Any] = {"lengths": lengths, "depths": depths, "items of each kind": count}
    selection |= {"seed": seed, "prose": prose and str(prose)}
    return completed_run(llm, settings, GeneratedTasks(items, NIAH, selection, given), out, given)


def completed_run(
    llm: LLM, settings: dict[str, Method], tasks: Tasks, out: str | Path, options: RunOptions
) -> Run:
    run_items(llm, settings, tasks, user_path(out), options)
    made = Run(out)
    made.report()
    return made
