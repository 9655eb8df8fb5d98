"""Service: a model, and how requests to it are answered."""

from __future__ import annotations

from collections.abc import Iterator

from lazyllm.llm import LLM
from lazyllm.method import Method
from lazyllm.methods.parsing import as_method
from lazyllm.prefix_cache import PrefixCache
from lazyllm.serving.figures import Figures
from lazyllm.serving.options import Options
from lazyllm.serving.protocol import Answered, Ask, checked_request
from lazyllm.serving.shadow import Guard, Shadow
from lazyllm.serving.turns import Turns

Item = Ask | tuple[int, str | Answered]
"""A request once it has been checked, then the texts of its answers and their ends, by their index."""


class Service:
    """Answers requests to one model under its own setting or the request's."""

    def __init__(self, llm: LLM, options: Options) -> None:
        self.llm, self.model = llm, llm.config.name or "lazyllm"
        self.heat_map: str | None = None  # of the last traced request, as HTML
        self.guard = None if options.guard is None else Guard(options.guard, *options.bounds)
        self._setting = self.guard.setting if self.guard else as_method(options.pruning or options.speedup)
        self._setting.check(llm.config)
        self.roles = options.roles
        if self._setting.compresses:
            raise ValueError(f"{self._setting} rewrites prompts, which serve does not do")
        self.cache = PrefixCache(options.cache_bytes) if options.cache_bytes else None
        self.turns = Turns(options.at_once, options.waiting)
        self.figures = Figures(self.turns, self.cache)
        self.shadow = Shadow(llm, self.turns, self.figures, self.guard, options)

    @property
    def setting(self) -> Method:
        """The setting of requests that name none."""
        return self.guard.setting if self.guard else self._setting

    def answers(self, body: bytes, chat: bool) -> Iterator[Item]:
        """The items of one request, made in the thread that asks for them."""
        ask = checked_request(self.llm, self.model, body, chat, self.roles)
        given = ask.pruning or self.setting
        setting = given.protecting(ask.protected) if ask.protected else given
        yield ask
        prefix = self.cache if setting.reads_in_parts else None
        for number, ids in enumerate(ask.prompts):
            index = number * ask.n
            options = {**ask.options, "sampling": ask.sampling.for_prompt(number), "prefix": prefix}
            if ask.n > 1:
                generations = self.llm.generate(ids, setting, n=ask.n, **options)
                for i, generation in enumerate(generations):
                    yield index + i, generation.text
            else:
                stream = self.llm.stream(ids, setting, **options)
                for piece in stream:
                    yield index, piece
                generations = [stream.finished()]
            for i, generation in enumerate(generations):
                yield index + i, Answered(generation, self.figures.answered(given, generation))
                if ask.options["trace"]:
                    self.heat_map = generation.trace.heatmap()._repr_html_()
            self.shadow.offer(ids, setting, given)

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
