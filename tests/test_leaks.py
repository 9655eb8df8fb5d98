"""Hundreds of answers leave nothing behind: no object, no reference, no allocated byte."""

import json
import sys
from pathlib import Path

import pytest
from children import python
from folders import model_folder
from tiny import SANITIZED

CALLS = 36
ROUNDS = 6
SCRIPT = """
import ctypes, gc, json, sys, tracemalloc
from pathlib import Path
from scenarios import Scenarios

class MallocInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
                "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]

try:
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = MallocInfo
except (AttributeError, OSError):
    mallinfo = None

model, calls, rounds, most = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
world = Scenarios(model, model.parent, 1, 3)
watched = None, True, False, world.llm.core, world.llm.config, world.stages, world.stages.stages

def held():
    gc.collect()
    info = mallinfo() if mallinfo else MallocInfo()
    return {
        "objects": len(gc.get_objects()),
        "references": sum(map(sys.getrefcount, watched)),
        "traced bytes": tracemalloc.get_traced_memory()[0],
        "allocated bytes": info.uordblks + info.hblkhd,
    }

grown = {}
tracemalloc.start()
scenarios = world.all()
for _ in range(calls):
    for scenario in scenarios.values():
        scenario()
for name, scenario in scenarios.items():
    before, grown[name] = held(), {}
    for _ in range(rounds):
        for _ in range(calls):
            scenario()
        after = held()
        grown[name] = {kind: min(after[kind] - before[kind], grown[name].get(kind, sys.maxsize)) for kind in most}
        if all(grown[name][kind] <= most[kind] for kind in most):
            break
        before = after
print(json.dumps(grown))
"""
# One leak a call would be 36 of each in every round; these are room for caches that fill late, after as many calls of
# all scenarios to warm up.
MOST = {"objects": 15, "references": 15, "traced bytes": 3_600, "allocated bytes": 7_200}


@pytest.mark.skipif(sys.platform != "linux", reason="counts allocated bytes by glibc's mallinfo2")
@pytest.mark.skipif(SANITIZED, reason="counts glibc's bytes, which a sanitized core does not allocate from")
def test_answers_leave_nothing_behind(tmp_path: Path) -> None:
    grown = json.loads(python(SCRIPT, model_folder(tmp_path), CALLS, ROUNDS, json.dumps(MOST)))
    leaks = {
        f"{scenario}: {name}": growth
        for scenario, growths in grown.items()
        for name, growth in growths.items()
        if growth > MOST[name]
    }
    assert not leaks, f"at least, in each of {ROUNDS} times {CALLS} calls: {leaks}; in all: {grown}"
