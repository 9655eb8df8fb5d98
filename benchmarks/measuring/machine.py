"""The machine and the versions of packages, for the head of a report."""

import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import lazyllm
from benchmarks.measuring.place import Place
from lazyllm import _core
from lazyllm.machine.cores import cores
from lazyllm.machine.info import field, processor, version

MEMINFO = Path("/proc/meminfo")
PACKAGES = ("numpy", "torch", "transformers", "llama_cpp_python")


def machine(place: Place) -> dict[str, str]:
    features = _core.features()
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
        **place.facts,
        "cpu": processor(),
        "cores": f"{cores()} for this process, {os.cpu_count()} in the machine",
        "memory": field(MEMINFO, "MemTotal") or "unknown",
        "instruction set": str(features["used"]),
        "system": f"{platform.system()} {platform.release()}",
        "load before": ", ".join(f"{load:.2f}" for load in os.getloadavg()),
        "python": platform.python_version(),
        "compiler": str(features["compiler"]),
        "lazyllm": lazyllm.__version__,
        "BLAS of numpy": blas(),
        **{name: version(name) or "not installed" for name in PACKAGES},
    }


def blas() -> str:
    built: Any = np.show_config(mode="dicts")
    found = built.get("Build Dependencies", {}).get("blas", {})
    return f"{found.get('name', 'unknown')} {found.get('version', '')}".strip()
