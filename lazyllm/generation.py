"""Generation: one answer, with what it cost; and the one loop that makes answers."""

from __future__ import annotations

import time
from collections.abc import Generator as Pieces
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Literal

import numpy as np

from lazyllm.progress import prefill_watch
from lazyllm.sampling import SamplingParams
from lazyllm.stop_finder import StopFinder

if TYPE_CHECKING:
    from lazyllm.methods import Method
    from lazyllm.prompts import Given
    from lazyllm.session import Session
    from lazyllm.trace import Trace

FinishReason = Literal["stop", "length"]
PASSES = np.dtype([(name, np.int32) for name in ("pass_", "layer", "in_play", "computed", "revived")])


@dataclass(frozen=True, repr=False, eq=False)
class Generation:
    """One answer and what it took.

    `ttft` and `seconds` run from token ids handed over to the first and to the last new id, compressing or
    sampling the prompt included; `tokenize_seconds` is beside them. `prompt_ids` are those that the model was
    given, of a prompt of `n_given` tokens: RandomDrop and PromptCompression shorten it. `computed` is the
    share of (prompt token, layer) pairs computed by the end, `reached_top` that of prompt tokens computed in
    the last layer, both among all `n_given`; the series have one value per new token. `token_ids` are all
    that were drawn, with an end token and the tokens of a stop string; `text` has neither. `finish_reason`
    is "stop" (an end token or a stop string) or "length".
    """

    text: str
    token_ids: list[int]
    prompt_ids: list[int]
    n_given: int
    ttft: float
    seconds: float
    tokenize_seconds: float
    computed_series: np.ndarray
    reached_top_series: np.ndarray
    passes: np.ndarray
    trace: Trace | None
    pruning: Method
    finish_reason: FinishReason

    @property
    def computed(self) -> float:
        return float(self.computed_series[-1])

    @property
    def reached_top(self) -> float:
        return float(self.reached_top_series[-1])

    @property
    def summary(self) -> str:
        """One line of figures."""
        return (
            f"{len(self.prompt_ids)} prompt tokens, first token after {self.ttft:.3f} s, "
            f"{len(self.token_ids)} tokens in {self.seconds:.3f} s, {self.computed:.1%} computed, "
            f"{self.reached_top:.1%} reached the top, finished by {self.finish_reason}, {self.pruning}"
        )

    def __str__(self) -> str:
        return f"{self.text}\n[{self.summary}]"

    def __repr__(self) -> str:
        return f"<Generation {self.text[:60]!r}{'…' if len(self.text) > 60 else ''}: {self.summary}>"

    def _repr_html_(self) -> str:
        figures = {
            "prompt tokens": len(self.prompt_ids),
            "new tokens": len(self.token_ids),
            "first token": f"{self.ttft:.3f} s",
            "whole answer": f"{self.seconds:.3f} s",
            "computed": f"{self.computed:.1%}",
            "reached the top": f"{self.reached_top:.1%}",
            "finished by": self.finish_reason,
            "pruning": self.pruning,
        }
        heads = "".join(f"<th style='text-align:left'>{escape(name)}</th>" for name in figures)
        cells = "".join(
            f"<td style='text-align:left'>{escape(str(value))}</td>" for value in figures.values()
        )
        text = f"<div style='white-space:pre-wrap;margin-bottom:0.5em'>{escape(self.text)}</div>"
        return f"{text}<table><thead><tr>{heads}</tr></thead><tbody><tr>{cells}</tr></tbody></table>"


@dataclass(frozen=True)
class Request:
    """What is asked for besides the prompt, checked."""

    max_new_tokens: int
    sampling: SamplingParams
    stop: tuple[str, ...]
    trace: bool
    progress: bool
    stop_ids: frozenset[int] = frozenset()  # end the answer as its end tokens do, but not as its first token

    @classmethod
    def checked(
        cls,
        max_new_tokens: int,
        sampling: SamplingParams | None,
        stop: str | Iterable[str],
        trace: bool,
        progress: bool,
    ) -> Request:
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int | np.integer):
            raise TypeError(f"max_new_tokens must be a whole number, not {max_new_tokens!r}")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
        if sampling is not None and not isinstance(sampling, SamplingParams):
            raise TypeError(f"sampling must be a lazyllm.SamplingParams, not {sampling!r}")
        strings = (stop,) if isinstance(stop, str) else tuple(stop)
        for string in strings:
            if not isinstance(string, str):
                raise TypeError(f"stop must be a string or strings, not {string!r}")
            if not string:
                raise ValueError("a stop string must not be empty")
        return cls(int(max_new_tokens), sampling or SamplingParams(), strings, bool(trace), bool(progress))


def answer(session: Session, given: Given, request: Request) -> Pieces[str, None, Generation]:
    """Runs the session on the prompt, yields pieces of the answer's text and returns the Generation.

    The last new id is not run through the model: the session keeps it for whatever comes next.
    """
    from lazyllm import _core

    started = time.perf_counter() - given.compress_seconds
    prompt_ids = session.shortened(given.ids)
    session.reserve(len(prompt_ids), request.max_new_tokens)
    session.note_prompt(given.n_given)
    sampling = request.sampling
    sampler = _core.Sampler(sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed)
    stream, finder = session.llm.text_stream(), StopFinder(request.stop)
    recorder = session.recorder(request.trace)
    eos = session.llm.eos_token_ids
    token_ids: list[int] = []
    pieces: list[str] = []
    computed: list[float] = []
    reached_top: list[float] = []
    ttft = seconds = 0.0
    finish_reason: FinishReason = "length"

    while len(token_ids) < request.max_new_tokens:
        if token_ids:
            token = session.advance(None, sampler, recorder)
        else:
            with prefill_watch(len(prompt_ids), session.llm.config.n_layers, request.progress) as watch:
                token = session.advance(prompt_ids, sampler, recorder, watch)
        seconds = time.perf_counter() - started
        ttft = ttft or seconds
        token_ids.append(token)
        computed.append(session.computed)
        reached_top.append(session.reached_top)
        if token in eos or (token in request.stop_ids and len(token_ids) > 1):
            finish_reason = "stop"
            break
        if stream and (piece := finder.push(stream.push(token))):
            pieces.append(piece)
            yield piece
        if finder.stopped:
            break
    if stream and (piece := finder.push(stream.finish()) + finder.finish()):
        pieces.append(piece)
        yield piece
    return Generation(
        text="".join(pieces),
        token_ids=token_ids,
        prompt_ids=prompt_ids,
        n_given=given.n_given,
        ttft=ttft,
        seconds=seconds,
        tokenize_seconds=given.tokenize_seconds,
        computed_series=np.array(computed),
        reached_top_series=np.array(reached_top),
        passes=recorder.counts(),
        trace=session.trace(recorder),
        pruning=session.pruning,
        finish_reason="stop" if finder.stopped else finish_reason,
    )


class Stream(Iterator[str]):
    """Pieces of an answer's text as they become certain; `generation` is there once they are through."""

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
        """Ends the answer here."""
        self._pieces.close()

    def finished(self) -> Generation:
        """Runs to the end and gives the whole answer."""
        for _ in self:
            pass
        if self.generation is None:
            raise RuntimeError("the stream was closed or failed before its end")
        return self.generation
