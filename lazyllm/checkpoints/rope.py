"""Rotary position embeddings: the frequencies of a head's pairs of dimensions, scaled as config.json says."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lazyllm.checkpoints.fields import Fields

MAX_CONTEXT = 1 << 28
MAX_FACTOR = 1e6
MAX_THETA = 1e15
SCALINGS = ("default", "linear", "llama3", "yarn")
GEMMA3_THETAS = {"full_attention": ("rope_theta", 1e6), "sliding_attention": ("rope_local_base_freq", 1e4)}
"""The bases of Gemma 3's two ropes: their names in files on the hub, and transformers' defaults."""


@dataclass(frozen=True)
class Rope:
    """`inv_freq` holds float32 values; `scale` multiplies cosine and sine; `context` is the length limit."""

    inv_freq: tuple[float, ...]
    scale: float
    context: int


def read_rope(fields: Fields, head_dim: int, context: int) -> Rope:
    """The rope that config.json describes, in any of the layouts that transformers has written."""
    rope = rope_section(fields)
    holder = rope if rope.get("rope_theta") is not None else fields
    theta = holder.number("rope_theta", 1.0, MAX_THETA, default=10000.0)
    return scaled_rope(fields, rope, theta, head_dim, context)


def read_rope_by_layer_type(fields: Fields, head_dim: int, context: int) -> tuple[Rope, Rope]:
    """Gemma 3's rope of the layers that see the whole context, and that of the layers with a window.

    Files on the hub describe the first as other models do theirs, and give the base of the second by name;
    transformers 5 writes an object for each of them.
    """
    by_type = Fields(f"{fields.source}: rope_parameters", fields.object("rope_parameters") or {})
    if not set(by_type.values) <= set(GEMMA3_THETAS):
        fields.refuse("rope_parameters", f"an object with a rope for each of {', '.join(GEMMA3_THETAS)}")
    ropes = []
    for layer_type, (theta_name, default_theta) in GEMMA3_THETAS.items():
        values = by_type.object(layer_type) or {}
        rope = Fields(f"{by_type.source}: {layer_type}", values)
        if layer_type == "full_attention" and (scaling := fields.object("rope_scaling")):
            rope = Fields(f"{fields.source}: rope_scaling", values | scaling)
        name, holder = ("rope_theta", rope) if rope.get("rope_theta") is not None else (theta_name, fields)
        theta = holder.number(name, 1.0, MAX_THETA, default=default_theta)
        ropes.append(scaled_rope(fields, rope, theta, head_dim, context))
    full, local = ropes
    if local.scale != 1.0:
        rope.refuse("rope_type", "a type that leaves cosine and sine unscaled in layers with a window")
    return full, local


def scaled_rope(fields: Fields, rope: Fields, theta: float, head_dim: int, context: int) -> Rope:
    """The frequencies of base `theta`, scaled as `rope` says.

    The arithmetic is in float32, in transformers' order, powers rounded correctly: angles agree to the bit.
    """
    for holder in (fields, rope):
        if holder.get("partial_rotary_factor", 1.0) != 1.0:
            holder.refuse("partial_rotary_factor", "1.0: partial rotary embeddings are not supported")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in SCALINGS:
        name = "rope_type" if rope.get("rope_type") is not None else "type"
        rope.refuse(name, f"one of {', '.join(SCALINGS)}: other scalings are not supported")
    powers = frequency_divisors(theta, head_dim)
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


def frequency_divisors(theta: float, head_dim: int) -> np.ndarray:
    """theta^(2 i / head_dim) of each pair i, by which the position is divided where nothing is scaled."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return np.power(theta, exponents.astype(np.float64)).astype(np.float32)


def rope_section(fields: Fields) -> Fields:
    for section in ("rope_scaling", "rope_parameters"):
        if values := fields.object(section):
            for layer_type in GEMMA3_THETAS:
                if layer_type in values:
                    fields.refuse(
                        section, "one object for all layers: other ropes per layer type are not supported"
                    )
            return Fields(f"{fields.source}: {section}", values)
    return Fields(f"{fields.source}: rope_scaling", {})


def read_factor(rope: Fields) -> float:
    return rope.number("factor", 0.0, MAX_FACTOR)


def read_original_context(fields: Fields, rope: Fields, context: int) -> int:
    name = "original_max_position_embeddings"
    holder = fields if fields.get(name) is not None else rope
    return holder.whole(name, MAX_CONTEXT, default=context)


def as_tuple(inv_freq: np.ndarray) -> tuple[float, ...]:
    return tuple(inv_freq.astype(np.float32).tolist())


def llama3(inv_freq: np.ndarray, rope: Fields, original: int) -> np.ndarray:
    """Llama 3: low frequencies are divided by the factor, high ones kept, those between interpolated."""
    factor = read_factor(rope)
    low = rope.number("low_freq_factor", 0.0, MAX_FACTOR)
    high = rope.number("high_freq_factor", 0.0, MAX_FACTOR)
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
    """YaRN: high frequencies are kept, low ones divided by the factor, with a linear ramp between."""
    dim = 2 * len(powers)

    def pair_turning(times: float) -> float:
        return dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    fast = rope.number("beta_fast", 0.0, MAX_FACTOR, default=32.0)
    slow = rope.number("beta_slow", 0.0, MAX_FACTOR, default=1.0)
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
        return rope.number("attention_factor", 0.0, MAX_FACTOR)

    def growth(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    weights = [
        rope.number(name, -MAX_FACTOR, MAX_FACTOR, default=0.0) for name in ("mscale", "mscale_all_dim")
    ]
    scale = growth(weights[0]) / growth(weights[1]) if all(weights) else growth(1.0)
    if not 0 < scale <= MAX_FACTOR:
        rope.refuse("mscale", "a value that gives cosine and sine a factor above 0")
    return scale
