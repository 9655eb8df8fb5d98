"""Suite `scaling`: one thread against two."""

from collections.abc import Callable, Iterator

from benchmarks.measuring import goals
from benchmarks.measuring.place import Place
from benchmarks.measuring.report import Figure, Row, Section
from benchmarks.measuring.rounds import Contestant, in_turn
from benchmarks.options import Options
from benchmarks.suites.decode import STEPS, steps
from benchmarks.suites.prefill import prefill_of, read
from lazyllm.llm import LLM

TOKENS = 2048
RATIO = "one / two"


def scaling(options: Options) -> Iterator[Section]:
    title = f"1 thread and 2, {options.config.name}"
    if Place().load(options.folder).threads == 1:
        yield Section(title, [], ("There is only one core: nothing to compare.",))
        return
    llms = {"1 thread": Place(1).load(options.folder), "2 threads": Place(2).load(options.folder)}
    room = options.config.context - STEPS * (options.rounds + 1)
    n = min(options.tokens[0] if options.quick else TOKENS, room)
    kinds: dict[str, Callable[[LLM], Contestant]] = {
        f"prefill of {n} tokens": lambda llm: prefill_of(llm, options.prompt(n)),
        f"decode after {n} tokens": lambda llm: steps(read(llm, options.prompt(n)), options.prompt(STEPS)),
    }
    rows = []
    for label, make in kinds.items():
        times = in_turn({name: make(llm) for name, llm in llms.items()}, options.rounds, label)
        one, two = times.values()
        figures: dict[str, Figure] = {**times, RATIO: one.median / two.median}
        rows.append(Row(label, figures, {RATIO: goals.SCALING if n >= TOKENS else None}, {"threads": 2}))
    yield Section(title, rows)
