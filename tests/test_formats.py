"""The formats of weights: the core's values against the gguf package's, bit by bit, and rounding to them."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from folders import model_folder
from gguf import quants
from tiny import Shape, write_safetensors
from toys import stored_values

import lazyllm
from lazyllm import _core

QUANTIZED = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"]
FORMATS = ["F32", "F16", "BF16", *QUANTIZED]


def kind(name: str) -> quants.GGMLQuantizationType:
    return quants.GGMLQuantizationType[name]


def bits(values: np.ndarray) -> np.ndarray:
    """The bits of f32 values; every NaN counts as the same."""
    return np.where(np.isnan(values), np.float32(np.nan), values).view(np.uint32)


@pytest.mark.parametrize("name", FORMATS)
def test_widening(name: str) -> None:
    """Random bytes: scales of every size and sign, 0, subnormals, infinities and NaN."""
    size = quants.GGML_QUANT_SIZES[kind(name)][1]
    data = np.random.default_rng(3).integers(0, 256, (4000, size), np.uint8)
    data[:256, :2] = 0  # scales of 0 in the formats that begin with one
    if size == 2:
        data = np.arange(1 << 16, dtype="<u2").view(np.uint8).reshape(-1, 2)  # every pattern
    with np.errstate(invalid="ignore", over="ignore"):
        expected = quants.dequantize(data, kind(name)).ravel()
    np.testing.assert_array_equal(bits(_core.widen(data.tobytes(), name)), bits(expected))


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1"])
def test_rounding(name: str) -> None:
    """The same bytes as the gguf package's: ties, blocks of one value, large and tiny ones."""
    random = np.random.default_rng(5)
    sizes = 10.0 ** random.uniform(-6, 4, (3000, 1))
    values = (random.normal(size=(3000, 32)) * sizes).astype(np.float32)
    values[0], values[1] = 0, -0.25
    values[2] = [127, *np.arange(-15, 16) + 0.5]  # ties of Q8_0, whose scale is 1
    values[3] = [0, 15, *np.arange(30) / 2]  # ties of Q4_1, whose scale is 1
    for row, steps in ((4, 1), (5, 3), (6, 5)):  # scales that are ties of f16
        values[row] = [0, *np.linspace(0, 1 + steps * 2**-11, 31) * (127 if name == "Q8_0" else 15)]
    values[7:50] *= np.float32(1e-30)  # scales that f16 rounds to 0
    expected = quants.quantize(values, kind(name))
    got = np.frombuffer(_core.quantize(values.ravel(), name), np.uint8).reshape(expected.shape)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_does_not_become_one(name: str, bad: float) -> None:
    values = np.ones(64, np.float32)
    values[7] = bad
    got = _core.widen(_core.quantize(values, name), name)
    assert np.isnan(got[:32]).all()
    np.testing.assert_allclose(got[32:], 1, rtol=1e-4)


def test_arguments() -> None:
    with pytest.raises(ValueError, match=r"35 bytes; they must be whole blocks of 34"):
        _core.widen(bytes(35), "Q8_0")
    with pytest.raises(ValueError, match=r'"Q3_K"; it must be a format'):
        _core.widen(bytes(34), "Q3_K")
    with pytest.raises(ValueError, match=r"33 values; they must be whole blocks of 32"):
        _core.quantize(np.ones(33, np.float32), "Q8_0")
    with pytest.raises(ValueError, match=r'"Q4_K"; values can be rounded to Q8_0 and Q4_1'):
        _core.quantize(np.ones(256, np.float32), "Q4_K")


def rounded(folder: Path, out: Path, kinds: dict[str, str]) -> Path:
    """The folder with each matrix rounded by the gguf package: to the format of the first part of its name in
    `kinds`, "" for all others."""
    shutil.copytree(folder, out)
    stored = stored_values(folder)
    for name, values in stored.items():
        if values.ndim == 2:
            to = kind(next(to for part, to in kinds.items() if part in name))
            stored[name] = quants.dequantize(quants.quantize(values, to), to)
    write_safetensors(out / "model.safetensors", stored, "F32")
    return out


@pytest.mark.parametrize(
    ("weights", "kinds", "share"), [("q8", {"": "Q8_0"}, 34 / 64), ("q4", {".layers.": "Q4_1", "": "Q8_0"}, None)]
)
def test_rounding_on_loading(
    weights: str, kinds: dict[str, str], share: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits are those of a checkpoint that holds the values of the rounded weights: equal to the bit by the
    generic kernels, which widen every weight."""
    monkeypatch.setenv("LAZYLLM_CPU", "generic")
    wide = model_folder(tmp_path / "wide", Shape(vocab=300, hidden=64, ffn=96, n_layers=3, dtype="BF16"))
    made = lazyllm.load(wide, device="cpu", threads=3, weights=weights)
    expected = lazyllm.load(rounded(wide, tmp_path / "rounded", kinds), device="cpu", threads=1)
    ids = list(range(30))
    logits = [llm.core.session(None).forward(ids) for llm in (made, expected)]
    np.testing.assert_array_equal(*logits)
    assert f"MiB in {weights} on cpu" in repr(made)
    stored = lazyllm.load(wide, device="cpu", threads=1)
    assert made.core.bytes < 0.7 * stored.core.bytes
    if share:
        vectors = sum(4 * np.prod(entry[2]) for entry in stored.checkpoint.tensors if len(entry[2]) == 1)
        assert made.core.bytes - vectors == share * (stored.core.bytes - vectors)


def test_weights_are_refused_by_name(tmp_path: Path) -> None:
    narrow = model_folder(tmp_path, Shape(vocab=300, ffn=40))
    with pytest.raises(ValueError, match=r'weights="q4": tensor .*down_proj\.weight has rows of 40 .* of 32'):
        lazyllm.load(narrow, device="cpu", weights="q4")
