"""`reproduce`: the runs behind the paper's tables and figures, and the tables and figures themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lazyllm.evaluation.options import DataOptions
from lazyllm.evaluation.report import warmth
from lazyllm.evaluation.results import ITEMS, read_rows
from lazyllm.evaluation.run import Run, tasks_of
from lazyllm.evaluation.runner import label_of, run_items
from lazyllm.evaluation.summary import DENSE
from lazyllm.evaluation.tasks import Tasks
from lazyllm.evaluation.token_use import token_use_by_setting
from lazyllm.llm import LLM
from lazyllm.method import Method
from lazyllm.pictures.figure import new_figure
from lazyllm.pictures.token_use import plot_token_use
from lazyllm.pruning import Pruning
from lazyllm.reproduce import figures, tables
from lazyllm.reproduce.attention import attention_of
from lazyllm.reproduce.paper_setup import PaperSetup, setup_of
from lazyllm.reproduce.published import BY_MODEL, Published
from lazyllm.reproduce.rivals import BASELINE, LAZY, METHODS, RECOMMENDED, Rivals, all_settings, rivals
from lazyllm.support import checked
from lazyllm.support.files import write_whole
from lazyllm.support.tables import Table

# Figure 5: the speedups by counted work are 1 + strength * (the setup's speedup - 1)
STRENGTHS = (0.5, 1.0, 1.5, 2.0)
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)  # Figure 6: shares of the layers
KEEPS = (0.1, 0.3, 0.5, 0.7, 0.9)  # Figure 6
SEEDS = 5  # random drop, as in the paper
RUNS = ("dense", "methods", "strengths", "places", "attention")
OF_METHODS = {"table1", "table2", "figure7"}


@dataclass(frozen=True)
class Reproduction:
    """The `files` written, the number of `failed` items in their runs, and the `texts` of the tables."""

    files: list[Path]
    failed: int
    texts: list[str]

    def text(self) -> str:
        """The tables, aligned for a terminal."""
        return "\n\n".join(self.texts)


@dataclass(frozen=True)
class Reproducer:
    """Writes everything to `out`: a folder for each run, and the tables and pictures. A run starts or
    continues when its results are first needed."""

    llm: LLM
    tasks: Tasks
    setup: PaperSetup
    n_prompt: int
    speedup: float
    seeds: int
    names: Sequence[str]
    out: Path
    options: DataOptions
    texts: list[str] = field(default_factory=list)

    # ---- runs ------------------------------------------------------------------------------------

    def ran(self, name: str, settings: Sequence[Method]) -> Run:
        folder = self.out / name
        labelled = {label_of(method): method for method in settings}
        run_items(self.llm, labelled, self.tasks, folder, self.options)
        made = Run(folder)
        made.report()
        return made

    def rivals(self, speedup: float) -> Rivals:
        return rivals(self.llm.config, self.n_prompt, speedup, self.seeds, self.names)

    @cached_property
    def strengths(self) -> dict[float, Rivals]:
        """By speedup by counted work."""
        speedups = [1 + strength * (self.speedup - 1) for strength in STRENGTHS]
        return {speedup: self.rivals(speedup) for speedup in speedups}

    def check(self, wanted: Sequence[str]) -> None:
        """Raises errors that would otherwise come after the first run: no matplotlib, too high a speedup."""
        if any(name.startswith("figure") and name != "figure1" for name in wanted):
            new_figure(1, 1)
        if OF_METHODS & set(wanted):
            self.labels  # noqa: B018
        if "figure5" in wanted:
            self.strengths  # noqa: B018

    def failed(self) -> int:
        """Number of failed items in all runs in the folder."""
        return sum("error" in row for name in RUNS for row in read_rows(self.out / name))

    @cached_property
    def methods(self) -> Run:
        """The run of every method at one speedup."""
        return self.ran("methods", all_settings([self.rivals(self.speedup)]))

    @cached_property
    def labels(self) -> tables.Labels:
        return {BASELINE: [label_of(Pruning())], **labels_of(self.rivals(self.speedup))}

    # ---- tables and figures ----------------------------------------------------------------------

    def table1(self) -> list[Path]:
        table = tables.accuracy(self.methods.summary, self.labels, self.published)
        return self.write("table1", table, self.methods, self.equal_work)

    def table2(self) -> list[Path]:
        table = tables.work(self.methods.summary, self.labels, self.published)
        return self.write("table2", table, self.methods, self.equal_work)

    def figure1(self) -> list[Path]:
        run = self.ran("dense", [Pruning()])
        if not run.summary.rows:
            raise ValueError(f"Figure 1 has no answer; {run.folder / ITEMS} has the errors")
        return self.write("figure1", tables.first_token(run.summary), run)

    def figure2(self) -> list[Path]:
        folder = self.out / "attention"
        dense, measured = {DENSE: Pruning()}, {"measure": "attention"}
        untimed = replace(self.options, warm_ups=0)
        run_items(self.llm, dense, self.tasks, folder, untimed, attention_of, measured)
        rows = [row for row in read_rows(folder) if "error" not in row]
        if not rows:
            raise ValueError(f"Figure 2 has no prompt that did not fail; {folder / ITEMS} has the errors")
        title = f"Figure 2: attention of the last prompt token, {self.model}, mean of {len(rows)} prompts"
        return [figures.attention(rows, title, self.out / "figure2.png")]

    def figure5(self) -> list[Path]:
        made = self.ran("strengths", all_settings(self.strengths.values()))
        title = f"Figure 5: score against the speedup of the first token, {self.model}"
        labels = {speedup: labels_of(one) for speedup, one in self.strengths.items()}
        picture = figures.pareto(made.summary, [*labels.values()], title, self.out / "figure5.png")
        counted = f"; speedups counted for {self.n_prompt} prompt tokens"
        return [picture, *self.write("figure5", tables.strengths(made.summary, labels), made, counted)]

    def figure6(self) -> list[Path]:
        n_layers = self.llm.config.n_layers
        layers = sorted({min(n_layers - 2, round(depth * n_layers)) for depth in DEPTHS})
        settings = {(layer, keep): Pruning({layer: keep}) for keep in KEEPS for layer in layers}
        made = self.ran("places", [Pruning(), *settings.values()])
        labels = {place: label_of(method) for place, method in settings.items()}
        title = f"Figure 6: where tokens are dropped, and how many, {self.model}"
        return [figures.places(made.summary, labels, title, self.out / "figure6.png")]

    def figure7(self) -> list[Path]:
        shares = token_use_by_setting(self.methods.summary.rows)
        labels = [
            label for name in (LAZY, RECOMMENDED) for label in self.labels.get(name, ()) if label in shares
        ]
        if not labels:
            raise ValueError("Figure 7 needs an item that the method prunes, and no item here is long enough")
        return [plot_token_use({label: shares[label] for label in labels}, self.out / "figure7.png")]

    @property
    def model(self) -> str:
        return self.llm.config.name or self.llm.checkpoint.path.name

    @property
    def published(self) -> Published | None:
        return BY_MODEL.get(self.setup.paper_model or "")

    @property
    def equal_work(self) -> str:
        return f"; methods at {self.speedup:g}x by counted work for {self.n_prompt} prompt tokens"

    def write(self, name: str, table: Table, run: Run, settings: str = "") -> list[Path]:
        conditions = f"{self.model}, preset {self.setup.name}{settings}. {conditions_of(run)}"
        self.texts.append(f"{table.title}\n{conditions}\n\n{table.text()}")
        contents = {
            ".md": f"## {table.title}\n\n{conditions}\n\n{table.markdown()}\n",
            ".csv": table.csv(),
            ".tex": table.latex(),
        }
        for suffix, content in contents.items():
            write_whole(self.out / f"{name}{suffix}", content)
        return [self.out / f"{name}{suffix}" for suffix in contents]


TARGETS: dict[str, Callable[[Reproducer], list[Path]]] = {
    name: getattr(Reproducer, name)
    for name in ("table1", "table2", "figure1", "figure2", "figure5", "figure6", "figure7")
}


def reproduce(
    llm: LLM,
    targets: str | Sequence[str],
    *,
    out: str | Path,
    preset: str | None = None,
    speedup: float | None = None,
    seeds: int = SEEDS,
    methods: str | Sequence[str] | None = None,
    **options: Any,
) -> Reproduction:
    """Makes the paper's tables and figures named in `targets`, with the runs that they need, and writes all
    to `out`.

    `preset` names one of SETUPS; the default is by the checkpoint's name. It sets `max_length`, `chat` and
    `speedup`, which all methods have by counted operations, unless they are given. `seeds`: number of runs of
    random drop. `methods` are compared with dense: random, static, compress, fastkv, claa, gemfilter, lazyllm
    and recommended; the default is all. The other options are those of `lazyllm.longbench.run`.
    """
    wanted = [targets] if isinstance(targets, str) else list(targets)
    if not wanted:
        raise ValueError(f"nothing to reproduce is named; there are {', '.join(TARGETS)}")
    for name in wanted:
        if name not in TARGETS:
            raise ValueError(f"there is no {name!r} to reproduce; there are {', '.join(TARGETS)}")
    checked.whole(seeds, "seeds", 1)
    names = [methods] if isinstance(methods, str) else list(METHODS if methods is None else methods)
    check_methods(names, wanted)
    chosen = setup_of(llm, preset)
    given = DataOptions.of(options, max_length=chosen.max_length, chat=chosen.chat)
    maker = Reproducer(
        llm,
        tasks_of(llm, given),
        chosen,
        given.max_length,
        chosen.speedup if speedup is None else speedup,
        seeds,
        names,
        Path(out),
        given,
    )
    maker.check(wanted)
    files = [path for name in dict.fromkeys(wanted) for path in TARGETS[name](maker)]
    return Reproduction(files, maker.failed(), maker.texts)


def check_methods(methods: Sequence[str], wanted: Sequence[str]) -> None:
    """Raises an error if a method does not exist, or one is missing that the tables and figures are about."""
    if not methods:
        raise ValueError(f"no method to compare is named; there are {', '.join(METHODS)}")
    for name in methods:
        if name not in METHODS:
            raise ValueError(f"there is no method {name!r} to compare; there are {', '.join(METHODS)}")
    if "table2" in wanted and "lazyllm" not in methods:
        raise ValueError("table2 is about lazyllm, which methods must name")
    if "figure7" in wanted and not {"lazyllm", "recommended"} & set(methods):
        raise ValueError("figure7 is about lazyllm and recommended; methods must name one of them")


def conditions_of(run: Run) -> str:
    """One line on items, limits, timing and failures of a run."""
    items, cap = run.summary.items, run.manifest["conditions"]["cap on new tokens"]
    text = f"{sum(items.values())} items of {len(items)} data sets"
    text += f", answers cut at {cap} tokens" if cap else ""
    text += f"; times are {warmth(run.summary, run.manifest['environments'])}."
    failed = len(run.summary.failed)
    return f"{text} {failed} results failed and are in no figure." if failed else text


def labels_of(several: Rivals) -> tables.Labels:
    return {name: [label_of(method) for method in methods] for name, methods in several.items()}
