"""Generation: one answer and its cost; Request: the options of an answer; Stream: its text in pieces."""

from __future__ import annotations

from collections.abc import Generator as Pieces
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, Literal, TypedDict

import numpy as np

from lazyllm.method import Method
from lazyllm.sampling import GREEDY, SamplingParams
from lazyllm.support import checked
from lazyllm.trace import Trace

Tools = Sequence[Mapping[str, Any]]
FinishReason = Literal["stop", "length", "interrupted"]


@dataclass(frozen=True, repr=False, eq=False)
class Generation:
    """One answer and its cost.

    `ttft` and `seconds` run from the token ids to the first and to the last new id; they include compressing
    or sampling the prompt and exclude `tokenize_seconds`. `policy_seconds` of `seconds` were spent in a
    `Policy`. `prompt_ids` are the ids that the model read, from a prompt of `n_given` tokens: RandomDrop and
    PromptCompression shorten it. `computed` is the share of (prompt token, layer) pairs computed by the end,
    `reached_top` the share of prompt tokens computed in the last layer, both among all `n_given`; the series
    have one value per new token. `token_ids` holds every id drawn, end token and stop strings included;
    `text` excludes those. `finish_reason` is "stop" (an end token or a stop string), "length", or
    "interrupted" in the part of an answer that an exception carries. `speedup` is the counted work of running
    this prompt, dense over pruned: 1.0 if nothing of it was dropped, None where it cannot be counted.
    `unpruned` says why a setting dropped nothing in the whole answer, and is empty if it did, or is dense.
    `seed` is that of the draws; None for a greedy answer. `logprobs` has, for each new token, logarithms of
    the model's own probabilities by token: the largest, as many as were asked for, and the new token's.
    """

    text: str
    token_ids: list[int]
    prompt_ids: list[int]
    n_given: int
    ttft: float
    seconds: float
    tokenize_seconds: float
    policy_seconds: float
    computed_series: np.ndarray
    reached_top_series: np.ndarray
    passes: np.ndarray
    recorded: Trace | None
    pruning: Method
    finish_reason: FinishReason
    speedup: float | None
    unpruned: str
    seed: int | None
    logprobs: list[dict[int, float]] | None

    @property
    def trace(self) -> Trace:
        """Tokens in play and scores of every pass; ValueError unless the answer was made with trace=True."""
        if self.recorded is None:
            raise ValueError("this answer has no trace; make it with trace=True")
        return self.recorded

    @property
    def computed(self) -> float:
        return float(self.computed_series[-1])

    @property
    def reached_top(self) -> float:
        return float(self.reached_top_series[-1])

    @property
    def summary(self) -> str:
        """One line: token counts, times and shares computed."""
        return (
            f"{len(self.prompt_ids)} prompt tokens, first token after {self.ttft:.3f} s, "
            f"{len(self.token_ids)} tokens in {self.seconds:.3f} s, {self.computed:.1%} computed, "
            f"{self.reached_top:.1%} reached the top, finished by {self.finish_reason}, {self.pruning.label}"
            + (f", {self.policy_seconds:.3f} s in the policy" if self.policy_seconds else "")
            + (f", nothing was dropped: {self.unpruned}" if self.unpruned else "")
            + (f", seed {self.seed}" if self.seed is not None else "")
        )

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<Generation {self.text[:60]!r}{'…' if len(self.text) > 60 else ''}: {self.summary}>"

    def _repr_html_(self) -> str:
        text = f"<div style='white-space:pre-wrap;margin-bottom:0.5em'>{escape(self.text)}</div>"
        return f"{text}<small>{escape(self.summary)}</small>"


class Options(TypedDict, total=False):
    """The options of an answer as keywords, for type checkers and editors; `Request` has their defaults."""

    max_new_tokens: int
    sampling: SamplingParams
    stop: str | Iterable[str]
    stop_token_ids: Iterable[int]
    chat: bool
    chat_template_kwargs: Mapping[str, Any]
    tools: Tools
    logprobs: int
    trace: bool
    progress: bool


@dataclass(frozen=True)
class Request:
    """The options of one answer, checked; the first token that is drawn is none of `never_first`."""

    max_new_tokens: int = 128
    sampling: SamplingParams = GREEDY
    stop: str | Iterable[str] = ()
    stop_token_ids: Iterable[int] = ()
    chat: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tools: Tools = ()
    logprobs: int = 0
    trace: bool = False
    progress: bool = True
    never_first: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        checked.whole(self.max_new_tokens, "max_new_tokens", 1)
        if not isinstance(self.sampling, SamplingParams):
            raise TypeError(f"sampling must be a lazyllm.SamplingParams, not {self.sampling!r}")
        single = isinstance(self.stop, str) or not isinstance(self.stop, Iterable)
        stops = (self.stop,) if single else tuple(self.stop)
        if not all(isinstance(stop, str) for stop in stops):
            raise TypeError(f"stop must be a string or strings, not {self.stop!r}")
        if "" in stops:
            raise ValueError("a stop string must not be empty")
        object.__setattr__(self, "stop", stops)
        ends = frozenset(checked.whole(token, "a stop token id", 0) for token in self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", ends)
        object.__setattr__(self, "tools", tuple(self.tools))
        checked.whole(self.logprobs, "logprobs", 0)


class Stream(Iterator[str]):
    """An iterator over pieces of an answer's text; `generation` is set when it is exhausted."""

    def __init__(self, pieces: Pieces[str, None, Generation]) -> None:
        self._pieces = pieces
        self.generation: Generation | None = None

    def __next__(self) -> str:
        try:
            return next(self._pieces)
        except StopIteration as end:
            self.generation = self.generation or end.value
            raise StopIteration from None

    def close(self) -> None:
        """Stops generating; the answer stays unfinished."""
        self._pieces.close()

    def finished(self) -> Generation:
        """Generates to the end and returns the whole answer."""
        for _ in self:
            pass
        if self.generation is None:
            raise RuntimeError("the stream was closed or failed before its end")
        return self.generation
