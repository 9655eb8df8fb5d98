from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

def widen(data: bytes, dtype: str, /) -> NDArray[np.float32]: ...
def quantize(values: Sequence[float] | NDArray[Any], dtype: str, /) -> bytes: ...

class CheckpointError(ValueError):
    """A checkpoint that cannot be used: what, where, and what would be right."""

class DeviceError(RuntimeError):
    """A device that is missing or failed."""

class Model:
    """Weights, mapped and checked."""

    def __init__(
        self,
        config: dict[str, Any],
        shards: list[str],
        tensors: list[tuple[str, str, tuple[int, ...], int, int, int]],
        *,
        device: str = "cpu",
        threads: int = 0,
        libraries: list[str] = ...,
        compute: str = "f32",
        weights: str = "auto",
    ) -> None: ...
    @property
    def threads(self) -> int: ...
    @property
    def isa(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def bytes(self) -> int: ...
    def session(self, pruning: dict[str, Any] | None) -> Session: ...

class Session:
    """One timeline of tokens; made by Model.session."""

    trace: bool
    @property
    def drawn(self) -> int | None: ...
    @drawn.setter
    def drawn(self, token: int) -> None: ...
    @property
    def logits(self) -> NDArray[np.float32]: ...
    @property
    def ids(self) -> NDArray[np.int32]: ...
    def forward(
        self,
        ids: Sequence[int] | NDArray[Any],
        generated: bool = False,
        watch: Callable[[int, int], None] | None = None,
    ) -> NDArray[np.float32]: ...
    def advance(
        self,
        ids: Sequence[int] | NDArray[Any],
        sampler: Sampler,
        generated: bool = False,
        watch: Callable[[int, int], None] | None = None,
    ) -> int: ...
    def surprisal(
        self, ids: Sequence[int] | NDArray[Any], watch: Callable[[int, int], None] | None = None
    ) -> NDArray[np.float32]: ...
    def read(self, part: str, first: int, n: int, /) -> NDArray[Any]: ...
    def leave_out(self, positions: Sequence[int] | NDArray[Any], /) -> None: ...
    def reserve(self, n_tokens: int, /) -> None: ...
    def truncate(self, length: int, /) -> None: ...
    def fork(self) -> Session: ...
    def bytes_for(self, n_tokens: int, /) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def n_prompt(self) -> int: ...
    @property
    def depths(self) -> NDArray[np.int32]: ...
    @property
    def kinds(self) -> NDArray[np.uint8]: ...
    @property
    def computed(self) -> float: ...
    @property
    def reached_top(self) -> float: ...
    @property
    def last_pass(self) -> NDArray[np.int32]: ...
    @property
    def policy_seconds(self) -> float: ...
    @property
    def last_trace(self) -> list[dict[str, Any]]: ...

class Sampler:
    """Draws token ids from logits."""

    def __init__(self, temperature: float, top_p: float, top_k: int, seed: int) -> None: ...
    def sample(self, logits: NDArray[Any], /) -> int: ...

class Bench:
    """One op on random data, timed."""

    def __init__(
        self,
        op: str,
        *,
        n: int = 1,
        m: int = 1,
        rows: int = 1,
        cols: int = 1,
        dtype: str = "bf16",
        n_heads: int = 1,
        n_kv_heads: int = 1,
        head_dim: int = 64,
        window: int = 0,
        threads: int = 0,
        device: str = "cpu",
        libraries: list[str] = ...,
    ) -> None: ...
    def run(self) -> float: ...
    @property
    def flops(self) -> float: ...
    @property
    def bytes(self) -> float: ...

def features() -> dict[str, Any]: ...
def cuda(libraries: list[str], /) -> str: ...
