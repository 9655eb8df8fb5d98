"""Shadow: prompts answered a second time, densely, to see what the setting changes; Guard: what follows."""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import fmean
from typing import Any, TypeVar

import numpy as np

from lazyllm.evaluation.measures import forced_logits, greedy_answer, kl_divergence
from lazyllm.llm import LLM
from lazyllm.method import Method
from lazyllm.methods.speedup import Speedup
from lazyllm.serving.figures import Figures
from lazyllm.serving.options import Options
from lazyllm.serving.turns import Gone, Turns
from lazyllm.support.files import user_path
from lazyllm.support.progress import watching

T = TypeVar("T")
TOKENS = 16  # of dense's answer that are compared
MOST_WAITING = 16  # prompts that wait to be compared; others are left out
PAUSE = 0.02  # seconds between looks whether requests run
STEP = 0.25  # of the speedup, by which the guard changes it
LEAST, WINDOW = 4, 8  # comparisons that the guard needs to lower the speedup, and to raise it
log = logging.getLogger("lazyllm.serving")


def compared(llm: LLM, ids: Sequence[int], setting: Method, wait: Callable[[], bool]) -> dict[str, Any]:
    """The divergence of the setting from dense, whose greedy answer it is given, and whether its own would be
    the same; and how much longer dense takes for the prompt. `wait` is called before and after each layer."""
    answer = partial(greedy_answer, llm.session(progress=False), ids, TOKENS, llm.eos_token_ids)
    dense, dense_seconds = timed(wait, answer)
    session = llm.session(setting, progress=False)
    rows, seconds = timed(wait, lambda: np.array([*forced_logits(session, ids, dense.tokens)]))
    return {
        "divergence_nats": float(kl_divergence(dense.logits, rows).mean()),
        "equal_answers": bool((rows.argmax(axis=1) == dense.tokens).all()),
        "measured_speedup": dense_seconds / seconds if dense_seconds and seconds else None,
    }


def timed(wait: Callable[[], bool], work: Callable[[], T]) -> tuple[T, float | None]:
    """What `work` gives, and the seconds of its first pass unless that had to wait."""
    wait()
    started, ends, waited = time.perf_counter(), list[float](), False

    def watch(layers_done: int, n_layers: int) -> None:
        nonlocal waited
        waited |= wait() and not ends
        if layers_done == n_layers:
            ends.append(time.perf_counter())

    with watching(watch):
        result = work()
    return result, None if waited else ends[0] - started


class Guard:
    """Lowers the speedup while the mean divergence is above a bound, and raises it while below half of it."""

    def __init__(self, bound: float, low: float, high: float) -> None:
        self.bound, self.low, self.high = bound, low, high
        self.setting = Speedup(high)
        self._recent = deque[float](maxlen=WINDOW)  # divergences under this setting

    def observe(self, setting: Method, divergence: float) -> dict[str, Any] | None:
        """Takes a divergence; returns what changed and why, if it changed the setting."""
        if setting != self.setting:
            return None
        self._recent.append(divergence)
        mean, before, after = fmean(self._recent), self.setting.factor, self.setting.factor
        if mean > self.bound and len(self._recent) >= LEAST:
            after, reason = max(self.low, before - STEP), "the divergence is above the bound"
        elif mean < self.bound / 2 and len(self._recent) == WINDOW:
            after, reason = min(self.high, before + STEP), "the divergence is below half of the bound"
        if after == before:
            return None
        self.setting = Speedup(after)
        self._recent.clear()
        return {"from": before, "to": after, "divergence_nats": mean, "bound": self.bound, "reason": reason}


class Shadow:
    """Compares a share of the prompts with dense, in a thread that runs while no request does."""

    def __init__(
        self, llm: LLM, turns: Turns, figures: Figures, guard: Guard | None, options: Options
    ) -> None:
        self.llm, self.turns, self.figures, self.guard, self.options = llm, turns, figures, guard, options
        self._thread = ThreadPoolExecutor(1, "lazyllm-shadow")
        self._places = threading.Semaphore(MOST_WAITING)

    def offer(self, ids: list[int], setting: Method, given: Method) -> None:
        """Takes this prompt with the probability of the share, unless many wait. `given` is the setting
        before parts of this prompt were protected."""
        if random.random() < self.options.shadow and self._places.acquire(blocking=False):
            self._thread.submit(self._compare, ids, setting, given)

    def close(self) -> None:
        """Ends after `Turns.close`, which stops its passes too."""
        self._thread.shutdown(cancel_futures=True)

    def _wait(self) -> bool:
        """True if requests ran; returns once none does. Gone once the server ends."""
        waited = False
        while not self.turns.closing.is_set():
            if not self.turns.requests:
                return waited
            waited = True
            time.sleep(PAUSE)
        raise Gone

    def _compare(self, ids: list[int], setting: Method, given: Method) -> None:
        try:
            comparison = compared(self.llm, ids, setting, self._wait)
            self.figures.observe(given, len(ids), **comparison)
            text = {"prompt": self.llm.tokenizer.decode(ids)} if self.options.log_text else {}
            self._write({"setting": given.label, "prompt_tokens": len(ids), **comparison, **text})
            if self.guard and (change := self.guard.observe(given, comparison["divergence_nats"])):
                log.warning("the speedup is now %(to)g, after %(from)g: %(reason)s", change)
                self._write({"guard": change})
        except Exception:
            log.exception("a comparison with dense failed")
        finally:
            self._places.release()

    def _write(self, line: dict[str, Any]) -> None:
        if self.options.log:
            with user_path(self.options.log).open("a", encoding="utf-8") as out:
                out.write(json.dumps({"time": time.time(), **line}) + "\n")
