"""Suite `pruned`: the speedup of the first token by pruning, measured against counted operations."""

from collections.abc import Iterator

from benchmarks.measuring.goals import PRUNED_BY_ARITHMETIC
from benchmarks.measuring.place import Place
from benchmarks.measuring.report import Figure, Row, Section
from benchmarks.measuring.rounds import Contestant, Times, in_turn, timed
from benchmarks.options import Options
from benchmarks.suites.decode import arithmetics
from benchmarks.suites.prefill import prefill_of, read
from lazyllm import Mass, Pruning
from lazyllm.llm import LLM
from lazyllm.session import Session

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
            yield Section(title, rows, (*notes, *options.too_long))
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
    schedules["by mass"] = Pruning({layers // 4: Mass(0.95, keep_min=0.3), layers // 2: Mass(0.9, keep_min=0.1)})
    return schedules, notes


def keeping(llm: LLM, pruning: Pruning, ids: list[int], ran: dict[str, Session], name: str) -> Contestant:
    """A prefill whose session is kept under its name."""

    def run() -> None:
        ran[name] = read(llm, ids, pruning)

    return timed(run)


def figures_of(llm: LLM, pruning: Pruning, session: Session, dense: Times, times: Times) -> dict[str, Figure]:
    measured = dense.median / times.median
    counted = Pruning().flops(llm.config, session.length) / pruning.pass_flops(llm.config, session.last_pass)
    return {"measured": measured, "counted": counted, EFFICIENCY: measured / counted}


def rows_of(options: Options, llm: LLM, schedules: dict[str, Pruning], n: int, place: Place) -> list[Row]:
    ids = options.prompt(n)
    ran: dict[str, Session] = {}
    contestants = {
        name: keeping(llm, pruning, ids, ran, name) for name, pruning in {DENSE: Pruning(), **schedules}.items()
    }
    times = in_turn(contestants, options.rounds, f"pruned prefill of {n} tokens, {place}")
    goals = options.goals(place)
    goal = goals.pruned if n >= goals.pruned_tokens else None
    rows = [Row(DENSE, {"time": times[DENSE]})]
    for name, pruning in schedules.items():
        figures = figures_of(llm, pruning, ran[name], times[DENSE], times[name])
        figures = {"time": times[name], **figures, "schedule": str(pruning)}
        rows.append(Row(name, figures, {EFFICIENCY: goal}, {"schedule": name, "tokens": n, **place.keys}))
    return rows


def by_arithmetic(options: Options, place: Place) -> Section:
    """One schedule for products of each type, with weights as stored and rounded to 8 and 4 bits."""
    n = min(BY_ARITHMETIC, max(options.fitting_tokens))
    ids, pruning = options.prompt(n), Pruning.for_speedup(2.0, options.config, n, "paper")
    c = options.config
    in_blocks = all(width % BLOCK == 0 for width in (c.hidden, c.n_heads * c.head_dim, c.ffn))
    models = {
        f"compute {compute}, weights {weights}": place.load(options.folder, compute=compute, weights=weights)
        for compute in arithmetics("f32", "bf16", "int8")
        for weights in (("auto", "q8", "q4") if in_blocks else ("auto",))
    }
    ran: dict[str, Session] = {}
    contestants = {}
    for name, llm in models.items():
        contestants[f"{name}, {DENSE}"] = prefill_of(llm, ids)
        contestants[name] = keeping(llm, pruning, ids, ran, name)
    times = in_turn(contestants, options.rounds, f"pruned prefill by arithmetic, {place}")
    goal = PRUNED_BY_ARITHMETIC if n >= options.goals(place).pruned_tokens else None
    rows = []
    for name, llm in models.items():
        dense = times[f"{name}, {DENSE}"]
        figures = figures_of(llm, pruning, ran[name], dense, times[name])
        figures = {DENSE: dense, "pruned": times[name], **figures}
        rows.append(Row(name, figures, {EFFICIENCY: goal}, {"tokens": n, **place.keys}))
    notes = [] if in_blocks else [f"Rows are no whole blocks of {BLOCK}: no weights in 8 and 4 bits."]
    title = f"{pruning} by arithmetic, prefill of {n} tokens, {options.config.name}, {place}"
    return Section(title, rows, ("All in one process, in turn.", *notes))
