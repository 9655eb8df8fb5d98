"""Workers: processes of this machine, or of a Dask cluster, that run parts of a run."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from lazyllm.evaluation.options import RunOptions
from lazyllm.evaluation.recipe import Recipe, run_part
from lazyllm.evaluation.trial import Trial
from lazyllm.method import Method
from lazyllm.support.optional import package

log = logging.getLogger("lazyllm")


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


def results_there(
    client: Any, recipe: Recipe, trials: Sequence[Trial]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Rows and environments, in the order in which parts are ready. Processes on one machine share its
    memory, so how many there are is part of the environment."""
    from distributed import as_completed

    by_machine = workers_by_machine(client)
    futures = client.map(run_there, parts(trials, by_machine.total()), recipe=recipe, pure=False)
    for _, (address, rows, where) in as_completed(futures, with_results=True):
        by_machine |= workers_by_machine(client)  # the larger number: a worker that was killed will be back
        n_beside = by_machine[machine(address)]
        beside = {"workers there": n_beside} if n_beside > 1 else {}
        for row in rows:
            yield row, {**where, **beside}


def parts(trials: Sequence[Trial], n_workers: int) -> list[list[Trial]]:
    """The trials of each item in turn, as load on a machine then affects all settings alike; single trials
    where there are fewer items than workers."""
    by_item: dict[tuple[str, str], list[Trial]] = {}
    for trial in trials:
        by_item.setdefault(trial.key[1:], []).append(trial)
    return [*by_item.values()] if len(by_item) >= n_workers else [[trial] for trial in trials]


def run_there(part: Sequence[Trial], recipe: Recipe) -> tuple[str, list[Any], dict[str, Any]]:
    """On a worker: its address, and what `run_part` gives."""
    from distributed import get_worker

    return get_worker().address, *run_part(recipe, part)


def workers_by_machine(client: Any) -> Counter[str]:
    return Counter(map(machine, client.scheduler_info(n_workers=-1)["workers"]))


def machine(address: str) -> str:
    """The address of a worker without its port."""
    return address.rpartition(":")[0]
