"""PrefixCache: the beginnings of prompts that a model has read, for later prompts that begin alike."""

from __future__ import annotations

import sys
import threading
import warnings
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from lazyllm import _core
from lazyllm.method import Method
from lazyllm.prompt import Ids, Place
from lazyllm.session import Session
from lazyllm.support import checked

if TYPE_CHECKING:
    from lazyllm.llm import LLM

    Owner = tuple[LLM, Method]

LEAST_READ = 192
"""Tokens that are worth a fork, or a pass that reads them. The sums of a shorter prompt may have another
order than those of a prompt read in parts."""
MOST_REMEMBERED = 64  # prompts


class PrefixCache:
    """Contexts that have read the beginnings of earlier prompts, so that a common one is read once.

    Each prompt takes the longest beginning that it shares with an earlier one under the same setting, reads
    the rest up to the first stage (`Session.read`), and is then pruned by its last rows as if it had been
    read as a whole. Those used last stay, as many as `max_bytes` holds. Timed answers should not share one.
    Unless `eager`, a beginning is read apart and kept once a second prompt has it: reading apart takes longer
    than one pass, which a prompt that shares nothing should not pay.
    """

    def __init__(self, max_bytes: int = 2**30, eager: bool = True) -> None:
        self.max_bytes = checked.whole(max_bytes, "max_bytes", 1, sys.maxsize)
        self.eager = checked.truth(eager, "eager")
        self.grows = True  # with the prompts that it serves
        self.hits = self.tokens_shared = 0  # prompts that began like an earlier one, and how far in all
        # contexts that nothing runs any more, by model and setting; the one used last is at the end
        self._entries: list[tuple[Owner, _core.Session]] = []
        self._remembered: deque[tuple[Owner, np.ndarray]] = deque(maxlen=MOST_REMEMBERED)
        self._lock = threading.Lock()

    @classmethod
    def of(cls, session: Session) -> PrefixCache:
        """A cache of what this session, which nothing runs any more, has read; it takes no more."""
        cache = cls()
        cache.grows = False
        cache._entries = [((session.llm, session.setting), session.core)]
        return cache

    def __repr__(self) -> str:
        return f"<PrefixCache: {len(self._entries)} beginnings, {self.bytes} of {self.max_bytes} bytes>"

    @property
    def bytes(self) -> int:
        """The memory of all beginnings, as if none shared any with another."""
        return sum(core.bytes_for(core.length) for _, core in self._entries)

    def read(self, session: Session, ids: list[int], n_new: int, progress: bool) -> None:
        """Reads of an empty session's prompt what may be read ahead of its last pass, whose rows score the
        stages; as far as it goes from the cache."""
        owner = session.llm, session.setting
        ahead = np.array(ids[: max(0, len(ids) - session.setting.asking_rows)], np.int32)
        if fork := self._longest(owner, ahead):
            session.core, session.room = fork, 0
            session.places = (Place(0, fork.length, fork.length),)
        session.reserve(len(ids) - session.length, n_new)
        new = ids[session.length : len(ahead) if self.eager else self._begun_before(owner, ahead)]
        if len(new) >= LEAST_READ:
            session.run_pass(session.core.read, new, len(new), progress)
            if self.grows:
                self._keep(session)

    def _begun_before(self, owner: Owner, ids: np.ndarray) -> int:
        """How many of these ids an earlier prompt began with; remembers them for later ones."""
        with self._lock:
            lengths = [shared(other, ids) for earlier, other in self._remembered if earlier == owner]
            self._remembered.append((owner, ids))
        return max(lengths, default=0)

    def _longest(self, owner: Owner, ids: np.ndarray) -> _core.Session | None:
        """A context that has read as much of these ids as any before; None if that is not worth a fork."""
        with self._lock:
            lengths = [shared(core.ids, ids) if other == owner else 0 for other, core in self._entries]
            if (n := max(lengths, default=0)) < LEAST_READ:
                return None
            best = self._entries.pop(lengths.index(n))
            self._entries.append(best)
            fork = best[1].fork()
            self.hits, self.tokens_shared = self.hits + 1, self.tokens_shared + n
        fork.truncate(n)
        return fork

    def _keep(self, session: Session) -> None:
        """Keeps the session's context, which goes on in a fork whose memory ends with the answer; without
        memory for that the context is not kept. It replaces those whose ids it begins with."""
        owner, kept = (session.llm, session.setting), session.core
        try:
            if kept.bytes_for(kept.length) > self.max_bytes:
                raise MemoryError(f"it needs more than max_bytes, {self.max_bytes}; raise it")
            session.core = session.forked_core()
        except MemoryError as error:
            warnings.warn(f"the PrefixCache does not keep the beginning of a prompt: {error}", stacklevel=2)
            return
        with self._lock:
            self._entries = [
                (other, core)
                for other, core in self._entries
                if other != owner or shared(core.ids, kept.ids) < core.length
            ]
            self._entries.append((owner, kept))
            while self.bytes > self.max_bytes:
                self._entries.pop(0)


def shared(ids: Ids, other: Ids) -> int:
    """The number of ids that both begin with."""
    n = min(len(ids), len(other))
    different = np.flatnonzero(np.asarray(ids[:n]) != np.asarray(other[:n]))
    return int(different[0]) if different.size else n
