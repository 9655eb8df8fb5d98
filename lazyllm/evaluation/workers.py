"""Workers: processes of this machine, or of a Dask cluster, that run parts of a run."""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field
from threading import Lock
from typing import Any
from uuid import uuid4

from lazyllm.evaluation.conditions import conditions_of_methods, conditions_of_model, environment
from lazyllm.evaluation.options import RunOptions
from lazyllm.evaluation.results import differences
from lazyllm.evaluation.tasks import Tasks
from lazyllm.evaluation.trial import Measure, Trial, result_row, warm_up
from lazyllm.llm import LLM, load
from lazyllm.machine.device import nth_device
from lazyllm.method import Method
from lazyllm.support.optional import package

log = logging.getLogger("lazyllm")


@dataclass(frozen=True)
class Recipe:
    """The model, tasks and measure that the trials of a call of `run_items` share. `model` has the arguments
    of `load`; `expected` are the conditions that a worker must have. `workers` is the number of workers on
    this machine, which share its memory; GPUs are assigned to them in turn."""

    model: Mapping[str, Any]
    tasks: Tasks
    measure: Measure
    warm_ups: int
    expected: Mapping[str, Any] = field(default_factory=dict)
    workers: int | None = None
    call: str = field(default_factory=lambda: uuid4().hex)

    @classmethod
    def of(cls, llm: LLM, tasks: Tasks, measure: Measure, options: RunOptions) -> Recipe:
        """The recipe for the model of this process. A scheduler's workers choose device and threads for their
        machine; other workers share this process's threads and have its kind of device, or all of its devices if
        the model takes several."""
        tasks = copy(tasks)
        tasks.items = {}  # a trial has its own
        own = llm.device if "," in llm.device else llm.device.partition(":")[0]
        device, threads = ("auto", None) if options.scheduler else (own, llm.threads)
        if threads and options.workers:
            threads = max(1, threads // options.workers)
        model = {
            "path": str(llm.checkpoint.path.absolute()),
            "device": options.worker_device or device,
            "threads": options.worker_threads or threads,
            "compute": llm.compute,
            "weights": llm.weights,
            "kv": llm.kv,
        }
        return cls(model, tasks, measure, options.warm_ups, workers=options.workers)


@contextmanager
def connected(options: RunOptions, settings: Mapping[str, Method]) -> Iterator[Any]:
    """Dask's client, with a worker at least; an error for a setting that cannot be sent to workers."""
    distributed = package("distributed", "a run on workers", "cluster")
    for label, method in settings.items():
        try:
            distributed.protocol.pickle.dumps(method)
        except Exception as error:  # whatever the method's own code raises
            raise ValueError(f"the setting {label} cannot be sent to workers: {error}") from error
    with ExitStack() as stack:
        cluster = options.scheduler or stack.enter_context(
            distributed.LocalCluster(
                n_workers=options.workers,
                threads_per_worker=1,
                memory_limit=0,  # a model may take all memory; lazyllm refuses what does not fit
                dashboard_address=":0",  # any free port
                silence_logs=logging.ERROR,
            )
        )
        client = stack.enter_context(distributed.Client(cluster))
        log.info("waiting for %s workers", options.workers or f"{options.scheduler}'s")
        client.wait_for_workers(options.workers or 1)
        yield client


def worker_results(
    client: Any, recipe: Recipe, trials: Sequence[Trial]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Rows and environments, in the order in which parts are ready."""
    from distributed import as_completed

    n_workers = len(client.scheduler_info(n_workers=-1)["workers"])
    futures = client.map(run_part, parts(trials, n_workers), recipe=recipe, pure=False)
    for _, (rows, where) in as_completed(futures, with_results=True):
        for row in rows:
            yield row, where


def parts(trials: Sequence[Trial], n_workers: int) -> list[list[Trial]]:
    """Parts for workers: all trials of an item, so that load on a machine affects all settings alike; or single
    trials if there are fewer items than workers."""
    by_item: dict[tuple[str, str], list[Trial]] = {}
    for trial in trials:
        by_item.setdefault(trial.key[1:], []).append(trial)
    return [*by_item.values()] if len(by_item) >= n_workers else [[trial] for trial in trials]


# ---- on a worker ---------------------------------------------------------------------------------

_models: dict[tuple[Any, ...], LLM] = {}
"""By the arguments of `load`: the model of this process."""
_warm: set[tuple[str, str]] = set()
"""The calls, each with a setting, for which the model has been warmed up."""
_lock = Lock()


def worker_model(recipe: Recipe) -> LLM:
    """The model of a worker's process, loaded on the first call."""
    key = tuple(recipe.model.values())
    if key not in _models:
        _warm.clear()
        _models.clear()  # the memory is free before the next is loaded
        device = recipe.model["device"]
        if recipe.workers and device != "cpu":
            from distributed import get_worker

            device = nth_device(device, get_worker().name)
        _models[key] = load(**{**recipe.model, "device": device})
    return _models[key]


def worker_conditions(recipe: Recipe) -> dict[str, Any]:
    return conditions_of_model(worker_model(recipe), recipe.tasks.wrapper, progress=False)


def run_part(part: Sequence[Trial], recipe: Recipe) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows of some trials, and the environment that they were timed in."""
    with _lock:  # a worker with several threads would time one trial beside another
        llm = worker_model(recipe)
        if cold := [trial for trial in part if (recipe.call, trial.key.setting) not in _warm]:
            methods = {trial.key.setting: trial.method for trial in cold}
            conditions = {**worker_conditions(recipe), **conditions_of_methods(llm, methods, progress=False)}
            if differing := differences(recipe.expected, conditions):
                raise ValueError(f"the worker on {platform.node()} has other conditions than the run: {differing}")
            warm_up(llm, recipe.tasks, cold, recipe.warm_ups)
            _warm.update((recipe.call, setting) for setting in methods)
        rows = [result_row(llm, recipe.tasks, trial, recipe.measure) for trial in part]
        shared = {"workers there": recipe.workers} if (recipe.workers or 1) > 1 else {}
        return rows, environment(llm, recipe.warm_ups) | shared
