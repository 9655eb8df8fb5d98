"""Bench: one op of the core on random data, timed. Built from benchmarks/csrc when it is first used.

The library links the core's objects, which an installation from a clone leaves in build/objects. The core's
calls of its thread pool go through the library, which counts them.
"""

import ctypes
import os
import subprocess
from ctypes import POINTER, byref, c_char, c_char_p, c_double, c_int, c_void_p
from functools import cache
from pathlib import Path

from lazyllm import _core
from lazyllm.errors import DeviceError
from lazyllm.machine.cores import cores

ROOT = Path(__file__).parents[2]
OBJECTS = ROOT / "build" / "objects"
LIBRARY = ROOT / "build" / "bench" / "bench.so"
FLAGS = ("-std=gnu11", "-O3", "-Wall", "-Wextra", "-shared", "-fPIC", "-pthread", "-Wl,--wrap=lazy_pool_run")
SIZES = ("n", "m", "rows", "cols", "window", "n_heads", "n_kv_heads", "head_dim")
ERRORS = {-1: ValueError, -3: MemoryError, -5: DeviceError}  # lazy_code


class Shape(ctypes.Structure):
    """bench_shape of benchmarks/csrc/bench.h."""

    _fields_ = [*((name, c_int) for name in SIZES), ("dtype", c_char_p)]


class Device(ctypes.Structure):
    """lazy_device of csrc/lazyllm.h."""

    _fields_ = [
        ("name", c_char_p),
        ("threads", c_int),
        ("compute", c_char_p),
        ("kv", c_char_p),
        ("libraries", POINTER(c_char_p)),
        ("n_libraries", c_int),
    ]


class Error(ctypes.Structure):
    """lazy_error of csrc/lazyllm.h."""

    _fields_ = [("code", c_int), ("message", c_char * 480)]


def build() -> None:
    """Compiles and links the library if a source or an object of the core is newer."""
    own = sorted((ROOT / "benchmarks" / "csrc").glob("*.[ch]"))
    core = sorted(path for path in (ROOT / "csrc").rglob("*.c") if path.parent.name != "python")
    objects = [OBJECTS / path.relative_to(ROOT).with_suffix(".o") for path in core]
    if missing := [path for path in objects if not path.exists()]:
        raise FileNotFoundError(f"{missing[0]} is missing: install lazyllm from this folder, pip install -e .")
    newest = max(path.stat().st_mtime for path in (*own, *objects, Path(__file__)))
    if LIBRARY.exists() and LIBRARY.stat().st_mtime >= newest:
        return
    LIBRARY.parent.mkdir(exist_ok=True)
    partial = LIBRARY.with_name(f"{LIBRARY.name}.{os.getpid()}")
    files = [path for path in (*own, *objects) if path.suffix != ".h"]
    compiler = os.environ.get("CC", "cc").split()
    subprocess.run([*compiler, *FLAGS, *files, "-lm", "-ldl", "-o", partial], check=True)
    partial.replace(LIBRARY)


@cache
def library() -> ctypes.PyDLL:
    """The library; its calls hold the GIL, so that no other thread of Python disturbs the timing."""
    build()
    # the core's copy in it would look for the CUDA core beside itself
    beside_core = Path(_core.__file__).with_name("liblazyllm_cuda.so")
    os.environ.setdefault("LAZYLLM_CUDA_LIBRARY", str(beside_core))
    loaded = ctypes.PyDLL(str(LIBRARY))
    for name in ("bench_flops", "bench_bytes"):
        getattr(loaded, name).restype = c_double
        getattr(loaded, name).argtypes = [c_void_p]
    return loaded


def check(code: int, error: Error) -> int:
    """Returns the code, or raises its exception where it is negative."""
    if code < 0:
        raise ERRORS.get(code, RuntimeError)(error.message.decode())
    return code


class Bench:
    """One op on random data, prepared once and run repeatedly; benchmarks/csrc/bench.h has ops and sizes."""

    def __init__(
        self,
        op: str,
        *,
        n: int = 1,
        m: int = 1,
        rows: int = 1,
        cols: int = 1,
        window: int = 0,
        n_heads: int = 1,
        n_kv_heads: int = 1,
        head_dim: int = 64,
        dtype: str = "bf16",
        threads: int = 0,
        device: str = "cpu",
        compute: str = "f32",
        libraries: tuple[str, ...] | list[str] = (),
    ) -> None:
        self._bench, self._error = c_void_p(), Error()
        self._library = library()
        shape = Shape(n, m, rows, cols, window, n_heads, n_kv_heads, head_dim, dtype.encode())
        paths = (c_char_p * len(libraries))(*(path.encode() for path in libraries))
        place = Device(device.encode(), threads or cores(), compute.encode(), None, paths, len(paths))
        opened = self._library.bench_open(
            byref(self._bench), op.encode(), byref(shape), byref(place), byref(self._error)
        )
        check(opened, self._error)

    def __del__(self) -> None:
        if self._bench:
            self._library.bench_close(self._bench)

    def run(self) -> float:
        """The seconds that one run took."""
        seconds = c_double()
        check(self._library.bench_run(self._bench, byref(seconds), byref(self._error)), self._error)
        return seconds.value

    def count(self) -> list[int]:
        """The number of tasks of each job of one run, on the CPU."""
        tasks = POINTER(c_int)()
        n = check(self._library.bench_count(self._bench, byref(tasks), byref(self._error)), self._error)
        return tasks[:n]

    @property
    def flops(self) -> float:
        """Operations of one run, a multiply-add being two; on the CPU multiply_adds knows after its first."""
        return float(self._library.bench_flops(self._bench))

    @property
    def bytes(self) -> float:
        """Bytes that one run must read."""
        return float(self._library.bench_bytes(self._bench))
