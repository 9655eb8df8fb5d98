"""The CUDA core through the Python interface. Runs only if LAZYLLM_TEST_DEVICE is "cuda": on a GPU, or, if
LAZYLLM_CUDA_LIBRARY names the build of `make cuda-on-cpu`, on the CPU."""

from __future__ import annotations

import ctypes
import importlib
import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import python
from comparison import converse, per_layer, state_after
from folders import model_folder
from test_gguf_checkpoint import toy
from tiny import DEVICE, Shape, Tiny, build, pruning
from tolerances import HALF_LOGITS, LOGITS, error
from toys import write_gguf

import lazyllm
from lazyllm.commands.main import main
from lazyllm.evaluation.generated.tasks import GeneratedTasks
from lazyllm.evaluation.options import RulerOptions, RunOptions
from lazyllm.evaluation.trial import scored_answer
from lazyllm.evaluation.workers import Recipe, connected, worker_model
from lazyllm.machine.device import nth_device

pytestmark = pytest.mark.skipif(DEVICE == "cpu", reason="LAZYLLM_TEST_DEVICE is not cuda")

ON_CPU = "on_cpu" in os.environ.get("LAZYLLM_CUDA_LIBRARY", "")
fakes_only = pytest.mark.skipif(not ON_CPU, reason="needs devices and memory that can be set")
MIN_GAP = 0.2  # between neighbouring scores, relative to the higher one: far above 16-bit rounding


# ---- 16 bits -------------------------------------------------------------------------------------

BASE = Shape(n_layers=5, hidden=64, head_dim=64, dtype="BF16")
WINDOWED = {"windows": (25, 0), "local_theta": 1000.0}
EXPERTS = {"n_experts": 6, "experts_per_token": 2, "expert_ffn": 48, "expert_layers": (1, 0)}
COHERE = {"windows": (25, 25, 0), "paired_rope": True, "layer_norm": True, "qk_norm": True, "parallel": True}
GEMMA = {"norm_plus_one": True, "post_norms": True, "qk_norm": True, "gelu": True, "tied": True}
CAPS = {"query_scalar": 200.0, "attention_cap": 4.0, "logit_cap": 10.0, "embedding_scale": 6.93}
BEHIND = {"qk_norm": True, "late_qk_norm": True, "rotary_dim": 48, "paired_rope": True, "short_context": 72}
GROWING = {"qk_norm": True, "wide_qk_norm": True, "query_growth": 0.5, "query_step": 64, "logit_scale": 0.125}
SOME_ROPE = {"no_rope": (False, False, True)}
# "experts" and "q grows" have seeds with which an error of 2e-5 in every product costs least: with others, a
# router may choose other experts.
SHAPES = {
    "grouped": replace(BASE, seed=40, ffn=96),
    "f16": replace(BASE, seed=41, ffn=96, dtype="F16"),
    "head of 128": replace(BASE, seed=42, n_heads=2, n_kv_heads=1, head_dim=128),
    "head of 80": replace(BASE, seed=43, hidden=48, n_heads=3, n_kv_heads=3, head_dim=80, dtype="F16"),
    "head of 96": replace(BASE, seed=44, hidden=48, n_heads=3, n_kv_heads=1, head_dim=96),
    "plain head": replace(BASE, seed=45, hidden=32, n_heads=3, n_kv_heads=1, head_dim=24, qk_norm=True),
    "experts": replace(BASE, seed=64, **EXPERTS, normed_experts=True),
    "Cohere": replace(BASE, seed=51, hidden=50, **COHERE, **SOME_ROPE, logit_scale=0.25, tied=True),
    "Gemma": replace(BASE, seed=50, n_layers=6, hidden=48, n_kv_heads=1, head_dim=256, **WINDOWED, **CAPS, **GEMMA),
    "OLMo": replace(BASE, seed=51, pre_norms=False, post_norms=True, qk_norm=True, wide_qk_norm=True, **WINDOWED),
    "norms behind RoPE": replace(BASE, seed=54, **BEHIND, **SOME_ROPE),
    "q grows": replace(BASE, seed=67, n_heads=3, n_kv_heads=3, head_dim=20, **GROWING, dtype="F16"),
}


def separated_stages(tiny: Tiny, ids: list[int]) -> list[tuple[int, float]]:
    """Stages whose keep cuts at a wide gap in the CPU's scores; layers without such a gap get no stage."""
    stages: list[tuple[int, float]] = []
    for layer in range(tiny.shape.n_layers - 1):
        so_far = stages[-1][1] if stages else 1.0
        session = tiny.load(device="cpu").session(pruning([*stages, (layer, so_far)]))
        session.trace = True
        session.forward(ids)
        run = next(run for run in session.last_trace if run["last_layer"] == layer)
        scores = np.sort(run["scores"][:-1])[::-1]  # without the query token, which is always kept
        scores = scores[scores > 0]  # the others lie outside the layer's window
        gaps = 1 - scores[1:] / scores[:-1]
        wide = [n for n in range(3, len(gaps) * 3 // 4) if gaps[n - 1] > MIN_GAP]
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
        session = tiny.load(device=device).session(pruning(stages))
        session.trace = True
        logits = session.forward(ids)
        seen[device] = (logits, per_layer(session.last_trace, shape.n_layers), session.depths.tolist())
    assert seen[DEVICE][1:] == seen["cpu"][1:]
    assert len(seen["cpu"][1][-1][0]) < 0.8 * len(ids)
    assert error(seen[DEVICE][0], seen["cpu"][0]) < HALF_LOGITS[shape.dtype]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_16_bits_over_a_conversation(shape: Shape, tmp_path: Path) -> None:
    """Decode steps and a follow-up revive all tokens: few and many rows, one and several key chunks."""
    tiny = build(shape, tmp_path)
    passes: list[tuple[int, bool]] = [(150, False), (1, True), (3, True), (20, False), (1, True)]
    # only protected tokens are kept, so selections do not depend on scores
    rules = pruning([(0, 0.01), (1, 0.01)], protect=[(0, 60)], decode=[])
    sessions = [tiny.load(device=device).session(rules) for device in ("cpu", DEVICE)]
    for number, (count, generated) in enumerate(passes):
        ids = tiny.ids(count, number)
        want, got = (session.forward(ids, generated) for session in sessions)
        assert sessions[1].depths.tolist() == sessions[0].depths.tolist()
        assert error(got, want) < HALF_LOGITS[shape.dtype]
    assert sessions[1].depths.tolist() == [shape.n_layers] * sessions[1].length


# ---- devices, memory -----------------------------------------------------------------------------


def test_the_model_says_where_it_is(tmp_path: Path) -> None:
    llm = lazyllm.load(model_folder(tmp_path), device=DEVICE)
    assert llm.device == "cuda:0"
    assert "cuda:0" in repr(llm)
    assert "cuda:0" in lazyllm.info()["cuda"]


@fakes_only
def test_several_devices_in_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZYLLM_CUDA_FAKE_DEVICES", "2")
    folder = model_folder(tmp_path)
    llms = [lazyllm.load(folder, device=f"cuda:{n}") for n in range(2)]
    assert [llm.device for llm in llms] == ["cuda:0", "cuda:1"]
    sessions = [llm.session() for llm in llms]
    for ids in (range(30), [1], [2]):  # in turn
        first, second = (session.forward(ids, generated=len(ids) == 1) for session in sessions)
        assert first.tobytes() == second.tobytes()
    with pytest.raises(lazyllm.DeviceError, match=r"there is no cuda:2: this machine has 2"):
        lazyllm.load(folder, device="cuda:2")


SPLIT_RULES = {
    "dense": None,
    "revives": pruning([(0, 0.8), (2, 0.6), (4, 0.4)], layers=4, queries=3, smooth=3, memory=0.8, words=True),
    "mean over layers": pruning([(5, 0.4, True)], decode=[], average=True),
    "frozen": pruning([(1, 0.5), (3, 0.3, True)], decode="frozen"),
}


@fakes_only
@pytest.mark.parametrize("rules", SPLIT_RULES.values(), ids=SPLIT_RULES)
def test_layers_on_several_devices_give_the_bits_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rules: Any
) -> None:
    monkeypatch.setenv("LAZYLLM_CUDA_FAKE_DEVICES", "3")
    tiny = build(Shape(seed=49, n_layers=7, windows=(0, 9), tied=True, **EXPERTS), tmp_path)
    one, three = (tiny.load(device=device) for device in ("cuda", "cuda:0,2,1"))
    assert three.device == "cuda:0,2,1"
    assert three.bytes == one.bytes + 4 * tiny.shape.vocab * tiny.shape.hidden  # the LM head is the embedding
    sessions = [model.session(rules) for model in (one, three)]
    assert sessions[0].bytes_for(200) < sessions[1].bytes_for(200)
    seen = [converse(session, tiny, PASSES[:4]) for session in sessions]
    assert seen[0] == seen[1]
    others = [session.fork() for session in sessions]
    for session in sessions:
        session.truncate(len(session.ids) - 3)
    more = [converse(session, tiny, [(1, True), (150, False), (1, True)]) for session in (*sessions, *others)]
    assert more[0] == more[1]
    assert more[2] == more[3]
    for part, layer in itertools.product(("keys", "values", "aux", "remembered", "logits"), range(7)):
        state, same = (session.state(part, layer) for session in sessions)
        assert (state is None and same is None) or state.tobytes() == same.tobytes()
    restored = three.session(rules)
    restored.set_tokens(sessions[1].ids, sessions[1].kinds, sessions[1].depths, sessions[1].gone)
    for part, layer in itertools.product(("keys", "values", "aux", "remembered"), range(7)):
        if sessions[1].state_length(part, layer) > 0:
            restored.set_state(part, layer, sessions[1].state(part, layer))
    assert len({session.forward([1], True).tobytes() for session in (*sessions, restored)}) == 1
    if rules is None:
        surprisals = [session.surprisal(tiny.ids(30)) for session in sessions]
        assert surprisals[0].tobytes() == surprisals[1].tobytes()
    elif not rules["stages"][0][2:]:  # a prompt read in parts
        for session in sessions:
            session.read(tiny.ids(20))
        assert sessions[0].forward([5]).tobytes() == sessions[1].forward([5]).tobytes()


@fakes_only
def test_several_devices_after_calls_that_fail(
    tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed launch or reservation on any of them, or a score that is no number, leaves nothing to the next pass."""
    monkeypatch.setenv("LAZYLLM_CUDA_FAKE_DEVICES", "2")
    rules = pruning([(1, 0.6), (4, 0.4)], layers=4, memory=0.5)
    tiny = build(Shape(seed=50, n_layers=7), tmp_path)
    damaged = tiny.weights["model.embed_tokens.weight"].copy()
    damaged[7] = np.nan
    broken = build(tiny.shape, tmp_path, {"model.embed_tokens.weight": damaged})
    ids = [token for token in tiny.ids(40) if token != 7]
    want = tiny.load().session(rules).forward(ids)
    model = broken.load(device="cuda:0,1")
    session = model.session(rules)
    for _ in range(2):
        with pytest.raises(ValueError, match="no finite number"):
            session.forward([7, *ids])
        assert session.forward(ids).tobytes() == want.tobytes()
        session.truncate(0)
    for refused in itertools.count(1):
        runtime.refuse.value = refused
        try:
            assert session.forward(ids).tobytes() == want.tobytes()
            break
        except lazyllm.DeviceError:
            continue
    runtime.refuse.value = 0
    assert refused > 60
    halfway = 0  # reservations that cuda:0 has met, and cuda:1, which has a layer more, has not
    for room in range(760_000, 860_000, 5_000):
        session = model.session(rules)
        session.forward(ids)
        with monkeypatch.context() as limited:
            limited.setenv("LAZYLLM_CUDA_FAKE_MEMORY", str(runtime.bytes.value // 2 + room))
            try:
                session.reserve(500)
            except MemoryError as error:
                halfway += "cuda:1" in str(error)
            session.truncate(0)
            assert session.forward(ids).tobytes() == want.tobytes()
    assert halfway


@fakes_only
def test_what_devices_cannot_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZYLLM_CUDA_FAKE_DEVICES", "2")
    folder = model_folder(tmp_path)
    for device, text in (
        ("cuda:0,2", "there is no cuda:2"),
        ("cuda:" + ",".join("01" * 6), "the model has . layers to divide"),
        ("cuda:" + ",".join("0" * 17), "must be at most 16 GPUs"),
    ):
        with pytest.raises((ValueError, lazyllm.DeviceError), match=text):
            lazyllm.load(folder, device=device)
    assert lazyllm.load(folder, device="cuda:1,1").device == "cuda:1,1"


@fakes_only
def test_workers_have_a_device_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZYLLM_CUDA_FAKE_DEVICES", "2")
    folder, names = model_folder(tmp_path / "model"), ["cuda:0", "cuda:1"]
    here = lazyllm.load(folder, device="cuda:1")
    tasks = GeneratedTasks(here, RulerOptions(tasks=["niah_single_1"], lengths=[560], wrapper="none"))
    of_many = RunOptions(wrapper="none", workers=3)
    with connected(of_many, {}) as client:
        workers = client.scheduler_info(n_workers=-1)["workers"]
        by_number = sorted(workers, key=lambda address: workers[address]["name"])
        for wish, devices in ((None, [*names, "cuda:0"]), ("auto", [*names, "cuda:0"]), ("cuda:1", ["cuda:1"] * 3)):
            recipe = Recipe.of(here, tasks, scored_answer, replace(of_many, worker_device=wish))
            found = [
                client.submit(lambda it: worker_model(it).device, recipe, workers=[address], pure=False)
                for address in by_number
            ]
            assert client.gather(found) == devices


@fakes_only
def test_all_devices_of_a_machine_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZYLLM_CUDA_FAKE_DEVICES", "16")
    assert [nth_device("cuda", n) for n in (0, 15, 17)] == ["cuda:0", "cuda:15", "cuda:1"]
    assert [nth_device(device, 5) for device in ("auto", "cpu", "cuda:3")] == ["auto:5", "cpu", "cuda:3"]


@fakes_only
def test_a_command_with_workers_leaves_the_devices_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: Runtime
) -> None:
    monkeypatch.setenv("LAZYLLM_CUDA_FAKE_DEVICES", "2")
    monkeypatch.setenv("LAZYLLM_PROGRESS", "0")
    options = "--wrapper none --warm-ups 0 --datasets niah_single_1 --limit 1 --max-length 480 --max-new-tokens 2"
    call = ["longbench", "--model", str(model_folder(tmp_path / "model")), *options.split()]
    call += ["--out", str(tmp_path / "run")]
    before = runtime.peak.value = runtime.bytes.value
    assert main([*call, "--workers", "2", "--device", "cuda"]) == 0
    assert runtime.peak.value == before
    assert lazyllm.longbench.Run(tmp_path / "run").manifest["conditions"]["device"] == "cuda"


REFUSED = """
import sys, lazyllm
from lazyllm.machine.device import cuda_facts
try:
    lazyllm.load(sys.argv[1], device="cuda")
except (lazyllm.DeviceError, MemoryError) as error:
    print(error)
print(cuda_facts())
print(lazyllm.load(sys.argv[1], device="auto").device)
"""


@fakes_only
def test_a_driver_that_is_too_old_is_named(tmp_path: Path) -> None:
    said, facts, device = python(REFUSED, model_folder(tmp_path), LAZYLLM_CUDA_FAKE_DRIVER="12040").splitlines()
    for words in (
        "the driver is for CUDA 12.4",
        "13.0 or later (driver 580 or later)",
        "update the driver",
        "CUDA_HOME=/usr/local/cuda-12 LAZYLLM_CUDA=1",
    ):
        assert words in said
        assert words in facts
    assert device == "cpu"


@fakes_only
def test_what_cannot_fit_is_refused_with_the_numbers(tmp_path: Path) -> None:
    memory = (32 << 20) + (1 << 16)  # the workspace of products, and less than the weights
    said, _, device = python(REFUSED, model_folder(tmp_path), LAZYLLM_CUDA_FAKE_MEMORY=str(memory)).splitlines()
    assert "the weights take" in said
    assert "cuda:0 has" in said
    assert device == "cpu"


@pytest.fixture
def build_cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "cuda"))
    return importlib.import_module("build_cuda")


def program(path: Path, script: str) -> str:
    path.write_text(script)
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("driver", "wish", "taken", "says"),
    [
        ("580.65.06", "auto", "13", "13"),
        ("550.54.15", "auto", "12", "12"),
        ("470.82.01", "auto", None, "needs driver 580"),
        ("470.82.01", "1", "13", "needs driver 580"),
        (None, "auto", None, "no GPU driver"),
        (None, "1", "13", "LAZYLLM_CUDA=1"),
        ("580.65.06", "0", None, "LAZYLLM_CUDA=0"),
    ],
)
def test_the_nvcc_that_fits_the_driver(
    driver: str | None,
    wish: str,
    taken: str | None,
    says: str,
    build_cuda: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    says_version = "#!/bin/sh\necho 'Cuda compilation tools, release {0}.0, V{0}.0.88'\n"
    compilers = {version: program(tmp_path / version, says_version.format(version)) for version in ("13", "12")}
    monkeypatch.setattr(build_cuda, "all_nvcc", lambda: list(compilers.values()))
    monkeypatch.setattr(build_cuda, "DRIVER", tmp_path / "version")
    if driver:
        (tmp_path / "version").write_text(f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Release Build\n")
    nvcc, reason = build_cuda.wanted(wish)
    assert nvcc == (compilers[taken] if taken else None)
    assert says in reason


NVCC = """#!/bin/sh
case $1 in --list-gpu-code) echo sm_80 sm_90 sm_100; exit ;; esac
echo "$@" >>"${0%/*}/calls"
echo "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized"
while [ "$1" != -o ]; do shift; done
: >"$2"
"""


def test_what_nvcc_compiles(build_cuda: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all architectures or those that are asked for; again if they change; its notes are kept."""
    monkeypatch.setattr(build_cuda, "SOURCES", [Path("cuda/ranges.cu")])
    nvcc, calls = program(tmp_path / "nvcc", NVCC), tmp_path / "calls"

    def compiled() -> list[str]:
        calls.write_text("")
        build_cuda.build(nvcc, tmp_path / "library.so", tmp_path / "objects")
        return [line for line in calls.read_text().splitlines() if " -c " in line]

    monkeypatch.delenv("LAZYLLM_CUDA_ARCHS", raising=False)
    (line,) = compiled()
    codes = [word.partition("code=")[2] for word in line.split() if "code=" in word]
    assert codes == ["sm_80", "sm_90", "sm_100", "compute_90"]
    assert "(C7510)" in (tmp_path / "objects" / "ranges.log").read_text()
    assert compiled() == []
    monkeypatch.setenv("LAZYLLM_CUDA_ARCHS", "90")
    (line,) = compiled()
    assert line.count("code=") == 1
    assert "arch=compute_90,code=sm_90" in line
    monkeypatch.setenv("LAZYLLM_CUDA_ARCHS", "90,70")
    with pytest.raises(SystemExit, match=r"'90,70'; .* knows sm_80, sm_90, sm_100"):
        compiled()


@fakes_only
def test_a_session_that_cannot_grow_stays_as_it_was(seven_layers: Tiny) -> None:
    model = seven_layers.load()
    session, calm = model.session(None), model.session(None)
    session.forward(range(20))
    calm.forward(range(20))
    with pytest.raises((MemoryError, ValueError)):
        session.reserve(10**9 // 4)
    assert session.forward([5]).tobytes() == calm.forward([5]).tobytes()


# ---- launches ------------------------------------------------------------------------------------


class Runtime:
    """Counters and the failure switch of the fake CUDA runtime."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(os.environ["LAZYLLM_CUDA_LIBRARY"])

    def __getattr__(self, name: str) -> Any:
        return ctypes.c_ulonglong.in_dll(self.library, f"cuda_on_cpu_{name}")


@pytest.fixture
def runtime() -> Any:
    fake = Runtime()
    yield fake
    fake.refuse.value = 0


@pytest.fixture
def seven_layers(tmp_path: Path) -> Tiny:
    return build(Shape(seed=48, n_layers=7), tmp_path)


STAGES = [(0, 0.7), (2, 0.5), (4, 0.3)]
PASSES = [(40, False), (1, True), (1, True), (3, False), (1, True), (90, False), (1, True)]


# norm, q k v, rotation, attention, output projection, norm, gate and up, down projection
PER_LAYER = 8


@fakes_only
def test_any_launch_of_a_pruned_pass_may_fail(runtime: Runtime, seven_layers: Tiny) -> None:
    """The session is then as it was before: the same pass, once it succeeds, gives the same bits."""
    model, rules = seven_layers.load(), pruning(STAGES, memory=0.8)
    want = converse(model.session(rules), seven_layers, PASSES[:4])
    session, failed = model.session(rules), 0
    assert converse(session, seven_layers, PASSES[:2]) == want[:2]
    for number, (count, generated) in list(enumerate(PASSES))[2:4]:
        for nth_launch in itertools.count(1):
            runtime.refuse.value = nth_launch
            try:
                logits = session.forward(seven_layers.ids(count, number), generated)
                break
            except lazyllm.DeviceError:
                failed += 1
        runtime.refuse.value = 0
        assert state_after(session, logits, seven_layers.shape.n_layers) == want[number]
    assert failed > 2 * 60


@fakes_only
def test_the_launch_that_failed_is_named_with_its_place(runtime: Runtime, seven_layers: Tiny) -> None:
    session = seven_layers.load().session(None)
    session.forward(seven_layers.ids(40))
    runtime.refuse.value = 1 + 1 + PER_LAYER * 3 + 1
    with pytest.raises(lazyllm.DeviceError, match=r"^layer 3: attention norm: norm: too many resources"):
        session.forward([1], True)


def test_a_step_that_is_stopped(seven_layers: Tiny) -> None:
    model = seven_layers.load()
    want = converse(model.session(None), seven_layers, PASSES[:2])
    session = model.session(None)
    converse(session, seven_layers, PASSES[:2])

    def stop(done: int, n_layers: int) -> None:
        del session_made_meanwhile[:]  # closes another session on this thread during the pass
        raise KeyboardInterrupt

    session_made_meanwhile = [model.session(None)]
    session_made_meanwhile[0].forward([1, 2, 3])
    with pytest.raises(KeyboardInterrupt):
        session.forward([1], True, stop)
    assert session.length == 41
    assert converse(model.session(None), seven_layers, PASSES[:2]) == want


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_conversations_on_several_threads_give_the_same_bits(dtype: str, tmp_path: Path) -> None:
    """The context outgrows its buffers, so all addresses change between passes."""
    tiny = build(Shape(seed=48, n_layers=7, head_dim=64, dtype=dtype), tmp_path)
    model = tiny.load()
    each = [pruning(STAGES, smooth=3), pruning(STAGES, decode=[])]
    alone = [converse(model.session(rules), tiny, PASSES) for rules in each]
    with ThreadPoolExecutor() as pool:
        seen = list(pool.map(lambda rules: converse(model.session(rules), tiny, PASSES), each))
    assert seen == alone


@pytest.mark.parametrize("weights", ["q8", "q4"])
@pytest.mark.parametrize("n_experts", [0, 5])
def test_rounded_weights_answer_as_on_the_cpu(weights: str, n_experts: int, tmp_path: Path) -> None:
    """Prompts and decode steps, in f32, so that the tokens are the same."""
    experts = {**EXPERTS, "n_experts": n_experts, "expert_ffn": 32, "expert_layers": (1,), "qk_norm": True}
    shape = Shape(vocab=300, hidden=64, ffn=96)
    folder = model_folder(tmp_path, replace(shape, **experts) if n_experts else shape)
    cpu, gpu = (lazyllm.load(folder, device=device, weights=weights) for device in ("cpu", "cuda"))
    assert gpu.core.bytes == cpu.core.bytes
    for ids in ([5], list(range(3, 90))):
        got, want = (llm.core.session(None).forward(ids) for llm in (gpu, cpu))
        assert error(got, want) < LOGITS["F32"]
    rule = lazyllm.Pruning({1: 0.5})
    got, want = (llm.generate(list(range(90)), pruning=rule, max_new_tokens=12) for llm in (gpu, cpu))
    assert got.token_ids == want.token_ids


def test_a_gguf_file_of_several_formats_answers_as_on_the_cpu(tmp_path: Path) -> None:
    """Activations have 16 bits, although all that is not quantized, the norms and biases, is in f32."""
    files, stored = toy(["Q4_K", "Q6_K", "Q5_K", "Q8_0", "Q4_0"], biased=True)
    path = write_gguf(tmp_path / "model.gguf", *files, kind=stored)
    cpu, gpu = (lazyllm.load(path, device=device) for device in ("cpu", "cuda"))
    assert "bf16" in gpu.core.isa
    for ids in ([5], list(range(16)), list(range(100))):
        got, want = (llm.core.session(None).forward(ids) for llm in (gpu, cpu))
        assert error(got, want) < HALF_LOGITS["BF16"]


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_a_session_is_forked_and_restored_to_the_bit(tmp_path: Path, dtype: str) -> None:
    folder = model_folder(tmp_path, Shape(vocab=300, n_layers=5, dtype=dtype))
    llm = lazyllm.load(folder, device="cuda")
    session = llm.session(lazyllm.Pruning({0: 0.7, 2: 0.4}, scoring=lazyllm.Scoring(memory=0.8)))
    session.ask(list(range(40, 90)), max_new_tokens=5)
    session.save(tmp_path / "kept")
    # a fork of what was just restored copies rows that another stream is still uploading
    others = [session.fork(), llm.restore(tmp_path / "kept"), llm.restore(tmp_path / "kept").fork()]
    want = session.ask([5, 6, 7], max_new_tokens=6)
    for other in others:
        got = other.ask([5, 6, 7], max_new_tokens=6)
        assert (got.token_ids, got.passes.tolist()) == (want.token_ids, want.passes.tolist())
        assert other.core.logits.tobytes() == session.core.logits.tobytes()


@fakes_only
@pytest.mark.parametrize("weights", ["auto", "q8"])
@pytest.mark.parametrize("rules", [None, STAGES], ids=["dense", "pruned"])
def test_memory_is_planned_and_grows_buffer_by_buffer(
    runtime: Runtime, tmp_path: Path, rules: Any, weights: str
) -> None:
    checkpoint = build(Shape(seed=48, n_layers=7, ffn=64), tmp_path)
    model = checkpoint.load(weights=weights)
    model.session(None).reserve(400)  # makes the RoPE table, which the model keeps
    empty = runtime.bytes.value
    session = model.session(rules and pruning(rules))
    session.reserve(200)
    before = runtime.peak.value = runtime.bytes.value
    on_host = 200 * (17 + 10)  # what a pass uploads; ids, depths, kinds and marks of tokens
    assert before - empty == pytest.approx(session.bytes_for(200) - on_host, abs=64)
    session.reserve(400)
    assert runtime.peak.value - before < 1.4 * (runtime.bytes.value - before)
