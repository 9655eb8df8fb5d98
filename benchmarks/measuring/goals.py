"""Goals: bounds on ratios, each measured within one run."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Goal:
    name: str
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


def at_most(name: str, bound: float) -> Goal:
    return Goal(name, bound, at_least=False)


LINEAR = Goal("linear layers, 512 rows or more, of the multiply-add ceiling", 0.80)
LINEAR_PEERS = Goal("linear layers, 512 rows or more: better of NumPy's BLAS and torch f32 / ours", 0.95)
FEW_ROWS = at_most("linear layers of few rows: time / max(bytes / bandwidth, FLOPs / ceiling)", 1.15)
ATTENTION = Goal("causal attention, 2048 tokens or more, of the multiply-add ceiling", 0.65)
WINDOW = at_most("attention with a window: its share of full attention's time / its share of visible pairs", 1.3)
SELECTION = at_most("scores, selection and gathering of three stages, share of dense prefill of 30 layers", 0.01)
DRAWING = Goal("a draw from 151,936 logits: NumPy's sort of them / ours", 10.0)
PREFILL = Goal("dense prefill, counted FLOPs / time, of the multiply-add ceiling", 0.70)
PREFILL_TRANSFORMERS = Goal("dense prefill: transformers f32 / ours", 1.6)
PREFILL_LLAMA_CPP = Goal("dense prefill: llama.cpp F16 / ours", 2.3)
KEEP_ALL = at_most("prefill with stages that keep every token / dense", 1.01)
PRUNED = Goal("pruning efficiency: measured / counted speedup of the first token", 0.95)
PRUNED_BY_ARITHMETIC = Goal("pruning efficiency with products and weights of any type", 0.93)
SHARING = at_most("decode beside another session's prefill: p99 of a step / two steps alone", 4.0)
FORK = at_most("fork of a session of 8000 tokens or more, ms", 2.0)
FORKS = at_most("memory of a session and ten forks / of the session", 1.1)
SECOND_QUESTION = at_most("first token of a second question / with room reserved before", 1.05)
ONE_DOCUMENT = at_most("ten questions on one document by forks / one prefill and ten answers", 1.25)
DECODE_BANDWIDTH = Goal("decode: bytes read / time, of the read bandwidth", 0.92)
DECODE_TRANSFORMERS = Goal("decode: transformers f32 / ours", 3.0)
DECODE_LLAMA_CPP = Goal("decode: llama.cpp F16 / ours", 1.8)
REVIVAL = at_most("decode step with revived tokens: time / max(bytes / bandwidth, FLOPs / ceiling)", 1.15)
SCALING = Goal("one thread / two threads", 1.9)
PREFILL_BF16 = Goal("dense prefill in bf16: transformers bf16 / ours", 1.15)
PREFILL_FORMAT = Goal("dense prefill, weights in one format: llama.cpp / ours", 1.5)
DECODE_FORMAT = Goal("decode, weights in one format: llama.cpp / ours", 1.0)
GENERATION = Goal("whole generation, any data set: dense / pruned", 1.0)

CUDA_ATTENTION = Goal("CUDA: causal attention of 2048 tokens or more: torch's fused attention / ours", 0.95)
CUDA_PREFILL = Goal(
    "CUDA: dense prefill, 7B width, 2048 tokens or more, counted FLOPs / time, of the product ceiling", 0.85
)
CUDA_PREFILL_TRANSFORMERS = Goal("CUDA: dense prefill, 7B width, 2048 tokens or more: transformers bf16 / ours", 1.15)
CUDA_DECODE_BANDWIDTH = Goal("CUDA: decode, 7B width: bytes read / time, of the read bandwidth", 0.85)
CUDA_DECODE_TRANSFORMERS = Goal("CUDA: decode, 7B width: transformers bf16 / ours", 2.3)
CUDA_REVIVAL = at_most("CUDA: decode step with up to 64 revived tokens, 7B width: time / a step with none", 1.15)


@dataclass(frozen=True)
class Goals:
    """The goals for one device and model; None where there is none. Peers' goals are keyed by their names."""

    linear: Goal | None = None
    linear_peers: Goal | None = None
    few_rows: Goal | None = None
    attention: Goal | None = None
    attention_peer: Goal | None = None
    window: Goal | None = None
    selection: Goal | None = None
    prefill_tokens: range = range(0)  # prompt lengths to which the goals of prefill apply
    prefill: Goal | None = None
    keep_all: Goal | None = None
    prefill_peers: Mapping[str, Goal] = field(default_factory=dict)
    pruned_tokens: int = 0  # least prompt length to which the goal of pruning applies
    pruned: Goal | None = None
    decode_context: int = 0  # least context to which the goals of decoding apply
    decode_bandwidth: Goal | None = None
    decode_peers: Mapping[str, Goal] = field(default_factory=dict)
    revival: Goal | None = None
    revival_over_none: Goal | None = None
    generation: Goal | None = None


ON_CPU = Goals(
    linear=LINEAR,
    linear_peers=LINEAR_PEERS,
    few_rows=FEW_ROWS,
    attention=ATTENTION,
    window=WINDOW,
    selection=SELECTION,
    pruned_tokens=1024,
    pruned=PRUNED,
    decode_context=4096,
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
    decode_peers={"transformers f32": DECODE_TRANSFORMERS, "llama.cpp F16": DECODE_LLAMA_CPP},
)
ON_CUDA = Goals(attention_peer=CUDA_ATTENTION)
WIDE_ON_CUDA = replace(
    ON_CUDA,
    prefill_tokens=range(2048, 1 << 31),
    prefill=CUDA_PREFILL,
    keep_all=KEEP_ALL,
    prefill_peers={"transformers bf16": CUDA_PREFILL_TRANSFORMERS},
    pruned_tokens=2048,
    pruned=PRUNED,
    decode_context=2048,
    decode_bandwidth=CUDA_DECODE_BANDWIDTH,
    decode_peers={"transformers bf16": CUDA_DECODE_TRANSFORMERS},
    revival_over_none=CUDA_REVIVAL,
    generation=GENERATION,
)
WIDE = 4096  # hidden size; in a narrower model the cost of kernel launches dominates


def goals_of_ops(on_cpu: bool) -> Goals:
    return ON_CPU if on_cpu else ON_CUDA


def goals_of_model(on_cpu: bool, demonstration: bool, hidden: int) -> Goals:
    if on_cpu:
        return DEMO_ON_CPU if demonstration else ON_CPU
    return WIDE_ON_CUDA if hidden >= WIDE else ON_CUDA
