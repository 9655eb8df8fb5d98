"""A reproduction: the runs behind the paper's tables and figures, and what is made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lazyllm import checked
from lazyllm.llm import LLM
from lazyllm.longbench.report import Table
from lazyllm.longbench.results import write_whole
from lazyllm.longbench.run import Run, tasks_of
from lazyllm.longbench.runner import WARM_UPS, label_of, run_items
from lazyllm.longbench.summary import DENSE
from lazyllm.longbench.tasks import Limits, Tasks
from lazyllm.longbench.token_use import by_pruned_setting, plot_token_use
from lazyllm.methods import Method
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
    warm_ups: int
    progress: bool

    # ---- runs ------------------------------------------------------------------------------------

    def ran(self, name: str, settings: Sequence[Method]) -> Run:
        folder = self.out / name
        labelled = {label_of(method): method for method in settings}
        run_items(self.llm, labelled, self.tasks, folder, self.warm_ups, self.progress)
        made = Run(folder)
        made.report()
        return made

    def rivals(self, speedup: float) -> Rivals:
        return rivals(self.llm.config, self.n_prompt, speedup, self.seeds)

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
        run_items(self.llm, dense, self.tasks, folder, 0, self.progress, attention_of, measured)
        rows = Run(folder).summary.rows
        title = f"Figure 2: attention of the last prompt token, {self.model}, mean of {len(rows)} prompts"
        return [figures.attention(rows, title, self.out / "figure2.png")]

    def figure5(self) -> list[Path]:
        several = [self.rivals(1 + strength * (self.speedup - 1)) for strength in STRENGTHS]
        made = self.ran("strengths", all_settings(several))
        title = f"Figure 5: score against the speedup of the first token, {self.model}"
        labels = [labels_of(one) for one in several]
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
            f"{self.model}; methods at {self.speedup:g}x by counted work for {self.n_prompt} prompt tokens."
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
    max_length: int | None = None,
    max_new_tokens: int | None = None,
    prompts: str | Path | None = None,
    speedup: float | None = None,
    seeds: int = SEEDS,
    warm_ups: int = WARM_UPS,
    progress: bool = True,
) -> list[Path]:
    """Runs what is missing for the paper's tables and figures named in `targets`, and writes them to `out`.

    `preset` names the model's (by default the checkpoint's name does); it sets `max_length` and `speedup`,
    that of all methods by counted work, where they are not given. `data`, `datasets`, `limit`, `sample`,
    `max_new_tokens` and `prompts` are as for `lazyllm.longbench.run`.
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
    limits = Limits(limit, sample, max_length=n_prompt, max_new_tokens=max_new_tokens)
    made = Reproduction(
        llm,
        tasks_of(llm, data, datasets, limits, prompts),
        chosen,
        n_prompt,
        chosen.speedup if speedup is None else speedup,
        seeds,
        Path(out),
        warm_ups,
        progress,
    )
    return [path for name in dict.fromkeys(wanted) for path in TARGETS[name](made)]


def labels_of(several: Rivals) -> tables.Labels:
    return {name: [label_of(method) for method in methods] for name, methods in several.items()}
