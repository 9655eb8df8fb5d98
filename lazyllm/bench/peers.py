"""Peers: who is compared with, whether they are here, and how to start them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from lazyllm.bench.f16_gguf import f16_gguf
from lazyllm.bench.llama_cpp_peer import LlamaCppPeer
from lazyllm.bench.process import Process
from lazyllm.bench.torch_peers import NumpyProduct, TorchProduct, TransformersPeer
from lazyllm.gguf import default_cache

TRANSFORMERS, LLAMA_CPP, TORCH = "transformers", "llama.cpp", "torch"
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


def chosen(names: Sequence[str] | None) -> tuple[tuple[str, ...], list[str]]:
    """Of the named peers (None: of all) those that are installed, and a sentence on each that is not."""
    here, notes = [], []
    for name in PEERS if names is None else [name for name in names if name != NONE]:
        if name not in PEERS:
            raise ValueError(f"there is no peer {name!r}; the peers are {', '.join(PEERS)}, or {NONE}")
        if missing := PEERS[name].missing:
            notes.append(
                f"**{name} is left out of every comparison: no {' and no '.join(missing)} here "
                f"({PEERS[name].install}).**"
            )
        else:
            here.append(name)
    return tuple(here), notes


def environment(threads: int) -> dict[str, str]:
    """As many threads as we use, which stop waiting busily before the next contestant's turn.

    Not at once: llama.cpp meets at a barrier in every op, and decodes at half its speed if its threads sleep
    there. libgomp's own way, a few milliseconds, is left as it is.
    """
    return {
        "OMP_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": str(threads),
        "KMP_BLOCKTIME": "5",  # milliseconds
        "OPENBLAS_THREAD_TIMEOUT": "20",  # as a power of two, of cycles
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


def transformers_peer(folder: Path, dtype: str, threads: int) -> Process:
    return Process(TransformersPeer, folder, dtype, threads, environment=environment(threads))


def llama_cpp_peer(folder: Path, context: int, threads: int) -> Process:
    file = f16_gguf(folder, default_cache() / "bench")
    return Process(LlamaCppPeer, file, context, threads, environment=environment(threads))


def torch_product(threads: int) -> Process:
    return Process(TorchProduct, threads, environment=environment(threads))


def numpy_product(threads: int) -> Process:
    return Process(NumpyProduct, environment=environment(threads))
