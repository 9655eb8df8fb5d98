"""Runs of LongBench and of generated tasks: every item under every setting, the results in a folder."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeGuard

from lazyllm.evaluation.conditions import conditions_of_methods, conditions_of_model, environment
from lazyllm.evaluation.generated.tasks import TASKS, GeneratedTasks
from lazyllm.evaluation.longbench.datasets import DATA_SETS
from lazyllm.evaluation.longbench.items import GET
from lazyllm.evaluation.longbench.tasks import LongBench
from lazyllm.evaluation.options import DataOptions, NiahOptions, RulerOptions, RunOptions, documented
from lazyllm.evaluation.report import Run
from lazyllm.evaluation.results import SCORE, Key, Manifest, contents, new_manifest, opened_run
from lazyllm.evaluation.summary import DENSE_LABEL, failure
from lazyllm.evaluation.tasks import Tasks
from lazyllm.evaluation.trial import Measure, Trial, planned, result_row, scored_answer, warm_up
from lazyllm.evaluation.workers import Recipe, connected, worker_conditions, worker_results
from lazyllm.llm import LLM, checked_llm
from lazyllm.method import Method
from lazyllm.methods.parsing import PruningInput, as_method
from lazyllm.pruning import Pruning
from lazyllm.support.files import user_path
from lazyllm.support.progress import bar

Settings = Mapping[str, PruningInput] | Sequence[PruningInput] | PruningInput
FIELDS = {"method", "policy", *(field.name for field in fields(Pruning))}
MEASURED: Mapping[str, Any] = {"measure": SCORE}


@documented(DataOptions)
def run(llm: LLM, pruning: Settings = None, *, out: str | Path, **options: Any) -> Run:
    """Runs LongBench under one or several settings and writes manifest, results and report to `out`.

    A run that was interrupted continues where it stopped, items that failed run again, and one that has ended
    takes more settings and items in the same folder. `pruning`: settings or their texts, or by the names that
    reports show: {"ours": setting}; None is dense. Without `data`, tasks of RULER's kinds are generated.
    docs/runs.md has more on workers, and on folders that grow.
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
    llm: LLM, pruning: Settings, tasks: Callable[[LLM, Any], Tasks], out: str | Path, options: RunOptions
) -> Run:
    run_items(llm, checked_settings(pruning), tasks(checked_llm(llm), options), user_path(out), options)
    result = Run(out)
    result.report()
    return result


def tasks_of(llm: LLM, options: DataOptions) -> Tasks:
    """LongBench from the user's files; without data, generated tasks."""
    if options.data is not None:
        return LongBench(options)
    options.refuse(("templates", "edit_sim"), f"for LongBench's own items and needs data; {GET}")
    if of_longbench := [name for name in options.datasets or () if name in DATA_SETS]:
        names = ", ".join(TASKS)
        raise ValueError(f"{', '.join(of_longbench)} is of LongBench and needs data, not of {names}; {GET}")
    generated = RulerOptions(
        wrapper=options.wrapper,
        tasks=options.datasets,
        lengths=[options.max_length],
        count=RulerOptions.count if options.limit is None else options.limit,
    )
    return GeneratedTasks(llm, generated, options.max_new_tokens)


# ---- the runner -----------------------------------------------------------------------------------


def checked_settings(pruning: Settings) -> dict[str, Method]:
    """Methods by name, or by label if they have no name; None and "dense" mean no pruning."""
    if has_names(pruning):
        named = [(name, as_method(value)) for name, value in pruning.items()]
    else:
        inputs = pruning if isinstance(pruning, Sequence) and not isinstance(pruning, str) else [pruning]
        named = [(method.label, method) for method in map(as_method, inputs)]
    if not named:
        raise ValueError("no setting is given; None is dense")
    for number, (name, method) in enumerate(named):
        if (name == DENSE_LABEL) != (method.label == DENSE_LABEL):
            raise ValueError(f"{name!r} is the name of {method.label}; dense alone is named {DENSE_LABEL!r}")
        if name in dict(named[:number]):
            raise ValueError(f"the setting {name} is given twice")
    return dict(named)


def has_names(pruning: Settings) -> TypeGuard[Mapping[str, PruningInput]]:
    """True for settings by name; False for the stages of one setting by layer, and for its fields."""
    if not isinstance(pruning, Mapping) or not pruning or FIELDS & pruning.keys():
        return False
    return all(isinstance(name, str) and not name.isdecimal() for name in pruning)


def run_items(
    llm: LLM,
    settings: Mapping[str, Method],
    tasks: Tasks,
    out: Path | None,
    options: RunOptions,
    measure: Measure = scored_answer,
    measured: Mapping[str, Any] = MEASURED,
) -> tuple[list[dict[str, Any]], Manifest]:
    """Runs the trials without a row, here or on workers; returns all rows of the folder `out` and its manifest.
    If `out` is None the folder is temporary.

    Each item runs under all settings in turn, so that load on the machine affects them alike. `measured`
    describes the measure in the manifest.
    """
    for method in settings.values():
        method.check(llm.config_for(method))
    tasks.check(llm)
    recipe = Recipe.of(llm, tasks, measure, options)
    with ExitStack() as stack:
        path = out or Path(stack.enter_context(TemporaryDirectory(prefix="lazyllm-")))
        client = stack.enter_context(connected(options, settings)) if options.on_workers else None
        if client:
            common = client.submit(worker_conditions, recipe, pure=False).result()
        else:
            common = conditions_of_model(llm, tasks.wrapper, options.progress)
        expected = {**common, **conditions_of_methods(llm, settings, options.progress)}
        texts = {label: method.to_json() for label, method in settings.items()}
        conditions = {**expected, "settings": texts, **measured, **tasks.conditions}
        manifest = new_manifest(llm.config.name or llm.checkpoint.path.name, conditions, tasks.selection)
        digests = contents(tasks.items)
        plan = list(planned(settings, tasks))
        folder = stack.enter_context(opened_run(path, manifest, digests, {trial.key for trial in plan}))
        done = set(map(Key.of, folder.rows))
        trials = [trial for trial in plan if trial.key not in done]
        recipe = replace(recipe, expected=expected)
        results = worker_results(client, recipe, trials) if client else local_results(llm, recipe, trials)
        line = stack.enter_context(bar(len(plan), "items", "item", options.progress))
        line.update(len(plan) - len(trials))
        line.refresh()  # the first item may take long
        for row, where in results:
            if "error" in row and not line.disable:
                line.write(f"failed: {failure(row)}", file=sys.stderr)
            added = folder.append({**row, "content": digests[row["dataset"], row["item"]]}, where)
            if options.on_row is not None:
                options.on_row(dict(added))
            line.update()
        if client:
            folder.sort([trial.key for trial in plan])
    return folder.rows, folder.manifest


def local_results(llm: LLM, recipe: Recipe, trials: Sequence[Trial]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Rows, and the environment that they are timed in."""
    warm_up(llm, recipe.tasks, trials, recipe.warm_ups)
    where = environment(llm, recipe.warm_ups)
    for trial in trials:
        yield result_row(llm, recipe.tasks, trial, recipe.measure), where
