"""The core's sampler: its generator, its order of candidates and its borders."""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, islice
from pathlib import Path

import numpy as np
import pytest
import tiny

from lazyllm import _core

MASK = 2**64 - 1


def rotated(x: int, by: int) -> int:
    return (x << by | x >> (64 - by)) & MASK


def xoshiro(state: list[int]) -> Iterator[int]:
    """xoshiro256** as published by Blackman and Vigna."""
    s = list(state)
    while True:
        yield rotated(s[1] * 5 & MASK, 7) * 9 & MASK
        t = s[1] << 17 & MASK
        s[2] ^= s[0]
        s[3] ^= s[1]
        s[1] ^= s[2]
        s[0] ^= s[3]
        s[2] ^= t
        s[3] = rotated(s[3], 45)


def split_mix(seed: int) -> Iterator[int]:
    while True:
        seed = seed + 0x9E3779B97F4A7C15 & MASK
        z = (seed ^ seed >> 30) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
        yield z ^ z >> 31


def uniforms(seed: int) -> Iterator[float]:
    return ((bits >> 11) * 2.0**-53 for bits in xoshiro(list(islice(split_mix(seed), 4))))


def plain_draw(logits: np.ndarray, temperature: float, top_p: float, top_k: int, uniform: float) -> int:
    """The definition: sort everything, then walk down the cumulative weight; greedy takes the first."""
    order = np.lexsort((np.arange(len(logits)), -logits))[: top_k or None]
    if temperature == 0:
        return int(order[0])
    best = float(logits[order[0]])
    sums = list(accumulate(math.exp((float(logits[i]) - best) / temperature) for i in order))
    nucleus = next(total for total in sums if total >= top_p * sums[-1])
    chosen = next((i for i, total in enumerate(sums) if total > uniform * nucleus), len(sums) - 1)
    return int(order[chosen])


def test_the_generator_gives_the_published_numbers() -> None:
    """From the reference implementations, started with 1, 2, 3, 4 and with seed 0."""
    published = [11520, 0, 1509978240, 1215971899390074240, 1216172134540287360, 607988272756665600]
    assert list(islice(xoshiro([1, 2, 3, 4]), 6)) == published
    assert next(split_mix(0)) == 0xE220A8397B1DCDAF


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_draws_follow_the_generator(seed: int) -> None:
    """With 2^16 equal logits the token is the first 16 bits of the random number."""
    sampler = _core.Sampler(1.0, 1.0, 0, seed)
    logits = np.zeros(2**16, np.float32)
    want = [int(uniform * 2**16) for uniform in islice(uniforms(seed), 12)]
    assert [sampler.sample(logits) for _ in want] == want


def shapes_of_logits(rng: np.random.Generator) -> Iterator[np.ndarray]:
    for n in (1, 2, 5, 97, 700):
        for spread in (0.01, 1.0, 3.0, 30.0):
            logits = rng.normal(0.0, spread, n)
            yield logits
            yield np.round(logits * 4) / 4  # ties
            yield np.where(rng.random(n) < 0.5, -np.inf, logits)
        yield np.zeros(n)


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-310, 1e-3, 0.8, 1.0, 100.0, 1e300])
def test_draws_are_those_of_a_full_sort(temperature: float) -> None:
    rng = np.random.default_rng(5)
    for seed, shape in enumerate(shapes_of_logits(rng)):
        logits = shape.astype(np.float32)
        for top_p, top_k in ((1.0, 0), (0.95, 0), (0.5, 0), (1e-9, 0), (1.0, 3), (0.9, 40)):
            sampler, numbers = _core.Sampler(temperature, top_p, top_k, seed), uniforms(seed)
            for uniform in islice(numbers, 3):
                none = np.isneginf(logits).all()
                draw = 0 if none else plain_draw(logits, temperature, top_p, top_k, uniform)
                assert sampler.sample(logits) == draw


def test_a_draw_releases_the_gil_and_refuses_others() -> None:
    """Each draw of several threads gives a token or is refused, and no number of the generator is lost."""
    logits, shared, alone = np.zeros(2_000_000, np.float32), *(_core.Sampler(1.0, 1.0, 0, 4) for _ in range(2))
    with ThreadPoolExecutor(4) as pool:
        draws = [pool.submit(shared.sample, logits) for _ in range(40)]
    refused = {str(draw.exception()) for draw in draws if draw.exception()}
    assert refused == {"the sampler is in use: a draw is under way"}
    drawn = [draw.result() for draw in draws if not draw.exception()]
    assert sorted(drawn) == sorted(alone.sample(logits) for _ in drawn)


def test_a_sampler_in_a_pass_draws_nothing_else(tmp_path: Path) -> None:
    sampler, session = _core.Sampler(1.0, 1.0, 0, 4), tiny.build(tiny.Shape(), tmp_path).load().session(None)

    def watch(layers_done: int, n_layers: int) -> None:
        sampler.sample(np.zeros(4, np.float32))

    with pytest.raises(RuntimeError, match="the sampler is in use"):
        session.advance([1, 2], sampler, watch=watch)
    assert sampler.sample(np.zeros(4, np.float32)) in range(4)
