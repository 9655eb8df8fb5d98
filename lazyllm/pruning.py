"""Pruning: the schedule that drops prompt tokens layer by layer, and the operations it saves."""

from __future__ import annotations

import json
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from lazyllm.method import Method
from lazyllm.support import checked
from lazyllm.support.json_text import parse_json

if TYPE_CHECKING:
    from lazyllm.checkpoints.config import ModelConfig

Shapes = Sequence[tuple[Mapping[float, float], float]]
"""Keeps by depth, relative to the first stage's, and the least keep of the first stage with which a shape is
taken; in the order in which they are tried."""
SPEEDUP_SHAPES: Shapes = (
    ({0.23: 1, 0.50: 0.85, 0.63: 0.72}, 0.05),
    ({0.10: 1, 0.25: 0.4, 0.40: 0.16}, 0.0),
)
PLACES = 11  # in the prompt, for which the first stage has room when scores are smoothed
NARROWEST, WIDEST = 13, 31  # tokens of a place
RECOMMENDED_SINK = 4
LAYER_LIMIT = 1 << 16


@dataclass(frozen=True, slots=True)
class Mass:
    """A stage's rule: keep the best tokens until they hold the share `mass` of all prompt tokens' scores.

    The count depends on the data; `keep_min` and `keep_max`, shares of the prompt, bound it.
    """

    mass: float
    keep_min: float = 0.0
    keep_max: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(
                self, field.name, checked.number(getattr(self, field.name), f"Mass {field.name}")
            )
        if not 0.0 < self.mass <= 1.0:
            raise ValueError(f"Mass mass must be above 0 and at most 1, not {self.mass}")
        if not 0.0 < self.keep_max <= 1.0:
            raise ValueError(f"Mass keep_max must be above 0 and at most 1, not {self.keep_max}")
        if not 0.0 <= self.keep_min <= self.keep_max:
            raise ValueError(f"Mass keep_min must be from 0 to keep_max={self.keep_max}, not {self.keep_min}")

    def __repr__(self) -> str:
        bounds = [f"keep_min={self.keep_min!r}"] if self.keep_min != 0.0 else []
        bounds += [f"keep_max={self.keep_max!r}"] if self.keep_max != 1.0 else []
        return f"Mass({', '.join([f'{self.mass!r}', *bounds])})"


@dataclass(frozen=True, slots=True)
class Drop:
    """A stage's rule: what it drops is gone for good, from every layer of all later passes.

    `keep` is the share of the prompt that stays: `Pruning({7: Drop(0.4), 15: 0.3})`.
    """

    keep: float

    def __post_init__(self) -> None:
        if isinstance(self.keep, Mass):
            raise TypeError(
                f"Drop takes a keep, not {self.keep}: each decode step would drop part of what is left"
            )
        object.__setattr__(self, "keep", checked.keep(self.keep, "Drop keep"))

    def __repr__(self) -> str:
        return f"Drop({self.keep!r})"


Rule = float | Mass | Drop
Stages = tuple[tuple[int, Rule], ...]
StagesInput = Mapping[Any, Any] | Sequence[Any] | None


def _layer(value: object) -> int:
    if isinstance(value, str):
        if not (value.isascii() and value.isdecimal()):
            raise ValueError(f"a stage's layer must be a whole number, not {value!r}")
        value = int(value)
    return checked.whole(value, "a stage's layer", 0, LAYER_LIMIT)


def _rule(value: object, layer: int) -> Rule:
    if isinstance(value, Mass | Drop):
        return value
    if isinstance(value, Mapping):
        if set(value) == {"drop"}:
            return Drop(value["drop"])
        if "mass" not in value or not set(value) <= {field.name for field in fields(Mass)}:
            raise ValueError(
                f"the stage at layer {layer} must be a keep, or have drop, or mass, keep_min, keep_max, "
                f"not {value!r}"
            )
        return Mass(**value)
    return checked.keep(value, f"keep of the stage at layer {layer}")


def largest_keep(rule: Rule) -> float:
    """The largest share of the prompt that a stage keeps."""
    if isinstance(rule, Mass):
        return rule.keep_max
    return rule.keep if isinstance(rule, Drop) else rule


def _stages(value: StagesInput, what: str) -> Stages:
    """The stages as pairs. A mapping may name its layers in any order; a list must be in ascending order."""
    if value is None:
        return ()
    if isinstance(value, Mapping):
        pairs = sorted(((_layer(layer), rule) for layer, rule in value.items()), key=operator.itemgetter(0))
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        pairs = []
        for item in value:
            if isinstance(item, str | bytes) or not isinstance(item, Sequence) or len(item) != 2:
                raise TypeError(
                    f"{what} must be a mapping or a list of (layer, keep) pairs, but has {item!r}"
                )
            pairs.append((_layer(item[0]), item[1]))
    else:
        raise TypeError(f"{what} must be a mapping or a list of (layer, keep) pairs, not {value!r}")
    stages = tuple((layer, _rule(rule, layer)) for layer, rule in pairs)
    last_layer, last_keep = -1, 1.0
    for layer, rule in stages:
        if layer <= last_layer:
            raise ValueError(
                f"{what}: layers must rise strictly, but layer {layer} follows layer {last_layer}"
            )
        last_layer = layer
        if isinstance(rule, Mass):
            continue
        keep = largest_keep(rule)
        if keep > last_keep:
            raise ValueError(f"{what}: keeps must not rise, but layer {layer} keeps {keep} after {last_keep}")
        last_keep = keep
    return stages


def _spans(value: Iterable[Any]) -> tuple[tuple[int, int], ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise TypeError(f"protect must be a list of spans (first, end), not {value!r}")
    spans = []
    for item in value:
        if isinstance(item, str | bytes) or not isinstance(item, Sequence) or len(item) != 2:
            raise TypeError(f"protect must be a list of spans (first, end), but has {item!r}")
        first, end = (
            checked.whole(item[0], "a protected span's first position", 0),
            checked.whole(item[1], "a protected span's end", 0),
        )
        if end <= first:
            raise ValueError(f"a protected span must end after its first position, not ({first}, {end})")
        spans.append((first, end))
    return tuple(spans)


def _plain(stages: Stages) -> dict[str, Any]:
    def plain(rule: Rule) -> Any:
        if isinstance(rule, Mass):
            return {"mass": rule.mass, "keep_min": rule.keep_min, "keep_max": rule.keep_max}
        return {"drop": rule.keep} if isinstance(rule, Drop) else rule

    return {str(layer): plain(rule) for layer, rule in stages}


def _core_stages(stages: Stages) -> list[tuple[Any, ...]]:
    """(layer, keep), (layer, (mass, keep_min, keep_max)), or for Drop (layer, keep, True)."""

    def core(rule: Rule) -> tuple[Any, ...]:
        if isinstance(rule, Mass):
            return ((rule.mass, rule.keep_min, rule.keep_max),)
        return (rule.keep, True) if isinstance(rule, Drop) else (rule,)

    return [(layer, *core(rule)) for layer, rule in stages]


def _check_config(config: object) -> None:
    if not hasattr(config, "n_layers"):
        raise TypeError(f"config must be that of a model, such as llm.config, not {config!r}")


class Counted(Method, ABC):
    """A method whose prefill's operations are known before it runs."""

    @abstractmethod
    def flops(self, config: ModelConfig, n_prompt: int) -> int:
        """Counted operations of the prefill of `n_prompt` tokens."""

    def speedup(self, config: ModelConfig, n_prompt: int) -> float:
        """Dense prefill's counted operations over those of this method."""
        return DENSE.flops(config, n_prompt) / self.flops(config, n_prompt)


@dataclass(frozen=True, init=False, repr=False)
class Pruning(Counted):
    """A schedule of stages and the options of the selection; frozen and hashable.

    `stages` maps a layer to the share of the prompt kept above it, or to a `Mass` or a `Drop`; without stages
    the run is dense. `decode`: the stages of decode steps: "same", "frozen" (no selection) or their own.
    Always kept are the first `sink` and last `window` prompt tokens and the spans (first, end) of `protect`.
    A score is the mean over the last `queries` new tokens, or with `pooling="max"` the largest of theirs, the
    largest share in the last `layers` layers, the mean over `smooth` neighbours (odd), and in decode steps at
    least `memory` times the remembered score.
    Contexts below `min_tokens` tokens run dense. `prune_generated`: generated tokens may be dropped too.
    """

    stages: Stages
    decode: str | Stages
    sink: int
    window: int
    protect: tuple[tuple[int, int], ...]
    queries: int
    pooling: str
    layers: int
    smooth: int
    memory: float
    min_tokens: int
    prune_generated: bool

    def __init__(
        self,
        stages: StagesInput = None,
        *,
        decode: str | Mapping[Any, Any] | Sequence[Any] = "same",
        sink: int = 0,
        window: int = 0,
        protect: Iterable[Any] = (),
        queries: int = 1,
        pooling: Literal["mean", "max"] = "mean",
        layers: int = 1,
        smooth: int = 1,
        memory: float = 0.0,
        min_tokens: int = 0,
        prune_generated: bool = False,
    ) -> None:
        if isinstance(decode, str):
            if decode not in ("same", "frozen"):
                raise ValueError(f'decode must be "same", "frozen" or stages, not {decode!r}')
        elif decode is None:
            raise TypeError('decode must be "same", "frozen" or stages, not None')
        else:
            decode = _stages(decode, "decode")
        if pooling not in ("mean", "max"):
            raise ValueError(f'pooling must be "mean" or "max", not {pooling!r}')
        width = checked.whole(smooth, "smooth", 1)
        if width % 2 == 0:
            raise ValueError(f"smooth must be odd, so that a mean has a centre, not {width}")
        remembered = checked.number(memory, "memory")
        if not 0.0 <= remembered <= 1.0:
            raise ValueError(f"memory must be from 0 to 1, not {remembered}")
        if not isinstance(prune_generated, bool):
            raise TypeError(f"prune_generated must be True or False, not {prune_generated!r}")
        values = {
            "stages": _stages(stages, "stages"),
            "decode": decode,
            "sink": checked.whole(sink, "sink", 0),
            "window": checked.whole(window, "window", 0),
            "protect": _spans(protect),
            "queries": checked.whole(queries, "queries", 1),
            "pooling": pooling,
            "layers": checked.whole(layers, "layers", 1),
            "smooth": width,
            "memory": remembered,
            "min_tokens": checked.whole(min_tokens, "min_tokens", 0),
            "prune_generated": prune_generated,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        def braces(stages: Stages) -> str:
            return "{" + ", ".join(f"{layer}: {rule!r}" for layer, rule in stages) + "}"

        parts = [braces(self.stages)]
        if isinstance(self.decode, tuple):
            parts.append(f"decode={braces(self.decode)}")
        elif self.decode != "same":
            parts.append(f"decode={self.decode!r}")
        for field in fields(self)[2:]:
            if getattr(self, field.name) != getattr(DENSE, field.name):
                parts.append(f"{field.name}={getattr(self, field.name)!r}")
        return f"Pruning({', '.join(parts)})"

    # ---- JSON ------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """All fields as one JSON object; `from_json` gives an equal Pruning back."""
        table: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        table["stages"] = _plain(self.stages)
        if isinstance(self.decode, tuple):
            table["decode"] = _plain(self.decode)
        return json.dumps(table)

    @classmethod
    def from_json(cls, text: str) -> Pruning:
        """A Pruning from what `to_json` writes, or from the stages alone: `{"10": 0.7, "20": 0.5}`."""
        return cls.from_fields(parse_json(text, "pruning", strict=True))

    @classmethod
    def from_fields(cls, value: object) -> Pruning:
        """A Pruning from a mapping of its fields, or from the stages alone."""
        if value is None or isinstance(value, list | tuple):
            return cls(value)
        if not isinstance(value, Mapping):
            raise TypeError(f'pruning must be a JSON object such as {{"10": 0.7}}, not {value!r}')
        names = [field.name for field in fields(cls)]
        if not any(name in value for name in names):
            return cls(value)
        for name in value:
            if name not in names:
                is_layer = str(name).isdecimal()
                hint = f'stages have a field of their own: "stages": {{"{name}": {value[name]}}}'
                known = f"its fields are {', '.join(names)}"
                raise ValueError(f"pruning has no field {name!r}; {hint if is_layer else known}")
        return cls(**{"stages": None, **value})

    # ---- for the engine --------------------------------------------------------------------------

    def core(self) -> dict[str, Any]:
        """The fields that the C core takes."""
        table: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        table["stages"] = _core_stages(self.stages)
        table["decode"] = self.decode if isinstance(self.decode, str) else _core_stages(self.decode)
        table["protect"] = list(self.protect)
        table["average"] = False
        table["policy"] = None
        return table

    def check(self, config: ModelConfig) -> None:
        """Raises ValueError if a stage is at the last layer of the model or above it."""
        _check_config(config)
        for what, stages in (("stages", self.stages), ("decode", self.decode)):
            for layer, _ in stages if isinstance(stages, tuple) else ():
                if layer >= config.n_layers - 1:
                    raise ValueError(
                        f"{what}: layer {layer} is out of reach: the model has {config.n_layers} layers, "
                        f"so a stage's layer must be below {config.n_layers - 1}"
                    )

    # ---- counted work ----------------------------------------------------------------------------

    def flops(self, config: ModelConfig, n_prompt: int) -> int:
        """Counted floating-point operations of the prefill of `n_prompt` tokens.

        Two per weight and token in the linear layers, 4 * heads * head_dim per visible pair of tokens,
        2 * heads * head_dim per scored token and query row, the LM head once. In the last layer only keys and
        values are computed for all tokens, the rest for the query token alone. Two counts are upper bounds:
        a Mass stage counts with its keep_max, and in a layer with a window every token counts with as many
        keys as the window holds.
        """
        in_play = self.planned(config, n_prompt)
        return self._counted(config, in_play, in_play, dict(self._stages_of(in_play[0])))

    def planned(self, config: ModelConfig, n_prompt: int) -> list[int]:
        """The number of tokens in play in each layer during the prefill of `n_prompt` tokens."""
        self.check(config)
        n_prompt = checked.whole(n_prompt, "n_prompt", 1)
        forced = self._always_kept(n_prompt)
        stages = dict(self._stages_of(n_prompt))
        in_play = [n_prompt]
        for layer in range(config.n_layers - 1):
            kept = in_play[-1]
            if layer in stages:
                kept = max(forced, min(kept, math.ceil(largest_keep(stages[layer]) * n_prompt)))
            in_play.append(kept)
        return in_play

    def pass_flops(self, config: ModelConfig, last_pass: np.ndarray, generated: bool = False) -> int:
        """Counted operations of a pass that has run, from its token counts, `Session.last_pass`.

        Counts as `flops` does, so the two agree for a first prefill without `Mass`. Where a pass computes
        only some of the tokens in play, these are assumed to be the last ones: an upper bound on the pairs.
        """
        in_play, computed = (column.tolist() for column in np.asarray(last_pass).T[:2])
        # what is gone counts for min_tokens but is not in play; a pass that dropped something had stages
        n_context = math.inf if in_play[-1] < in_play[0] else in_play[0]
        return self._counted(config, in_play, computed, dict(self._stages_of(n_context, generated)))

    def prefill_flops(self, config: ModelConfig, n_prompt: int, last_pass: np.ndarray) -> int:
        return self.pass_flops(config, last_pass)

    def why_unpruned(self, n_prompt: int, n_context: int) -> str:
        stages = [*self.stages, *(self.decode if isinstance(self.decode, tuple) else ())]
        if isinstance(self.min_tokens, int) and n_context < self.min_tokens:
            return f"min_tokens={self.min_tokens} is more than the context's {n_context} tokens"
        if not stages:
            return "the setting has no stages"
        if self._always_kept(n_prompt) >= n_prompt:
            return f"sink, window and protect keep all {n_prompt} tokens of the prompt"
        keeps = [0.0 if isinstance(rule, Mass) else largest_keep(rule) for _, rule in stages]
        if math.ceil(min(keeps) * n_prompt) >= n_prompt:
            return f"the stages keep all {n_prompt} tokens of the prompt"
        return "no stage found a token to drop"

    def _stages_of(self, n_context: float, generated: bool = False) -> Stages:
        """The stages of a pass over a context of that length."""
        if isinstance(self.min_tokens, int) and n_context < self.min_tokens:
            return ()
        if generated and self.decode != "same":
            return () if isinstance(self.decode, str) else self.decode
        return self.stages

    def _counted(
        self, config: ModelConfig, in_play: list[int], computed: list[int], stages: Collection[int]
    ) -> int:
        total = bare_flops(config, in_play, computed)
        for layer, (m, n) in enumerate(zip(in_play, computed, strict=True)):
            if any(self._scores(config, layer, stage) for stage in stages):
                window = min(config.windows[layer] or m, m)
                total += min(self.queries, n) * window * 2 * config.n_heads * config.head_dim
        return total

    def _scores(self, config: ModelConfig, layer: int, stage: int) -> bool:
        """Whether the layer is one of the last `layers` up to the stage and sees as far as its layer."""
        sees, must = (config.windows[one] or math.inf for one in (layer, stage))
        return layer <= stage < layer + self.layers and sees >= must

    def _always_kept(self, n_prompt: int) -> int:
        """The number of prompt tokens that every stage keeps: protected spans, sink, window, query token."""
        spans = [(0, self.sink), (n_prompt - max(self.window, 1), n_prompt), *self.protect]
        count = position = 0
        for first, end in sorted(spans):
            first, end = max(first, position), min(end, n_prompt)
            if end > first:
                count += end - first
                position = end
        return count

    # ---- derived schedules -----------------------------------------------------------------------

    @classmethod
    def for_speedup(cls, target: float, config: ModelConfig, n_prompt: int) -> Pruning:
        """Stages that lose little under the scores of `recommended()`, keeping as much as `target` allows.

        They are after about a quarter, a half and five eighths of the layers, and the later ones keep a
        little less than the first; where these do not reach the target, there are three early ones.
        In a model with sliding windows, they are after the nearest layers that see all of the context, each
        after one of its own while there are enough; of those that share a layer the last one counts.

        The counted speedup is at most 1 % above the target (more for prompts of a few dozen tokens, which can
        only be cut in coarse steps); the scores of `recommended()` take a few thousandths of it.
        """
        return cls.of_shapes(SPEEDUP_SHAPES, target, config, n_prompt)

    @classmethod
    def of_shapes(
        cls,
        shapes: Shapes,
        target: float,
        config: ModelConfig,
        n_prompt: int,
        with_scores: Callable[[Pruning], Pruning] = lambda schedule: schedule,
    ) -> Pruning:
        """Like `for_speedup`, with stages of the first of these shapes that fits, else of the last.
        `with_scores` gives a schedule its rule of scoring, whose work is counted too."""
        target = checked.number(target, "target")
        if target < 1.0:
            raise ValueError(f"target must be at least 1, not {target}")
        _check_config(config)
        top = config.n_layers - 2
        if top < 0:
            raise ValueError("the model has one layer, so no stage fits below the last one")
        seeing = [layer for layer in range(top + 1) if not config.windows[layer]] or list(range(top + 1))

        def scaled(keeps: Mapping[int, float], factor: float) -> Pruning:
            return with_scores(cls._scaled(keeps, factor))

        for shape, least in shapes:
            keeps = _placed({round(depth * config.n_layers): keep for depth, keep in shape.items()}, seeing)
            if scaled(keeps, least).speedup(config, n_prompt) >= target:
                break

        low, high = 0.0, 1 / min(keeps.values())
        best = scaled(keeps, low)
        reach = best.speedup(config, n_prompt)
        if reach < target:
            raise ValueError(
                f"a speedup of {target:g} is out of reach: stages at layers {', '.join(map(str, keeps))} of "
                f"{config.n_layers} give at most {reach:.2f} at {n_prompt} prompt tokens"
            )
        while high - low > 1e-5:
            middle = (low + high) / 2
            candidate = scaled(keeps, middle)
            if candidate.speedup(config, n_prompt) >= target:
                low, best = middle, candidate
            else:
                high = middle
        return best

    @classmethod
    def _scaled(cls, keeps: Mapping[int, float], factor: float) -> Pruning:
        """A stage whose keep would be 1 or more is left out."""
        scaled = {layer: max(1e-5, round(factor * keep, 5)) for layer, keep in keeps.items()}
        return cls({layer: keep for layer, keep in scaled.items() if keep < 1})

    def recommended(self, n_prompt: int = 1024) -> Pruning:
        """The same schedule under the rule of scoring that was found to lose least.

        A token's score is its largest share in five layers, each the largest of the last 32 rows, smoothed
        over its neighbours and remembered in decode steps. It is smoothed over an eleventh of the tokens that
        the first stage keeps of a prompt of `n_prompt`, at least 13 and at most 31: each place that is kept
        takes as many. The first four tokens, which draw attention whatever they say, are always kept.
        """
        n_prompt = checked.whole(n_prompt, "n_prompt", 1)
        keep = largest_keep(self.stages[0][1]) if self.stages else 1.0
        return replace(
            self,
            layers=5,
            queries=32,
            pooling="max",
            smooth=min(max(math.ceil(keep * n_prompt) // PLACES, NARROWEST), WIDEST) | 1,
            memory=0.95,
            sink=max(self.sink, RECOMMENDED_SINK),
        )


def _placed(keeps: Mapping[int, float], layers: list[int]) -> dict[int, float]:
    """Each keep by the nearest of `layers` above those taken before; if none is left, by the last layer."""
    placed: dict[int, float] = {}
    for wanted, keep in keeps.items():
        free = [layer for layer in layers if layer > max(placed, default=-1)] or layers[-1:]
        placed[min(free, key=lambda layer: abs(layer - wanted))] = keep
    return placed


def bare_flops(config: ModelConfig, in_play: list[int], computed: list[int]) -> int:
    """Counted operations of a pass without scores; the lists have a number of tokens for each layer."""
    layers = enumerate(zip(in_play, computed, strict=True))
    return 2 * config.hidden * config.vocab + sum(
        layer_flops(config, layer, m, n) for layer, (m, n) in layers
    )


def layer_flops(config: ModelConfig, layer: int, in_play: int, computed: int) -> int:
    """Counted operations of one layer that computes the last of the tokens in play, without scores."""
    width = config.n_heads * config.head_dim
    kv_row = 4 * config.hidden * config.n_kv_heads * config.head_dim
    other_row = 4 * config.hidden * width + 6 * config.hidden * config.ffn
    rows = 1 if layer == config.n_layers - 1 else computed
    window = min(config.windows[layer] or in_play, in_play)
    pairs = _visible_pairs(in_play, rows, window)
    return computed * kv_row + rows * other_row + pairs * 4 * width


def _visible_pairs(m: int, rows: int, window: int) -> int:
    """Pairs of query and visible key, for the last `rows` of `m` tokens; each sees at most `window` keys."""
    full = min(rows, m - window)  # rows that see a whole window
    rest = rows - full  # the others see 1 more key each than the row before, the first m - rows + 1
    return full * window + rest * (2 * (m - rows) + rest + 1) // 2


DENSE = Pruning()
"""No stage: every token in every layer."""
