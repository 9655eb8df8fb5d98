"""Rotary position embeddings: the angle per position of each pair of a head, scaled as a config asks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lazyllm.fields import Fields

MOST_CONTEXT = 1 << 28
MOST_FACTOR = 1e6
MOST_THETA = 1e15
SCALINGS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Rope:
    """`inv_freq` holds float32 values; `scale` multiplies cosine and sine; `context` is the reach."""

    inv_freq: tuple[float, ...]
    scale: float
    context: int


def read_rope(fields: Fields, head_dim: int, context: int) -> Rope:
    """The rope that config.json describes, in any of the layouts that transformers has written.

    The arithmetic is in float32, in transformers' order, powers rounded correctly: angles agree to the bit.
    """
    section, rope = rope_section(fields)
    for holder in (fields, rope):
        if holder.get("partial_rotary_factor", 1.0) != 1.0:
            holder.refuse("partial_rotary_factor", "1.0: partial rotary embeddings are not supported")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in SCALINGS:
        name = "rope_type" if rope.get("rope_type") is not None else "type"
        rope.refuse(name, f"one of {', '.join(SCALINGS)}: other {section} types are not supported")

    holder = rope if rope.get("rope_theta") is not None else fields
    theta = holder.number("rope_theta", 1.0, MOST_THETA, default=10000.0)
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    powers = np.power(theta, exponents.astype(np.float64)).astype(np.float32)
    inv_freq = np.float32(1) / powers
    if kind == "default":
        return Rope(as_tuple(inv_freq), 1.0, context)
    if kind == "linear":
        return Rope(as_tuple(inv_freq / np.float32(read_factor(rope))), 1.0, context)
    original = read_original_context(fields, rope, context)
    if kind == "llama3":
        return Rope(as_tuple(llama3(inv_freq, rope, original)), 1.0, context)
    factor = context / original if rope.get("factor") is None else read_factor(rope)
    scaled = yarn(powers, rope, theta, factor, original)
    return Rope(as_tuple(scaled), yarn_scale(rope, factor), max(context, int(original * factor)))


def rope_section(fields: Fields) -> tuple[str, Fields]:
    for section in ("rope_scaling", "rope_parameters"):
        if values := fields.object(section):
            for layer_type in ("full_attention", "sliding_attention"):
                if layer_type in values:
                    fields.refuse(
                        section, "one object for all layers: other ropes per layer type are not supported"
                    )
            return section, Fields(f"{fields.source}: {section}", values)
    return "rope_scaling", Fields(f"{fields.source}: rope_scaling", {})


def read_factor(rope: Fields) -> float:
    return rope.number("factor", 0.0, MOST_FACTOR)


def read_original_context(fields: Fields, rope: Fields, context: int) -> int:
    name = "original_max_position_embeddings"
    holder = fields if fields.get(name) is not None else rope
    return holder.whole(name, MOST_CONTEXT, default=context)


def as_tuple(inv_freq: np.ndarray) -> tuple[float, ...]:
    return tuple(inv_freq.astype(np.float32).tolist())


def llama3(inv_freq: np.ndarray, rope: Fields, original: int) -> np.ndarray:
    """Slow turns are divided by the factor, fast ones left, those between blended."""
    factor = read_factor(rope)
    low = rope.number("low_freq_factor", 0.0, MOST_FACTOR)
    high = rope.number("high_freq_factor", 0.0, MOST_FACTOR)
    if high <= low:
        rope.refuse("high_freq_factor", f"more than low_freq_factor ({low:g})")
    wavelength = np.float32(1) / inv_freq * np.float32(2 * math.pi)
    longest, shortest = original / low, original / high
    divided = np.where(wavelength > longest, inv_freq / np.float32(factor), inv_freq)
    turns = np.float32(1) / wavelength * np.float32(original)
    blend = (turns - np.float32(low)) / np.float32(high - low)
    blended = (1 - blend) * divided / np.float32(factor) + blend * divided
    between = (wavelength >= shortest) & (wavelength <= longest)
    return np.where(between, blended, divided)


def yarn(powers: np.ndarray, rope: Fields, theta: float, factor: float, original: int) -> np.ndarray:
    """Pairs that turn often keep their frequency, those that turn seldom have it divided; a ramp between."""
    dim = 2 * len(powers)

    def pair_turning(times: float) -> float:
        return dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    fast = rope.number("beta_fast", 0.0, MOST_FACTOR, default=32.0)
    slow = rope.number("beta_slow", 0.0, MOST_FACTOR, default=1.0)
    first, last = pair_turning(fast), pair_turning(slow)
    if rope.flag("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001
    ramp = (np.arange(dim // 2, dtype=np.float32) - np.float32(first)) / np.float32(last - first)
    kept = 1 - np.clip(ramp, np.float32(0), np.float32(1))
    divided = np.float32(1) / (np.float32(factor) * powers)
    scaled: np.ndarray = divided * (1 - kept) + np.float32(1) / powers * kept
    return scaled


def yarn_scale(rope: Fields, factor: float) -> float:
    if rope.get("attention_factor") is not None:
        return rope.number("attention_factor", 0.0, MOST_FACTOR)

    def growth(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    weights = [
        rope.number(name, -MOST_FACTOR, MOST_FACTOR, default=0.0) for name in ("mscale", "mscale_all_dim")
    ]
    scale = growth(weights[0]) / growth(weights[1]) if all(weights) else growth(1.0)
    if not 0 < scale <= MOST_FACTOR:
        rope.refuse("mscale", "a value that gives cosine and sine a factor above 0")
    return scale
