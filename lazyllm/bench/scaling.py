"""Suite `scaling`: one thread beside two."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lazyllm.bench import goals
from lazyllm.bench.decode import STEPS, steps
from lazyllm.bench.options import Options
from lazyllm.bench.place import Place
from lazyllm.bench.report import Figure, Row, Table
from lazyllm.bench.rounds import Contestant, in_turn, timed
from lazyllm.llm import LLM

SUITE = "scaling"
TOKENS = 2048
RATIO = "one / two"


def scaling(options: Options) -> Iterator[Table]:
    title = f"1 thread and 2, {options.config.name}"
    if Place().load(options.folder).threads == 1:
        yield Table(SUITE, title, [], ("There is only one core: nothing to compare.",))
        return
    llms = {
        "1 thread": Place(1).load(options.folder),
        "2 threads": Place(2).load(options.folder),
    }
    n = min(
        options.tokens[0] if options.quick else TOKENS, options.config.context - STEPS * (options.rounds + 1)
    )
    kinds: dict[str, Callable[[LLM], Contestant]] = {
        f"prefill of {n} tokens": lambda llm: prefill_of(llm, options.prompt(n)),
        f"decode after {n} tokens": lambda llm: decode_after(llm, options.prompt(n), options.prompt(STEPS)),
    }
    rows = []
    for label, make in kinds.items():
        times = in_turn({name: make(llm) for name, llm in llms.items()}, options.rounds, label)
        one, two = times.values()
        figures: dict[str, Figure] = {**times, RATIO: one.median / two.median}
        rows.append(Row(label, figures, {RATIO: goals.SCALING}, {"threads": 2}))
    yield Table(SUITE, title, rows)


def prefill_of(llm: LLM, ids: list[int]) -> Contestant:
    return timed(lambda: llm.session().forward(ids, progress=False))


def decode_after(llm: LLM, ids: list[int], new: list[int]) -> Contestant:
    session = llm.session()
    session.forward(ids, progress=False)
    return steps(session, new)
