"""Products of bf16 and int8: close to f32, equal on any number of threads, refused without instructions."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import tolerances
from conftest import INSTRUCTIONS, ROUNDED
from folders import SHAPE as WHOLE
from folders import model_folder

import lazyllm
from lazyllm import _core
from lazyllm.machine.device import chosen_compute
from lazyllm.machine.info import CPUINFO

SHAPE = tiny.Shape(seed=7, hidden=70, head_dim=18, ffn=90, qkv_bias=True, dtype="BF16")
CLOSE = {"bf16": tolerances.HALF_LOGITS["BF16"], "int8": tolerances.INT8_LOGITS}

SETS = _core.features()["instruction_sets"].split()
HAS_VNNI = "avx512_vnni" in CPUINFO.read_text(encoding="utf-8")
KERNELS = {
    "bf16": "avx512_amx" if "amx" in SETS else "avx512_bf16",
    "int8": "avx512_int8" if HAS_VNNI else "avxvnni_int8" if "avxvnni" in SETS else "avx2_int8",
}

pytestmark = pytest.mark.skipif(tiny.DEVICE != "cpu", reason="the arithmetic of the CPU")


def logits(model: _core.Model, stages: dict[str, object] | None = None) -> list[np.ndarray]:
    """Logits of a prompt of many rows, a decode step, a follow-up of few rows, and another step."""
    session = model.session(stages)
    ids = np.random.default_rng(3).integers(0, SHAPE.vocab, 200)
    return [
        session.forward(part, generated)
        for part, generated in [(ids[:190], False), ([5], True), (ids[190:], False), ([8], True)]
    ]


@pytest.mark.parametrize("compute", ROUNDED)
def test_rounded_products_are_close_to_f32_and_not_the_same(compute: str, tmp_path: Path) -> None:
    made = tiny.build(SHAPE, tmp_path)
    rounded = made.load(compute=compute)
    assert rounded.isa == KERNELS[compute]
    for got, want in zip(logits(rounded), logits(made.load()), strict=True):
        assert 1e-4 < tolerances.error(got, want) < CLOSE[compute]


@pytest.mark.parametrize(("compute", "isa"), [("bf16", "avx2"), ("bf16", "generic"), ("int8", "generic")])
def test_compute_is_refused_without_instructions(
    compute: str, isa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isa not in SETS:
        pytest.skip(f"this processor has no {isa}")
    monkeypatch.setenv("LAZYLLM_CPU", isa)
    assert _core.features()[compute] is None
    message = rf"compute is {compute}, which needs .*{INSTRUCTIONS[compute]}.*{isa}: use f32"
    with pytest.raises(lazyllm.DeviceError, match=message):
        tiny.build(SHAPE, tmp_path).load(compute=compute)


@pytest.mark.parametrize("compute", ROUNDED)
def test_load_takes_compute(
    compute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = model_folder(tmp_path, replace(WHOLE, ffn=64))
    llm = lazyllm.load(folder, threads=1, compute=compute)
    assert llm.compute == compute
    assert llm.weights == ("q8" if compute == "int8" else "auto")
    assert KERNELS[compute] in repr(llm)
    assert lazyllm.load(folder).compute == "f32"
    monkeypatch.setenv("LAZYLLM_CPU", "generic")
    with caplog.at_level("INFO", "lazyllm"):
        assert chosen_compute("fastest", "auto") == "f32"
    assert 'compute="fastest" took f32' in caplog.text


@pytest.mark.skipif(not _core.features()["int8"], reason=f"no {INSTRUCTIONS['int8']}")
def test_int8_rounds_weights_once_where_they_are_whole_blocks(tmp_path: Path) -> None:
    for hidden, weights in ((32, "q8"), (40, "auto")):
        shape = replace(WHOLE, hidden=hidden, n_heads=4, head_dim=hidden // 4, ffn=64)
        folder = model_folder(tmp_path / weights, shape)
        assert lazyllm.load(folder, threads=1, compute="int8").weights == weights
        assert lazyllm.load(folder, threads=1, compute="f32").weights == "auto"


def test_an_unknown_instruction_set_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZYLLM_CPU", "mmx")
    with pytest.raises(lazyllm.DeviceError, match='LAZYLLM_CPU is "mmx"'):
        tiny.build(SHAPE, tmp_path).load()
