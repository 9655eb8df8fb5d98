"""Suite `decode`: a token after a long context, beside peers and the memory's bandwidth; revived tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from lazyllm.bench import goals
from lazyllm.bench.ceilings import Ceilings
from lazyllm.bench.engines import LLAMA_CPP_F16, OURS, TRANSFORMERS_F32, Engines
from lazyllm.bench.goals import Goal
from lazyllm.bench.options import Options
from lazyllm.bench.report import Figure, Row, Table, on_threads
from lazyllm.bench.rounds import Contestant, in_turn, timed
from lazyllm.llm import LLM
from lazyllm.memory import FLOAT_BYTES
from lazyllm.pruning import Pruning
from lazyllm.session import Session

SUITE = "decode"
STEPS = 8  # of one turn
REVIVED = (0, 4, 16, 64)
KEPT_SHARE = 8  # of the context, one part in so many stays in play beside the revived
GOAL_CONTEXT = 4096  # the goals beside peers are for the demonstration model after as many tokens
LEAST_CONTEXT = 2 * REVIVED[-1]
PEER_GOALS = {TRANSFORMERS_F32: goals.DECODE_TRANSFORMERS, LLAMA_CPP_F16: goals.DECODE_LLAMA_CPP}
SHARE, RATIO, BOUND = "of read ceiling", "time / ours", "time / bound"
GIGA = 1e9


def decode(options: Options) -> Iterator[Table]:
    length = options.context + STEPS * (options.rounds + 1)
    if length > options.config.context:
        raise ValueError(
            f"{options.context} tokens and {options.rounds + 1} rounds of {STEPS} steps make {length}; the "
            f"model's context is {options.config.context}: give a smaller --context"
        )
    if options.context < LEAST_CONTEXT:
        raise ValueError(f"context is {options.context}; the suite needs at least {LEAST_CONTEXT}")
    for threads in options.threads:
        ceilings = Ceilings(threads)
        with Engines(options, threads, length) as engines:
            title = f"Decode after {options.context} tokens, {options.config.name}, {on_threads(threads)}"
            yield Table(SUITE, title, beside_peers(options, engines, ceilings, threads), tuple(engines.notes))
        yield revived(options, engines.llm, ceilings, threads)


def step_bytes(llm: LLM, last_pass: np.ndarray) -> int:
    """What a decode step must read: all weights used but the embedding, K and V of the tokens in play."""
    embedding = next(tensor for tensor in llm.checkpoint.tensors if tensor[0].endswith("embed_tokens.weight"))
    weights = llm.core.bytes - (0 if llm.config.tied else embedding[5])
    row = 2 * llm.config.n_kv_heads * llm.config.head_dim * FLOAT_BYTES
    return weights + row * int(last_pass[:, 0].sum())


def steps(session: Session, ids: list[int]) -> Contestant:
    """Seconds of a step, over one for each of these tokens."""

    def run() -> None:
        for token in ids:
            session.forward([token], generated=True, progress=False)

    seconds = timed(run)
    return lambda: seconds() / len(ids)


def peer_steps(seconds: Callable[[], float]) -> Contestant:
    return lambda: seconds() / STEPS


def beside_peers(options: Options, engines: Engines, ceilings: Ceilings, threads: int) -> list[Row]:
    llm, ids, new = engines.llm, options.prompt(options.context), options.prompt(STEPS)
    session = llm.session()
    session.forward(ids)
    for peer in engines.peers.values():
        peer.call("prefill", ids)
    contestants = {
        **ceilings.both,
        OURS: steps(session, new),
        **{name: peer_steps(peer.seconds("decode", new)) for name, peer in engines.peers.items()},
    }
    times = in_turn(contestants, options.rounds, f"decode, {on_threads(threads)}")
    ours, n_bytes = times[OURS].median, step_bytes(llm, session.last_pass)
    work = Pruning().pass_flops(llm.config, session.last_pass, generated=True)
    figures: dict[str, Figure] = {
        "time of a token": times[OURS],
        "GB/s": n_bytes / ours / GIGA,
        SHARE: n_bytes / ours / ceilings.bandwidth(times),
        BOUND: ours / ceilings.bound(times, work, n_bytes),
    }
    keys: dict[str, str | int] = {"tokens": options.context, "threads": threads}
    rows = [Row(OURS, figures, {SHARE: goals.DECODE_BANDWIDTH}, {"engine": OURS, **keys})]
    in_scope = options.model is None and options.context >= GOAL_CONTEXT
    for name in engines.peers:
        theirs: dict[str, Figure] = {"time of a token": times[name], RATIO: times[name].median / ours}
        wanted: dict[str, Goal] = {RATIO: PEER_GOALS[name]} if in_scope else {}
        rows.append(Row(name, theirs, wanted, {"engine": name, **keys}))
    return rows


# ---- revived tokens ------------------------------------------------------------------------------


def revived(options: Options, llm: LLM, ceilings: Ceilings, threads: int) -> Table:
    """The first step after a prefill that kept only protected tokens: all that it adds must be revived."""
    ids = options.prompt(options.context)
    sessions: dict[str, Session] = {}
    prunings = {f"{r} revived": reviving(len(ids), r) for r in REVIVED}

    def one_step(name: str, pruning: Pruning) -> Contestant:
        def run() -> float:
            sessions[name] = session = llm.session(pruning)
            session.forward(ids, progress=False)
            return steps(session, ids[:1])()

        return run

    contestants = {name: one_step(name, pruning) for name, pruning in prunings.items()}
    times = in_turn({**ceilings.both, **contestants}, options.rounds, f"revival, {on_threads(threads)}")
    rows = []
    for name, pruning in prunings.items():
        last = sessions[name].last_pass
        n_bytes, work = step_bytes(llm, last), pruning.pass_flops(llm.config, last, generated=True)
        figures: dict[str, Figure] = {
            "revived, counted": float(last[:, 2].sum()),
            "computed in the last layer": float(last[-1, 1]),
            "in play there": float(last[-1, 0]),
            "time of the step": times[name],
            BOUND: times[name].median / ceilings.bound(times, work, n_bytes),
        }
        wanted: dict[str, Goal] = {BOUND: goals.REVIVAL}
        rows.append(Row(name, figures, wanted, {"tokens": len(ids), "threads": threads}))
    note = (
        f"Prefill keeps one token in {KEPT_SHARE} after layer 0; the step brings so many more into play, "
        "which are computed in every layer above. Each is the first step of a new session."
    )
    return Table(SUITE, f"A decode step that revives, {on_threads(threads)}", rows, (note,))


def reviving(n: int, r: int) -> Pruning:
    """Keeps protected tokens alone, the first ones and the last; the first step adds the best r others."""
    first = max(1, n // KEPT_SHARE)

    def keep(count: int) -> float:
        return (count - 0.5) / n  # rounded up to count

    return Pruning({0: keep(first + 1)}, decode={0: keep(first + 1 + r)}, protect=[(0, first), (n - 1, n)])
