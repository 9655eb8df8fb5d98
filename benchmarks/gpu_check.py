#!/usr/bin/env python3
"""Builds, tests and measures the CUDA core on a machine with a GPU, in phases of at most eight minutes.

  benchmarks/gpu_check.py                       every phase in turn, in at most 45 minutes
  benchmarks/gpu_check.py --list                the phases
  benchmarks/gpu_check.py --phase build --phase ops
  benchmarks/gpu_check.py --full --minutes 90   7 rounds, as goals need, and more under the sanitizer

The folder for the results (--out, default benchmarks/results/DATE-GPU) holds check.md, with a row for each
step, to which phases that are run later are added; the reports of the benchmarks; and logs.tar.gz, with what
every step printed. A step fails if its command fails, is killed or does not end in time; the others run all
the same. A step that cannot run is skipped, with the reason. The exit code is 1 if a step failed, and 2 if
there is no GPU, no nvcc or no make. Nothing is downloaded if .venv or python3 has the package's dependencies.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "gpu_check"
PROGRAMS = Path("build", "gpu")
PHASE_SECONDS, MARGIN_SECONDS = 480, 20
TERM_SECONDS, KILL_SECONDS = 5, 10  # then a process that is stuck in the driver is left behind
NEEDED = ["numpy", "safetensors", "tokenizers", "jinja2", "tqdm", "setuptools"]
OK, FAILED, SKIPPED = "ok", "FAILED", "skipped"
PACKAGE, TORCH = "build the Python package", "torch with CUDA"  # steps that others depend on
WGMMA_OFF, NO_GPU = "wgmma is off", "torch knows no GPU"
MONITORED = "timestamp,clocks.sm,clocks.mem,power.draw,power.limit,temperature.gpu,utilization.gpu"

HAS = """
import importlib.util, sys
found = [importlib.util.find_spec(name) for name in sys.argv[1:]]
sys.exit(sys.version_info < (3, 11) or None in found)
"""
VERSIONS = """
import importlib.metadata, platform
installed = {entry.metadata["Name"]: entry.version for entry in importlib.metadata.distributions()}
for name in ("numpy", "torch", "transformers", "nvidia-cublas", "nvidia-cublas-cu12"):
    print(name, installed.get(name, "is not installed"))
print("Python", platform.python_version(), "on", platform.platform())
"""
FACTS = """
from lazyllm.machine.device import cuda_facts
print(cuda_facts())
raise SystemExit(cuda_facts().startswith("off"))
"""
SEES_GPU = f"""
import torch
print(torch.__version__, "for CUDA", torch.version.cuda)
raise SystemExit(0 if torch.cuda.is_available() else {NO_GPU!r})
"""


@dataclass
class Step:
    name: str
    command: list[str]
    limit: float  # seconds
    env: dict[str, str] = field(default_factory=dict)
    cannot: str = ""  # the reason, if it cannot run
    excuse: str = ""  # a failure whose log holds this text counts as a step that cannot run
    wgmma: bool = False  # runs the kernels that use wgmma


@dataclass
class Machine:
    gpu: str
    capability: str
    nvcc: str


# ---- commands ----


def run_command(command: list[str], env: dict[str, str], log: Path, limit: float) -> str:
    """The failure as text, or "". Leaves nothing running."""
    with log.open("wb") as out:
        try:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        except OSError as error:
            return f"cannot start: {error}"
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            return f"timed out after {limit:.3g} s"
        finally:
            stop(process)
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}" if code else ""


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and all that it started."""
    for number, seconds in ((signal.SIGTERM, TERM_SECONDS), (signal.SIGKILL, KILL_SECONDS)):
        try:
            os.killpg(process.pid, number)
            process.wait(seconds)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            pass


def output_of(command: list[str]) -> str | None:
    """None if the command fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, timeout=60, check=True, capture_output=True, text=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def beside(nvcc: str, name: str) -> str | None:
    """A tool on the PATH or in nvcc's folder."""
    return shutil.which(name) or shutil.which(name, path=str(Path(nvcc).resolve().parent))


# ---- the check ----


class Check:
    def __init__(self, machine: Machine, results: Path, minutes: float, full: bool) -> None:
        self.machine, self.results, self.full = machine, results, full
        self.end = self.phase_end = time.monotonic() + 60 * minutes - MARGIN_SECONDS
        self.logs = WORK / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        results.mkdir(parents=True, exist_ok=True)
        self.saved = results / "check.json"
        self.rows: dict[str, list[str]] = {}  # of each step: result, seconds, detail
        self.wgmma_off = ""  # the reason
        if self.saved.exists():
            self.rows, self.wgmma_off = json.loads(self.saved.read_text())
        self.known_python: str | None = None
        self.failed = False

    # what steps depend on

    @property
    def python(self) -> str | None:
        """The first Python that has what the package needs."""
        candidates = (str(ROOT / ".venv" / "bin" / "python"), sys.executable)
        fit = (path for path in candidates if output_of([path, "-c", HAS, *NEEDED]) is not None)
        self.known_python = self.known_python or next(fit, None)
        return self.known_python

    def has(self, *modules: str) -> bool:
        return output_of([str(self.python), "-c", HAS, *modules]) is not None

    def program(self, name: str) -> tuple[str, str]:
        """A C++ test, and why it cannot run if it is not there."""
        missing = "" if self.passed(f"build {name}") else f"{name} is not built: --phase build"
        return str(PROGRAMS / name), missing

    def passed(self, step: str) -> bool:
        return step in self.rows and self.rows[step][0] == OK

    @property
    def without_package(self) -> str:
        return "" if self.passed(PACKAGE) else "the Python package is not built: --phase package"

    @property
    def without_torch(self) -> str:
        return "" if self.passed(TORCH) else f"no {TORCH}, or not looked for: --phase package"

    def cannot(self, step: Step) -> str:
        if step.wgmma and self.machine.capability != "9.0":
            return f"wgmma is for devices of 9.0; this one is of {self.machine.capability}"
        if step.wgmma and self.wgmma_off and not self.switched_off_by(step):
            return f"{WGMMA_OFF}: {self.wgmma_off}"
        return step.cannot

    def switched_off_by(self, step: Step) -> bool:
        """Such a step may run again, by itself."""
        return self.wgmma_off.startswith(f"{step.name}: ")

    def environment(self, step: Step) -> dict[str, str]:
        env = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}
        for name in ("LAZYLLM_CUDA_LIBRARY", "LAZYLLM_CUDA_HOPPER", "LAZYLLM_CPU"):
            env.pop(name, None)
        env.setdefault("CUDA_HOME", str(Path(self.machine.nvcc).resolve().parent.parent))
        return {**env, **({"LAZYLLM_CUDA_HOPPER": "1"} if step.wgmma else {}), **step.env}

    # running

    def run_phase(self, name: str) -> None:
        print(f"\n==== {name}", flush=True)
        self.phase_end = min(self.end, time.monotonic() + PHASE_SECONDS)
        for step in PHASES[name](self):
            self.run(step)

    def limit(self, step: Step) -> float:
        return min(step.limit * (2 if self.full else 1), self.phase_end - time.monotonic())

    def run(self, step: Step) -> None:
        if reason := self.cannot(step):
            return self.note(step, SKIPPED, 0, reason)
        begun, limit = time.monotonic(), self.limit(step)
        if limit <= 0:
            return self.note(step, FAILED, 0, "no time was left")
        print(f"---- {step.name} (at most {limit:.0f} s)", flush=True)
        log = self.logs / ("".join(c if c.isalnum() else "_" for c in step.name) + ".log")
        trouble = "stopped together with the check"
        try:
            trouble = run_command(step.command, self.environment(step), log, limit)
        finally:
            said = log.read_text(errors="replace")
            result = OK if not trouble else SKIPPED if step.excuse and step.excuse in said else FAILED
            detail = "; ".join(words for words in (trouble, last_line(said)) if words)
            self.note(step, result, time.monotonic() - begun, detail)

    def note(self, step: Step, result: str, seconds: float, detail: str) -> None:
        print(f"     {result}: {step.name}: {detail}", flush=True)
        self.failed |= result == FAILED
        if step.wgmma and result == FAILED:
            self.wgmma_off = f"{step.name}: {detail}"
        elif self.switched_off_by(step):
            self.wgmma_off = ""
        self.rows.pop(step.name, None)
        self.rows[step.name] = [result, f"{seconds:.0f}", detail]
        self.write()

    # the results

    def write(self) -> None:
        self.saved.write_text(json.dumps([self.rows, self.wgmma_off], indent=1))
        lines = [f"# A check on {self.machine.gpu}, {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}", ""]
        lines += ["| step | result | s | said |", "|---|---|---|---|"]
        for name, (result, seconds, detail) in self.rows.items():
            lines.append(f"| {name} | {result} | {seconds} | {detail.replace('|', '/')[:200]} |")
        for report in sorted(self.results.glob("*/bench.md")):
            goals = report.read_text().partition("\n## Goals")[2].partition("\n## ")[0]
            table = [line for line in goals.splitlines() if line.startswith("|")]
            lines += ["", f"Goals, {report.parent.name}:", "", *table] if table else []
        failed = [name for name, row in self.rows.items() if row[0] == FAILED]
        lines += ["", f"{len(failed)} failed: {', '.join(failed)}" if failed else "nothing failed", ""]
        (self.results / "check.md").write_text("\n".join(lines))

    def finish(self) -> None:
        self.write()
        with tarfile.open(self.results / "logs.tar.gz", "w:gz") as packed:
            packed.add(self.logs, "logs")
        print(f"\n{(self.results / 'check.md').read_text()}\nwrote {self.results}", flush=True)


# ---- the phases ----


def machine(check: Check) -> Iterator[Step]:
    """GPU, clocks, power, versions, commit"""
    yield Step("nvidia-smi -q", ["nvidia-smi", "-q"], 60)
    yield Step("version of nvcc", [check.machine.nvcc, "--version"], 30)
    yield Step("versions of packages", [check.python or sys.executable, "-c", VERSIONS], 60)
    missing = "" if (ROOT / ".git").exists() and shutil.which("git") else "this is no git repository"
    yield Step("commit", ["git", "describe", "--always", "--dirty", "--abbrev=40"], 30, cannot=missing)


def build(check: Check) -> Iterator[Step]:
    """the C++ tests, without the Python package"""
    arch = "sm_90a" if check.machine.capability == "9.0" else "native"  # native has no wgmma
    make = ["make", f"-j{os.cpu_count()}", f"NVCC={check.machine.nvcc}", f"GPU_ARCH={arch}"]
    for program in ("test_harness", "test_ops", "test_gemm"):
        yield Step(f"build {program}", [*make, str(PROGRAMS / program)], 240)


def harness(check: Check) -> Iterator[Step]:
    """tensor-core instructions and assumptions of the tests on a CPU; wgmma's layouts on a device of 9.0"""
    program, missing = check.program("test_harness")
    check.wgmma_off = ""
    yield Step("mma fragments", [program, "one_hot"], 60, cannot=missing)
    yield Step("assumptions of the CPU harness", [program, "-wgmma"], 90, cannot=missing)
    for kind in ("bf16", "f16"):
        yield Step(f"wgmma layouts, {kind}", [program, f"wgmma_{kind}"], 60, cannot=missing, wgmma=True)


def cublas() -> dict[str, str]:
    """cuBLASLt of NVIDIA's wheels, which C++ programs do not find by themselves."""
    for entry in [*map(str, ROOT.glob(".venv/lib/python*/site-packages")), *sys.path]:
        for name in ("cu13/lib/libcublasLt.so.13", "cublas/lib/libcublasLt.so.12"):
            file = Path(entry, "nvidia", name)
            if file.exists():
                return {"LAZYLLM_CUBLAS": str(file)}
    return {}


def ops(check: Check) -> Iterator[Step]:
    """every op against the CPU's reference"""
    program, missing = check.program("test_ops")
    yield Step("every op", [program, "without_wgmma"], 180, cublas(), missing)
    yield Step("attention by wgmma", [program, "wgmma_alone"], 120, cublas(), missing, wgmma=True)


def products(check: Check) -> Iterator[Step]:
    """matrix products by cuBLASLt"""
    program, missing = check.program("test_gemm")
    yield Step("matrix products", [program, *cublas().values()], 120, cublas(), missing)


def package(check: Check) -> Iterator[Step]:
    """the Python package with the CUDA core"""
    if not check.python:
        offline = {"LAZYLLM_CUDA": "0", "PIP_RETRIES": "0", "PIP_DEFAULT_TIMEOUT": "10"}
        yield Step("make .venv", ["make", ".venv/test.stamp"], 240, offline)
    python = check.python
    missing = "" if python else f"no Python of 3.11 with all of {', '.join(NEEDED)}"
    command = [str(python), "setup.py", "--quiet", "build_ext", "--inplace"]
    only_this = {"LAZYLLM_CUDA": "1", "LAZYLLM_CUDA_ARCHS": check.machine.capability.replace(".", "")}
    yield Step(PACKAGE, command, 400, only_this, missing)
    yield Step("CUDA facts", [str(python), "-c", FACTS], 60, cannot=check.without_package)
    missing = "" if python and check.has("torch") else "torch is not installed"
    yield Step(TORCH, [str(python), "-c", SEES_GPU], 120, cannot=missing, excuse=NO_GPU)


def benchmark(check: Check, name: str, suite: str, *options: str, wgmma: bool = False) -> Step:
    out = str(check.results / name.replace(" ", "_").replace(",", ""))
    rounds = "7" if check.full else "3"
    command = [str(check.python), "-m", "benchmarks", suite, "--device", "cuda", "--rounds", rounds]
    command += ["--out", out, *options]
    return Step(f"benchmark {name}", command, 450, cannot=check.without_package, wgmma=wgmma)


def shapes(check: Check) -> Iterator[Step]:
    """7B shapes: prefill, pruning, decoding"""
    yield benchmark(check, "7B shapes", "shapes")


def shapes_wgmma(check: Check) -> Iterator[Step]:
    """the same with wgmma, on a device of 9.0"""
    yield benchmark(check, "7B shapes, wgmma", "shapes", wgmma=True)


def attention(check: Check) -> Iterator[Step]:
    """single ops; attention against torch"""
    if check.without_torch:
        yield Step("attention against torch", [], 0, cannot=check.without_torch)
    yield benchmark(check, "ops", "ops", *(("--peers", "none") if check.without_torch else ()))


def profile(check: Check) -> Iterator[Step]:
    """the time of each kernel by ncu, CUPTI or nsys, the first of them that works"""
    work = [str(check.python), "-m", "benchmarks.kernels"]
    ncu, nsys = (beside(check.machine.nvcc, tool) for tool in ("ncu", "nsys"))
    by_ncu = [str(ncu), "--csv", "--set", "basic", "--target-processes", "all", *work]
    by_nsys = [
        str(nsys),
        "profile",
        "--stats=true",
        "--force-overwrite=true",
        "-o",
        str(WORK / "nsys"),
        *work,
    ]
    no_counters = "ERR_NVGPUCTRPERM"  # ncu needs a permission that many machines do not give
    steps = [
        Step("kernels by ncu", by_ncu, 200, {}, "" if ncu else "ncu is not installed", no_counters),
        Step("kernels by CUPTI", [*work, "--cupti"], 200, {}, check.without_torch),
        Step("kernels by nsys", by_nsys, 200, {}, "" if nsys else "nsys is not installed"),
    ]
    for step in steps:
        step.cannot = check.without_package or step.cannot
        yield step
        if check.passed(step.name):
            return


def engine(check: Check) -> Iterator[Step]:
    """the engine and the benchmarks through Python"""
    missing = check.without_package
    if not missing and not check.has("pytest", "hypothesis"):
        missing = f"{check.python} has no pytest and hypothesis"
    pytest = [str(check.python), "-m", "pytest", "-v", "-p", "no:cacheprovider"]
    on_gpu = {"LAZYLLM_TEST_DEVICE": "cuda"}
    for name, limit in (("cuda", 120), ("damage", 60), ("facts", 90), ("method", 120)):
        yield Step(f"test_{name}.py", [*pytest, f"tests/test_{name}.py"], limit, on_gpu, missing)
    on_cuda = [*pytest, "tests/test_benchmarks.py", "-k", "on_cuda"]
    yield Step("test_benchmarks.py", on_cuda, 90, on_gpu, missing)


def sanitizers(check: Check) -> Iterator[Step]:
    """the ops under compute-sanitizer"""
    program, missing = check.program("test_ops")
    sanitizer = beside(check.machine.nvcc, "compute-sanitizer")
    missing = missing if sanitizer else "compute-sanitizer is not installed"
    for tool, options in (("memcheck", ["--report-api-errors", "no"]), ("racecheck", [])):
        command = [str(sanitizer), "--tool", tool, *options, "--error-exitcode", "9", program]
        words = ["without_wgmma", *([] if check.full and tool == "memcheck" else ["quick"])]
        yield Step(tool, [*command, *words], 230, cublas(), missing)


PHASES: dict[str, Callable[[Check], Iterator[Step]]] = {
    "machine": machine,
    "build": build,
    "harness": harness,
    "ops": ops,
    "products": products,
    "package": package,
    "shapes": shapes,
    "shapes-wgmma": shapes_wgmma,
    "attention": attention,
    "profile": profile,
    "engine": engine,
    "sanitizers": sanitizers,
}


# ---- the command line ----


def find_machine() -> Machine:
    query = ["nvidia-smi", "--query-gpu=compute_cap,name", "--format=csv,noheader", "--id=0"]
    capability, _, gpu = (output_of(query) or "").partition("\n")[0].partition(", ")
    if not gpu:
        raise LookupError("nvidia-smi is not installed, does not answer or knows no GPU")
    sys.path.insert(0, str(ROOT / "cuda"))
    import build_cuda  # type: ignore[import-not-found]

    nvcc = build_cuda.find_nvcc()
    if not nvcc:
        raise LookupError("there is no nvcc on PATH, in CUDA_HOME or in /usr/local/cuda")
    if not shutil.which("make"):
        raise LookupError("make is not installed; it builds the C++ tests")
    return Machine(gpu, capability, nvcc)


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--list", action="store_true", help="print the phases and end")
    add("--phase", action="append", choices=PHASES, help="run this one alone; may be repeated")
    add("--minutes", type=float, default=45, help="end within this time, default 45")
    add("--full", action="store_true", help="7 rounds, every op under memcheck, double limits")
    add("--out", type=Path, help="folder for the results, default benchmarks/results/DATE-GPU")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    args = parsed(arguments)
    if args.list:
        print(*(f"{name:13} {phase.__doc__}" for name, phase in PHASES.items()), sep="\n")
        return 0
    try:
        found = find_machine()
    except LookupError as reason:
        print(f"gpu_check: {reason}", file=sys.stderr)
        return 2
    slug = "-".join("".join(c if c.isalnum() else " " for c in found.gpu.lower()).split())
    default = ROOT / "benchmarks" / "results" / f"{time.strftime('%Y-%m-%d', time.gmtime())}-{slug}"
    results = (args.out or default).resolve()
    if not args.phase:
        shutil.rmtree(WORK, ignore_errors=True)
        (results / "check.json").unlink(missing_ok=True)
    check = Check(found, results, args.minutes, args.full)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with (check.logs / "clocks.csv").open("ab") as clocks:
        watch = ["nvidia-smi", f"--query-gpu={MONITORED}", "--format=csv", "--loop=5"]
        monitor = subprocess.Popen(watch, stdout=clocks, stderr=clocks, start_new_session=True)
        try:
            for name in args.phase or PHASES:
                check.run_phase(name)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        finally:
            stop(monitor)
            check.finish()
    return 1 if check.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
