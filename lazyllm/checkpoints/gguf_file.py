"""The header of a GGUF file, which may be damaged: its metadata, and the place of each tensor.

Counts and lengths are compared with the bytes that the file has before anything is made of them.
"""

from __future__ import annotations

import math
import struct
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from lazyllm.errors import CheckpointError
from lazyllm.support.optional import package

MAGIC, VERSIONS, ALIGNMENT = b"GGUF", (2, 3), 32
MOST_FIELDS, MOST_TENSORS, MOST_STRINGS = 1 << 16, 1 << 16, 1 << 22
MOST_DIMENSIONS = 4
BOOL, STRING, ARRAY = 7, 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", BOOL: "?", 10: "Q", 11: "q", 12: "d"}
"""The number of each type of a value, and what struct and array call it."""
Blocks = tuple[str, int, int]
"""The name of a format of tensors, and the values and bytes of a block."""
BLOCKS: dict[int, Blocks] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    30: ("BF16", 1, 2),
    8: ("Q8_0", 32, 34),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
}
"""The formats that the core reads, by their number."""
FORMATS = frozenset(name for name, _, _ in BLOCKS.values())


@dataclass(frozen=True)
class GgufTensor:
    """The name of a format in `kind`; the `shape` is as the file has it, the dimension of a row first;
    `offset` is from the start of the file, whose `n_bytes` bytes from there are the tensor's."""

    path: Path
    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int

    def rows(self, n: int) -> np.ndarray:
        """The bytes as stored, mapped, in n rows."""
        return np.memmap(self.path, np.uint8, "r", self.offset, (n, self.n_bytes // n))


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """The metadata, whose arrays of numbers are `array.array`, and the tensors by name."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file")
    with path.open("rb") as file:
        reader = Reader(path, file, path.stat().st_size)
        reader.begin()
        return reader.metadata(), reader.tensors()


class Reader:
    """Reads values one after the other. `place` says what is being read, for errors."""

    def __init__(self, path: Path, file: BinaryIO, size: int):
        self.path = path
        self.file = file
        self.size = size
        self.at = 0
        self.place = "its beginning"
        self.strings = 0
        self.alignment = ALIGNMENT

    def refuse(self, problem: str) -> NoReturn:
        raise CheckpointError(f"{self.path} is not a whole GGUF file: {self.place}: {problem}")

    def take(self, n_bytes: int) -> bytes:
        left = self.size - self.at
        if n_bytes > left:
            self.refuse(f"it has {n_bytes} bytes; the file ends after {left}")
        data = self.file.read(n_bytes)
        if len(data) < n_bytes:
            self.refuse("the file was cut short while it was read")
        self.at += n_bytes
        return data

    def number(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self.take(struct.calcsize(f"<{kind}")))[0]

    def count(self, what: str, most: int, kind: str = "Q") -> int:
        number = int(self.number(kind))
        if number > most:
            self.refuse(f"{number} {what}; expected at most {most}")
        return number

    def string(self) -> str:
        raw = self.take(self.number("Q"))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            self.refuse(f"it is not UTF-8: {error}")

    def begin(self) -> None:
        if (magic := self.take(len(MAGIC))) != MAGIC:
            self.refuse(f"it is {magic!r}; expected {MAGIC!r}")
        version = self.number("I")
        if version >> 16 and not version & 0xFFFF:
            raise CheckpointError(
                f"{self.path} is a GGUF file in the byte order of other machines; expected little-endian"
            )
        if version not in VERSIONS:
            self.refuse(f"it has version {version}; supported are {', '.join(map(str, VERSIONS))}")
        self.place = "the number of tensors"
        self.n_tensors = self.count("tensors", MOST_TENSORS)
        self.place = "the number of metadata fields"
        self.n_fields = self.count("fields", MOST_FIELDS)

    def metadata(self) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for i in range(self.n_fields):
            self.place = f"the name of metadata field {i}"
            name = self.string()
            self.place = f"metadata field {name!r:.80}"
            if name in fields:
                self.refuse("it appears twice")
            fields[name] = self.value(self.number("I"))
        alignment = fields.get("general.alignment", ALIGNMENT)
        self.place = "metadata field 'general.alignment'"
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            self.refuse(f"it is {alignment!r:.80}; expected a power of two, at most {1 << 20}")
        self.alignment = alignment
        return fields

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self.array()
        if kind not in SCALARS:
            self.refuse(f"its type is {kind}; expected {', '.join(map(str, [*SCALARS, STRING, ARRAY]))}")
        return self.number(SCALARS[kind])

    def array(self) -> Any:
        kind, count = self.number("I"), self.number("Q")
        if kind == STRING:
            self.strings += count
            if self.strings > MOST_STRINGS:
                self.refuse(f"an array of {count} strings; expected at most {MOST_STRINGS} in all arrays")
            return [self.string() for _ in range(count)]
        if kind not in SCALARS:
            self.refuse(f"an array of type {kind}; expected numbers or strings")
        letter = SCALARS[kind]
        values = array("B" if kind == BOOL else letter)
        values.frombytes(self.take(count * struct.calcsize(f"<{letter}")))
        return values

    def tensors(self) -> dict[str, GgufTensor]:
        entries = {}
        for i in range(self.n_tensors):
            self.place = f"the name of tensor {i}"
            name = self.string()
            self.place = f"tensor {name!r:.80}"
            if name in entries:
                self.refuse("it appears twice")
            shape = [self.number("Q") for _ in range(self.count("dimensions", MOST_DIMENSIONS, "I"))]
            entries[name] = shape, self.number("I"), self.number("Q")
        begin = -(-self.at // self.alignment) * self.alignment
        return {name: self.tensor(name, *entry, begin) for name, entry in entries.items()}

    def tensor(self, name: str, shape: list[int], kind: int, offset: int, begin: int) -> GgufTensor:
        self.place = f"tensor {name!r:.80}"
        kind_name, values, n_bytes = BLOCKS.get(kind) or self.other_blocks(kind)
        if not shape or min(shape) < 1 or shape[0] % values:
            self.refuse(f"its shape is {shape}; expected rows of whole blocks of {values} for {kind_name}")
        n_bytes *= math.prod(shape) // values
        offset += begin
        if offset + n_bytes > self.size:
            self.refuse(f"it is at bytes {offset} to {offset + n_bytes}; the file has {self.size}")
        return GgufTensor(self.path, name, kind_name, tuple(shape), offset, n_bytes)

    def other_blocks(self, kind: int) -> Blocks:
        """Of a format that only the gguf package reads, for `convert`."""
        what = f"{self.path}: {self.place} is in format {kind}; converting it"
        gguf = package("gguf", what, "gguf")
        if kind not in set(gguf.GGMLQuantizationType):
            self.refuse(f"its type is {kind}, which the gguf package does not know")
        stored = gguf.GGMLQuantizationType(kind)
        return (stored.name, *gguf.GGML_QUANT_SIZES[stored])
