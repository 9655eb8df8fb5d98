"""PrefixCache: the beginnings of prompts that a model has read, for later prompts that begin alike."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from lazyllm import _core
from lazyllm.method import Method
from lazyllm.model import Model
from lazyllm.support import checked

LEAST_PASS = 192
"""Tokens of a pass: products of fewer rows may be summed in another order, which changes the last bits."""


@dataclass(frozen=True)
class _Entry:
    model: Model
    method: Method
    core: _core.Session  # has read `ids` only; nothing else uses it
    ids: np.ndarray

    @property
    def bytes(self) -> int:
        return self.core.bytes_for(len(self.ids))

    def serves(self, model: Model, method: Method) -> bool:
        return self.model is model and self.method == method


class PrefixCache:
    """Sessions that have read the beginnings of earlier prompts, so that a common one is read once.

    For few-shot prompts, questions on one document, and chats whose whole history is sent again. Each prompt
    takes the longest beginning that it shares with one of the last prompts under the same setting, reads its
    own up to the first stage (`Session.read`), and is then pruned by its last rows as if it had been read as
    a whole. Those used last stay, as many as `max_bytes` holds. Answers that are timed should not share one.
    """

    def __init__(self, max_bytes: int = 2**30) -> None:
        self.max_bytes = checked.whole(max_bytes, "max_bytes", 1)
        self._entries: list[_Entry] = []  # the one used last at the end
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<PrefixCache: {len(self._entries)} beginnings, {self.bytes} of {self.max_bytes} bytes>"

    @property
    def bytes(self) -> int:
        """The memory of all beginnings, as if none shared any with another."""
        return sum(one.bytes for one in self._entries)

    @staticmethod
    def readable(method: Method, ids: list[int]) -> list[int]:
        """The part of a prompt that may be read before its last pass, whose rows score the stages."""
        return ids[: max(0, len(ids) - max(LEAST_PASS, getattr(method, "queries", 1)))]

    def longest(self, model: Model, method: Method, ids: list[int]) -> _core.Session | None:
        """A context that has read as much of these ids as any before; None if that is not worth a fork."""
        wanted = np.array(ids, np.int32)
        with self._lock:
            fitting = [one for one in self._entries if one.serves(model, method)]
            best = max(fitting, key=lambda one: _shared(one.ids, wanted), default=None)
            if best is None or (n := _shared(best.ids, wanted)) < LEAST_PASS:
                return None
            self._entries.remove(best)
            self._entries.append(best)
            made = best.core.fork()
        made.truncate(n)
        return made

    def keep(self, model: Model, method: Method, core: _core.Session) -> None:
        """Keeps a context, which replaces those whose ids it begins with."""
        new = _Entry(model, method, core, core.ids)
        with self._lock:
            self._entries = [
                one
                for one in self._entries
                if not one.serves(model, method) or _shared(one.ids, new.ids) < len(one.ids)
            ]
            self._entries.append(new)
            while self.bytes > self.max_bytes:
                self._entries.pop(0)


def _shared(one: np.ndarray, other: np.ndarray) -> int:
    """The number of ids that both begin with."""
    n = min(len(one), len(other))
    different = np.flatnonzero(one[:n] != other[:n])
    return int(different[0]) if different.size else n
