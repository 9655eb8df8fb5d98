"""Suite `decode`: a decode step after a long context: peers, the read ceiling, types of K and V, revival."""

from collections.abc import Callable, Iterator

import numpy as np

from benchmarks.measuring.ceilings import GIGA, Ceilings
from benchmarks.measuring.goals import Goals
from benchmarks.measuring.place import Place
from benchmarks.measuring.report import Figure, Row, Section
from benchmarks.measuring.rounds import Contestant, in_turn, timed
from benchmarks.options import Options
from benchmarks.peers.engines import Engines, start_engines
from benchmarks.suites.prefill import prefill_of, read
from lazyllm import _core
from lazyllm.llm import LLM
from lazyllm.pruning import Pruning
from lazyllm.session import Session

STEPS = 8  # decode steps of one turn
REVIVED = (0, 4, 16, 64)
KEPT_SHARE = 8  # one context token in eight is kept by the prefill
MIN_CONTEXT = 2 * REVIVED[-1]
SHARE, RATIO, BOUND = "of read ceiling", "time / ours", "time / bound"
OVER_NONE = "time / none revived"
WIDTHS = {"F32": 4, "F16": 2, "BF16": 2}
KV = ("f32", "bf16", "f16")
PREFILL_TOKENS = 2048
MIB = 1 << 20


def decode(options: Options) -> Iterator[Section]:
    length = options.context + STEPS * (options.rounds + 1)
    if length > options.config.context:
        raise ValueError(
            f"{options.context} tokens and {options.rounds + 1} rounds of {STEPS} steps make {length}; the "
            f"model's context is {options.config.context}: give a smaller --context"
        )
    if options.context < MIN_CONTEXT:
        raise ValueError(f"context is {options.context}; the suite needs at least {MIN_CONTEXT}")
    for place in options.places:
        ceilings = Ceilings(place)
        with start_engines(options, place, length) as engines:
            title = f"Decode after {options.context} tokens, {options.config.name}, {place}"
            rows = against_peers(options, engines, ceilings, place)
            yield Section(title, rows, tuple(engines.notes))
        if place.on_cpu:
            yield by_kv(options, ceilings, place)
        ceilings.begin_table()
        yield revived(options, engines.llm, ceilings, place)


def step_bytes(llm: LLM, last_pass: np.ndarray) -> int:
    """Bytes that a decode step reads: all weights but an untied embedding, and the KV cache in play."""
    embedding = next(tensor for tensor in llm.checkpoint.tensors if tensor[0].endswith("embed_tokens.weight"))
    weights = llm.core.bytes - (0 if llm.config.tied else embedding[5])
    row = 2 * llm.config.n_kv_heads * llm.config.head_dim * WIDTHS[llm.core.kv]
    return weights + row * int(last_pass[:, 0].sum())


def arithmetics(*names: str) -> list[str]:
    """The arithmetics of products that this processor has."""
    return [name for name in names if name == "f32" or _core.features()[name]]


def steps(session: Session, ids: list[int]) -> Contestant:
    """Mean seconds of a decode step, one step per token."""

    def run() -> None:
        for token in ids:
            session.forward([token], generated=True, progress=False)

    seconds = timed(run)
    return lambda: seconds() / len(ids)


def peer_steps(seconds: Callable[[], float]) -> Contestant:
    return lambda: seconds() / STEPS


def against_peers(options: Options, engines: Engines, ceilings: Ceilings, place: Place) -> list[Row]:
    ids, new = options.prompt(options.context), options.prompt(STEPS)
    sessions = {name: read(llm, ids) for name, llm in engines.ours.items()}
    for peer in engines.peers.values():
        peer.call("prefill", ids)
    contestants = {
        **ceilings.both,
        **{name: steps(session, new) for name, session in sessions.items()},
        **{name: peer_steps(peer.seconds("decode", new)) for name, peer in engines.peers.items()},
    }
    times = in_turn(contestants, options.rounds, f"decode, {place}")
    keys: dict[str, str | int] = {"tokens": options.context, **place.keys}
    goals, rows = decode_goals(options, place), []
    for name, session in sessions.items():
        seconds, last, llm = times[name].median, session.last_pass, engines.ours[name]
        n_bytes, work = step_bytes(llm, last), Pruning().pass_flops(llm.config, last, generated=True)
        figures: dict[str, Figure] = {
            "time of a token": times[name],
            "GB/s": n_bytes / seconds / GIGA,
            SHARE: n_bytes / seconds / ceilings.bandwidth(times),
            BOUND: seconds / ceilings.bound(times, work, n_bytes),
        }
        rows.append(Row(name, figures, {SHARE: goals.decode_bandwidth}, {"engine": name, **keys}))
    for name in engines.peers:
        ratio = times[name].median / times[engines.like(name)].median
        theirs: dict[str, Figure] = {"time of a token": times[name], RATIO: ratio}
        rows.append(Row(name, theirs, {RATIO: goals.decode_peers.get(name)}, {"engine": name, **keys}))
    return rows


def decode_goals(options: Options, place: Place) -> Goals:
    goals = options.goals(place)
    return goals if options.context >= goals.decode_context else Goals()


def by_kv(options: Options, ceilings: Ceilings, place: Place) -> Section:
    """A prefill, and a decode step after the context, with K and V of each type, in f32 and bf16."""
    ids, new = options.prompt(options.context), options.prompt(STEPS)
    n = min(PREFILL_TOKENS, options.context)
    models = {
        f"compute {compute}, kv {kv}": place.load(options.folder, compute=compute, kv=kv)
        for compute in arithmetics("f32", "bf16")
        for kv in KV
    }
    sessions = {name: read(llm, ids) for name, llm in models.items()}
    prefills = {name: prefill_of(llm, ids[:n]) for name, llm in models.items()}
    decodes = {name: steps(session, new) for name, session in sessions.items()}
    reading = in_turn(prefills, options.rounds, f"prefill by kv, {place}")
    writing = in_turn({**ceilings.both, **decodes}, options.rounds, f"decode by kv, {place}")
    rows = []
    for name, llm in models.items():
        session, step, exact = sessions[name], writing[name], name.removesuffix(llm.kv) + KV[0]
        share = step_bytes(llm, session.last_pass) / step.median / ceilings.bandwidth(writing)
        figures: dict[str, Figure] = {
            f"prefill of {n}": reading[name],
            "prefill / kv f32": reading[name].median / reading[exact].median,
            "decode step": step,
            "step / kv f32": step.median / writing[exact].median,
            SHARE: share,
            "MiB of a session": session.core.bytes_for(options.context) / MIB,
        }
        rows.append(Row(name, figures, {}, {"tokens": options.context, **place.keys}))
    title = f"K and V by type, {options.context} tokens, {options.config.name}, {place}"
    return Section(title, rows, ("All in one process, in turn.",))


def revived(options: Options, llm: LLM, ceilings: Ceilings, place: Place) -> Section:
    """The first decode step after a prefill that keeps protected tokens only: every other one is revived."""
    ids = options.prompt(options.context)
    sessions: dict[str, Session] = {}
    prunings = {f"{r} revived": reviving(len(ids), r) for r in REVIVED}

    def one_step(name: str, pruning: Pruning) -> Contestant:
        def run() -> float:
            sessions[name] = read(llm, ids, pruning)
            return steps(sessions[name], ids[:1])()

        return run

    contestants = {name: one_step(name, pruning) for name, pruning in prunings.items()}
    times = in_turn({**ceilings.both, **contestants}, options.rounds, f"revival, {place}")
    rows, goals = [], decode_goals(options, place)
    for name, pruning in prunings.items():
        last = sessions[name].last_pass
        n_bytes, work = step_bytes(llm, last), pruning.pass_flops(llm.config, last, generated=True, n_prompt=len(ids))
        figures: dict[str, Figure] = {
            "revived, counted": float(last[:, 2].sum()),
            "computed in the last layer": float(last[-1, 1]),
            "in play there": float(last[-1, 0]),
            "time of the step": times[name],
            BOUND: times[name].median / ceilings.bound(times, work, n_bytes),
        }
        if not place.on_cpu:
            figures[OVER_NONE] = times[name].median / times[next(iter(prunings))].median
        judged = {BOUND: goals.revival, OVER_NONE: goals.revival_over_none}
        rows.append(Row(name, figures, judged, {"tokens": len(ids), **place.keys}))
    note = (
        f"The prefill keeps one token in {KEPT_SHARE} after layer 0. The first step of a new session then "
        "revives this many more, which are computed in every later layer."
    )
    return Section(f"A decode step that revives, {place}", rows, (note,))


def reviving(n: int, r: int) -> Pruning:
    """The prefill keeps protected tokens only, the first ones and the last; decode adds the best r others."""
    first = max(1, n // KEPT_SHARE)

    def keep(count: int) -> float:
        return (count - 0.5) / n  # the engine rounds up to count

    return Pruning({0: keep(first + 1)}, decode={0: keep(first + 1 + r)}, protect=[(0, first), (n - 1, n)])
