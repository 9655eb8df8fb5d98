"""The runner: runs every item under every setting and appends each result to the run's folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeGuard

from lazyllm.checkpoints import digest
from lazyllm.evaluation.conditions import conditions_behind, conditions_of_model, contents, environment
from lazyllm.evaluation.manifest import SCORE, Manifest, new_manifest
from lazyllm.evaluation.options import RunOptions
from lazyllm.evaluation.results import RunFolder
from lazyllm.evaluation.summary import DENSE_LABEL, failure
from lazyllm.evaluation.tasks import Tasks
from lazyllm.evaluation.trial import Measure, Trial, planned, result_row, scored_answer, warm_up
from lazyllm.evaluation.workers import Recipe, conditions_there, connected, results_there
from lazyllm.llm import LLM
from lazyllm.method import Method
from lazyllm.methods.parsing import PruningInput, as_method
from lazyllm.pruning import Pruning
from lazyllm.support.progress import bar

Settings = Mapping[str, PruningInput] | Sequence[PruningInput] | PruningInput
FIELDS = {"method", "policy", *(field.name for field in fields(Pruning))}
MEASURED: Mapping[str, Any] = {"measure": SCORE}


def checked_settings(pruning: Settings) -> dict[str, Method]:
    """Methods by name, which is their label where they have none; None and "dense" are no pruning."""
    if has_names(pruning):
        named = [(name, as_method(value)) for name, value in pruning.items()]
    else:
        inputs = pruning if isinstance(pruning, Sequence) and not isinstance(pruning, str) else [pruning]
        named = [(method.label, method) for method in map(as_method, inputs)]
    settings: dict[str, Method] = {}
    for name, method in named:
        if (name == DENSE_LABEL) != (method.label == DENSE_LABEL):
            raise ValueError(f"{name!r} is the name of {method.label}; dense alone is named {DENSE_LABEL!r}")
        if name in settings:
            raise ValueError(f"the setting {name} is given twice")
        settings[name] = method
    if not settings:
        raise ValueError("no setting is given; None is dense")
    return settings


def has_names(pruning: Settings) -> TypeGuard[Mapping[str, PruningInput]]:
    """True for settings by name, and not the stages of one by layer, or its fields."""
    return (
        isinstance(pruning, Mapping)
        and bool(pruning)
        and not FIELDS & pruning.keys()
        and all(isinstance(name, str) and not name.isdecimal() for name in pruning)
    )


def run_items(
    llm: LLM,
    settings: Mapping[str, Method],
    tasks: Tasks,
    out: Path | None,
    options: RunOptions,
    measure: Measure = scored_answer,
    measured: Mapping[str, Any] = MEASURED,
) -> tuple[list[dict[str, Any]], Manifest]:
    """All rows of the folder, which is temporary if `out` is None, and its manifest, after a run here or on
    workers of the trials that had no row.

    Each item runs under all settings in turn, so that load on the machine affects them alike. `measured`
    describes the measure in the manifest.
    """
    for method in settings.values():
        method.check(llm.config)
    tasks.check(llm)
    recipe = Recipe.of(llm, tasks, measure, options)
    with ExitStack() as stack:
        path = out or Path(stack.enter_context(TemporaryDirectory(prefix="lazyllm-")))
        client = stack.enter_context(connected(options, settings)) if options.on_workers else None
        if client and options.scheduler:
            common = client.submit(conditions_there, recipe, pure=False).result()
        else:
            common = conditions_of_model(llm, options.wrapper, options.progress)
        expected = {**common, **conditions_behind(llm, settings, options.progress)}
        texts = {label: method.to_json() for label, method in settings.items()}
        conditions = {**expected, "settings": texts, **measured, **tasks.conditions}
        manifest = new_manifest(llm.config.name or llm.checkpoint.path.name, conditions, tasks.selection)
        digests = contents(tasks.items)
        plan = list(planned(settings, tasks))
        again = {trial.key for trial in plan} if options.retry_failed else ()
        folder = stack.enter_context(RunFolder(path, manifest, digests, again))
        done = folder.done
        trials = [trial for trial in plan if trial.key not in done]
        recipe = replace(recipe, expected=expected, digests=dict(digest.known))
        results = results_there(client, recipe, trials) if client else results_here(llm, recipe, trials)
        line = stack.enter_context(bar(len(plan), "items", "item", options.progress))
        line.update(len(plan) - len(trials))
        n_failed = 0
        for row, where in results:
            if "error" in row and not line.disable:
                n_failed += 1
                line.write(f"failed: {failure(row)}", file=sys.stderr)
                line.set_postfix(failed=n_failed)
            added = folder.append({**row, "content": digests[row["dataset"], row["item"]]}, where)
            if options.on_row is not None:
                options.on_row(dict(added))
            line.update()
        if client:
            folder.sort([trial.key for trial in plan])
    return folder.rows, folder.manifest


def results_here(
    llm: LLM, recipe: Recipe, trials: Sequence[Trial]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Rows, and the environment that they are timed in."""
    warm_up(llm, recipe.tasks, trials, recipe.warm_ups)
    where = environment(llm, recipe.warm_ups)
    for trial in trials:
        yield result_row(llm, recipe.tasks, trial, recipe.measure), where
