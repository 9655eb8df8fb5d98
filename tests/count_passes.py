"""What passes of a model with 7B's layers ask of a GPU: kernels launched, waits of the host, copies.
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
from typing import Any

from tiny import Shape, Tiny, build

from lazyllm import Drop, Pruning, Scoring
from lazyllm._core import Model, Sampler, Session

SHAPE = Shape(n_layers=32, dtype="BF16")  # narrow: widths and heads change no count
PROMPT = 256  # every stage keeps more than the 64 tokens that a step revives
RULE = Pruning(  # twice as fast by count at 4096 prompt tokens
    {7: 0.40385, 16: 0.34327, 20: 0.29077}, scoring=Scoring.recommended(), sink=4
)
DROPPING = replace(RULE, stages={layer: Drop(keep) for layer, keep in RULE.stages})
COUNTERS = ("launches", "searches", "memsets", "waits", "uploads", "downloads", "pageable")
RECORDED = {
    "prefill, dense": (294, 4, 0, 1, 1, 1, 0),
    "prefill, pruned": (388, 8, 0, 1, 1, 1, 0),
    "one more scored layer": (5, 0, 0, 0, 0, 0, 0),
    "prefill, pruned, of a later session": (388, 0, 0, 1, 1, 1, 0),
    "decode, dense": (262, 0, 0, 1, 1, 1, 0),
    "decode, dense, after a pruned prompt": (262, 0, 0, 1, 1, 1, 0),
    "decode, frozen": (271, 0, 0, 1, 1, 1, 0),
    "decode, dropped for good": (341, 0, 0, 1, 1, 1, 0),
    "decode, pruned, none revived": (362, 0, 0, 4, 1, 1, 0),
    "decode, pruned, 1 revived": (386, 4, 0, 4, 1, 1, 0),
    "decode, pruned, 8 revived": (386, 4, 0, 4, 1, 1, 0),
    "decode, pruned, 64 revived": (386, 4, 0, 4, 1, 1, 0),
    "the same, of a session after one that revived 70": (386, 0, 0, 4, 1, 1, 0),
}


def counted(work: Callable[[], Any]) -> tuple[int, ...]:
    library = ctypes.CDLL(os.environ["LAZYLLM_CUDA_LIBRARY"])
    counters = [ctypes.c_ulonglong.in_dll(library, f"cuda_on_cpu_{name}") for name in COUNTERS]
    before = [counter.value for counter in counters]
    work()
    return tuple(counter.value - start for counter, start in zip(counters, before, strict=True))


def prefill(tiny: Tiny, rule: Pruning | None, before: int = 0) -> tuple[int, ...]:
    """The first pass of a model, or of its second session, after a prompt of `before` tokens in the first."""
    model = tiny.load()
    if before:
        step(model.session(rule and rule.core()), tiny.ids(before), False)
    session = model.session(rule and rule.core())
    session.reserve(PROMPT)
    return counted(lambda: step(session, tiny.ids(PROMPT), False))


def step(session: Session, ids: list[int], generated: bool) -> int:
    return session.advance(ids, Sampler(0.0, 1.0, 0, 0), generated)


def decode_after(tiny: Tiny, rule: Pruning) -> tuple[int, ...]:
    """The second step after a prompt; in the first, the rule may revive more."""
    session = tiny.load().session(rule.core())
    step(session, tiny.ids(PROMPT), False)
    step(session, [5], True)
    return counted(lambda: step(session, [5], True))


def decode(tiny: Tiny, n_revived: int | None, before: int | None = None) -> tuple[int, ...]:
    """A step after a prompt of which so many tokens wait for the first stage; None: of a dense session.

    The prompt drops all tokens that are not protected; the step protects them. With `before`, of the second
    session of a model whose first has revived so many.
    """
    model = tiny.load()
    if before is not None:
        decoded(tiny, model, before)
    return decoded(tiny, model, n_revived)


def decoded(tiny: Tiny, model: Model, n_revived: int | None) -> tuple[int, ...]:
    end = PROMPT - 1  # the query token never waits
    first = end - (n_revived or 0)
    least = Pruning(dict.fromkeys(dict(RULE.stages), 0.01), scoring=RULE.scoring, sink=RULE.sink)
    session = model.session(None if n_revived is None else least.protecting([(0, first)]).core())
    step(session, tiny.ids(PROMPT), False)
    if n_revived is not None:
        session.reschedule(RULE.protecting([(first, end)] if n_revived else []).core())
    counts = counted(lambda: step(session, [5], True))
    assert session.last_pass[:, 2].sum() == (n_revived or 0)
    return counts


def main() -> int:
    with TemporaryDirectory() as folder:
        tiny = build(SHAPE, Path(folder))
        fewer, more = (
            prefill(tiny, Pruning({16: 0.4}, scoring=replace(RULE.scoring, layers=layers))) for layers in (2, 3)
        )
        dense, pruned = prefill(tiny, None), prefill(tiny, RULE)
        seen = {
            "prefill, dense": dense,
            "prefill, pruned": pruned,
            "one more scored layer": tuple(b - a for a, b in zip(fewer, more, strict=True)),
            "prefill, pruned, of a later session": prefill(tiny, RULE, before=PROMPT - 4),
            "decode, dense": decode(tiny, None),
            "decode, dense, after a pruned prompt": decode_after(tiny, replace(RULE, decode={})),
            "decode, frozen": decode_after(tiny, replace(RULE, decode="frozen")),
            "decode, dropped for good": decode_after(tiny, DROPPING),
            "decode, pruned, none revived": decode(tiny, 0),
            **{f"decode, pruned, {n} revived": decode(tiny, n) for n in (1, 8, 64)},
            "the same, of a session after one that revived 70": decode(tiny, 64, before=70),
        }
    print("| a pass |", " | ".join(COUNTERS), "|")
    print("|---|", "---|" * len(COUNTERS), sep="")
    above = 0
    for name, counts in seen.items():
        print(f"| {name} |", " | ".join(map(str, counts)), "|")
        if any(count > limit for count, limit in zip(counts, RECORDED[name], strict=True)):
            above += 1
            print(f"FAILED: {name}: {RECORDED[name]} are recorded")
    return above


if __name__ == "__main__":
    sys.exit(main())
