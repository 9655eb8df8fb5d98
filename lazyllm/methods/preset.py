"""Preset: a Pruning found for one checkpoint, with the evidence for it; its file is a setting too."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lazyllm.checkpoints.digest import weights_digest
from lazyllm.method import Method
from lazyllm.pictures.survival import plot_survival
from lazyllm.pruning import Pruning
from lazyllm.support import checked
from lazyllm.support.files import user_path, write_whole
from lazyllm.support.json_text import parse_object
from lazyllm.support.tables import Table

if TYPE_CHECKING:
    from lazyllm.checkpoints.checkpoint import Checkpoint
    from lazyllm.checkpoints.config import ModelConfig

FORMAT = 1
PICTURE = "survival.png"
TITLE = "Settings tried [95 %]; * is the preset's"


@dataclass(frozen=True, repr=False)
class Preset(Method):
    """A setting found by `calibrate` or `search`; as `pruning=` it warns on other checkpoints.

    `model` and `sha256` (of config and weights) name the checkpoint. `speedup` is the counted one, of the
    prompts it was found with. `versions` are those of the software. `evidence` is plain JSON data: the
    `candidates` with their trials, the numbers of `prompts`, and from a calibration the `curves`.
    Comparisons leave both out.
    """

    pruning: Pruning
    speedup: float
    model: str
    sha256: str
    versions: Mapping[str, str] = field(compare=False)
    evidence: Mapping[str, Any] = field(compare=False)

    def __str__(self) -> str:
        return str(self.pruning)

    @property
    def _heading(self) -> str:
        return f"Preset for {self.model}: {self.pruning}, counted speedup {self.speedup:.2f}"

    def __repr__(self) -> str:
        return f"{self._heading}\n\n{self.table.title}\n\n{self.table.text()}"

    def _repr_html_(self) -> str:
        return f"<p>{escape(self._heading)}</p><p>{escape(self.table.title)}</p>{self.table.html()}"

    @property
    def table(self) -> Table:
        """The settings that were tried, the chosen one marked; what was not measured has no column."""
        rows = [self._cells(candidate) for candidate in self.evidence["candidates"]]
        heads = [head for head in rows[0] if any(cells[head] for cells in rows)]
        return Table(TITLE, heads, [[cells[head] for head in heads] for cells in rows])

    def _cells(self, candidate: Mapping[str, Any]) -> dict[str, str]:
        tried = Pruning.from_fields(candidate["pruning"])
        fields_of = str(tried).removeprefix("Pruning(").removesuffix(")")
        return {
            "setting": f"{'*' if tried == self.pruning else ' '} {fields_of}",
            "counted speedup": f"{candidate['speedup']:.2f}",
            "attention lost": f"{candidate['loss']:.1%}" if "loss" in candidate else "",
            "needles found, percent": _interval(candidate.get("needles"), ".1f"),
            "difference to dense": _interval(candidate.get("needles_to_dense"), "+.1f"),
            "KL from dense": _interval(candidate.get("kl"), ".4f"),
        }

    # ---- as a method -----------------------------------------------------------------------------

    def core(self) -> dict[str, Any]:
        return self.pruning.core()

    def to_json(self) -> str:
        """The setting's own value."""
        return self.pruning.to_json()

    def check(self, config: ModelConfig) -> None:
        self.pruning.check(config)

    def mismatch(self, checkpoint: Checkpoint, progress: bool) -> str | None:
        """Compares hashes, for which it reads the whole checkpoint once in a process."""
        if weights_digest(checkpoint, progress) == self.sha256:
            return None
        name = checkpoint.config.name or checkpoint.path.name
        other = f"{name} with other weights" if name == self.model else name
        return f"the preset was made for {self.model}, not for {other}; lazyllm.calibrate makes one for it"

    def prefill_flops(self, config: ModelConfig, n_prompt: int, last_pass: np.ndarray) -> int:
        return self.pruning.prefill_flops(config, n_prompt, last_pass)

    def why_unpruned(self, n_prompt: int, n_context: int) -> str:
        return self.pruning.why_unpruned(n_prompt, n_context)

    # ---- files -----------------------------------------------------------------------------------

    def save(self, path: str | Path) -> Path:
        """Writes the preset as JSON."""
        table = {**self._plain(), "pruning": json.loads(self.pruning.to_json())}
        file = user_path(path)
        write_whole(file, json.dumps({"format": FORMAT, **table}, indent=1) + "\n")
        return file

    @classmethod
    def load(cls, path: str | Path) -> Preset:
        """The preset of a file that `save` wrote."""
        table = parse_object(user_path(path).read_bytes(), path, strict=True)
        if table.pop("format", None) != FORMAT:
            raise ValueError(
                f"{path} is no preset of format {FORMAT}, as lazyllm calibrate and lazyllm search write it"
            )
        names = [field.name for field in fields(cls)]
        if missing := [name for name in names if name not in table]:
            raise ValueError(f"{path}: the preset has no {missing[0]}")
        if unknown := sorted(set(table) - set(names)):
            raise ValueError(f"{path}: a preset has no field {unknown[0]!r}; it has {', '.join(names)}")
        try:
            preset = cls(**{**table, "pruning": Pruning.from_fields(table["pruning"])})
            preset._check_fields()
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from None
        return preset

    def _check_fields(self) -> None:
        checked.number(self.speedup, "speedup")
        for name, kind, what in (
            ("model", str, "text"),
            ("sha256", str, "text"),
            ("versions", dict, "an object"),
            ("evidence", dict, "an object"),
        ):
            if not isinstance(getattr(self, name), kind):
                raise TypeError(f"{name} must be {what}, not {getattr(self, name)!r}")
        try:
            _ = self.table, "curves" in self.evidence and self._curves()
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"evidence is not as calibrate or search writes it: {error!r}") from None

    def _curves(self) -> tuple[list[int], list[float], np.ndarray]:
        curves = self.evidence["curves"]
        layers, keeps, kept = curves["layers"], curves["keeps"], np.array(curves["kept"], float)
        if kept.shape != (len(layers), len(keeps)):
            raise ValueError("kept needs a number for each layer and keep")
        return layers, keeps, kept

    def plot(self, file: str | Path = PICTURE) -> Path:
        """Draws how much each keep keeps of what the answer attends to, by layer; needs matplotlib."""
        if "curves" not in self.evidence:
            raise ValueError("a preset of a search has no curves; Search.plot draws its settings")
        stages = [(layer, keep) for layer, keep in self.pruning.stages if isinstance(keep, float)]
        title = f"{self.model}: counted speedup {self.speedup:.2f}"
        return plot_survival(*self._curves(), stages, title, user_path(file))


def _interval(value: Sequence[float | None] | None, form: str) -> str:
    """The value with its bounds, where it has them."""
    texts = [f"{number:{form}}" for number in value or () if number is not None]
    if len(texts) == 3:
        return f"{texts[0]} [{texts[1]}, {texts[2]}]"
    return texts[0] if texts else ""
