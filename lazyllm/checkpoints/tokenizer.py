"""The tokenizer of a checkpoint: text to ids and back, chats to prompts."""

from __future__ import annotations

import codecs
import operator
import string
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from lazyllm.checkpoints.chat import ChatTemplate, find_template
from lazyllm.checkpoints.config import ModelConfig
from lazyllm.checkpoints.fields import Fields, check_size, optional_fields
from lazyllm.checkpoints.gguf_tokenizer import GgufVocabulary
from lazyllm.checkpoints.vocabulary import JsonVocabulary, SentencePieceVocabulary, Vocabulary, XgenVocabulary, refusing
from lazyllm.errors import CheckpointError

Chat = Sequence[Mapping[str, Any]]
TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
MAX_TOKENS = 1 << 24
VOCABULARY_LIMIT = 256 << 20  # bytes; the largest known have 35 MiB
WORD_BYTES = f"{string.ascii_letters}{string.digits}-_".encode()


class Tokenizer:
    """Converts text to token ids and back, with the checkpoint's special tokens."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        source: Path,
        tokens: Mapping[str, str],
        template: ChatTemplate | None,
        config: ModelConfig,
    ):
        self.vocabulary = vocabulary
        self.rows = config.vocab
        self.source = source
        self.template = template
        if vocabulary.size > self.rows:
            raise CheckpointError(f"{source}: ids up to {vocabulary.size - 1}; expected below {self.rows}")
        ids = {name: vocabulary.token_id(content) for name, content in tokens.items()}
        self.bos_token_id = ids.get("bos_token")
        self.eos_token_id = ids.get("eos_token")
        ends = [token for token in (self.eos_token_id, *config.eos_token_ids) if token is not None]
        self.eos_token_ids = tuple(dict.fromkeys(ends))
        self.special = vocabulary.special | {token for token in ids.values() if token is not None}

    @classmethod
    def from_folder(cls, folder: Path, config: ModelConfig) -> Tokenizer:
        """The tokenizer of the files in `folder`, for a model of `config`."""
        settings = optional_fields(folder / "tokenizer_config.json")
        tokens = read_token_names(settings, optional_fields(folder / "special_tokens_map.json"))
        vocabulary, source = open_vocabulary(folder, settings, tokens)
        return cls(vocabulary, source, tokens, find_template(settings, tokens, folder), config)

    @classmethod
    def from_gguf(cls, gguf: GgufVocabulary, config: ModelConfig) -> Tokenizer:
        """The tokenizer of the vocabulary that a GGUF file describes."""
        settings = Fields(gguf.path, gguf.settings)
        vocabulary = JsonVocabulary(gguf.path, gguf.backend, settings, gguf.special)
        return cls(vocabulary, gguf.path, gguf.special, find_template(settings, gguf.special), config)

    @property
    def place(self) -> Path:
        """The checkpoint's folder, or its GGUF file."""
        return self.source if self.source.suffix == ".gguf" else self.source.parent

    @cached_property
    def word_parts(self) -> bytes:
        """By token id, 1 if its text begins with a letter or digit of ASCII, "-" or "_", and 2 if it ends with one."""
        texts = map(self.vocabulary.token_bytes, range(self.vocabulary.size))
        parts = bytes((text[:1] in WORD_BYTES) + 2 * (text[-1:] in WORD_BYTES) if text else 0 for text in texts)
        return parts.ljust(self.rows, b"\0")

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of `text`; `add_special` adds BOS or EOS where the checkpoint asks for them."""
        if not isinstance(text, str):
            raise TypeError(f"text must be a str, not {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the text has a lone surrogate at index {error.start}, no Unicode") from None
        return self.vocabulary.encode(text, add_special)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        stream = TextStream(self, skip_special_tokens)
        return "".join([*map(stream.push, ids), stream.finish()])

    def offsets(self, ids: Sequence[int]) -> list[str]:
        """The text of each token, special ones included; joined, they equal `decode` without skipping.

        A character made of several tokens belongs to the last of them.
        """
        stream = TextStream(self, skip_special_tokens=False)
        pieces = [stream.push(token) for token in ids]
        if pieces:
            pieces[-1] += stream.finish()
        return pieces

    def chat_text(self, messages: Chat, add_generation_prompt: bool = True, tools: Chat = (), **variables: Any) -> str:
        """The prompt of a chat such as [{"role": "user", "content": "Hi"}]. `tools` are JSON schemas of
        functions, which the template describes if it knows tools; `variables` are further ones that it may
        read, such as enable_thinking=False.

        The text has its special tokens already: encode it with add_special=False.
        """
        if self.template is None:
            raise ValueError(f"{self.place} has no chat template; give the prompt as plain text or token ids")
        return self.template.render(messages, add_generation_prompt, tools, **variables)

    def apply_chat_template(
        self, messages: Chat, add_generation_prompt: bool = True, tools: Chat = (), **variables: Any
    ) -> list[int]:
        """The token ids of `chat_text`."""
        return self.encode(self.chat_text(messages, add_generation_prompt, tools, **variables), add_special=False)


class TextStream:
    """A decoder for ids that come one by one; the bytes of an unfinished character wait for the rest."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self.tokenizer = tokenizer
        self.skipped = tokenizer.special if skip_special_tokens else frozenset()
        self.characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.strip = tokenizer.vocabulary.strips_space

    def push(self, token: int) -> str:
        token = operator.index(token)
        if not 0 <= token < self.tokenizer.rows:
            raise ValueError(f"token id is {token}; expected 0 to {self.tokenizer.rows - 1}")
        if token in self.skipped:
            return ""
        text = self.characters.decode(self.tokenizer.vocabulary.token_bytes(token))
        if self.strip and text:
            self.strip, text = False, text.removeprefix(" ")
        return text

    def finish(self) -> str:
        return self.characters.decode(b"", final=True)


def open_vocabulary(folder: Path, settings: Fields, tokens: Mapping[str, str]) -> tuple[Vocabulary, Path]:
    """The vocabulary that the folder's files describe, and the file that describes it."""
    if (path := folder / "tokenizer.json").is_file():
        check_size(path, VOCABULARY_LIMIT)
        with refusing(f"{path} is not a tokenizer.json"):
            backend = Backend.from_file(str(path))
        return JsonVocabulary(path, backend, settings, tokens), path
    if (path := folder / "tokenizer.model").is_file():
        check_size(path, VOCABULARY_LIMIT)
        if str(settings.get("tokenizer_class")).startswith("Gemma"):
            settings.refuse("tokenizer_class", "a tokenizer.json beside it, which Gemma needs")
        added, special = read_added_tokens(folder, settings)
        return SentencePieceVocabulary(path, added, [*special, *tokens.values()], settings), path
    if settings.get("tokenizer_class") == "XgenTokenizer":
        return XgenVocabulary(Path(settings.source)), Path(settings.source)
    if settings.get("auto_map") is not None:
        settings.refuse("auto_map", "a tokenizer.json beside it: a tokenizer's code is never run")
    raise CheckpointError(f"{folder} has neither tokenizer.json nor tokenizer.model")


def read_token_names(*sources: Fields) -> dict[str, str]:
    """The special tokens by name (bos_token, …), each a string or an object with `content`; the first source
    that has one counts."""
    tokens: dict[str, str] = {}
    for fields in sources:
        for name in TOKEN_NAMES:
            value = fields.get(name)
            content = value.get("content") if isinstance(value, dict) else value
            if content and not isinstance(content, str):
                fields.refuse(name, "a string, or an object with its content")
            if content:
                tokens.setdefault(name, content)
    return tokens


def read_added_tokens(folder: Path, settings: Fields) -> tuple[dict[str, int], list[str]]:
    """Tokens that JSON files add to a SentencePiece model, and the special ones among them."""
    extra, special = optional_fields(folder / "added_tokens.json"), []
    for token, index in extra.values.items():
        if not isinstance(index, int) or not 0 <= index < MAX_TOKENS or not token:
            raise CheckpointError(f"{extra.source}: {token!r} is {index!r}; expected a token with its id")
    added: dict[str, int] = dict(extra.values)
    for key, entry in settings.section("added_tokens_decoder").values.items():
        content = entry.get("content") if isinstance(entry, dict) else None
        if not key.isdecimal() or int(key) >= MAX_TOKENS or not isinstance(content, str) or not content:
            settings.refuse("added_tokens_decoder", "an object from ids to tokens with their content")
        added[content] = int(key)
        if entry.get("special"):
            special.append(content)
    return added, special
