"""Suite `prefill`: the dense model from token ids to the last token's logits, beside its peers."""

from __future__ import annotations

from collections.abc import Iterator

from lazyllm.bench.ceilings import Ceilings
from lazyllm.bench.engines import OURS, Engines
from lazyllm.bench.goals import Goal, Goals, wanted
from lazyllm.bench.options import Options
from lazyllm.bench.place import Place
from lazyllm.bench.report import Figure, Row, Table
from lazyllm.bench.rounds import Times, in_turn, timed
from lazyllm.pruning import Pruning

SUITE = "prefill"
KEEP_ALL = "lazyllm, keeps of 1"
SHARE, RATIO = "of ceiling", "time / ours"
GIGA = 1e9


def prefill(options: Options) -> Iterator[Table]:
    for place in options.places:
        ceilings = Ceilings(place)
        lengths = options.fitting_tokens
        with Engines(options, place, max(lengths, default=1)) as engines:
            for n in lengths:
                notes = (*engines.notes, *options.too_long)
                title = f"Dense prefill of {n} tokens, {options.config.name}, {place}"
                yield Table(SUITE, title, rows(options, engines, ceilings, n, place), notes)


def rows(options: Options, engines: Engines, ceilings: Ceilings, n: int, place: Place) -> list[Row]:
    llm, ids = engines.llm, options.prompt(n)
    layers = llm.config.n_layers
    keep_all = Pruning({layers // 3: 1.0, 2 * layers // 3: 1.0})
    contestants = {
        **ceilings.compute,
        OURS: timed(lambda: llm.session().forward(ids, progress=False)),
        KEEP_ALL: timed(lambda: llm.session(keep_all).forward(ids, progress=False)),
        **{name: peer.seconds("prefill", ids) for name, peer in engines.peers.items()},
    }
    times = in_turn(contestants, options.rounds, f"prefill of {n} tokens, {place}")
    ceiling, work = ceilings.flops(times), Pruning().flops(llm.config, n)
    return [
        row(
            name,
            times,
            ceiling,
            work,
            {"engine": name, "tokens": n, **place.keys},
            options.goals(place),
        )
        for name in (OURS, KEEP_ALL, *engines.peers)
    ]


def row(
    name: str,
    times: dict[str, Times],
    ceiling: float,
    work: int,
    keys: dict[str, str | int],
    goals: Goals,
) -> Row:
    seconds = times[name].median
    figures: dict[str, Figure] = {
        "time": times[name],
        "GFLOP/s": work / seconds / GIGA,
        SHARE: work / seconds / ceiling,
    }
    if name != OURS:
        figures[RATIO] = seconds / times[OURS].median
    in_scope: dict[str, Goal | None] = {}
    if keys["tokens"] in goals.prefill_tokens:
        of_ours = {OURS: {SHARE: goals.prefill}, KEEP_ALL: {RATIO: goals.keep_all}}
        in_scope = of_ours.get(name, {RATIO: goals.prefill_peers.get(name)})
    return Row(name, figures, wanted(in_scope), keys)
