"""benchmarks/gpu_check.py with fakes for all commands: each step fails, hangs or is killed."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "gpu_check.py"
TOOLS = ("nvidia-smi", "nvcc", "make", "git", "compute-sanitizer", "ncu", "nsys", "python")

FAKE = Path(__file__).parent / "fake_gpu_tool.sh"

PHASES = {
    "machine": ["nvidia-smi -q", "version of nvcc", "versions of packages", "commit"],
    "build": ["build test_harness", "build test_ops", "build test_gemm"],
    "harness": [
        "mma fragments",
        "assumptions of the CPU harness",
        "wgmma layouts, bf16",
        "wgmma layouts, f16",
    ],
    "ops": ["every op", "attention by wgmma"],
    "products": ["matrix products"],
    "package": ["build the Python package", "CUDA facts", "torch with CUDA"],
    "shapes": ["benchmark 7B shapes"],
    "shapes-wgmma": ["benchmark 7B shapes, wgmma"],
    "attention": ["benchmark ops"],
    "profile": ["kernels by ncu"],
    "engine": ["test_cuda.py", "test_damage.py", "test_facts.py", "test_method.py", "test_benchmarks.py"],
    "sanitizers": ["memcheck", "racecheck"],
}
TROUBLES = {"fail": "exit code 3; it broke", "hang": "timed out after 0.05 s", "killed": "by SIGKILL"}


class House:
    """A copy of the script in a tree of its own, whose commands are all fakes."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root, self.fakes, self.results = root / "house", root / "fakes", root / "results"
        fakes = [self.fakes / "bin" / tool for tool in TOOLS] + [self.root / ".venv" / "bin" / "python"]
        fakes += [self.root / "build" / "gpu" / f"test_{name}" for name in ("harness", "ops", "gemm")]
        for path in fakes:
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(FAKE, path)
        (self.fakes / "device").write_text("9.0, NVIDIA Fake 100\n")
        for name in ("benchmarks", "cuda", ".git"):
            (self.root / name).mkdir()
        self.script = Path(shutil.copy(SCRIPT, self.root / "benchmarks"))
        finds = 'import shutil\n\ndef find_nvcc():\n    return shutil.which("nvcc")\n'
        (self.root / "cuda" / "build_cuda.py").write_text(finds)
        patch.setenv("FAKES", str(self.fakes))
        patch.setenv("PATH", f"{self.fakes / 'bin'}:/usr/bin:/bin")
        patch.syspath_prepend(self.script.parent)
        for name in ("gpu_check", "build_cuda"):
            patch.delitem(sys.modules, name, raising=False)
        self.module: Any = import_module("gpu_check")
        self.limits: dict[str, float] = {}
        self.commands: dict[str, list[str]] = {}
        run, limit = self.module.Check.run, self.module.Check.limit

        def noted(check: Any, step: Any) -> None:
            self.commands[step.name] = step.command
            run(check, step)

        def shorter(check: Any, step: Any) -> float:
            return float(min(self.limits.get(step.name, 60), limit(check, step)))

        patch.setattr(self.module.Check, "run", noted)
        patch.setattr(self.module.Check, "limit", shorter)

    def trouble(self, step: str, kind: str) -> None:
        """The step's command, known from an earlier run, misbehaves."""
        folder = self.fakes / "trouble" / "".join(filter(str.isalnum, step))
        folder.mkdir(parents=True, exist_ok=True)
        name, *arguments = self.commands[step]
        (folder / "line").write_text("".join(f"{word} " for word in (Path(name).name, *arguments)))
        (folder / "kind").write_text(kind)
        self.limits[step] = 0.05 if kind in ("hang", "stubborn") else 60

    def untroubled(self) -> None:
        shutil.rmtree(self.fakes / "trouble")
        self.limits.clear()

    def run(self, *arguments: str) -> int:
        (self.fakes / "calls").write_text("")
        before = signal.getsignal(signal.SIGTERM)
        try:
            return int(self.module.main(["--out", str(self.results), *arguments]))
        finally:
            signal.signal(signal.SIGTERM, before)

    def built(self) -> None:
        """A folder after the phases build and package."""
        steps = [*PHASES["build"], *PHASES["package"]]
        self.results.mkdir()
        (self.results / "check.json").write_text(json.dumps([{step: ["ok", "0", ""] for step in steps}, ""]))

    def phases(self, *names: str) -> int:
        return self.run(*(word for name in names for word in ("--phase", name)))

    @property
    def rows(self) -> dict[str, list[str]]:
        return dict(json.loads((self.results / "check.json").read_text())[0])

    @property
    def summary(self) -> str:
        return (self.results / "check.md").read_text()

    def logs(self) -> dict[str, str]:
        with tarfile.open(self.results / "logs.tar.gz") as packed:
            files = {member.name: packed.extractfile(member) for member in packed.getmembers()}
            return {Path(name).name: file.read().decode() for name, file in files.items() if file}

    def called(self, words: str) -> bool:
        return words in (self.fakes / "calls").read_text()


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> House:
    return House(tmp_path, monkeypatch)


def test_everything_runs_in_order(house: House) -> None:
    house.results.mkdir()
    (house.results / "check.json").write_text('[{"a step of an earlier check": ["FAILED", "0", ""]}, ""]')
    assert house.run() == 0
    assert list(house.rows) == [step for steps in PHASES.values() for step in steps]
    assert {row[0] for row in house.rows.values()} == {"ok"}
    assert "nothing failed" in house.summary
    assert "Goals, 7B_shapes:\n\n| goal | verdict |\n" in house.summary
    assert "no goal" not in house.summary
    assert house.logs()["every_op.log"] == "all is well\n"
    assert house.logs()["clocks.csv"] == "clocks\n"
    calls = (house.fakes / "calls").read_text()
    hopper = [line for line in calls.splitlines() if line.endswith("HOPPER")]
    assert len(hopper) == 4
    assert all("wgmma" in line for line in hopper)
    memcheck = "--tool memcheck --report-api-errors no --error-exitcode 9 build/gpu/test_ops without_wgmma"
    assert memcheck in calls
    assert "GPU_ARCH=sm_90a" in calls
    assert "build_ext --inplace for 90\n" in calls
    assert "--rounds 3" in calls


@pytest.mark.parametrize("phase", PHASES)
def test_a_step_that_does_not_pass_is_a_failure_and_the_others_run(house: House, phase: str) -> None:
    """One step after the other, each in its own way."""
    house.built()
    assert house.phases(phase) == 0
    later, last = ("ops", "every op") if phase in ("products", "build") else ("products", "matrix products")
    for number, step in enumerate(PHASES[phase], list(PHASES).index(phase)):
        kind = [*TROUBLES][number % 3]
        house.trouble(step, kind)
        assert house.phases(phase, later) == 1
        result, _, detail = house.rows[step]
        assert result == "FAILED"
        assert TROUBLES[kind] in detail
        row = next(line for line in house.summary.splitlines() if line.startswith(f"| {step} | FAILED |"))
        assert TROUBLES[kind] in row
        assert f"\n1 failed: {step}\n" in house.summary
        assert set(PHASES[phase]) <= set(house.rows)
        assert house.rows[last][0] == ("skipped" if step == "build test_ops" else "ok")
        assert "all is well" not in house.logs()["".join(c if c.isalnum() else "_" for c in step) + ".log"]
        house.untroubled()


def test_what_was_not_built_is_skipped_and_hides_nothing_else(house: House) -> None:
    assert house.run() == 0
    house.trouble("build test_ops", "fail")
    house.trouble("build the Python package", "hang")
    assert house.run() == 1
    assert "2 failed: build test_ops, build the Python package\n" in house.summary
    skipped = {name: row[2] for name, row in house.rows.items() if row[0] == "skipped"}
    for name in ("every op", "attention by wgmma", "memcheck"):
        assert skipped[name] == "test_ops is not built: --phase build"
    for name in ("CUDA facts", "benchmark 7B shapes", "kernels by ncu", "test_cuda.py"):
        assert skipped[name] == "the Python package is not built: --phase package"
    for name in ("mma fragments", "matrix products"):
        assert house.rows[name][0] == "ok"


@pytest.mark.parametrize("kind", TROUBLES)
def test_wgmma_is_switched_off_by_its_first_failure(house: House, kind: str) -> None:
    house.built()
    phases = ("harness", "ops", "shapes", "shapes-wgmma")
    assert house.phases(*phases) == 0
    house.trouble("wgmma layouts, bf16", kind)
    assert house.phases(*phases) == 1
    assert not house.called("wgmma_alone")
    for name in ("wgmma layouts, f16", "attention by wgmma", "benchmark 7B shapes, wgmma"):
        result, _, detail = house.rows[name]
        assert result == "skipped"
        assert detail.startswith("wgmma is off: wgmma layouts, bf16: ")
    assert house.rows["benchmark 7B shapes"][0] == "ok"
    assert house.phases("shapes-wgmma") == 0
    assert house.rows["benchmark 7B shapes, wgmma"][0] == "skipped"
    assert "1 failed: wgmma layouts, bf16\n" in house.summary
    house.untroubled()
    assert house.phases("harness", "shapes-wgmma") == 0
    assert house.rows["benchmark 7B shapes, wgmma"][0] == "ok"
    assert "nothing failed" in house.summary


def test_what_switched_wgmma_off_may_switch_it_on_again(house: House) -> None:
    house.built()
    assert house.phases("shapes-wgmma") == 0
    house.trouble("benchmark 7B shapes, wgmma", "fail")
    assert house.phases("shapes-wgmma", "ops") == 1
    assert house.phases("shapes-wgmma") == 1  # not skipped
    house.untroubled()
    assert house.phases("ops") == 0
    assert house.rows["attention by wgmma"][0] == "skipped"
    assert house.phases("shapes-wgmma", "ops") == 0
    assert house.rows["attention by wgmma"][0] == "ok"


def test_wgmma_is_for_hopper_alone(house: House) -> None:
    (house.fakes / "device").write_text("8.0, NVIDIA Fake 80\n")
    assert house.phases("build", "harness", "ops") == 0
    assert house.rows["attention by wgmma"][2] == "wgmma is for devices of 9.0; this one is of 8.0"
    assert not house.called("HOPPER")
    assert house.called("GPU_ARCH=native")


def test_the_profilers_take_over_from_one_another(house: House) -> None:
    assert house.run() == 0
    house.trouble("kernels by ncu", "refused")
    assert house.phases("profile") == 0
    assert house.rows["kernels by ncu"][0] == "skipped"
    assert house.rows["kernels by CUPTI"][0] == "ok"
    house.trouble("kernels by CUPTI", "fail")
    assert house.phases("profile") == 1
    assert house.rows["kernels by nsys"][0] == "ok"
    house.trouble("kernels by nsys", "hang")
    assert house.phases("profile") == 1
    assert "2 failed: kernels by CUPTI, kernels by nsys" in house.summary


def test_a_machine_without_a_fit_python(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(house.root / ".venv")
    monkeypatch.setattr(house.module, "NEEDED", ["no_such_module"])
    house.commands["make .venv"] = ["make", ".venv/test.stamp"]
    house.trouble("make .venv", "hang")
    assert house.phases("build", "package", "engine", "ops") == 1
    assert "1 failed: make .venv\n" in house.summary
    assert house.rows["build the Python package"][2] == "no Python of 3.11 with all of no_such_module"
    assert house.rows["test_cuda.py"][0] == "skipped"
    assert house.rows["every op"][0] == "ok"


def test_what_ignores_the_first_signal_is_killed_with_its_children(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(house.module, "TERM_SECONDS", 0.1)
    assert house.phases("build", "ops") == 0
    house.trouble("every op", "stubborn")
    house.limits["every op"] = 2  # to start, on a busy machine
    assert house.phases("ops") == 1
    assert house.rows["every op"][2].startswith("timed out after 2 s")
    grandchild = int((house.fakes / "grandchild").read_text())
    deadline = time.monotonic() + 10
    while alive(grandchild) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(grandchild)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_options_list_the_phases_limit_the_time_and_ask_for_more(
    house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step that no time is left for is a failure. --full takes seven rounds and twice the time."""
    assert house.run("--list") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(PHASES)
    house.built()
    assert house.run("--phase", "products", "--minutes", "0.1") == 1
    assert house.rows["matrix products"] == ["FAILED", "0", "no time was left"]
    house.limits = {"every op": 1000}
    assert house.run("--full", "--phase", "ops", "--phase", "attention", "--phase", "sanitizers") == 0
    assert house.called("--rounds 7")
    assert house.called("test_ops without_wgmma \n")
    assert "every op (at most 360 s)" in capsys.readouterr().out


def test_the_script_by_itself(house: House) -> None:
    """The script is stopped from outside in the middle of a step, as on a GPU."""
    call = [sys.executable, str(house.script), "--out", str(house.results)]
    assert house.phases("build", "ops") == 0
    house.trouble("every op", "hang")
    process = subprocess.Popen([*call, "--phase", "ops"], stdout=subprocess.DEVNULL)
    log = house.root / "build" / "gpu_check" / "logs" / "every_op.log"
    while log.read_text() != "so far\n":
        assert process.poll() is None
        time.sleep(0.01)
    process.terminate()
    assert process.wait(30) == 128 + signal.SIGTERM
    assert house.rows["every op"][2] == "stopped together with the check; so far"
    assert house.logs()["every_op.log"] == "so far\n"
    house.untroubled()
    done = subprocess.run(call, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "nothing failed" in done.stdout
    (house.fakes / "device").write_text("")
    done = subprocess.run(call, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "gpu_check: nvidia-smi is not installed, does not answer or knows no GPU\n"


@pytest.mark.parametrize("tool", ["nvcc", "make"])
def test_a_tool_that_is_missing_ends_the_check_at_once(
    house: House, tool: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, **place: None if name == tool else found(name, **place))
    assert house.run() == 2
    assert tool in capsys.readouterr().err
    assert not house.results.exists()
