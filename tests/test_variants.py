"""Every instruction set that this machine runs gives the answers of the generic one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny
import tolerances

from lazyllm import _core

VARIANTS = [name for name in _core.features()["instruction_sets"].split() if name != "generic"]
SHAPE = tiny.Shape(5, n_layers=5, hidden=48, head_dim=16, ffn=72, qkv_bias=True, qk_norm=True, dtype="BF16")
STAGES = tiny.pruning([(0, 0.7), (2, 0.4)], smooth=3, queries=2, decode=[(1, 0.9)])


def passes(model: _core.Model) -> list[np.ndarray]:
    """Logits and depths after a long prompt, a follow-up and some decode steps."""
    session = model.session(STAGES)
    seen = []
    prompt = np.random.default_rng(1).integers(0, SHAPE.vocab, 150)
    first, second = prompt[:120], prompt[120:]
    for ids, generated in ((first, False), ([3], True), ([9], True), (second, False), ([4], True)):
        seen += [session.forward(ids, generated), session.depths]
    return seen


@pytest.mark.parametrize("variant", VARIANTS)
def test_variant_gives_what_generic_gives(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tiny.build(SHAPE, tmp_path)
    monkeypatch.setenv("LAZYLLM_CPU", "generic")
    want = passes(made.load())
    monkeypatch.setenv("LAZYLLM_CPU", variant)
    model = made.load(threads=2)
    assert model.isa == variant
    for got, expected in zip(passes(model), want, strict=True):
        if got.dtype == np.float32:
            assert tolerances.error(got, expected) < tolerances.LOGITS[SHAPE.dtype]
        else:
            np.testing.assert_array_equal(got, expected)


def test_unknown_variant_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tiny.build(SHAPE, tmp_path)
    monkeypatch.setenv("LAZYLLM_CPU", "mmx")
    with pytest.raises(_core.DeviceError, match='LAZYLLM_CPU is "mmx"'):
        made.load()
