"""Process: an object that lives in a process of its own, with its own libraries, threads and memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

EXIT_SECONDS = 5.0  # before a process that does not end is terminated


class Process:
    """Runs `make(*args)` in a new process and calls methods of the result there.

    `environment` is set before the process loads any library.
    """

    def __init__(self, make: Callable[..., object], *args: Any, environment: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._child = context.Process(target=serve, args=(theirs, make, args), daemon=True)
        before = {name: os.environ.get(name) for name in environment}
        os.environ.update(environment)
        try:
            self._child.start()
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        theirs.close()
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *args: Any) -> Any:
        self._pipe.send((method, args))
        return self._answer()

    def seconds(self, method: str, *args: Any) -> Callable[[], float]:
        """A contestant that calls a method which returns its own seconds."""
        return lambda: float(self.call(method, *args))

    def _answer(self) -> Any:
        try:
            failed, value = self._pipe.recv()
        except EOFError:
            self._child.join(EXIT_SECONDS)
            raise RuntimeError(f"its process ended with code {self._child.exitcode}") from None
        if failed:
            raise RuntimeError(value)
        return value

    def close(self) -> None:
        self._pipe.close()
        self._child.join(EXIT_SECONDS)
        if self._child.is_alive():
            self._child.terminate()
            self._child.join()

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self._child.is_alive():
            self._child.terminate()
        self.close()


def serve(pipe: Connection, make: Callable[..., object], args: tuple[Any, ...]) -> None:
    """The child: answers calls until the pipe closes. It ignores Ctrl-C; the parent then closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(EOFError, BrokenPipeError):
        try:
            server = make(*args)
        except Exception as error:
            pipe.send((True, described(error)))
            return
        pipe.send((False, None))
        while True:
            method, arguments = pipe.recv()
            try:
                pipe.send((False, getattr(server, method)(*arguments)))
            except Exception as error:
                pipe.send((True, described(error)))


def described(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
