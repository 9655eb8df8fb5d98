"""Profile: what passes of a model cost on this machine, measured once and kept in a file of the cache."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import lazyllm
from lazyllm import _core
from lazyllm.checkpoints.checkpoint import Checkpoint
from lazyllm.checkpoints.pypi_models import default_cache
from lazyllm.support import checked
from lazyllm.support.files import locked, write_whole
from lazyllm.support.json_text import json_digest, parse_object

FOLDER, LOCK = "profiles", ".lock"
Point = tuple[float, float]
FORMAT = 1
NAME_DIGITS = 12


@dataclass(frozen=True)
class Costs:
    """Seconds of dense passes: of a prefill's `start` and each counted `operation`; of a decode `step` and
    each `key` that it reads (one token in one layer)."""

    start: float
    operation: float
    step: float
    key: float

    @classmethod
    def fitted(cls, prefills: Sequence[Point], steps: Sequence[Point]) -> Costs:
        """From (operations, seconds) of prefills and (keys, seconds) of decode steps."""
        return cls(*fitted_line(prefills), *fitted_line(steps))


@dataclass(frozen=True)
class Habits:
    """The effect of a setting, measured on one answer.

    After t decode steps, 1 - (1 + t)^-`revival` of what the prefill dropped has been revived; each step takes
    `overhead` seconds more than a dense one, for scores and selection alone; `kept` has the shares of the
    prompt that the `Mass` stages kept, in order.
    """

    revival: float
    overhead: float
    kept: tuple[float, ...] = ()

    def revived(self, steps: float) -> float:
        """The share of the dropped (token, layer) pairs that an answer revives."""
        return 1.0 - math.pow(1.0 + steps, -self.revival)


def fitted_line(points: Sequence[Point]) -> tuple[float, float]:
    """(at 0, slope) of the line with the least squares of relative errors, neither of them negative."""
    x, y = np.array(points, np.float64).T
    weighted = np.stack([1 / y, x / y], axis=1)
    scale = np.linalg.norm(weighted, axis=0)
    start, slope = (np.linalg.lstsq(weighted / scale, np.ones(x.size), rcond=None)[0] / scale).tolist()
    if slope < 0:
        return float(1 / np.mean(1 / y)), 0.0
    if start < 0:
        return 0.0, float(1 / np.mean(x / y))
    return start, slope


def fitted_revival(shares: Sequence[float]) -> float:
    """The exponent of `Habits.revived` by least squares; `shares` are those after 1, 2, … steps."""
    left = -np.log1p(-np.minimum(shares, 1 - 1e-9))
    steps = np.log1p(np.arange(1, left.size + 1))
    return float(max(0.0, left @ steps / (steps @ steps)))


@dataclass
class Profile:
    """The measurements of one model on this machine; `texts` are what the model wrote, the prompts by which
    the habits of settings are found; settings are keyed by their JSON."""

    costs: Costs
    texts: list[list[int]]
    habits: dict[str, Habits] = field(default_factory=dict)


class ProfileFile:
    """The file of one model on one device, with one number of threads."""

    def __init__(self, checkpoint: Checkpoint, core: _core.Model, processor: str) -> None:
        self._name = checkpoint.config.name or checkpoint.path.name
        self._vocab = checkpoint.config.vocab
        place: dict[str, str | int] = {
            "folder": str(checkpoint.path.resolve()),
            "processor": processor,
            "device": core.device,
            "threads": core.threads,
        }
        weights = {"weights": checkpoint.state, "bytes in use": core.bytes}
        made_by = {"kernels": core.isa, "kv": core.kv, **weights, **software()}
        self._conditions = {**place, **made_by}
        name = f"{checkpoint.path.name}-{json_digest(place)[:NAME_DIGITS]}.json"
        self.path = profile_folder() / name

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Waits until nobody else measures on this machine, whatever the model."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with locked(self.path.parent / LOCK):
            yield

    def read(self) -> Profile | None:
        """None if there is no file, or it is damaged, or was made under other conditions."""
        try:
            table = parse_object(self.path.read_bytes(), self.path)
            if (table["format"], table["conditions"]) != (FORMAT, self._conditions):
                return None
            return Profile(
                Costs(**{name: amount(value, name) for name, value in table["costs"].items()}),
                self._texts(table["texts"]),
                {setting: read_habits(values) for setting, values in table["habits"].items()},
            )
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def _texts(self, texts: Sequence[Sequence[Any]]) -> list[list[int]]:
        if not texts or not all(texts):
            raise ValueError("a text is missing")
        return [[checked.whole(one, "a token of a text", 0, self._vocab) for one in text] for text in texts]

    def write(self, profile: Profile) -> None:
        """Called while `locked`."""
        table = {
            "format": FORMAT,
            "model": self._name,
            "measured": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "conditions": self._conditions,
            **asdict(profile),
        }
        write_whole(self.path, json.dumps(table, indent=1) + "\n")


def amount(value: object, what: str) -> float:
    if (number := checked.number(value, what)) < 0:
        raise ValueError(f"{what} must not be negative, but is {number}")
    return number


def read_habits(values: Mapping[str, Any]) -> Habits:
    kept = tuple(checked.keep(share, "kept") for share in values["kept"])
    return Habits(amount(values["revival"], "revival"), amount(values["overhead"], "overhead"), kept)


def profile_folder() -> Path:
    return default_cache() / FOLDER


def software() -> dict[str, str]:
    """The version, and a hash of the compiled core: other kernels have other times."""
    core = hashlib.sha256(Path(_core.__file__).read_bytes()).hexdigest()
    return {"lazyllm": lazyllm.__version__, "core sha256": core}


def profiles() -> list[str]:
    """One line for each profile in the cache."""
    return [line_of(path) for path in sorted(profile_folder().glob("*.json"))]


def line_of(path: Path) -> str:
    try:
        table = parse_object(path.read_bytes(), path)
        under = table["conditions"]
        current = software() == {name: under[name] for name in software()}
        threads = f" with {under['threads']} threads" if under["device"] == "cpu" else ""
        text = f"{table['model']} on {under['device']}{threads}, {table['measured']}"
    except (OSError, ValueError, TypeError, KeyError):
        return f"{path.name}, damaged, will be measured anew"
    return text if current else f"{text}, of another version, will be measured anew"
