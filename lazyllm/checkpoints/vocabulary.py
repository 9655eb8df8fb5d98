"""Vocabularies: text to token ids and back to bytes, with the library that a checkpoint's files need.

Each has `size`, one more than its largest id, its `special` ids, and `strips_space`, true if decoded text
loses one space at its start.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from lazyllm.checkpoints.fields import Fields
from lazyllm.errors import CheckpointError
from lazyllm.support.optional import package

BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
WORD_MARK = "▁"
PRINTING = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
OTHERS = [byte for byte in range(256) if byte not in PRINTING]
LETTERS = {chr(byte): byte for byte in PRINTING} | {chr(256 + n): byte for n, byte in enumerate(OTHERS)}
"""By character of byte-level BPE: its byte. A printable byte's is itself; the others' are those from 256 on."""


@contextmanager
def refusing(message: str) -> Iterator[None]:
    """Raises CheckpointError in place of errors of the tokenizers package: plain Exceptions and Rust panics."""
    try:
        yield
    except (CheckpointError, KeyboardInterrupt, MemoryError):
        raise
    except BaseException as error:
        raise CheckpointError(f"{message}: {error}") from error


class JsonVocabulary:
    """The vocabulary of a tokenizer.json or of a GGUF file; `settings` are those of tokenizer_config.json,
    `tokens` the special tokens by name."""

    def __init__(self, path: Path, tokenizer: Tokenizer, settings: Fields, tokens: Mapping[str, str]):
        self.tokenizer = tokenizer
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.size = 1 + max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        added = self.tokenizer.get_added_tokens_decoder()
        self.special = frozenset(token for token, entry in added.items() if entry.special)
        adds_bos = settings.flag("add_bos_token", False) and "bos_token" in tokens
        self.bos_id = self.token_id(tokens["bos_token"]) if adds_bos else None
        self.bytewise, self.strips_space = decoding(path, self.tokenizer.decoder)

    def encode(self, text: str, add_special: bool) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special).ids
        if add_special and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def token_bytes(self, token: int) -> bytes:
        content = self.tokenizer.id_to_token(token)
        if content is None:
            return b""
        if not self.bytewise:
            return piece_bytes(content)
        is_spelled = set(content) <= LETTERS.keys()
        return bytes(LETTERS[letter] for letter in content) if is_spelled else content.encode()

    def token_id(self, content: str) -> int | None:
        return self.tokenizer.token_to_id(content)


def decoding(path: Path, decoder: Any) -> tuple[bool, bool]:
    """Whether tokens spell bytes (else they are SentencePiece's), and whether a leading space is stripped: the
    decoder shows both with a few tokens."""
    with refusing(f"{path} is not a tokenizer.json"):
        if decoder and decoder.decode(["Ġa", "_", "Ċ", "##b</w>"]) == " a_\n##b</w>":
            return True, False
        text, whole = decoder and decoder.decode(["▁a", "▁▁b_", "##c</w>▁"]), " a  b_##c</w> "
    if text not in (whole, whole[1:]):
        raise CheckpointError(f"{path}: decoder {type(decoder).__name__} is neither ByteLevel nor SentencePiece's")
    return False, text != whole


def piece_bytes(piece: str) -> bytes:
    if byte := BYTE_PIECE.fullmatch(piece):
        return bytes([int(byte[1], 16)])
    return piece.replace(WORD_MARK, " ").encode()


class SentencePieceVocabulary:
    """The vocabulary of a tokenizer.model, through the sentencepiece package, with the tokens of other files.

    As transformers' Llama tokenizer does, text is cut at special tokens and each part encoded by itself; in
    the `legacy` form each part is encoded as if a text began with it.
    """

    strips_space = True

    def __init__(self, path: Path, added: dict[str, int], special: list[str], settings: Fields):
        package("sentencepiece", path)
        from sentencepiece import SentencePieceProcessor

        try:
            self.pieces = pieces = SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"{path} is not a SentencePiece model: {error}") from error
        count = pieces.get_piece_size()
        marks = [token for token in range(count) if pieces.is_control(token) or pieces.is_unknown(token)]
        self.added = {pieces.id_to_piece(token): token for token in marks} | added
        self.contents = {token: content for content, token in self.added.items()}
        self.special = frozenset(marks) | {self.added[content] for content in special if content in self.added}
        self.size = max(count, 1 + max(self.added.values(), default=0))
        longest_first = sorted(self.added, key=len, reverse=True)
        self.cuts = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
        bos, eos = pieces.bos_id(), pieces.eos_id()  # below 0: none
        self.before = [bos] if settings.flag("add_bos_token", True) and bos >= 0 else []
        self.after = [eos] if settings.flag("add_eos_token", False) and eos >= 0 else []
        self.legacy = settings.flag("legacy", True)

    def encode(self, text: str, add_special: bool) -> list[int]:
        first, *others = self.cuts.split(text)  # then in turn a token and the part behind it
        ids: list[int] = self.pieces.encode(first)
        for token, part in zip(others[::2], others[1::2], strict=True):
            guard = "" if self.legacy or not part else self.pieces.id_to_piece(self.pieces.unk_id())
            ids += [self.added[token], *self.pieces.encode(guard + part)[len(self.pieces.encode(guard)) :]]
        return [*self.before, *ids, *self.after] if add_special else ids

    def token_bytes(self, token: int) -> bytes:
        if token in self.contents:
            return self.contents[token].encode()
        return piece_bytes(self.pieces.id_to_piece(token)) if token < self.pieces.get_piece_size() else b""

    def token_id(self, content: str) -> int | None:
        token: int = self.added.get(content, self.pieces.piece_to_id(content))
        return token if content in self.added or token != self.pieces.unk_id() else None


class XgenVocabulary:
    """XGen-7B's vocabulary: GPT-2's through the tiktoken package, then runs of blanks, then special marks.

    The checkpoint carries it only as Python code, which is never run; these are the same tokens in order.
    """

    strips_space = False
    marks = """
        fim_prefix fim_middle fim_suffix fim_pad filename gh_stars issue_start issue_comment issue_closed
        jupyter_start jupyter_text jupyter_code jupyter_output empty_output
        commit_before commit_msg commit_after reponame dummy_0 dummy_1 dummy_2 dummy_3 sep eom
    """
    masks = 881

    def __init__(self, path: Path):
        package("tiktoken", f"{path}, which asks for XGen's tokenizer,")
        import tiktoken

        try:
            base = tiktoken.get_encoding("gpt2")
        except (OSError, ValueError) as error:  # requests' errors are OSError
            raise OSError(
                f"{path} asks for XGen's tokenizer, made of GPT-2's vocabulary; tiktoken fetches that once "
                f"from the network or finds it in TIKTOKEN_CACHE_DIR, and could not: {error}"
            ) from error
        blanks = [b" " * n for n in range(31, 1, -1)] + [b"\t" * n for n in range(9, 1, -1)]
        ranks = base._mergeable_ranks | {blank: base.n_vocab + rank for rank, blank in enumerate(blanks)}
        names = [*self.marks.split(), *(f"mask_{number}" for number in range(self.masks, 0, -1))]
        first = base.n_vocab + len(blanks)
        marks = {f"<{name}>": first + rank for rank, name in enumerate(names)}
        self.encoding = tiktoken.Encoding(
            "xgen", pat_str=base._pat_str, mergeable_ranks=ranks, special_tokens=base._special_tokens | marks
        )
        self.size = first + len(names)
        self.special = frozenset([base.eot_token])

    def encode(self, text: str, add_special: bool) -> list[int]:
        return self.encoding.encode(text, allowed_special="all")

    def token_bytes(self, token: int) -> bytes:
        try:
            return self.encoding.decode_single_token_bytes(token)
        except KeyError:  # XGen gave new ids to the blanks that GPT-2 has
            return b""

    def token_id(self, content: str) -> int | None:
        try:
            return self.encoding.encode_single_token(content)
        except KeyError:
            return None


Vocabulary = JsonVocabulary | SentencePieceVocabulary | XgenVocabulary
