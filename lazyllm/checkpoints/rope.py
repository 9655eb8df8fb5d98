"""Rotary position embeddings: the frequencies of a head's pairs of dimensions, scaled as config.json says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lazyllm.checkpoints.fields import Fields

MAX_CONTEXT = 1 << 28
MAX_FACTOR = 1e6
MAX_THETA = 1e15
SCALINGS = ("default", "linear", "llama3", "yarn")
FULL, SLIDING = LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class Rope:
    """`inv_freq` holds float32 values; `scale` multiplies cosine and sine; `context` is the length limit."""

    inv_freq: tuple[float, ...]
    scale: float
    context: int


def read_ropes(
    fields: Fields, bases: Mapping[str, tuple[str, float]], head_dim: int, context: int
) -> dict[str, Rope]:
    """The rope of each type of layer in `bases`, which has the name and the default of its base frequency.

    `rope_scaling` is of the layers that see the whole context. In `rope_parameters`, which transformers 5
    writes, a model of several ropes has an object for each type of layer.
    """
    scaling, parameters = fields.section("rope_scaling"), fields.section("rope_parameters")
    by_type = len(bases) > 1
    if by_type and not set(parameters.values) <= set(bases):
        fields.refuse("rope_parameters", f"an object with a rope for each of {', '.join(bases)}")
    ropes = {}
    for layer_type, (theta_name, default_theta) in bases.items():
        rope = parameters.section(layer_type) if by_type else parameters
        if scaling.values and layer_type == FULL:
            scaling.values = (rope.values if by_type else {}) | scaling.values
            rope = scaling
        if set(LAYER_TYPES) & set(rope.values):
            section = str(rope.source).rpartition(": ")[2]
            fields.refuse(section, "one object for all layers: ropes by layer type are not supported")
        named = rope.get("rope_theta") is not None
        theta = (rope if named else fields).number(
            "rope_theta" if named else theta_name, 1.0, MAX_THETA, default=default_theta
        )
        ropes[layer_type] = scaled_rope(fields, rope, theta, head_dim, context)
    if by_type and ropes[SLIDING].scale != 1.0:
        rope.refuse("rope_type", "a type that leaves cosine and sine unscaled in layers with a window")
    return ropes


def scaled_rope(fields: Fields, rope: Fields, theta: float, head_dim: int, context: int) -> Rope:
    """The frequencies of base `theta`, scaled as `rope` says.

    The arithmetic is in float32, in transformers' order, powers rounded correctly: angles agree to the bit.
    """
    for holder in (fields, rope):
        holder.only("partial_rotary_factor", 1.0, "partial rotary embeddings")
    name = "rope_type" if rope.get("rope_type") is not None else "type"
    kind = rope.get(name, "default")
    if kind not in SCALINGS:
        rope.refuse(name, f"one of {', '.join(SCALINGS)}: other scalings are not supported")
    divisors = frequency_divisors(theta, head_dim)
    inv_freq, scale = 1 / divisors, 1.0
    if kind == "linear":
        inv_freq = inv_freq / read_factor(rope)
    elif kind != "default":
        name = "original_max_position_embeddings"
        holder = fields if fields.get(name) is not None else rope
        original = holder.whole(name, MAX_CONTEXT, default=context)
        if kind == "llama3":
            inv_freq = llama3(inv_freq, rope, original)
        else:
            factor = context / original if rope.get("factor") is None else read_factor(rope)
            inv_freq, scale = yarn(divisors, rope, theta, factor, original), yarn_scale(rope, factor)
            context = max(context, int(original * factor))
    return Rope(tuple(inv_freq.astype(np.float32).tolist()), scale, context)


def frequency_divisors(theta: float, head_dim: int) -> np.ndarray:
    """theta^(2 i / head_dim) of each pair i, by which the position is divided where nothing is scaled."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / head_dim
    return np.power(theta, exponents.astype(np.float64)).astype(np.float32)


def read_factor(rope: Fields) -> float:
    return rope.number("factor", 0.0, MAX_FACTOR)


def llama3(inv_freq: np.ndarray, rope: Fields, original: int) -> np.ndarray:
    """Llama 3: low frequencies are divided by the factor, high ones kept, those between interpolated."""
    factor = read_factor(rope)
    low = rope.number("low_freq_factor", 0.0, MAX_FACTOR)
    high = rope.number("high_freq_factor", 0.0, MAX_FACTOR)
    if high <= low:
        rope.refuse("high_freq_factor", f"more than low_freq_factor ({low:g})")
    wavelength = 1 / inv_freq * (2 * math.pi)
    longest, shortest = original / low, original / high
    divided = np.where(wavelength > longest, inv_freq / factor, inv_freq)
    blend = (1 / wavelength * original - low) / (high - low)
    blended = (1 - blend) * divided / factor + blend * divided
    between = (wavelength >= shortest) & (wavelength <= longest)
    return np.where(between, blended, divided)


def yarn(divisors: np.ndarray, rope: Fields, theta: float, factor: float, original: int) -> np.ndarray:
    """YaRN: high frequencies are kept, low ones divided by the factor, with a linear ramp between."""
    dim = 2 * len(divisors)

    def pair_turning(times: float) -> float:
        return dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    first = pair_turning(rope.number("beta_fast", 0.0, MAX_FACTOR, default=32.0))
    last = pair_turning(rope.number("beta_slow", 0.0, MAX_FACTOR, default=1.0))
    if rope.flag("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001
    ramp = (np.arange(dim // 2, dtype=np.float32) - np.float32(first)) / np.float32(last - first)
    kept = 1 - np.clip(ramp, 0, 1)
    scaled: np.ndarray = 1 / (np.float32(factor) * divisors) * (1 - kept) + 1 / divisors * kept
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
