"""Peers: who is compared with, whether they are here, and how to start them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from lazyllm.bench.f16_gguf import f16_gguf
from lazyllm.bench.llama_cpp_peer import LlamaCppPeer
from lazyllm.bench.place import Place
from lazyllm.bench.process import Process
from lazyllm.bench.torch_peers import NumpyProduct, TorchAttention, TorchProduct, TransformersPeer
from lazyllm.gguf import default_cache

TRANSFORMERS, LLAMA_CPP, TORCH = "transformers", "llama.cpp", "torch"
TRANSFORMERS_DTYPES = {"transformers f32": "float32", "transformers bf16": "bfloat16"}
NONE = "none"


@dataclass(frozen=True)
class Peer:
    name: str
    modules: tuple[str, ...]
    install: str

    @property
    def missing(self) -> list[str]:
        return [module for module in self.modules if find_spec(module) is None]


PEERS = {
    peer.name: peer
    for peer in (
        Peer(TRANSFORMERS, ("torch", "transformers"), "pip install torch transformers"),
        Peer(LLAMA_CPP, ("llama_cpp", "gguf"), "pip install llama-cpp-python gguf"),
        Peer(TORCH, ("torch",), "pip install torch"),
    )
}


def chosen(names: Sequence[str] | None, on_cpu: bool = True) -> tuple[tuple[str, ...], list[str]]:
    """Of the named peers (None: of all) those that can take part, and a sentence on each that cannot."""
    here, notes = [], []
    for name in PEERS if names is None else [name for name in names if name != NONE]:
        if name not in PEERS:
            raise ValueError(f"there is no peer {name!r}; the peers are {', '.join(PEERS)}, or {NONE}")
        if name == LLAMA_CPP and not on_cpu:
            notes.append("llama.cpp, like NumPy, is left out: they are compared with on the CPU.")
        elif missing := PEERS[name].missing:
            notes.append(
                f"**{name} is left out of every comparison: no {' and no '.join(missing)} here "
                f"({PEERS[name].install}).**"
            )
        else:
            here.append(name)
    return tuple(here), notes


def environment(place: Place) -> dict[str, str]:
    """As many threads as we use, which stop waiting busily before the next contestant's turn.

    Not at once: llama.cpp meets at a barrier in every op, and decodes at half its speed if its threads sleep
    there. libgomp's own way, a few milliseconds, is left as it is.
    """
    counts = {name: str(place.threads) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    return {
        **(counts if place.on_cpu else {}),
        "KMP_BLOCKTIME": "5",  # milliseconds
        "OPENBLAS_THREAD_TIMEOUT": "20",  # as a power of two, of cycles
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


def transformers_peer(folder: Path, dtype: str, place: Place) -> Process:
    where = (place.device, place.threads)
    return Process(TransformersPeer, folder, dtype, *where, environment=environment(place))


def llama_cpp_peer(folder: Path, context: int, place: Place) -> Process:
    file = f16_gguf(folder, default_cache() / "bench")
    return Process(LlamaCppPeer, file, context, place.threads, environment=environment(place))


def torch_product(place: Place) -> Process:
    return Process(TorchProduct, place.device, place.threads, environment=environment(place))


def torch_attention(place: Place) -> Process:
    return Process(TorchAttention, place.device, environment=environment(place))


def numpy_product(place: Place) -> Process:
    return Process(NumpyProduct, environment=environment(place))
