#!/usr/bin/env python3
"""Builds, tests and measures the CUDA core on a machine with a GPU, in about 20 minutes.

  benchmarks/gpu_check.py                 every step in turn
  benchmarks/gpu_check.py --only every    the steps whose names hold this text, with what is built
  benchmarks/gpu_check.py --full          7 rounds, as goals need, and every op under memcheck

The folder for the results (--out, default benchmarks/results/DATE-GPU) holds check.md, with a row for each
step; the reports of the benchmarks; and logs/ with what every step printed. A step fails if its command
fails, is killed or does not end in time; the others run all the same. A step that cannot run is skipped, with
the reason. The exit code is 1 if a step failed, and 2 if there is no GPU, no nvcc or no make.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = "build/gpu"
TERM_SECONDS, KILL_SECONDS = 5, 10  # then a process that is stuck in the driver is left behind
OK, FAILED, SKIPPED = "ok", "FAILED", "skipped"
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


@dataclass
class Step:
    name: str
    command: list[str]
    limit: float  # seconds
    env: dict[str, str] = field(default_factory=dict)
    needs: str = ""  # the step that builds what it runs
    cannot: str = ""  # the reason, if it cannot run here


class Machine(NamedTuple):
    gpu: str
    capability: str
    nvcc: str
    python: str


def find_machine() -> Machine:
    query = ["nvidia-smi", "--query-gpu=compute_cap,name", "--format=csv,noheader", "--id=0"]
    try:
        known = subprocess.run(query, timeout=60, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.SubprocessError):
        known = ""
    capability, _, gpu = known.partition("\n")[0].partition(", ")
    if not gpu:
        raise LookupError("nvidia-smi is not installed, does not answer or knows no GPU")
    sys.path.insert(0, str(ROOT / "cuda"))
    import build_cuda  # type: ignore[import-not-found]

    nvcc = build_cuda.find_nvcc()
    if not nvcc:
        raise LookupError("there is no nvcc on PATH, in CUDA_HOME or in /usr/local/cuda")
    if not shutil.which("make"):
        raise LookupError("make is not installed; it builds the C++ tests")
    environment = ROOT / ".venv" / "bin" / "python"
    return Machine(gpu, capability, nvcc, str(environment) if environment.exists() else sys.executable)


def cublas() -> str:
    """cuBLASLt of NVIDIA's wheels, which C++ programs do not find by themselves; "" if there is none."""
    entries = [*map(str, ROOT.glob(".venv/lib/python*/site-packages")), *sys.path]
    names = "cu13/lib/libcublasLt.so.13", "cublas/lib/libcublasLt.so.12"
    files = (Path(entry, "nvidia", name) for entry in entries for name in names)
    return next((str(file) for file in files if file.exists()), "")


def steps_on(machine: Machine, results: Path, full: bool) -> Iterator[Step]:
    python, make = machine.python, ["make", f"-j{os.cpu_count()}", f"NVCC={machine.nvcc}"]
    library = cublas()
    env = {"LAZYLLM_CUBLAS": library} if library else {}
    hopper = machine.capability == "9.0"

    yield Step("nvidia-smi -q", ["nvidia-smi", "-q"], 60)
    yield Step("version of nvcc", [machine.nvcc, "--version"], 30)
    yield Step("versions of packages", [python, "-c", VERSIONS], 60)
    yield Step("commit", ["git", "describe", "--always", "--dirty", "--abbrev=40"], 30)

    for name in ("test_harness", "test_ops", "test_gemm"):
        arch = "sm_90a" if hopper else "native"  # native has no wgmma
        yield Step(f"build {name}", [*make, f"GPU_ARCH={arch}", f"{PROGRAMS}/{name}"], 240)
    portable = [f"{PROGRAMS}/test_harness", "-wgmma"]
    yield Step("assumptions of the CPU harness", portable, 90, needs="build test_harness")
    for kind in ("bf16", "f16"):
        layout = [f"{PROGRAMS}/test_harness", f"wgmma_{kind}"]
        reason = "" if hopper else "wgmma is for compute capability 9.0"
        yield Step(f"wgmma layouts, {kind}", layout, 60, needs="build test_harness", cannot=reason)
    ops = [f"{PROGRAMS}/test_ops"]
    yield Step("every op", ops, 180, env, "build test_ops")
    yield Step("matrix products", [f"{PROGRAMS}/test_gemm", *env.values()], 120, env, "build test_gemm")
    sanitizer = shutil.which("compute-sanitizer") or str(Path(machine.nvcc).parent / "compute-sanitizer")
    for tool, options in (("memcheck", ["--report-api-errors", "no"]), ("racecheck", [])):
        command = [sanitizer, "--tool", tool, *options, "--error-exitcode", "9", *ops]
        words = [] if full and tool == "memcheck" else ["quick"]
        yield Step(tool, [*command, *words], 460 if full else 230, env, "build test_ops")

    package = "build the Python package"
    only_this = {"LAZYLLM_CUDA": "1", "LAZYLLM_CUDA_ARCHS": machine.capability.replace(".", "")}
    yield Step(package, [python, "setup.py", "--quiet", "build_ext", "--inplace"], 400, only_this)
    yield Step("CUDA facts", [python, "-c", FACTS], 60, needs=package)
    on_gpu = {"LAZYLLM_TEST_DEVICE": "cuda"}
    for name in ("cuda", "damage", "facts", "method"):
        command = [python, "-m", "pytest", "-v", "-p", "no:cacheprovider", f"tests/test_{name}.py"]
        yield Step(f"test_{name}.py", command, 120, on_gpu, package)
    torch = subprocess.run([python, "-c", "import torch"], capture_output=True).returncode == 0
    measure = [python, "-m", "benchmarks"]
    options = ["--device", "cuda", "--rounds", "7" if full else "3", "--out"]
    peers = [] if torch else ["--peers", "none"]
    for suite in ("shapes", "ops"):
        command = [*measure, suite, *options, str(results / suite), *(peers if suite == "ops" else [])]
        yield Step(f"benchmark {suite}", command, 900 if full else 450, {}, package)
    reason, counting = "" if torch else "torch is not installed", ["-m", "benchmarks.kernels", "--cupti"]
    yield Step("time of each kernel", [python, *counting], 200, {}, package, reason)


def run(step: Step, log: Path) -> str:
    """The failure as text, or "". Leaves nothing running."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT), **step.env}
    with log.open("wb") as out:
        try:
            process = subprocess.Popen(
                step.command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return f"cannot start: {error}"
        try:
            code = process.wait(step.limit)
        except subprocess.TimeoutExpired:
            return f"timed out after {step.limit:.3g} s"
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


def write(rows: dict[str, list[str]], machine: Machine, results: Path) -> str:
    """check.md, of all steps so far."""
    lines = [f"# A check on {machine.gpu}, {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}", ""]
    lines += ["| step | result | s | said |", "|---|---|---|---|"]
    lines += [f"| {name} | {' | '.join(row)} |" for name, row in rows.items()]
    for report in sorted(results.glob("*/bench.md")):
        goals = report.read_text().partition("\n## Goals")[2].partition("\n## ")[0]
        table = [line for line in goals.splitlines() if line.startswith("|")]
        lines += ["", f"Goals, {report.parent.name}:", "", *table] if table else []
    failed = [name for name, row in rows.items() if row[0] == FAILED]
    lines += ["", f"{len(failed)} failed: {', '.join(failed)}" if failed else "nothing failed", ""]
    text = "\n".join(lines)
    (results / "check.md").write_text(text)
    return text


def main(arguments: list[str]) -> int:
    help_format = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=help_format)
    parser.add_argument("--only", default="", help="run the steps whose names hold this text")
    parser.add_argument("--full", action="store_true", help="7 rounds, every op in memcheck, longer limits")
    parser.add_argument("--out", type=Path, help="folder for the results")
    args = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and ends the step that runs
    try:
        machine = find_machine()
    except LookupError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    name = re.sub("[^a-z0-9]+", "-", f"{time.strftime('%Y-%m-%d', time.gmtime())}-{machine.gpu.lower()}")
    results = (args.out or ROOT / "benchmarks" / "results" / name.strip("-")).resolve()
    logs = results / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    rows: dict[str, list[str]] = {}
    for step in steps_on(machine, results, args.full):
        if args.only not in step.name:
            continue
        print(f"---- {step.name} (at most {step.limit:.0f} s)", flush=True)
        missing = f"{step.needs} did not pass" if rows.get(step.needs, [OK])[0] != OK else ""
        log, begun = logs / (re.sub(r"\W", "_", step.name) + ".log"), time.monotonic()
        if reason := step.cannot or missing:
            rows[step.name] = [SKIPPED, "0", reason]
        else:
            trouble = run(step, log)
            said = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
            detail = "; ".join(filter(None, (trouble, said[-1] if said else ""))).replace("|", "/")[:200]
            rows[step.name] = [FAILED if trouble else OK, f"{time.monotonic() - begun:.0f}", detail]
        print(f"     {rows[step.name][0]}: {rows[step.name][2]}", flush=True)
        text = write(rows, machine, results)
    if not rows:
        print(f"gpu_check: no step's name holds {args.only!r}", file=sys.stderr)
        return 2
    print(f"\n{text}\nwrote {results}")
    return int(any(row[0] == FAILED for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
