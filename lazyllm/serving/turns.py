"""Turns: requests run in threads, several at once; others wait, up to a limit."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from traceback import clear_frames
from typing import Any

from starlette.exceptions import HTTPException

from lazyllm.support.progress import watching


class Turns:
    """Threads for requests; sessions that run at once share the engine's threads evenly (docs/engine.md)."""

    def __init__(self, at_once: int, waiting: int) -> None:
        self.at_once, self.most = at_once, at_once + waiting
        self.requests = 0  # that run or wait
        self.closing = threading.Event()
        self.threads = ThreadPoolExecutor(at_once, "lazyllm-serve")

    async def run(self, work: Callable[[], Iterator[Any]]) -> AsyncGenerator[Any]:
        """Yields what `work` yields in a thread, once it is this request's turn; status 429 if too many wait.
        Closing the iterator ends the pass that the thread runs within a layer."""
        if self.requests >= self.most:
            raise HTTPException(429, "too many requests wait already; try again later", {"Retry-After": "1"})
        loop, items, gone = asyncio.get_running_loop(), asyncio.Queue[Any](), threading.Event()

        def check(*layers: int) -> None:
            if gone.is_set() or self.closing.is_set():
                raise asyncio.CancelledError  # which no `except Exception` takes for an error

        def produce() -> None:
            try:
                with watching(check):
                    for item in work():
                        check()
                        loop.call_soon_threadsafe(items.put_nowait, item)
            except Exception as error:
                clear_frames(error.__traceback__)  # which would keep the session
                raise

        self.requests += 1
        turn = loop.run_in_executor(self.threads, produce)
        turn.add_done_callback(items.put_nowait)  # behind all items
        try:
            while (item := await items.get()) is not turn:
                yield item
            turn.result()
        finally:
            gone.set()
            turn.cancel()
            self.requests -= 1
