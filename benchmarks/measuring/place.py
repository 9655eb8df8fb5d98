"""Place: the device that a benchmark runs on. Device-dependent settings are kept here."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.measuring.bench import Bench
from benchmarks.measuring.rounds import Contestant, repeated
from lazyllm import _core
from lazyllm.errors import DeviceError
from lazyllm.llm import LLM, load
from lazyllm.machine.cores import cores
from lazyllm.machine.device import check_device, cuda_facts, libraries
from lazyllm.support.checked import whole

CPU = "cpu"
DRIVER = Path("/proc/driver/nvidia/version")
FACTS = ("GPU", "CUDA", "cuBLAS", "CUDA core")
CUDA_RUNS = 4  # of a turn; each queues a short op many times


@dataclass(frozen=True)
class Place:
    """A number of CPU threads (0: all cores), or a CUDA device, to which threads do not apply."""

    threads: int = 0
    device: str = CPU
    gpu: str = ""

    def __str__(self) -> str:
        return on_threads(self.threads) if self.on_cpu else f"{self.device}, {self.gpu}"

    @property
    def on_cpu(self) -> bool:
        return self.device == CPU

    @property
    def keys(self) -> dict[str, str | int]:
        """Identifies the rows measured here in a table or plot."""
        return {"threads": self.threads} if self.on_cpu else {"device": self.device}

    @property
    def transformers(self) -> str:
        """The transformers peer with the dtype that is fastest here."""
        return "transformers f32" if self.on_cpu else "transformers bf16"

    @property
    def facts(self) -> dict[str, str]:
        """Versions of the GPU's driver and libraries, for the report."""
        if self.on_cpu:
            return {}
        facts = dict(zip(FACTS, cuda_facts().split("; "), strict=False))
        if DRIVER.exists():
            facts["GPU driver"] = DRIVER.read_text().splitlines()[0].removeprefix("NVRM version: ")
        return facts

    def bench(self, op: str, **shape: Any) -> Bench:
        return Bench(op, threads=self.threads, device=self.device, libraries=libraries(), **shape)

    def product_at_peak(self) -> Bench:
        """Multiply-adds in registers on the CPU; on a GPU a product of matrices of 8192 rows and columns."""
        side = 1 if self.on_cpu else 1 << 13
        return self.bench("multiply_adds", n=side, rows=side, cols=side)

    def memory_sweep(self) -> Bench:
        """Reads 256 MiB on the CPU, more than its caches hold; 2 GiB on a GPU, to hide launch costs."""
        side, dtype = (1 << 13, "f32") if self.on_cpu else (1 << 15, "bf16")
        return self.bench("read", rows=side, cols=side, dtype=dtype)

    def turn(self, bench: Bench) -> Contestant:
        if self.on_cpu:
            return lambda: repeated(bench.run)
        return lambda: fmean(bench.run() for _ in range(CUDA_RUNS))

    def load(self, folder: Path, **options: str) -> LLM:
        return load(folder, device=self.device, threads=self.threads or None, **options)


def on_threads(threads: int) -> str:
    return f"{threads} thread{'s' if threads > 1 else ''}"


def choose_places(device: str, threads: Sequence[int] | None, quick: bool) -> tuple[Place, ...]:
    check_device(device)
    if device == "auto" or "," in device:
        raise ValueError("device must be cpu, cuda or cuda:N: a benchmark names what it measures")
    if device != CPU:
        if threads:
            raise ValueError(f"threads do not apply to {device}: leave --threads out")
        return (cuda_place(device if ":" in device else f"{device}:0"),)
    all_cores = cores()
    counts = threads or ((all_cores,) if quick else (1, all_cores))
    return tuple(Place(whole(n, "threads", 1)) for n in dict.fromkeys(counts))


def cuda_place(device: str) -> Place:
    facts = _core.cuda(libraries())
    found = re.search(rf"\b{device} (.+?), \d+ GiB", facts)
    if not found:
        raise DeviceError(f"there is no {device}; this machine has {facts}")
    return Place(device=device, gpu=found[1])
