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


def _tqdm() -> Any:
    """tqdm's class for a terminal or a notebook; without ipywidgets, of which it warns, it is the former."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tqdm.auto import tqdm
    return tqdm


def bar(total: int, what: str, unit: str, progress: bool, leave: bool = True) -> Any:
    """A tqdm bar, a context manager; without `leave` it is removed at the end."""
    return _tqdm()(
        total=total, desc=what, unit=unit, disable=not shown(progress), leave=leave, dynamic_ncols=True
    )


@contextmanager
def prefill_watch(
    n_tokens: int, n_layers: int, progress: bool
) -> Iterator[Callable[[int, int], None] | None]:
    """The progress callback of a long prompt's pass; its bar appears after one second."""
    if n_tokens < LONG_PROMPT or not shown(progress):
        yield None
        return
    with _tqdm()(
        total=n_layers,
        desc=f"prefill of {n_tokens} tokens",
        unit="layer",
        delay=DELAY_SECONDS,
        leave=False,
        dynamic_ncols=True,
    ) as line:

        def watch(layers_done: int, n_layers: int) -> None:
            line.update(layers_done - line.n)

        yield watch
