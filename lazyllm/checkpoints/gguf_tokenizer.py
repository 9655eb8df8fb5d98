"""The tokenizer that a GGUF file describes in its metadata, built with the tokenizers package."""

from array import array
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split
from tokenizers.processors import TemplateProcessing

from lazyllm.checkpoints.fields import Fields
from lazyllm.checkpoints.vocabulary import WORD_MARK, refusing

PREFIX = "tokenizer.ggml."
UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6
SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
LONGEST_TOKEN = 1000  # characters; the time to find a token's merges grows with their square

# Regular expressions that split text into words before merging, by the name in tokenizer.ggml.pre.
# The newer two differ in the length of a run of digits; gpt-2's expression is built into ByteLevel.
NEWER_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def newer_split(digits: str) -> list[PreTokenizer]:
    expression = Regex(NEWER_SPLIT.replace("DIGITS", digits))
    return [Split(expression, "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]


GPT2 = ByteLevel(add_prefix_space=False)
LLAMA3, QWEN2 = newer_split("{1,3}"), newer_split("")
SPLITS: dict[str, list[PreTokenizer]] = {
    "gpt-2": [GPT2],
    "smollm": [Digits(individual_digits=True), GPT2],
    **dict.fromkeys(["llama-bpe", "llama3", "llama-v3"], LLAMA3),
    **dict.fromkeys(["qwen2", "deepseek-r1-qwen"], QWEN2),
}


class GgufVocabulary:
    """The tokenizer of one GGUF file: `backend` and `settings` are what the files tokenizer.json and
    tokenizer_config.json of a folder would hold."""

    def __init__(self, path: Path, metadata: dict[str, Any]):
        self.path = path
        self.fields = Fields(path, metadata)
        self.kind = self.fields.get(f"{PREFIX}model")
        if self.kind not in ("gpt2", "llama"):
            self.fields.refuse(f"{PREFIX}model", "'gpt2' (byte-level BPE) or 'llama' (SentencePiece BPE)")
        self.gemma = metadata.get("general.architecture") in ("gemma2", "gemma3")
        self.tokens = self.array("tokens", str)
        if self.gemma:  # files spell runs of blanks with blanks; merges are of text with marks
            self.tokens = [token if token.strip(" ") else WORD_MARK * len(token) for token in self.tokens]
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens) or max(map(len, self.tokens), default=0) > LONGEST_TOKEN:
            self.fields.refuse(f"{PREFIX}tokens", f"different tokens of at most {LONGEST_TOKEN} characters")
        self.types = self.array("token_type", int, len(self.tokens))
        self.split = SPLITS.get(str(self.fields.get(f"{PREFIX}pre")), [])
        if self.kind == "gpt2" and not self.split:
            self.fields.refuse(f"{PREFIX}pre", f"one of {', '.join(SPLITS)}")
        self.special = {
            name: self.tokens[self.fields.whole(f"{PREFIX}{key}_token_id", len(self.tokens) - 1, low=0)]
            for name, key in SPECIAL_TOKENS.items()
            if self.fields.get(f"{PREFIX}{key}_token_id") is not None
        }
        flag = self.fields.get(f"{PREFIX}add_bos_token", self.kind == "llama" or self.split is LLAMA3)
        adds_bos = bool(flag) and "bos_token" in self.special
        template = self.fields.get("tokenizer.chat_template")
        self.settings: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "add_bos_token": adds_bos,
            **self.special,
            **({"chat_template": template} if isinstance(template, str) else {}),
        }
        with refusing(f"{path}: its tokenizer is not consistent"):
            self.backend = self.byte_level() if self.kind == "gpt2" else self.sentencepiece()
            self.backend.add_tokens(self.added_tokens())
            if adds_bos:
                bos = self.special["bos_token"]
                self.backend.post_processor = TemplateProcessing([bos, "$A"], special_tokens=[(bos, self.ids[bos])])

    def array(self, key: str, kind: type, count: int | None = None) -> list[Any]:
        values = self.fields.get(PREFIX + key)
        if not isinstance(values, list | array) or not all(type(value) is kind for value in values):
            self.fields.refuse(PREFIX + key, f"a list of {kind.__name__}")
        if count not in (None, len(values)):
            self.fields.refuse(PREFIX + key, f"one for each of the {count} tokens, not {len(values)}")
        return list(values)

    def added_tokens(self) -> list[AddedToken]:
        whole = (CONTROL, USER_DEFINED, *([UNKNOWN] if self.kind == "llama" else []))
        return [
            AddedToken(token, normalized=False, special=kind != USER_DEFINED)
            for token, kind in zip(self.tokens, self.types, strict=True)
            if kind in whole and not (self.gemma and token and not token.strip(WORD_MARK))
        ]

    def byte_level(self) -> Tokenizer:
        merges = [tuple(merge.split(" ")) for merge in self.array("merges", str)]
        backend = Tokenizer(BPE(self.ids, merges, ignore_merges=self.split is LLAMA3))
        if self.split is QWEN2:
            backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = Sequence(self.split)
        backend.decoder = decoders.ByteLevel()
        return backend

    def sentencepiece(self) -> Tokenizer:
        merges, unknown = self.sentencepiece_merges(), self.special.get("unk_token")
        backend = Tokenizer(BPE(self.ids, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown))
        steps: list[Any] = [normalizers.Replace(" ", WORD_MARK)]
        decoding: list[Any] = [decoders.Replace(WORD_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
        if self.fields.get(f"{PREFIX}add_space_prefix", True):
            steps.insert(0, normalizers.Prepend(WORD_MARK))
            decoding.append(decoders.Strip(" ", 1, 0))
        backend.normalizer, backend.decoder = normalizers.Sequence(steps), decoders.Sequence(decoding)
        return backend

    def sentencepiece_merges(self) -> list[tuple[str, str]]:
        """Merges equivalent to SentencePiece's scores: every pair that makes a piece, best first.

        Gemma's pieces are in the order of their merges, and scores are ignored: llama.cpp gives the lowest to
        pieces that are matched whole. As in transformers, the split with the longer left part comes first.
        """
        scores = self.array("scores", float, len(self.tokens))
        ids = {token: index for token, index in self.ids.items() if self.types[index] not in (CONTROL, BYTE)}
        pairs = [
            ((index, -cut) if self.gemma else (-scores[index], index), ids[token[:cut]], ids[token[cut:]])
            for token, index in ids.items()
            for cut in range(1, len(token))
            if token[:cut] in ids and token[cut:] in ids
        ]
        return [(self.tokens[left], self.tokens[right]) for _, left, right in sorted(pairs)]
