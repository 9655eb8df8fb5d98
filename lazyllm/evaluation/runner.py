"""The runner: runs every item under every setting and appends each result to the run's folder."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from threading import Lock
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

import numpy as np

from lazyllm.checkpoints import digest
from lazyllm.errors import CheckpointError, DeviceError
from lazyllm.evaluation.chats import Chat
from lazyllm.evaluation.conditions import (
    conditions_behind,
    conditions_of_model,
    conditions_of_settings,
    contents,
    environment,
)
from lazyllm.evaluation.manifest import SCORE, differences, new_manifest
from lazyllm.evaluation.options import RunOptions
from lazyllm.evaluation.results import Key, RunFolder
from lazyllm.evaluation.summary import DENSE
from lazyllm.evaluation.tasks import Prompt, Task, Tasks
from lazyllm.evaluation.token_use import used
from lazyllm.evaluation.workers import Workers
from lazyllm.generation import Request
from lazyllm.llm import LLM, load
from lazyllm.method import Method
from lazyllm.methods import PruningInput, as_method
from lazyllm.pruning import Pruning
from lazyllm.sampling import SamplingParams
from lazyllm.support.progress import bar

WARM_UP_TOKENS, WARM_UP_NEW = 512, 2
MEASURED: Mapping[str, Any] = {"measure": SCORE}
SETTING_WIDTH = 40  # characters, in the progress bar
WARM_UP_TEXT = "The first sentence is short. So is the second."
FAILURES = (ValueError, RuntimeError, ArithmeticError, MemoryError)
"""Errors of one item, a prompt that needs too much memory among them; they do not end the run."""
BREAKS = (CheckpointError, DeviceError)
"""Those among them of the model or the machine, as is OSError: every later trial would fail as well."""


@dataclass(frozen=True)
class Trial:
    """One item under one setting."""

    key: Key
    task: Task
    item: Mapping[str, Any]
    method: Method


Result = tuple[dict[str, Any], dict[str, Any]]
"""A row and the environment that it was timed in."""
Measure = Callable[[LLM, Tasks, Trial], dict[str, Any]]
"""Runs one trial and returns the fields of its result row, without the key."""


@dataclass(frozen=True)
class Prepared:
    """The prompt of a trial. `whole` is the prompt before compression, which took `compressing` seconds;
    `method` is the setting that the engine runs it with."""

    prompt: Prompt
    whole: Prompt
    method: Method
    compressing: float = 0.0

    @property
    def n_whole(self) -> int:
        return len(self.whole.ids)

    @property
    def share(self) -> float:
        """Prompt tokens left by compression, as a share of the whole prompt."""
        return len(self.prompt.ids) / self.n_whole


def checked_settings(pruning: PruningInput | Sequence[PruningInput]) -> dict[str, Method]:
    """Methods by label; None and "dense" are no pruning."""
    several = pruning if isinstance(pruning, Sequence) and not isinstance(pruning, str) else [pruning]
    made: dict[str, Method] = {}
    for one in several:
        method = as_method(one)
        if (label := label_of(method)) in made:
            raise ValueError(f"the setting {label} is given twice")
        made[label] = method
    if not made:
        raise ValueError("no setting is given; None is dense")
    return made


def label_of(method: Method) -> str:
    return DENSE if method == Pruning() else str(method)


def run_items(
    llm: LLM,
    settings: Mapping[str, Method],
    tasks: Tasks,
    out: Path,
    options: RunOptions,
    measure: Measure | None = None,
    measured: Mapping[str, Any] = MEASURED,
) -> None:
    """Runs the trials that have no row in the folder yet, here or on workers. Each item runs under all
    settings in turn, so that load on the machine affects them alike.

    The default `measure` is `scored_answer`; `measured` describes the measure in the manifest.
    """
    for method in settings.values():
        method.check(llm.config)
    tasks.check(llm)
    recipe = Recipe.of(llm, tasks, measure or scored_answer, options)
    with ExitStack() as stack:
        there = stack.enter_context(workers_for(settings, options)) if options.on_workers else None
        if there and options.scheduler is not None:
            common = there.call(conditions_there, recipe)
        else:
            common = conditions_of_model(llm, options.chat, options.progress)
        of_settings = conditions_of_settings(llm, settings, options.progress)
        conditions = {**common, **of_settings, **measured, **tasks.conditions}
        manifest = new_manifest(llm.config.name or llm.checkpoint.path.name, conditions, tasks.selection)
        known = contents(tasks.items)
        plan = list(planned(settings, tasks))
        again = {one.key for one in plan} if options.retry_failed else ()
        folder = stack.enter_context(RunFolder(out, manifest, known, again))
        done = folder.done
        left = [one for one in plan if one.key not in done]
        expected = {**common, "behind settings": of_settings["behind settings"]}
        recipe = replace(recipe, expected=expected, digests=digest.known())
        results = results_there(there, recipe, left) if there else results_here(llm, recipe, left)
        line = stack.enter_context(bar(len(plan), "items", "item", options.progress))
        line.update(len(plan) - len(left))
        for row, where in results:
            content = known[row["dataset"], row["item"]]
            added = folder.append({**row, "content": content}, where)
            for call in options.callbacks:
                call(dict(added))
            line.set_postfix_str(means_so_far(folder.rows, row["setting"]))
            line.update()
        if there:
            folder.sort([one.key for one in plan])


@dataclass(frozen=True)
class Recipe:
    """The settings of a process that runs trials. `run` names the call of `run_items`; `model` has the
    arguments of `load`; `expected` are the conditions that the process must have, and `digests` those of
    files that need not be read again."""

    run: str
    model: Mapping[str, Any]
    tasks: Tasks
    measure: Measure
    chat: Chat
    warm_ups: int
    expected: Mapping[str, Any] = field(default_factory=dict)
    digests: digest.Known = field(default_factory=dict)

    @classmethod
    def of(cls, llm: LLM, tasks: Tasks, measure: Measure, options: RunOptions) -> Recipe:
        """The workers of a scheduler choose device and threads where they are; others share this process's
        threads and have its device."""
        without_items = copy(tasks)
        without_items.items = {}  # a trial has its own
        device, threads = ("auto", None) if options.scheduler else (llm.device, llm.threads)
        if threads and options.workers:
            threads = max(1, threads // options.workers)
        return cls(
            run=uuid4().hex,
            model={
                "path": str(llm.checkpoint.path.absolute()),
                "device": options.worker_device or device,
                "threads": options.worker_threads or threads,
                "compute": llm.compute,
                "weights": llm.weights,
                "kv": llm.kv,
                "cache_weights": llm.cache_weights,
            },
            tasks=without_items,
            measure=measure,
            chat=options.chat,
            warm_ups=options.warm_ups,
        )


def results_here(llm: LLM, recipe: Recipe, left: Sequence[Trial]) -> Iterator[Result]:
    where = environment(llm, recipe.warm_ups)
    if left:
        warm_up(llm, recipe.tasks, left, recipe.warm_ups)
    for one in left:
        yield result_row(llm, recipe.tasks, one, recipe.measure), where


# ---- on workers ----------------------------------------------------------------------------------


def workers_for(settings: Mapping[str, Method], options: RunOptions) -> Workers:
    workers = Workers(options.workers, options.scheduler)
    for label, method in settings.items():
        workers.check(method, f"the setting {label}")
    return workers


def results_there(workers: Workers, recipe: Recipe, left: Sequence[Trial]) -> Iterator[Result]:
    """In the order in which they are ready. Processes on one machine share its memory, so how many there are
    is part of the environment."""
    if not left:
        return
    for n_beside, (rows, where) in workers.each(run_part, recipe, parts(left, len(workers))):
        beside = {"workers there": n_beside} if n_beside > 1 else {}
        for row in rows:
            yield row, {**where, **beside}


def parts(left: Sequence[Trial], n_workers: int) -> list[list[Trial]]:
    """The trials of each item in turn, as load on a machine then affects all settings alike; where there are
    fewer items than workers, in chunks."""
    by_item: dict[tuple[str, str], list[Trial]] = {}
    for one in left:
        by_item.setdefault(one.key[1:], []).append(one)
    n_chunks = -(-n_workers // len(by_item))
    made = []
    for trials in by_item.values():
        size = -(-len(trials) // n_chunks)
        made += [trials[first : first + size] for first in range(0, len(trials), size)]
    return made


_models: dict[tuple[Any, ...], LLM] = {}
"""By the arguments of `load`: the models of a worker's process."""


def model_there(recipe: Recipe) -> LLM:
    """Loaded once in a worker's process, and again when a file of it has changed."""
    key = tuple(recipe.model.values())
    if key in _models and _models[key].changed():
        del _models[key]
    if key not in _models:
        _models[key] = load(**recipe.model)
    return _models[key]


def conditions_there(recipe: Recipe) -> dict[str, Any]:
    return conditions_of_model(model_there(recipe), recipe.chat, progress=False)


_warm: MutableMapping[LLM, dict[str, set[str]]] = WeakKeyDictionary()
"""By model and run: the settings that this process has warmed up."""
_one_at_a_time = Lock()


def run_part(recipe: Recipe, part: Sequence[Trial]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """On a worker: the rows of some trials, and their environment."""
    with _one_at_a_time:  # a worker with several threads would time one trial beside another
        llm = model_there(recipe)
        digest.learn(recipe.digests)
        warm = _warm.setdefault(llm, {}).setdefault(recipe.run, set())
        if cold := [one for one in part if one.key.setting not in warm]:
            methods = {one.key.setting: one.method for one in cold}
            behind = conditions_behind(llm, methods, progress=False)
            found = {**conditions_of_model(llm, recipe.chat, progress=False), **behind}
            if told := differences(recipe.expected, found):
                raise ValueError(f"the worker on {platform.node()} has other conditions than the run: {told}")
            warm_up(llm, recipe.tasks, cold, recipe.warm_ups)
            warm.update(methods)
        rows = [result_row(llm, recipe.tasks, one, recipe.measure) for one in part]
        return rows, environment(llm, recipe.warm_ups)


# ---- one trial -----------------------------------------------------------------------------------


def planned(settings: Mapping[str, Method], tasks: Tasks) -> Iterator[Trial]:
    for name, rows in tasks.items.items():
        for item in rows:
            for label, method in settings.items():
                yield Trial(Key(label, name, str(item["_id"])), tasks.task(name), item, method)


def warm_up(llm: LLM, tasks: Tasks, left: Sequence[Trial], runs: int) -> None:
    """Untimed runs: `runs` short dense ones, which page in weights and start threads, then each setting once
    with the whole prompt of its first trial. Models that compress are opened in any case."""
    for method in dict.fromkeys(one.method for one in left):
        if method.compresses:
            method.compress(llm, WARM_UP_TEXT)
    max_tokens = min(WARM_UP_TOKENS, llm.config.context - WARM_UP_NEW)
    for one in islice(cycle(left), runs):
        with failures_left_to_trials():
            ids = tasks.prompt(llm, one.task, one.item).ids[:max_tokens]
            llm.generate(ids, max_new_tokens=WARM_UP_NEW, progress=False)
    first: dict[str, Trial] = {}
    for one in left if runs else ():
        first.setdefault(one.key.setting, one)
    for one in first.values():
        with failures_left_to_trials():
            given = prepared(llm, tasks, one)
            llm.generate(given.prompt.ids, given.method, max_new_tokens=WARM_UP_NEW, progress=False)


@contextmanager
def failures_left_to_trials() -> Iterator[None]:
    """Leaves out a warm-up whose item fails: its trial will fail too, and record the error."""
    try:
        yield
    except BREAKS:
        raise
    except FAILURES:
        pass


def result_row(llm: LLM, tasks: Tasks, one: Trial, measure: Measure) -> dict[str, Any]:
    """The row of one trial: its measurements, or its error."""
    row: dict[str, Any] = one.key._asdict()
    try:
        return {**row, **measure(llm, tasks, one)}
    except BREAKS:
        raise
    except FAILURES as error:
        return {**row, "error": f"{type(error).__name__}: {error}"}


def prepared(llm: LLM, tasks: Tasks, one: Trial) -> Prepared:
    whole = tasks.prompt(llm, one.task, one.item)
    method = one.method
    if not method.compresses:
        return Prepared(whole, whole, method)
    compressing = 0.0

    def shorten(text: str) -> str:
        nonlocal compressing
        begun = time.perf_counter()
        short = method.compress(llm, text)
        compressing = time.perf_counter() - begun
        return short

    prompt = tasks.prompt(llm, one.task, one.item, shorten)
    return Prepared(prompt, whole, method.without_compression(), compressing)


def scored_answer(llm: LLM, tasks: Tasks, one: Trial) -> dict[str, Any]:
    """The default measure: generates an answer and scores it."""
    given = prepared(llm, tasks, one)
    prompt, extra = given.prompt, given.compressing
    stops = tasks.stops(llm, one.task)
    request = Request(
        max_new_tokens=one.task.max_new_tokens,
        sampling=SamplingParams(),
        stop=(),
        trace=False,
        progress=False,
        stop_ids=frozenset(stops.ids),
        never_first=frozenset(stops.never_first),
    )
    session = llm.session(given.method)
    out = session.answer(prompt.ids, request).finished()
    if out.seconds <= 0:
        raise RuntimeError("no token was generated")
    prediction = tasks.prediction(llm, out.text)
    passes = out.passes.reshape(-1, llm.config.n_layers)
    prefill = np.stack([passes[0][name] for name in ("in_play", "computed", "revived")], axis=1)
    return {
        "prediction": prediction,
        "score": tasks.score(one.task, prediction, one.item),
        "length": one.item["length"],
        "prompt_tokens": given.n_whole,
        "cut": prompt.cut,
        "wrapper": prompt.wrapper,
        "flops": given.method.prefill_flops(llm.config, len(prompt.ids), prefill),
        "new_tokens": len(out.token_ids),
        "finished_by": out.finish_reason,
        "computed": round(out.computed * given.share, 6),
        "reached_top": round(out.reached_top * given.share, 6),
        "in_play": changes(passes[0]["in_play"]),
        "used": used(given.method, out, llm.config.n_layers),
        "revived": int(out.passes["revived"].sum()),
        "changed_nothing": changed_nothing(one.method, given, passes["in_play"]),
        "timing": {"ttft": out.ttft + extra, "seconds": out.seconds + extra, "compressing": extra},
    }


def changes(counts: np.ndarray) -> dict[str, int]:
    """Counts by layer, without the layers that have the same count as the layer below."""
    return {str(layer): int(n) for layer, n in enumerate(counts) if layer == 0 or n != counts[layer - 1]}


def changed_nothing(method: Method, given: Prepared, in_play: np.ndarray) -> bool:
    """True if a setting other than dense dropped no token anywhere; `in_play` is (passes, layers)."""
    if method == Pruning():
        return False
    whole = given.prompt.ids == given.whole.ids and method.kept(given.n_whole) == given.n_whole
    return whole and bool((in_play == in_play[:, :1]).all())


def means_so_far(rows: Sequence[Mapping[str, Any]], setting: str) -> str:
    """One setting and the means of its rows, for the progress bar."""
    good = [row for row in rows if row["setting"] == setting and "error" not in row]
    parts = [setting if len(setting) <= SETTING_WIDTH else f"{setting[: SETTING_WIDTH - 1]}…"]
    if times := [row["timing"]["ttft"] for row in good if "timing" in row]:
        parts.append(f"TTFT {np.mean(times):.2f} s")
    if kl := [row["kl"] for row in good if "kl" in row]:
        parts.append(f"KL {np.mean(kl):.4f}")
    if scores := [row["score"] for row in good if "score" in row]:
        parts.append(f"score {100 * np.mean(scores):.1f}")
    return ", ".join(parts)
