"""Results of a search: the settings that were tried, and the best among them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lazyllm.evaluation.summary import DENSE_LABEL, Interval, interval
from lazyllm.methods.preset import Preset
from lazyllm.pruning import Pruning
from lazyllm.searching.study import FACTS, KL, SETTING, SPEEDUP, states, stored
from lazyllm.support import checked
from lazyllm.support.files import user_path
from lazyllm.support.tables import Table
from lazyllm.sweeps.points import Frame, Point, front, plain, plot_points

if TYPE_CHECKING:
    from optuna.study import Study

PICTURE = "search.png"


def points_of(study: Study) -> Iterator[Point]:
    """The settings of the trials that have ended, in order."""
    for trial in study.get_trials(deepcopy=False, states=[states().COMPLETE, states().PRUNED]):
        kl = np.array(trial.user_attrs[KL])
        pruning = Pruning.from_json(trial.user_attrs[SETTING])
        yield Point(
            pruning.label,
            pruning,
            prompts=len(kl),
            kl=interval([[kl]], 0.0),
            kl_median=float(np.median(kl)),
            counted_speedup=trial.user_attrs[SPEEDUP],
            stopped=trial.state == states().PRUNED,
        )


class Search(Frame):
    """The settings that were tried, in order; `study` is Optuna's, `folder` None without `out`."""

    def __init__(self, study: Study, folder: Path | None) -> None:
        self.study, self.folder = study, folder
        self.facts = study.user_attrs[FACTS]
        super().__init__([*points_of(study)])

    @classmethod
    def read(cls, folder: str | Path) -> Search:
        """Opens the folder of a search that has ended, was interrupted or still runs."""
        path = user_path(folder)
        return cls(stored(path), path)

    @property
    def finished(self) -> list[Point]:
        """The settings that ran on all prompts."""
        return [point for point in self if not point.stopped]

    def pareto(self) -> Frame:
        """The Pareto front in divergence and counted speedup, slowest first; none of it was stopped."""
        return Frame(front(self.finished, "counted_speedup"))

    def best(self, speedup: float) -> Point:
        """The setting with the least divergence that has at least this counted speedup, to two decimals."""
        wished, on_front = round(checked.number(speedup, "speedup"), 2), self.pareto()
        if not len(on_front):
            raise ValueError("the search has no finished trial yet")
        if (fastest := on_front[-1].counted_speedup) < wished:
            raise ValueError(f"no setting has a speedup of {speedup:g}; the fastest has {fastest:.2f}")
        fit = [point for point in on_front if point.counted_speedup >= wished]
        return fit[0]

    def preset(self, speedup: float) -> Preset:
        """`best` as a preset, with the front as its evidence."""
        best = self.best(speedup)
        assert isinstance(best.pruning, Pruning)
        tried = [(point.pruning, point.counted_speedup, {"kl": plain(point.kl)}) for point in self.pareto()]
        prompts = {"search": self.facts["prompts"], "tokens": self.facts["prompt tokens"]}
        return Preset.found(best.pruning, best.counted_speedup, self.facts, prompts, tried)

    @property
    def heading(self) -> str:
        n_finished = len(self.finished)
        text = f"{self.facts['model']}: {n_finished} settings on {self.facts['prompts']} prompts"
        return f"{text}, {len(self) - n_finished} stopped early" if n_finished < len(self) else text

    @property
    def table(self) -> Table:
        """The Pareto front."""
        return self.pareto().table

    def text(self) -> str:
        """The front as a table for a terminal."""
        return f"{self.heading}\n\n{self.table.title}\n\n{self.table.text()}"

    __repr__ = text

    def plot(self, file: str | Path | None = None) -> Path:
        """Draws divergence against counted speedup with the Pareto front; needs matplotlib.

        Settings that were stopped early ran on fewer prompts and are left out. The default `file` is
        search.png in the search's folder, or in the working directory without one.
        """
        dense = Point(
            DENSE_LABEL, Pruning(), self.facts["prompts"], kl=Interval(0, 0, 0), counted_speedup=1.0
        )
        target = user_path(file) if file else (self.folder or Path()) / PICTURE
        return plot_points([dense, *self.finished], self.heading, target, "counted_speedup")
