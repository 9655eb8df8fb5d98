"""PrefixCache: the beginnings of prompts that a model has read, for later prompts that begin alike."""

from __future__ import annotations

import sys
import threading
import warnings
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
    core: _core.Session  # has read `ids` only; nothing runs it any more
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
        self.max_bytes = checked.whole(max_bytes, "max_bytes", 1, sys.maxsize)
        self._entries: list[_Entry] = []  # the one used last at the end
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<PrefixCache: {len(self._entries)} beginnings, {self.bytes} of {self.max_bytes} bytes>"

    @property
    def bytes(self) -> int:
        """The memory of all beginnings, as if none shared any with another."""
        return sum(entry.bytes for entry in self._entries)

    @staticmethod
    def readable(method: Method, ids: list[int]) -> list[int]:
        """The part of a prompt that may be read before its last pass, whose rows score the stages."""
        return ids[: max(0, len(ids) - max(LEAST_PASS, method.asking_rows))]

    def longest(self, model: Model, method: Method, ids: list[int]) -> _core.Session | None:
        """A context that has read as much of these ids as any before; None if that is not worth a fork."""
        wanted = np.array(ids, np.int32)
        with self._lock:
            fitting = [entry for entry in self._entries if entry.serves(model, method)]
            best = max(fitting, key=lambda entry: _shared(entry.ids, wanted), default=None)
            if best is None or (n := _shared(best.ids, wanted)) < LEAST_PASS:
                return None
            self._entries.remove(best)
            self._entries.append(best)
            try:
                fork = best.core.fork()
            except MemoryError:
                return None
        fork.truncate(n)
        return fork

    def has_room(self, core: _core.Session) -> bool:
        """Warns of a context that is larger than the whole cache."""
        fits = core.bytes_for(core.length) <= self.max_bytes
        if not fits:
            warnings.warn(
                f"the PrefixCache does not keep the beginning of a prompt, which needs more than max_bytes, "
                f"{self.max_bytes}; raise it",
                stacklevel=2,
            )
        return fits

    def keep(self, model: Model, method: Method, core: _core.Session) -> None:
        """Keeps a context that it has room for; it replaces those whose ids it begins with."""
        new = _Entry(model, method, core, core.ids)
        with self._lock:
            self._entries = [
                entry
                for entry in self._entries
                if not entry.serves(model, method) or _shared(entry.ids, new.ids) < len(entry.ids)
            ]
            self._entries.append(new)
            while self.bytes > self.max_bytes:
                self._entries.pop(0)


def _shared(ids: np.ndarray, other: np.ndarray) -> int:
    """The number of ids that both begin with."""
    n = min(len(ids), len(other))
    different = np.flatnonzero(ids[:n] != other[:n])
    return int(different[0]) if different.size else n
