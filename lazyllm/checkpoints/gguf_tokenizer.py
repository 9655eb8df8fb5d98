"""The tokenizer that a GGUF file describes in its metadata, as Hugging Face tokenizer files."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

from lazyllm.errors import CheckpointError

UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6
SPECIAL_NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
LONGEST_TOKEN = 1000  # characters; finding a token's merges takes time with the square of them

# Regular expressions that split text into words before merging, by the name in tokenizer.ggml.pre.
# The newer two differ in the length of a run of digits; gpt-2's expression is built into ByteLevel.
NEWER_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def newer_split(digits: str) -> list[dict[str, Any]]:
    pattern = {"Regex": NEWER_SPLIT.replace("DIGITS", digits)}
    return [{"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}, byte_level(False)]


SPLITS = {
    "gpt-2": [byte_level(True)],
    "smollm": [{"type": "Digits", "individual_digits": True}, byte_level(True)],
    "llama-bpe": newer_split("{1,3}"),
    "qwen2": newer_split(""),
}
SAME_SPLIT = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}


class GgufVocabulary:
    """The tokens, merges and special ids of one GGUF file."""

    def __init__(self, path: Path, metadata: dict[str, Any], embedding_rows: int):
        self.path = path
        self.metadata = metadata
        self.kind = metadata.get("tokenizer.ggml.model")
        if self.kind not in ("gpt2", "llama"):
            self.refuse("model", self.kind, "'gpt2' (byte-level BPE) or 'llama' (SentencePiece BPE)")
        self.gemma = metadata.get("general.architecture") == "gemma3"
        self.tokens = self.array("tokens", str)
        if self.gemma:  # its files spell runs of blanks as blanks, the text to be merged has marks
            self.tokens = [token if token.strip(" ") else token.replace(" ", "▁") for token in self.tokens]
        if len(set(self.tokens)) != len(self.tokens):
            self.refuse("tokens", "a list with a token twice", "each token once")
        if (longest := max(map(len, self.tokens), default=0)) > LONGEST_TOKEN:
            self.refuse(
                "tokens", f"a list with a token of {longest} characters", f"at most {LONGEST_TOKEN} in each"
            )
        if len(self.tokens) > embedding_rows:
            self.refuse(
                "tokens",
                f"{len(self.tokens)} tokens",
                f"at most the {embedding_rows} rows of token_embd.weight",
            )
        self.types = self.array("token_type", int)
        if len(self.types) != len(self.tokens):
            self.refuse(
                "token_type", f"{len(self.types)} entries", f"one for each of the {len(self.tokens)} tokens"
            )
        pre = str(metadata.get("tokenizer.ggml.pre"))
        self.pre = SAME_SPLIT.get(pre, pre)
        if self.kind == "gpt2" and self.pre not in SPLITS:
            self.refuse("pre", self.pre, ", ".join([*SPLITS, *SAME_SPLIT]))
        self.special = {name: self.special_token(key) for name, key in SPECIAL_NAMES.items()}
        self.special_token("eot")
        adds_bos = self.kind == "llama" or self.pre == "llama-bpe"
        self.add_bos = (
            bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos)) and self.special["bos"] is not None
        )

    def refuse(self, key: str, value: object, expected: str) -> None:
        raise CheckpointError(f"{self.path}: tokenizer.ggml.{key} is {value!s:.80}; expected {expected}")

    def array(self, key: str, kind: type) -> list[Any]:
        values = self.metadata.get(f"tokenizer.ggml.{key}")
        if not isinstance(values, list | array) or not all(type(value) is kind for value in values):
            self.refuse(key, "missing" if values is None else "of another form", f"a list of {kind.__name__}")
        return list(values or ())

    def special_token(self, key: str) -> str | None:
        index = self.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is None:
            return None
        if not isinstance(index, int) or not 0 <= index < len(self.tokens):
            self.refuse(f"{key}_token_id", index, f"an id below {len(self.tokens)}")
        return str(self.tokens[index])

    def files(self) -> dict[str, dict[str, Any]]:
        """Contents of tokenizer.json and tokenizer_config.json, by name."""
        tokenizer = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": self.added_tokens(),
            **(self.byte_level_parts() if self.kind == "gpt2" else self.sentencepiece_parts()),
            "post_processor": self.post_processor(),
        }
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ImportError(
                "converting a tokenizer needs the package tokenizers: pip install tokenizers"
            ) from None
        try:
            Tokenizer.from_str(json.dumps(tokenizer))
        except Exception as error:  # tokenizers raises plain Exception
            raise CheckpointError(f"{self.path}: its tokenizer is not consistent: {error}") from error
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "add_bos_token": self.add_bos,
            **{f"{name}_token": token for name, token in self.special.items() if token is not None},
        }
        template = self.metadata.get("tokenizer.chat_template")
        if isinstance(template, str):
            config["chat_template"] = template
        return {"tokenizer.json": tokenizer, "tokenizer_config.json": config}

    def added_tokens(self) -> list[dict[str, Any]]:
        whole = (CONTROL, USER_DEFINED, UNKNOWN) if self.kind == "llama" else (CONTROL, USER_DEFINED)
        return [
            {
                "id": index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind != USER_DEFINED,
            }
            for index, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in whole and not (self.gemma and token and not token.strip("▁"))
        ]

    def byte_level_parts(self) -> dict[str, Any]:
        merges = [merge.split(" ") for merge in self.array("merges", str)]
        return {
            "normalizer": {"type": "NFC"} if self.pre == "qwen2" else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": SPLITS[self.pre]},
            "decoder": byte_level(True),
            "model": self.bpe_model(merges, ignore_merges=self.pre == "llama-bpe"),
        }

    def sentencepiece_parts(self) -> dict[str, Any]:
        prefix = self.metadata.get("tokenizer.ggml.add_space_prefix", True)
        marks = [{"type": "Prepend", "prepend": "▁"}] if prefix else []
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
        model = self.bpe_model(
            self.sentencepiece_merges(), byte_fallback=True, fuse_unk=True, unk_token=self.special["unk"]
        )
        return {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [*marks, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}],
            },
            "pre_tokenizer": None,
            "decoder": {
                "type": "Sequence",
                "decoders": [
                    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                    {"type": "ByteFallback"},
                    {"type": "Fuse"},
                    *strip,
                ],
            },
            "model": model,
        }

    def sentencepiece_merges(self) -> list[list[str]]:
        """Merges equivalent to SentencePiece's scores: every pair that makes a piece, best first.

        Gemma's pieces are in the order of their merges; the scores in a file are not, because llama.cpp gives
        pieces that are matched whole the lowest. As in transformers, the longer left part comes first.
        """
        scores = self.array("scores", float)
        if len(scores) != len(self.tokens):
            self.refuse("scores", f"{len(scores)} entries", f"one for each of the {len(self.tokens)} tokens")
        ids = {
            token: index
            for index, token in enumerate(self.tokens)
            if self.types[index] not in (CONTROL, BYTE)
        }
        pairs = [
            ((index, -cut) if self.gemma else (-scores[index], index), ids[token[:cut]], ids[token[cut:]])
            for token, index in ids.items()
            for cut in range(1, len(token))
            if token[:cut] in ids and token[cut:] in ids
        ]
        return [[self.tokens[left], self.tokens[right]] for _, left, right in sorted(pairs)]

    def bpe_model(self, merges: list[list[str]], **options: Any) -> dict[str, Any]:
        defaults = {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
        }
        vocab = {token: index for index, token in enumerate(self.tokens)}
        return {**defaults, **options, "vocab": vocab, "merges": merges}

    def post_processor(self) -> dict[str, Any] | None:
        bos = self.special["bos"]
        if not self.add_bos or bos is None:
            return None
        first: dict[str, Any] = {"SpecialToken": {"id": bos, "type_id": 0}}
        return {
            "type": "TemplateProcessing",
            "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [first, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {bos: {"id": bos, "ids": [self.tokens.index(bos)], "tokens": [bos]}},
        }
