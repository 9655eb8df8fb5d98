"""Pruning: the schedule that drops prompt tokens layer by layer, and the operations it saves."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from typing import Any, ClassVar, Literal, Self

import numpy as np

from lazyllm.checkpoints.config import ModelConfig
from lazyllm.counted_work import bare_flops, score_flops
from lazyllm.method import Method, Spans
from lazyllm.schedule import SHAPE_LENGTH, OutOfReach, Shapes, head_for, placed, shapes_with
from lazyllm.scoring import Scoring
from lazyllm.support import checked

PAPER = Scoring.paper()
LAYER_LIMIT = 1 << 16
LEAST_KEEP, KEEP_DIGITS, PRECISION = 1e-5, 5, 1e-5
RECOMMENDED_SINK = 4  # the first tokens, which draw attention whatever they say


@dataclass(frozen=True, slots=True)
class Mass:
    """A stage's rule: keep the best tokens until they hold the share `mass` of all prompt tokens' scores, at
    least `keep_min` and at most `keep_max` of the prompt."""

    mass: float
    keep_min: float = 0.0
    keep_max: float = 1.0

    def __post_init__(self) -> None:
        for name, check in ("mass", checked.keep), ("keep_max", checked.keep), ("keep_min", checked.number):
            object.__setattr__(self, name, check(getattr(self, name), f"Mass {name}"))
        if not 0.0 <= self.keep_min <= self.keep_max:
            raise ValueError(f"Mass keep_min must be from 0 to keep_max={self.keep_max}, not {self.keep_min}")

    def __repr__(self) -> str:
        bounds = differences(asdict(self), {"mass": self.mass, "keep_min": 0.0, "keep_max": 1.0})
        return f"Mass({', '.join([repr(self.mass), *bounds])})"


@dataclass(frozen=True, slots=True)
class Drop:
    """A stage's rule: the share `keep` of the prompt stays; dropped tokens are gone for good, from every
    layer of all later passes."""

    keep: float

    def __post_init__(self) -> None:
        if isinstance(self.keep, Mass):
            raise TypeError(f"Drop takes a keep, not {self.keep}, by which each decode step would drop more")
        object.__setattr__(self, "keep", checked.keep(self.keep, "Drop keep"))

    def __repr__(self) -> str:
        return f"Drop({self.keep!r})"


Rule = float | Mass | Drop
Stages = tuple[tuple[int, Rule], ...]
StagesInput = Mapping[Any, Any] | Sequence[Any] | None


def largest_keep(rule: Rule) -> float:
    """The largest share of the prompt that a stage keeps."""
    if isinstance(rule, float):
        return rule
    return rule.keep_max if isinstance(rule, Mass) else rule.keep


def checked_stages(value: StagesInput, what: str) -> Stages:
    """The stages as pairs, in the order of their layers."""
    items = value.items() if isinstance(value, Mapping) else () if value is None else value
    pairs = checked_pairs(items, what, "a mapping or a list of (layer, keep) pairs")
    numbered = sorted(((_layer(layer), rule) for layer, rule in pairs), key=lambda pair: pair[0])
    stages = [(layer, _rule(rule, layer)) for layer, rule in numbered]
    for (last, _), (layer, _) in pairwise(stages):
        if layer == last:
            raise ValueError(f"{what}: layer {layer} has two stages; it may have one")
    keeps = [(layer, largest_keep(rule)) for layer, rule in stages if not isinstance(rule, Mass)]
    for (_, more), (layer, keep) in pairwise(keeps):
        if keep > more:
            raise ValueError(f"{what}: keeps must not rise, but layer {layer} keeps {keep} after {more}")
    return tuple(stages)


def checked_pairs(value: object, what: str, form: str) -> list[tuple[Any, Any]]:
    try:
        return [(first, second) for first, second in value]  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise TypeError(f"{what} must be {form}, not {value!r}") from None


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
                f"the stage at layer {layer} must be a keep, or have drop, or mass, keep_min, keep_max, not {value!r}"
            )
        return Mass(**value)
    return checked.keep(value, f"keep of the stage at layer {layer}")


def plain_rule(rule: Rule) -> Any:
    """The rule as JSON has it: 0.3, {"drop": 0.4} or {"mass": 0.9, "keep_min": 0.0, "keep_max": 1.0}."""
    if isinstance(rule, Mass):
        return asdict(rule)
    return {"drop": rule.keep} if isinstance(rule, Drop) else rule


def core_rule(rule: Rule) -> tuple[Any, ...]:
    """The rule of a stage as the core takes it after the layer: (keep,), (keep, True) for Drop, or (mass,)."""
    if isinstance(rule, Mass):
        return ((rule.mass, rule.keep_min, rule.keep_max),)
    return (rule.keep, True) if isinstance(rule, Drop) else (rule,)


def checked_spans(value: object) -> Spans:
    spans = checked_pairs(value, "protect", "a list of spans (first, end)")
    for first, end in spans:
        checked.whole(first, "a protected span's first position", 0)
        if checked.whole(end, "a protected span's end", 0) <= first:
            raise ValueError(f"a protected span must end after its first position, not ({first}, {end})")
    return tuple((int(first), int(end)) for first, end in spans)


def differences(values: Mapping[str, Any], usual: Mapping[str, Any]) -> Iterator[str]:
    """`name=value` of each value that is not the usual one."""
    for name, value in values.items():
        if value != usual[name]:
            yield f"{name}={_braces(value) if name == 'decode' and isinstance(value, tuple) else repr(value)}"


def _braces(stages: Stages) -> str:
    return "{" + ", ".join(f"{layer}: {rule!r}" for layer, rule in stages) + "}"


class Scheduled(Method, ABC):
    """A method that runs a `Pruning` in the engine, maybe on fewer tokens: its work can be counted."""

    all_layers_score: ClassVar[bool] = False
    """True if the schedule's `scoring.layers` all score, also those that see less than the stage's layer."""

    @property
    @abstractmethod
    def schedule(self) -> Pruning:
        """The stages and options that run in the engine."""

    def core(self) -> dict[str, Any]:
        return self.schedule.core()

    def check(self, config: ModelConfig) -> None:
        self.schedule.check(config)

    def for_prompt(self, config: ModelConfig, n_prompt: int) -> Self:
        return self

    def flops(self, config: ModelConfig, n_prompt: int) -> int:
        """Counted operations of the prefill of `n_prompt` tokens, as docs/method.md says.

        Two counts are upper bounds: a Mass stage counts with its keep_max, and in a layer with a window every
        token counts with as many keys as the window holds.
        """
        self.check(config)
        n_prompt = checked.whole(n_prompt, "n_prompt", 1)
        in_play = self.for_prompt(config, n_prompt).schedule.planned(config, self.kept(n_prompt))
        return self.prefill_flops(config, n_prompt, np.stack([in_play, in_play], axis=1))

    def prefill_flops(self, config: ModelConfig, n_prompt: int, last_pass: np.ndarray) -> int:
        schedule = self.for_prompt(config, n_prompt).schedule  # not yet called by a restored session
        return schedule.pass_flops(config, last_pass, all_layers_score=self.all_layers_score)

    def speedup(self, config: ModelConfig, n_prompt: int) -> float:
        """Dense prefill's counted operations over those of this method."""
        return DENSE.flops(config, n_prompt) / self.flops(config, n_prompt)


@dataclass(frozen=True, init=False, repr=False)
class Pruning(Scheduled):
    """A schedule of stages and the options of the selection; frozen and hashable.

    `stages` maps a layer to the share of the prompt kept above it, or to a `Mass` or a `Drop`; without stages
    the run is dense. `decode`: the stages of decode steps: "same", "frozen" (no selection) or their own.
    Always kept are the first `sink` and last `window` prompt tokens and the spans (first, end) of `protect`.
    `scoring`: the default is the paper's rule. Contexts below `min_tokens` prompt tokens run dense.
    `prune_generated`: generated tokens may be dropped too.
    """

    stages: Stages
    scoring: Scoring
    decode: str | Stages
    sink: int
    window: int
    protect: Spans
    min_tokens: int
    prune_generated: bool

    def __init__(
        self,
        stages: StagesInput = None,
        *,
        scoring: Scoring | Mapping[str, Any] = PAPER,
        decode: str | Mapping[Any, Any] | Sequence[Any] = "same",
        sink: int = 0,
        window: int = 0,
        protect: Iterable[Any] = (),
        min_tokens: int = 0,
        prune_generated: bool = False,
    ) -> None:
        if decode is None or (isinstance(decode, str) and decode not in ("same", "frozen")):
            raise ValueError(f'decode must be "same", "frozen" or stages, not {decode!r}')
        self._set(
            stages=checked_stages(stages, "stages"),
            scoring=Scoring.from_fields(scoring),
            decode=decode if isinstance(decode, str) else checked_stages(decode, "decode"),
            sink=checked.whole(sink, "sink", 0),
            window=checked.whole(window, "window", 0),
            protect=checked_spans(protect),
            min_tokens=checked.whole(min_tokens, "min_tokens", 0),
            prune_generated=checked.truth(prune_generated, "prune_generated"),
        )

    def __repr__(self) -> str:
        options = differences({**vars(self), "stages": ()}, vars(DENSE))
        return f"Pruning({', '.join([_braces(self.stages), *options])})"

    @property
    def full_label(self) -> str:
        """The stages, `recommended` if the scoring is that in all but smooth and head, and other options."""
        if self == DENSE:
            return "dense"
        recommended = Scoring.recommended()
        is_recommended = replace(self.scoring, smooth=recommended.smooth, head=None) == recommended
        usual = replace(DENSE, scoring=recommended, sink=RECOMMENDED_SINK) if is_recommended else DENSE
        values = {**vars(self), **vars(self.scoring), "stages": (), "scoring": usual.scoring}
        options = differences(values, {**vars(usual), **vars(usual.scoring)})
        name = [_braces(self.stages), *(["recommended"] if is_recommended else [])]
        return " ".join([*name, *options])

    @property
    def schedule(self) -> Pruning:
        return self

    @property
    def decode_stages(self) -> Stages:
        """The stages that decode steps have of their own."""
        return () if isinstance(self.decode, str) else self.decode

    def _plain(self) -> dict[str, Any]:
        def plain(stages: Stages) -> dict[str, Any]:
            return {str(layer): plain_rule(rule) for layer, rule in stages}

        decode = self.decode if isinstance(self.decode, str) else plain(self.decode)
        return super()._plain() | {"stages": plain(self.stages), "decode": decode, "scoring": asdict(self.scoring)}

    def to_json(self) -> str:
        """All fields as one JSON object; `parse_method` gives an equal Pruning back."""
        return json.dumps(self._plain())

    @classmethod
    def from_fields(cls, value: Any) -> Pruning:
        """A Pruning from a mapping of its fields, or from the stages alone: `{"10": 0.7, "20": 0.5}`."""
        if value is None or isinstance(value, list | tuple):
            return cls(value)
        if not isinstance(value, Mapping):
            raise TypeError(f'pruning must be a JSON object such as {{"10": 0.7}}, not {value!r}')
        names = [field.name for field in fields(cls)]
        if not any(name in value for name in names):
            return cls(value)
        checked.known_names(value, names, "pruning")
        return cls(**value)

    def protecting(self, spans: Spans) -> Pruning:
        drops = self.stages or self.decode_stages
        return replace(self, protect=(*self.protect, *spans)) if drops else self

    def core(self) -> dict[str, Any]:
        """The fields that the C core takes."""

        def core(stages: Stages) -> list[tuple[Any, ...]]:
            return [(layer, *core_rule(rule)) for layer, rule in stages]

        values = {**vars(self), **asdict(self.scoring), "stages": core(self.stages)}
        del values["scoring"]
        decode = self.decode if isinstance(self.decode, str) else core(self.decode)
        return {**values, "decode": decode, "average": False, "policy": None}

    def check(self, config: ModelConfig) -> None:
        """Raises ValueError if a stage is above the model's last layer, or at it and no Drop."""
        if not hasattr(config, "n_layers"):
            raise TypeError(f"config must be that of a model, such as llm.config, not {config!r}")
        for what, stages in (("stages", self.stages), ("decode", self.decode_stages)):
            for layer, rule in stages:
                end = config.n_layers - (not isinstance(rule, Drop))
                if layer >= end:
                    reach = f"it must be below {end} in a model of {config.n_layers} layers"
                    raise ValueError(f"{what}: layer {layer} is out of reach: {reach}")
        layer, head = self.scoring.head or (0, 0)
        if layer >= config.n_layers or head >= config.n_heads:
            raise ValueError(
                f"no head {head} in layer {layer}: the model has {config.n_layers} layers of {config.n_heads}"
            )

    def planned(self, config: ModelConfig, n_prompt: int) -> list[int]:
        """The number of tokens in play in each layer during the prefill of `n_prompt` tokens."""
        forced = self._always_kept(n_prompt)
        stages = dict(self._stages_of(n_prompt))
        in_play = [n_prompt]
        for layer in range(config.n_layers - 1):
            kept = in_play[-1]
            if layer in stages:
                kept = max(forced, min(kept, math.ceil(largest_keep(stages[layer]) * n_prompt)))
            in_play.append(kept)
        return in_play

    def pass_flops(
        self,
        config: ModelConfig,
        last_pass: np.ndarray,
        generated: bool = False,
        all_layers_score: bool = False,
        n_prompt: int | None = None,
    ) -> int:
        """Counted operations of a pass that has run, from its token counts, `Session.last_pass`. Those
        computed are assumed to be the last ones in play: an upper bound on the pairs. `n_prompt`: prompt tokens of
        the context; None: all in play in the first layer."""
        in_play = last_pass[:, 0].tolist()
        # prompt tokens that are gone count for min_tokens but are not in play; a pass that dropped tokens had stages
        counted = in_play[0] if n_prompt is None or self.prune_generated else n_prompt
        stages = [layer for layer, _ in self._stages_of(math.inf if in_play[-1] < in_play[0] else counted, generated)]
        total, scoring = bare_flops(config, last_pass), self.scoring
        sees = [window or math.inf for window in config.windows]
        for layer, (m, n) in enumerate(last_pass[:, :2].tolist()):
            # one of the last `scoring.layers` up to a stage scores if it sees as far as the stage's layer
            above = [stage for stage in stages if layer <= stage < layer + scoring.layers]
            if any(all_layers_score or sees[layer] >= sees[stage] for stage in above):
                total += score_flops(config, m, min(scoring.queries, n), config.windows[layer])
        return total

    def why_unpruned(self, n_prompt: int, n_context: int) -> str:
        n = n_context if self.prune_generated else n_prompt
        if n < self.min_tokens:
            return (
                f"contexts of fewer than {self.min_tokens} prompt tokens run dense (min_tokens), and this one has {n}"
            )
        rules = [rule for _, rule in (*self.stages, *self.decode_stages)]
        least = min((0.0 if isinstance(rule, Mass) else largest_keep(rule) for rule in rules), default=1.0)
        if max(self._always_kept(n_prompt), math.ceil(least * n_prompt)) >= n_prompt:
            return f"its stages, sink, window and protect keep all {n_prompt} tokens of the prompt"
        return "no stage found a token to drop"

    def _stages_of(self, n_prompt: float, generated: bool = False) -> Stages:
        """The stages of a pass over a context with so many prompt tokens."""
        if n_prompt < self.min_tokens:
            return ()
        return self.decode_stages if generated and self.decode != "same" else self.stages

    def _always_kept(self, n_prompt: int) -> int:
        """The number of prompt tokens that every stage keeps: protected spans, sink, window, query token."""
        spans = [(0, self.sink), (n_prompt - max(self.window, 1), n_prompt), *self.protect]
        return len({place for first, end in spans for place in range(max(first, 0), min(end, n_prompt))})

    @classmethod
    def for_speedup(
        cls,
        target: float,
        model: ModelConfig | Any,
        n_prompt: int,
        scoring: Literal["recommended", "paper"] | Scoring = "recommended",
        shapes: Shapes | None = None,
    ) -> Pruning:
        """The schedule for a counted speedup of a prompt of `n_prompt` tokens, chosen to lose little.

        `model` is an LLM or its config; of an LLM the induction head is found first, if the speedup asks for it.
        Stages have the first of the `shapes` that reaches the speedup with its least keep, or the last;
        docs/method.md has the default ones. The layers depend on the model, the target and the scoring; the keeps
        on `n_prompt` too. `scoring`: recommended, paper, or a Scoring; its work is counted. The speedup is at most
        1 % above the target, more for prompts of a few dozen tokens.
        """
        if isinstance(scoring, str):
            checked.choice(scoring, "scoring", ("recommended", "paper"))
        n_prompt, target = checked.whole(n_prompt, "n_prompt", 1), checked.number(target, "the speedup")
        config = getattr(model, "config", model)
        DENSE.check(config)
        if target <= 1.0:
            raise ValueError(f"the speedup must be above 1, which is dense, not {target:g}")
        if config.n_layers < 2:
            raise ValueError("the model has one layer, so no stage fits below the last one")
        head = None
        if scoring == "recommended" and shapes is None:
            head = head_for(target, model.config_for(target) if hasattr(model, "config_for") else config)

        def scaled(keeps: Mapping[int, float], factor: float) -> Pruning:
            shares = {layer: round(factor * keep, KEEP_DIGITS) for layer, keep in keeps.items()}
            shares = {layer: min(max(share, LEAST_KEEP), 1.0) for layer, share in shares.items()}
            rule = PAPER if scoring == "paper" else scoring
            if rule == "recommended":
                rule = replace(Scoring.recommended(n_prompt, next(iter(shares.values()))), head=head)
            return cls(shares, scoring=rule, sink=0 if rule == PAPER else RECOMMENDED_SINK)

        for shape, least in shapes or shapes_with(head, config):
            keeps = placed(shape, config)
            if scaled(keeps, least).speedup(config, SHAPE_LENGTH) >= target:
                break
        best = scaled(keeps, 0.0)
        if (reach := best.speedup(config, n_prompt)) < target:
            raise OutOfReach(
                f"a speedup of {target:g} is out of reach: stages at layers {', '.join(map(str, keeps))} of "
                f"{config.n_layers} give at most {reach:.2f} at {n_prompt} prompt tokens"
            )
        low, high = 0.0, 1 / min(keeps.values())
        while high - low > PRECISION:
            factor = (low + high) / 2
            candidate = scaled(keeps, factor)
            if candidate.speedup(config, n_prompt) >= target:
                low, best = factor, candidate
            else:
                high = factor
        return best


DENSE = Pruning()
"""No stage: every token in every layer."""
