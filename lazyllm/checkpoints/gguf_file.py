"""The header of a GGUF file, which may be damaged: its metadata, and the place of each tensor.

Counts and lengths are limited, or compared with the size of the file, before memory is taken for them.
"""

import math
import struct
import tomllib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from lazyllm.checkpoints.tensors import Tensor
from lazyllm.errors import CheckpointError

MOST_ENTRIES, MOST_STRINGS, MOST_DIMENSIONS = 1 << 16, 1 << 22, 4
BOOL, STRING, ARRAY = 7, 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", BOOL: "?", 10: "Q", 11: "q", 12: "d"}
"""By the number of a value's type: its format character in struct and array."""
NAMES = tomllib.loads(Path(__file__).with_name("gguf.toml").read_text())
BLOCKS: dict[int, tuple[str, int, int]] = {number: (name, *size) for name, (number, *size) in NAMES["formats"].items()}
"""The formats that the core reads, by their number: name, values and bytes of a block."""
OTHER_FORMATS: dict[int, str] = {number: name for name, number in NAMES["other_formats"].items()}


class Reader:
    """Reads a file's values one after the other. `place` says what is being read, for errors."""

    def __init__(self, path: Path, file: BinaryIO):
        self.path = path
        self.file = file
        self.size, self.at = path.stat().st_size, 0
        self.place = "its beginning"
        self.n_strings = 0

    def refuse(self, problem: str) -> NoReturn:
        raise CheckpointError(f"{self.path} is not a whole GGUF file: {self.place}: {problem}")

    def take(self, n_bytes: int) -> bytes:
        data = self.file.read(min(n_bytes, self.size - self.at))
        self.at += len(data)
        if len(data) < n_bytes:
            self.refuse(f"it has {n_bytes} bytes; the file ends after {len(data)}")
        return data

    def number(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self.take(struct.calcsize(f"<{kind}")))[0]

    def count(self, what: str, most: int, kind: str = "Q") -> int:
        if (number := self.number(kind)) > most:
            self.refuse(f"{number} {what}; expected at most {most}")
        return int(number)

    def string(self) -> str:
        try:
            return self.take(self.number("Q")).decode()
        except UnicodeDecodeError as error:
            self.refuse(f"it is not UTF-8: {error}")

    def read(self) -> tuple[dict[str, Any], list[Tensor]]:
        """The metadata, whose arrays of numbers are `array.array`, and the tensors, named as in the file."""
        if (magic := self.take(4)) != b"GGUF":
            self.refuse(f"it is {magic!r}; expected b'GGUF' (safetensors are opened by the name of their folder)")
        if (version := self.number("I")) not in (2, 3):
            self.refuse(f"it has version {version}; supported are 2 and 3, little-endian")
        self.place = "the number of tensors"
        n_tensors = self.count("tensors", MOST_ENTRIES)
        self.place = "the number of metadata fields"
        n_fields = self.count("fields", MOST_ENTRIES)
        fields = {name: self.value() for name in self.names("metadata field", n_fields)}
        alignment = fields.get("general.alignment", 32)
        self.place = "metadata field 'general.alignment'"
        if not isinstance(alignment, int) or alignment not in [1 << n for n in range(21)]:
            self.refuse(f"it is {alignment!r:.80}; expected a power of two, at most {1 << 20}")
        entries = {name: self.entry() for name in self.names("tensor", n_tensors)}
        begin = -(-self.at // alignment) * alignment
        return fields, [self.tensor(name, *entry, begin) for name, entry in entries.items()]

    def names(self, what: str, count: int) -> Iterator[str]:
        """The names of `count` entries; between two names, the caller reads the entry of the first."""
        names = set()
        for i in range(count):
            self.place = f"the name of {what} {i}"
            name = self.string()
            self.place = f"{what} {name!r:.80}"
            if name in names:
                self.refuse("it appears twice")
            names.add(name)
            yield name

    def value(self) -> Any:
        kind = self.number("I")
        if kind in (STRING, ARRAY):
            return self.string() if kind == STRING else self.array()
        if kind not in SCALARS:
            self.refuse(f"its type is {kind}; expected 0 to 12")
        return self.number(SCALARS[kind])

    def array(self) -> Any:
        kind, count = self.number("I"), self.number("Q")
        if kind == STRING:
            self.n_strings += count
            if self.n_strings > MOST_STRINGS:
                self.refuse(f"an array of {count} strings; expected at most {MOST_STRINGS} in all arrays")
            return [self.string() for _ in range(count)]
        if kind not in SCALARS:
            self.refuse(f"an array of type {kind}; expected numbers or strings")
        values = array("B" if kind == BOOL else SCALARS[kind])
        values.frombytes(self.take(count * values.itemsize))
        return values

    def entry(self) -> tuple[list[int], int, int]:
        """The shape of a tensor (length of a row first), the number of its format, and its offset."""
        shape = [self.number("Q") for _ in range(self.count("dimensions", MOST_DIMENSIONS, "I"))]
        return shape, self.number("I"), self.number("Q")

    def tensor(self, name: str, shape: list[int], kind: int, offset: int, begin: int) -> Tensor:
        self.place = f"tensor {name!r:.80}"
        if kind not in BLOCKS:
            names = ", ".join(name for name, *_ in BLOCKS.values())
            other = OTHER_FORMATS.get(kind, f"format {kind}")
            raise CheckpointError(f"{self.path}: {self.place} is in {other}; supported are {names}")
        dtype, values, n_bytes = BLOCKS[kind]
        if not shape or min(shape) < 1 or shape[0] % values:
            self.refuse(f"its shape is {shape}; expected rows of whole blocks of {values} for {dtype}")
        n_bytes *= math.prod(shape) // values
        offset += begin
        if offset + n_bytes > self.size:
            self.refuse(f"it is at bytes {offset} to {offset + n_bytes}; the file has {self.size}")
        return Tensor(name, dtype, tuple(reversed(shape)), 0, offset, n_bytes)
