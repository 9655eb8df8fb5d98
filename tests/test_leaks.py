"""Hundreds of answers leave nothing behind: no object, no reference, no allocated byte."""

import json
import sys
from pathlib import Path

import pytest
from children import python
from folders import model_folder

CALLS = 150
SCRIPT = """
import ctypes, gc, json, sys, tracemalloc
import lazyllm
from lazyllm import Pruning, SamplingParams

class MallocInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
                "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]

try:
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = MallocInfo
except (AttributeError, OSError):
    mallinfo = None

llm = lazyllm.load(sys.argv[1], threads=2)
calls = int(sys.argv[2])
stages = Pruning({1: 0.6, 3: 0.3})
ids = list(range(40, 90))

def dense():
    llm.generate(ids, max_new_tokens=4)

def pruned():
    llm.generate("The sea was calm.", pruning=stages, max_new_tokens=4, sampling=SamplingParams(1.0, seed=3))

def traced():
    llm.generate(ids, pruning=stages, max_new_tokens=4, trace=True).trace.stages

def left_early():
    stream = llm.stream(ids, pruning=stages, max_new_tokens=9)
    next(stream, None)

def conversation():
    session = llm.session(stages)
    session.ask("Hello", chat=True, max_new_tokens=2)
    session.ask("And you?", chat=True, max_new_tokens=2)
    session.forward([5])
    session.depths, session.kinds, session.last_pass

def refused():
    for bad in ([999], [0.5], None):
        try:
            llm.generate(bad)
        except (ValueError, TypeError):
            continue
        raise AssertionError(bad)
    for values in ({"stages": [(99, 0.5)]}, {"smooth": 2}, {"protect": [(1,)]}, {"decode": [(1, 2.0)]}):
        try:
            llm.core.session({**stages.core(), **values})
        except (ValueError, TypeError):
            continue
        raise AssertionError(values)

watched = (None, True, False, llm.core, llm.config, stages, stages.stages)

class Stop(Exception):
    pass

def stop(layers_done, n_layers):
    raise Stop

def interrupted():
    session = llm.session(stages)
    try:
        session.core.forward(ids, watch=stop)
    except Stop:
        pass

def forked():
    session = llm.session(stages)
    session.ask(ids, max_new_tokens=2)
    fork = session.fork()
    fork.ask(ids[:5], max_new_tokens=2)
    fork.truncate(20)

def restored():
    session = llm.session(stages)
    session.ask(ids, max_new_tokens=2)
    core, made = session.core, llm.core.session(stages.core())
    made.set_tokens(core.ids, core.kinds, core.depths, core.gone)
    for layer in range(llm.config.n_layers):
        for part in ("keys", "values", "aux"):
            if core.state_length(part, layer):
                made.set_state(part, layer, core.state(part, layer))
    made.forward([5])
    try:
        made.set_state("keys", 0, b"four")
    except ValueError:
        return
    raise AssertionError

def resumed():
    session = llm.session(stages)
    stream = session.answer(ids, lazyllm.generation.Request(4, progress=False))
    try:
        next(stream)
        stream._pieces.throw(Stop)
    except Stop as error:
        error.generation.text
    session.resume()

class Mine(lazyllm.Policy):
    layers = 2

    def observe(self, view):
        return view.attention(2).mean(axis=(0, 1))

    def score(self, view):
        view.protected, view.queries(), view.keys(), view.values(), view.hidden(), view.observed
        return view.attention().mean(axis=(0, 1)) if view.layer == 2 else view.positions[::2]

mine = Mine({1: 0.6, 2: 0.3})

def by_policy():
    llm.generate(ids, pruning=mine, max_new_tokens=4)

class Failing(Mine):
    def score(self, view):
        return view.positions if view.is_prompt else view.hidden()

failing = Failing({1: 0.6})

def failed_policy():
    try:
        llm.generate(ids, pruning=failing, max_new_tokens=4)
    except TypeError:
        return
    raise AssertionError

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
answered = (dense, pruned, traced, left_early, conversation, refused, interrupted, forked, restored, resumed)
scenarios = (*answered, by_policy, failed_policy)
for _ in range(calls):
    for scenario in scenarios:
        scenario()
for scenario in scenarios:
    before = held()
    for _ in range(calls):
        scenario()
    after = held()
    grown[scenario.__name__] = {name: after[name] - before[name] for name in before}
print(json.dumps(grown))
"""
# One leak a call would be 150 of each; these are room for caches that fill late, after as many calls
# of all scenarios to warm up.
MOST = {"objects": 25, "references": 25, "traced bytes": 6_000, "allocated bytes": 12_000}


@pytest.mark.skipif(sys.platform != "linux", reason="counts allocated bytes by glibc's mallinfo2")
def test_answers_leave_nothing_behind(tmp_path: Path, sanitized: bool) -> None:
    if sanitized:
        pytest.skip("counts glibc's bytes, which a sanitized core does not allocate from")
    grown = json.loads(python(SCRIPT, model_folder(tmp_path), CALLS))
    leaks = {
        f"{scenario}: {name}": growth
        for scenario, growths in grown.items()
        for name, growth in growths.items()
        if growth > MOST[name]
    }
    assert not leaks, f"after {CALLS} calls: {leaks}; in all: {grown}"
