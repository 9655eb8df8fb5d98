"""The tokenizer that a GGUF file describes in its metadata, built with the tokenizers package."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split
from tokenizers.processors import TemplateProcessing

from lazyllm.checkpoints.vocabulary import WORD_MARK, refusing
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


def byte_level(use_regex: bool) -> ByteLevel:
    return ByteLevel(add_prefix_space=False, use_regex=use_regex)


def newer_split(digits: str) -> list[PreTokenizer]:
    return [Split(Regex(NEWER_SPLIT.replace("DIGITS", digits)), "isolated"), byte_level(False)]


SPLITS: dict[str, list[PreTokenizer]] = {
    "gpt-2": [byte_level(True)],
    "smollm": [Digits(individual_digits=True), byte_level(True)],
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
            self.tokens = [
                token if token.strip(" ") else token.replace(" ", WORD_MARK) for token in self.tokens
            ]
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

    def backend(self) -> Tokenizer:
        with refusing(f"{self.path}: its tokenizer is not consistent"):
            backend = self.byte_level() if self.kind == "gpt2" else self.sentencepiece()
            backend.add_tokens(self.added_tokens())
            if self.add_bos and (bos := self.special["bos"]):
                backend.post_processor = TemplateProcessing(
                    single=[bos, "$A"], pair=[bos, "$A", "$B"], special_tokens=[(bos, self.tokens.index(bos))]
                )
        return backend

    def settings(self) -> dict[str, Any]:
        """The contents of tokenizer_config.json."""
        settings: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "add_bos_token": self.add_bos,
            **{f"{name}_token": token for name, token in self.special.items() if token is not None},
        }
        template = self.metadata.get("tokenizer.chat_template")
        return settings | ({"chat_template": template} if isinstance(template, str) else {})

    def added_tokens(self) -> list[AddedToken]:
        whole = (CONTROL, USER_DEFINED, UNKNOWN) if self.kind == "llama" else (CONTROL, USER_DEFINED)
        return [
            AddedToken(token, normalized=False, special=kind != USER_DEFINED)
            for token, kind in zip(self.tokens, self.types, strict=True)
            if kind in whole and not (self.gemma and token and not token.strip(WORD_MARK))
        ]

    def byte_level(self) -> Tokenizer:
        merges = [tuple(merge.split(" ")) for merge in self.array("merges", str)]
        backend = Tokenizer(BPE(self.ids(), merges, ignore_merges=self.pre == "llama-bpe"))
        if self.pre == "qwen2":
            backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = Sequence(SPLITS[self.pre])
        backend.decoder = decoders.ByteLevel()
        return backend

    def sentencepiece(self) -> Tokenizer:
        unknown = {} if self.special["unk"] is None else {"unk_token": self.special["unk"]}
        merges = self.sentencepiece_merges()
        backend = Tokenizer(BPE(self.ids(), merges, byte_fallback=True, fuse_unk=True, **unknown))
        prefix = self.metadata.get("tokenizer.ggml.add_space_prefix", True)
        backend.normalizer = normalizers.Sequence(
            [*([normalizers.Prepend(WORD_MARK)] if prefix else []), normalizers.Replace(" ", WORD_MARK)]
        )
        pieces = [decoders.Replace(WORD_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence([*pieces, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
        return backend

    def ids(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self.tokens)}

    def sentencepiece_merges(self) -> list[tuple[str, str]]:
        """Merges equivalent to SentencePiece's scores: every pair that makes a piece, best first.

        Gemma's pieces are in the order of their merges; the scores in a file are not, because llama.cpp gives
        pieces that are matched whole the lowest. As in transformers, the longer left part comes first.
        """
        scores = self.array("scores", float)
        if len(scores) != len(self.tokens):
            self.refuse("scores", f"{len(scores)} entries", f"one for each of the {len(self.tokens)} tokens")
        ids = {
            token: index for token, index in self.ids().items() if self.types[index] not in (CONTROL, BYTE)
        }
        pairs = [
            ((index, -cut) if self.gemma else (-scores[index], index), ids[token[:cut]], ids[token[cut:]])
            for token, index in ids.items()
            for cut in range(1, len(token))
            if token[:cut] in ids and token[cut:] in ids
        ]
        return [(self.tokens[left], self.tokens[right]) for _, left, right in sorted(pairs)]
