"""Suite `prefill`: the dense model from token ids to the last token's logits, beside its peers."""

from __future__ import annotations

from collections.abc import Iterator

from lazyllm.bench import goals
from lazyllm.bench.ceilings import Ceilings
from lazyllm.bench.engines import LLAMA_CPP_F16, OURS, TRANSFORMERS_F32, Engines
from lazyllm.bench.goals import Goal
from lazyllm.bench.options import Options
from lazyllm.bench.report import Figure, Row, Table, on_threads
from lazyllm.bench.rounds import Times, in_turn, timed
from lazyllm.pruning import Pruning

SUITE = "prefill"
KEEP_ALL = "lazyllm, keeps of 1"
GOAL_TOKENS = range(1024, 4097)
PEER_GOALS = {TRANSFORMERS_F32: goals.PREFILL_TRANSFORMERS, LLAMA_CPP_F16: goals.PREFILL_LLAMA_CPP}
SHARE, RATIO = "of ceiling", "time / ours"
GIGA = 1e9


def prefill(options: Options) -> Iterator[Table]:
    for threads in options.threads:
        ceilings = Ceilings(threads)
        lengths = options.fitting_tokens
        with Engines(options, threads, max(lengths, default=1)) as engines:
            for n in lengths:
                notes = (*engines.notes, *options.too_long)
                title = f"Dense prefill of {n} tokens, {options.config.name}, {on_threads(threads)}"
                yield Table(SUITE, title, rows(options, engines, ceilings, n, threads), notes)


def rows(options: Options, engines: Engines, ceilings: Ceilings, n: int, threads: int) -> list[Row]:
    llm, ids = engines.llm, options.prompt(n)
    layers = llm.config.n_layers
    keep_all = Pruning({layers // 3: 1.0, 2 * layers // 3: 1.0})
    contestants = {
        **ceilings.compute,
        OURS: timed(lambda: llm.session().forward(ids, progress=False)),
        KEEP_ALL: timed(lambda: llm.session(keep_all).forward(ids, progress=False)),
        **{name: peer.seconds("prefill", ids) for name, peer in engines.peers.items()},
    }
    times = in_turn(contestants, options.rounds, f"prefill of {n} tokens, {on_threads(threads)}")
    ceiling, work = ceilings.flops(times), Pruning().flops(llm.config, n)
    return [
        row(
            name,
            times,
            ceiling,
            work,
            {"engine": name, "tokens": n, "threads": threads},
            options.model is None,
        )
        for name in (OURS, KEEP_ALL, *engines.peers)
    ]


def row(
    name: str,
    times: dict[str, Times],
    ceiling: float,
    work: int,
    keys: dict[str, str | int],
    in_scope: bool,  # the goals are for the demonstration model
) -> Row:
    seconds = times[name].median
    figures: dict[str, Figure] = {
        "time": times[name],
        "GFLOP/s": work / seconds / GIGA,
        SHARE: work / seconds / ceiling,
    }
    if name != OURS:
        figures[RATIO] = seconds / times[OURS].median
    wanted: dict[str, Goal] = {}
    if in_scope and keys["tokens"] in GOAL_TOKENS:
        wanted = {OURS: {SHARE: goals.PREFILL}, KEEP_ALL: {RATIO: goals.KEEP_ALL}}.get(name, {})
        if name in PEER_GOALS:
            wanted = {RATIO: PEER_GOALS[name]}
    return Row(name, figures, wanted, keys)
