"""Checkpoint folders: complete ones are opened; incomplete, damaged and hostile ones are refused."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import RECORDED, config_of, family_config, open_model
from faults import entry, joined
from tiny import write_safetensors

from lazyllm import CheckpointError
from lazyllm.checkpoints.checkpoint import Checkpoint, read_shard, resolve
from lazyllm.checkpoints.tensors import Tensor, core_tensors


@pytest.mark.parametrize(
    ("text", "head"), [("language_model.model.", "language_model."), ("model.language_model.", "")]
)
def test_the_text_half_of_a_multimodal_checkpoint(text: str, head: str, tmp_path: Path) -> None:
    """The recorded Gemma 3, its tensors under the names of old files and of new ones."""
    plain = RECORDED / "families" / "gemma3"
    source, raw = Checkpoint(plain), (plain / "model.safetensors").read_bytes()
    stored = dict.fromkeys(("vision_tower.norm.weight", "multi_modal_projector.norm"), np.zeros(8, "<u2"))
    for name, _, shape, _, offset, n_bytes in source.tensors:
        other = text + name.removeprefix("model.") if name.startswith("model.") else head + name
        stored[other] = np.frombuffer(raw[offset : offset + n_bytes], "<u2").reshape(shape)
    write_safetensors(tmp_path / "model.safetensors", stored, "BF16")
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    config |= {"text_config": json.loads((plain / "config.json").read_text(encoding="utf-8"))}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert {tensor.name for tensor in Checkpoint(tmp_path).tensors} == {tensor.name for tensor in source.tensors}
    logits = [open_model(place).session(None).forward(list(range(40))) for place in (plain, tmp_path)]
    np.testing.assert_array_equal(*logits)


def test_scalar_empty_and_unused_tensors_are_legal(tmp_path: Path) -> None:
    path = tmp_path / "some.safetensors"
    entries = {"scalar": entry(0, 4, []), "empty": entry(4, 4, [0, 3]), "odd": entry(4, 5, [1], "U8")}
    path.write_bytes(contents := joined({"__metadata__": {"format": "pt"}} | entries, b"12345"))
    start = len(contents) - 5
    assert read_shard(path, 2) == [
        ("scalar", "F32", (), 2, start, 4),
        ("empty", "F32", (0, 3), 2, start + 4, 0),
        ("odd", "U8", (1,), 2, start + 4, 1),
    ]


SAFETENSORS = ["config.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json"]
TEXTS = ["chat_template.jinja", "generation_config.json", "tokenizer.model", "tokenizer_config.json"]
OTHERS = [
    *("README.md", "consolidated.00.pth", "consolidated.safetensors", "modeling.py", "pytorch_model.bin"),
    *("onnx/config.json", "onnx/model.onnx", "original/model.safetensors"),
]
GGUFS = ["tiny.Q4_K_M.gguf", "tiny.Q8_0.gguf", "wide/tiny[1].F16.gguf"]
ID = "owner/tiny-model_1.0"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files of a repository in place of the hub's; those fetched are empty, in a folder by revision."""
    import huggingface_hub as hub

    files: list[str] = []

    def snapshot_download(name: str, revision: str | None, **patterns: Any) -> str:
        assert name == ID
        if not files:
            raise RuntimeError("no such repository")
        folder = tmp_path / (revision or "main")
        for file in hub.utils.filter_repo_objects(files, **patterns):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).touch()
        return str(folder)

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(hub, "list_repo_files", lambda name, revision: files)
    return files


@pytest.mark.parametrize("revision", [None, "v1"])
@pytest.mark.parametrize("file", [None, *GGUFS])
def test_resolve_fetches_only_what_is_used(
    file: str | None, revision: str | None, repository: list[str], tmp_path: Path
) -> None:
    repository += [*SAFETENSORS, *TEXTS, *OTHERS, *GGUFS]
    folder = tmp_path / (revision or "main")
    assert resolve(ID, revision, file) == (folder / file if file else folder)
    fetched = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    assert sorted(map(str, fetched)) == ([file] if file else sorted([*SAFETENSORS, *TEXTS]))


@pytest.mark.parametrize(
    ("files", "file", "words"),
    [
        (GGUFS, None, f"model.safetensors or .*; `file` takes one of its GGUF files: {GGUFS[0]}, {GGUFS[1]}"),
        (GGUFS, "tiny.gguf", f"has no tiny.gguf; `file` takes one of its GGUF files: {GGUFS[0]}"),
        (OTHERS, None, "it has no model.safetensors or model.safetensors.index.json$"),
        ([], None, f"{ID}, .*no such repository"),
    ],
)
def test_a_repository_without_the_weights_says_what_it_has(
    files: list[str], file: str | None, words: str, repository: list[str]
) -> None:
    repository += files
    with pytest.raises(OSError, match=words):
        resolve(ID, file=file)


def test_resolve_asks_the_hub_for_no_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for name in ("/no/such/folder", "./missing", "../up", "a/b/c", "~/model", "owner/../x"):
        with pytest.raises(FileNotFoundError, match="does not exist, nor has it the form of a hub id"):
            resolve(name)
    with pytest.raises(ImportError, match=r"no folder here, needs .* pip install huggingface_hub"):
        resolve("owner/model")


def test_resolve_takes_folders_and_gguf_files(tmp_path: Path) -> None:
    for name in ("b.gguf", "a.gguf", "model.safetensors"):
        (tmp_path / name).touch()
    for place in (tmp_path, tmp_path / "a.gguf"):
        assert resolve(place) == resolve(str(place)) == place
    assert resolve(tmp_path, file="b.gguf") == tmp_path / "b.gguf"
    for path, options, words in (
        ("", {"file": "Q4_K_M"}, r"has no Q4_K_M; `file` takes one of .*: a\.gguf, b\.gguf$"),
        ("a.gguf", {"file": "a.gguf"}, r"a\.gguf has no a\.gguf$"),
        ("a.gguf", {"revision": "main"}, "revision is for hub ids, and .* exists here"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=words):
            resolve(tmp_path / path, **options)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("self_attn.qkv_proj", r"expected 32 \+ 16 \+ 16 rows, of self_attn\.q_proj"),
        ("mlp.gate_up_proj", r"has shape \[82, 32\]; expected 40 \+ 40 rows, of mlp\.gate_proj"),
    ],
)
def test_a_tensor_of_several_matrices_has_their_rows(name: str, words: str) -> None:
    tensor = Tensor(f"model.layers.0.{name}.weight", "F32", (82, 32), 0, 0, 4 * 82 * 32)
    with pytest.raises(CheckpointError, match=words):
        list(core_tensors([tensor], config_of(family_config("Phi3ForCausalLM")), Path("folder")))
