"""Sweep: many settings on the same prompts, and the best among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from math import isnan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args

from lazyllm.evaluation.divergence import TOKENS, Divergence
from lazyllm.evaluation.manifest import SCORE, read_manifest
from lazyllm.evaluation.options import DataOptions, documented
from lazyllm.evaluation.report import report_text, times_table, write_report
from lazyllm.evaluation.results import read_rows
from lazyllm.evaluation.run import category_of, tasks_of
from lazyllm.evaluation.runner import run_items
from lazyllm.evaluation.summary import DENSE_LABEL, Row, Summary, common
from lazyllm.evaluation.tasks import Tasks
from lazyllm.evaluation.trial import Measure, Trial, scored_answer
from lazyllm.llm import LLM, load
from lazyllm.method import Method
from lazyllm.methods.parsing import parse_method
from lazyllm.support import checked
from lazyllm.support.files import user_path
from lazyllm.sweeps.points import Frame, Point, front, plot_points, points
from lazyllm.sweeps.space import Space, settings_of

Quality = Literal["kl", "score", "both"]
PICTURE, TABLE = "pareto.png", "settings"


class Sweep(Frame):
    """The measured settings; `folder` is None for a sweep without `out`."""

    def __init__(
        self,
        rows: Sequence[Row],
        manifest: Mapping[str, Any],
        folder: Path | None,
        methods: Mapping[str, Method],
    ) -> None:
        self.rows, self.manifest, self.folder = rows, manifest, folder
        self.summary = Summary(rows, category_of)
        self._methods = methods
        super().__init__(list(points(self.summary, methods)))

    @classmethod
    def read(cls, folder: str | Path) -> Sweep:
        """Opens the folder of a sweep that has ended or was interrupted.

        A sweep with policies, which are code, is opened by calling `sweep` again: finished items do not run.
        """
        path = user_path(folder)
        manifest = read_manifest(path)
        if (measure := manifest["conditions"]["measure"]) not in get_args(Quality):
            raise ValueError(f"{path} holds a run that is no sweep, but the measure {measure!r}")
        return cls(read_rows(path), manifest, path, settings_in(manifest, {}))

    @cached_property
    def compared(self) -> Frame:
        """The settings on the prompts that all of them have: those of `pareto`, `best` and `plot`. In a sweep
        that has grown unevenly, its own table has means over different prompts."""
        return Frame(list(points(Summary(common(self.rows), category_of), self._methods)))

    def pareto(self) -> Frame:
        """The Pareto front in quality and measured speedup, slowest setting first.

        Quality is the score, or the KL divergence in a sweep without scores. A setting is on the front unless
        another one is equal or better in both and better in one.
        """
        return Frame(front(self.compared))

    def best(self, max_drop: float = 0.01) -> Point:
        """The setting with the largest measured speedup whose quality is at most `max_drop` below dense's.

        Quality is a number from 0 to 1: score / 100 (a drop of 0.01 is one point), or in a sweep without
        scores the share of equal argmaxes, which is 1 for dense. If no setting is faster, it is dense itself,
        and its note says so.
        """
        drop = checked.number(max_drop, "max_drop")
        if drop < 0:
            raise ValueError(f"max_drop must be 0 or above, not {drop}")
        min_share = self.compared[DENSE_LABEL].share - drop
        fit = [point for point in self.compared if point.share >= min_share and not isnan(point.ttft_speedup)]
        if not fit:
            raise ValueError("the sweep has no result of dense yet, with which settings are compared")
        best = max(fit, key=lambda point: point.ttft_speedup)
        if best.setting != DENSE_LABEL:
            return best
        return replace(best, note=f"no setting is faster than dense with a drop of at most {drop:g}")

    def plot(self, file: str | Path | None = None) -> Path:
        """Draws quality against speedup with the Pareto front; needs matplotlib.

        The default `file` is pareto.png in the sweep's folder, or in the working directory without one.
        """
        target = user_path(file) if file else (self.folder or Path()) / PICTURE
        return plot_points([*self.compared], self._heading, target)

    @property
    def _heading(self) -> str:
        prompts = len({(row["dataset"], row["item"]) for row in self.rows})
        return f"{self.manifest['model']}: {len(self)} settings on {prompts} prompts"

    def text(self) -> str:
        """The table of the report, aligned for a terminal."""
        return report_text(self._heading, {TABLE: self.table}, self.summary.failed)

    def report(self) -> Path:
        """Writes report.md, the table as .csv and .tex and, with matplotlib, the picture, to the folder."""
        if self.folder is None:
            raise ValueError("a report goes to the sweep's folder; give the sweep one with out=")
        try:
            pictures = [self.plot().name]
        except ImportError:
            pictures = []
        tables = {TABLE: self.table, "times": times_table(self.summary)}
        filled = {name: table for name, table in tables.items() if table.rows}
        return write_report(self.folder, self._heading, filled, pictures, self.summary, self.manifest)


def settings_in(manifest: Mapping[str, Any], methods: Mapping[str, Method]) -> dict[str, Method]:
    """By label: `methods`, and the other settings of a sweep's folder, made from their texts."""
    texts = manifest["conditions"]["settings"]
    return {label: methods.get(label) or parse_method(text) for label, text in texts.items()} | dict(methods)


@documented(DataOptions)
def sweep(
    llm: LLM | str | Path,
    space: Space,
    *,
    measure: Quality = "kl",
    tokens: int = TOKENS,
    out: str | Path | None = None,
    **options: Any,
) -> Sweep:
    """Runs dense and every setting of a space on the same prompts and measures quality and speed.

    `space`: settings or their texts, also by name: {"ours": setting}; or axes whose product is taken, each a
    field of Pruning or Scoring with a list of values, such as {"stages": [{10: 0.7}, {20: 0.5}], "smooth":
    [1, 13]}. For single stages, the axes "layer" and "keep" replace "stages".

    `measure`: "kl" teacher-forces dense's greedy answer of at most `tokens` tokens; "score" generates answers
    and scores them; "both" does both and takes its times from the generated answers.

    With `out` the sweep is a folder with a report, an interrupted sweep continues, and the folder of an
    earlier sweep takes further settings and items.
    """
    checked.choice(measure, "measure", get_args(Quality))
    measuring, data = measure_of(measure, tokens), DataOptions.of(options)
    model = llm if isinstance(llm, LLM) else load(llm)
    settings = settings_of(space, model.config)
    tasks = tasks_of(model, data)
    conditions: dict[str, Any] = {"measure": measure}
    if measure != SCORE:
        conditions["forced tokens"] = tokens
    target = None if out is None else user_path(out)
    with results_folder(target) as name:
        folder = Path(name)
        # refused before work if a setting of the folder is code that is not among these settings
        methods = settings_in(read_manifest(folder), settings) if read_rows(folder) else settings
        run_items(model, settings, tasks, folder, data, measuring, conditions)
        swept = Sweep(read_rows(folder), read_manifest(folder), target, methods)
    if target:
        swept.report()
    return swept


def results_folder(target: Path | None) -> AbstractContextManager[str]:
    """The user's folder for results, or a temporary one without it."""
    return nullcontext(str(target)) if target else TemporaryDirectory(prefix="lazyllm-")


def measure_of(measure: Quality, tokens: int) -> Measure:
    """The measure of the runner. Items without answers, such as a user's own prompts, have no score."""
    if measure == SCORE:
        return scored_answer
    divergence = Divergence(tokens)

    def both(llm: LLM, tasks: Tasks, trial: Trial) -> dict[str, Any]:
        row = divergence(llm, tasks, trial)
        return {**row, **scored_answer(llm, tasks, trial)} if "answers" in trial.item else row

    return both if measure == "both" else divergence
