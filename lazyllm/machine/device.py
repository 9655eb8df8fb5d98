"""Devices: choosing one for a model, and finding CUDA's libraries."""

import logging
import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

from lazyllm import _core
from lazyllm.checkpoints.checkpoint import Checkpoint
from lazyllm.errors import DeviceError
from lazyllm.machine.cores import cores
from lazyllm.support import checked

CUBLAS = ("libcublasLt.so.13", "libcublasLt.so.12")
WHEEL_FOLDERS = ("nvidia/cu13/lib", "nvidia/cublas/lib")  # of the wheels for CUDA 13 and 12
log = logging.getLogger("lazyllm")


def check_device(device: str) -> None:
    if not isinstance(device, str):
        raise TypeError(f"device must be a string, not {device!r}")
    if not re.fullmatch(r"cpu|(auto|cuda)(:\d{1,4})?|cuda:\d{1,4}(,\d{1,4})+", device):
        raise ValueError(f"device must be auto, cpu, cuda, cuda:N or cuda:N,M, not {device!r}")


def nth_device(device: str, number: int) -> str:
    """The device of process `number` of several with "cuda" or "auto": with two GPUs, in turn 0, 1, 0, …"""
    n_devices = len(re.findall(r"\bcuda:\d+ ", cuda_facts()))
    return f"{device}:{number % n_devices}" if n_devices and device in ("auto", "cuda") else device


def chosen_compute(compute: str, device: str) -> str:
    """The arithmetic of a model: "fastest" becomes what this machine has, bf16 or f32, and logs it."""
    checked.choice(compute, "compute", ("f32", "bf16", "int8", "fastest"))
    if compute != "fastest":
        return compute
    chosen = "bf16" if not device.startswith("cuda") and _core.features()["bf16"] else "f32"
    log.info('compute="fastest" took %s', chosen)
    return chosen


def libraries() -> list[str]:
    """Candidate paths of cuBLASLt in order of preference: NVIDIA's wheels, then a conda environment."""
    folders = [Path(entry) / folder for entry in sys.path for folder in WHEEL_FOLDERS]
    if prefix := os.environ.get("CONDA_PREFIX"):
        folders.append(Path(prefix) / "lib")
    files = [folder / name for folder in folders for name in CUBLAS]
    return [str(file.absolute()) for file in files if file.is_file()]


def open_model(
    checkpoint: Checkpoint, device: str, threads: int | None, compute: str, weights: str, kv: str
) -> _core.Model:
    """The model on a device; "auto" takes CUDA where it works, and "auto:N" cuda:N, unless `compute` or `kv`
    ask for the CPU."""
    options: dict[str, Any] = {"threads": threads or cores(), "libraries": libraries()}
    options |= {"compute": compute, "weights": weights, "kv": kv}
    opened = partial(_core.Model, checkpoint.config.core(), checkpoint.shards, checkpoint.tensors, **options)
    kind, _, number = device.partition(":")
    if kind != "auto" or (compute, kv) != ("f32", "f32"):
        return opened(device="cpu" if kind == "auto" else device)
    try:
        core = opened(device=f"cuda:{number or 0}")
    except (DeviceError, MemoryError) as reason:
        core = opened(device="cpu")
        log.info('device="auto" took the CPU (%s, %d threads): %s', core.isa, core.threads, reason)
    else:
        log.info('device="auto" took %s (%s)', core.device, core.isa)
    return core


def cuda_facts() -> str:
    """Devices, driver and libraries, or the reason why CUDA is off."""
    try:
        return _core.cuda(libraries())
    except DeviceError as reason:
        return f"off: {reason}"
