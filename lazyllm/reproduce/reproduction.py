"""`reproduce`: the runs behind the paper's tables and figures, and the tables and figures themselves."""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from lazyllm.checkpoints.config import ModelConfig
from lazyllm.evaluation.options import OF_PRESET, DataOptions, documented
from lazyllm.evaluation.report import Run, warmth
from lazyllm.evaluation.results import ITEMS
from lazyllm.evaluation.run import completed_run, tasks_of
from lazyllm.evaluation.summary import token_use_by_setting
from lazyllm.llm import LLM, checked_llm
from lazyllm.method import Method
from lazyllm.pictures.figure import new_figure
from lazyllm.pictures.panels import plot_token_use
from lazyllm.pruning import DENSE, Pruning
from lazyllm.reproduce.pages import LAYOUTS, LINES, Comparison, plot_lines
from lazyllm.reproduce.paper import METHODS, SETUPS, preset_of, rivals
from lazyllm.support import checked
from lazyllm.support.files import user_path, write_whole

FIGURE_7 = "figure7"
TARGETS = {
    "table1": "methods",
    "table2": "methods",
    "figure1": "dense",
    "figure5": "strengths",
    "figure6": "places",
    FIGURE_7: "methods",
}
"""Tables and figures of the paper, by the run that each needs."""
# Figure 5: the speedups by counted work are 1 + strength * (the setup's speedup - 1)
STRENGTHS = (0.5, 1.0, 1.5, 2.0)
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)  # Figure 6: shares of the layers
KEEPS = (0.1, 0.3, 0.5, 0.7, 0.9)  # Figure 6
SEEDS = 5  # random drop, as in the paper


class Reproduction(NamedTuple):
    """The `files` written, the number of `failed` items in their runs, and the tables as `text`."""

    files: list[Path]
    failed: int
    text: str


@documented(DataOptions, max_length=OF_PRESET, wrapper=OF_PRESET)
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

    `preset` names one of SETUPS; the default is by the checkpoint's name. It sets `max_length`, `wrapper` and
    `speedup`, which all methods have by counted operations, unless they are given. `seeds`: number of runs of
    random drop. `methods` are compared with dense: random, static, compress, fastkv, claa, gemfilter, lazyllm
    and recommended; the default is all.
    """
    requested = list(dict.fromkeys([targets] if isinstance(targets, str) else targets))
    names = [methods] if isinstance(methods, str) else list(METHODS if methods is None else methods)
    for chosen, what, choices in ((requested, "a target", TARGETS), (names, "a method", METHODS)):
        for name in chosen:
            checked.choice(name, what, [*choices])
    checked.whole(seeds, "seeds", 1)
    preset = preset_of(checked_llm(llm)) if preset is None else preset
    setup = SETUPS[checked.choice(preset, "preset", [*SETUPS])]
    speedup = setup.speedup if speedup is None else speedup
    data = DataOptions.of(options, max_length=setup.max_length, wrapper=setup.wrapper)
    tasks, n_prompt, folder = tasks_of(llm, data), data.max_length, user_path(out)
    model = llm.config.name or llm.checkpoint.path.name
    # errors that would come after the first run: too high a speedup, no matplotlib
    config = llm.config_for(1 + max(STRENGTHS) * (speedup - 1))
    needed = dict.fromkeys(TARGETS[target] for target in requested)
    plans = {run: settings_of(run, config, n_prompt, speedup, seeds, names) for run in needed}
    if {FIGURE_7, *LINES} & {*requested}:
        new_figure(1, 1)
    runs = {}
    for name, settings in plans.items():
        labelled = {method.label: method for method in (DENSE, *chain(*settings.values()))}
        runs[name] = completed_run(llm, [*labelled.values()], lambda *_: tasks, folder / name, data)
        if not runs[name].summary.rows:
            raise ValueError(f"every item of the run failed; {folder / name / ITEMS} has the errors")
    files, texts = [], []
    for target in requested:
        run, settings = runs[TARGETS[target]], plans[TARGETS[target]]
        labels = {place: [method.label for method in group] for place, group in settings.items()}
        comparison = Comparison(run.summary, labels, setup.published)
        if target in LINES:
            files.append(plot_lines(comparison, target, model, folder / f"{target}.png"))
        if target == FIGURE_7:
            if not (panels := token_use_by_setting(run.summary.rows)):
                raise ValueError("Figure 7 needs a method that prunes layers, and items that are long enough for it")
            files.append(plot_token_use(panels, folder / f"{target}.png"))
        if target in LAYOUTS:
            table = comparison.table(target)
            counted = f"{speedup:g}x by counted work for {n_prompt} prompt tokens"
            conditions = f"{model}, preset {preset}: {counted}. {conditions_of(run)}"
            texts.append(f"{table.title}\n{conditions}\n\n{table.text()}")
            markdown = f"## {table.title}\n\n{conditions}\n\n{table.markdown()}\n"
            for suffix, content in ((".md", markdown), (".csv", table.csv())):
                files.append(folder / f"{target}{suffix}")
                write_whole(files[-1], content)
    return Reproduction(files, sum(len(run.summary.failed) for run in runs.values()), "\n\n".join(texts))


def settings_of(
    run: str, config: ModelConfig, n_prompt: int, speedup: float, seeds: int, names: Sequence[str]
) -> Mapping[tuple[str, str], Sequence[Method]]:
    """The methods that a run compares with dense, by the keys of `Comparison.settings`."""
    if run == "places":
        layers = sorted({min(config.n_layers - 2, round(depth * config.n_layers)) for depth in DEPTHS})
        stages = [(layer, keep) for keep in KEEPS for layer in layers]
        return {(str(layer), f"keep {keep:.0%} tokens"): [Pruning({layer: keep})] for layer, keep in stages}
    faster = [1 + strength * (speedup - 1) for strength in STRENGTHS]
    return {
        (f"{counted:g}x", method): group
        for counted in {"dense": [], "methods": [speedup], "strengths": faster}[run]
        for method, group in rivals(config, n_prompt, counted, seeds, names).items()
    }


def conditions_of(run: Run) -> str:
    """One line on items, limits, timing and failures of a run."""
    summary, cap = run.summary, run.manifest["conditions"]["cap on new tokens"]
    text = f"{sum(summary.items.values())} items of {len(summary.items)} data sets"
    text += f", answers cut at {cap} tokens" if cap else ""
    text += f"; times are {warmth(summary, run.manifest['environments'])}."
    failed = len(summary.failed)
    return f"{text} {failed} results failed and are in no figure." if failed else text
