"""Service: a model, and how requests to it are answered."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lazyllm.llm import LLM
from lazyllm.machine import memory
from lazyllm.method import Method
from lazyllm.methods.parsing import as_method
from lazyllm.prefix_cache import PrefixCache
from lazyllm.serving.figures import Figures
from lazyllm.serving.options import Options
from lazyllm.serving.protocol import Ask, Part, events, whole
from lazyllm.serving.shadow import Guard, Shadow
from lazyllm.serving.turns import Turns


class Service:
    """Answers requests to one model under its own setting or the request's."""

    def __init__(self, llm: LLM, options: Options) -> None:
        self.llm, self.model, self.options = llm, llm.config.name or "lazyllm", options
        self.heat_map: str | None = None  # of the last traced request, as HTML
        self._lock, self._promises = threading.Lock(), 0  # bytes, of the requests that run
        self.guard = None if options.guard is None else Guard(options.guard, *options.bounds)
        self._setting = self.guard.setting if self.guard else as_method(options.pruning or options.speedup)
        self._setting.check(llm.config)
        if self._setting.compresses:
            raise ValueError(f"{self._setting} rewrites prompts, which serve does not do")
        self.cache = PrefixCache(options.cache_bytes, eager=False) if options.cache_bytes else None
        self.turns = Turns(options.at_once, options.waiting)
        self.figures = Figures(self.turns, self.cache)
        self.shadow = Shadow(llm, self.turns, self.figures, self.guard, options)

    @property
    def setting(self) -> Method:
        """The setting of requests that name none."""
        return self.guard.setting if self.guard else self._setting

    def answer(self, body: bytes, chat: bool) -> Iterator[Any]:
        """The answer to a request, or the events of a streamed one."""
        ask = Ask(self.llm, self.model, body, chat, self.options.roles)
        if ask.stream:
            yield from events(ask, self._parts(ask))
        else:
            yield whole(ask, self._parts(ask))

    def _parts(self, ask: Ask) -> Iterator[Part]:
        named = ask.pruning or self.setting
        setting = named.protecting(ask.protected) if ask.protected else named
        prefix = self.cache if setting.reads_in_parts else None
        n_tokens = max(map(len, ask.prompts)) + ask.most_tokens
        n_sessions = 1 if ask.n == 1 else 2  # one answer after the other goes on in a fork
        n_bytes = n_sessions * self.llm.session(setting, progress=False).core.bytes_for(n_tokens)
        with self._promised(n_tokens, n_bytes):
            for number, ids in enumerate(ask.prompts):
                options = {**ask.options(number), "prefix": prefix}
                if ask.n > 1:
                    generations = self.llm.generate(ids, setting, n=ask.n, **options)
                else:
                    stream = self.llm.stream(ids, setting, **options)
                    yield from (Part(number, piece) for piece in stream)
                    generations = [stream.finished()]
                for index, generation in enumerate(generations, number * ask.n):
                    text = generation.text if ask.n > 1 else ""
                    yield Part(index, text, generation, self.figures.answered(named, generation))
                    if ask.trace:
                        self.heat_map = generation.trace.heatmap()._repr_html_()
                self.shadow.offer(ids, setting, named)

    @contextmanager
    def _promised(self, n_tokens: int, n_bytes: int) -> Iterator[None]:
        """Counts memory as a running request's; MemoryError if those that run may use too much to leave it.
        What is free is looked up while none runs: later a part of what they are promised is in use."""
        with self._lock:
            if not self._promises:
                self._free = memory.available_bytes()
            left = None if self._free is None else self._free - self._promises
            if self.llm.device == "cpu" and left is not None and n_bytes > left:
                raise MemoryError(
                    f"a session of {n_tokens} tokens needs {n_bytes} bytes; "
                    f"{left} are available beside the requests that run"
                )
            self._promises += n_bytes
        try:
            yield
        finally:
            with self._lock:
                self._promises -= n_bytes

    def close(self) -> None:
        self.turns.close()
        self.shadow.close()

    def public(self, error: Exception) -> str:
        """The error's sentence without the places of this machine's files."""
        text = " ".join(str(error).split()) or type(error).__name__
        tokenizer = self.llm.checkpoint.tokenizer
        for path in {str(self.llm.checkpoint.path), str(tokenizer.place) if tokenizer else ""} - {""}:
            text = text.replace(path, self.model)
        return text.encode(errors="replace").decode()
