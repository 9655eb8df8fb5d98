"""Suite `sessions`: time and memory of forks, a second question, and many questions on one document."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.measuring import goals
from benchmarks.measuring.place import Place
from benchmarks.measuring.process import Process
from benchmarks.measuring.report import Figure, Row, Section
from benchmarks.measuring.rounds import Contestant, Times, in_turn, timed
from benchmarks.options import Options
from benchmarks.suites.memory import bytes_in
from benchmarks.suites.prefill import read
from lazyllm.llm import LLM
from lazyllm.session import Session

SPARE = 192  # tokens of the model's context that are left for questions and answers
QUESTION, ANSWER = 32, 32  # tokens
FORKS = 10
MANY = 8000  # tokens; a fork of fewer is not judged
ROLLUP, DESCRIPTORS = Path("/proc/self/smaps_rollup"), Path("/proc/self/fd")
SHARED_FILE = "memfd:lazyllm"
MIB = 1 << 20
FIRST_MS, MS, RATIO = "first fork, ms", "later fork, ms", "memory of all / of one"
OVER_RESERVED, OVER_OWN = "time / room reserved before", "time / one prefill and ten answers"


def sessions(options: Options) -> Iterator[Section]:
    place = options.widest
    fitting = options.config.context - SPARE
    if fitting < 1:
        raise ValueError(f"the model's context is {fitting + SPARE}; the suite needs more than {SPARE}")
    longest = min(max(options.tokens), fitting)
    yield forks(options, place, longest)
    llm = place.load(options.folder)
    yield second_question(options, place, llm, longest * 3 // 4)
    yield one_document(options, place, llm, min(options.context, fitting))


def question(options: Options, number: int = 0) -> list[int]:
    return options.prompt(QUESTION + number)[number:]


class Probe:
    """A session in a process of its own, so that nobody else's memory is counted."""

    def __init__(self, folder: Path, threads: int, prompt: list[int]) -> None:
        llm = Place(threads).load(folder)
        read(llm, prompt[:QUESTION])  # maps the weights
        before = physical()
        self._session = read(llm, prompt)
        self.bytes_of_one = physical() - before
        self._forks: list[Session] = []

    def fork(self) -> float:
        """Seconds of one fork, which ends afterwards."""
        started = time.perf_counter()
        fork = self._session.fork()
        seconds = time.perf_counter() - started
        del fork
        return seconds

    def memory(self, ids: list[int], n_new: int) -> tuple[int, int, int]:
        """Bytes of one session; of it and ten forks; and when each of these has answered a question."""
        before = physical() - self.bytes_of_one
        self._forks = [self._session.fork() for _ in range(FORKS)]
        idle = physical() - before
        for fork in self._forks:
            fork.ask(ids, max_new_tokens=n_new)
        return self.bytes_of_one, idle, physical() - before


def physical() -> int:
    """Bytes that this process and the files of its sessions take, those pages included that nobody maps."""
    return bytes_in(ROLLUP, "Pss_Anon") + sum(map(file_bytes, DESCRIPTORS.iterdir()))


def file_bytes(descriptor: Path) -> int:
    try:
        return os.stat(descriptor).st_blocks * 512 if SHARED_FILE in os.readlink(descriptor) else 0
    except OSError:  # the descriptor by which the folder was read
        return 0


def forks(options: Options, place: Place, n: int) -> Section:
    prompt = options.prompt(n)
    with Process(Probe, options.folder, place.threads, prompt, environment={}) as probe:
        first = float(probe.call("fork"))  # moves the session into memory that can be shared
        times = in_turn({"fork": probe.seconds("fork")}, options.rounds, f"forks of {n} tokens")["fork"]
        one, idle, answered = probe.call("memory", question(options), ANSWER)
    keys: dict[str, str | int] = {"tokens": n, **place.keys}
    judged = {MS: goals.FORK, RATIO: goals.FORKS} if n >= MANY else {}
    rows = [Row("one session", {FIRST_MS: first * 1e3, "MiB": one / MIB}, {}, keys)]
    for label, taken in ((f"and {FORKS} forks", idle), ("which have answered", answered)):
        figures: dict[str, Figure] = {MS: times.median * 1e3, "MiB": taken / MIB, RATIO: taken / one}
        rows.append(Row(label, figures, judged if taken == idle else {}, keys))
    notes = (
        f"A later fork: {times}. Memory is that of a process of its own, without weights, with shared files.",
        f"Those that have answered have read {QUESTION} tokens more and generated {ANSWER} each.",
    )
    return Section(f"Forks of a session of {n} tokens, {options.config.name}, {place}", rows, notes)


def second_question(options: Options, place: Place, llm: LLM, n: int) -> Section:
    ids = question(options)
    with TemporaryDirectory() as folder:
        saved = Path(folder) / "session"
        read(llm, options.prompt(n)).save(saved, progress=False)

        def contestant(prepare: Callable[[Session], object]) -> Contestant:
            def run() -> float:
                session = llm.restore(saved, progress=False)
                prepare(session)
                return timed(lambda: session.ask(ids, max_new_tokens=1))()

            return run

        contestants = {
            "as it comes": contestant(lambda session: None),
            "after a fork": contestant(lambda session: session.fork()),
            "room reserved before": contestant(lambda session: session.core.reserve(options.config.context)),
        }
        times = in_turn(contestants, options.rounds, f"second question, {place}")
    title = f"Time to the first token of a second question after {n} tokens, {options.config.name}, {place}"
    note = (
        f"The question has {QUESTION} tokens. A session has room for a quarter more than its "
        "prompt; beyond it the caches are copied, unless a fork has moved them into shared memory."
    )
    rows = compared(times, OVER_RESERVED, goals.SECOND_QUESTION, {"tokens": n, **place.keys})
    return Section(title, rows, (note,))


def one_document(options: Options, place: Place, llm: LLM, n: int) -> Section:
    prompt = options.prompt(n)
    questions = [question(options, k) for k in range(FORKS)]

    def by_forks() -> None:
        base = read(llm, prompt)
        for ids in questions:
            base.fork().ask(ids, max_new_tokens=ANSWER)

    def own_work() -> None:
        session = llm.session()
        session.core.reserve(n + QUESTION + ANSWER)
        session.forward(prompt, progress=False)
        for ids in questions:
            session.ask(ids, max_new_tokens=ANSWER)
            session.truncate(n)

    contestants = {"by forks": timed(by_forks), "one prefill and ten answers": timed(own_work)}
    times = in_turn(contestants, options.rounds, f"ten questions, {place}")
    title = f"{FORKS} questions on a document of {n} tokens, {options.config.name}, {place}"
    note = (
        f"Questions of {QUESTION} tokens, answers of {ANSWER}. The second row takes one session back to the "
        "document after each answer."
    )
    rows = compared(times, OVER_OWN, goals.ONE_DOCUMENT, {"tokens": n, **place.keys})
    return Section(title, rows, (note,))


def compared(times: dict[str, Times], ratio: str, goal: goals.Goal, keys: dict[str, str | int]) -> list[Row]:
    """One row for each contestant; those before the last are judged by their ratio to it."""
    base = [*times][-1]
    rows = []
    for name, seconds in times.items():
        figures: dict[str, Figure] = {"time": seconds, ratio: seconds.median / times[base].median}
        rows.append(Row(name, figures, {} if name == base else {ratio: goal}, keys))
    return rows
