"""`reproduce`: the runs behind the paper's tables and figures, and the tables and figures themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from lazyllm.evaluation.manifest import read_manifest
from lazyllm.evaluation.options import DataOptions
from lazyllm.evaluation.report import warmth
from lazyllm.evaluation.results import ITEMS, read_rows
from lazyllm.evaluation.run import Run, category_of, tasks_of
from lazyllm.evaluation.runner import label_of, run_items
from lazyllm.evaluation.summary import Summary
from lazyllm.evaluation.tasks import Tasks
from lazyllm.llm import LLM, checked_llm
from lazyllm.method import Method
from lazyllm.pictures.figure import new_figure
from lazyllm.pruning import Pruning
from lazyllm.reproduce import figures, tables
from lazyllm.reproduce.paper import Published, setup_of
from lazyllm.reproduce.rivals import METHODS, rivals
from lazyllm.support import checked
from lazyllm.support.files import user_path, write_whole
from lazyllm.support.tables import Table

# Figure 5: the speedups by counted work are 1 + strength * (the setup's speedup - 1)
STRENGTHS = (0.5, 1.0, 1.5, 2.0)
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)  # Figure 6: shares of the layers
KEEPS = (0.1, 0.3, 0.5, 0.7, 0.9)  # Figure 6
SEEDS = 5  # random drop, as in the paper
Settings = Mapping[tuple[float, str | int], Sequence[Method]]
"""As in Results."""


class Target(NamedTuple):
    """A table, with what it says of its settings, a picture with its title, or both, of a run."""

    run: str
    table: Callable[[tables.Results], Table] | None = None
    note: str = ""
    picture: Callable[[tables.Results, str, Path], Path] | None = None
    title: str = ""


EQUAL_WORK = "; methods at {speedup:g}x by counted work for {n_prompt} prompt tokens"
COUNTED = "; speedups counted for {n_prompt} prompt tokens"
FIGURE_2 = "Figure 2: attention of the last prompt token"
FIGURE_5 = "Figure 5: score against the speedup of the first token"
FIGURE_6 = "Figure 6: where tokens are dropped, and how many"
TARGETS = {
    "table1": Target("methods", tables.accuracy, EQUAL_WORK),
    "table2": Target("methods", tables.work, EQUAL_WORK),
    "figure1": Target("dense", tables.first_token),
    "figure2": Target("attention", picture=figures.attention, title=FIGURE_2),
    "figure5": Target("strengths", tables.strengths, COUNTED, figures.pareto, FIGURE_5),
    "figure6": Target("places", picture=figures.places, title=FIGURE_6),
    "figure7": Target("methods", picture=figures.token_use),
}


@dataclass(frozen=True)
class Reproduction:
    """The `files` written, the number of `failed` items in their runs, and the `texts` of the tables."""

    files: list[Path]
    failed: int
    texts: list[str]

    def text(self) -> str:
        """The tables, aligned for a terminal."""
        return "\n\n".join(self.texts)


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
    wanted = list(dict.fromkeys([targets] if isinstance(targets, str) else targets))
    names = [methods] if isinstance(methods, str) else list(METHODS if methods is None else methods)
    check(wanted, names)
    checked.whole(seeds, "seeds", 1)
    setup = setup_of(checked_llm(llm), preset)
    data = DataOptions.of(options, reproduce, max_length=setup.max_length, chat=setup.chat)
    tasks, n_prompt, folder = tasks_of(llm, data), data.max_length, user_path(out)
    speedup = setup.speedup if speedup is None else speedup
    model = llm.config.name or llm.checkpoint.path.name

    def at(speedups: Sequence[float]) -> Settings:
        return {
            (counted, method): settings
            for counted in speedups
            for method, settings in rivals(llm.config, n_prompt, counted, seeds, names).items()
        }

    def in_places() -> Settings:
        n_layers = llm.config.n_layers
        layers = sorted({min(n_layers - 2, round(depth * n_layers)) for depth in DEPTHS})
        return {(keep, layer): [Pruning({layer: keep})] for keep in KEEPS for layer in layers}

    plans: dict[str, Callable[[], Settings]] = {
        "methods": lambda: at([speedup]),
        "strengths": lambda: at([1 + strength * (speedup - 1) for strength in STRENGTHS]),
        "places": in_places,
    }
    runs = dict.fromkeys(TARGETS[name].run for name in wanted)
    # errors that would come after the first run: too high a speedup, no matplotlib
    settings = {run: plans[run]() if run in plans else {} for run in runs}
    if any(TARGETS[name].picture for name in wanted):
        new_figure(1, 1)
    done = {run: ran(llm, tasks, run, settings[run], folder / run, data, setup.published) for run in runs}
    files, texts = [], []
    for name in wanted:
        target, results = TARGETS[name], done[TARGETS[name].run]
        if target.picture:
            files.append(target.picture(results, f"{target.title}, {model}", folder / f"{name}.png"))
        if target.table:
            note = target.note.format(speedup=speedup, n_prompt=n_prompt)
            conditions = (
                f"{model}, preset {setup.name}{note}. {conditions_of(results.summary, folder / target.run)}"
            )
            table = target.table(results)
            texts.append(f"{table.title}\n{conditions}\n\n{table.text()}")
            markdown = f"## {table.title}\n\n{conditions}\n\n{table.markdown()}\n"
            for suffix, content in ((".md", markdown), (".csv", table.csv()), (".tex", table.latex())):
                files.append(folder / f"{name}{suffix}")
                write_whole(files[-1], content)
    return Reproduction(files, sum(len(results.summary.failed) for results in done.values()), texts)


def check(targets: Sequence[str], methods: Sequence[str]) -> None:
    """Raises an error if a target or method does not exist, or one is missing that a target is about."""
    for names, known, what in ((targets, TARGETS, "target"), (methods, METHODS, "method")):
        if not names:
            raise ValueError(f"no {what} is named; there are {', '.join(known)}")
        for name in names:
            if name not in known:
                raise ValueError(f"there is no {what} {name!r}; there are {', '.join(known)}")
    if "table2" in targets and "lazyllm" not in methods:
        raise ValueError("table2 is about lazyllm, which methods must name")
    if "figure7" in targets and not {"lazyllm", "recommended"} & set(methods):
        raise ValueError("figure7 is about lazyllm and recommended; methods must name one of them")


def ran(
    llm: LLM,
    tasks: Tasks,
    name: str,
    settings: Settings,
    folder: Path,
    options: DataOptions,
    published: Published,
) -> tables.Results:
    """Runs what the folder does not have yet."""
    methods = [Pruning(), *chain.from_iterable(settings.values())]
    labelled = {label_of(method): method for method in methods}
    if name == "attention":
        untimed = replace(options, warm_ups=0)
        run_items(llm, labelled, tasks, folder, untimed, figures.attention_of, {"measure": name})
    else:
        run_items(llm, labelled, tasks, folder, options)
        Run(folder).report()
    summary = Summary(read_rows(folder), category_of)
    if not summary.rows:
        raise ValueError(f"every item of the run failed; {folder / ITEMS} has the errors")
    labels = {place: [label_of(method) for method in methods] for place, methods in settings.items()}
    return tables.Results(summary, labels, published)


def conditions_of(summary: Summary, folder: Path) -> str:
    """One line on items, limits, timing and failures of a run."""
    manifest = read_manifest(folder)
    cap = manifest["conditions"]["cap on new tokens"]
    text = f"{sum(summary.items.values())} items of {len(summary.items)} data sets"
    text += f", answers cut at {cap} tokens" if cap else ""
    text += f"; times are {warmth(summary, manifest['environments'])}."
    failed = len(summary.failed)
    return f"{text} {failed} results failed and are in no figure." if failed else text
