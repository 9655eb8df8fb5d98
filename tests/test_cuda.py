"""The CUDA core as Python sees it. Runs where LAZYLLM_TEST_DEVICE is "cuda": on a GPU, or with
LAZYLLM_CUDA_LIBRARY naming the build whose kernels run on the CPU (`make cuda-on-cpu`)."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from comparison import per_layer
from folders import model_folder
from tiny import DEVICE, Shape, Tiny, build, pruning
from tolerances import HALF_LOGITS, error

import lazyllm
from lazyllm import _core
from lazyllm.device import libraries

pytestmark = pytest.mark.skipif(DEVICE == "cpu", reason="LAZYLLM_TEST_DEVICE is not cuda")

ON_CPU = "on_cpu" in os.environ.get("LAZYLLM_CUDA_LIBRARY", "")
fakes_only = pytest.mark.skipif(not ON_CPU, reason="needs devices and memory that can be set")
LEAST_GAP = 0.2  # between neighbouring scores, as a share of the higher one: far beyond what 16 bits blur


def on(tiny: Tiny, device: str) -> _core.Model:
    return _core.Model(tiny.config, [str(tiny.path)], tiny.tensors, device=device, libraries=libraries())


# ---- 16 bits -------------------------------------------------------------------------------------

SHAPES = {
    "grouped": Shape(
        seed=40, n_layers=5, hidden=64, n_heads=4, n_kv_heads=2, head_dim=64, ffn=96, dtype="BF16"
    ),
    "f16": Shape(seed=41, n_layers=5, hidden=64, n_heads=4, n_kv_heads=2, head_dim=64, ffn=96, dtype="F16"),
    "head of 128": Shape(seed=42, n_layers=5, hidden=64, n_heads=2, n_kv_heads=1, head_dim=128, dtype="BF16"),
    "head of 80": Shape(seed=43, n_layers=5, hidden=48, n_heads=3, n_kv_heads=3, head_dim=80, dtype="F16"),
    "head of 96": Shape(seed=44, n_layers=5, hidden=48, n_heads=3, n_kv_heads=1, head_dim=96, dtype="BF16"),
    "plain head": Shape(
        seed=45, n_layers=5, n_heads=3, n_kv_heads=1, head_dim=24, qk_norm=True, dtype="BF16"
    ),
}


def separated_stages(tiny: Tiny, ids: list[int]) -> list[tuple[int, float]]:
    """A keep for each layer where the CPU's scores leave a wide gap below the last kept token."""
    stages: list[tuple[int, float]] = []
    for layer in range(tiny.shape.n_layers - 1):
        so_far = stages[-1][1] if stages else 1.0
        session = on(tiny, "cpu").session(pruning([*stages, (layer, so_far)]))
        session.trace = True
        session.forward(ids)
        run = next(run for run in session.last_trace if run["last_layer"] == layer)
        scores = np.sort(run["scores"][:-1])[::-1]  # without the query token, which stays anyway
        gaps = 1 - scores[1:] / scores[:-1]
        wide = [n for n in range(3, len(gaps) * 3 // 4) if gaps[n - 1] > LEAST_GAP]
        if wide:
            stages.append((layer, (wide[-1] + 1 - 0.5) / len(ids)))
    return stages


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_16_bits_select_and_answer_as_the_cpu_does(shape: Shape, tmp_path: Path) -> None:
    tiny = build(shape, tmp_path)
    ids = tiny.ids(70)
    stages = separated_stages(tiny, ids)
    assert len(stages) >= 2
    seen = {}
    for device in ("cpu", DEVICE):
        session = on(tiny, device).session(pruning(stages))
        session.trace = True
        logits = session.forward(ids)
        seen[device] = (logits, per_layer(session.last_trace, shape.n_layers), session.depths.tolist())
    assert seen[DEVICE][1:] == seen["cpu"][1:]
    assert len(seen["cpu"][1][-1][0]) < 0.8 * len(ids)
    assert error(seen[DEVICE][0], seen["cpu"][0]) < HALF_LOGITS[shape.dtype]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_16_bits_over_a_conversation(shape: Shape, tmp_path: Path) -> None:
    """Decode steps and a follow-up revive everything, in rows few and many, over keys in several chunks."""
    tiny = build(shape, tmp_path)
    passes: list[tuple[int, bool]] = [(150, False), (1, True), (3, True), (20, False), (1, True)]
    rules = pruning(
        [(0, 0.01), (1, 0.01)], protect=[(0, 60)], decode=[]
    )  # what stays does not depend on scores
    sessions = [on(tiny, device).session(rules) for device in ("cpu", DEVICE)]
    for number, (count, generated) in enumerate(passes):
        ids = tiny.ids(count, number)
        want, got = (session.forward(ids, generated) for session in sessions)
        assert sessions[1].depths.tolist() == sessions[0].depths.tolist()
        assert error(got, want) < HALF_LOGITS[shape.dtype]
    assert sessions[1].depths.tolist() == [shape.n_layers] * sessions[1].length


def test_weights_of_several_types_become_one(tmp_path: Path) -> None:
    """The type that most bytes have is computed in; the others are converted."""
    tiny = build(Shape(seed=46, dtype="BF16"), tmp_path)
    assert on(tiny, DEVICE).isa.endswith("bf16")


# ---- devices, memory -----------------------------------------------------------------------------


def test_the_model_says_where_it_is(tmp_path: Path) -> None:
    llm = lazyllm.load(model_folder(tmp_path), device=DEVICE)
    assert llm.device == "cuda:0"
    assert "cuda:0" in repr(llm)
    assert "cuda:0" in lazyllm.info()["cuda"]
    answer = llm.generate(list(range(40)), pruning=lazyllm.Pruning({1: 0.5}), max_new_tokens=4)
    assert len(answer.token_ids) >= 1
    assert answer.computed < 1


def run_python(code: str, **environment: str) -> str:
    """In a process of its own, since the fakes read the environment once."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@fakes_only
def test_several_devices_in_one_process(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    code = f"""
import lazyllm
llms = [lazyllm.load({str(folder)!r}, device=f"cuda:{{n}}") for n in range(2)]
sessions = [llm.session() for llm in llms]
print([llm.device for llm in llms], (sessions[0].forward(range(30)) == sessions[1].forward(range(30))).all())
try:
    lazyllm.load({str(folder)!r}, device="cuda:2")
except lazyllm.DeviceError as error:
    print(error)
"""
    seen = run_python(code, LAZYLLM_CUDA_FAKE_DEVICES="2")
    assert seen == "['cuda:0', 'cuda:1'] True\nthere is no cuda:2: this machine has 2\n"


@fakes_only
def test_what_cannot_fit_is_refused_with_the_numbers(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    code = f"""
import lazyllm
try:
    lazyllm.load({str(folder)!r}, device="cuda")
except MemoryError as error:
    print(error)
print(lazyllm.load({str(folder)!r}, device="auto").device)
"""
    said, device = run_python(code, LAZYLLM_CUDA_FAKE_MEMORY=str(1 << 16)).splitlines()
    assert "the weights take" in said
    assert "cuda:0 has" in said
    assert device == "cpu"


@fakes_only
def test_a_session_that_cannot_grow_stays_as_it_was(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    code = f"""
import lazyllm, numpy as np
llm = lazyllm.load({str(folder)!r}, device="cuda")
session, calm = llm.session(), llm.session()
session.forward(range(20)); calm.forward(range(20))
try:
    session.core.reserve(10**9 // 4)
except (MemoryError, ValueError) as error:
    print(type(error).__name__)
print((session.forward([5]) == calm.forward([5])).all())
"""
    name, same = run_python(code).splitlines()
    assert same == "True"
    assert name in ("MemoryError", "ValueError")


# ---- threads -------------------------------------------------------------------------------------


def test_sessions_on_several_threads_give_the_same_bits(tmp_path: Path) -> None:
    tiny = build(Shape(seed=47), tmp_path)
    model, rules = on(tiny, DEVICE), pruning([(0, 0.5), (2, 0.3)])
    alone = model.session(rules).forward(tiny.ids(30))
    seen: list[Any] = [None] * 3

    def work(n: int) -> None:
        seen[n] = model.session(rules).forward(tiny.ids(30))

    workers = [threading.Thread(target=work, args=(n,)) for n in range(len(seen))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for logits in seen:
        np.testing.assert_array_equal(logits, alone)


# ---- graphs --------------------------------------------------------------------------------------


class Runtime:
    """What the fake runtime counts and can be told to refuse."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(os.environ["LAZYLLM_CUDA_LIBRARY"])
        self.refuse(0, graphs=False)

    def counts(self) -> np.ndarray:
        """Launches by themselves, graphs started, nodes changed."""
        names = ("launches", "graphs", "changes")
        return np.array([ctypes.c_ulonglong.in_dll(self.library, f"cuda_on_cpu_{n}").value for n in names])

    def refuse(self, nth_launch: int = 0, graphs: bool = False) -> None:
        ctypes.c_int.in_dll(self.library, "cuda_on_cpu_refuse").value = nth_launch
        ctypes.c_int.in_dll(self.library, "cuda_on_cpu_refuse_graphs").value = graphs


@pytest.fixture
def runtime() -> Any:
    fake = Runtime()
    yield fake
    fake.refuse(0, graphs=False)


@pytest.fixture
def seven_layers(tmp_path: Path) -> Tiny:
    return build(Shape(seed=48, n_layers=7), tmp_path)


STAGES = [(0, 0.7), (2, 0.5), (4, 0.3)]
MASS = (0.6, 0.1, 0.9)
SCHEDULES = {
    "dense": None,
    "same": pruning(STAGES),
    "frozen": pruning(STAGES, decode="frozen"),
    "decode dense: everything comes back": pruning(STAGES, decode=[]),
    "decode of its own": pruning(STAGES, decode=[(1, 0.4)]),
    "mass": pruning([(1, MASS), (3, MASS)]),
    "averaged, smoothed": pruning(STAGES, queries=2, smooth=3),
    "static": pruning([(2, 0.5)], permanent=True),
}
PASSES = [(40, False), *[(1, True)] * 6, (3, False), *[(1, True)] * 3, (30, False), *[(1, True)] * 4]


def conversation(session: _core.Session, tiny: Tiny, passes: Any = PASSES) -> list[Any]:
    """What every pass gives, to the bit."""
    session.trace = True
    seen: list[Any] = []
    for number, (count, generated) in enumerate(passes):
        logits = session.forward(tiny.ids(count, number), generated)
        sets = per_layer(session.last_trace, tiny.shape.n_layers)
        seen.append((logits.tobytes(), sets, session.depths.tolist(), session.last_pass.tolist()))
    return seen


@pytest.mark.parametrize("rules", SCHEDULES.values(), ids=SCHEDULES)
def test_graphs_change_no_bit(rules: Any, seven_layers: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a context that outgrows its buffers, so that every address changes on the way."""
    model = on(seven_layers, DEVICE)
    passes = [*PASSES, (90, False), *[(1, True)] * 3]
    with_graphs = conversation(model.session(rules), seven_layers, passes)
    monkeypatch.setenv("LAZYLLM_CUDA_GRAPHS", "0")
    assert conversation(model.session(rules), seven_layers, passes) == with_graphs


@fakes_only
def test_a_decode_step_is_one_graph(
    runtime: Runtime, seven_layers: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of its kind goes launch by launch, the second is made into a graph, later ones take that."""

    def cost_of_steps(n: int) -> list[list[int]]:
        session = on(seven_layers, DEVICE).session(None)
        session.forward(seven_layers.ids(40))
        costs = []
        for step in range(n):
            before = runtime.counts()
            session.forward([step], True)
            costs.append((runtime.counts() - before).tolist())
        return costs

    costs = cost_of_steps(5)
    per_layer = costs[3][2] / seven_layers.shape.n_layers
    assert costs[0][0] > 7 * 10
    assert costs[0][1:] == [0, 0]
    assert costs[1] == [0, 1, 0]  # made and started
    assert costs[2] == costs[3] == costs[4] == [0, 1, costs[2][2]]
    assert (
        per_layer <= 3
    )  # only what knows how many tokens are in play: limits and attention, in pieces or not
    monkeypatch.setenv("LAZYLLM_CUDA_GRAPHS", "0")
    assert cost_of_steps(3) == [[costs[0][0], 0, 0]] * 3


@fakes_only
def test_a_step_of_many_layers_is_several_graphs(runtime: Runtime, tmp_path: Path) -> None:
    tiny = build(Shape(seed=49, n_layers=30, hidden=16, head_dim=4, ffn=8), tmp_path)
    sessions = [on(tiny, DEVICE).session(None), on(tiny, "cpu").session(None)]
    for step in range(4):
        before = runtime.counts()
        got, want = (session.forward(tiny.ids(2, step), True) for session in sessions)
        assert error(got, want) < 1e-4
    assert (runtime.counts() - before)[:2].tolist() == [0, 2]


@fakes_only
def test_a_prefill_is_no_graph(runtime: Runtime, seven_layers: Tiny) -> None:
    """Five rows and more: their products are cuBLASLt's."""
    session, before = on(seven_layers, DEVICE).session(None), runtime.counts()
    for _ in range(4):
        session.forward(seven_layers.ids(5))
    assert (runtime.counts() - before)[1] == 0


@fakes_only
def test_a_graph_refused_is_no_loss(runtime: Runtime, seven_layers: Tiny) -> None:
    """Where graphs cannot be made, or not be changed any more, launches go one by one."""
    model, rules = on(seven_layers, DEVICE), pruning(STAGES)
    want = conversation(model.session(rules), seven_layers)
    started = runtime.counts()[1]
    runtime.refuse(graphs=True)
    assert conversation(model.session(rules), seven_layers) == want
    assert runtime.counts()[1] == started
    runtime.refuse(graphs=False)
    session = model.session(rules)
    seen = conversation(session, seven_layers, PASSES[:5])
    assert runtime.counts()[1] > started
    runtime.refuse(graphs=True)
    assert seen == want[:5]
    for number, (count, generated) in enumerate(PASSES[5:], 5):
        assert session.forward(seven_layers.ids(count, number), generated).tobytes() == want[number][0]


@fakes_only
@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_launch_that_fails_in_a_decode_step(runtime: Runtime, seven_layers: Tiny, step: int) -> None:
    """By itself, in a graph's first start, in a later one: an error, a dead session, a live model."""
    model = on(seven_layers, DEVICE)
    want = conversation(model.session(None), seven_layers)
    session = model.session(None)
    for number, (count, generated) in enumerate(PASSES[:step]):
        session.forward(seven_layers.ids(count, number), generated)
    runtime.refuse(30 if step == 1 else 1)
    said = "norm|product|rotation|attention|finite" if step == 1 else "starting a graph"
    with pytest.raises(lazyllm.DeviceError, match=f"({said}).*too many resources"):
        session.forward([1], True)
    with pytest.raises(RuntimeError, match="did not finish"):
        session.forward([1], True)
    assert conversation(model.session(None), seven_layers) == want


@fakes_only
def test_the_launch_that_failed_is_named_with_its_place(runtime: Runtime, seven_layers: Tiny) -> None:
    session = on(seven_layers, DEVICE).session(None)
    session.forward(seven_layers.ids(40))
    runtime.refuse(2 + 10 * 3 + 1)  # marks, embedding, then ten launches a layer
    with pytest.raises(lazyllm.DeviceError, match=r"^norm, queued after 3 layers: too many resources"):
        session.forward([1], True)


def test_a_step_that_is_stopped_starts_nothing_more(seven_layers: Tiny) -> None:
    model = on(seven_layers, DEVICE)
    want = conversation(model.session(None), seven_layers)
    session = model.session(None)
    conversation(session, seven_layers, PASSES[:4])

    def stop(done: int, n_layers: int) -> None:
        del session_made_meanwhile[:]  # closes one on this thread, in the midst of a pass
        raise KeyboardInterrupt

    session_made_meanwhile = [model.session(None)]
    session_made_meanwhile[0].forward([1, 2, 3])
    with pytest.raises(KeyboardInterrupt):
        session.forward([1], True, stop)
    with pytest.raises(RuntimeError, match="did not finish"):
        session.forward([1], True)
    assert conversation(model.session(None), seven_layers) == want


def test_graphs_on_several_threads(seven_layers: Tiny) -> None:
    model = on(seven_layers, DEVICE)
    each = [pruning(STAGES), None, pruning(STAGES, decode=[])]
    alone = [conversation(model.session(rules), seven_layers) for rules in each]
    seen: list[Any] = [None] * len(each)

    def work(n: int) -> None:
        seen[n] = conversation(model.session(each[n]), seven_layers)

    workers = [threading.Thread(target=work, args=(n,)) for n in range(len(each))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert seen == alone


@fakes_only
def test_graphs_on_two_devices_in_turns(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    code = f"""
import lazyllm
llms = [lazyllm.load({str(folder)!r}, device=f"cuda:{{n}}") for n in range(2)]
sessions = [llm.session() for llm in llms]
print(all((a == b).all() for a, b in ([s.forward(range(30)) for s in sessions],
      *([s.forward([n], generated=True) for s in sessions] for n in range(6)))))
"""
    assert run_python(code, LAZYLLM_CUDA_FAKE_DEVICES="2") == "True\n"
