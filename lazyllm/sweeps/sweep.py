"""Sweep: many settings on the same prompts, and the best among them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from itertools import product
from math import isnan
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, get_args

from lazyllm.evaluation.measures import TOKENS, Divergence
from lazyllm.evaluation.options import DataOptions, RunOptions, documented
from lazyllm.evaluation.own_prompts import OwnPrompts
from lazyllm.evaluation.report import Results, category_of
from lazyllm.evaluation.results import SCORE, read_manifest, read_rows
from lazyllm.evaluation.run import Settings, checked_settings, has_names, run_items, tasks_of
from lazyllm.evaluation.summary import DENSE_LABEL, Row, Summary, item_of
from lazyllm.evaluation.tasks import Tasks
from lazyllm.evaluation.trial import Measure, Trial, scored_answer
from lazyllm.llm import LLM, load
from lazyllm.method import Method
from lazyllm.methods.parsing import parse_method
from lazyllm.prompt import Prompt
from lazyllm.pruning import Pruning
from lazyllm.scoring import Scoring
from lazyllm.support import checked
from lazyllm.support.files import user_path
from lazyllm.support.tables import Table
from lazyllm.sweeps.points import Frame, Point, front, plot_points, points

Quality = Literal["kl", "score", "both"]
PICTURE = "pareto.png"
SCORING = {field.name for field in fields(Scoring)}
AXES = {"layer", "keep", *SCORING, *(field.name for field in fields(Pruning))}
Space: TypeAlias = Mapping[str, Iterable[Any]] | Settings


class Measured(Frame, Results):
    """The measured settings of a sweep or search; `folder` is None without `out`."""

    speedup = "ttft_speedup"
    """The field of a point that is the speedup in the Pareto front."""

    def __init__(
        self, rows: Sequence[Row], manifest: Mapping[str, Any], folder: Path | None, methods: Mapping[str, Method]
    ) -> None:
        Results.__init__(self, rows, manifest, folder)
        self._methods = methods
        Frame.__init__(self, self._points_of(rows))

    @classmethod
    def read(cls, folder: str | Path) -> Self:
        """Opens the folder of a sweep or search that has ended, was interrupted or still runs.

        A sweep with policies, which are code, is opened by calling `sweep` again: finished items do not run.
        """
        path = user_path(folder)
        manifest = read_manifest(path)
        if (measure := manifest["conditions"]["measure"]) not in get_args(Quality):
            raise ValueError(f"{path} holds a run that is no sweep, but the measure {measure!r}")
        return cls(read_rows(path), manifest, path, settings_in(manifest, {}))

    def _points_of(self, rows: Sequence[Row]) -> list[Point]:
        return [*points(Summary(rows, category_of), self._methods)]

    @cached_property
    def compared(self) -> Frame:
        """The settings on the prompts that all of them have: those of `pareto`, `best` and `plot`. In a sweep
        that has grown unevenly, its own table has means over different prompts."""
        results = [found for setting in self.summary.settings if (found := self.summary.of(setting))]
        shared = (row for row in self.rows if all(item_of(row) in found for found in results))
        return Frame(self._points_of([row for row in shared if "error" not in row]))

    def pareto(self) -> Frame:
        """The Pareto front in quality and speedup, slowest setting first: measured speedup in a sweep,
        counted in a search.

        Quality is the score, or without scores the KL divergence. A setting is on the front unless another one
        is equal or better in both and better in one.
        """
        return Frame(front([*self.compared], self.speedup))

    def plot(self, file: str | Path | None = None) -> Path:
        """Draws quality against speedup with the Pareto front; needs matplotlib.

        The default `file` is pareto.png in the folder, or in the working directory without one.
        """
        target = user_path(file) if file else (self.folder or Path()) / PICTURE
        return plot_points([*self.compared], self.heading, target, self.speedup)

    @property
    def heading(self) -> str:
        return f"{self.manifest['model']}: {len(self)} settings on {sum(self.summary.items.values())} prompts"

    @property
    def tables(self) -> dict[str, Table]:
        return {"settings": self.table}

    def draw(self) -> list[Path]:
        return [self.plot()]


class Sweep(Measured):
    """The settings of a sweep, dense first."""

    def best(self, max_drop: float = 0.01) -> Point:
        """The setting with the largest measured speedup whose quality is at most `max_drop` below dense's.

        Quality is a number from 0 to 1: score / 100 (a drop of 0.01 is one point), or in a sweep without
        scores the share of equal argmaxes. If no setting is faster, it is dense itself.
        """
        drop = checked.number(max_drop, "max_drop")
        if drop < 0:
            raise ValueError(f"max_drop must be 0 or above, not {drop}")
        min_share = self.compared[DENSE_LABEL].share - drop
        fit = [point for point in self.compared if point.share >= min_share and not isnan(point.ttft_speedup)]
        if not fit:
            raise ValueError("the sweep has no result of dense yet, with which settings are compared")
        return max(fit, key=lambda point: point.ttft_speedup)


def settings_in(manifest: Mapping[str, Any], methods: Mapping[str, Method]) -> dict[str, Method]:
    """By label: `methods`, and the other settings of a sweep's folder, made from their texts."""
    texts = manifest["conditions"]["settings"]
    return {label: methods.get(label) or parse_method(text) for label, text in texts.items()} | dict(methods)


def settings_of(space: Space) -> dict[str, Method]:
    """Methods by name, dense first."""
    named = has_names(space) and not AXES & space.keys()
    chosen = combined(space) if isinstance(space, Mapping) and not named else space
    settings = {DENSE_LABEL: Pruning(), **checked_settings(chosen)}
    if len(settings) == 1:
        raise ValueError("the space holds dense alone, which every sweep measures; give settings to compare")
    return settings


def combined(axes: Mapping[str, Any]) -> list[Pruning]:
    """The product of the axes. An axis is a field of Pruning or of Scoring; `layer` and `keep` are a single
    stage's."""
    for name, axis in axes.items():
        if isinstance(axis, str | bytes | Mapping) or not isinstance(axis, Iterable):
            raise TypeError(f"{name} must be a list of values to try, such as [{axis!r}], not {axis!r}")
    single = "keep" in axes and "layer" in axes
    if ("stages" in axes) == single:
        raise ValueError(
            'the space needs either "stages" or both "layer" and "keep" (one stage, at each layer with each '
            f"keep); it has {', '.join(axes) or 'nothing'}"
        )
    settings = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    for setting in settings:
        if single:
            setting["stages"] = {setting.pop("layer"): setting.pop("keep")}
        if scoring := {name: setting.pop(name) for name in SCORING & setting.keys()}:
            setting["scoring"] = replace(Scoring.from_fields(setting.get("scoring", {})), **scoring)
    return [Pruning.from_fields(setting) for setting in settings]


@documented(DataOptions)
def sweep(
    llm: LLM | str | Path,
    space: Space,
    *,
    prompts: Sequence[Prompt] | None = None,
    measure: Quality = "kl",
    tokens: int = TOKENS,
    out: str | Path | None = None,
    **options: Any,
) -> Sweep:
    """Runs dense and every setting of a space on the same prompts and measures quality and speed.

    `space`: settings or their texts, also by name: {"ours": setting}; or axes whose product is taken, each a
    field of Pruning or Scoring with a list of values, such as {"stages": [{10: 0.7}, {20: 0.5}], "smooth":
    [1, 13]}. For single stages, the axes "layer" and "keep" replace "stages".

    `prompts`: your own, in place of `data`: texts, which get the `wrapper` (the chat template where the model has one),
    lists of messages or lists of token ids. They have no scores, so that the measure is "kl".

    `measure`: "kl" teacher-forces dense's greedy answer of at most `tokens` tokens; "score" generates answers
    and scores them; "both" does both and takes its times from the generated answers.

    With `out` the sweep is a folder with a report, an interrupted sweep continues, and the folder of an
    earlier sweep takes further settings and items.
    """
    checked.choice(measure, "measure", get_args(Quality))
    measuring, data = measure_of(measure, tokens), DataOptions.of(options)
    model = llm if isinstance(llm, LLM) else load(llm)
    settings = settings_of(space)
    tasks = tasks_of(model, data) if prompts is None else own_prompts(model, prompts, measure, tokens, data)
    conditions: dict[str, Any] = {"measure": measure}
    if measure != SCORE:
        conditions["forced tokens"] = tokens
    folder, methods = None if out is None else user_path(out), settings
    if folder and read_rows(folder):  # raises before any run if a setting there is code and not given
        methods = settings_in(read_manifest(folder), settings)
    swept = Sweep(*run_items(model, settings, tasks, folder, data, measuring, conditions), folder, methods)
    if folder:
        swept.report()
    return swept


def own_prompts(llm: LLM, prompts: Sequence[Prompt], measure: Quality, tokens: int, options: DataOptions) -> OwnPrompts:
    of_data = [field.name for field in fields(DataOptions)[len(fields(RunOptions)) :]]
    options.refuse(of_data, "for LongBench's items or generated ones, not for prompts of yours")
    if measure != "kl" or not prompts:
        raise ValueError('prompts of yours, one at least, have no scores: the measure is "kl"')
    return OwnPrompts(llm, prompts, tokens, options.wrapper)


def measure_of(measure: Quality, tokens: int) -> Measure:
    """The measure of the runner. Items without answers, such as a user's own prompts, have no score."""
    divergence = Divergence(tokens)

    def both(llm: LLM, tasks: Tasks, trial: Trial) -> dict[str, Any]:
        row = divergence(llm, tasks, trial)
        return {**row, **scored_answer(llm, tasks, trial)} if "answers" in trial.item else row

    measures: dict[Quality, Measure] = {"kl": divergence, "score": scored_answer, "both": both}
    return measures[measure]
