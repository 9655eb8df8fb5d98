"""All kinds of tokenizer: ids, text, pieces of text, chats, and refused files."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import RECORDED, config_of, family_config
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from toys import CORPUS, train_pieces

from lazyllm import CheckpointError
from lazyllm.checkpoints.config import ModelConfig
from lazyllm.checkpoints.tokenizer import TextStream, Tokenizer

TEXTS = [
    *("", " ", "Hello world, it's a test.", "  two  leading,\n\n\ttabs\tand trailing  ", "你好世界。2024年"),
    *("def f(x):\n    return x ** 2  # 12345 67", "😀🎉👩‍👩‍👧 naïve café", "a" + " " * 50 + "b   3"),
]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <b>there</b>"}]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] | trim }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


def opened(folder: Path, rows: int = 400) -> Tokenizer:
    """The tokenizer of a model with so many rows of its embedding."""
    return Tokenizer.from_folder(folder, config_of(family_config("LlamaForCausalLM", vocab_size=rows)))


def write(folder: Path, name: str, contents: dict[str, Any]) -> None:
    (folder / name).write_text(json.dumps(contents), encoding="utf-8")


@pytest.fixture
def byte_level(tmp_path: Path) -> Path:
    """A folder with a byte-level BPE tokenizer.json that puts <s> first."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    special = ["<s>", "</s>", "<|turn|>"]
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, special_tokens=special, **alphabet))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config.json", {"bos_token": "<s>", "eos_token": {"content": "</s>"}})
    return tmp_path


@pytest.fixture
def pieces(tmp_path: Path) -> Path:
    return train_pieces(tmp_path).parent


def test_byte_level(byte_level: Path) -> None:
    tokenizer = opened(byte_level)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == [0, *tokenizer.encode(text, add_special=False)]
        assert tokenizer.decode(ids) == text
        assert "".join(tokenizer.offsets(ids)) == tokenizer.decode(ids, False) == "<s>" + text
        assert len(tokenizer.offsets(ids)) == len(ids)
    for ids in np.random.default_rng(0).integers(0, 300, (50, 20)).tolist():
        for skip in (False, True):
            assert tokenizer.decode(ids, skip) == tokenizer.vocabulary.tokenizer.decode(ids, skip)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.eos_token_ids == (1, 2)  # from the tokenizer, then from config.json
    assert tokenizer.encode("a<|turn|>b")[2] == 2


@pytest.mark.parametrize("name", ["byte_level", "pieces"])
def test_parts_of_words(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = opened(request.getfixturevalue(name))
    parts = tokenizer.word_parts
    assert len(parts) == 400
    ids = tokenizer.encode("id 7448cf3e-eb44, x_y: café!", add_special=False)
    words = [b""]
    for before, token in zip([0, *ids], ids, strict=False):
        words += [] if parts[before] & 2 and parts[token] & 1 else [b""]
        words[-1] += tokenizer.vocabulary.token_bytes(token)
    assert {b"id", b"7448cf3e-eb44", b",", b"x_y", b":", b"caf", b"!"} <= {word.strip() for word in words}


def test_a_stream_never_splits_a_character(byte_level: Path) -> None:
    tokenizer = opened(byte_level)
    ids = tokenizer.encode("x😀é", add_special=False)
    stream = TextStream(tokenizer)
    assert [stream.push(token) for token in ids] == ["x", "", "", "", "😀", "", "é"]
    stream = TextStream(tokenizer)
    assert [stream.push(ids[1]), stream.finish()] == ["", "\ufffd"]


def test_what_the_files_ask_for(byte_level: Path) -> None:
    """Truncation and padding are ignored; BOS is added where tokenizer_config.json alone asks for it."""
    backend = Backend.from_file(str(byte_level / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=16, pad_id=1)
    backend.post_processor = processors.TemplateProcessing(single="$A")
    backend.save(str(byte_level / "tokenizer.json"))
    text = "the quick brown fox jumps"
    plain = opened(byte_level).encode(text)
    assert (plain[0] != 0, opened(byte_level).decode(plain)) == (True, text)
    write(byte_level, "tokenizer_config.json", {"bos_token": "<s>", "add_bos_token": True})
    assert opened(byte_level).encode(text) == [0, *plain]
    assert opened(byte_level).encode(text, add_special=False) == plain


@pytest.mark.parametrize(("scheme", "pieces"), [("always", ["one", " two"]), ("never", [" one", " two"])])
def test_metaspace(tmp_path: Path, scheme: str, pieces: list[str]) -> None:
    backend = Backend(models.WordLevel({"▁one": 0, "▁two": 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = opened(tmp_path)
    assert tokenizer.encode("one two three") == [0, 1, 2]
    assert tokenizer.decode([0, 1]) == "".join(pieces) == backend.decode([0, 1])
    assert tokenizer.offsets([0, 1]) == pieces


def test_ids_out_of_range(byte_level: Path) -> None:
    tokenizer = opened(byte_level)
    assert tokenizer.decode([399]) == ""  # an embedding row without a token
    for wrong in (-1, 400):
        with pytest.raises(ValueError, match=f"token id is {wrong}; expected 0 to 399"):
            tokenizer.decode([wrong])
    with pytest.raises(TypeError):
        tokenizer.decode([0.5])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="must be a str, not bytes"):
        tokenizer.encode(b"text")  # type: ignore[arg-type]


def test_pieces_are_those_of_sentencepiece_and_round_trip(pieces: Path) -> None:
    from sentencepiece import SentencePieceProcessor

    tokenizer = opened(pieces)
    assert [tokenizer.vocabulary.token_id(text) for text in ("</s>", "no piece")] == [2, None]
    processor = SentencePieceProcessor(model_file=str(pieces / "tokenizer.model"))
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == [1, *processor.encode(text)]
        assert tokenizer.decode(ids) == text
        assert "".join(tokenizer.offsets(ids)) == tokenizer.decode(ids, skip_special_tokens=False)


def test_special_tokens_cut_the_text(pieces: Path) -> None:
    """The legacy form adds a leading space to every part, the newer form only to the first part."""
    added = {"320": {"content": "<|turn|>", "special": True}, "321": {"content": "<think>"}}
    contents = {"added_tokens_decoder": added, "bos_token": "<s>"}
    write(pieces, "tokenizer_config.json", contents)
    legacy = opened(pieces)
    write(pieces, "tokenizer_config.json", contents | {"legacy": False})
    later = opened(pieces)
    text = "hello<|turn|>the fox</s><think>dog"
    assert 320 in legacy.encode(text)
    assert legacy.decode(legacy.encode(text), False) == "<s> hello<|turn|> the fox</s><think> dog"
    assert later.decode(later.encode(text), False) == "<s> hello<|turn|>the fox</s><think>dog"
    assert later.decode(later.encode(text)) == "hellothe fox<think>dog"


def test_what_the_config_adds(pieces: Path) -> None:
    write(pieces, "tokenizer_config.json", {"add_bos_token": False, "add_eos_token": True, "eos_token": ""})
    write(pieces, "added_tokens.json", {"<pad>": 330})
    ids = opened(pieces).encode("the fox<pad>")
    assert (ids[0] != 1, ids[-2:]) == (True, [330, 2])
    with pytest.raises(CheckpointError, match="up to 330; expected below 325"):
        opened(pieces, 325)


@pytest.fixture
def xgen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """XGen's files; GPT-2's vocabulary is replaced by the single bytes and one pair of spaces."""
    import tiktoken

    base = tiktoken.Encoding(
        "gpt2",
        pat_str=r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        mergeable_ranks={bytes([byte]): byte for byte in range(256)} | {b"  ": 256},
        special_tokens={"<|endoftext|>": 50256},
    )
    monkeypatch.setattr(tiktoken, "get_encoding", {"gpt2": base}.__getitem__)
    code = {"AutoTokenizer": ["tokenization_xgen.XgenTokenizer", None]}
    contents = {"tokenizer_class": "XgenTokenizer", "auto_map": code, "eos_token": "<|endoftext|>"}
    write(tmp_path, "tokenizer_config.json", contents)
    return tmp_path


def test_xgen_ids(xgen: Path) -> None:
    tokenizer = opened(xgen, 51200)
    assert tokenizer.vocabulary.size == 51200
    names = {"<fim_prefix>": 50295, "<reponame>": 50312, "<sep>": 50317, "<eom>": 50318, "<mask_1>": 51199}
    blanks = {"  ": 50286, " " * 31: 50257, "\t\t": 50294}
    for text, token in (names | blanks).items():
        assert tokenizer.encode(text) == [token]
    assert tokenizer.decode([104, 105, 50256]) == "hi"
    text = "a   b\t\t\tc" + " " * 40 + "é"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([256]) == ""  # XGen gives two spaces another id
    assert tokenizer.eos_token_id == 50256
    assert [tokenizer.vocabulary.token_id(text) for text in ("h", "hi")] == [104, None]


def test_xgen_without_gpt2s_vocabulary(xgen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr("tiktoken.get_encoding", fail)
    with pytest.raises(OSError, match=r"TIKTOKEN_CACHE_DIR.*no network"):
        opened(xgen, 51200)


def chat_text(folder: Path, template: Any, messages: Any = CHAT, **options: Any) -> str:
    settings_of = json.loads((folder / "tokenizer_config.json").read_text())
    write(folder, "tokenizer_config.json", settings_of | {"chat_template": template})
    return opened(folder).chat_text(messages, **options)


def test_chat_template(byte_level: Path) -> None:
    text = "<s>[system] Be brief.</s>\n[user] Hi <b>there</b></s>\n"
    assert chat_text(byte_level, TEMPLATE) == text + "[assistant] "
    assert chat_text(byte_level, TEMPLATE, add_generation_prompt=False) == text
    named = [{"name": ["tools"], "template": "no"}, 3, {"name": "default", "template": TEMPLATE}]
    assert chat_text(byte_level, named, add_generation_prompt=False) == text


def test_chat_ids_have_no_second_bos(byte_level: Path) -> None:
    (byte_level / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    tokenizer = opened(byte_level)
    ids = tokenizer.apply_chat_template(CHAT)
    assert ids.count(0) == 1
    assert tokenizer.decode(ids, False) == tokenizer.chat_text(CHAT)


def test_what_templates_use(byte_level: Path) -> None:
    for template, text in (
        ("{{ messages[1] | tojson }}", '{"role": "user", "content": "Hi <b>there</b>"}'),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}x{% endfor %}", "x"),
        ("{% generation %}{{ tools is none }}{% endgeneration %}", "True"),
        ("{% set ns = namespace(a=1) %}{% set ns.a = 2 %}{{ ns.a }}", "2"),
    ):
        assert chat_text(byte_level, template) == text
    with pytest.raises(ValueError, match="refuses these messages: roles must alternate"):
        chat_text(byte_level, "{{ raise_exception('roles must alternate') }}")


def test_variables_of_a_template(byte_level: Path) -> None:
    template = "{{ enable_thinking is defined and not enable_thinking }} {{ marks | join }}"
    assert chat_text(byte_level, template) == "False "
    assert chat_text(byte_level, template, enable_thinking=False, marks=["a", "b"]) == "True ab"
    tokenizer = opened(byte_level)
    assert tokenizer.decode(tokenizer.apply_chat_template(CHAT, enable_thinking=True)) == "False "
    with pytest.raises(TypeError, match="variables must hold strings, numbers"):
        tokenizer.chat_text(CHAT, marks=object())
    for name in ("bos_token", "documents", "messages", "tools", "add_generation_prompt"):
        with pytest.raises(ValueError, match=f"'{name}' is taken: .* messages, tools, "):
            tokenizer.template.render(CHAT, True, **{name: []})


def test_messages_are_dicts(byte_level: Path) -> None:
    for messages in ("Hello", {"role": "user"}, ["Hello"], [{"role": "user", "content": object()}]):
        with pytest.raises(TypeError, match="messages must"):
            chat_text(byte_level, TEMPLATE, messages)


@pytest.mark.parametrize(("package", "name"), [("sentencepiece", "pieces"), ("tiktoken", "xgen")])
def test_missing_packages_are_named(
    package: str, name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = request.getfixturevalue(name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f"pip install {package}"):
        opened(folder, 51200)


def test_recorded_ids(demo_model: Path) -> None:
    """Ids from transformers, recorded by make_recorded.py."""
    recorded = json.loads((RECORDED / "smollm2_tokens.json").read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_folder(demo_model, ModelConfig.from_folder(demo_model))
    assert len(recorded["texts"]) > 20
    for text, ids in recorded["texts"]:
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert "".join(tokenizer.offsets(ids)) == text
    assert tokenizer.apply_chat_template(recorded["messages"]) == recorded["chat"]
