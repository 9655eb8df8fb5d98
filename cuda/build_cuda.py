"""Builds liblazyllm_cuda with nvcc 12.0 or later. setup.py calls this and documents LAZYLLM_CUDA.

The CUDA runtime of that nvcc is linked statically: the driver must be for the same major version of CUDA or a
later one. So where there are several nvcc, one that fits the driver is taken.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# sm_80 also runs on 8.6, 8.7 and 8.9; nvcc 12.8 was the first to know sm_100 and sm_120
CAPABILITIES = ("80", "90", "100", "120")
PTX = "90"  # for all other devices
OLDEST_NVCC = 12
FIRST_DRIVERS = {13: 580, 12: 525}  # the first driver of each major version of CUDA
FOLDER = Path("cuda")
SOURCES = sorted([*FOLDER.glob("*.cu"), *FOLDER.glob("*.cc"), Path("csrc/error.c"), Path("csrc/memory.c")])
HEADERS = sorted([*FOLDER.glob("*.h"), *Path("csrc").glob("*.h")])
FLAGS = ["-std=c++17", "-O3", "--threads", "0", "-Xcompiler", "-fPIC,-fvisibility=hidden"]
# for the files named _sm90a, which run on devices of capability 9.0 only
HOPPER = ["-gencode", "arch=compute_90a,code=sm_90a"]
DRIVER = Path("/proc/driver/nvidia/version")


def output_of(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def version_of(nvcc: str) -> int:
    """nvcc's major version."""
    release = re.search(r"release (\d+)\.", output_of(nvcc, "--version"))
    if not release:
        raise SystemExit(f"{nvcc} --version names no release")
    return int(release[1])


def newest_cuda() -> int | None:
    """The newest major version of CUDA that this machine's driver runs; None if there is no driver."""
    installed = re.search(r"Kernel Module\D*(\d+)\.", DRIVER.read_text()) if DRIVER.exists() else None
    if not installed:
        return None
    return max((cuda for cuda, driver in FIRST_DRIVERS.items() if driver <= int(installed[1])), default=0)


def all_nvcc() -> list[str]:
    """Every nvcc, in the order of the search: CUDA_HOME, the PATH, /usr/local, the wheel nvidia-cuda-nvcc."""
    home = os.environ.get("CUDA_HOME")
    others = [*sorted(map(str, Path("/usr/local").glob("cuda*"))), *(f"{e}/nvidia/cu13" for e in sys.path)]
    places = [*([f"{home}/bin/nvcc"] if home else []), "nvcc", *(f"{other}/bin/nvcc" for other in others)]
    return list(dict.fromkeys(path for place in places if (path := shutil.which(place))))


def find_nvcc() -> str | None:
    """The first nvcc that fits the driver, else the first of all."""
    candidates, newest = all_nvcc(), newest_cuda()
    fitting = (nvcc for nvcc in candidates if newest is None or OLDEST_NVCC <= version_of(nvcc) <= newest)
    return next(fitting, candidates[0] if candidates else None)


def wanted(wish: str) -> tuple[str | None, str]:
    """Returns nvcc, or None if the CUDA core is to be left out, and the reason for either."""
    if wish not in ("auto", "0", "1"):
        raise SystemExit(f"LAZYLLM_CUDA is {wish!r}; it must be auto, 0 or 1")
    if wish == "0":
        return None, "LAZYLLM_CUDA=0"
    nvcc = find_nvcc()
    if nvcc is None:
        if wish == "auto":
            return None, "there is no nvcc on PATH or in CUDA_HOME"
        raise SystemExit(
            "LAZYLLM_CUDA=1 asks for the CUDA core, but there is no nvcc on PATH or in CUDA_HOME: "
            "pip install . fetches one unless it is given --no-build-isolation"
        )
    version, newest, trouble = version_of(nvcc), newest_cuda(), ""
    if version < OLDEST_NVCC:
        trouble = f"{nvcc} is of CUDA {version}; at least {OLDEST_NVCC}.0 is needed"
        if wish == "1":
            raise SystemExit(trouble)
    elif newest is None:
        trouble = "this machine has no GPU driver"
    elif newest < version:
        driver = FIRST_DRIVERS.get(version, max(FIRST_DRIVERS.values()))
        trouble = f"what it builds needs driver {driver} or later, and this machine's is older: update it"
        if newest:
            trouble += f", or set CUDA_HOME to an installation of CUDA {newest}"
    if wish == "auto" and trouble:
        return None, f"there is {nvcc}, but {trouble}"
    return nvcc, f"LAZYLLM_CUDA={wish}, with {nvcc}" + (f"; {trouble}" if trouble else "")


def architectures(nvcc: str) -> list[str]:
    """sm_90 for LAZYLLM_CUDA_ARCHS=90; without that variable, all of CAPABILITIES that nvcc knows."""
    supported = output_of(nvcc, "--list-gpu-code").split()
    setting = os.environ.get("LAZYLLM_CUDA_ARCHS")
    if not setting:
        return [f"sm_{c}" for c in CAPABILITIES if f"sm_{c}" in supported]
    names = [f"sm_{c.strip()}" for c in setting.split(",")]
    if not set(names) <= set(supported):
        raise SystemExit(f"LAZYLLM_CUDA_ARCHS is {setting!r}; {nvcc} knows {', '.join(supported)}: write 90, or 80,90")
    return names


def build(nvcc: str, library: Path, objects: Path) -> None:
    """Compiles the sources that have changed and links all, for every architecture, with the CUDA runtime.

    Beside each object lies a log: the command, and what nvcc printed.
    """
    objects.mkdir(parents=True, exist_ok=True)
    names = architectures(nvcc)
    ptx = [] if os.environ.get("LAZYLLM_CUDA_ARCHS") else [f"compute_{PTX}"]
    portable = [
        flag for code in [*names, *ptx] for flag in ("-gencode", f"arch={code.replace('sm', 'compute')},code={code}")
    ]
    named = f'-DLAZY_CUDA_ARCHITECTURES="{", ".join(names)}{" and PTX for later devices" if ptx else ""}"'
    newest_header = max(path.stat().st_mtime for path in HEADERS)

    def compiled(source: Path) -> Path:
        target = objects / f"{source.stem}.o"
        of_device = HOPPER if source.stem.endswith("_sm90a") else portable
        of_c = ["-Xcompiler", "-std=gnu11,-fPIC,-fvisibility=hidden"]  # for the host's compiler; FLAGS are for C++
        flags = of_c if source.suffix == ".c" else [*FLAGS, named, *of_device]
        partial, log = target.with_suffix(".partial"), target.with_suffix(".log")
        command = [nvcc, *flags, "-c", str(source), "-o", str(partial)]
        newest = max(source.stat().st_mtime, newest_header)
        is_old = not (target.exists() and log.exists()) or target.stat().st_mtime < newest
        if is_old or log.read_text().partition("\n")[0] != shlex.join(command):
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            print(done.stdout, end="")
            done.check_returncode()
            log.write_text(f"{shlex.join(command)}\n{done.stdout}")
            partial.replace(target)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = list(pool.map(compiled, SOURCES))
    library.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([nvcc, "-shared", "-cudart", "static", *map(str, parts), "-ldl", "-o", str(library)], check=True)
