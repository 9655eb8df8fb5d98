"""The peers: which are installed, how each is started, and the engines that run the same model."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from benchmarks.measuring.place import Place
from benchmarks.measuring.process import Process
from benchmarks.options import Options
from benchmarks.peers.gguf_file import gguf_file
from benchmarks.peers.llama_cpp_peer import LlamaCppPeer
from benchmarks.peers.openvino_peer import OpenVinoPeer, exported
from benchmarks.peers.torch_peer import NumpyProduct, TorchAttention, TorchProduct, TransformersPeer
from lazyllm import _core
from lazyllm.checkpoints.pypi_models import default_cache
from lazyllm.llm import LLM

TRANSFORMERS, LLAMA_CPP, TORCH = "transformers", "llama.cpp", "torch"
TRANSFORMERS_BF16, LLAMA_CPP_BF16 = "transformers-bf16", "llama.cpp-bf16"
TRANSFORMERS_DTYPES = {"transformers f32": "float32", "transformers bf16": "bfloat16"}
NONE = "none"
OURS, OURS_BF16 = "lazyllm", "lazyllm bf16"
LLAMA_CPP_KINDS = {LLAMA_CPP: "F16", LLAMA_CPP_BF16: "BF16"}
OPENVINO_PRECISIONS = {"openvino": "f32", "openvino-bf16": "bf16"}
BATCH_TRIAL_TOKENS = 2048


@dataclass(frozen=True)
class Peer:
    modules: tuple[str, ...]
    install: str
    by_default: bool = True

    @property
    def missing(self) -> list[str]:
        return [module for module in self.modules if find_spec(module) is None]


PEERS = {
    TRANSFORMERS: Peer(("torch", "transformers"), "pip install torch transformers"),
    LLAMA_CPP: Peer(("llama_cpp", "gguf"), "pip install llama-cpp-python gguf"),
    TORCH: Peer(("torch",), "pip install torch"),
}
PEERS |= {
    TRANSFORMERS_BF16: replace(PEERS[TRANSFORMERS], by_default=False),
    LLAMA_CPP_BF16: replace(PEERS[LLAMA_CPP], by_default=False),
    **dict.fromkeys(OPENVINO_PRECISIONS, Peer(("openvino",), "pip install openvino", by_default=False)),
}


def choose_peers(names: Sequence[str] | None, on_cpu: bool = True) -> tuple[tuple[str, ...], list[str]]:
    """The installed ones of the named peers (None: the default ones), and a note on each that is left out."""
    here, notes = [], []
    default = [name for name, peer in PEERS.items() if peer.by_default]
    for name in default if names is None else [name for name in names if name != NONE]:
        if name not in PEERS:
            raise ValueError(f"there is no peer {name!r}; the peers are {', '.join(PEERS)}, or {NONE}")
        if name in {**LLAMA_CPP_KINDS, **OPENVINO_PRECISIONS} and not on_cpu:
            notes.append(f"{name} and NumPy are left out: they are compared with on the CPU only.")
        elif missing := PEERS[name].missing:
            notes.append(
                f"**{name} is left out of every comparison: no {' and no '.join(missing)} here "
                f"({PEERS[name].install}).**"
            )
        else:
            here.append(name)
    return tuple(here), notes


def environment(place: Place) -> dict[str, str]:
    """Gives a peer as many threads as lazyllm has, and lets idle threads stop spinning before the next turn.

    They may spin for some milliseconds, because llama.cpp synchronizes its threads after every op and decodes
    at half its speed if they sleep there. libgomp's default does the same.
    """
    counts = {name: str(place.threads) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    return {
        **(counts if place.on_cpu else {}),
        "KMP_BLOCKTIME": "5",  # milliseconds
        "OPENBLAS_THREAD_TIMEOUT": "20",  # 2^20 cycles
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


def transformers_peer(folder: Path, dtype: str, place: Place) -> Process:
    where = (place.device, place.threads)
    return Process(TransformersPeer, folder, dtype, *where, environment=environment(place))


def llama_cpp_peer(file: Path, context: int, place: Place) -> Process:
    return Process(LlamaCppPeer, file, context, place.threads, environment=environment(place))


def torch_product(place: Place) -> Process:
    return Process(TorchProduct, place.device, place.threads, environment=environment(place))


def torch_attention(place: Place) -> Process:
    return Process(TorchAttention, place.device, environment=environment(place))


def numpy_product(place: Place) -> Process:
    return Process(NumpyProduct, environment=environment(place))


def in_bf16(peer: str) -> bool:
    return peer.lower().endswith("bf16")


@dataclass(frozen=True)
class Engines:
    """One model, loaded by lazyllm and by each peer. `notes` name the peers that are missing, and why."""

    ours: dict[str, LLM]  # in f32; beside peers in bf16 on a CPU that has its products, in bf16 too
    peers: dict[str, Process]
    notes: list[str]

    @property
    def llm(self) -> LLM:
        return self.ours[OURS]

    def like(self, peer: str) -> str:
        """The name of ours whose products have the peer's type, or else f32."""
        return OURS_BF16 if in_bf16(peer) and OURS_BF16 in self.ours else OURS


@contextmanager
def start_engines(options: Options, place: Place, context: int) -> Iterator[Engines]:
    engines = Engines({OURS: place.load(options.folder)}, {}, [])
    with ExitStack() as stack:
        names: list[str | Path] = [*options.peers, *options.gguf]
        for name in names:
            try:
                start(name, engines, stack, options, place, context)
            except (RuntimeError, ValueError, OSError) as error:
                engines.notes.append(f"**{name} is left out: {error}**")
        if place.on_cpu and _core.features()["bf16"] and any(map(in_bf16, engines.peers)):
            engines.ours[OURS_BF16] = place.load(options.folder, compute="bf16")
        yield engines


def start(name: str | Path, engines: Engines, stack: ExitStack, options: Options, place: Place, context: int) -> None:
    """Adds the peer of that name, or llama.cpp with that GGUF file, to the engines."""
    if name in (TRANSFORMERS, TRANSFORMERS_BF16):
        title = place.transformers if name == TRANSFORMERS else "transformers bf16"
        peer = transformers_peer(options.folder, TRANSFORMERS_DTYPES[title], place)
        engines.peers[title] = stack.enter_context(peer)
    elif name in OPENVINO_PRECISIONS:
        precision, export = OPENVINO_PRECISIONS[str(name)], exported(options.folder, default_cache() / "bench")
        if precision == "bf16" and not _core.features()[precision]:
            raise ValueError("this processor multiplies no bf16")
        process = Process(OpenVinoPeer, export, precision, place.threads, environment=environment(place))
        engines.peers[f"OpenVINO {precision}"] = stack.enter_context(process)
    elif isinstance(name, Path) or name in LLAMA_CPP_KINDS:
        kind = name.stem if isinstance(name, Path) else LLAMA_CPP_KINDS[name]
        cache = default_cache() / "bench"
        file = name if isinstance(name, Path) else gguf_file(options.folder, kind, cache)
        process = stack.enter_context(llama_cpp_peer(file, context, place))
        batch = process.call("choose_batch", options.prompt(min(context, BATCH_TRIAL_TOKENS)))
        engines.peers[f"llama.cpp {kind}"] = process
        engines.notes.append(f"llama.cpp {kind} ran batches of {batch} tokens, its faster setting.")
