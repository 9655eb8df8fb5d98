"""Timeline: the tokens of one growing context, their caches, and the prompts and chat turns among them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol, TypeVar

import numpy as np

from lazyllm import _core
from lazyllm.machine.memory import check_memory, reserve
from lazyllm.method import Method
from lazyllm.model import Model
from lazyllm.prompt import Conversation, PromptPlace
from lazyllm.support.progress import prefill_watch

T = TypeVar("T")
READ = 2  # of `Timeline.kinds`: prompt tokens read, with no pass since


class Prefixes(Protocol):
    """The interface of a `PrefixCache`, from which a first prompt may take its beginning."""

    def read(self, timeline: Timeline, ids: list[int], n_new: int, progress: bool) -> None: ...


class Timeline:
    """The state of a session, and the steps that change it; each step runs in `exclusive_use`."""

    document: Mapping[str, Any] | None = None
    """The text and options of the `Document` whose timeline this is, to make it again."""
    unfinished: object = None
    """The interrupted answer that waits to go on; forgotten when anything else changes the context."""

    def __init__(self, model: Model, method: Method, core: _core.Session, prefixes: Prefixes | None) -> None:
        self.llm = model
        self.setting = method
        self.pruning = method  # what the setting is for this context's first prompt, once that has begun
        self.core = core
        self.prefixes = prefixes
        self.room = 0  # capacity of the buffers, in tokens
        self.conversation = Conversation(model, method)
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Session of {self.llm.config.name or 'a model'}: {self.length} tokens, {self.setting.label}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a session cannot be copied or pickled; use fork() or llm.session()")

    @property
    def length(self) -> int:
        """Tokens run through the model."""
        return self.core.length

    @property
    def depths(self) -> np.ndarray:
        """Layers that hold K,V of each token (of tokens that are gone: that computed it)."""
        return self.core.depths

    @property
    def kinds(self) -> np.ndarray:
        """0 for prompt tokens, 1 for generated ones, 2 for prompt tokens read, with no pass since."""
        return self.core.kinds

    @property
    def computed(self) -> float:
        """Share of (prompt token, layer) pairs computed so far."""
        return self.core.computed * self._share_run()

    @property
    def reached_top(self) -> float:
        """Share of prompt tokens computed in the last layer so far."""
        return self.core.reached_top * self._share_run()

    def _share_run(self) -> float:
        """Prompt tokens run through the model, as a share of those given."""
        n_given = sum(prompt.n_given for prompt in self.conversation.prompts)
        return self.core.n_prompt / n_given if n_given else 1.0

    @property
    def last_pass(self) -> np.ndarray:
        """The counts of the last pass (layers, 3): tokens in play, computed, revived."""
        return self.core.last_pass

    @contextmanager
    def exclusive_use(self) -> Iterator[None]:
        """Refuses a second caller. Before and after, prompts are brought in line with the context, which may
        have been truncated, or not have grown by a prompt whose pass failed."""
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "this session is in use: another thread, a progress callback or a stream is running it; "
                "open one session for each"
            )
        try:
            self.conversation.truncate(self.length)
            yield
        finally:
            try:
                self.conversation.truncate(self.length)
            finally:
                self._lock.release()

    def check_room(self, n_given: int, n_new: int) -> int:
        """The length with `n_given` and `n_new` more tokens; ValueError if it exceeds the model's context."""
        length = self.length + (self.core.drawn is not None)
        total, config = length + n_given + n_new, self.llm.config
        if total > config.context:
            raise ValueError(
                f"{length} tokens in the session, {n_given} given and {n_new} to be generated make {total}; "
                f"the model's context is {config.context}"
            )
        return total

    def reserve(self, n_given: int, n_new: int = 0) -> None:
        """Reserves buffers, then runs the token drawn last; an error beyond the context or free memory."""
        total = self.check_room(n_given, n_new)
        if total > self.room:
            self.room = reserve(self.core, total, self.llm.config.context, self.llm.device == "cpu")
        self.unfinished = None
        if self.core.drawn is not None:
            self.core.forward([self.core.drawn], generated=True)

    @contextmanager
    def prompt(self, ids: list[int], n_new: int, progress: bool) -> Iterator[int]:
        """Where a prompt of these ids begins, once memory is reserved, its beginning taken from `prefixes`
        and the schedule decided. If the pass in the block fails, nothing of the prompt is left."""
        self.reserve(len(ids), n_new)
        begins = self.length
        try:
            if self.prefixes is not None and not begins:
                self.prefixes.read(self, ids, n_new, progress)
            if (self.kinds == READ).all():
                self.pruning = self.setting.for_prompt(self.llm.config, begins + len(ids))
                if self.pruning != self.setting:
                    self.core.reschedule(self.pruning.core())
            yield begins
        except BaseException:
            if self.length < begins + len(ids):
                self.core.truncate(begins)
            raise

    def run_pass(self, run: Callable[..., T], ids: list[int], n_given: int | None, progress: bool) -> T:
        """The result of a pass over these ids; of a prompt of `n_given` tokens, unless that is None."""
        with prefill_watch(len(ids), self.llm.config.n_layers, progress) as watch:
            if n_given is not None:
                self.begin_prompt(n_given, len(ids))
            return run(ids, watch=watch)

    def begin_prompt(self, n_given: int, n_new: int) -> None:
        """Counts a prompt and marks its gaps; called when nothing but the pass itself can fail."""
        gaps = self.pruning.gaps(n_new, len(self.conversation.prompts))
        self.conversation.prompts += (PromptPlace(self.length, n_new, n_given),)
        self.core.truncate(self.length)  # the gaps of a prompt that was interrupted before its pass
        if gaps.size:
            self.core.leave_out(self.length + gaps)

    def forked_core(self) -> _core.Session:
        """A second core in the same state; MemoryError beyond the free memory."""
        if self.llm.device == "cpu":
            check_memory(self.core.fork_bytes, f"a fork of a session of {self.room} tokens")
        return self.core.fork()
