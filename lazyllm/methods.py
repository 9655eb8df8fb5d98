"""The methods that Pruning is compared with, on the same engine; and `parse_method`, which reads any."""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from lazyllm import checked
from lazyllm.compression import UNITS, compressed
from lazyllm.pruning import LAYER_LIMIT, Pruning

if TYPE_CHECKING:
    from lazyllm.config import ModelConfig
    from lazyllm.llm import LLM

SEED_LIMIT = 1 << 63
TEXT_FIELDS = ("unit", "model")
TRUTHS = {"true": True, "false": False}
FORMS = (
    "dense, random:keep=0.5,seed=0, static:layers=8,keep=0.5, compress:ratio=0.5,unit=sentence, "
    'or stages as JSON such as {"10": 0.7}'
)
_DENSE = Pruning()


class Named:
    """What the settings below share: JSON that holds the method's name beside its fields."""

    method: ClassVar[str]

    def to_json(self) -> str:
        """All fields as one JSON object; `from_json` gives an equal setting back."""
        return json.dumps({"method": self.method, **self._plain()})

    def _plain(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]

    @classmethod
    def from_json(cls, text: str) -> Self:
        value = checked.parse_json(text)
        if not isinstance(value, dict):
            raise TypeError(f"{cls.method} must be a JSON object, not {text.strip()}")
        if (named := value.pop("method", cls.method)) != cls.method:
            raise ValueError(f"method is {named!r}; it must be {cls.method!r}")
        return cls._made(value)

    @classmethod
    def _made(cls, values: dict[str, Any]) -> Self:
        known = {field.name: field.default is MISSING for field in fields(cls)}  # type: ignore[arg-type]
        for name in values:
            if name not in known:
                raise ValueError(f"{cls.method} has no field {name!r}; its fields are {', '.join(known)}")
        for name, needed in known.items():
            if needed and name not in values:
                raise ValueError(f"{cls.method} needs {name}")
        return cls(**values)

    def check(self, config: ModelConfig) -> None:
        """Raise ValueError where the model cannot be run so."""

    def core(self) -> dict[str, Any]:
        """The plain fields that the C core takes."""
        return _DENSE.core()


@dataclass(frozen=True, repr=False)
class RandomDrop(Named):
    """Runs the model densely on `ceil(keep * N)` random tokens of the prompt, the last one always among them.

    They keep their order and are numbered anew, or stay at their `original_positions`. Each prompt of a
    conversation is sampled by itself.
    """

    method: ClassVar[str] = "random"
    keep: float
    seed: int = 0
    original_positions: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "keep", checked.keep(self.keep, "keep"))
        object.__setattr__(self, "seed", checked.whole(self.seed, "seed", 0, SEED_LIMIT))
        if not isinstance(self.original_positions, bool):
            raise TypeError(f"original_positions must be True or False, not {self.original_positions!r}")

    def __repr__(self) -> str:
        places = ", original_positions=True" if self.original_positions else ""
        return f"RandomDrop(keep={self.keep!r}, seed={self.seed!r}{places})"

    def positions(self, n_prompt: int, turn: int = 0) -> np.ndarray:
        """Which of the tokens of prompt number `turn` stay, ascending."""
        others = self.kept(n_prompt) - 1
        chosen = np.random.default_rng([self.seed, turn]).choice(n_prompt - 1, others, replace=False)
        return np.append(np.sort(chosen), n_prompt - 1)

    def kept(self, n_prompt: int) -> int:
        """How many tokens of a prompt stay."""
        return math.ceil(self.keep * n_prompt)

    def flops(self, config: ModelConfig, n_prompt: int) -> int:
        """Counted operations of a prefill, as `Pruning.flops` counts them."""
        return _DENSE.flops(config, self.kept(checked.whole(n_prompt, "n_prompt", 1)))

    def speedup(self, config: ModelConfig, n_prompt: int) -> float:
        """Dense prefill's counted operations over those of this method."""
        return _DENSE.flops(config, n_prompt) / self.flops(config, n_prompt)


@dataclass(frozen=True)
class StaticPruning(Named):
    """Runs the first `layers` layers densely, then keeps `ceil(keep * n)` prompt tokens for good.

    A token's score is the query token's attention to it, averaged over those layers and all heads. What is
    dropped leaves every cache and never comes back.
    """

    method: ClassVar[str] = "static"
    layers: int
    keep: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", checked.whole(self.layers, "layers", 1, LAYER_LIMIT))
        object.__setattr__(self, "keep", checked.keep(self.keep, "keep"))

    def _stage(self) -> Pruning:
        return Pruning({self.layers - 1: self.keep})

    def check(self, config: ModelConfig) -> None:
        if self.layers >= config.n_layers:
            raise ValueError(
                f"layers must be below {config.n_layers}, the number of the model's layers, not {self.layers}"
            )

    def core(self) -> dict[str, Any]:
        return {**self._stage().core(), "permanent": True}

    def flops(self, config: ModelConfig, n_prompt: int) -> int:
        """Counted operations of a prefill, as `Pruning.flops` counts, with the scores of all `layers`."""
        self.check(config)
        one_stage = self._stage().flops(config, n_prompt)
        return one_stage + (self.layers - 1) * n_prompt * 2 * config.n_heads * config.head_dim

    def speedup(self, config: ModelConfig, n_prompt: int) -> float:
        """Dense prefill's counted operations over those of this method."""
        return _DENSE.flops(config, n_prompt) / self.flops(config, n_prompt)


@dataclass(frozen=True)
class PromptCompression(Named):
    """Selective Context (Li et al. 2023): takes out of a text what a language model finds easy to guess.

    Units are sentences, tokens or noun phrases (`unit="phrase"`, which needs spaCy); those whose tokens' mean
    self-information lies below the `100 * ratio` percentile go. `model` is the language model: an LLM, a
    folder or hub id, or None for the very model that answers.
    """

    method: ClassVar[str] = "compress"
    ratio: float
    unit: str = "sentence"
    model: LLM | str | None = None

    def __post_init__(self) -> None:
        ratio = checked.number(self.ratio, "ratio")
        if not 0.0 <= ratio <= 1.0:
            raise ValueError(f"ratio must be from 0 to 1, not {ratio}")
        object.__setattr__(self, "ratio", ratio)
        if self.unit not in UNITS:
            raise ValueError(f"unit must be one of {', '.join(UNITS)}, not {self.unit!r}")
        if not (self.model is None or isinstance(self.model, str) or hasattr(self.model, "session")):
            raise TypeError(f"model must be an LLM, a folder or hub id, or None, not {self.model!r}")

    def _plain(self) -> dict[str, Any]:
        model = self.model if isinstance(self.model, str | None) else str(self.model.checkpoint.folder)
        return {**super()._plain(), "model": model}

    def compress(self, llm: LLM, text: str) -> str:
        """The text without the units that go, by `model` or else by `llm`."""
        if not isinstance(text, str):
            raise TypeError(f"PromptCompression works on text, not on {type(text).__name__}")
        return compressed(text, self.reader(llm), self.ratio, self.unit)

    def reader(self, llm: LLM) -> LLM:
        """The language model that tells what is easy to guess, where `llm` is the one that answers."""
        return llm if self.model is None else opened(self.model, llm)


_opened: dict[tuple[str, str, int], LLM] = {}


def opened(model: LLM | str, beside: LLM) -> LLM:
    """The model itself, or the one at that folder or hub id, opened once on the device of `beside`."""
    if not isinstance(model, str):
        return model
    from lazyllm.llm import load

    key = model, beside.device, beside.threads
    if key not in _opened:
        on_cpu = beside.device == "cpu"
        _opened[key] = load(model, device=beside.device, threads=beside.threads if on_cpu else None)
    return _opened[key]


Method = Pruning | RandomDrop | StaticPruning | PromptCompression

NAMED: dict[str, type[RandomDrop] | type[StaticPruning] | type[PromptCompression]] = {
    cls.method: cls for cls in (RandomDrop, StaticPruning, PromptCompression)
}


def parse_method(text: str) -> Method:
    """A method from one argument: `dense`, `random:keep=0.5`, stages as JSON, or what `to_json` writes."""
    if not isinstance(text, str):
        raise TypeError(f"a method must be text, not {text!r}")
    name, _, options = text.strip().partition(":")
    if text.strip() == "dense":
        return Pruning()
    if name in NAMED:
        return NAMED[name]._made(_options(options, text))
    if text.strip()[:1] not in ("{", "[") and text.strip() != "null":
        raise ValueError(f"pruning is {text!r}; it must be {FORMS}")
    value = checked.parse_json(text)
    if isinstance(value, dict) and "method" in value:
        if (named := NAMED.get(str(value["method"]))) is None:
            raise ValueError(f"method is {value['method']!r}; it must be one of {', '.join(NAMED)}")
        return named.from_json(text)
    return Pruning.from_json(text)


def _options(text: str, whole: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for part in text.split(",") if text else []:
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not name or not equals:
            raise ValueError(f"{whole!r} has {part!r}, where name=value is wanted; a method is {FORMS}")
        if name in values:
            raise ValueError(f"{whole!r} gives {name} twice")
        values[name] = value if name in TEXT_FIELDS else _scalar(value)
    return values


def _scalar(text: str) -> bool | int | float | str:
    if text in TRUTHS:
        return TRUTHS[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
