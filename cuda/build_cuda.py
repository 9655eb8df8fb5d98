"""Builds liblazyllm_cuda with nvcc; called by setup.py, which says when."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CAPABILITIES = ("80", "86", "89", "90")
ARCHITECTURES = ", ".join(f"sm_{c}" for c in CAPABILITIES)
FOLDER = Path("cuda")
SOURCES = sorted([*FOLDER.glob("*.cu"), *FOLDER.glob("*.cc"), Path("csrc/error.c"), Path("csrc/memory.c")])
HEADERS = sorted([*FOLDER.glob("*.h"), *Path("csrc").glob("*.h")])
FLAGS = [
    *(
        "-std=c++17",
        "-O3",
        "-Werror",
        "all-warnings",
        "-Xptxas",
        "-warn-spills",
        "-Xcompiler",
        "-fPIC,-fvisibility=hidden",
    ),
    f'-DLAZY_CUDA_ARCHITECTURES="{ARCHITECTURES} and later"',
]
PORTABLE = [
    *(flag for c in CAPABILITIES for flag in ("-gencode", f"arch=compute_{c},code=sm_{c}")),
    *("-gencode", f"arch=compute_{CAPABILITIES[-1]},code=compute_{CAPABILITIES[-1]}"),  # for devices to come
]
# files named _sm90a, for devices of capability 9.0 alone
HOPPER = ["-gencode", "arch=compute_90a,code=sm_90a"]
DRIVER = Path("/proc/driver/nvidia/version")


def find_nvcc() -> str | None:
    """On the PATH, in CUDA_HOME, or from the wheel nvidia-cuda-nvcc."""
    homes = [
        os.environ.get("CUDA_HOME", ""),
        "/usr/local/cuda",
        *(f"{entry}/nvidia/cu13" for entry in sys.path),
    ]
    return shutil.which("nvcc") or next(
        (found for home in homes if (found := shutil.which(f"{home}/bin/nvcc"))), None
    )


def wanted(wish: str) -> tuple[str | None, str]:
    """nvcc, or None where the CUDA core is not to be built; and why."""
    if wish not in ("auto", "0", "1"):
        raise SystemExit(f"LAZYLLM_CUDA is {wish!r}; it must be auto, 0 or 1")
    nvcc = find_nvcc()
    if wish == "0":
        return None, "LAZYLLM_CUDA=0"
    if wish == "1":
        if nvcc is None:
            raise SystemExit(
                "LAZYLLM_CUDA=1 asks for the CUDA core, but there is no nvcc on PATH or in CUDA_HOME"
            )
        return nvcc, "LAZYLLM_CUDA=1"
    if nvcc is None:
        return None, "there is no nvcc on PATH or in CUDA_HOME"
    if not DRIVER.exists():
        return None, "this machine has nvcc but no GPU driver; LAZYLLM_CUDA=1 builds it all the same"
    return nvcc, f"there are {nvcc} and a GPU driver"


def build(nvcc: str, library: Path, objects: Path) -> None:
    """Compiles what has changed and links it; architectures and runtime are all in the library."""
    objects.mkdir(parents=True, exist_ok=True)
    newest_header = max(path.stat().st_mtime for path in [*HEADERS, Path(__file__)])

    def compiled(source: Path) -> Path:
        target = objects / f"{source.stem}.o"
        if not target.exists() or target.stat().st_mtime < max(source.stat().st_mtime, newest_header):
            as_c = source.suffix == ".c"  # C is for the host compiler: the flags above are C++'s
            of_device = HOPPER if source.stem.endswith("_sm90a") else PORTABLE
            flags = ["-Xcompiler", "-std=gnu11,-fPIC,-fvisibility=hidden"] if as_c else [*FLAGS, *of_device]
            partial = target.with_suffix(".partial")
            subprocess.run([nvcc, *flags, "-c", str(source), "-o", str(partial)], check=True)
            partial.replace(target)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = list(pool.map(compiled, SOURCES))
    library.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [nvcc, "-shared", "-cudart", "static", *map(str, parts), "-ldl", "-o", str(library)], check=True
    )
