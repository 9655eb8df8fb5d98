"""Suite `pruned`: the speedup of the first token by pruning, measured against counted operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.measuring.goals import PRUNED_BY_ARITHMETIC
from benchmarks.measuring.place import Place
from benchmarks.measuring.report import Figure, Row, Section
from benchmarks.measuring.rounds import in_turn, timed
from benchmarks.options import Options
from lazyllm import Mass, Pruning, _core, load
from lazyllm.llm import LLM
from lazyllm.session import Session

SUITE = "pruned"
SPEEDUPS = (1.5, 2.0, 3.0)
DENSE = "dense"
EFFICIENCY = "measured / counted"
BY_ARITHMETIC = 2048  # tokens
BLOCK = 32  # weights of a row that are rounded to 8 or 4 bits together


def pruned(options: Options) -> Iterator[Section]:
    for place in options.places:
        llm = place.load(options.folder)
        for n in options.fitting_tokens:
            schedules, notes = schedules_for(llm, n)
            title = f"Pruned prefill of {n} tokens, {options.config.name}, {place}"
            rows = rows_of(options, llm, schedules, n, place)
            yield Section(SUITE, title, rows, (*notes, *options.too_long))
    if options.widest.on_cpu:
        yield by_arithmetic(options, options.widest)


def schedules_for(llm: LLM, n: int) -> tuple[dict[str, Pruning], list[str]]:
    """Schedules by name, and a note on each speedup that this model cannot reach."""
    layers = llm.config.n_layers
    schedules: dict[str, Pruning] = {}
    notes = []
    for speedup in SPEEDUPS:
        try:
            schedules[f"speedup {speedup:g}"] = Pruning.for_speedup(speedup, llm, n, "paper")
        except ValueError as error:
            notes.append(f"Left out: {error}.")
    schedules["one stage"] = Pruning({layers // 2: 0.5})
    schedules["by mass"] = Pruning(
        {layers // 4: Mass(0.95, keep_min=0.3), layers // 2: Mass(0.9, keep_min=0.1)}
    )
    return schedules, notes


def prefill(
    llm: LLM, pruning: Pruning, ids: list[int], ran: dict[str, Session], name: str
) -> Callable[[], object]:
    """The session of each run is kept under its name."""

    def run() -> None:
        ran[name] = llm.session(pruning)
        ran[name].forward(ids, progress=False)

    return run


def rows_of(options: Options, llm: LLM, schedules: dict[str, Pruning], n: int, place: Place) -> list[Row]:
    ids = options.prompt(n)
    ran: dict[str, Session] = {}
    contestants = {
        name: timed(prefill(llm, pruning, ids, ran, name))
        for name, pruning in {DENSE: Pruning(), **schedules}.items()
    }
    times = in_turn(contestants, options.rounds, f"pruned prefill of {n} tokens, {place}")
    dense, goals = Pruning().flops(llm.config, n), options.goals(place)
    goal = goals.pruned if n >= goals.pruned_tokens else None
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
        rows.append(Row(name, figures, {EFFICIENCY: goal}, keys))
    return rows


def by_arithmetic(options: Options, place: Place) -> Section:
    """One schedule for products of each type, with weights as stored and rounded to 8 and 4 bits."""
    n = min(BY_ARITHMETIC, max(options.fitting_tokens))
    ids, pruning = options.prompt(n), Pruning.for_speedup(2.0, options.config, n, "paper")
    c = options.config
    in_blocks = all(width % BLOCK == 0 for width in (c.hidden, c.n_heads * c.head_dim, c.ffn))
    computes = [name for name in ("f32", "bf16", "int8") if name == "f32" or _core.features()[name]]
    models = {
        f"compute {compute}, weights {weights}": load(
            options.folder, threads=place.threads or None, compute=compute, weights=weights
        )
        for compute in computes
        for weights in (("auto", "q8", "q4") if in_blocks else ("auto",))
    }
    ran: dict[str, Session] = {}
    contestants = {}
    for name, llm in models.items():
        contestants[f"{name}, {DENSE}"] = timed(prefill(llm, Pruning(), ids, ran, DENSE))
        contestants[name] = timed(prefill(llm, pruning, ids, ran, name))
    times = in_turn(contestants, options.rounds, f"pruned prefill by arithmetic, {place}")
    goal = PRUNED_BY_ARITHMETIC if n >= options.goals(place).pruned_tokens else None
    rows = []
    for name, llm in models.items():
        dense, short = times[f"{name}, {DENSE}"], times[name]
        counted = Pruning().flops(llm.config, n) / pruning.pass_flops(llm.config, ran[name].last_pass)
        measured = dense.median / short.median
        figures: dict[str, Figure] = {
            DENSE: dense,
            "pruned": short,
            "measured": measured,
            "counted": counted,
            EFFICIENCY: measured / counted,
        }
        rows.append(Row(name, figures, {EFFICIENCY: goal}, {"tokens": n, **place.keys}))
    notes = [] if in_blocks else [f"Rows are no whole blocks of {BLOCK}: no weights in 8 and 4 bits."]
    title = f"{pruning} by arithmetic, prefill of {n} tokens, {options.config.name}, {place}"
    return Section(SUITE, title, rows, ("All in one process, in turn.", *notes))
