"""Counts the work that passes of a model with 7B's layers give a GPU: kernels launched, waits of the host, copies.
Prints docs/cuda.md's table, and fails where a number is above the one that is recorded here.

    LAZYLLM_TEST_DEVICE=cuda LAZYLLM_CUDA_LIBRARY=build/on_cpu/liblazyllm_cuda.so python tests/count_passes.py
"""

import ctypes
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from tiny import Shape, Tiny, build

from lazyllm import Drop, Pruning, Scoring
from lazyllm._core import Model, Sampler, Session

SHAPE = Shape(n_layers=32, dtype="BF16")  # narrow: widths and heads change no count
PROMPT = 144  # every stage keeps more than the 64 tokens that a step revives
# where the recommended stages of 7B stand; keeps change no count
RULE = Pruning({7: 0.6, 16: 0.55, 20: 0.5}, scoring=Scoring.recommended(), sink=4)
DROPPING = replace(RULE, stages={layer: Drop(keep) for layer, keep in RULE.stages})
COUNTERS = ("launches", "searches", "memsets", "waits", "uploads", "downloads", "pageable")
GREEDY = Sampler(0.0, 1.0, 0, 0)


def counted(session: Session, ids: list[int], generated: bool = False) -> tuple[int, ...]:
    library = ctypes.CDLL(os.environ["LAZYLLM_CUDA_LIBRARY"])
    counters = [ctypes.c_ulonglong.in_dll(library, f"cuda_on_cpu_{name}") for name in COUNTERS]
    before = [counter.value for counter in counters]
    session.advance(ids, GREEDY, generated)
    return tuple(counter.value - start for counter, start in zip(counters, before, strict=True))


def prefill(tiny: Tiny, rule: Pruning | None, after: int = 0) -> tuple[int, ...]:
    """The first pass of a model, or of its second session, after a prompt of `after` tokens in the first."""
    model = tiny.load()
    if after:
        counted(model.session(rule and rule.core()), tiny.ids(after))
    session = model.session(rule and rule.core())
    session.reserve(PROMPT)
    return counted(session, tiny.ids(PROMPT))


def decode(tiny: Tiny, rule: Pruning | None) -> tuple[int, ...]:
    """The second step after a prompt; in the first, the rule may revive more."""
    session = tiny.load().session(rule and rule.core())
    counted(session, tiny.ids(PROMPT))
    counted(session, [5], True)
    return counted(session, [5], True)


def revive(tiny: Tiny, n: int, model: Model | None = None) -> tuple[int, ...]:
    """A step after a prompt of which n tokens wait for the first stage.

    The prompt drops all tokens that are not protected; the step protects them.
    """
    end = PROMPT - 1  # the query token never waits
    first = end - n
    least = Pruning(dict.fromkeys(dict(RULE.stages), 0.01), scoring=RULE.scoring, sink=RULE.sink)
    session = (model or tiny.load()).session(least.protecting([(0, first)]).core())
    counted(session, tiny.ids(PROMPT))
    session.reschedule(RULE.protecting([(first, end)] if n else []).core())
    counts = counted(session, [5], True)
    assert session.last_pass[:, 2].sum() == n
    return counts


def one_more_scored_layer(tiny: Tiny) -> tuple[int, ...]:
    fewer, more = (prefill(tiny, Pruning({16: 0.4}, scoring=replace(RULE.scoring, layers=n))) for n in (2, 3))
    return tuple(b - a for a, b in zip(fewer, more, strict=True))


def revive_later(tiny: Tiny) -> tuple[int, ...]:
    model = tiny.load()
    revive(tiny, 70, model)
    return revive(tiny, 64, model)


PASSES: dict[str, tuple[Callable[[Tiny], tuple[int, ...]], tuple[int, ...]]] = {  # with the recorded numbers
    "prefill, dense": (lambda tiny: prefill(tiny, None), (294, 4, 0, 1, 1, 1, 0)),
    "prefill, pruned": (lambda tiny: prefill(tiny, RULE), (401, 11, 0, 1, 1, 1, 0)),
    "one more scored layer": (one_more_scored_layer, (4, 0, 0, 0, 0, 0, 0)),
    "prefill, pruned, of a later session": (lambda tiny: prefill(tiny, RULE, PROMPT - 4), (401, 0, 0, 1, 1, 1, 0)),
    "decode, dense": (lambda tiny: decode(tiny, None), (262, 0, 0, 1, 1, 1, 0)),
    "decode, dense, after a pruned prompt": (
        lambda tiny: decode(tiny, replace(RULE, decode={})),
        (262, 0, 0, 1, 1, 1, 0),
    ),
    "decode, frozen": (lambda tiny: decode(tiny, replace(RULE, decode="frozen")), (274, 0, 0, 1, 1, 1, 0)),
    "decode, dropped for good": (lambda tiny: decode(tiny, DROPPING), (330, 0, 0, 1, 1, 1, 0)),
    "decode, pruned, none revived": (lambda tiny: revive(tiny, 0), (348, 0, 0, 4, 1, 1, 0)),
    "decode, pruned, 1 revived": (lambda tiny: revive(tiny, 1), (391, 5, 0, 4, 1, 1, 0)),
    "decode, pruned, 8 revived": (lambda tiny: revive(tiny, 8), (391, 5, 0, 4, 1, 1, 0)),
    "decode, pruned, 64 revived": (lambda tiny: revive(tiny, 64), (391, 0, 0, 4, 1, 1, 0)),
    "the same, of a session after one that revived 70": (revive_later, (391, 0, 0, 4, 1, 1, 0)),
}


def main() -> int:
    print("| a pass |", " | ".join(COUNTERS), "|")
    print("|---|", "---|" * len(COUNTERS), sep="")
    above = 0
    with TemporaryDirectory() as folder:
        tiny = build(SHAPE, Path(folder))
        for name, (work, recorded) in PASSES.items():
            counts = work(tiny)
            print(f"| {name} |", " | ".join(map(str, counts)), "|")
            if any(count > limit for count, limit in zip(counts, recorded, strict=True)):
                above += 1
                print(f"FAILED: {name}: {recorded} are recorded")
    return above


if __name__ == "__main__":
    sys.exit(main())
