"""Suite `prefill`: dense prefill, from token ids to the logits of the last one, against the peers."""

from collections.abc import Iterator

from benchmarks.measuring.ceilings import GIGA, Ceilings
from benchmarks.measuring.goals import Goal
from benchmarks.measuring.place import Place
from benchmarks.measuring.report import Figure, Row, Section
from benchmarks.measuring.rounds import Contestant, in_turn, timed
from benchmarks.options import Options
from benchmarks.peers.engines import OURS, Engines, start_engines
from lazyllm.llm import LLM
from lazyllm.pruning import Pruning
from lazyllm.session import Session

KEEP_ALL = "lazyllm, keeps of 1"
SHARE, RATIO = "of ceiling", "time / ours"


def prefill(options: Options) -> Iterator[Section]:
    for place in options.places:
        ceilings = Ceilings(place)
        lengths = options.fitting_tokens
        with start_engines(options, place, max(lengths, default=1)) as engines:
            for n in lengths:
                title = f"Dense prefill of {n} tokens, {options.config.name}, {place}"
                notes = (*engines.notes, *options.too_long)
                ceilings.begin_table()
                yield Section(title, measured(options, engines, ceilings, n, place), notes)


def read(llm: LLM, ids: list[int], pruning: Pruning | None = None) -> Session:
    """A session that has read these tokens."""
    session = llm.session(pruning)
    session.forward(ids, progress=False)
    return session


def prefill_of(llm: LLM, ids: list[int], pruning: Pruning | None = None) -> Contestant:
    return timed(lambda: read(llm, ids, pruning))


def measured(options: Options, engines: Engines, ceilings: Ceilings, n: int, place: Place) -> list[Row]:
    llm, ids = engines.llm, options.prompt(n)
    layers = llm.config.n_layers
    contestants = {
        **ceilings.compute,
        **{name: prefill_of(ours, ids) for name, ours in engines.ours.items()},
        KEEP_ALL: prefill_of(llm, ids, Pruning({layers // 3: 1.0, 2 * layers // 3: 1.0})),
        **{name: peer.seconds("prefill", ids) for name, peer in engines.peers.items()},
    }
    times = in_turn(contestants, options.rounds, f"prefill of {n} tokens, {place}")
    ceiling, work, goals = ceilings.flops(times), Pruning().flops(llm.config, n), options.goals(place)
    rows = []
    for name in (*engines.ours, KEEP_ALL, *engines.peers):
        seconds = times[name].median
        figures: dict[str, Figure] = {
            "time": times[name],
            "GFLOP/s": work / seconds / GIGA,
            SHARE: work / seconds / ceiling,
        }
        if name not in engines.ours:
            figures[RATIO] = seconds / times[engines.like(name)].median
        judged: dict[str, Goal | None] = {}
        if n in goals.prefill_tokens:
            special = {OURS: {SHARE: goals.prefill}, KEEP_ALL: {RATIO: goals.keep_all}}
            judged = special.get(name, {RATIO: goals.prefill_peers.get(name)})
        rows.append(Row(name, figures, judged, {"engine": name, "tokens": n, **place.keys}))
    return rows
