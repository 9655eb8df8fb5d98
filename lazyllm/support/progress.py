"""Progress bars: for lists of prompts and for long prompts; LAZYLLM_PROGRESS=0 turns all of them off."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

LONG_PROMPT = 1024
DELAY_SECONDS = 1.0


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
def prefill_watch(
    n_tokens: int, n_layers: int, progress: bool
) -> Iterator[Callable[[int, int], None] | None]:
    """The progress callback of a long prompt's pass; its bar appears after one second."""
    if n_tokens < LONG_PROMPT or not shown(progress):
        yield None
        return
    what = f"prefill of {n_tokens} tokens"
    with bar(n_layers, what, "layer", progress, leave=False, delay=DELAY_SECONDS) as line:
        yield lambda layers_done, n_layers: line.update(layers_done - line.n)
