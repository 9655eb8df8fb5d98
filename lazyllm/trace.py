"""Trace: the tokens that each pass kept in play, stage by stage, and their scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lazyllm.checkpoints.tokenizer import Tokenizer
from lazyllm.method import Method
from lazyllm.pictures.heat_map import Heatmap
from lazyllm.support.optional import package

if TYPE_CHECKING:
    import pandas

PASSES = np.dtype([(name, np.int32) for name in ("pass_", "layer", "in_play", "computed", "revived")])


@dataclass(frozen=True, repr=False, eq=False)
class TracedStage:
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
class TracedPass:
    """One pass. Each of `runs` describes adjacent layers with the same tokens: `first_layer`, `last_layer`,
    the positions `in_play` and `computed`, and `scores`, which is None unless the last layer is a stage."""

    pass_: int
    generated: bool
    runs: list[dict[str, Any]]

    @property
    def stages(self) -> list[TracedStage]:
        return [
            TracedStage(self.pass_, run["last_layer"], run["in_play"], run["scores"], above["in_play"])
            for run, above in zip(self.runs, self.runs[1:], strict=False)
            if run["scores"] is not None
        ]

    def __repr__(self) -> str:
        kind = "generated" if self.generated else "prompt"
        return f"<pass {self.pass_} ({kind}): {', '.join(map(repr, self.stages)) or 'no stage'}>"


@dataclass(frozen=True, repr=False, eq=False)
class Trace:
    """All passes of one answer. `prefill_depths` and `depths`: how many layers held K,V of each context token
    after the prompt's pass and at the end. `kinds`: 0 for prompt tokens, 1 for generated ones."""

    passes: list[TracedPass]
    token_ids: list[int]
    kinds: np.ndarray
    prefill_depths: np.ndarray
    depths: np.ndarray
    n_layers: int
    pruning: Method
    tokenizer: Tokenizer | None

    @property
    def stages(self) -> list[TracedStage]:
        """The stages of all passes, in the order they ran."""
        return [stage for passed in self.passes for stage in passed.stages]

    def __repr__(self) -> str:
        return f"<Trace: {len(self.passes)} passes, {len(self.stages)} stages, {len(self.token_ids)} tokens>"

    def to_frame(self) -> pandas.DataFrame:
        """One row for each token in play at each stage: its score, and whether it was kept; needs pandas."""
        stages, texts = self.stages, np.array(self._texts(len(self.token_ids)), object)
        sizes = np.array([stage.in_play.size for stage in stages], int)

        def column(parts: list[np.ndarray], kind: type) -> np.ndarray:
            return np.concatenate([np.empty(0, kind), *parts])

        positions = column([stage.in_play for stage in stages], int)
        frame: pandas.DataFrame = package("pandas", "to_frame", "longbench").DataFrame(
            {
                "pass_": np.repeat(np.array([stage.pass_ for stage in stages], int), sizes),
                "layer": np.repeat(np.array([stage.layer for stage in stages], int), sizes),
                "position": positions,
                "token_id": np.array(self.token_ids)[positions],
                "text": texts[positions],
                "score": column([stage.scores for stage in stages], np.float32),
                "kept": column([np.isin(stage.in_play, stage.kept) for stage in stages], bool),
            }
        )
        return frame

    def heatmap(self) -> Heatmap:
        """The prompt's own text, each token coloured by how many layers computed it in prefill."""
        n = self.prefill_depths.size
        return Heatmap(
            texts=self._texts(n),
            kinds=self.kinds[:n],
            prefill_depths=self.prefill_depths,
            depths=self.depths[:n],
            n_layers=self.n_layers,
            subtitle=str(self.pruning),
        )

    def _texts(self, n: int) -> list[str]:
        if self.tokenizer is None:
            return [f" {token}" for token in self.token_ids[:n]]
        return self.tokenizer.offsets(self.token_ids[:n])


class StoredPass(NamedTuple):
    """A pass that has run: the context's length after it, its counts and, if it was traced, its sets."""

    length: int
    counts: np.ndarray
    policy_seconds: float
    traced: TracedPass | None
    depths: np.ndarray | None


class Recorder:
    """Collects the counts and traces of a session's passes while one answer is made."""

    def __init__(self, core: Any, traced: bool) -> None:
        self._core = core
        self._traced = traced
        self._begins = core.length
        self._stored: list[StoredPass] = []
        core.trace = traced

    def passed(self) -> None:
        """Stores the pass that has just run, unless it has been stored."""
        core = self._core
        if core.length == (self._stored[-1].length if self._stored else self._begins):
            return
        traced = depths = None
        if self._traced:
            traced = TracedPass(len(self._stored), bool(core.kinds[-1] == 1), core.last_trace)
            depths = core.depths
        self._stored.append(StoredPass(core.length, core.last_pass, core.policy_seconds, traced, depths))

    @property
    def policy_seconds(self) -> float:
        return float(sum(stored.policy_seconds for stored in self._stored))

    def counts_at(self, length: int) -> np.ndarray:
        """A copy of the counts (layers, 3) of the pass after which the context had this length."""
        return next(stored.counts.copy() for stored in self._stored if stored.length == length)

    @property
    def dropped(self) -> bool:
        """True if a pass ran without one of the context's tokens somewhere."""
        return any((stored.counts[:, 0] < stored.length).any() for stored in self._stored)

    def counts(self) -> np.ndarray:
        """One row per pass and layer."""
        counts = np.stack([stored.counts for stored in self._stored])
        n_passes, n_layers, _ = counts.shape
        table = np.empty(n_passes * n_layers, PASSES)
        table["pass_"] = np.repeat(np.arange(n_passes), n_layers)
        table["layer"] = np.tile(np.arange(n_layers), n_passes)
        for column, name in enumerate(("in_play", "computed", "revived")):
            table[name] = counts[:, :, column].ravel()
        return table

    def trace(
        self, token_ids: list[int], n_layers: int, pruning: Method, tokenizer: Tokenizer | None
    ) -> Trace | None:
        core = self._core
        passes = [stored.traced for stored in self._stored if stored.traced]
        prefill = [stored.depths for stored in self._stored if stored.traced and not stored.traced.generated]
        if not prefill or prefill[-1] is None:
            return None
        return Trace(
            passes,
            list(token_ids),
            core.kinds,
            prefill[-1],
            core.depths,
            n_layers,
            pruning,
            tokenizer,
        )
