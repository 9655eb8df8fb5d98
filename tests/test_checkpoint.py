"""Checkpoint folders: complete ones are opened; incomplete, damaged and hostile ones are refused."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import RECORDED, open_model
from faults import entry, joined
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import write_safetensors

from lazyllm import CheckpointError, _core
from lazyllm.checkpoints.checkpoint import Checkpoint, read_shard, resolve, text_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint in one file."""
    return Path(shutil.copytree(RECORDED / "families" / "llama1", tmp_path / "single"))


# ---- complete checkpoints ------------------------------------------------------------------------


def test_the_table_points_at_the_tensors() -> None:
    from safetensors.numpy import load_file

    for place in (RECORDED / "families" / "xgen", RECORDED / "families" / "llama2"):
        found = Checkpoint(place)
        for name, dtype, shape, shard, offset, nbytes in found.tensors:
            stored = load_file(found.shards[shard])[name]
            kind = {"F32": np.float32, "F16": np.float16}[dtype]
            raw = np.fromfile(found.shards[shard], np.uint8, nbytes, offset=offset)
            np.testing.assert_array_equal(raw.view(kind).reshape(shape), stored)


def test_what_generation_config_says(folder: Path) -> None:
    written = {"eos_token_id": [2, 7], "temperature": 0.6, "top_p": 0.95}
    path = folder / "generation_config.json"
    path.unlink(missing_ok=True)
    assert Checkpoint(folder).generation_config == {}
    path.write_text(json.dumps(written))
    assert (found := Checkpoint(folder)).generation_config == written
    assert found.config.eos_token_ids == (2, 7)


def multimodal(folder: Path, text: str, head: str) -> Path:
    """The recorded Gemma 3 as the text half of a multimodal checkpoint, its tensors under other names."""
    source = Checkpoint(RECORDED / "families" / "gemma3")
    raw = Path(source.shards[0]).read_bytes()
    stored = {"vision_tower.vision_model.post_layernorm.weight": np.zeros(8, "<u2")}
    for name, _, shape, _, offset, nbytes in source.tensors:
        other = text + name.removeprefix("model.") if name.startswith("model.") else head + name
        stored[other] = np.frombuffer(raw[offset : offset + nbytes], "<u2").reshape(shape)
    stored["multi_modal_projector.mm_soft_emb_norm.weight"] = np.zeros(8, "<u2")
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", stored, "BF16")
    config = json.loads((source.path / "config.json").read_text(encoding="utf-8"))
    nested = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": config,
        "vision_config": {"model_type": "siglip_vision_model"},
    }
    (folder / "config.json").write_text(json.dumps(nested), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("text", "head"),
    [("language_model.model.", "language_model."), ("model.language_model.", "")],
    ids=["old", "new"],
)
def test_the_text_half_of_a_multimodal_checkpoint(text: str, head: str, tmp_path: Path) -> None:
    plain = RECORDED / "families" / "gemma3"
    folder = multimodal(tmp_path / "multimodal", text, head)
    names = [{tensor[0] for tensor in Checkpoint(place).tensors} for place in (folder, plain)]
    assert names[0] == names[1]
    logits = [open_model(place).session(None).forward(list(range(40))) for place in (plain, folder)]
    np.testing.assert_array_equal(*logits)


def test_a_text_tensor_under_two_names(tmp_path: Path) -> None:
    found = Checkpoint(multimodal(tmp_path / "multimodal", "model.language_model.", ""))
    norm = next(tensor for tensor in found.tensors if tensor.name == "model.norm.weight")
    second = text_model([norm._replace(name="language_model.model.norm.weight")])
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.* stands in the checkpoint twice"):
        _core.Model(found.config.core(), found.shards, [*found.tensors, *second])


def test_scalar_empty_and_unused_tensors_are_legal(tmp_path: Path) -> None:
    path = tmp_path / "some.safetensors"
    header = {
        "__metadata__": {"format": "pt"},
        "scalar": entry(0, 4, []),
        "empty": entry(4, 4, [0, 3]),
        "also empty": entry(4, 4, [0]),
        "odd": entry(4, 5, [1], "U8"),
    }
    path.write_bytes(contents := joined(header, b"12345"))
    start = len(contents) - 5
    assert sorted(read_shard(path, 2)) == [
        ("also empty", "F32", (0,), 2, start + 4, 0),
        ("empty", "F32", (0, 3), 2, start + 4, 0),
        ("odd", "U8", (1,), 2, start + 4, 1),
        ("scalar", "F32", (), 2, start, 4),
    ]


# ---- how a model is located ----------------------------------------------------------------------


SAFETENSORS = ["config.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json"]
TEXTS = ["chat_template.jinja", "generation_config.json", "tokenizer.model", "tokenizer_config.json"]
OTHERS = [
    *("README.md", "consolidated.00.pth", "consolidated.safetensors", "modeling.py", "pytorch_model.bin"),
    *("onnx/config.json", "onnx/model.onnx", "original/model.safetensors"),
]
GGUFS = ["tiny.Q4_K_M.gguf", "tiny.Q8_0.gguf", "wide/tiny[1].F16.gguf"]


class Hub:
    """A repository in place of the hub's; what is fetched of it are empty files, by commit."""

    def __init__(self, cache: Path, monkeypatch: pytest.MonkeyPatch, files: list[str]) -> None:
        import huggingface_hub as hub

        self.cache, self.files, self.client = cache, files, hub
        monkeypatch.setattr(hub, "snapshot_download", self.snapshot_download)
        monkeypatch.setattr(hub, "list_repo_files", self.list_repo_files)

    def list_repo_files(self, name: str, revision: str | None) -> list[str]:
        assert name == "owner/tiny-model_1.0"
        return self.files

    def snapshot_download(self, name: str, revision: str | None, **patterns: Any) -> str:
        folder = self.cache / (revision or "main")
        for file in self.client.utils.filter_repo_objects(self.list_repo_files(name, revision), **patterns):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).touch()
        return str(folder)

    def fetched(self) -> list[str]:
        files = (path for path in self.cache.rglob("*") if path.is_file())
        return sorted(str(path.relative_to(self.cache)) for path in files)


@pytest.mark.parametrize("revision", [None, "v1"])
@pytest.mark.parametrize("file", [None, *GGUFS])
def test_resolve_fetches_only_what_is_used(
    file: str | None, revision: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(tmp_path, monkeypatch, [*SAFETENSORS, *TEXTS, *OTHERS, *GGUFS])
    folder = tmp_path / (revision or "main")
    assert resolve("owner/tiny-model_1.0", revision, file) == (folder / file if file else folder)
    wanted = [file] if file else sorted([*SAFETENSORS, *TEXTS])
    assert hub.fetched() == [f"{folder.name}/{name}" for name in wanted]


@pytest.mark.parametrize(
    ("files", "file", "words"),
    [
        (GGUFS, None, f"model.safetensors or .*; `file` takes one of its GGUF files: {GGUFS[0]}, {GGUFS[1]}"),
        (GGUFS, "tiny.gguf", f"has no tiny.gguf; `file` takes one of its GGUF files: {GGUFS[0]}"),
        (OTHERS, None, "it has no model.safetensors or model.safetensors.index.json$"),
    ],
)
def test_a_repository_without_the_weights_says_what_it_has(
    files: list[str], file: str | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Hub(tmp_path, monkeypatch, files)
    with pytest.raises(OSError, match=words):
        resolve("owner/tiny-model_1.0", file=file)


def test_resolve_when_the_hub_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub as hub

    def fail(*_: Any, **__: Any) -> str:
        raise RuntimeError("no such repository")

    monkeypatch.setattr(hub, "snapshot_download", fail)
    with pytest.raises(OSError, match=r"owner/model, .*no such repository"):
        resolve("owner/model")


def test_resolve_asks_the_hub_for_no_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for name in ("/no/such/folder", "./missing", "../up", "a/b/c", "~/model", "owner/../x"):
        with pytest.raises(FileNotFoundError, match="does not exist, nor has it the form of a hub id"):
            resolve(name)
    with pytest.raises(FileNotFoundError, match="pip install huggingface_hub"):
        resolve("owner/model")


def test_resolve_takes_folders_and_gguf_files(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    for place in (tmp_path, tmp_path / "model.gguf"):
        assert resolve(place) == resolve(str(place)) == place
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"expected a model's folder, or a \.gguf file"):
        resolve(tmp_path / "model.safetensors")


def test_file_picks_a_gguf_file_of_a_folder(tmp_path: Path) -> None:
    for name in ("b.gguf", "a.gguf", "config.json"):
        (tmp_path / name).touch()
    assert resolve(tmp_path, file="b.gguf") == tmp_path / "b.gguf"
    with pytest.raises(FileNotFoundError, match=r"no c\.gguf; `file` takes one of .*: a\.gguf, b\.gguf$"):
        resolve(tmp_path, file="c.gguf")


def test_options_of_the_hub_with_a_path(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    for path, options, words in (
        ("", {"revision": "main"}, "revision is for hub ids, and .* exists here"),
        ("model.gguf", {"revision": "main"}, "revision is for hub ids, and .* exists here"),
        ("model.gguf", {"file": "model.gguf"}, "file is for a folder or hub id, and .*gguf is a file"),
        ("", {"file": "Q4_K_M"}, "file must be the name of a GGUF file such as .*, not 'Q4_K_M'"),
    ):
        with pytest.raises(ValueError, match=words):
            resolve(tmp_path / path, **options)


# ---- incomplete folders --------------------------------------------------------------------------


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="not a folder"):
        Checkpoint(tmp_path / "missing")


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("consolidated.00.pth", "pickles.*save_pretrained"),
        ("model.gguf", r"has no .*; `file` takes one of its GGUF files: model\.gguf"),
    ],
)
def test_no_safetensors(folder: Path, name: str, advice: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).touch()
    with pytest.raises(CheckpointError, match=advice):
        Checkpoint(folder)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3500), st.integers(1, 255)), min_size=1, max_size=4),
    st.none() | st.integers(0, 66000),
)
def test_damaged_files_are_refused_or_stay_in_bounds(
    tmp_path: Path, flips: list[tuple[int, int]], length: int | None
) -> None:
    data = bytearray((RECORDED / "families" / "llama1" / "model.safetensors").read_bytes())
    for place, mask in flips:
        data[place] ^= mask
    path = tmp_path / "model.safetensors"
    path.write_bytes(data[:length])
    try:
        tensors = read_shard(path, 0)
    except CheckpointError:
        return
    size = path.stat().st_size
    assert all(offset >= 8 and nbytes >= 0 and offset + nbytes <= size for *_, offset, nbytes in tensors)


@pytest.mark.parametrize(
    ("family", "field", "words"),
    [
        ("phi3", "intermediate_size", r"gate_up_proj.*expected 41 \+ 41 rows, of mlp\.gate_proj, mlp\.up"),
        ("phi3", "num_key_value_heads", r"qkv_proj.*expected 32 \+ 8 \+ 8 rows, of self_attn\.q_proj, self"),
        ("glm4", "intermediate_size", r"gate_up_proj.*has shape \[80, 32\]; expected 41 \+ 41 rows"),
    ],
)
def test_a_tensor_of_several_matrices_has_their_rows(
    family: str, field: str, words: str, tmp_path: Path
) -> None:
    folder = shutil.copytree(RECORDED / "families" / family, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config[field] = {"intermediate_size": 41, "num_key_value_heads": 1}[field]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(CheckpointError, match=words):
        Checkpoint(folder)
