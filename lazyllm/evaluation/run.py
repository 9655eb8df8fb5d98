"""Runs of LongBench and of generated tasks: `run`, `run_ruler`, `run_niah`, and the result `Run`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lazyllm.evaluation.generated.tasks import NIAH, TASKS, GeneratedTasks, needles_found
from lazyllm.evaluation.longbench.datasets import DATA_SETS
from lazyllm.evaluation.longbench.items import GET
from lazyllm.evaluation.longbench.tasks import LongBench
from lazyllm.evaluation.manifest import SCORE, read_manifest
from lazyllm.evaluation.options import DataOptions, NiahOptions, RulerOptions, RunOptions, documented
from lazyllm.evaluation.report import Results, scores_by_turn
from lazyllm.evaluation.results import read_rows
from lazyllm.evaluation.runner import Settings, checked_settings, run_items
from lazyllm.evaluation.summary import DENSE_LABEL
from lazyllm.evaluation.tasks import Tasks
from lazyllm.evaluation.token_use import token_use_by_setting
from lazyllm.llm import LLM, checked_llm
from lazyllm.pictures.needle_map import plot_needle_map
from lazyllm.pictures.quality import Dot, plot_scores
from lazyllm.pictures.token_use import plot_token_use
from lazyllm.pictures.turns import plot_turns
from lazyllm.support.files import user_path
from lazyllm.support.optional import package

if TYPE_CHECKING:
    import pandas

PICTURE, NEEDLE_MAP, TOKEN_USE, TURNS = "scores.png", "heat_map.png", "token_use.png", "turns.png"


class Run(Results):
    """The results in a folder, of a run that has ended or was interrupted."""

    folder: Path

    def __init__(self, folder: str | Path) -> None:
        path = user_path(folder)
        manifest = read_manifest(path)
        if (measure := manifest["conditions"]["measure"]) != SCORE:
            raise ValueError(f"{path} holds no scored answers but the measure {measure!r}")
        super().__init__(read_rows(path), manifest, path)

    def __repr__(self) -> str:
        n_failed = len(self.summary.failed)
        failed = f", {n_failed} failed" if n_failed else ""
        return f"<Run {self.folder}: {len(self.rows)} rows{failed}, {len(self.summary.settings)} settings>"

    def scores(self) -> dict[str, dict[str, float]]:
        """By setting: the score of each data set, 0 to 100, rounded to 0.01 like the benchmark's own."""
        names = self.summary.datasets
        return {
            setting: {name: round(self.summary.score(setting, name), 2) for name in names}
            for setting in self.summary.settings
        }

    def to_frame(self) -> pandas.DataFrame:
        """One row per item and setting, and environment if several timed it; needs pandas."""
        frame: pandas.DataFrame = package("pandas", "to_frame", "plots").json_normalize(self.rows)
        return frame

    def plot(self, file: str | Path | None = None) -> Path:
        """Draws the score against the speedup of the first token; needs matplotlib."""
        summary = self.summary
        dots = [
            Dot(setting, summary.speed(setting, "ttft").of_sums, *summary.mean(setting))
            for setting in summary.settings
        ]
        title = f"{self.manifest['model']}: {len(summary.datasets)} data sets, {len(summary.rows)} results"
        return plot_scores(dots, DENSE_LABEL, user_path(file) if file else self.folder / PICTURE, title)

    def draw(self) -> list[Path]:
        rows, pictures = self.summary.rows, []
        if self.manifest["conditions"].get("tasks") == NIAH and rows:
            pictures.append(plot_needle_map(needles_found(rows), self.folder / NEEDLE_MAP))
        if by_turn := scores_by_turn(self.summary):
            pictures.append(plot_turns(by_turn, DENSE_LABEL, self.folder / TURNS))
        pictures.append(self.plot())
        if panels := token_use_by_setting(rows):
            pictures.append(plot_token_use(panels, self.folder / TOKEN_USE))
        return pictures


@documented(DataOptions)
def run(llm: LLM, pruning: Settings = None, *, out: str | Path, **options: Any) -> Run:
    """Runs LongBench under one or several settings and writes manifest, results and report to `out`.

    A run that was interrupted continues where it stopped, and one that has ended takes more settings and
    items in the same folder. `pruning`: settings or their texts, or by the names that reports show: {"ours":
    setting}; None is dense. Without `data`, tasks of RULER's kinds are generated. docs/runs.md has more on
    workers, and on folders that grow.
    """
    return completed_run(llm, pruning, tasks_of, out, DataOptions.of(options))


@documented(RulerOptions)
def run_ruler(llm: LLM, pruning: Settings = None, *, out: str | Path, **options: Any) -> Run:
    """Runs generated tasks of RULER's kinds. `pruning` and `out` are those of `run`."""
    return completed_run(llm, pruning, GeneratedTasks, out, RulerOptions.of(options))


@documented(NiahOptions)
def run_niah(llm: LLM, pruning: Settings = None, *, out: str | Path, **options: Any) -> Run:
    """Runs one needle at each depth of texts of each length; the report has a needle map. `pruning` and `out`
    are those of `run`."""
    return completed_run(llm, pruning, GeneratedTasks, out, NiahOptions.of(options))


def completed_run(
    llm: LLM,
    pruning: Settings,
    tasks: Callable[[LLM, Any], Tasks],
    out: str | Path,
    options: RunOptions,
) -> Run:
    settings = checked_settings(pruning)
    run_items(llm, settings, tasks(checked_llm(llm), options), user_path(out), options)
    result = Run(out)
    result.report()
    return result


def tasks_of(llm: LLM, options: DataOptions) -> Tasks:
    """LongBench from the user's files; without data, generated tasks."""
    if options.data is not None:
        return LongBench(options)
    for name in ("sample", "min_item_length", "max_item_length", "prompts", "edit_sim"):
        if getattr(options, name) != getattr(DataOptions, name):
            raise ValueError(
                f"{name} is for LongBench's own items and needs data; without data, tasks are generated; "
                + GET
            )
    if of_longbench := [name for name in options.datasets or () if name in DATA_SETS]:
        raise ValueError(
            f"{', '.join(of_longbench)} is of LongBench and needs data; without data, tasks are generated: "
            f"{', '.join(TASKS)}; {GET}"
        )
    generated = RulerOptions(
        wrapper=options.wrapper,
        tasks=options.datasets,
        lengths=[options.max_length],
        count=RulerOptions.count if options.limit is None else options.limit,
    )
    return GeneratedTasks(llm, generated, options.max_new_tokens)
