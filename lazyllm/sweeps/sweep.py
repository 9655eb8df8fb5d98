"""Sweeps: the settings of a space on the same prompts, and what can be asked of the outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args

from lazyllm import checked
from lazyllm.llm import LLM, load
from lazyllm.longbench.divergence import TOKENS, Divergence
from lazyllm.longbench.prompt import MAX_LENGTH, Chat
from lazyllm.longbench.report import REPORT, write_report
from lazyllm.longbench.results import read_manifest, read_rows
from lazyllm.longbench.run import category_of, tasks_of
from lazyllm.longbench.runner import WARM_UPS, Asked, Manner, Measure, run_items, scored_answer
from lazyllm.longbench.summary import DENSE, Row, Summary
from lazyllm.longbench.tasks import Limits, Tasks
from lazyllm.methods import parse_method
from lazyllm.sweeps.frame import Frame
from lazyllm.sweeps.plot import plot
from lazyllm.sweeps.point import Point, front, points
from lazyllm.sweeps.space import Space, settings_of

Quality = Literal["kl", "score", "both"]
PICTURE, TABLE = "pareto.png", "settings"


class Sweep(Frame):
    """Settings with what was measured of them; `folder` is None for a sweep that was given none."""

    def __init__(self, rows: Sequence[Row], manifest: Mapping[str, Any], folder: Path | None) -> None:
        self.rows, self.manifest, self.folder = rows, manifest, folder
        self.summary = Summary(rows, category_of)
        methods = {setting: parse_method(text) for setting, text in manifest["methods"].items()}
        super().__init__(list(points(self.summary, methods)))

    @classmethod
    def read(cls, folder: str | Path) -> Sweep:
        """Of a sweep that has ended, or of one that was cut short."""
        path = Path(folder)
        manifest = read_manifest(path)
        if "methods" not in manifest:
            raise ValueError(f"{path} holds a run that is no sweep; lazyllm.longbench.Run opens it")
        return cls(read_rows(path), manifest, path)

    def pareto(self) -> Frame:
        """The settings that no other beats in quality and speedup, slowest first.

        Quality is the score, or in a sweep without scores the KL divergence; the speedup is measured. One
        setting beats another that is better in neither and worse in one.
        """
        return Frame(front(self))

    def best(self, max_drop: float = 0.01) -> Point:
        """The fastest setting, by measured speedup, whose quality is at most `max_drop` below dense's.

        Quality is here a number from 0 to 1: score / 100 (a drop of 0.01 is one point), or in a sweep without
        scores the share of equal argmaxes, which for dense is 1.
        """
        drop = checked.number(max_drop, "max_drop")
        if drop < 0:
            raise ValueError(f"max_drop must be 0 or above, not {drop}")
        least = self[DENSE].share - drop
        fit = [one for one in self if one.share >= least and not isnan(one.speedup)]
        if not fit:
            raise ValueError("the sweep has no result of dense yet, which others are held against")
        return max(fit, key=lambda one: one.speedup)

    def plot(self, file: str | Path | None = None) -> Path:
        """Quality against speedup, the Pareto front joined; needs matplotlib.

        `file`: pareto.png in the sweep's folder, or in the working directory if it has none.
        """
        return plot(self, Path(file) if file else (self.folder or Path()) / PICTURE, self._heading)

    @property
    def _heading(self) -> str:
        prompts = len({(row["dataset"], row["item"]) for row in self.rows})
        return f"{self.manifest['model']}: {len(self)} settings on {prompts} prompts"

    def report(self) -> Path:
        """Writes report.md, the table as .csv and .tex and, with matplotlib, the picture, to the folder."""
        if self.folder is None:
            raise ValueError("a report goes to the sweep's folder; give the sweep one with out=")
        try:
            pictures = [self.plot().name]
        except ImportError:
            pictures = []
        tables = {TABLE: self.table}
        write_report(self.folder, self._heading, tables, pictures, self.summary.failed, self.manifest)
        return self.folder / REPORT


def sweep(
    llm: LLM | str | Path,
    space: Space,
    *,
    measure: Quality = "kl",
    tokens: int = TOKENS,
    data: str | Path | None = None,
    datasets: Sequence[str] | None = None,
    out: str | Path | None = None,
    limit: int | None = None,
    sample: int | None = None,
    min_item_length: int | None = None,
    max_item_length: int | None = None,
    max_length: int = MAX_LENGTH,
    max_new_tokens: int | None = None,
    chat: Chat = "auto",
    prompts: str | Path | None = None,
    warm_ups: int = WARM_UPS,
    retry_failed: bool = False,
    progress: bool = True,
) -> Sweep:
    """Tries every setting of a space, and dense, on the same prompts: quality, and time to the first token.

    `space`: settings or their texts; or axes whose product is taken, each a field of Pruning with a list of
    values, such as {"stages": [{10: 0.7}, {20: 0.5}], "smooth": [1, 13]}, with "layers" and "keep" in place
    of "stages" for a single stage. `measure`: "kl" teacher-forces dense's own greedy answer, of at most
    `tokens` tokens; "score" generates answers and scores them; "both" does both, and its times are those of
    the answers. The rest is as in `lazyllm.longbench.run`: without `data`, tasks are generated. With `out`
    the sweep is a folder with a report; run again, it goes on where it stopped.
    """
    if measure not in get_args(Quality):
        raise ValueError(f"measure must be one of {', '.join(get_args(Quality))}, not {measure!r}")
    taken = chosen_measure(measure, tokens)
    limits = Limits(limit, sample, min_item_length, max_item_length, max_length, max_new_tokens, chat)
    manner = Manner(warm_ups, retry_failed, progress)
    model = llm if isinstance(llm, LLM) else load(llm)
    settings = settings_of(space, model.config)
    tasks = tasks_of(model, data, datasets, limits, prompts)
    measured: dict[str, Any] = {
        "measure": measure,
        "methods": {label: one.to_json() for label, one in settings.items()},
    }
    if measure != "score":
        measured["forced tokens"] = tokens
    if out is not None:
        run_items(model, settings, tasks, Path(out), manner, taken, measured)
        made = Sweep.read(out)
        made.report()
        return made
    with TemporaryDirectory(prefix="lazyllm-sweep-") as folder:
        run_items(model, settings, tasks, Path(folder), manner, taken, measured)
        return Sweep(read_rows(Path(folder)), read_manifest(Path(folder)), None)


def chosen_measure(measure: Quality, tokens: int) -> Measure:
    if measure == "score":
        return scored_answer
    divergence = Divergence(tokens)
    if measure == "kl":
        return divergence

    def both(llm: LLM, tasks: Tasks, one: Asked) -> dict[str, Any]:
        return {**divergence(llm, tasks, one), **scored_answer(llm, tasks, one)}

    return both
