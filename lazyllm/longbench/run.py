"""A whole run, and what can be asked of it afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lazyllm.llm import LLM
from lazyllm.longbench.datasets import DATA_SETS
from lazyllm.longbench.generated import Generated, heat_map_rows, niah_items, ruler_items, task_and_length
from lazyllm.longbench.metrics import EDIT_SIM
from lazyllm.longbench.niah import DEPTHS, heat_map
from lazyllm.longbench.prompt import MAX_LENGTH, Chat
from lazyllm.longbench.report import REPORT, report
from lazyllm.longbench.results import read_manifest, read_rows
from lazyllm.longbench.ruler import TASKS
from lazyllm.longbench.runner import WARM_UPS, Manner, Setting, checked_settings, run_items
from lazyllm.longbench.summary import Summary
from lazyllm.longbench.tasks import Limits, LongBench, Tasks
from lazyllm.longbench.token_use import by_pruned_setting, plot_token_use
from lazyllm.methods import Method

if TYPE_CHECKING:
    import pandas

PICTURE, HEAT_MAP, TOKEN_USE = "scores.png", "heat_map.png", "token_use.png"
GENERATED_COUNT, SEED = 5, 0
MEASURE = "score"  # what a manifest that names no measure is of


def category_of(name: str) -> str:
    """Of a data set of the benchmark, or of a generated task at a length."""
    return DATA_SETS[name].category if name in DATA_SETS else TASKS[task_and_length(name)[0]].category


class Run:
    """The results in a folder: of a run that has ended, or of one that was cut short."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.manifest: dict[str, Any] = read_manifest(self.folder)
        if (measure := self.manifest.get("measure", MEASURE)) != MEASURE:
            raise ValueError(f"{self.folder} holds no scored answers but the measure {measure!r}")
        self.rows: list[dict[str, Any]] = read_rows(self.folder)

    def __repr__(self) -> str:
        failed = len(self.summary.failed)
        told = f", {failed} failed" if failed else ""
        return f"<Run {self.folder}: {len(self.rows)} lines{told}, {len(self.summary.settings)} settings>"

    @cached_property
    def summary(self) -> Summary:
        return Summary(self.rows, category_of)

    def scores(self) -> dict[str, dict[str, float]]:
        """By setting: the score of each data set, 0 to 100."""
        names = self.summary.datasets
        return {one: {name: self.summary.score(one, name) for name in names} for one in self.summary.settings}

    def to_frame(self) -> pandas.DataFrame:
        """One row an item and setting; needs pandas."""
        try:
            import pandas
        except ImportError:
            raise ImportError("to_frame needs pandas: pip install 'lazyllm-engine[longbench]'") from None
        return pandas.json_normalize(self.rows)

    def plot(self, file: str | Path | None = None) -> Path:
        """Accuracy against the speedup of the first token, a point a setting; needs matplotlib."""
        from lazyllm.longbench.plot import plot

        return plot(self.summary, Path(file) if file else self.folder / PICTURE, str(self.manifest["model"]))

    def report(self) -> Path:
        """Writes report.md, the tables and, with matplotlib, the picture."""
        try:
            pictures = [self.plot().name]
            if pruned := by_pruned_setting(self.summary.rows):
                pictures.append(plot_token_use(pruned, self.folder / TOKEN_USE).name)
            if "depths" in self.manifest and (rows := heat_map_rows(self.summary.rows)):
                pictures.insert(0, heat_map(rows, self.folder / HEAT_MAP).name)
        except ImportError:
            pictures = []
        report(self.folder, self.summary, self.manifest, pictures)
        return self.folder / REPORT


def run(
    llm: LLM,
    pruning: Setting | Sequence[Setting] = None,
    *,
    data: str | Path | None = None,
    datasets: Sequence[str] | None = None,
    out: str | Path,
    limit: int | None = None,
    sample: int | None = None,
    min_item_length: int | None = None,
    max_item_length: int | None = None,
    max_length: int = MAX_LENGTH,
    max_new_tokens: int | None = None,
    chat: Chat = "auto",
    prompts: str | Path | None = None,
    edit_sim: str = EDIT_SIM,
    warm_ups: int = WARM_UPS,
    retry_failed: bool = False,
    progress: bool = True,
) -> Run:
    """Asks LongBench's items under one setting or several, and writes manifest, lines and report to `out`.

    Run again, it goes on where it stopped. `pruning`: settings or their texts, None being dense. `data`: a
    folder, zip or parquet of the benchmark, or hub:OWNER/NAME; None generates tasks like RULER's of
    `max_length` tokens. `limit` takes each data set's first items, `sample` so many drawn with a fixed seed,
    the lengths are LongBench's own. `max_new_tokens` caps what the benchmark allows. `retry_failed` asks
    those items again that failed in earlier runs.
    """
    limits = Limits(limit, sample, min_item_length, max_item_length, max_length, max_new_tokens, chat)
    settings = checked_settings(pruning)
    tasks = tasks_of(llm, data, datasets, limits, prompts, edit_sim)
    return finished(llm, settings, tasks, out, Manner(warm_ups, retry_failed, progress))


def tasks_of(
    llm: LLM,
    data: str | Path | None,
    datasets: Sequence[str] | None,
    limits: Limits,
    prompts: str | Path | None = None,
    edit_sim: str = EDIT_SIM,
) -> Tasks:
    """The benchmark's from the user's files or, without any, generated ones."""
    if data is not None:
        return LongBench(data, datasets, Path(prompts) if prompts else None, limits, edit_sim)
    for name, value in {
        "sample": limits.sample,
        "min_item_length": limits.min_item_length,
        "max_item_length": limits.max_item_length,
        "prompts": prompts,
        "edit_sim": None if edit_sim == EDIT_SIM else edit_sim,
    }.items():
        if value is not None:
            raise ValueError(
                f"{name} is for LongBench's own items and needs data; without, tasks are generated"
            )
    count = GENERATED_COUNT if limits.limit is None else limits.limit
    if known := [name for name in datasets or () if name in DATA_SETS]:
        raise ValueError(
            f"{', '.join(known)} is of LongBench and needs data; without, tasks are generated: "
            + ", ".join(TASKS)
        )
    items = ruler_items(llm.tokenizer, datasets, [limits.max_length], count, SEED, None)
    asked = {"tasks": "ruler", "lengths": [limits.max_length], "seed": SEED}
    return Generated(items, asked, limits.chat, limits.max_new_tokens)


def run_ruler(
    llm: LLM,
    pruning: Setting | Sequence[Setting] = None,
    *,
    out: str | Path,
    lengths: Sequence[int],
    tasks: Sequence[str] | None = None,
    count: int = 5,
    seed: int = 0,
    prose: str | Path | None = None,
    chat: Chat = "auto",
    warm_ups: int = WARM_UPS,
    retry_failed: bool = False,
    progress: bool = True,
) -> Run:
    """RULER-style tasks, generated: `count` items of each at each length in the model's own tokens."""
    settings = checked_settings(pruning)
    items = ruler_items(llm.tokenizer, tasks, lengths, count, seed, prose)
    asked = {"tasks": "ruler", "lengths": list(lengths), "seed": seed, "prose": str(prose)}
    return finished(
        llm, settings, Generated(items, asked, chat), out, Manner(warm_ups, retry_failed, progress)
    )


def run_niah(
    llm: LLM,
    pruning: Setting | Sequence[Setting] = None,
    *,
    out: str | Path,
    lengths: Sequence[int],
    depths: Sequence[float] = DEPTHS,
    count: int = 1,
    seed: int = 0,
    prose: str | Path | None = None,
    chat: Chat = "auto",
    warm_ups: int = WARM_UPS,
    retry_failed: bool = False,
    progress: bool = True,
) -> Run:
    """One needle at each depth, in percent, of texts of each length; the report has a heat map."""
    settings = checked_settings(pruning)
    items = niah_items(llm.tokenizer, lengths, depths, count, seed, prose)
    asked = {
        "tasks": "niah",
        "lengths": list(lengths),
        "depths": list(depths),
        "seed": seed,
        "prose": str(prose),
    }
    return finished(
        llm, settings, Generated(items, asked, chat), out, Manner(warm_ups, retry_failed, progress)
    )


def finished(
    llm: LLM,
    settings: dict[str, Method],
    tasks: Tasks,
    out: str | Path,
    manner: Manner,
) -> Run:
    run_items(llm, settings, tasks, Path(out), manner)
    made = Run(out)
    made.report()
    return made
