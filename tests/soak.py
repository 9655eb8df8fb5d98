"""Mixed work in one process for SOAK_SECONDS (1200): `make soak`.

Rounds of everything that people do with a model: load, generate, chat, stream and stop, fork, truncate, save,
restore, interrupt, fail, policies, shared prefixes, threads, child processes. Each answer must be that of the
first round, logits to the bit. After a warm-up memory, threads and open files must not grow.
"""

import ctypes
import gc
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import lazyllm

SECONDS = float(os.environ.get("SOAK_SECONDS", "1200"))
LIBC = ctypes.CDLL(None)
M_ARENA_MAX = -8  # of mallopt
WARM_UP = 0.25  # of the rounds
LEAST_ROUNDS = 12
MOST_GROWTH = 1 << 20  # bytes, of the median of the last third of the rounds over that of the first

STAGES = lazyllm.Pruning({6: 0.6, 15: 0.3}, decode={15: 0.5})
RECOMMENDED = lazyllm.Pruning({10: 0.5, 20: 0.2}, scoring=lazyllm.Scoring.recommended(), sink=4)
VARIANTS: list[dict[str, Any]] = [
    {"weights": "q8"},
    {"weights": "q4", "kv": "f16"},
    {"kv": "bf16"},
    {"compute": "fastest"},
    {"threads": 1},
]
TEXT = "The harbour master wrote down every ship that came in that year, its cargo and the name of its captain. "


class Own(lazyllm.Policy):
    layers = 2

    def observe(self, view: Any) -> Any:
        return view.attention(2).mean(axis=(0, 1))

    def score(self, view: Any) -> Any:
        return view.attention().mean(axis=(0, 1)) + 0 * view.keys().sum()


class Failing(Own):
    def score(self, view: Any) -> Any:
        raise LookupError("enough")


class Interrupted(Exception):
    pass


class Use(NamedTuple):
    """What the process holds when it is at rest."""

    memory: int  # bytes, without pages of mapped files
    threads: int
    files: int


def use() -> Use:
    gc.collect()
    LIBC.malloc_trim(0)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    pages = sum(int(status[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))
    return Use(pages, len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")))


class World:
    """The model, and what is done with it; each method returns what must be the same in every round."""

    def __init__(self, folder: Path) -> None:
        self.path = lazyllm.demo_model()
        self.llm = lazyllm.load(self.path, threads=2)
        self.folder = folder
        self.ids = np.random.default_rng(0).integers(0, self.llm.config.vocab, 256).tolist()
        self.round = 0
        self.chance = random.Random(0)  # when passes are interrupted

    def dense(self) -> Any:
        return self.llm.session().forward(self.ids)

    def pruned(self) -> Any:
        session = self.llm.session(STAGES)
        return [session.forward(self.ids), session.forward([5], generated=True), session.depths]

    def generated(self) -> Any:
        sampling = lazyllm.SamplingParams(1.0, seed=3)
        return self.llm.generate(TEXT * 5, RECOMMENDED, max_new_tokens=8, sampling=sampling).token_ids

    def traced(self) -> Any:
        answer = self.llm.generate(self.ids, STAGES, max_new_tokens=3, trace=True)
        answer.trace.heatmap()._repr_html_()
        return [answer.token_ids, [stage.scores for stage in answer.trace.stages]]

    def batch(self) -> Any:
        answers = self.llm.generate(["One, two,", "Red, green,"], max_new_tokens=3, progress=False)
        return [answer.text for answer in answers]

    def conversation(self) -> Any:
        session = self.llm.session(STAGES)
        asked = ("What does a harbour master do?", "And at night?")
        return [session.ask(text, chat=True, max_new_tokens=6).text for text in asked]

    def left(self) -> Any:
        stream = self.llm.stream(TEXT, STAGES, max_new_tokens=20)
        return [next(stream), next(stream)]

    def forked(self) -> Any:
        session = self.llm.session(STAGES)
        session.forward(self.ids[:100])
        fork = session.fork()
        found = [fork.forward(self.ids[100:140]), session.forward(self.ids[200:220])]
        fork.truncate(110)
        return [*found, fork.forward(self.ids[:9])]

    def restored(self) -> Any:
        session = self.llm.session(STAGES)
        session.ask(self.ids[:120], max_new_tokens=3)
        file = self.folder / "session.safetensors"
        session.save(file, progress=False)
        made = self.llm.restore(file, progress=False)
        file.unlink()
        return made.forward(self.ids[:5])

    def interrupted(self) -> Any:
        """A pass, and an answer, from which a signal handler raises at any moment; both go on."""
        session, asked = self.llm.session(STAGES), self.llm.session(STAGES)
        again: Callable[[], Any] = lambda: asked.ask(self.ids[:60], max_new_tokens=6)  # noqa: E731
        raised_within(self.chance.uniform(0.01, 0.8), lambda: session.forward(self.ids))
        error = raised_within(self.chance.uniform(0.01, 0.8), again)
        while error is not None and hasattr(error, "generation"):
            again = asked.resume
            error = raised_within(self.chance.uniform(0.2, 0.8), again)
        session.truncate(0)
        return session.forward(self.ids)

    def failed(self) -> Any:
        """What is refused, before a pass and within it."""
        session = self.llm.session(Failing({6: 0.5}))
        for call in (
            lambda: self.llm.generate([10**6]),
            lambda: self.llm.session({99: 0.5}),
            lambda: lazyllm.load(self.folder),
            lambda: self.llm.restore(Path(__file__)),
            lambda: session.forward(self.ids),
        ):
            try:
                call()
            except (ValueError, OSError, LookupError):
                continue
            raise AssertionError("not refused")
        return session.length

    def by_policy(self) -> Any:
        return self.llm.session(Own({6: 0.5, 15: 0.2})).forward(self.ids)

    def prefixed(self) -> Any:
        """Documents of which each begins like the one before; no room for all of them."""
        cache = lazyllm.PrefixCache(max_bytes=64 << 20)
        document = self.ids * 2
        prompts = [document[:450] + [7] * 30, document[:500] + [8] * 30, [9] * 480]
        answers = self.llm.generate(prompts, STAGES, max_new_tokens=2, prefix=cache, progress=False)
        return [answer.token_ids for answer in answers]

    def read(self) -> Any:
        session = self.llm.session(STAGES)
        session.read(self.ids)
        return [session.fork().forward(self.ids[i : i + 20]) for i in (0, 50)]

    def threads(self) -> Any:
        with ThreadPoolExecutor(3) as pool:
            return list(pool.map(lambda i: self.llm.session(STAGES).forward(self.ids[i:]), (60, 120, 180)))

    def child(self) -> Any:
        """A forked process uses the model, and so does its parent."""
        want = self.llm.session().forward(self.ids[:50])
        child = os.fork()
        if not child:
            os._exit(0 if np.array_equal(self.llm.session().forward(self.ids[:50]), want) else 1)
        return os.waitpid(child, 0)[1]

    def loaded(self) -> Any:
        """A second model, another one in each round."""
        variant = VARIANTS[self.round % len(VARIANTS)]
        llm = lazyllm.load(self.path, **variant)
        return llm.session(STAGES).forward(self.ids), llm.generate("A ship", max_new_tokens=2).token_ids


def raised_within(seconds: float, call: Callable[[], Any]) -> BaseException | None:
    """Calls; a signal handler raises after so many seconds, unless the call has ended by then."""

    def stop(number: int, frame: Any) -> None:
        raise Interrupted

    signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        call()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except Interrupted as error:
        return error
    return None


def same(one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    return bool(one == other)


def growth(uses: list[Use]) -> Use:
    """Of medians, from the first third of what follows the warm-up to the last."""
    steady = np.array(uses[int(WARM_UP * len(uses)) :])
    third = len(steady) // 3
    return Use(*map(int, np.median(steady[-third:], axis=0) - np.median(steady[:third], axis=0)))


def main() -> int:
    LIBC.mallopt(M_ARENA_MAX, 1)  # malloc_trim leaves the free ends of the arenas of threads as they are
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        scenarios = [getattr(World, name) for name in vars(World) if not name.startswith("_")]
        order, first, uses = random.Random(1), {}, []
        start = time.monotonic()
        while time.monotonic() - start < SECONDS or world.round < LEAST_ROUNDS:
            for scenario in order.sample(scenarios, len(scenarios)):
                name = scenario.__name__
                if name == "loaded":
                    name += f" with {VARIANTS[world.round % len(VARIANTS)]}"
                got = scenario(world)
                if not same(first.setdefault(name, got), got):
                    print(f"round {world.round}: {name} gives other results than before", file=sys.stderr)
                    return 1
                del got
            world.round += 1
            uses.append(use())
            print(
                f"{time.monotonic() - start:5.0f} s, round {world.round}: {uses[-1].memory / 2**20:.1f} MiB, "
                f"{uses[-1].threads} threads, {uses[-1].files} files",
                flush=True,
            )
    grown = growth(uses)
    by = f"grown after the warm-up by {grown.memory / 2**20:+.2f} MiB, {grown.threads:+d} threads, "
    by += f"{grown.files:+d} files"
    if grown.memory > MOST_GROWTH or grown.threads > 0 or grown.files > 0:
        print(f"FAILED: {by}", file=sys.stderr)
        return 1
    print(f"passed: {world.round} rounds of {len(scenarios)} kinds of work with equal results; {by}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
