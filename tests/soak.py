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
from scenarios import Scenarios

import lazyllm

SECONDS = float(os.environ.get("SOAK_SECONDS", "1200"))
LIBC = ctypes.CDLL(None)
M_ARENA_MAX = -8  # of mallopt
WARM_UP = 1 / 3  # of the rounds
LEAST_ROUNDS = 12
MOST_GROWTH = 1 << 20  # bytes

VARIANTS: list[dict[str, Any]] = [
    {"weights": "q8"},
    {"weights": "q4", "kv": "f16"},
    {"kv": "bf16"},
    {"compute": "fastest"},
    {"threads": 1},
]


class Interrupted(Exception):
    pass


class Use(NamedTuple):
    """The resources of a process at rest."""

    memory: int  # bytes, without pages of mapped files
    threads: int
    files: int

    @classmethod
    def of(cls, process: int) -> "Use":
        place = Path(f"/proc/{process}")
        status = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines())
        pages = sum(int(status[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))
        return cls(pages, len(os.listdir(place / "task")), len(os.listdir(place / "fd")))


def grew(uses: list[Use], most: int) -> bool:
    """True if more than so many bytes, or threads or files, came from the first third of the rounds after the
    warm-up to the last third, by their medians."""
    steady = np.array(uses[int(WARM_UP * len(uses)) :])
    third = len(steady) // 3
    memory, threads, files = np.median(steady[-third:], axis=0) - np.median(steady[:third], axis=0)
    print(f"grown after the warm-up by {memory / 2**20:+.2f} MiB, {threads:+g} threads, {files:+g} files")
    return bool(memory > most or threads > 0 or files >= 1)


class World(Scenarios):
    """With what takes other threads, processes and models; signals interrupt it at any moment."""

    def __init__(self, folder: Path) -> None:
        super().__init__(lazyllm.demo_model(), folder, 6, 15)
        self._round = 0
        self._chance = random.Random(0)  # when passes are interrupted

    def saved(self) -> Any:
        session = self.llm.session(self.stages)
        session.ask(self.ids[:120], max_new_tokens=3)
        file = self.folder / "session.safetensors"
        session.save(file, progress=False)
        restored = self.llm.restore(file, progress=False)
        file.unlink()
        return restored.forward(self.ids[:5])

    def interrupted(self) -> Any:
        """A pass, and an answer, from which a signal handler raises at any moment; both go on."""
        session, asked = self.llm.session(self.stages), self.llm.session(self.stages)
        again: Callable[[], Any] = lambda: asked.ask(self.ids[:60], max_new_tokens=6)  # noqa: E731
        raised_within(self._chance.uniform(0.01, 0.8), lambda: session.forward(self.ids))
        error = raised_within(self._chance.uniform(0.01, 0.8), again)
        while error is not None and hasattr(error, "generation"):
            again = asked.resume
            error = raised_within(self._chance.uniform(0.2, 0.8), again)
        session.truncate(0)
        return session.forward(self.ids)

    def threads(self) -> Any:
        with ThreadPoolExecutor(3) as pool:
            return list(pool.map(lambda i: self.llm.session(self.stages).forward(self.ids[i:]), (60, 120, 180)))

    def child(self) -> Any:
        """A forked process uses the model, and so does its parent."""
        want = self.llm.session().forward(self.ids[:50])
        child = os.fork()
        if not child:
            os._exit(0 if np.array_equal(self.llm.session().forward(self.ids[:50]), want) else 1)
        return os.waitpid(child, 0)[1]

    def loaded(self) -> Any:
        """A second model, another one in each round."""
        variant = VARIANTS[self._round % len(VARIANTS)]
        llm = lazyllm.load(self.path, **variant)
        return llm.session(self.stages).forward(self.ids), llm.generate("A ship", max_new_tokens=2).token_ids


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


def same(value: Any, other: Any) -> bool:
    if isinstance(value, list | tuple):
        return len(value) == len(other) and all(map(same, value, other))
    if isinstance(value, np.ndarray):
        return value.dtype == other.dtype and value.tobytes() == other.tobytes()
    return bool(value == other)


def main() -> int:
    LIBC.mallopt(M_ARENA_MAX, 1)  # malloc_trim leaves the free ends of the arenas of threads as they are
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        scenarios = world.all()
        order, first, uses = random.Random(1), {}, []
        start = time.monotonic()
        while time.monotonic() - start < SECONDS or world._round < LEAST_ROUNDS:
            for name, scenario in order.sample([*scenarios.items()], len(scenarios)):
                if name == "loaded":
                    name += f" with {VARIANTS[world._round % len(VARIANTS)]}"
                got = scenario()
                if not same(first.setdefault(name, got), got):
                    print(f"round {world._round}: {name} gives other results than before", file=sys.stderr)
                    return 1
                del got
            world._round += 1
            gc.collect()
            # its unwritten blocks, more than the core keeps for later sessions, replace those that it keeps
            world.llm.session().core.reserve(world.llm.config.context, 1)
            LIBC.malloc_trim(0)
            uses.append(Use.of(os.getpid()))
            print(f"{time.monotonic() - start:5.0f} s, round {world._round}: {uses[-1]}", flush=True)
    if grew(uses, MOST_GROWTH):
        print("FAILED", file=sys.stderr)
        return 1
    print(f"passed: {world._round} rounds of {len(scenarios)} kinds of work with equal results")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
