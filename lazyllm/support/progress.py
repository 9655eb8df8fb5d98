"""Progress bars for lists of prompts and for long prompts, which LAZYLLM_PROGRESS=0 turns off; and a caller's own
callback for the passes of a thread."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

Watch = Callable[[int, int], None]
LONG_PROMPT = 1024
DELAY_SECONDS = 1.0
_own_watch: ContextVar[Watch | None] = ContextVar("own_watch", default=None)


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Calls `watch` in this thread with the numbers of layers done and of all layers, after each layer of a long
    pass and at the end of each pass. An exception that it raises ends the pass as Ctrl-C does."""
    before = _own_watch.set(watch)
    try:
        yield
    finally:
        _own_watch.reset(before)


def shown(progress: bool) -> bool:
    return progress and os.environ.get("LAZYLLM_PROGRESS", "1") != "0"


def bar(total: int, what: str, unit: str, progress: bool, leave: bool = True, delay: float = 0.0) -> Any:
    """A tqdm bar, a context manager. It appears after `delay` seconds; without `leave` it goes at the end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a notebook without ipywidgets gets the bar of a terminal
        from tqdm.auto import tqdm
    look: dict[str, Any] = {"leave": leave, "delay": delay, "dynamic_ncols": True}
    return tqdm(total=total, desc=what, unit=unit, disable=not shown(progress), **look)


@contextmanager
def prefill_watch(n_tokens: int, n_layers: int, progress: bool) -> Iterator[Watch | None]:
    """The progress callback of a pass: the caller's own, or that of a long prompt's bar, which appears after
    one second."""
    if (watch := _own_watch.get()) or n_tokens < LONG_PROMPT or not shown(progress):
        yield watch
        return
    with bar(n_layers, f"prefill of {n_tokens} tokens", "layer", progress, leave=False, delay=DELAY_SECONDS) as line:
        yield lambda layers_done, n_layers: line.update(layers_done - line.n)
