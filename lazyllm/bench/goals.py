"""The goals: ratios, each measured within one run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Goal:
    what: str
    bound: float
    at_least: bool = True

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.bound:g}"

    def met(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound

    def verdict(self, value: float) -> str:
        return "met" if self.met(value) else "missed"

    def worst(self, values: list[float]) -> float:
        return min(values) if self.at_least else max(values)


LINEAR = Goal("linear layers, 512 rows or more, of the multiply-add ceiling", 0.80)
LINEAR_PEERS = Goal("linear layers, 512 rows or more: better of NumPy's BLAS and torch f32 / ours", 0.95)
FEW_ROWS = Goal(
    "linear layers of few rows: time / max(bytes / bandwidth, FLOPs / ceiling)", 1.15, at_least=False
)
ATTENTION = Goal("causal attention, 2048 tokens or more, of the multiply-add ceiling", 0.65)
SELECTION = Goal(
    "scores, selection and gathering of three stages, share of dense prefill of 30 layers",
    0.01,
    at_least=False,
)
PREFILL = Goal("dense prefill, counted FLOPs / time, of the multiply-add ceiling", 0.70)
PREFILL_TRANSFORMERS = Goal("dense prefill: transformers f32 / ours", 1.6)
PREFILL_LLAMA_CPP = Goal("dense prefill: llama.cpp F16 / ours", 2.3)
KEEP_ALL = Goal("prefill with keeps of 1 / dense", 1.01, at_least=False)
PRUNED = Goal("pruning efficiency: measured / counted speedup of the first token", 0.95)
DECODE_BANDWIDTH = Goal("decode: bytes read / time, of the read bandwidth", 0.92)
DECODE_TRANSFORMERS = Goal("decode: transformers f32 / ours", 3.0)
DECODE_LLAMA_CPP = Goal("decode: llama.cpp F16 / ours", 1.8)
REVIVAL = Goal(
    "decode step with revived tokens: time / max(bytes / bandwidth, FLOPs / ceiling)", 1.15, at_least=False
)
SCALING = Goal("one thread / two threads", 1.9)
SHAPES_F32 = Goal("dense prefill, 7B-shaped layers: transformers f32 / ours", 1.1)
SHAPES_BF16 = Goal("dense prefill, 7B-shaped layers: transformers bf16 / ours", 4.0)
GENERATION = Goal("whole generation, any data set: dense / pruned", 1.0)

CUDA_ATTENTION = Goal("CUDA: causal attention of 2048 tokens or more: torch's fused one / ours", 0.95)
CUDA_PREFILL = Goal(
    "CUDA: dense prefill, 7B width, 2048 tokens or more, counted FLOPs / time, of the product ceiling", 0.85
)
CUDA_PREFILL_TRANSFORMERS = Goal(
    "CUDA: dense prefill, 7B width, 2048 tokens or more: transformers bf16 / ours", 1.15
)
CUDA_DECODE_BANDWIDTH = Goal("CUDA: decode, 7B width: bytes read / time, of the read bandwidth", 0.85)
CUDA_DECODE_TRANSFORMERS = Goal("CUDA: decode, 7B width: transformers bf16 / ours", 2.3)
CUDA_REVIVAL = Goal(
    "CUDA: decode step with up to 64 revived tokens, 7B width: time / a step with none", 1.15, at_least=False
)


@dataclass(frozen=True)
class Goals:
    """Those of one place and model; None where nothing is wanted. Beside peers they go by the engine."""

    linear: Goal | None = None
    linear_peers: Goal | None = None
    few_rows: Goal | None = None
    attention: Goal | None = None
    attention_peer: Goal | None = None
    selection: Goal | None = None
    prefill_tokens: range = range(0)  # that the goals of prefill are for
    prefill: Goal | None = None
    keep_all: Goal | None = None
    prefill_peers: Mapping[str, Goal] = field(default_factory=dict)
    pruned: Goal | None = None
    decode_bandwidth: Goal | None = None
    decode_context: int = 0  # the least that the goals beside peers are for
    decode_peers: Mapping[str, Goal] = field(default_factory=dict)
    revival: Goal | None = None
    revival_over_none: Goal | None = None
    generation: Goal | None = None


ON_CPU = Goals(
    linear=LINEAR,
    linear_peers=LINEAR_PEERS,
    few_rows=FEW_ROWS,
    attention=ATTENTION,
    selection=SELECTION,
    pruned=PRUNED,
    decode_bandwidth=DECODE_BANDWIDTH,
    revival=REVIVAL,
    generation=GENERATION,
)
DEMO_ON_CPU = replace(
    ON_CPU,
    prefill_tokens=range(1024, 4097),
    prefill=PREFILL,
    keep_all=KEEP_ALL,
    prefill_peers={"transformers f32": PREFILL_TRANSFORMERS, "llama.cpp F16": PREFILL_LLAMA_CPP},
    decode_context=4096,
    decode_peers={"transformers f32": DECODE_TRANSFORMERS, "llama.cpp F16": DECODE_LLAMA_CPP},
)
ON_CUDA = Goals(attention_peer=CUDA_ATTENTION)
WIDE_ON_CUDA = replace(
    ON_CUDA,
    prefill_tokens=range(2048, 1 << 31),
    prefill=CUDA_PREFILL,
    keep_all=KEEP_ALL,
    prefill_peers={"transformers bf16": CUDA_PREFILL_TRANSFORMERS},
    pruned=PRUNED,
    decode_bandwidth=CUDA_DECODE_BANDWIDTH,
    decode_peers={"transformers bf16": CUDA_DECODE_TRANSFORMERS},
    revival_over_none=CUDA_REVIVAL,
    generation=GENERATION,
)
WIDE = 4096  # hidden: what launching kernels costs hides the rest in a narrower model


def of_ops(on_cpu: bool) -> Goals:
    return ON_CPU if on_cpu else ON_CUDA


def of_model(on_cpu: bool, demonstration: bool, hidden: int) -> Goals:
    if on_cpu:
        return DEMO_ON_CPU if demonstration else ON_CPU
    return WIDE_ON_CUDA if hidden >= WIDE else ON_CUDA


def wanted(goals: Mapping[str, Goal | None]) -> dict[str, Goal]:
    """Those that there are, by the figure that each is about."""
    return {name: goal for name, goal in goals.items() if goal is not None}
