"""A reproduction: the runs behind the paper's tables and figures, and what is made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from lazyllm import checked
from lazyllm.llm import LLM
from lazyllm.longbench.prompt import Chat
from lazyllm.longbench.report import Table
from lazyllm.longbench.results import ITEMS, read_rows, write_whole
from lazyllm.longbench.run import Run, tasks_of
from lazyllm.longbench.runner import WARM_UPS, Manner, label_of, run_items
from lazyllm.longbench.summary import DENSE
from lazyllm.longbench.tasks import Limits, Tasks
from lazyllm.longbench.token_use import by_pruned_setting, plot_token_use
from lazyllm.methods import Method
from lazyllm.picture import new_figure
from lazyllm.pruning import Pruning
from lazyllm.reproduce import figures, tables
from lazyllm.reproduce.attention import attention_of
from lazyllm.reproduce.preset import Preset, preset_of
from lazyllm.reproduce.published import BY_MODEL, Published
from lazyllm.reproduce.rivals import BASELINE, LAZY, SMOOTHED, Rivals, all_settings, rivals

STRENGTHS = (0.25, 0.5, 1.0, 1.5)  # of Figure 5, shares of what the preset gains over 1
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)  # of Figure 6, shares of the layers
KEEPS = (0.1, 0.3, 0.5, 0.7, 0.9)  # as in the paper's
SEEDS = 5  # of random drop, as in the paper
RUNS = ("methods", "strengths", "places", "attention")
OF_METHODS = {"table1", "table2", "figure7"}


class Reproduced(NamedTuple):
    """What was written, and how many items of the runs behind it failed."""

    files: list[Path]
    failed: int


@dataclass(frozen=True)
class Reproduction:
    """Everything is in `out`: a folder for each run, which resumes, and the tables and pictures."""

    llm: LLM
    tasks: Tasks
    preset: Preset
    n_prompt: int
    speedup: float
    seeds: int
    out: Path
    manner: Manner

    # ---- runs ------------------------------------------------------------------------------------

    def ran(self, name: str, settings: Sequence[Method]) -> Run:
        folder = self.out / name
        labelled = {label_of(method): method for method in settings}
        run_items(self.llm, labelled, self.tasks, folder, self.manner)
        made = Run(folder)
        made.report()
        return made

    def rivals(self, speedup: float) -> Rivals:
        return rivals(self.llm.config, self.n_prompt, speedup, self.seeds)

    @cached_property
    def strengths(self) -> list[Rivals]:
        return [self.rivals(1 + strength * (self.speedup - 1)) for strength in STRENGTHS]

    def check(self, wanted: Sequence[str]) -> None:
        """Raises what would only show after the first of several runs."""
        if any(name.startswith("figure") for name in wanted):
            new_figure(1, 1)
        if OF_METHODS & set(wanted):
            self.labels  # noqa: B018
        if "figure5" in wanted:
            self.strengths  # noqa: B018

    def failed(self) -> int:
        """Items without a result, in all runs that are there."""
        return sum("error" in row for name in RUNS for row in read_rows(self.out / name))

    @cached_property
    def methods(self) -> Run:
        """Every method, at the preset's speedup."""
        return self.ran("methods", all_settings([self.rivals(self.speedup)]))

    @cached_property
    def labels(self) -> tables.Labels:
        return {BASELINE: [label_of(Pruning())], **labels_of(self.rivals(self.speedup))}

    # ---- what the paper shows --------------------------------------------------------------------

    def table1(self) -> list[Path]:
        return self.write("table1", tables.accuracy(self.methods.summary, self.labels, self.published))

    def table2(self) -> list[Path]:
        return self.write("table2", tables.work(self.methods.summary, self.labels, self.published))

    def figure2(self) -> list[Path]:
        folder = self.out / "attention"
        dense, measured = {DENSE: Pruning()}, {"measure": "attention"}
        untimed = replace(self.manner, warm_ups=0)
        run_items(self.llm, dense, self.tasks, folder, untimed, attention_of, measured)
        rows = [row for row in read_rows(folder) if "error" not in row]
        if not rows:
            raise ValueError(f"Figure 2 needs a prompt that runs; {folder / ITEMS} says why none did")
        title = f"Figure 2: attention of the last prompt token, {self.model}, mean of {len(rows)} prompts"
        return [figures.attention(rows, title, self.out / "figure2.png")]

    def figure5(self) -> list[Path]:
        made = self.ran("strengths", all_settings(self.strengths))
        title = f"Figure 5: score against the speedup of the first token, {self.model}"
        labels = [labels_of(one) for one in self.strengths]
        return [figures.pareto(made.summary, labels, title, self.out / "figure5.png")]

    def figure6(self) -> list[Path]:
        n_layers = self.llm.config.n_layers
        layers = sorted({min(n_layers - 2, round(depth * n_layers)) for depth in DEPTHS})
        settings = {(layer, keep): Pruning({layer: keep}) for keep in KEEPS for layer in layers}
        made = self.ran("places", [Pruning(), *settings.values()])
        labels = {place: label_of(method) for place, method in settings.items()}
        title = f"Figure 6: where tokens are dropped, and how many, {self.model}"
        return [figures.places(made.summary, labels, title, self.out / "figure6.png")]

    def figure7(self) -> list[Path]:
        pruned = by_pruned_setting(self.methods.summary.rows)
        lazy = {
            label: pruned[label]
            for name in (LAZY, SMOOTHED)
            for label in self.labels[name]
            if label in pruned
        }
        if not lazy:
            raise ValueError("Figure 7 needs an item that the method prunes, and no item here is long enough")
        return [plot_token_use(lazy, self.out / "figure7.png")]

    @property
    def model(self) -> str:
        return self.llm.config.name or self.llm.checkpoint.folder.name

    @property
    def published(self) -> Published | None:
        return BY_MODEL.get(self.preset.paper_model or "")

    def write(self, name: str, table: Table) -> list[Path]:
        told = (
            f"{self.model}, preset {self.preset.name}; methods at {self.speedup:g}x by counted work for "
            f"{self.n_prompt} prompt tokens. {asked_of(self.methods)}"
        )
        texts = {
            ".md": f"## {table.title}\n\n{told}\n\n{table.markdown()}\n",
            ".csv": table.csv(),
            ".tex": table.latex(),
        }
        for suffix, text in texts.items():
            write_whole(self.out / f"{name}{suffix}", text)
        return [self.out / f"{name}{suffix}" for suffix in texts]


TARGETS: dict[str, Callable[[Reproduction], list[Path]]] = {
    "table1": Reproduction.table1,
    "table2": Reproduction.table2,
    "figure2": Reproduction.figure2,
    "figure5": Reproduction.figure5,
    "figure6": Reproduction.figure6,
    "figure7": Reproduction.figure7,
}


def reproduce(
    llm: LLM,
    targets: str | Sequence[str],
    *,
    out: str | Path,
    preset: str | None = None,
    data: str | Path | None = None,
    datasets: Sequence[str] | None = None,
    limit: int | None = None,
    sample: int | None = None,
    min_item_length: int | None = None,
    max_item_length: int | None = None,
    max_length: int | None = None,
    max_new_tokens: int | None = None,
    chat: Chat | None = None,
    prompts: str | Path | None = None,
    speedup: float | None = None,
    seeds: int = SEEDS,
    warm_ups: int = WARM_UPS,
    retry_failed: bool = False,
    progress: bool = True,
) -> Reproduced:
    """Runs what is missing for the paper's tables and figures named in `targets`, and writes them to `out`.

    `preset` names the model's (by default the checkpoint's name does); it sets `max_length`, `chat` and
    `speedup`, that of all methods by counted work, where they are not given. The rest is as for
    `lazyllm.longbench.run`.
    """
    wanted = [targets] if isinstance(targets, str) else list(targets)
    if not wanted:
        raise ValueError(f"nothing is to be reproduced; there are {', '.join(TARGETS)}")
    for name in wanted:
        if name not in TARGETS:
            raise ValueError(f"there is no {name!r} to reproduce; there are {', '.join(TARGETS)}")
    checked.whole(seeds, "seeds", 1)
    chosen = preset_of(llm, preset)
    n_prompt = chosen.max_length if max_length is None else max_length
    wrapping = chosen.chat if chat is None else chat
    limits = Limits(limit, sample, min_item_length, max_item_length, n_prompt, max_new_tokens, wrapping)
    made = Reproduction(
        llm,
        tasks_of(llm, data, datasets, limits, prompts),
        chosen,
        n_prompt,
        chosen.speedup if speedup is None else speedup,
        seeds,
        Path(out),
        Manner(warm_ups, retry_failed, progress),
    )
    made.check(wanted)
    files = [path for name in dict.fromkeys(wanted) for path in TARGETS[name](made)]
    return Reproduced(files, made.failed())


def asked_of(run: Run) -> str:
    """What the figures of a run rest on."""
    items, manifest = run.manifest["items"], run.manifest
    cap, warm_ups = manifest["cap on new tokens"], manifest["warm-up runs"]
    told = f"{sum(items.values())} items of {len(items)} data sets"
    told += f", answers cut at {cap} tokens" if cap else ""
    told += f"; times are warm, after {warm_ups} runs." if warm_ups else "; times are cold."
    failed = len(run.summary.failed)
    return f"{told} {failed} results failed and count nowhere." if failed else told


def labels_of(several: Rivals) -> tables.Labels:
    return {name: [label_of(method) for method in methods] for name, methods in several.items()}
