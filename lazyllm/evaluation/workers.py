"""Workers: processes on this machine, or of a Dask cluster, that run parts of a run."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cached_property
from itertools import islice
from typing import Any, TypeVar
from urllib.parse import urlparse

from lazyllm.support.optional import package

GPU = "GPU"  # the resource of workers that have a GPU each: dask worker --resources GPU=1
AHEAD = 2  # parts that are sent for each worker; the others wait here
log = logging.getLogger("lazyllm")

Shared = TypeVar("Shared")
Part = TypeVar("Part")
Result = TypeVar("Result")


class Workers:
    """A context manager; processes start, or the scheduler is connected to, when they are first needed.

    `number` of processes on this machine, or the address of a `scheduler`.
    """

    def __init__(self, number: int | None, scheduler: str | None) -> None:
        self._distributed = package("distributed", "a run on workers", "cluster")
        self._number, self._scheduler = number, scheduler
        self._open = ExitStack()
        self._most: Counter[str] = Counter()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def check(self, value: object, what: str) -> None:
        """Raises an error if a value cannot be sent to workers."""
        try:
            self._distributed.protocol.pickle.dumps(value)
        except Exception as error:  # whatever the value's own code raises
            raise ValueError(f"{what} cannot be sent to workers: {error}") from error

    @cached_property
    def _client(self) -> Any:
        cluster = self._scheduler or self._open.enter_context(
            self._distributed.LocalCluster(
                n_workers=self._number,
                threads_per_worker=1,
                memory_limit=0,  # a model may take all memory; lazyllm refuses what does not fit
                dashboard_address=":0",  # any free port
                silence_logs=logging.ERROR,
            )
        )
        client = self._open.enter_context(self._distributed.Client(cluster))
        log.info("waiting for %s workers", self._number or f"{self._scheduler}'s")
        client.wait_for_workers(self._number or 1)
        return client

    def _connected(self) -> dict[str, Any]:
        """The workers that are connected now, by address."""
        workers: dict[str, Any] = self._client.scheduler_info(n_workers=-1)["workers"]
        return workers

    def __len__(self) -> int:
        return max(1, len(self._connected()))

    def call(self, function: Callable[[Shared], Result], shared: Shared) -> Result:
        """The result of one call on any worker."""
        result: Result = self._submit(function, shared).result()
        return result

    def each(
        self, function: Callable[[Shared, Part], Result], shared: Shared, parts: Sequence[Part]
    ) -> Iterator[tuple[int, Result]]:
        """The results of function(shared, part) as they come, each with the number of workers on its machine.

        A part whose worker is killed runs again on another; one that kills several is an error.
        """
        waiting = iter(parts)
        running = self._distributed.as_completed()

        def send() -> None:
            for part in islice(waiting, max(0, AHEAD * len(self) - running.count())):
                running.add(self._submit(called, function, shared, part))

        self._look_around()
        send()
        for future in running:
            try:
                address, result = future.result()
            except self._distributed.KilledWorker as error:
                raise RuntimeError(
                    f"a part of the run killed its workers ({error}); what is finished is kept"
                ) from None
            send()
            self._look_around()
            yield max(1, self._most[host_of(address)]), result

    def _submit(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """GPUs are given to one call at a time, where workers say that they have them."""
        has_gpus = any(worker["resources"].get(GPU) for worker in self._connected().values())
        return self._client.submit(function, *arguments, pure=False, resources={GPU: 1} if has_gpus else None)

    def _look_around(self) -> None:
        """Notes how many workers each machine has; one that was killed will be back."""
        self._most |= Counter(map(host_of, self._connected()))  # the maximum of both


def host_of(address: str) -> str:
    return urlparse(address).hostname or address


def called(function: Callable[[Shared, Part], Result], shared: Shared, part: Part) -> tuple[str, Result]:
    """On a worker: its address and the result."""
    from distributed import get_worker

    return get_worker().address, function(shared, part)
