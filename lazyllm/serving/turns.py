"""Turns: requests run in threads, several at once; others wait, up to a limit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from lazyllm.support.progress import watching

T = TypeVar("T")


class Busy(Exception):
    """As many requests wait as may."""


class Gone(BaseException):
    """Nobody waits for what a thread computes any more. No `except Exception` takes it for an error."""


class End(NamedTuple):
    error: Exception | None


class Turns:
    """The sessions of requests that run at once share the engine's threads evenly (docs/engine.md)."""

    def __init__(self, at_once: int, waiting: int) -> None:
        self.at_once, self.most = at_once, at_once + waiting
        self.requests = 0  # that run or wait
        self.closing = threading.Event()
        self._threads = ThreadPoolExecutor(at_once, "lazyllm-serve")

    @property
    def waiting(self) -> int:
        return max(0, self.requests - self.at_once)

    async def run(self, work: Callable[[], Iterator[T]]) -> AsyncGenerator[T]:
        """What `work` yields in a thread, once it is this request's turn; Busy if too many wait. Closing the
        iterator ends the pass that the thread runs within a layer."""
        if self.requests >= self.most:
            raise Busy("too many requests wait already; try again later")
        loop, items = asyncio.get_running_loop(), asyncio.Queue[T | End]()
        gone = threading.Event()

        def check(*layers: int) -> None:
            if gone.is_set() or self.closing.is_set():
                raise Gone

        def put(item: T | End) -> None:
            loop.call_soon_threadsafe(items.put_nowait, item)

        def produce() -> None:
            error: Exception | None = None
            try:
                with watching(check):
                    for item in work():
                        check()
                        put(item)
            except Gone:
                return
            except Exception as failed:
                error = failed.with_traceback(None)  # whose frames would keep the session
            put(End(error))

        self.requests += 1
        try:
            turn = self._threads.submit(produce)
            while not isinstance(item := await items.get(), End):
                yield item
            if item.error is not None:
                raise item.error
        finally:
            gone.set()
            turn.cancel()
            self.requests -= 1

    def close(self) -> None:
        """Ends all passes, and waits until the threads are gone."""
        self.closing.set()
        self._threads.shutdown(cancel_futures=True)
