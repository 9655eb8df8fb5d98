"""benchmarks/gpu_check.py with fakes for all commands: steps fail, hang and are killed."""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
TOOLS = ("nvidia-smi", "nvcc", "make", "git", "compute-sanitizer")
STEPS = [
    *("nvidia-smi -q", "version of nvcc", "versions of packages", "commit"),
    *("build test_harness", "build test_ops", "build test_gemm"),
    *("assumptions of the CPU harness", "wgmma layouts, bf16", "wgmma layouts, f16"),
    *("every op", "matrix products", "memcheck", "racecheck"),
    *("build the Python package", "CUDA facts"),
    *("test_cuda.py", "test_damage.py", "test_facts.py", "test_method.py"),
    *("benchmark shapes", "benchmark ops", "time of each kernel"),
]


class House:
    """A copy of the script in a tree of its own, whose commands are all fakes."""

    def __init__(self, root: Path) -> None:
        self.root, self.fakes, self.results = root / "house", root / "fakes", root / "results"
        fakes = [self.fakes / "bin" / tool for tool in TOOLS] + [self.root / ".venv" / "bin" / "python"]
        fakes += [self.root / "build" / "gpu" / f"test_{name}" for name in ("harness", "ops", "gemm")]
        for path in fakes:
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(TESTS / "fake_gpu_tool.sh", path)
        (self.fakes / "device").write_text("9.0, NVIDIA Fake 100\n")
        for name in ("benchmarks", "cuda"):
            (self.root / name).mkdir()
        self.script = Path(shutil.copy(TESTS.parent / "benchmarks" / "gpu_check.py", self.root / "benchmarks"))
        finds = 'import shutil\n\ndef find_nvcc():\n    return shutil.which("nvcc")\n'
        (self.root / "cuda" / "build_cuda.py").write_text(finds)
        self.env = {**os.environ, "FAKES": str(self.fakes), "PATH": f"{self.fakes / 'bin'}:/usr/bin:/bin"}
        self.env.pop("LAZYLLM_CUDA_ARCHS", None)  # what the script itself asks for is looked at

    def trouble(self, line: str, kind: str) -> None:
        """The command of this line misbehaves."""
        folder = self.fakes / "trouble" / str(len(list(self.fakes.glob("trouble/*"))))
        folder.mkdir(parents=True)
        (folder / "line").write_text(line + " ")
        (folder / "kind").write_text(kind)

    def limit(self, before: str, after: str) -> None:
        text = self.script.read_text()
        assert text.count(before) == 1
        self.script.write_text(text.replace(before, after))

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(self.script), "--out", str(self.results), *arguments]
        return subprocess.run(command, env=self.env, capture_output=True, text=True)

    @property
    def rows(self) -> dict[str, list[str]]:
        """Result, seconds and last words of each step."""
        lines = (self.results / "check.md").read_text().partition("|---|---|---|---|\n")[2].partition("\n\n")[0]
        cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines.splitlines())
        return {name: rest for name, *rest in cells}

    def calls(self) -> str:
        return (self.fakes / "calls").read_text()


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


def test_everything_runs_in_order(house: House) -> None:
    done = house.run("--full")
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(house.rows) == STEPS
    assert {row[0] for row in house.rows.values()} == {"ok"}
    assert "nothing failed" in done.stdout
    assert "Goals, shapes:\n\n| goal | verdict |\n" in done.stdout
    assert "no goal" not in done.stdout
    assert (house.results / "logs" / "every_op.log").read_text() == "all is well\n"
    assert "--tool memcheck --report-api-errors no --error-exitcode 9 build/gpu/test_ops \n" in house.calls()
    assert "--tool racecheck --error-exitcode 9 build/gpu/test_ops quick \n" in house.calls()
    assert "GPU_ARCH=sm_90a" in house.calls()
    assert "build_ext --inplace for 90\n" in house.calls()
    assert "--rounds 7" in house.calls()


def test_a_step_that_does_not_pass_is_a_failure_and_the_others_run(house: House) -> None:
    """Steps that need a failed one are skipped."""
    nvcc = house.fakes / "bin" / "nvcc"
    house.trouble(f"make -j{os.cpu_count()} NVCC={nvcc} GPU_ARCH=sm_90a build/gpu/test_gemm", "fail")
    house.trouble("test_harness wgmma_bf16", "hang")
    house.trouble("python -m pytest -v -p no:cacheprovider tests/test_facts.py", "killed")
    house.limit("layout, 60,", "layout, 0.5,")
    done = house.run()
    assert done.returncode == 1
    assert "\n3 failed: build test_gemm, wgmma layouts, bf16, test_facts.py\n" in done.stdout
    said = {name: (row[0], row[2]) for name, row in house.rows.items() if row[0] != "ok"}
    assert said == {
        "build test_gemm": ("FAILED", "exit code 3; it broke"),
        "wgmma layouts, bf16": ("FAILED", "timed out after 0.5 s; so far"),
        "matrix products": ("skipped", "build test_gemm did not pass"),
        "test_facts.py": ("FAILED", "killed by SIGKILL"),
    }


def test_wgmma_is_for_hopper_alone(house: House) -> None:
    (house.fakes / "device").write_text("8.0, NVIDIA Fake 80\n")
    assert house.run("--only", "test_harness").returncode == 0
    assert house.run("--only", "wgmma").returncode == 0
    assert house.rows["wgmma layouts, f16"][::2] == ["skipped", "wgmma is for compute capability 9.0"]
    assert "GPU_ARCH=native" in house.calls()


def test_the_check_is_stopped_with_its_step_and_the_children_of_that(house: House) -> None:
    """Which ignore the first signal."""
    house.trouble("test_ops", "stubborn")
    house.limit("TERM_SECONDS, KILL_SECONDS = 5, 10", "TERM_SECONDS, KILL_SECONDS = 0.1, 10")
    command = [sys.executable, str(house.script), "--out", str(house.results), "--only", "every op"]
    process = subprocess.Popen(command, env=house.env, stdout=subprocess.DEVNULL)
    while not (house.fakes / "grandchild").exists() or not (house.fakes / "grandchild").read_text():
        assert process.poll() is None
        time.sleep(0.01)
    process.terminate()
    assert process.wait(30) == 128 + signal.SIGTERM
    grandchild, deadline = (house.fakes / "grandchild").read_text().strip(), time.monotonic() + 10
    with suppress(OSError):  # it is gone
        while Path(f"/proc/{grandchild}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize("tool", ["nvidia-smi", "nvcc"])
def test_a_tool_that_is_missing_ends_the_check_at_once(house: House, tool: str) -> None:
    (house.fakes / "bin" / tool).unlink()
    done = house.run()
    assert (done.returncode, house.results.exists()) == (2, False)
    assert tool in done.stderr


def test_a_word_in_no_step_is_an_error(house: House) -> None:
    done = house.run("--only", "atention")
    assert (done.returncode, done.stderr) == (2, "gpu_check: no step's name holds 'atention'\n")
