"""Faults of files that a stranger may have made: a line each, with words that the error must have.

A fault changes one file of something whole (a folder, its shards, a GGUF file, a saved session, a preset).
"""

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from folders import SHAPE
from safetensors.numpy import load, save

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SETTINGS, VOCABULARY, TEMPLATE = "tokenizer_config.json", "tokenizer.json", "chat_template.jinja"
SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
NORM = "model.norm.weight"
Change = Callable[[Path], None]


class Fault(NamedTuple):
    name: str
    file: str  # the change is made to it, and the error names it
    change: Change
    words: str  # in the error, as a regular expression


def faults(file: str, *lines: tuple[str, Change, str]) -> list[Fault]:
    return [Fault(f"{file}: {name}", file, change, words) for name, change, words in lines]


# ---- changes -----------------------------------------------------------------------------------------------


remove: Change = Path.unlink


def holds(contents: bytes) -> Change:
    return lambda path: path.write_bytes(contents) and None


def sized(n_bytes: int, first: bytes = b"") -> Change:
    """Then zeros, which take no room on disk."""

    def change(path: Path) -> None:
        with path.open("wb") as file:
            file.write(first)
            file.truncate(n_bytes)

    return change


def rewritten(edit: Callable[[bytes], bytes]) -> Change:
    return lambda path: path.write_bytes(edit(path.read_bytes())) and None


def cut(n_bytes: int) -> Change:
    """The first bytes; a negative number is taken from the end."""
    return rewritten(lambda contents: contents[:n_bytes])


def replaced(old: bytes, new: bytes) -> Change:
    def change(contents: bytes) -> bytes:
        assert old in contents, old
        return contents.replace(old, new, 1)

    return rewritten(change)


def edited(edit: Callable[[dict[str, Any]], Any]) -> Change:
    """A JSON file whose object is changed."""

    def change(path: Path) -> None:
        values = json.loads(path.read_bytes()) if path.exists() else {}
        edit(values)
        path.write_text(json.dumps(values))

    return change


def having(**fields: Any) -> Change:
    return edited(lambda values: values.update(fields))


def lacking(name: str) -> Change:
    return edited(lambda values: values.pop(name))


def beside(name: str, change: Change) -> Change:
    """Another file than the one that the error names is changed."""
    return lambda path: change(path.with_name(name))


def inside(name: str, change: Change) -> Change:
    """A file of the folder that the error names is changed."""
    return lambda path: change(path / name)


def both(*changes: Change) -> Change:
    return lambda path: [change(path) for change in changes] and None


# ---- safetensors -------------------------------------------------------------------------------------------


def split(contents: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, and what follows it."""
    end = 8 + int.from_bytes(contents[:8], "little")
    return json.loads(contents[8:end]), contents[end:]


def joined(header: Any, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8) if not isinstance(header, bytes) else b""
    return len(text).to_bytes(8, "little") + text + data


def parts(edit: Callable[[dict[str, Any], bytes], bytes]) -> Change:
    """The header is changed in place; the data become those returned."""

    def change(contents: bytes) -> bytes:
        entries, data = split(contents)
        data = edit(entries, data)
        return joined(entries, data)

    return rewritten(change)


def header(edit: Callable[[dict[str, Any]], Any]) -> Change:
    return parts(lambda entries, data: (edit(entries), data)[1])


def tensor(name: str = NORM, **fields: Any) -> Change:
    """Fields of a tensor's entry."""
    return header(lambda entries: entries[name].update(fields))


def entry(begin: int = 0, end: int = 4, shape: Any = (1,), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def only(n_bytes: int = 4, **entries: Any) -> Change:
    """A file with these tensors."""
    return holds(joined(entries, b"0" * n_bytes))


def extra(name: str, **fields: Any) -> Change:
    """One more tensor of one value, at the end."""

    def change(entries: dict[str, Any], data: bytes) -> bytes:
        entries[name] = entry(len(data), len(data) + 4) | fields
        return data + b"\0\0\0\0"

    return parts(change)


def values(name: str, raw: bytes) -> Change:
    """The first bytes of a tensor."""

    def change(entries: dict[str, Any], data: bytes) -> bytes:
        begin = entries[name]["data_offsets"][0]
        return data[:begin] + raw + data[begin + len(raw) :]

    return parts(change)


def shifted(path: Path) -> None:
    """A header of odd length: each tensor begins at an odd byte."""
    entries, data = split(path.read_bytes())
    text = json.dumps(entries).encode()
    path.write_bytes(joined(text + b" " * (1 - len(text) % 2), data))


# ---- sessions ----------------------------------------------------------------------------------------------


def resealed(change: Change) -> Change:
    """With the digest at the end made anew, as the author of the file can."""
    return both(change, rewritten(lambda b: b[:-32] + hashlib.sha256(b[:-32]).digest()))


def flagged(changes: list[tuple[str, int, int, int]]) -> Change:
    """Other flags of tokens, each a name, the first token, how many and the value; and as many rows of keys, values
    and Aux as these take, of zeros."""

    def change(contents: bytes) -> bytes:
        arrays = load(contents)
        for name, first, n, value in changes:
            arrays[name][first : first + n] = value
        n_heads, _, head_dim = arrays["keys.0"].shape
        kept, depths = arrays["gone"] == 0, arrays["depths"]
        for layer in range(SHAPE.n_layers):
            rows = np.zeros((n_heads, (kept & (depths > layer)).sum(), head_dim), np.float32)
            aux = np.zeros(((kept & (depths == layer)).sum(), SHAPE.hidden), np.float32)
            arrays |= {f"keys.{layer}": rows, f"values.{layer}": rows, f"aux.{layer}": aux}
        arrays = {name: array for name, array in arrays.items() if array.size}
        return save(arrays, split(contents)[0]["__metadata__"])

    return resealed(rewritten(change))


def described(edit: Callable[[dict[str, Any]], Any]) -> Change:
    def edit_metadata(entries: dict[str, Any]) -> None:
        description = json.loads(entries["__metadata__"]["session"])
        edit(description)
        entries["__metadata__"]["session"] = json.dumps(description)

    return resealed(header(edit_metadata))


def describing(**fields: Any) -> Change:
    return described(lambda description: description.update(fields))


def prompting(**fields: Any) -> Change:
    return described(lambda description: description["prompts"][0].update(fields))


def metadata(**fields: Any) -> Change:
    return resealed(header(lambda entries: entries["__metadata__"].update(fields)))


def renamed(old: str, new: str) -> Change:
    def edit(entries: dict[str, Any]) -> None:
        entries[new] = entries.pop(old)

    return resealed(header(edit))


# ---- GGUF --------------------------------------------------------------------------------------------------

U8, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 6, 7, 8, 9, 10


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def field(name: bytes, kind: int, raw: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + raw


def gguf(
    fields: bytes = b"",
    n_fields: int = 0,
    tensors: bytes = b"",
    n_tensors: int = 0,
    magic: bytes = b"GGUF",
    version: int = 3,
) -> Change:
    """A file of nothing else."""
    counts = struct.pack("<IQQ", version, n_tensors, n_fields)
    return holds(magic + counts + fields + tensors + b"\0" * 64)


def lone_field(kind: int, raw: bytes, name: bytes = b"a") -> Change:
    """A file with one metadata field."""
    return gguf(field(name, kind, raw), 1)


def info(name: bytes = b"t", shape: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def placed(*infos: bytes) -> Change:
    """A file with these tensors."""
    return gguf(tensors=b"".join(infos), n_tensors=len(infos))


def after(name: bytes, at: int, raw: bytes) -> Change:
    """Bytes behind a name: at 0 the type of a metadata field, at 4 its value or the shape of a tensor."""

    def change(contents: bytes) -> bytes:
        begin = contents.rindex(string(name)) + 8 + len(name) + at
        return contents[:begin] + raw + contents[begin + len(raw) :]

    return rewritten(change)


def number(name: bytes, value: int) -> Change:
    """A number of the metadata, as it stands in the file."""
    return after(name, 4, struct.pack("<I", value))


# ---- the faults --------------------------------------------------------------------------------------------

JSON_TEXTS = {
    "empty": (b"", "is not JSON"),
    "cut": (b'{"a": ', "is not JSON"),
    "a list": (b"[]", "holds a list; expected a JSON object"),
    "not UTF-8": (b'{"a": "\xff"}', "is not JSON: .*utf-8"),
    "nested": (b'{"a":' * 100_000, "is not JSON: "),
    "a number of 5000 digits": (b'{"a": ' + b"9" * 5000 + b"}", "is not JSON: .*4300 digits"),
}
WHOLE = "is not a whole safetensors file: "
TWICE = b'{"a": %s, "a": %s}' % ((json.dumps(entry()).encode(),) * 2)


def of_pieces(**fields: Any) -> Change:
    """A file with these fields in a folder whose vocabulary is a tokenizer.model."""
    return both(having(**fields), beside(VOCABULARY, remove), beside("tokenizer.model", holds(b".")))


def template(text: str) -> Change:
    return having(chat_template=text)


FOLDER = [
    *faults(
        CONFIG,
        *((name, holds(text), words) for name, (text, words) in JSON_TEXTS.items()),
        ("missing", remove, "is missing"),
        ("1 GiB", sized(1 << 30), "has 1073741824 bytes; expected at most"),
        ("another model", having(architectures=["GPT2LMHeadModel"]), "architectures is .*; expected one of"),
        ("two types", having(model_type="qwen2"), "model_type is 'qwen2'; expected 'llama'"),
        ("10^9 layers", having(num_hidden_layers=10**9), "num_hidden_layers is 1000000000; expected"),
        ("a number as text", having(hidden_size="32"), "hidden_size is '32'; expected a whole number"),
        ("a truth as number", having(hidden_size=True), "hidden_size is True; expected a whole number"),
        ("heads that do not divide", having(num_key_value_heads=3), "num_key_value_heads is 3; expected"),
        ("more KV heads than heads", having(num_key_value_heads=8), "num_key_value_heads is 8; expected"),
        ("an odd head", having(head_dim=7), "head_dim is 7; expected an even"),
        ("epsilon of NaN", having(rms_norm_eps=float("nan")), "rms_norm_eps is nan; expected"),
        ("a base of 0", having(rope_theta=0), "rope_theta is 0; expected a number above 1"),
        ("scaling as a list", having(rope_scaling=[1]), r"rope_scaling is \[1\]; expected an object"),
        ("no factor", having(rope_scaling={"type": "linear"}), "factor is missing; expected"),
        ("an end beyond", having(eos_token_id=300), "eos_token_id is 300; expected token ids below"),
        ("tied by number", having(tie_word_embeddings=1), "tie_word_embeddings is 1; expected true or false"),
        ("quantized", having(quantization_config={"bits": 4}), "quantization_config is .*; expected null"),
        ("another activation", having(hidden_act="gelu"), "hidden_act is 'gelu'; expected 'silu'"),
        ("biases in the FFN", having(mlp_bias=True), "mlp_bias is True; expected false"),
        ("partial RoPE", having(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5; expected 1.0"),
    ),
    *faults("generation_config.json", ("an end below 0", having(eos_token_id=-1), "eos_token_id is -1; exp")),
    *faults(
        ".",  # config.json and the weights do not agree: the folder is named
        ("a layer more", inside(CONFIG, having(num_hidden_layers=7)), r"layers\.6\.\S+: missing"),
        ("wider heads", inside(CONFIG, having(head_dim=16)), r"q_proj\S+ shape \(32, 32\), but .* \(64,"),
        ("biases", inside(CONFIG, having(attention_bias=True)), r"q_proj\.bias: missing from the checkpoint"),
        ("no vocabulary", inside(VOCABULARY, remove), "neither tokenizer.json nor tokenizer.model"),
        ("no weights", both(inside(WEIGHTS, remove), inside("a.gguf", holds(b"."))), "has .*; `file` takes .*: a.gguf"),
        ("pickles", both(inside(WEIGHTS, remove), inside("a.bin", holds(b"."))), "pickles, which can run"),
        ("a tensor missing", inside(WEIGHTS, header(lambda e: e.update(x=e.pop(NORM)))), f"{NORM}: missing"),
        ("integers", inside(WEIGHTS, tensor(dtype="I32")), f"{NORM}: dtype I32 is not supported; F32"),
        ("a matrix", inside(WEIGHTS, tensor(shape=[4, 8])), rf"{NORM}: shape \(4, 8\), but the config asks"),
        ("odd places", inside(WEIGHTS, shifted), "begins at byte .*, which is no multiple of its 4-byte"),
    ),
    *faults(
        WEIGHTS,
        *((f"header {name}", holds(joined(text, b"")), WHOLE) for name, (text, _) in JSON_TEXTS.items()),
        ("empty", holds(b""), f"{WHOLE}.*header too small"),
        ("a header of 2^63", holds((1 << 63).to_bytes(8, "little") + b"{}"), f"{WHOLE}.*header too large"),
        ("a header of 1 GiB", sized(1 << 31, (1 << 30).to_bytes(8, "little")), f"{WHOLE}.*too large"),
        ("a negative offset", only(a=entry(-4, 0)), WHOLE),
        ("a negative shape", only(a=entry(shape=[-1])), WHOLE),
        ("2^64 values", only(a=entry(shape=[1 << 62, 4])), WHOLE),
        ("more values than bytes", only(a=entry(shape=[2])), WHOLE),
        ("two in one place", only(12, a=entry(0, 8, [2]), b=entry(4, 12, [2])), WHOLE),
        ("a hole", only(12, a=entry(0, 4), b=entry(8, 12)), WHOLE),
        ("a tail", rewritten(lambda contents: contents + b"\0"), WHOLE),
        ("cut by a byte", cut(-1), WHOLE),
        ("a name twice", holds(joined(TWICE, b"1234")), "'a' appears twice"),
        ("nine dimensions", extra("a", shape=[1] * 9), "'a' has 9 dimensions; expected at most 8"),
        ("a name with NUL", extra("a\0b"), "and a name without NUL"),
        ("a name that is no text", extra("\ud800"), WHOLE),
    ),
    *faults(
        VOCABULARY,
        *((name, holds(text), "is not a tokenizer.json: ") for name, (text, _) in JSON_TEXTS.items()),
        ("1 GiB", sized(1 << 30), "has 1073741824 bytes; expected at most"),
        ("another kind", edited(lambda t: t["model"].update(type="Own")), "is not a tokenizer.json: "),
        ("an id beyond", edited(lambda t: t["model"]["vocab"].update(x=1 << 31)), "up to 2147483648;"),
        ("an id of 2^40", edited(lambda t: t["model"]["vocab"].update(x=1 << 40)), "is not a tokenizer.json"),
        ("a token of merges only", edited(lambda t: t["model"].update(merges=[["x", "yy"]])), "is not a"),
        ("another decoder", having(decoder={"type": "BPEDecoder", "suffix": "_"}), "BPEDecoder is neither"),
        ("no decoder", having(decoder=None), "decoder NoneType is neither ByteLevel"),
        ("a broken pattern", having(pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}}), "is not a"),
    ),
    *faults(
        "tokenizer.model",
        ("junk", both(beside(VOCABULARY, remove), holds(b"\x0a\xff\xff")), "is not a SentencePiece model"),
        ("1 GiB", both(beside(VOCABULARY, remove), sized(1 << 30)), "has 1073741824 bytes; expected at most"),
    ),
    *faults(
        "added_tokens.json",
        ("an id below 0", of_pieces(a=-1), "'a' is -1; expected a token with its id"),
        ("no token", of_pieces(**{"": 3}), "'' is 3; expected a token with its id"),
    ),
    *faults("special_tokens_map.json", ("a list", having(unk_token=["a"]), "unk_token is .*; expected a string")),
    *faults(
        SETTINGS,
        *((name, holds(text), words) for name, (text, words) in JSON_TEXTS.items()),
        ("a token as number", having(bos_token=1), "bos_token is 1; expected a string"),
        ("a token of no id", of_pieces(added_tokens_decoder={"x": {"content": "a"}}), "decoder is"),
        ("Gemma's pieces", of_pieces(tokenizer_class="GemmaTokenizer"), "expected a tokenizer.json"),
        ("code", both(beside(VOCABULARY, remove), having(auto_map={"AutoTokenizer": "a.A"})), "auto_map is"),
        ("a template of a number", having(chat_template=3), "chat_template is 3; expected a string"),
        ("a template that is none", template("{% if %}"), "the chat template is not valid: "),
        ("a template in 30 loops", template("{% for a in 'a' %}" * 30 + "{% endfor %}" * 30), "is not valid"),
        ("a template in brackets", template("{{" + "(" * 10**4 + "1" + ")" * 10**4 + "}}"), "is not valid: "),
        ("a template that breaks out", template("{{ ''.__class__.__mro__[1].__subclasses__() }}"), "failed:"),
        ("a template that reads globals", template("{{ cycler.__init__.__globals__ }}"), "failed: "),
        ("a template that changes messages", template("{{ messages.append(1) }}"), "failed: "),
        ("a template that opens files", template("{% include 'config.json' %}"), "failed: "),
        ("a template without end", template("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"), "failed: "),
        ("a template with an unknown filter", template("{{ messages | unknown }}"), "is not valid: "),
        ("a template of 10^9 rounds", template("{% for i in range(10 ** 9) %}{% endfor %}"), "failed: "),
        (
            "a template that writes on",
            template("{% for i in range(9**5) %}{{ 'abcdefghij' * 100 }}{% endfor %}"),
            "failed: it wrote more than 1000000 characters",
        ),
    ),
    *faults(
        TEMPLATE,
        ("not UTF-8", holds(b"\xff"), "is not UTF-8: "),
        ("1 GiB", sized(1 << 30), "has 1073741824 bytes; expected at most"),
        ("a missing message", holds(b"{{ messages[9].role }}"), "the chat template failed: "),
        ("a division by 0", holds(b"{{ 1 / 0 }}"), "the chat template failed: division by zero"),
    ),
]


def placing(name: Any) -> Change:
    """The index has this for the place of a tensor."""
    return edited(lambda index: index["weight_map"].update({NORM: name}))


def twice(folder: Path) -> None:
    """A tensor that the index does not name is in two shards."""
    for shard in SHARDS[:2]:
        extra("x")(folder / shard)


SHARDED = [
    *faults(
        INDEX,
        *((name, holds(text), words) for name, (text, words) in JSON_TEXTS.items()),
        ("no places", lacking("weight_map"), "weight_map is missing; expected an object"),
        ("places as a list", having(weight_map=[]), r"weight_map is \[\]; expected an object"),
        ("empty places", having(weight_map={}), "weight_map is {}; expected an object naming"),
        ("a place above", placing("../model.safetensors"), "'../model.safetensors'; expected the plain name"),
        ("a place of the system", placing("/etc/passwd"), "'/etc/passwd'; expected the plain name"),
        ("a number", placing(3), "is 3; expected the plain name"),
        ("a place twice", replaced(b'"weight_map": {', b'"weight_map": {"a": "", "a": "",'), "'a' appears"),
        ("another shard", placing(SHARDS[0]), f"{SHARDS[0]} has no tensor '{NORM}'"),
        ("no tensor", edited(lambda i: i["weight_map"].update(x=SHARDS[0])), "has no tensor 'x'"),
    ),
    *faults(
        SHARDS[1],
        ("missing", remove, "is missing; model.safetensors.index.json names it"),
        ("cut", cut(-1), WHOLE),
        ("empty", holds(b""), WHOLE),
    ),
    *faults(".", ("a tensor in two shards", twice, "stands in the checkpoint twice")),
]
FILE = "model.gguf"
ENDS = "the file ends after"
GGUF = faults(
    FILE,
    ("empty", holds(b""), "its beginning: it has 4 bytes; the file ends after 0"),
    ("a zip file", gguf(magic=b"PK\3\4"), r"its beginning: it is b'PK\\x03\\x04'; expected b'GGUF'"),
    ("version 0", gguf(version=0), "it has version 0; supported are 2 and 3"),
    ("version 99", gguf(version=99), "it has version 99; supported are 2 and 3"),
    ("other byte order", gguf(version=3 << 24), "has version 50331648; supported are 2 and 3, little-endian"),
    ("2^60 tensors", gguf(n_tensors=1 << 60), "the number of tensors: 1152921504606846976 tensors; expected"),
    ("more fields than there are", lone_field(U8, b"\1" + b"\xff" * 8), "general.architecture is missing; expected"),
    ("a name of 2^60", gguf(struct.pack("<Q", 1 << 60), 1), f"of metadata field 0: it has 115.*; {ENDS}"),
    ("a name that is no text", lone_field(U8, b"\1", b"\xff"), "the name of metadata field 0: it is not UTF-8"),
    ("a field twice", gguf(field(b"a", U8, b"\1") * 2, 2), "metadata field 'a': it appears twice"),
    ("a type of 99", lone_field(99, b""), "metadata field 'a': its type is 99; expected 0 to 12"),
    ("a text of 2^60", lone_field(STRING, struct.pack("<Q", 1 << 60)), f"metadata field 'a': it has 115.*; {ENDS}"),
    ("2^60 texts", lone_field(ARRAY, struct.pack("<IQ", STRING, 1 << 60)), "an array of 115.* strings; expected"),
    ("10^6 texts", lone_field(ARRAY, struct.pack("<IQ", STRING, 10**6)), f"metadata field 'a': .*; {ENDS}"),
    ("arrays of arrays", lone_field(ARRAY, struct.pack("<IQ", ARRAY, 1) * 5000), "an array of type 9; expected"),
    ("an array of nothing", lone_field(ARRAY, struct.pack("<IQ", 77, 1)), "an array of type 77; expected numbers"),
    ("an alignment of 0", lone_field(U32, b"\0" * 4, b"general.alignment"), "alignment': it is 0; expected a power"),
    ("an alignment as text", lone_field(STRING, string(b"32"), b"general.alignment"), "it is '32'; expected a"),
    ("a tensor's name of 2^60", gguf(tensors=struct.pack("<Q", 1 << 60), n_tensors=1), "the name of tensor"),
    ("2^31 dimensions", gguf(tensors=string(b"t") + struct.pack("<I", 1 << 31), n_tensors=1), "2147483648"),
    ("no dimension", placed(info(shape=())), r"tensor 't': its shape is \[\]; expected rows"),
    ("a dimension of 0", placed(info(shape=(4, 0))), r"tensor 't': its shape is \[4, 0\]; expected rows"),
    ("a format of 77", placed(info(kind=77)), "tensor 't' is in format 77; supported are F32, F16"),
    ("half a block", placed(info(shape=(16,), kind=8)), r"its shape is \[16\]; expected rows of .* 32 for"),
    ("an offset of 2^63", placed(info(offset=1 << 63)), "tensor 't': it is at bytes 92233720368547.*; the"),
    ("cut by a byte", cut(-1), "it is at bytes .*; the file has"),
    ("cut in its metadata", cut(400), f"metadata field .*; {ENDS}|metadata field .* it is not UTF-8"),
    ("another model", replaced(string(b"llama"), string(b"falco")), "architecture is 'falco'; expected one"),
    ("a field missing", replaced(b"llama.embedding_length", b"llama.embedding_lengtx"), "length is missing;"),
    ("more KV heads than heads", number(b"llama.attention.head_count_kv", 9), "head_count_kv is 9; expected"),
    ("2^30 layers", number(b"llama.block_count", 1 << 30), "llama.block_count is 1073741824; expected"),
    ("a layer more", number(b"llama.block_count", 4), r"layers\.3\.\S+: missing from the checkpoint"),
    ("an epsilon of NaN", number(b"llama.attention.layer_norm_rms_epsilon", 0x7FC00000), "epsilon is nan;"),
    ("no embedding", replaced(b"token_embd.weight", b"token_embx.weight"), "'token_embx.weight' has no"),
    ("a layer of another name", replaced(b"blk.0.attn_q.weight", b"blk.x.attn_q.weight"), "has no place"),
    ("a short vector", after(b"output_norm.weight", 0, struct.pack("<IQ", 1, 16)), r"shape \(16\), but"),
    ("an odd offset", after(b"output_norm.weight", 16, struct.pack("<Q", 1)), "which is no multiple of"),
    ("the end token beyond", number(b"tokenizer.ggml.eos_token_id", 96), "eos_token_id is 96; expected"),
    ("another tokenizer", replaced(string(b"gpt2"), string(b"bert")), "tokenizer.ggml.model is 'bert';"),
    ("no tokens", replaced(b"tokenizer.ggml.tokens", b"tokenizer.ggml.tokenz"), "tokens is missing"),
    ("a token twice", replaced(string(b"%"), string(b"&")), "tokens is .*; expected different tokens"),
    (
        "a token of 160,001 characters",  # the tensors stay at multiples of 32 bytes
        replaced(string(b"%"), string(b"%" * 160_001)),
        "tokens is .*; expected .* at most 1000 characters",
    ),
    ("a merge of nothing", replaced(string(b"h i"), string(b"hii")), "its tokenizer is not consistent"),
)
SESSION = [
    *faults(
        "kept",
        ("a header of 2^63", rewritten(lambda b: b"\0" * 7 + b"\x80" + b[8:]), "is no session of lazyllm"),
        *(
            (f"header {name}", resealed(holds(joined(text, b"\0" * 40))), "is no session of lazyllm")
            for name, (text, _) in JSON_TEXTS.items()
        ),
        ("weights", header(lambda e: e.pop("__metadata__")), "is no session of lazyllm"),
        ("another format", metadata(format="x"), "its format is x, not lazyllm session"),
        ("a description that is none", metadata(session="3"), "is damaged: its description holds a int"),
        ("a value too few", described(lambda d: d.pop("compute")), "a session with compute None; here it"),
        ("no schedule", described(lambda d: d.pop("schedule")), "is damaged: 'schedule'"),
        ("another model", describing(**{"model sha256": "0" * 64}), "a session with model sha256 000"),
        ("a setting that is none", describing(pruning="{"), "is of {; give it as pruning="),
        ("a setting beyond the model", describing(pruning='{"stages": [[99, 0.5]]}'), "is a session with|99"),
        ("a drawn token as text", describing(drawn="x"), "is damaged: 'str' object cannot be"),
        ("a drawn token beyond", describing(drawn=300), "is damaged: drawn is 300; it must be 0 to 299"),
        ("prompts as a number", describing(prompts=5), "is damaged: .* not iterable"),
        ("prompts of numbers", describing(prompts=[1]), "is damaged: .* must be a mapping, not int"),
        ("a prompt of other values", describing(prompts=[{"x": 1}]), "is damaged: .* unexpected .* 'x'"),
        ("a prompt at a text", prompting(begins="a"), "is damaged: can only concatenate str"),
        ("a prompt of no token", prompting(n_run=0), "is damaged: a prompt has 0 tokens in the context of"),
        ("messages of a number", prompting(messages=3), "is damaged: .* not iterable"),
        ("a message of text", prompting(messages=["x"]), "is damaged: message 0 must be a dict with role"),
        ("no ids", renamed("ids", "idz"), "is damaged: tensor 'ids' is missing"),
        ("an unknown part", renamed("keys.0", "kex.0"), "is damaged: there is no part kex"),
        ("a part of no layer", renamed("keys.0", "keys.x"), "is damaged: invalid literal"),
        ("a part of layer -1", renamed("keys.0", "keys.-1"), "is damaged: the session has no part 0 of"),
        ("a part of layer 6", renamed("keys.0", "keys.6"), "is damaged: the session has no part 0 of layer"),
        ("another type", resealed(tensor("keys.0", dtype="I32")), "is damaged: its tensors are not those"),
        ("an id beyond", resealed(values("ids", struct.pack("<i", 300))), "is damaged: token id 300 at"),
        ("a kind of 7", resealed(values("kinds", b"\7")), "is damaged: kind 7 at position 0; it must be 0,"),
        ("a depth of 99", resealed(values("depths", struct.pack("<i", 99))), "is damaged: depth 99 at"),
        ("a token that waits nowhere", resealed(values("depths", struct.pack("<i", 1))), "is damaged: the"),
        ("other depths", resealed(values("depths", struct.pack("<2i", 4, 4))), "is damaged: part 0 of layer"),
        ("gone twice", flagged([("gone", 0, 1, 2)]), "is damaged: gone is 2 at position 0; it must be 0 or 1"),
        ("waiting for layer 3", flagged([("depths", 9, 1, 3)]), "position 9 waits for layer 3, where the pruning"),
        ("no prompts", describing(prompts=[]), "is damaged: its prompts are not where its prompt tokens"),
        ("a prompt elsewhere", prompting(begins=1), "is damaged: its prompts are not where its prompt"),
        ("a prompt twice", described(lambda d: d.update(prompts=2 * d["prompts"])), "its prompts are not"),
        ("a prompt of fewer than ran", prompting(n_given=24), "a prompt has 25 tokens in the context of 24"),
    )
]
PRESET = faults(
    "preset.json",
    *((name, holds(text), words) for name, (text, words) in JSON_TEXTS.items()),
    ("a field twice", replaced(b"{", b'{"model": "", '), "'model' appears twice"),
    ("NaN", replaced(b'"speedup": 2.0', b'"speedup": NaN'), "speedup must be finite, not nan"),
    ("another format", having(format=2), "is no preset of format 1"),
    ("a field missing", lacking("sha256"), "preset: missing a required argument: 'sha256'"),
    ("an unknown field", having(code="x"), "preset: got an unexpected keyword argument 'code'; it takes pruning"),
    ("a speedup of text", having(speedup="fast"), "speedup must be a number, not 'fast'"),
    ("stages beyond 1", having(pruning={"stages": [[1, 1.5]]}), "must be above 0 and at most 1, not 1.5"),
    ("an unknown option", having(pruning={"stages": [], "x": 1}), "preset.json: "),
    ("evidence of a list", having(evidence=[]), r"evidence must be an object, not \[\]"),
    ("evidence without candidates", having(evidence={}), "it is not as calibrate or search writes it"),
)
