"""Shadow: prompts answered again, densely, to measure the divergence; Guard: the speedup that follows from it."""

import json
import logging
import random
import threading
import time
from asyncio import CancelledError
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import fmean
from typing import Any

import numpy as np

from lazyllm.evaluation.measures import kl_divergence
from lazyllm.llm import LLM
from lazyllm.method import Method
from lazyllm.methods.parsing import as_method
from lazyllm.methods.speedup import Speedup
from lazyllm.serving.figures import Figures
from lazyllm.serving.options import Options
from lazyllm.serving.turns import Turns
from lazyllm.support.files import user_path
from lazyllm.support.progress import watching

TOKENS = 16  # of dense's answer that are compared
MOST_WAITING = 16  # prompts that wait to be compared; others are left out
PAUSE = 0.02  # seconds between checks for running requests
STEP = 0.25  # by which the guard changes the speedup
LEAST, WINDOW = 4, 8  # comparisons that the guard needs to lower the speedup, and to raise it
log = logging.getLogger("lazyllm.serving")


def compared(llm: LLM, ids: Sequence[int], setting: Method, wait: Callable[[], bool]) -> dict[str, Any]:
    """The setting's divergence from dense over dense's greedy answer; whether its own answer would be the same; and
    dense's time for the prompt over its time, None if `wait`, which is called after each layer, has waited."""
    sessions = [llm.session(pruning, progress=False) for pruning in (None, setting)]
    logits, times, waits = list[list[np.ndarray]](), list[float](), list[bool]()
    wait()
    with watching(lambda *layers: waits.append(wait())):
        for session in sessions:
            times.append(time.perf_counter())
            logits.append([session.forward(ids)])
        times.append(time.perf_counter())
        speedup = None if any(waits) else (times[1] - times[0]) / (times[2] - times[1])
        tokens = [int(logits[0][0].argmax())]
        while len(tokens) < TOKENS and tokens[-1] not in llm.eos_token_ids:
            for session, rows in zip(sessions, logits, strict=True):
                rows.append(session.forward(tokens[-1:], generated=True))
            tokens.append(int(logits[0][-1].argmax()))
    dense, pruned = map(np.array, logits)
    return {
        "divergence_nats": float(kl_divergence(dense, pruned).mean()),
        "equal_answers": bool((pruned.argmax(axis=1) == tokens).all()),
        "measured_speedup": speedup,
    }


class Guard:
    """The setting of requests that name none. With a bound it is a speedup, which is lowered while the mean
    divergence is above the bound, and raised while it is below half of the bound."""

    def __init__(self, options: Options) -> None:
        self.bound, setting = options.guard, options.pruning or options.speedup
        if self.bound is not None:
            self.low, self.high = options.bounds
        self.setting: Any = as_method(setting if self.bound is None else self.high)
        self._recent = deque[float](maxlen=WINDOW)  # divergences under this setting

    def observe(self, setting: Method, divergence: float) -> dict[str, Any] | None:
        """Records a divergence; if that changes the setting, returns the change and its reason."""
        if self.bound is None or setting != self.setting:
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

    def __init__(self, llm: LLM, turns: Turns, figures: Figures, guard: Guard, options: Options) -> None:
        self.llm, self.turns, self.figures, self.guard, self.options = llm, turns, figures, guard, options
        self.thread = ThreadPoolExecutor(1, "lazyllm-shadow")
        self._places = threading.Semaphore(MOST_WAITING)

    def offer(self, ids: list[int], setting: Method, named: Method) -> None:
        """Takes this prompt with the probability `options.shadow`, unless many wait. `named` is the setting
        before parts of this prompt were protected."""
        if random.random() < self.options.shadow and self._places.acquire(blocking=False):
            self.thread.submit(self._compare, ids, setting, named)

    def _wait(self) -> bool:
        """True if requests ran; returns once none does. CancelledError once the server ends."""
        waited = False
        while self.turns.requests and not self.turns.closing.wait(PAUSE):
            waited = True
        if self.turns.closing.is_set():
            raise CancelledError
        return waited

    def _compare(self, ids: list[int], setting: Method, named: Method) -> None:
        try:
            comparison = compared(self.llm, ids, setting, self._wait)
            self.figures.observe(named, len(ids), **comparison)
            if change := self.guard.observe(named, comparison["divergence_nats"]):
                log.warning("the speedup is now %(to)g, after %(from)g: %(reason)s", change)
            if self.options.log:
                line = {"time": time.time(), "setting": named.label, "prompt_tokens": len(ids), **comparison}
                line |= {"prompt": self.llm.tokenizer.decode(ids)} if self.options.log_text else {}
                line |= {"guard": change} if change else {}
                with user_path(self.options.log).open("a", encoding="utf-8") as out:
                    out.write(json.dumps(line) + "\n")
        except Exception:
            log.exception("a comparison with dense failed")
        finally:
            self._places.release()
