"""Trace: the tokens that each pass kept in play, stage by stage, and their scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lazyllm import _core
from lazyllm.checkpoints.tokenizer import Tokenizer
from lazyllm.method import Method
from lazyllm.pictures.heat_map import Heatmap
from lazyllm.support.optional import package

if TYPE_CHECKING:
    import pandas

PASSES = np.dtype([(name, np.int32) for name in ("pass_", "layer", "in_play", "computed", "revived")])
ROWS = np.dtype([("pass_", int), ("layer", int), ("position", int), ("score", np.float32), ("kept", bool)])


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
    """One pass of an answer: its counts (layers, 3), and the context's length after it, of which `n_gone`
    tokens are gone. A traced one has `stages`, and a prompt's has `depths`."""

    pass_: int
    generated: bool
    length: int
    n_gone: int
    counts: np.ndarray
    policy_seconds: float
    stages: list[TracedStage]
    depths: np.ndarray | None

    @classmethod
    def last_of(cls, core: _core.Session, number: int) -> Pass:
        """The pass that a session has run last."""
        generated, gone, stages = bool(core.kinds[-1] == 1), core.gone != 0, []
        if core.trace:
            runs = core.last_trace  # each of layers with the same tokens, with scores where a stage follows
            top = runs[-1]["in_play"]
            above = [*(run["in_play"] for run in runs[1:]), top[~gone[top]]]
            stages = [
                TracedStage(number, run["last_layer"], run["in_play"], run["scores"], kept)
                for run, kept in zip(runs, above, strict=True)
                if run["scores"] is not None
            ]
        depths = core.depths if core.trace and not generated else None
        counts, seconds = core.last_pass, core.policy_seconds
        return cls(number, generated, core.length, int(gone.sum()), counts, seconds, stages, depths)

    @property
    def dropped(self) -> bool:
        """True if tokens of the context were out of play in a layer, or are gone."""
        return bool(self.n_gone or (self.counts[:, 0] < self.length).any())


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

    def __repr__(self) -> str:
        return f"<Trace: {len(self.passes)} passes, {len(self.stages)} stages, {len(self.token_ids)} tokens>"

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
