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
"""The least number of tokens that is worth a fork, or a pass that reads them. In a shorter prompt, sums may be
added in another order than in a prompt that is read in parts."""
MOST_REMEMBERED = 64  # prompts


class PrefixCache:
    """Contexts that have read the beginnings of earlier prompts, so that a common one is read once.

    Each prompt takes the longest beginning that it shares with an earlier one under the same setting, reads
    the rest up to the first stage (`Session.read`), and is then pruned by its last rows as if it had been
    read as a whole. Those used last stay, up to `max_bytes`. Answers that are timed should not share a cache.
    Unless `eager`, a beginning is read in a pass of its own and kept only for the second prompt that has it: two
    passes take longer than one, which a prompt that shares nothing should not pay.
    """

    def __init__(self, max_bytes: int = 2**30, eager: bool = True) -> None:
        self.max_bytes = checked.whole(max_bytes, "max_bytes", 1, sys.maxsize)
        self.eager = checked.truth(eager, "eager")
        self.grows = True  # keeps the beginnings of new prompts
        self.hits = self.tokens_shared = 0  # prompts that began like an earlier one; tokens in all
        # contexts that nothing runs any more, by model and setting; the one used last is at the end
        self._entries: list[tuple[Owner, _core.Session]] = []
        self._remembered: deque[tuple[Owner, np.ndarray]] = deque(maxlen=MOST_REMEMBERED)
        self._lock = threading.Lock()

    @classmethod
    def of(cls, session: Session) -> PrefixCache:
        """A cache of this session's context alone, to which nothing is added; the session must not run any more."""
        cache = cls()
        cache.grows = False
        cache._entries = [((session.llm, session.setting), session.core)]
        return cache

    def __repr__(self) -> str:
        return f"<PrefixCache: {len(self._entries)} beginnings, {self.bytes} of {self.max_bytes} bytes>"

    @property
    def bytes(self) -> int:
        """The memory of all contexts; parts that they share count in each of them."""
        return sum(core.bytes_for(core.length) for _, core in self._entries)

    def read(self, session: Session, ids: list[int], n_new: int, progress: bool) -> None:
        """Reads the beginning of an empty session's prompt, up to the rows that score the stages and so have to be
        in the last pass. As far as the cache has it, it is taken from there."""
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
        """A fork of a context, cut to the longest known beginning of these ids; None if it is below LEAST_READ."""
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
        """Keeps the session's context; the session goes on in a fork, which is freed with the answer. Without
        memory for the fork nothing is kept. The context replaces those whose ids it begins with."""
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
    """The number of ids that both begin with: 2 for [7, 8, 9] and [7, 8, 5, 9]."""
    n = min(len(ids), len(other))
    different = np.flatnonzero(np.asarray(ids[:n]) != np.asarray(other[:n]))
    return int(different[0]) if different.size else n
