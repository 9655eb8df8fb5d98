"""Suite `sharing`: decode steps of a session alone, beside another's decode steps, and beside a prefill."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import numpy as np

from benchmarks.measuring import goals
from benchmarks.measuring.report import Figure, Row, Section
from benchmarks.options import Options
from benchmarks.suites.prefill import read
from lazyllm.llm import LLM

CONTEXT = 64  # tokens before a session's first step
STEPS = 300  # of one session, and the fewest that are measured
SESSIONS = 2
MIN_PREFILL = 4096  # tokens; a shorter prefill is not judged
RATIO = "p99 / two-session share"


def sharing(options: Options) -> Iterator[Section]:
    prompt = options.prompt(min(options.context, options.config.context))
    for place in options.places:
        llm = place.load(options.folder)
        beside: dict[str, AbstractContextManager[threading.Event | None]] = {
            "alone": nullcontext(),
            "beside decode steps": in_background(partial(decode, llm, STEPS)),
            f"beside a prefill of {len(prompt)} tokens": in_background(partial(read, llm, prompt)),
        }
        rows, share = [], 0.0
        for label, other in beside.items():
            with other as finished:
                seconds = measured(llm, finished)
            median, p99 = (float(np.quantile(seconds, level)) for level in (0.5, 0.99))
            share = share or SESSIONS * median
            figures: dict[str, Figure] = {
                "steps": float(len(seconds)),
                "median, ms": median * 1e3,
                "p99, ms": p99 * 1e3,
                "longest, ms": max(seconds) * 1e3,
                RATIO: p99 / share,
            }
            judged = {RATIO: goals.SHARING} if "prefill" in label and len(prompt) >= MIN_PREFILL else {}
            rows.append(Row(label, figures, judged, {"tokens": len(prompt), **place.keys}))
        note = (
            f"The two-session share is {SESSIONS} times the median of a step alone. "
            f"Steps follow {CONTEXT} tokens or more."
        )
        yield Section(f"Decode steps of one session, {options.config.name}, {place}", rows, (note,))


def measured(llm: LLM, finished: threading.Event | None) -> list[float]:
    """Seconds of STEPS steps at least, and of more until the other session's first work has finished."""
    seconds = decode(llm, STEPS)
    while finished and not finished.is_set():
        seconds += decode(llm, STEPS)
    return seconds


def decode(llm: LLM, steps: int) -> list[float]:
    """Seconds of each step of a new session."""
    session, seconds = read(llm, [*range(CONTEXT)]), []
    for token in range(steps):
        started = time.perf_counter()
        session.forward([token], generated=True, progress=False)
        seconds.append(time.perf_counter() - started)
    return seconds


@contextmanager
def in_background(work: Callable[[], object]) -> Iterator[threading.Event]:
    """Repeats the work in a thread until the block ends. The event is set when it has run once."""
    finished, leave = threading.Event(), threading.Event()

    def repeat() -> None:
        while not leave.is_set():
            work()
            finished.set()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield finished
    finally:
        leave.set()
        thread.join()
