"""Generation: one answer, its cost and its trace; Request: the options of an answer; Stream: its text in
pieces."""

from __future__ import annotations

from collections.abc import Generator as Pieces
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict

import numpy as np

from lazyllm import _core
from lazyllm.checkpoints.tokenizer import Tokenizer
from lazyllm.method import Method
from lazyllm.pictures.heat_map import Heatmap
from lazyllm.prompt import Tools
from lazyllm.sampling import GREEDY, SamplingParams
from lazyllm.support import checked
from lazyllm.support.optional import package

if TYPE_CHECKING:
    import pandas

FinishReason = Literal["stop", "length", "interrupted"]
PASSES = np.dtype([(name, np.int32) for name in ("pass_", "layer", "in_play", "computed", "revived")])
ROWS = np.dtype([("pass_", int), ("layer", int), ("position", int), ("score", np.float32), ("kept", bool)])


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
    `unpruned` says why a setting dropped nothing in the whole answer; "" if it dropped tokens or is dense.
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
        faster = f" ({self.speedup:.2f}x by counted work)" if (self.speedup or 1) > 1 else ""
        return (
            f"{len(self.prompt_ids)} prompt tokens, first token after {self.ttft:.3f} s{faster}, "
            f"{len(self.token_ids)} tokens in {self.seconds:.3f} s, {self.computed:.1%} computed, "
            f"{self.reached_top:.1%} reached the top, finished by {self.finish_reason}, {self.pruning.full_label}"
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
        checked.truth(self.progress, "progress")


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


class TracedStage(NamedTuple):
    """One selection: the tokens in play before it, their scores (smoothed where the setting smooths) and the
    tokens kept. `scores[i]` belongs to position `in_play[i]`."""

    pass_: int
    layer: int
    in_play: np.ndarray
    scores: np.ndarray
    kept: np.ndarray

    def __repr__(self) -> str:
        return f"<pass {self.pass_}, layer {self.layer}: {self.kept.size} of {self.in_play.size} kept>"


@dataclass(frozen=True, repr=False, eq=False)
class Pass:
    """One pass of an answer: the `length` of the context after it, `dropped` if a token was out of play in a
    layer or is gone, `counts` (layers, 3). A traced pass has `stages`, and one of a prompt also `depths`."""

    pass_: int
    length: int
    dropped: bool
    counts: np.ndarray
    policy_seconds: float
    stages: list[TracedStage]
    depths: np.ndarray | None

    @classmethod
    def last_of(cls, core: _core.Session, number: int) -> Pass:
        """The pass that a session has run last."""
        gone, counts, stages, depths = core.gone != 0, core.last_pass, [], None
        if core.trace:
            runs = core.last_trace  # runs of layers with the same tokens in play, with scores if a stage follows
            top = runs[-1]["in_play"]
            above = [*(run["in_play"] for run in runs[1:]), top[~gone[top]]]
            stages = [
                TracedStage(number, run["last_layer"], run["in_play"], run["scores"], kept)
                for run, kept in zip(runs, above, strict=True)
                if run["scores"] is not None
            ]
            depths = None if core.kinds[-1] == 1 else core.depths
        dropped = bool(gone.any() or (counts[:, 0] < core.length).any())
        return cls(number, core.length, dropped, counts, core.policy_seconds, stages, depths)


def table_of(passes: Sequence[Pass]) -> np.ndarray:
    """The counts of passes: one row per pass and layer."""
    counts = np.array([item.counts for item in passes])
    numbers = np.moveaxis(np.indices(counts.shape[:2]), 0, -1)
    rows = np.concatenate([numbers, counts], axis=-1, dtype=np.int32)
    return rows.reshape(-1, rows.shape[-1]).view(PASSES).ravel()


@dataclass(frozen=True, repr=False, eq=False)
class Trace:
    """All passes of one answer. `depths`: how many layers held K,V of each context token at the end. `kinds`:
    0 for prompt tokens, 1 for generated ones."""

    passes: list[Pass]
    token_ids: list[int]
    kinds: np.ndarray
    depths: np.ndarray
    n_layers: int
    pruning: Method
    tokenizer: Tokenizer | None

    @property
    def prefill_depths(self) -> np.ndarray:
        """The depths after the prompt's pass."""
        return next(item.depths for item in self.passes if item.depths is not None)

    @property
    def stages(self) -> list[TracedStage]:
        """The stages of all passes, in the order they ran."""
        return [stage for passed in self.passes for stage in passed.stages]

    def to_frame(self) -> pandas.DataFrame:
        """One row for each token in play at each stage: its score, and whether it was kept; needs pandas."""
        parts = [np.empty(0, ROWS)]
        for stage in self.stages:
            part = np.empty(stage.in_play.size, ROWS)
            part["pass_"], part["layer"], part["position"] = stage.pass_, stage.layer, stage.in_play
            part["score"], part["kept"] = stage.scores, np.isin(stage.in_play, stage.kept)
            parts.append(part)
        rows = np.concatenate(parts)
        frame: pandas.DataFrame = package("pandas", "to_frame", "plots").DataFrame(rows)
        texts = np.array(self._texts(len(self.token_ids)), object)
        frame.insert(3, "token_id", np.array(self.token_ids)[rows["position"]])
        frame.insert(4, "text", texts[rows["position"]])
        return frame

    def heatmap(self) -> Heatmap:
        """The prompt's own text, each token coloured by how many layers computed it in prefill."""
        n = self.prefill_depths.size
        before, depths = self.prefill_depths, self.depths[:n]
        return Heatmap(self._texts(n), self.kinds[:n], before, depths, self.n_layers, str(self.pruning))

    def _texts(self, n: int) -> list[str]:
        if self.tokenizer is None:
            return [f" {token}" for token in self.token_ids[:n]]
        return self.tokenizer.offsets(self.token_ids[:n])
