"""Results of a search: the settings that were tried, and the best among them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf, nan
from pathlib import Path
from typing import TYPE_CHECKING, SupportsIndex

import numpy as np

from lazyllm.evaluation.intervals import interval
from lazyllm.evaluation.summary import DENSE_LABEL
from lazyllm.machine.info import version
from lazyllm.methods import Preset
from lazyllm.pictures.figure import Dot
from lazyllm.pictures.pareto import plot_pareto
from lazyllm.pruning import Pruning
from lazyllm.searching.study import FACTS, JOURNAL, SETTING, states, stored
from lazyllm.support import checked
from lazyllm.support.files import user_path
from lazyllm.support.optional import package
from lazyllm.support.tables import Table

if TYPE_CHECKING:
    import pandas
    from optuna.study import Study

PICTURE = "search.png"
TITLE = "Settings on the front: KL from dense in nats per token [95 %]"
HEADS = ("setting", "counted speedup", "KL")
KL_AXIS = "KL divergence from dense, nats per token (95 % interval)"
SPEEDUP_AXIS = "counted speedup of prefill"


@dataclass(frozen=True)
class Record:
    """A setting that was tried. `kl` is the divergence from dense on each prompt, in nats per token; on the
    first ones only if it was `stopped`. `on_front`: no other setting is equal or better in divergence and
    speedup and better in one."""

    number: int
    pruning: Pruning
    speedup: float
    kl: tuple[float, ...] = field(repr=False)
    stopped: bool
    on_front: bool

    @property
    def loss(self) -> float:
        """The mean divergence over the prompts that were run."""
        return sum(self.kl) / len(self.kl)

    @property
    def interval(self) -> tuple[float, float, float]:
        """The loss, and the ends of its 95 % interval."""
        kl = interval(self.loss, [[np.array(self.kl)]], 0.0, inf)
        return kl.value, kl.low, kl.high

    @property
    def dot(self) -> Dot:
        return Dot(str(self.pruning), self.speedup, *self.interval)


def records_of(study: Study) -> list[Record]:
    """The trials that have ended, in order. Their speedups are rounded to two decimals, as schedules for the
    same speedup differ in the third."""
    front = {trial.number for trial in study.best_trials}
    return [
        Record(
            trial.number,
            Pruning.from_json(trial.user_attrs[SETTING]),
            trial.user_attrs["speedup"],
            tuple(trial.user_attrs["kl"]),
            trial.state == states().PRUNED,
            trial.number in front,
        )
        for trial in study.get_trials(deepcopy=False, states=[states().COMPLETE, states().PRUNED])
    ]


class Search:
    """The settings that were tried, in order; `study` is Optuna's, `folder` None without `out`."""

    def __init__(self, study: Study, folder: Path | None) -> None:
        self.study, self.folder = study, folder
        self.facts = study.user_attrs[FACTS]
        self._records = tuple(records_of(study))

    @classmethod
    def read(cls, folder: str | Path) -> Search:
        """Opens the folder of a search that has ended, was interrupted or still runs."""
        path = user_path(folder)
        if not (path / JOURNAL).exists():
            raise FileNotFoundError(f"{path} holds no search: it has no {JOURNAL}")
        return cls(stored(path), path)

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records)

    def __getitem__(self, key: SupportsIndex) -> Record:
        return self._records[key]

    def pareto(self) -> list[Record]:
        """The Pareto front in divergence and counted speedup, slowest first; none of it was stopped."""
        return sorted((record for record in self if record.on_front), key=lambda record: record.speedup)

    def best(self, speedup: float) -> Record:
        """The setting with the least divergence that has at least this counted speedup, to two decimals."""
        wished, front = round(checked.number(speedup, "speedup"), 2), self.pareto()
        if fit := [record for record in front if record.speedup >= wished]:
            return fit[0]
        if not front:
            raise ValueError("the search has no finished trial yet")
        raise ValueError(f"no setting has a speedup of {speedup:g}; the fastest has {front[-1].speedup:.2f}")

    def preset(self, speedup: float) -> Preset:
        """`best` as a preset, with the front as its evidence."""
        record, conditions = self.best(speedup), self.facts["conditions"]
        return Preset(
            pruning=record.pruning,
            speedup=record.speedup,
            model=self.facts["model"],
            sha256=conditions["model sha256"],
            versions={
                "lazyllm": conditions["lazyllm"],
                **conditions["packages"],
                "optuna": version("optuna") or "",
            },
            evidence={
                "prompts": {"search": self.facts["prompts"], "tokens": self.facts["prompt tokens"]},
                "candidates": [
                    {
                        "pruning": json.loads(candidate.pruning.to_json()),
                        "speedup": candidate.speedup,
                        "kl": [round(number, 6) for number in candidate.interval],
                    }
                    for candidate in self.pareto()
                ],
            },
        )

    @property
    def heading(self) -> str:
        stopped = sum(record.stopped for record in self)
        text = f"{self.facts['model']}: {len(self) - stopped} settings on {self.facts['prompts']} prompts"
        return f"{text}, {stopped} stopped early" if stopped else text

    @property
    def table(self) -> Table:
        """The Pareto front."""
        rows = [
            (str(record.pruning), f"{record.speedup:.2f}", "{:.4f} [{:.4f}, {:.4f}]".format(*record.interval))
            for record in self.pareto()
        ]
        return Table(TITLE, HEADS, rows)

    def text(self) -> str:
        """The front as a table for a terminal."""
        return f"{self.heading}\n\n{self.table.title}\n\n{self.table.text()}"

    __repr__ = text

    def _repr_html_(self) -> str:
        return f"<p>{self.heading}</p>{self.table.html()}"

    def to_frame(self) -> pandas.DataFrame:
        """One row for each setting, in the order of the trials; needs pandas."""
        frame: pandas.DataFrame = package("pandas", "to_frame", "longbench").DataFrame(
            {
                "trial": record.number,
                "setting": str(record.pruning),
                "speedup": record.speedup,
                **dict(zip(("kl", "kl_low", "kl_high"), record.interval, strict=True)),
                "prompts": len(record.kl),
                "stopped": record.stopped,
                "on_front": record.on_front,
            }
            for record in self
        )
        return frame

    def plot(self, file: str | Path | None = None) -> Path:
        """Draws divergence against counted speedup with the Pareto front; needs matplotlib.

        Settings that were stopped early ran on fewer prompts and are left out. The default `file` is
        search.png in the search's folder, or in the working directory without one.
        """
        dense = Dot(DENSE_LABEL, 1.0, 0.0, nan, nan)
        return plot_pareto(
            [dense, *(record.dot for record in self if not record.stopped)],
            [dense, *(record.dot for record in self.pareto())],
            DENSE_LABEL,
            KL_AXIS,
            True,
            self.heading,
            user_path(file) if file else (self.folder or Path()) / PICTURE,
            SPEEDUP_AXIS,
        )
