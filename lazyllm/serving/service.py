"""Service: a model, and how requests to it are answered."""

from __future__ import annotations

from collections.abc import Iterator

from lazyllm.generation import Generation
from lazyllm.llm import LLM
from lazyllm.methods.parsing import PruningInput, as_method
from lazyllm.prefix_cache import PrefixCache
from lazyllm.serving.options import Options
from lazyllm.serving.protocol import Ask, checked_request
from lazyllm.serving.turns import Turns

Item = Ask | tuple[int, str | Generation]
"""A request once it has been checked, then the texts of its answers and their ends, by their index."""


class Service:
    """Answers requests to one model under its own setting or the request's."""

    def __init__(self, llm: LLM, pruning: PruningInput, options: Options) -> None:
        self.llm, self.options = llm, options
        self.model = llm.config.name or "lazyllm"
        self.setting = as_method(pruning)
        self.setting.check(llm.config)
        if self.setting.compresses:
            raise ValueError(f"{self.setting} rewrites prompts, which serve does not do")
        self.cache = PrefixCache(options.cache_bytes) if options.cache_bytes else None
        self.turns = Turns(options.at_once, options.waiting)

    def answers(self, body: bytes, chat: bool) -> Iterator[Item]:
        """The items of one request, made in the thread that asks for them."""
        ask = checked_request(self.llm, self.model, body, chat)
        yield ask
        setting = ask.pruning or self.setting
        for number, ids in enumerate(ask.prompts):
            index = number * ask.n
            prefix = self.cache if setting.reads_in_parts else None
            options = {**ask.options, "sampling": ask.sampling.for_prompt(number), "prefix": prefix}
            if ask.n > 1:
                for i, generation in enumerate(self.llm.generate(ids, setting, n=ask.n, **options)):
                    yield index + i, generation.text
                    yield index + i, generation
                continue
            stream = self.llm.stream(ids, setting, **options)
            for piece in stream:
                yield index, piece
            yield index, stream.finished()

    def close(self) -> None:
        self.turns.close()

    def public(self, error: Exception) -> str:
        """The error's sentence without the places of this machine's files."""
        text = " ".join(str(error).split()) or type(error).__name__
        tokenizer = self.llm.checkpoint.tokenizer
        for path in {str(self.llm.checkpoint.path), str(tokenizer.place) if tokenizer else ""} - {""}:
            text = text.replace(path, self.model)
        return text.encode(errors="replace").decode()
