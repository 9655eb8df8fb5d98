"""The benchmarks: rounds, goals, report and processes, and every suite on a tiny model."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from families import RECORDED
from folders import SHAPE
from tiny import DEVICE

import lazyllm
from benchmarks import kernels
from benchmarks.__main__ import EXAMPLE, INTERRUPTED, main
from benchmarks.measuring import bench as single_op
from benchmarks.measuring import ceilings, goals, rounds
from benchmarks.measuring.bench import Bench
from benchmarks.measuring.goals import Goal
from benchmarks.measuring.models import ModelShape
from benchmarks.measuring.place import Place
from benchmarks.measuring.process import Process
from benchmarks.measuring.report import Report, Row, Section
from benchmarks.measuring.rounds import Times
from benchmarks.options import Options
from benchmarks.peers import engines, gguf_file
from benchmarks.peers.openvino_peer import exported
from benchmarks.suites import SUITES, Suite, experts, formats, ops
from lazyllm.checkpoints.checkpoint import Checkpoint
from lazyllm.checkpoints.gguf import hugging_face_values
from lazyllm.checkpoints.gguf_checkpoint import GgufCheckpoint

Captured = pytest.CaptureFixture[str]
KINDS = ("many rows", "few rows", "Single rows", "Causal attention")  # of tables of ops
AT_LEAST, AT_MOST = Goal("share", 0.8), Goal("cost", 1.15, at_least=False)


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test compares times closely."""
    monkeypatch.setattr(rounds, "MIN_SECONDS", 0.002)
    monkeypatch.setattr(rounds, "PAUSE_SECONDS", 0.0)


@pytest.fixture
def small_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"n": 64, "rows": 64, "cols": 64}
    monkeypatch.setattr(Place, "memory_sweep", lambda place: place.bench("read", **sizes))
    monkeypatch.setattr(Place, "product_at_peak", lambda place: place.bench("multiply_adds", **sizes))
    monkeypatch.setattr(ceilings, "CUDA_RUNS", 1)


# ---- rounds, goals, report -------------------------------------------------------------------------


def test_contestants_take_turns_and_the_warm_up_does_not_count() -> None:
    ran: list[str] = []

    def contestant(name: str) -> rounds.Contestant:
        return lambda: ran.append(name) or float(len(ran))  # type: ignore[func-returns-value]

    times = rounds.in_turn({"a": contestant("a"), "b": contestant("b")}, 3, "test")
    assert "".join(ran) == "ab" * 4
    assert times == {"a": Times((3.0, 5.0, 7.0)), "b": Times((4.0, 6.0, 8.0))}
    assert (times["a"].median, str(times["a"])) == (5.0, "5 s (3 s to 7 s)")
    assert str(Times((0.002, 0.00005))) == "1.025 ms (50 µs to 2 ms)"


def test_short_work_is_timed_and_repeated_within_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(10))
    monkeypatch.setattr(rounds, "MIN_SECONDS", 4)
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(seconds)))
    ran: list[None] = []
    assert rounds.repeated(rounds.timed(lambda: ran.append(None))) == 1.0
    assert len(ran) == 4


def test_goals_in_both_directions() -> None:
    for goal, text, missed, met, worst in (
        (AT_LEAST, "≥ 0.8", [0.79], [0.8, 0.9], 0.79),
        (AT_MOST, "≤ 1.15", [1.2], [1.1, 1.15], 1.2),
    ):
        assert str(goal) == text
        assert [goal.verdict(value) for value in missed + met] == ["missed", "met", "met"]
        assert goal.worst(missed + met) == worst


def test_report_says_the_worst_of_each_goal_and_keeps_every_round(tmp_path: Path) -> None:
    report = Report(tmp_path / "out", {"cpu": "a chip"}, ["a note"])
    rows = [
        Row("one", {"time": Times((1.0, 3.0, 2.0)), "share": 0.9}, {"share": AT_LEAST}, {"threads": 1}),
        Row("two", {"time": Times((4.0,)), "share": 0.75, "cost": 1.1}, {"share": AT_LEAST, "cost": AT_MOST}),
    ]
    report.sections.append(Section("A table", rows, ("of a kind",), "ops"))
    report.failures["decode"] = "no memory"
    report.write()
    text = (tmp_path / "out" / "bench.md").read_text(encoding="utf-8")
    assert "| share | ≥ 0.8 | 0.75 | missed (1 of 2) | two (A table) |" in text
    assert "≥ 0.8 missed; ≤ 1.15 met" in text
    failure = "**The suite decode failed: no memory**"
    assert all(words in text for words in ("a chip", "a note", "of a kind", failure, "2 s (1 s to 3 s)"))
    plain = json.loads((tmp_path / "out" / "bench.json").read_text())
    first = plain["tables"][0]["rows"][0]
    assert first["figures"]["time"] == {"median": 2.0, "low": 1.0, "high": 3.0, "rounds": [1.0, 3.0, 2.0]}
    assert first["goals"]["share"]["verdict"] == "met"
    assert first["keys"] == {"threads": 1}
    assert plain["failures"] == {"decode": "no memory"}


class Worker:
    def __init__(self, fails: bool) -> None:
        if fails:
            raise ValueError("no such\nmodel")

    def facts(self) -> tuple[int, str | None]:
        return os.getpid(), os.environ.get("LAZYLLM_TEST_VARIABLE")

    def fail(self) -> None:
        raise KeyError("absent")

    def die(self) -> None:
        os._exit(7)


def test_a_process_has_its_own_environment_and_ends_and_says_why_it_fails() -> None:
    with Process(Worker, False, environment={"LAZYLLM_TEST_VARIABLE": "theirs"}) as worker:
        pid, variable = worker.call("facts")
        assert (variable, "LAZYLLM_TEST_VARIABLE" in os.environ) == ("theirs", False)
        assert pid != os.getpid()
        with pytest.raises(RuntimeError, match="KeyError: 'absent'"):
            worker.call("fail")
        assert worker.call("facts")[0] == pid  # an error does not end it
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(RuntimeError, match="ValueError: no such model"):
        Process(Worker, True, environment={})
    worker = Process(Worker, False, environment={})
    with pytest.raises(RuntimeError, match="its process ended with code 7"), worker:
        worker.call("die")


# ---- the command -----------------------------------------------------------------------------------


def bench(out: Path, *arguments: str, code: int = 0, place: Sequence[str] = ("--threads", "1")) -> Any:
    """The files that the suites have written."""
    call = ["--quick", "--rounds", "1", "--peers", "none", "--out", str(out), *place]
    assert main([*call, *arguments]) == code
    return json.loads((out / "bench.json").read_text())


def figures_of(plain: Any) -> dict[Any, Any]:
    """By suite and label."""
    return {(table["suite"], row["label"]): row["figures"] for table in plain["tables"] for row in table["rows"]}


def test_help_runs_from_a_clone_and_shows_an_example() -> None:
    command = [sys.executable, "-m", "benchmarks", "--help"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True)
    assert f"example:\n  {EXAMPLE}" in done.stdout
    assert all(name in done.stdout for name in SUITES)


def test_suites_of_a_model(folder: Path, tmp_path: Path, capsys: Captured, small_ceilings: None) -> None:
    suites = ["prefill", "pruned", "decode", "scaling", "memory", "formats", "generation"]
    plain = bench(tmp_path, *suites, "--model", str(folder), "--tokens", "48,64,9000", "--context", "128")
    out = capsys.readouterr().out
    assert "No goal is judged" in out
    assert "## Goals" not in out
    assert "Left out: 9000 tokens; the model's context is 600." in out
    assert list(dict.fromkeys(table["suite"] for table in plain["tables"])) == suites
    assert plain["machine"]["lazyllm"] == lazyllm.__version__
    assert (tmp_path / "bench.png").stat().st_size > 0
    rows = figures_of(plain)
    for r in (0, 4, 16, 64):
        assert rows["decode", f"{r} revived"]["revived, counted"] == r
        assert rows["decode", f"{r} revived"]["computed in the last layer"] == 1 + r
    exact, rounded = (rows["decode", f"compute f32, kv {kv}"]["MiB of a session"] for kv in ("f32", "bf16"))
    kept = 2 * SHAPE.n_layers * SHAPE.n_kv_heads * SHAPE.head_dim * 4 * 128 / 2**20
    assert exact - rounded == pytest.approx(kept / 2)
    one_stage = lazyllm.Pruning({SHAPE.n_layers // 2: 0.5}).speedup(lazyllm.load(folder).config, 64)
    assert rows["pruned", "one stage"]["counted"] == pytest.approx(one_stage)


def test_layers_with_experts(tmp_path: Path) -> None:
    (table,) = bench(tmp_path, "experts")["tables"]
    assert "4 of 16 experts" in table["title"]
    ratios = [row["figures"].get(experts.RATE) for row in table["rows"]]
    assert [ratio is None for ratio in ratios] == [True, False, True, False]


def test_goals_are_judged_at_full_lengths_and_rounds_only(
    folder: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch, small_ceilings: None
) -> None:
    call = ["--model", str(folder), "--tokens", "48", "--context", "128", "--threads", "1", "--peers", "none"]
    call += ["--out", str(tmp_path)]

    def judged(rounds: int, *suites: str) -> list[str]:
        assert main(["pruned", *suites, *call, "--rounds", str(rounds)]) == 0
        assert ("No goal is judged" in capsys.readouterr().out) == (rounds < 7)
        tables = json.loads((tmp_path / "bench.json").read_text())["tables"]
        return [name for table in tables for row in table["rows"] for name in row["goals"]]

    assert judged(rounds=7) == []
    monkeypatch.setattr(goals, "ON_CPU", replace(goals.ON_CPU, pruned_tokens=48))
    assert judged(rounds=6) == []
    assert set(judged(7, "decode", "scaling")) == {"measured / counted"}


def test_the_time_of_a_layer_is_the_difference_of_two_models(tmp_path: Path) -> None:
    deep, shallow = Times((5.0, 7.0, 6.0)), Times((2.0, 1.0, 3.0))
    subject = formats.Subject("a layer", tmp_path, (tmp_path, tmp_path), layers=4)
    assert subject.time([deep, shallow]) == Times((1.0, 2.0, 1.0))
    assert formats.Subject("whole", tmp_path, (tmp_path,)).time([deep]) == deep


def test_suites_of_random_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "ATTENTION_TOKENS", (48,))
    monkeypatch.setattr(ops, "VOCAB", 96)
    plain = bench(tmp_path, "ops", "shapes")
    titles = " ".join(table["title"] for table in plain["tables"])
    assert all(kind in titles for kind in (*KINDS, "Scores, selection", "A draw", "a layer of 135M"))
    product = figures_of(plain)["ops", "qkv, 512 x 576 to 960"]
    work = 2 * 512 * 576 * 960
    assert product["GFLOP/s"] == pytest.approx(work / product["ours"]["median"] / 1e9)
    assert product["of ceiling"] > 0


def test_tasks_are_counted(tmp_path: Path) -> None:
    """Tasks of one row of the 135M model: as docs/engine.md says; in a prefill each of 16 threads has work."""
    tables = bench(tmp_path, "tasks")["tables"]
    decode, prefill = ({row["label"]: row["figures"] for row in table["rows"]} for table in tables)
    tasks = {"qkv": "60", "output": "36", "gate and up": "64", "down": "36"}
    assert {op: decode[op]["tasks, 64 threads"] for op in tasks} == tasks
    assert (decode["output"]["turns, 2"], decode["output"]["idle, 64"]) == ("2", "44%")
    # 0 with AVX-512, where so few rows are not packed
    assert all(int(prefill[op]["idle, 16"].rstrip("%")) <= 10 for op in tasks)


def test_a_suite_that_fails_is_said_aloud_and_the_others_run(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    call = ["decode", "scaling", "--model", str(folder), "--tokens", "48", "--context", "590"]
    plain = bench(tmp_path, *call, code=1)
    assert "The suite decode failed: 590 tokens and 2 rounds of 8 steps make 606" in capsys.readouterr().out
    assert [table["suite"] for table in plain["tables"]] == ["scaling"]
    assert list(plain["failures"]) == ["decode"]


def test_ctrl_c_keeps_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(options: Options) -> Iterator[Section]:
        yield Section("The first half", [Row("a row", {"share": 0.5})])
        raise KeyboardInterrupt

    monkeypatch.setitem(SUITES, "memory", Suite(interrupted))
    bench(tmp_path, "memory", code=INTERRUPTED)
    assert "The first half" in (tmp_path / "bench.md").read_text(encoding="utf-8")


def test_generations_of_data_sets(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    data = tmp_path / "data"
    data.mkdir()
    item = {"input": "Why?", "context": "The sea is deep. " * 9, "answers": ["so"], "length": 4}
    (data / "sea.jsonl").write_text("\n".join([json.dumps(item)] * 3))
    call = ["generation", "--model", str(folder), "--data", str(data), "--tokens", "64"]
    figures = figures_of(bench(tmp_path, *call))["generation", "sea"]
    assert (figures["prompts"], figures["mean tokens"]) == (2, 64)
    assert len(figures["dense"]["rounds"]) == 2  # never fewer
    (data / "sea.jsonl").write_text("{}")
    bench(tmp_path, *call, code=1)
    assert "expected objects with input and context" in capsys.readouterr().out


def test_missing_peers_are_said_aloud(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda name: None if name == "torch" else object())
    here, notes = engines.choose_peers(None)
    assert here == ("llama.cpp",)
    assert [note for note in notes if "transformers is left out" in note and "pip install" in note]
    assert engines.choose_peers(["none"]) == ((), [])
    assert engines.choose_peers(["llama.cpp"], on_cpu=False)[0] == ()


def test_wrong_use_is_one_line(tmp_path: Path, capsys: Captured) -> None:
    for arguments, words in (
        (["opera"], "there is no suite 'opera'; the suites are ops, prefill"),
        (["--peers", "vllm"], "there is no peer 'vllm'; the peers are transformers"),
        (["--rounds", "0"], "rounds must be from 1 to"),
        (["--tokens", "0,5"], "tokens must be from 1 to"),
        (["--threads", "-1"], "threads must be from 1 to"),
        (["--device", "cuda", "--threads", "2"], "threads do not apply to cuda"),
        (["--device", "auto"], "device must be cpu, cuda or cuda:N"),
        (["--device", "gpu"], "not 'gpu'"),
    ):
        assert main([*arguments, "--out", str(tmp_path / "out")]) == 2
        err = capsys.readouterr().err
        assert words in err
        assert len(err.splitlines()) == 1
        assert not (tmp_path / "out").exists()


# ---- on a CUDA device ------------------------------------------------------------------------------

TINY = ModelShape("tiny", 4, 64, 2, 1, 64, 96)


@pytest.mark.skipif(DEVICE == "cpu", reason="LAZYLLM_TEST_DEVICE is not cuda")
def test_suites_on_cuda(folder: Path, tmp_path: Path, small_ceilings: None) -> None:
    """The suites of ops and shapes are steps of gpu_check.py."""
    suites = ["prefill", "pruned", "decode", "scaling", "memory"]
    call = ["--model", str(folder), "--tokens", "24", "--context", "128"]
    plain = bench(tmp_path, *suites, *call, place=["--device", DEVICE])
    assert plain["machine"]["GPU"].startswith("cuda:0 ")
    notes = " ".join(plain["notes"])
    assert "scaling is left out: it compares numbers of threads." in notes
    assert "memory is left out" in notes
    assert [table["suite"] for table in plain["tables"]] == ["prefill", "pruned", *2 * ["decode"]]
    assert all("cuda:0, " in table["title"] for table in plain["tables"])
    rows = figures_of(plain)
    assert rows["decode", "64 revived"]["revived, counted"] == 64
    assert rows["decode", "0 revived"]["time / none revived"] == 1


def test_ceilings_are_measured_once_per_table_on_a_gpu() -> None:
    """Two turns in one table, one in the next."""
    runs: list[None] = []
    bench = SimpleNamespace(run=lambda: runs.append(None) or 1.0)
    every_time, once = [ceilings.RUNS] * 3, [ceilings.CUDA_RUNS, 0, ceilings.CUDA_RUNS]
    for on_cpu, expected in ((True, every_time), (False, once)):
        place: Any = SimpleNamespace(on_cpu=on_cpu, product_at_peak=lambda: bench)
        measured = ceilings.Ceilings(place)
        (turn,) = measured.compute.values()
        for table, n_runs in zip((1, 1, 2), expected, strict=True):
            if table == 2:
                measured.begin_table()
            runs.clear()
            assert turn() == 1.0
            assert len(runs) == n_runs


def test_work_for_a_profiler_of_kernels(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"LARGE": TINY, "VOCAB": 96, "TOKENS": 40, "CONTEXT": 64, "DEVICE": DEVICE}
    for name, value in small.items():
        monkeypatch.setattr(kernels, name, value)
    kernels.main([])
    assert "40 prompt tokens, first token after" in capsys.readouterr().out
    launches = [("norm", 2.0), ("norm", 2.5), ("scores", 4.0)]
    events = [{"cat": "kernel", "name": name, "dur": micros} for name, micros in launches]
    lines = kernels.table([{"cat": "cpu_op", "name": "host", "dur": 9.0}, *events]).splitlines()[1:]
    assert [line.split() for line in lines] == [["4.5", "2", "2.25", "norm"], ["4.0", "1", "4.00", "scores"]]
    with pytest.raises(SystemExit, match="saw no kernel"):
        kernels.table(events[:0])


def test_goals_depend_on_place_and_model() -> None:
    assert goals.goals_of_model(True, True, 576).prefill is goals.PREFILL
    assert goals.goals_of_model(True, False, 4096).prefill is None
    assert goals.goals_of_model(False, True, 576) == goals.ON_CUDA
    assert goals.goals_of_model(False, False, 4096).prefill is goals.CUDA_PREFILL


# ---- the peers' models -----------------------------------------------------------------------------


def test_gguf_files_of_other_features_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot hold the features of GraniteForCausalLM"):
        gguf_file.gguf_file(RECORDED / "families" / "granite", "F16", tmp_path)


@pytest.mark.parametrize("kind", ["F16", "BF16"])
@pytest.mark.parametrize("family", ["smollm2", "gemma3"])
def test_gguf_file_holds_the_checkpoint(family: str, kind: str, tmp_path: Path) -> None:
    folder = shutil.copytree(RECORDED / "families" / family, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    if family == "gemma3":
        with pytest.raises(ValueError, match="cannot hold"):
            gguf_file.gguf_file(folder, kind, tmp_path)
        config |= {"rope_scaling": None, "sliding_window_pattern": 6}
        (folder / "config.json").write_text(json.dumps(config))
    path = gguf_file.gguf_file(folder, kind, tmp_path)
    assert gguf_file.gguf_file(folder, kind, tmp_path) == path
    converted, checkpoint = GgufCheckpoint(path), Checkpoint(folder)
    ours = converted.config_json
    for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps"):
        assert ours[name] == config[name]
    assert ours.get("sliding_window") == config.get("sliding_window")
    stored = {tensor[0]: gguf_file.decoded(checkpoint, tensor) for tensor in checkpoint.tensors}
    assert {tensor.name for tensor in converted.tensors} == set(stored)
    for tensor in converted.tensors:
        name, values = tensor.name, np.concatenate([*hugging_face_values(converted, tensor)])
        want = stored[name].ravel()
        if kind == "F16" and stored[name].ndim > 1:
            want = want.astype(np.float16)
        if family == "gemma3" and "norm" in name:
            want = want + np.float32(1) - np.float32(1)  # the file holds 1 + weight
        assert np.array_equal(values, want.astype(np.float32)), name


def test_rotary_frequencies_become_a_base_and_divisors(folder: Path) -> None:
    config = Checkpoint(folder).config
    assert gguf_file.rotary(config)[0] == pytest.approx(10000.0, rel=1e-4)
    assert gguf_file.rotary(config)[1] is None
    (plain,) = config.inv_freq
    scaled = replace(config, inv_freq=((*plain[:2], *(f / 4 for f in plain[2:])),))
    theta, divisors = gguf_file.rotary(scaled)
    assert theta == pytest.approx(10000.0, rel=1e-4)
    assert divisors is not None
    assert divisors.tolist() == pytest.approx([1, 1, 4, 4], rel=1e-4)
    with pytest.raises(ValueError, match="yarn"):
        gguf_file.rotary(replace(config, rope_scale=(1.2,)))


def test_a_model_without_its_export_is_refused_with_the_command(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"optimum-cli export openvino .*--model {folder} {tmp_path}") as refused:
        exported(folder, tmp_path)
    target = Path(str(refused.value).rpartition(" ")[2])
    target.mkdir()
    (target / "openvino_model.xml").touch()
    assert exported(folder, tmp_path) == target


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["transformers", "llama.cpp"])
def test_peers_run_the_same_model(name: str, demo_model: Path, tmp_path: Path) -> None:
    if engines.PEERS[name].missing:
        pytest.skip(f"{name} is not installed")
    ids = np.random.default_rng(0).integers(0, 49152, 40).tolist()
    ours = lazyllm.load(demo_model).session().forward(ids)
    if name == "llama.cpp":
        opened = engines.llama_cpp_peer(gguf_file.gguf_file(demo_model, "F16", tmp_path), 64, Place(1))
    else:
        opened = engines.transformers_peer(demo_model, "float32", Place(1))
    with opened as peer:
        theirs = peer.call("logits", ids)
        assert np.abs(theirs - ours).max() < (0.1 if name == "llama.cpp" else 1e-3)
        assert peer.call("prefill", ids) > 0
        assert peer.call("decode", ids[:2]) > 0


def test_sizes_that_are_left_out_are_one_head_of_64() -> None:
    sizes = {"n": 1, "m": 1, "rows": 1, "cols": 1, "n_heads": 1, "n_kv_heads": 1, "head_dim": 64}
    for op in ("matmul", "attention", "rotate", "embed"):
        plain, spelled = Bench(op), Bench(op, **sizes, dtype="bf16")
        assert (plain.flops, plain.bytes) == (spelled.flops, spelled.bytes), op


def test_single_ops_need_the_objects_of_the_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single_op, "OBJECTS", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"binder\.o is missing: install lazyllm from "):
        single_op.build()


def test_a_product_of_each_kind_of_weights() -> None:
    """Each format has random weights of its own; the time of one run is finite and more than none."""
    for dtype in ("f32", "f16", "bf16", "q8_0", "q4_k"):
        assert 0 < Bench("matmul", n=2, rows=8, cols=256, dtype=dtype).run() < 60, dtype


def test_an_op_refuses_what_makes_no_sense() -> None:
    for op, given, named in (
        ("gated", {"rows": 7, "cols": 4}, "even"),
        ("matmul", {"rows": 4, "cols": 48, "dtype": "q8_0"}, "Q8_0 stores whole blocks of 32"),
        ("matmul", {"rows": 4, "cols": 4, "n": 0}, "n is 0"),
        ("matmul", {"rows": 4, "cols": 4, "threads": 10**6}, "threads"),
        ("attention", {"n": 3, "m": 2}, "less than"),
        ("attention", {"n_heads": 3, "n_kv_heads": 2}, "divide"),
        ("attention", {"head_dim": 10**6}, "a head may have 1 to"),
        ("embed", {"rows": 0}, "at least 1"),
        ("fly", {}, "no op"),
        ("read", {"dtype": "q8_0" * 1000}, "must be a format"),
    ):
        with pytest.raises(ValueError, match=named):
            Bench(op, **given)
