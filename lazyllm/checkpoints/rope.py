"""Rotary position embeddings: the frequencies of a head's pairs of dimensions, scaled as config.json says."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from lazyllm.checkpoints.families import FULL, LAYER_TYPES, SLIDING, Family
from lazyllm.checkpoints.fields import Fields

MAX_CONTEXT = 1 << 28
MAX_FACTOR = 1e6
MAX_THETA = 1e15
NO_ROPE = "no_rope"


class Rope(NamedTuple):
    """`inv_freq` holds float32 values of all pairs of a head, 0 for those after the first `rotary_dim`
    values, which RoPE does not rotate; `scale` multiplies cosine and sine; `context` is the length limit.

    In contexts longer than `short_context`, `long_inv_freq` are the frequencies. `original` is the length of
    context before scaling; `query_growth`: see `ModelConfig`.
    """

    inv_freq: tuple[float, ...]
    long_inv_freq: tuple[float, ...]
    scale: float
    context: int
    rotary_dim: int
    short_context: int
    original: int
    query_growth: float


def read_ropes(fields: Fields, family: Family, head_dim: int, kinds: Sequence[str]) -> dict[str, Any]:
    """The fields of `ModelConfig` about RoPE and the context; `kinds` has the name of each layer's rope.

    `rope_scaling` applies to layers that see the whole context. `rope_parameters`, which transformers 5 writes,
    has an object for each type of layer if the model has several ropes.
    """
    context = fields.whole("max_position_embeddings", MAX_CONTEXT)
    scaling, parameters = fields.section("rope_scaling"), fields.section("rope_parameters")
    bases = {FULL: ("rope_theta", family.theta)}
    if family.local_theta:
        bases[SLIDING] = family.local_theta
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
        if rope.get("rope_theta") is not None:
            theta = rope.number("rope_theta", 1.0, MAX_THETA)
        else:
            theta = fields.number(theta_name, 1.0, MAX_THETA, default=default_theta)
        ropes[layer_type] = scaled_rope(fields, rope, family, theta, head_dim, context)
    full, none = ropes[FULL], (0.0,) * (head_dim // 2)
    ropes[NO_ROPE] = full._replace(inv_freq=none, long_inv_freq=none, scale=1.0)
    used = {kind: ropes[kind] for kind in sorted(set(kinds))}
    short_context = min(rope.short_context for rope in used.values())
    forms = 2 if short_context < full.context else 1
    return {
        "context": full.context,
        "inv_freq": tuple(inv_freq for rope in used.values() for inv_freq in rope[:forms]),
        "rope_scale": tuple(rope.scale for rope in used.values() for _ in range(forms)),
        "layer_rope": tuple([*used].index(kind) * forms for kind in kinds),
        "short_context": short_context,
        "rotary_dim": full.rotary_dim,
        "query_growth": full.query_growth,
        "query_step": full.original,
    }


def scaled_rope(fields: Fields, rope: Fields, family: Family, theta: float, head_dim: int, context: int) -> Rope:
    """The frequencies of base `theta`, scaled as `rope` says.

    The arithmetic is in float32, in transformers' order, powers rounded correctly: angles agree to the bit.
    """
    name = "partial_rotary_factor"
    for holder in () if family.partial_rope else (fields, rope):
        holder.only(name, 1.0, "partial rotary embeddings")
    holder = rope if rope.get(name) is not None else fields
    rotary_dim = int(head_dim * holder.number(name, 0.0, 1.0, default=1.0))
    if rotary_dim % 2 or not rotary_dim:
        holder.refuse(name, f"a share of head_dim ({head_dim}) that is an even number")
    name = "rope_type" if rope.get("rope_type") is not None else "type"
    if rope.get(name, "default") not in list(family.scalings):
        rope.refuse(name, f"one of {', '.join(family.scalings)}: other scalings are not supported")
    kind = family.scalings[rope.get(name, "default")]
    original, short_context, scale = context, context, 1.0
    if kind in ("llama3", "yarn", "longrope"):
        name = "original_max_position_embeddings"
        holder = fields if fields.get(name) is not None else rope
        original = holder.whole(name, MAX_CONTEXT, default=context)
    if kind == "alpha" and rotary_dim > 2:  # with a single pair the base has no effect
        theta *= rope.number("alpha", 0.0, MAX_FACTOR) ** (rotary_dim / (rotary_dim - 2))
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / rotary_dim
    divisors = np.power(theta, exponents.astype(np.float64)).astype(np.float32)  # of the position
    long_inv_freq = inv_freq = 1 / divisors
    if kind == "linear":
        inv_freq = inv_freq / rope.number("factor", 0.0, MAX_FACTOR)
    elif kind == "llama3":
        inv_freq = llama3(inv_freq, rope, original)
    elif kind in ("yarn", "longrope"):
        factor = rope.number("factor", 0.0, MAX_FACTOR, default=context / original)
        if kind == "yarn":
            inv_freq, scale = yarn(divisors, rope, theta, factor, original), yarn_scale(rope, factor)
            context = short_context = max(context, int(original * factor))
        else:
            inv_freq, long_inv_freq = (1 / (factors * divisors) for factors in longrope(rope, rotary_dim))
            short_context = min(original, context)
            if factor > 1 and original > 1:
                scale = math.sqrt(1 + math.log(factor) / math.log(original))
        scale = rope.number("attention_factor", 0.0, MAX_FACTOR, default=scale)
    unturned = (0.0,) * ((head_dim - rotary_dim) // 2)
    return Rope(
        inv_freq=(*inv_freq.astype(np.float32).tolist(), *unturned),
        long_inv_freq=(*long_inv_freq.astype(np.float32).tolist(), *unturned),
        scale=scale,
        context=context,
        rotary_dim=rotary_dim,
        short_context=short_context,
        original=original,
        query_growth=rope.number("llama_4_scaling_beta", 0.0, MAX_FACTOR, default=0.0),
    )


def longrope(rope: Fields, rotary_dim: int) -> Iterator[np.ndarray]:
    """The divisors for contexts up to the original length and for longer ones, one for each pair."""
    for name in ("short_factor", "long_factor"):
        factors, pairs = rope.get(name), rotary_dim // 2
        if not isinstance(factors, list) or len(factors) != pairs:
            rope.refuse(name, f"a list of {pairs} numbers")
        parts = Fields(f"{rope.source}: {name}", dict(zip(map(str, range(pairs)), factors, strict=True)))
        yield np.array([parts.number(pair, 1e-6, MAX_FACTOR) for pair in parts.values], np.float32)


def llama3(inv_freq: np.ndarray, rope: Fields, original: int) -> np.ndarray:
    """Llama 3: low frequencies are divided by the factor, high ones kept, those between interpolated."""
    factor = rope.number("factor", 0.0, MAX_FACTOR)
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
    return np.asarray(1 / (np.float32(factor) * divisors) * (1 - kept) + 1 / divisors * kept)


def yarn_scale(rope: Fields, factor: float) -> float:
    weights = [rope.number(name, -MAX_FACTOR, MAX_FACTOR, default=0.0) for name in ("mscale", "mscale_all_dim")]
    if not all(weights):
        return 0.1 * math.log(max(factor, 1.0)) + 1.0
    growth, divisor = (0.1 * weight * math.log(max(factor, 1.0)) + 1.0 for weight in weights)
    if not divisor or not 0 < growth / divisor <= MAX_FACTOR:
        rope.refuse("mscale", "a value that gives cosine and sine a factor above 0")
    return growth / divisor
