"""Search: trials of settings that Optuna proposes, and the best among them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from math import inf, nan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

import lazyllm
from lazyllm.checkpoints.digest import weights_digest
from lazyllm.evaluation.divergence import TOKENS
from lazyllm.evaluation.intervals import Interval, interval
from lazyllm.evaluation.summary import DENSE
from lazyllm.llm import LLM, load
from lazyllm.machine.info import version
from lazyllm.methods import Preset, PruningInput
from lazyllm.pictures.figure import Dot
from lazyllm.pictures.pareto import plot_pareto
from lazyllm.prompt import Prompt
from lazyllm.pruning import Pruning
from lazyllm.searching.early_stop import EVERY, is_worse, rival_of
from lazyllm.searching.prompts import References, measured, prompts_of
from lazyllm.searching.space import Space
from lazyllm.searching.starts import calibrated
from lazyllm.searching.study import Claim, Record, Study, front_of, optuna_module, read
from lazyllm.support import checked
from lazyllm.support.json_text import json_digest
from lazyllm.support.optional import package
from lazyllm.support.progress import bar
from lazyllm.support.tables import Table

if TYPE_CHECKING:
    import pandas

BUDGET, RANGE = 40, (1.5, 3.0)
PICTURE, DENSE_ANSWERS, CALIBRATED = "search.png", "dense", "calibrated.json"
TITLE = "Settings on the front: KL from dense in nats per token [95 %], same answers as dense"
HEADS = ("setting", "counted speedup", "KL", "same answers")
KL_AXIS = "KL divergence from dense, nats per token (95 % interval)"
SPEEDUP_AXIS = "counted speedup of prefill"
PACKAGES = ("numpy", "tokenizers", "optuna")


class Search(Sequence[Record]):
    """The settings that were tried, in order; those that were stopped early or still run among them."""

    def __init__(self, records: Sequence[Record], conditions: Mapping[str, Any], folder: Path | None) -> None:
        self._records, self.conditions, self.folder = tuple(records), conditions, folder

    @classmethod
    def read(cls, folder: str | Path) -> Search:
        """Opens the folder of a search that has ended, was interrupted or still runs."""
        conditions, records = read(Path(folder))
        return cls(records, conditions, Path(folder))

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records)

    def __getitem__(self, key: int) -> Record:  # type: ignore[override]  # a search is not sliced
        return self._records[key]

    @property
    def finished(self) -> list[Record]:
        """Trials that ran on all prompts."""
        return [one for one in self if one.done]

    def pareto(self) -> Search:
        """The settings to which no other is equal or better in divergence and counted speedup and better in
        one, slowest first. Speedups are compared to two decimals."""
        return Search(front_of(self), self.conditions, self.folder)

    def best(self, speedup: float | None = None, max_loss: float | None = None) -> Record:
        """The setting with the least divergence that has at least this counted speedup, to two decimals; or
        the fastest one whose divergence is at most `max_loss`, in nats per token."""
        if (speedup is None) == (max_loss is None):
            raise TypeError("best needs either speedup or max_loss")
        front = self.pareto()
        if not front:
            raise ValueError("the search has no finished trial yet")
        if speedup is not None:
            wished = checked.number(speedup, "speedup")
            if fit := [one for one in front if one.shown_speedup >= round(wished, 2)]:
                return fit[0]
            raise ValueError(
                f"no setting has a speedup of {wished:g}; the fastest has {front[-1].speedup:.2f}"
            )
        limit = checked.number(max_loss, "max_loss")
        if fit := [one for one in front if one.loss <= limit]:
            return fit[-1]
        raise ValueError(
            f"no setting loses at most {limit:g} nats per token; the least is {front[0].loss:.4f}"
        )

    def preset(self, speedup: float | None = None, max_loss: float | None = None) -> Preset:
        """`best` as a preset, with the front as its evidence."""
        chosen = self.best(speedup, max_loss)
        return Preset(
            pruning=chosen.pruning,
            speedup=round(chosen.speedup, 4),
            model=self.conditions["model"],
            sha256=self.conditions["model sha256"],
            versions={
                "lazyllm": lazyllm.__version__,
                **{name: known for name in PACKAGES if (known := version(name))},
            },
            evidence={
                "prompts": {"search": self.conditions["prompts"], "tokens": self.conditions["prompt tokens"]},
                "candidates": [
                    {
                        "pruning": json.loads(one.pruning.to_json()),
                        "speedup": round(one.speedup, 4),
                        "kl": [round(end, 6) for end in _ends(kl_of(one))],
                    }
                    for one in self.pareto()
                ],
            },
        )

    @property
    def table(self) -> Table:
        """The Pareto front."""
        rows = []
        for one in self.pareto():
            value, low, high = _ends(kl_of(one))
            cells = [f"{one.speedup:.2f}", f"{value:.4f} [{low:.4f}, {high:.4f}]", f"{same_share(one):.0%}"]
            rows.append([str(one.pruning), *cells])
        return Table(TITLE, HEADS, rows)

    @property
    def heading(self) -> str:
        stopped = sum(one.stopped for one in self)
        running = sum(not one.done and not one.stopped for one in self)
        told = [f"{len(self.finished)} settings on {self.conditions['prompts']} prompts"]
        told += [f"{stopped} stopped early"] if stopped else []
        told += [f"{running} unfinished"] if running else []
        return f"{self.conditions['model']}: {', '.join(told)}"

    def text(self) -> str:
        """The front as a table for a terminal."""
        return f"{self.heading}\n\n{self.table.title}\n\n{self.table.text()}"

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return f"<p>{self.heading}</p>{self.table.html()}"

    def to_frame(self) -> pandas.DataFrame:
        """One row for each setting, in the order of the trials; needs pandas."""
        front = {one.number for one in self.pareto()}
        rows = [
            {
                "trial": one.number,
                "setting": str(one.pruning),
                "speedup": one.speedup,
                "kl": one.loss,
                "kl_low": kl_of(one).low,
                "kl_high": kl_of(one).high,
                "same": same_share(one),
                "prompts": len(one.results),
                "stopped": one.stopped,
                "on_front": one.number in front,
            }
            for one in self
        ]
        made: pandas.DataFrame = package("pandas", "to_frame", "longbench").DataFrame(rows)
        return made

    def plot(self, file: str | Path | None = None) -> Path:
        """Draws divergence against counted speedup with the Pareto front; needs matplotlib.

        Settings that were stopped early ran on fewer prompts and are left out. The default `file` is
        search.png in the search's folder, or in the working directory without one.
        """
        dense = Dot(DENSE, 1.0, 0.0, nan, nan)
        return plot_pareto(
            [dense, *map(dot_of, self.finished)],
            [dense, *map(dot_of, self.pareto())],
            DENSE,
            KL_AXIS,
            True,
            self.heading,
            Path(file) if file else (self.folder or Path()) / PICTURE,
            SPEEDUP_AXIS,
        )


def kl_of(one: Record) -> Interval:
    return interval(one.loss, [[np.array([result.kl for result in one.results])]], 0.0, inf)


def same_share(one: Record) -> float:
    return sum(result.same for result in one.results) / len(one.results)


def dot_of(one: Record) -> Dot:
    return Dot(str(one.pruning), one.speedup, *_ends(kl_of(one)))


def _ends(value: Interval) -> tuple[float, float, float]:
    return value.value, value.low, value.high


def search(
    llm: LLM | str | Path,
    prompts: Sequence[Prompt] | None = None,
    speedup: tuple[float, float] = RANGE,
    budget: int = BUDGET,
    *,
    start: Sequence[PruningInput] = (),
    seed: int = 0,
    out: str | Path | None = None,
    progress: bool = True,
) -> Search:
    """Searches schedules and options that diverge least from dense, for counted speedups within a range.

    `budget` settings are tried, each on the same prompts: Optuna's TPE sampler proposes them, after those of
    `start`, of `Pruning.for_speedup` and of a calibration on some of the prompts. A setting that a paired
    test finds worse than a faster one is stopped.
    `prompts`: texts, lists of messages or lists of token ids, at least 3; default: generated needles.
    `out`: a folder. A search there continues, and several processes with the same folder share its budget.
    """
    low, high = checked_range(speedup)
    checked.whole(budget, "budget", 1)
    checked.whole(seed, "seed", 0)
    optuna_module()
    model = llm if isinstance(llm, LLM) else load(llm)
    several = prompts_of(model, prompts, TOKENS)
    space = Space(model.config, int(np.median([len(ids) for ids in several])), low, high)
    Pruning.for_speedup(high, model.config, space.n_prompt)  # refuses one out of reach
    starts = [*map(space.checked_start, start), *space.starts()]
    conditions = {
        "model": model.config.name or model.checkpoint.path.name,
        "model sha256": weights_digest(model.checkpoint, progress),
        "device": model.device.partition(":")[0],
        "kernels": model.core.isa,  # they round sums differently
        "prompts": len(several),
        "prompts sha256": json_digest(several),
        "prompt tokens": space.n_prompt,
        "forced tokens": TOKENS,
        "speedup": [low, high],
        "seed": seed,
        "lazyllm": lazyllm.__version__,
    }
    if out is None:
        with TemporaryDirectory(prefix="lazyllm-search-") as folder:
            return Search(
                tried(model, several, space, starts, conditions, budget, Path(folder), progress),
                conditions,
                None,
            )
    made = Search(
        tried(model, several, space, starts, conditions, budget, Path(out), progress), conditions, Path(out)
    )
    with suppress(ImportError):  # without matplotlib there is no picture
        made.plot()
    return made


def checked_range(speedup: tuple[float, float]) -> tuple[float, float]:
    if isinstance(speedup, str) or not isinstance(speedup, Sequence) or len(speedup) != 2:
        raise TypeError(
            f"speedup must be the least and the greatest wished, such as (1.5, 3.0), not {speedup!r}"
        )
    low, high = (checked.number(one, "speedup") for one in speedup)
    if not 1 < low < high:
        raise ValueError(f"speedup must rise from above 1, such as (1.5, 3.0), not ({low:g}, {high:g})")
    return low, high


def tried(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    space: Space,
    starts: Sequence[Pruning],
    conditions: Mapping[str, Any],
    budget: int,
    folder: Path,
    progress: bool,
) -> list[Record]:
    """Runs trials in this process until the budget is spent by all; then what is known."""
    with Study(folder, conditions) as study:
        references = References(llm, prompts, TOKENS, folder / DENSE_ANSWERS, progress)
        starts = [*starts, *calibrated(llm, prompts, space, folder / CALIBRATED, progress)]
        with bar(budget * len(prompts), "prompts of trials", "prompt", progress) as line:
            while claim := study.claim(space, starts, budget, conditions["seed"]):
                ended = sum(one.done or one.stopped for one in study.records)
                line.update(ended * len(prompts) - line.n)
                run(llm, claim, references, study, line)
            line.update(budget * len(prompts) - line.n)
        return study.records


def run(llm: LLM, claim: Claim, references: References, study: Study, line: Any) -> None:
    while len(claim.results) < len(references):
        # first: the process that measured the last of them may have ended before the test
        if claim.results and len(claim.results) % EVERY == 0:
            rival = rival_of(claim.speedup, study.records)
            if rival and is_worse(claim.results, rival):
                return claim.stop()
        claim.add(measured(llm, claim.pruning, references[len(claim.results)]))
        mean = sum(one.kl for one in claim.results) / len(claim.results)
        line.set_postfix_str(f"at {claim.speedup:.2f} times the speed KL {mean:.4f}")
        line.update()
    claim.finish()
