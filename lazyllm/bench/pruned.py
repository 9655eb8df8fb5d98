"""Suite `pruned`: what schedules save of the time to the first token, beside what counted work promises."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lazyllm.bench.goals import wanted
from lazyllm.bench.options import Options
from lazyllm.bench.place import Place
from lazyllm.bench.report import Figure, Row, Table
from lazyllm.bench.rounds import in_turn, timed
from lazyllm.llm import LLM
from lazyllm.pruning import Mass, Pruning
from lazyllm.session import Session

SUITE = "pruned"
SPEEDUPS = (1.5, 2.0, 3.0)
DENSE = "dense"
EFFICIENCY = "measured / counted"


def pruned(options: Options) -> Iterator[Table]:
    for place in options.places:
        llm = place.load(options.folder)
        for n in options.fitting_tokens:
            schedules, notes = schedules_for(llm, n)
            title = f"Pruned prefill of {n} tokens, {options.config.name}, {place}"
            rows = rows_of(options, llm, schedules, n, place)
            yield Table(SUITE, title, rows, (*notes, *options.too_long))


def schedules_for(llm: LLM, n: int) -> tuple[dict[str, Pruning], list[str]]:
    """Schedules of several kinds by name, and a sentence on each that this model has no room for."""
    layers = llm.config.n_layers
    made: dict[str, Pruning] = {}
    notes = []
    for speedup in SPEEDUPS:
        try:
            made[f"speedup {speedup:g}"] = Pruning.for_speedup(speedup, llm.config, n)
        except ValueError as error:
            notes.append(f"Left out: {error}.")
    made["one stage"] = Pruning({layers // 2: 0.5})
    made["by mass"] = Pruning({layers // 4: Mass(0.95, keep_min=0.3), layers // 2: Mass(0.9, keep_min=0.1)})
    return made, notes


def rows_of(options: Options, llm: LLM, schedules: dict[str, Pruning], n: int, place: Place) -> list[Row]:
    ids = options.prompt(n)
    ran: dict[str, Session] = {}

    def work(name: str, pruning: Pruning) -> Callable[[], object]:
        def run() -> None:
            ran[name] = llm.session(pruning)
            ran[name].forward(ids, progress=False)

        return run

    contestants = {
        name: timed(work(name, pruning)) for name, pruning in {DENSE: Pruning(), **schedules}.items()
    }
    times = in_turn(contestants, options.rounds, f"pruned prefill of {n} tokens, {place}")
    dense = Pruning().flops(llm.config, n)
    rows = [Row(DENSE, {"time": times[DENSE]})]
    for name, pruning in schedules.items():
        measured = times[DENSE].median / times[name].median
        counted = dense / pruning.pass_flops(llm.config, ran[name].last_pass)
        figures: dict[str, Figure] = {
            "time": times[name],
            "measured": measured,
            "counted": counted,
            EFFICIENCY: measured / counted,
            "schedule": str(pruning),
        }
        keys: dict[str, str | int] = {"schedule": name, "tokens": n, **place.keys}
        rows.append(Row(name, figures, wanted({EFFICIENCY: options.goals(place).pruned}), keys))
    return rows
