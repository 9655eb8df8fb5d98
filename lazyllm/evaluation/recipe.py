"""Recipe: what a worker's process needs to run trials; and the functions that run there."""

from __future__ import annotations

import platform
from collections.abc import Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from threading import Lock
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

from lazyllm.checkpoints import digest
from lazyllm.evaluation.chats import Chat
from lazyllm.evaluation.conditions import conditions_behind, conditions_of_model, environment
from lazyllm.evaluation.manifest import differences
from lazyllm.evaluation.options import RunOptions
from lazyllm.evaluation.tasks import Tasks
from lazyllm.evaluation.trial import Measure, Trial, result_row, warm_up
from lazyllm.llm import LLM, load


@dataclass(frozen=True)
class Recipe:
    """What the trials of a call of `run_items` share. `model` has the arguments of `load`; `expected` are the
    conditions that a worker must have, and `digests` those of files that need not be read again."""

    model: Mapping[str, Any]
    tasks: Tasks
    measure: Measure
    chat: Chat
    warm_ups: int
    expected: Mapping[str, Any] = field(default_factory=dict)
    digests: digest.Known = field(default_factory=dict)
    call: str = field(default_factory=lambda: uuid4().hex)

    @classmethod
    def of(cls, llm: LLM, tasks: Tasks, measure: Measure, options: RunOptions) -> Recipe:
        """The workers of a scheduler choose device and threads where they are; others share this process's
        threads and have its device."""
        tasks = copy(tasks)
        tasks.items = {}  # a trial has its own
        device, threads = ("auto", None) if options.scheduler else (llm.device, llm.threads)
        if threads and options.workers:
            threads = max(1, threads // options.workers)
        model = {
            "path": str(llm.checkpoint.path.absolute()),
            "device": options.worker_device or device,
            "threads": options.worker_threads or threads,
            "compute": llm.compute,
            "weights": llm.weights,
            "kv": llm.kv,
            "cache_weights": llm.cache_weights,
        }
        return cls(model, tasks, measure, options.chat, options.warm_ups)


# ---- on a worker ---------------------------------------------------------------------------------

_models: dict[tuple[Any, ...], LLM] = {}
"""By the arguments of `load`: the models of this process."""
_warm: MutableMapping[LLM, dict[str, set[str]]] = WeakKeyDictionary()
"""By model and call: the settings that this process has warmed up."""
_lock = Lock()


def model_there(recipe: Recipe) -> LLM:
    """Loaded once in a worker's process, and again when a file of it has changed."""
    key = tuple(recipe.model.values())
    if key not in _models or _models[key].changed():
        _models.pop(key, None)  # its memory is free before the next is loaded
        _models[key] = load(**recipe.model)
    return _models[key]


def conditions_there(recipe: Recipe) -> dict[str, Any]:
    return conditions_of_model(model_there(recipe), recipe.chat, progress=False)


def run_part(recipe: Recipe, part: Sequence[Trial]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows of some trials, and the environment that they were timed in."""
    with _lock:  # a worker with several threads would time one trial beside another
        llm = model_there(recipe)
        digest.learn(recipe.digests)
        warm = _warm.setdefault(llm, {}).setdefault(recipe.call, set())
        if cold := [trial for trial in part if trial.key.setting not in warm]:
            methods = {trial.key.setting: trial.method for trial in cold}
            conditions = {**conditions_there(recipe), **conditions_behind(llm, methods, progress=False)}
            if differing := differences(recipe.expected, conditions):
                raise ValueError(
                    f"the worker on {platform.node()} has other conditions than the run: {differing}"
                )
            warm_up(llm, recipe.tasks, cold, recipe.warm_ups)
            warm.update(methods)
        rows = [result_row(llm, recipe.tasks, trial, recipe.measure) for trial in part]
        return rows, environment(llm, recipe.warm_ups)
