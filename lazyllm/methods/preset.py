"""Preset: a Pruning found for one checkpoint, with the evidence for it; its file is a setting too."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from html import escape
from math import isnan
from pathlib import Path
from typing import Any, ClassVar

from lazyllm.checkpoints.checkpoint import Checkpoint
from lazyllm.checkpoints.config import ModelConfig
from lazyllm.method import Method, Spans
from lazyllm.pruning import Pruning
from lazyllm.support import checked
from lazyllm.support.files import user_path, write_whole
from lazyllm.support.json_text import parse_object
from lazyllm.support.tables import Table, with_bounds

FORMAT = 1
SPEEDUP_DIGITS, DIGITS = 4, 6
MEASURED = (
    ("needles found, percent", "needles", ".1f"),
    ("difference to dense", "needles_to_dense", "+.1f"),
    ("KL from dense", "kl", ".4f"),
)
"""Columns: head, field of a candidate, format."""
TITLE = "Settings tried [95 %]; * is the preset's"


@dataclass(frozen=True, repr=False)
class Preset(Method):
    """A setting found by `calibrate` or `search`; as `pruning=` it warns on other checkpoints.

    `model` and `sha256` (of config and weights) name the checkpoint. `speedup` is counted, for the prompts
    with which the setting was found. `versions` are those of the software. `evidence` is plain JSON data: the
    `candidates` with their measurements, and the numbers of `prompts`. Comparisons ignore the last two fields.
    """

    name: ClassVar[str] = "preset"

    pruning: Pruning
    speedup: float
    model: str
    sha256: str
    versions: Mapping[str, str] = field(compare=False)
    evidence: Mapping[str, Any] = field(compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.pruning, Pruning):  # as a file has it
            self._set(pruning=Pruning.from_fields(self.pruning))
        checked.number(self.speedup, "speedup")
        for name, kind in {"model": str, "sha256": str, "versions": Mapping, "evidence": Mapping}.items():
            if not isinstance(value := getattr(self, name), kind):
                raise TypeError(f"{name} must be {'text' if kind is str else 'an object'}, not {value!r}")

    @property
    def full_label(self) -> str:
        return self.pruning.full_label

    @classmethod
    def found(
        cls,
        pruning: Method,
        facts: Mapping[str, Any],
        prompts: Mapping[str, int],
        tried: Iterable[tuple[Method, float, Mapping[str, Iterable[float]]]],
    ) -> Preset:
        """The preset of `pruning`, which is one of the settings `tried`, each with its speedup and its measured
        intervals. `facts` is the manifest of their run."""
        speedups, candidates = {}, []
        for method, speedup, measured in tried:
            speedups[method] = round(speedup, SPEEDUP_DIGITS)
            values = {"pruning": json.loads(method.to_json()), "speedup": speedups[method]}
            candidates.append(values | {name: [*map(plain, bounds)] for name, bounds in measured.items()})
        conditions = facts["conditions"]
        versions = {"lazyllm": conditions["lazyllm"], **conditions["packages"]}
        evidence = {"prompts": dict(prompts), "candidates": candidates}
        checkpoint = facts["model"], conditions["model sha256"]
        assert isinstance(pruning, Pruning)
        return cls(pruning, speedups[pruning], *checkpoint, versions, evidence)

    @property
    def _headings(self) -> list[str]:
        return [f"Preset for {self.model}: {self.label}, counted speedup {self.speedup:.2f}", TITLE]

    def __repr__(self) -> str:
        return "\n\n".join([*self._headings, self.table.text()])

    def _repr_html_(self) -> str:
        return "".join(f"<p>{escape(heading)}</p>" for heading in self._headings) + self.table.html()

    @property
    def table(self) -> Table:
        """The settings that were tried, the chosen one marked; columns without a measurement are left out."""
        columns: dict[str, list[str]] = {"setting": [], "counted speedup": []}
        candidates = self.evidence["candidates"]
        for candidate in candidates:
            tried = Pruning.from_fields(candidate["pruning"])
            columns["setting"].append(("* " if tried == self.pruning else "  ") + tried.label)
            columns["counted speedup"].append(f"{candidate['speedup']:.2f}")
        for head, key, form in MEASURED:
            columns[head] = [with_bounds(candidate.get(key, ()), form) for candidate in candidates]
        columns = {head: cells for head, cells in columns.items() if any(cells)}
        return Table(TITLE, [*columns], [*zip(*columns.values(), strict=True)])

    def core(self) -> dict[str, Any]:
        return self.pruning.core()

    def to_json(self) -> str:
        """The JSON of `pruning`."""
        return self.pruning.to_json()

    def check(self, config: ModelConfig) -> None:
        self.pruning.check(config)

    def for_prompt(self, config: ModelConfig, n_prompt: int) -> Pruning:
        return self.pruning

    def protecting(self, spans: Spans) -> Preset:
        return replace(self, pruning=self.pruning.protecting(spans))

    def mismatch(self, checkpoint: Checkpoint, progress: bool) -> str | None:
        """Compares hashes, for which it reads the whole checkpoint once in a process."""
        if checkpoint.weights_digest(progress) == self.sha256:
            return None
        name = checkpoint.config.name or checkpoint.path.name
        other = f"{name} with other weights" if name == self.model else name
        return f"the preset was made for {self.model}, not for {other}; lazyllm.calibrate makes one for it"

    def save(self, path: str | Path) -> Path:
        """Writes the preset as JSON."""
        table = {"format": FORMAT, **self._plain(), "pruning": self.pruning._plain()}
        file = user_path(path)
        write_whole(file, json.dumps(table, indent=1) + "\n")
        return file

    @classmethod
    def load(cls, path: str | Path) -> Preset:
        """The preset of a file that `save` wrote."""
        file = user_path(path)
        if not file.is_file():
            raise FileNotFoundError(f"there is no preset {file}")
        table = parse_object(file.read_bytes(), path)
        if table.pop("format", None) != FORMAT:
            raise ValueError(f"{path} is no preset of format {FORMAT}, as calibrate and search write it")
        try:
            preset = cls.from_fields(table)
            _ = preset.table  # reads the evidence
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{path}: it is not as calibrate or search writes it: {error!r}") from None
        return preset


def plain(bound: float) -> float | None:
    """A number for JSON, which has no NaN."""
    return None if isnan(bound) else round(bound, DIGITS)
