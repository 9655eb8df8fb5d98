"""Policy: a rule of scoring by the user, and the view of a layer that it scores by."""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import sqrt
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from lazyllm import _core
from lazyllm.checkpoints.config import ModelConfig
from lazyllm.counted_work import bare_flops
from lazyllm.method import source_digest
from lazyllm.pruning import PAPER, Pruning, Scheduled, StagesInput
from lazyllm.support import checked

Memo = dict[int, tuple[Any, np.ndarray]]  # what `observe` returned in this pass, and the positions in play, by layer


class View:
    """A layer whose keys and values have just been computed, as a policy sees it.

    H query heads share G key-value heads of size D; m tokens are in play, n of them were computed in this
    layer. Arrays are read-only copies, which may be kept; the view itself ends with the call.
    """

    def __init__(self, policy: Policy, core: _core.Session, facts: Mapping[str, Any], memo: Memo) -> None:
        self._core: _core.Session | None = core
        self._policy = policy
        self._facts, self._memo = facts, memo
        self._copied: dict[tuple[str, int], np.ndarray] = {}
        self.layer: int = facts["layer"]
        self.window: int | None = facts["window"] or None
        """The keys that a row of this layer sees at most; None if it sees all before it."""
        self.is_prompt: bool = facts["is_prompt"]
        """True in a pass over prompt tokens, False in a decode step."""
        self.n_keep: int | None = None if facts["observes"] else facts["n_keep"]
        """The number of prompt tokens that the stage keeps; None in `observe`."""
        self.observed: Mapping[int, Any] = MappingProxyType({layer: value for layer, (value, _) in memo.items()})
        """By layer: what `observe` returned in this pass."""

    def __repr__(self) -> str:
        return f"<View of layer {self.layer}: {self._facts['n_in_play']} tokens in play>"

    def _part(self, name: str, first: int, n: int) -> np.ndarray:
        """A copy of `n` entries of a part, activations in float32; the core gives bfloat16 as 16-bit integers."""
        if self._core is None:
            raise RuntimeError(f"the view of layer {self.layer} was used after its call; keep its arrays")
        if (name, n) not in self._copied:
            array = self._core.view(name, first, n)
            if array.dtype == np.uint16:
                array = (array.astype(np.uint32) << 16).view(np.float32)
            elif array.dtype.kind == "f":
                array = array.astype(np.float32, copy=False)
            self._copied[name, n] = _read_only(array)
        return self._copied[name, n]

    @property
    def positions(self) -> np.ndarray:
        """The positions in play (m,), ascending."""
        return self._part("in_play", 0, self._facts["n_in_play"])

    @property
    def rows(self) -> np.ndarray:
        """The positions computed in this layer (n,), ascending: new tokens, and revived ones before them."""
        return self._part("rows", 0, self._facts["n_rows"])

    @property
    def protected(self) -> np.ndarray:
        """True (m,) for tokens in play that this pass cannot drop."""
        return _read_only(self._in_play("protected", axis=0).astype(bool))

    def aligned(self, layer: int) -> np.ndarray:
        """`observed[layer]`, whose last axis is the tokens in play in that layer, for those in play now.

        Where positions 0, 2 and 5 were in play, and 0 and 5 still are, [.2, .3, .5] becomes [.2, .5].
        """
        if layer not in self.observed:
            raise ValueError(f"layer {layer} was not observed in this pass, only {[*self.observed]}")
        rows, positions = map(np.asarray, self._memo[layer])
        if rows.shape[-1:] != positions.shape:
            raise ValueError(f"observe gave {rows.shape} after layer {layer}; expected (…, {positions.size})")
        return rows[..., np.searchsorted(positions, self.positions)]

    def queries(self, rows: int = 1) -> np.ndarray:
        """Queries (H, w, D) of the last w new tokens still computed: `rows`, or as many as there are; rotated
        and not scaled: scores are q.k / sqrt(the model's query scalar, which is D in most)."""
        rows, most = checked.whole(rows, "rows", 1), self._policy.asking_rows
        if rows > most:
            raise ValueError(f"a view was asked for {rows} rows, not {most} or fewer: set queries = {rows}")
        n = min(rows, int(np.count_nonzero(self.rows >= self._facts["first_asking"])))
        projections = self._part("projections", self._facts["n_rows"] - n, n)
        return _read_only(projections[:, : self._facts["n_heads"]].transpose(1, 0, 2))

    def keys(self) -> np.ndarray:
        """Rotated keys (G, m, D) of the tokens in play."""
        return self._in_play("keys", axis=1)

    def values(self) -> np.ndarray:
        """Values (G, m, D) of the tokens in play."""
        return self._in_play("values", axis=1)

    def hidden(self) -> np.ndarray:
        """The layer's inputs (n, hidden) for the tokens of `rows`."""
        return self._part("hidden", 0, self._facts["n_rows"])

    def attention(self, rows: int = 1) -> np.ndarray:
        """Attention (H, w, m) of the tokens of `queries(rows)` to those in play; 0 where a token is not seen."""
        queries, keys = self.queries(rows), self.keys()
        heads, n, size = queries.shape
        with np.errstate(invalid="ignore", over="ignore"):  # NaN is refused as a score
            products = queries.reshape(len(keys), -1, size) @ keys.transpose(0, 2, 1)
            weights = products.reshape(heads, n, -1)
            weights /= sqrt(self._facts["query_scalar"])
            if cap := self._facts["attention_cap"]:
                weights = cap * np.tanh(weights / cap)
            distance = self.rows[-n:, None] - self.positions
            seen = (distance >= 0) & (distance < (self._facts["window"] or np.inf))
            if not seen.all():
                weights[:, ~seen] = -np.inf
            weights -= weights.max(axis=-1, keepdims=True)
            np.exp(weights, out=weights)
            weights /= weights.sum(axis=-1, keepdims=True)
        return _read_only(weights)

    def _in_play(self, name: str, axis: int) -> np.ndarray:
        """The entries for positions in play of a part that the core holds for all positions."""
        positions = self.positions
        first, end = int(positions[0]), int(positions[-1]) + 1
        part = self._part(name, first, end - first)
        return part if len(positions) == end - first else _read_only(part.take(positions - first, axis))


def _read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


class Policy(Scheduled):
    """A schedule whose tokens are scored by a subclass; the paper's rule would be

        class Mine(lazyllm.Policy):
            def score(self, view):
                return view.attention(1).mean(axis=(0, 1))

        llm.generate(prompt, pruning=Mine({9: 0.3, 15: 0.1}))

    `stages` and options are those of `Pruning`, without `Mass` and `scoring`; or `stages` is a whole `Pruning`,
    such as `Pruning.for_speedup` gives; its scoring is ignored, and options given here replace its own. Attributes
    that a subclass sets are part of the setting, and are numbers, texts, lists, dicts or arrays; those with a
    leading underscore are not. Sessions in several threads may share a policy, so what one pass has to
    remember belongs in what `observe` returns, not in attributes.
    """

    layers: ClassVar[int] = 1
    """With more than 1, `observe` is called in each of the `layers` - 1 layers below a stage."""

    queries: ClassVar[int] = 192
    """The most rows that a view may be asked for; a `PrefixCache` leaves as many tokens to the last pass."""

    def __init__(self, stages: StagesInput | Pruning, **options: Any) -> None:
        schedule = stages if isinstance(stages, Pruning) else Pruning(stages)
        self._schedule = replace(schedule, scoring=PAPER, **options)

    @abstractmethod
    def score(self, view: View) -> np.ndarray:
        """Scores (m,), finite floats, of the tokens in play; or the positions to keep, an integer array."""

    def observe(self, view: View) -> Any:
        """Looks at a layer below a stage; later calls of the pass find what it returns in `view.observed`."""

    @property
    def schedule(self) -> Pruning:
        """The stages and options."""
        try:
            return self._schedule
        except AttributeError:
            raise TypeError(f"{type(self).__name__}.__init__ must call super().__init__(stages)") from None

    @property
    def _fields(self) -> dict[str, Any]:
        """The attributes that a subclass has set, as plain values."""
        return {
            name: json.loads(json.dumps(value, default=partial(_plain, f"{type(self).__name__}.{name}")))
            for name, value in vars(self).items()
            if not name.startswith("_")
        }

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self.schedule == other.schedule and self._fields == other._fields

    def __hash__(self) -> int:
        return hash((type(self), self.schedule, json.dumps(self._fields, sort_keys=True)))

    def __repr__(self) -> str:
        inner = repr(self.schedule).removeprefix("Pruning(").removesuffix(")")
        texts = [f"{name}={value!r}" for name, value in self._fields.items()]
        return f"{type(self).__name__}({', '.join([inner, *texts])})"

    def to_json(self) -> str:
        """The class, a hash of its source, its schedule and fields: they tell settings apart."""
        name = f"{type(self).__module__}.{type(self).__qualname__}"
        table = {"policy": name, "source sha256": source_digest(type(self)), "layers": self.layers}
        return json.dumps(table | {"schedule": self.schedule._plain(), "fields": self._fields})

    def check(self, config: ModelConfig) -> None:
        """Raises an error if a stage does not fit the model, or an attribute cannot be part of a setting."""
        self.schedule.check(config)
        checked.whole(self.layers, f"{type(self).__name__}.layers", 1)
        checked.whole(self.queries, f"{type(self).__name__}.queries", 1)
        _ = self._fields

    @property
    def asking_rows(self) -> int:
        return self.queries

    def core(self) -> dict[str, Any]:
        def call(core: _core.Session, facts: Mapping[str, Any], memo: Memo) -> tuple[Any, ...] | None:
            view = View(self, core, facts, memo)
            try:
                if facts["observes"]:
                    memo[view.layer] = self.observe(view), view.positions
                    return None
                return self._answer(view, self.score(view))
            finally:
                view._core, view._copied = None, {}

        return {**self.schedule.core(), "layers": self.layers, "policy": call}

    def _answer(self, view: View, returned: object) -> tuple[np.ndarray, int]:
        """What the core takes for the array that `score` returned: scores, and how many of the tokens that may be
        dropped stay, or -1 for the stage's own number."""
        positions = view.positions

        def refused(problem: str, kind: type[Exception] = ValueError) -> Exception:
            return kind(
                f"{type(self).__name__}.score after layer {view.layer} {problem}; it must return a finite "
                f"float for each of the {positions.size} tokens in play, or an integer array of positions to keep"
            )

        try:
            answer = np.array(returned)
        except ValueError as error:
            raise refused(f"returned no array ({error})", TypeError) from None
        if answer.dtype.kind not in "fiu" or answer.ndim != 1:
            form = f"{type(returned).__name__} of type {answer.dtype} and shape {answer.shape}"
            raise refused(f"returned {form}", TypeError)
        if answer.dtype.kind == "f":
            if answer.shape != positions.shape:
                raise refused(f"returned {answer.size} scores")
            with np.errstate(over="ignore"):
                scores = answer.astype(np.float32)
            for j in np.flatnonzero(~np.isfinite(scores))[:1]:
                raise refused(f"gave position {positions[j]} the score {answer[j]}")
            return scores, -1
        kept = np.isin(positions, answer)
        for position in answer[~np.isin(answer, positions)][:1]:
            raise refused(f"keeps position {position}, which is not in play")
        return kept.astype(np.float32), int(np.count_nonzero(kept & ~view.protected))

    def prefill_flops(self, config: ModelConfig, n_prompt: int, last_pass: np.ndarray) -> int:
        """Without scores: the policy's own work is measured, `Generation.policy_seconds`, not counted."""
        return bare_flops(config, last_pass)

    def why_unpruned(self, n_prompt: int, n_context: int) -> str:
        return self.schedule.why_unpruned(n_prompt, n_context)


def _plain(name: str, item: Any) -> Any:
    """The value that JSON holds in place of a NumPy value; for an array its type, shape and hash."""
    if isinstance(item, np.generic):
        return item.item()
    if isinstance(item, np.ndarray) and item.dtype.kind != "O":
        digest = hashlib.sha256(np.ascontiguousarray(item).tobytes()).hexdigest()
        return f"<{item.dtype} {item.shape} sha256 {digest[:16]}>"
    raise TypeError(
        f"{name} is a {type(item).__name__}; a policy's fields must be numbers, texts, lists, dicts or "
        "arrays, because they are its setting; begin the names of other attributes with an underscore"
    )
