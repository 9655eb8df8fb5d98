"""The goals: ratios, each measured within one run."""

from __future__ import annotations

from dataclasses import dataclass


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
