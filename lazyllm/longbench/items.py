"""LongBench's items: found in a folder, a zip, parquet files or on the hub, and checked line by line."""

from __future__ import annotations

import importlib
import json
import os
import random
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from lazyllm.checkpoint import HUB_ID
from lazyllm.fields import shortened
from lazyllm.longbench.datasets import DATA_SETS, dataset

HUB = "hub:"
HUB_FILE = "data.zip"
LINE_LIMIT = 64 << 20
SAMPLE_SEED = 0
FORMS = f"a folder of NAME.jsonl or parquet files, a {HUB_FILE}, a parquet file, or {HUB}OWNER/NAME"

Item = dict[str, Any]


# ---- files, some of them in a zip ----------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A file, or the file `member` inside the zip at `path`; `mixed`: it has rows of other data sets too."""

    path: Path
    member: str = ""
    mixed: bool = False

    def __str__(self) -> str:
        return f"{self.path}/{self.member}" if self.member else str(self.path)

    def beside(self, name: str) -> Source:
        """The file of that name in the same folder."""
        if not self.member:
            return Source(self.path.with_name(name))
        inner, slash, _ = self.member.rpartition("/")
        return Source(self.path, f"{inner}{slash}{name}")

    def exists(self) -> bool:
        if not self.member:
            return self.path.is_file()
        with open_zip(self.path) as archive:
            return self.member in archive.namelist()

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        if self.member:
            with open_zip(self.path) as archive, archive.open(self.member) as file:
                yield file
        else:
            with self.path.open("rb") as file:
                yield file


@contextmanager
def open_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise ValueError(f"{path} is not a whole, plain zip file: {error}") from error


def in_zip(path: Path, name: str) -> Source | None:
    """The file of that name, in whichever folder of the zip it lies."""
    with open_zip(path) as archive:
        found = [
            member
            for member in archive.namelist()
            if member.rpartition("/")[2] == name and not member.startswith("__MACOSX/")
        ]
    if len(found) > 1:
        raise ValueError(f"{path} holds {name} more than once: {', '.join(found)}; expected one of them")
    return Source(path, found[0]) if found else None


def parse_object(where: str, text: bytes) -> dict[str, Any]:
    """The JSON object in `text`, which was read at `where`."""
    try:
        contents = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} does not hold JSON: {error}") from error
    if not isinstance(contents, dict):
        raise ValueError(f"{where} holds a {type(contents).__name__}; expected a JSON object")
    return contents


# ---- where the data sets are ---------------------------------------------------------------------


def resolve_data(data: str | Path) -> Path:
    """The folder or file that `data` names; from the hub, LongBench's data.zip in the hub's cache."""
    if not isinstance(data, str | Path):
        raise TypeError(f"data must be {FORMS}, not {data!r}")
    if str(data).startswith(HUB):
        return fetch(str(data).removeprefix(HUB))
    path = Path(os.path.abspath(data))
    if not path.exists():
        raise FileNotFoundError(f"data: {data} is not here; expected {FORMS}")
    return path


def fetch(repository: str) -> Path:
    if not HUB_ID.fullmatch(repository):
        raise ValueError(f"data: {HUB}{repository} is not of the form {HUB}OWNER/NAME")
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise ImportError(
            f"{HUB}{repository} needs the package huggingface_hub: pip install huggingface_hub"
        ) from None
    try:
        return Path(hf_hub_download(repository, HUB_FILE, repo_type="dataset"))
    except Exception as error:  # the hub's errors have no common base
        raise OSError(f"{HUB_FILE} of {HUB}{repository} could not be fetched: {error}") from error


def locate(path: Path) -> dict[str, list[Source]]:
    """The files of each data set in the folder or file `path`."""
    if path.suffix == ".zip":
        found = {name: in_zip(path, f"{name}.jsonl") for name in DATA_SETS}
        return {name: [source] for name, source in found.items() if source is not None}
    if path.suffix == ".parquet":
        return locate_parquet(path.parent, [path])
    if not path.is_dir():
        raise ValueError(f"data: {path} is a file of another kind; expected {FORMS}")
    for folder in (path, path / "data"):
        lines = {name: folder / f"{name}.jsonl" for name in DATA_SETS}
        if any(file.is_file() for file in lines.values()):
            return {name: [Source(file)] for name, file in lines.items() if file.is_file()}
    return locate_parquet(path, sorted(path.rglob("*.parquet")))


def locate_parquet(root: Path, files: Sequence[Path]) -> dict[str, list[Source]]:
    """Each file belongs to the data set that it or a folder is named after, else to those of its rows."""
    found: dict[str, list[Source]] = {}
    for file in files:
        named = name_of(root, file)
        for name in [named] if named else names_in(file):
            found.setdefault(name, []).append(Source(file, mixed=not named))
    return found


def names_in(file: Path) -> set[str]:
    column = read_parquet(file, ["dataset"]).column("dataset").unique().to_pylist()
    return {name for name in column if name in DATA_SETS}


def name_of(root: Path, file: Path) -> str | None:
    """Copies on the hub are NAME.parquet, NAME-00000-of-00001.parquet or NAME/test.parquet."""
    parts = (file.stem, *reversed(file.relative_to(root).parts[:-1]))
    named = (name for part in parts for name in DATA_SETS if part == name or part.startswith(f"{name}-"))
    return next(named, None)


def read_parquet(file: Path, columns: list[str] | None = None) -> Any:
    """The table in `file`."""
    try:
        arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise ImportError(f"{file} needs the package pyarrow: pip install pyarrow") from None
    try:
        with parquet.ParquetFile(file) as opened:
            missing = sorted({*(columns or ())} - {*opened.schema_arrow.names})
            if missing:
                raise ValueError(f"{file}: column {missing[0]} is missing; expected LongBench's fields")
            return opened.read(columns)
    except (arrow.ArrowException, OSError) as error:
        raise ValueError(f"{file} could not be read as parquet: {error}") from error


# ---- what is asked for ---------------------------------------------------------------------------


def available(data: str | Path) -> tuple[str, ...]:
    """The data sets that `data` holds, in the benchmark's order."""
    found = locate(resolve_data(data))
    return tuple(name for name in DATA_SETS if name in found)


def require(data: str | Path, names: Iterable[str]) -> None:
    """Refuses, by name, data sets that `data` lacks."""
    find(data, names)


def find(data: str | Path, names: Iterable[str]) -> dict[str, list[Source]]:
    wanted = [dataset(name).name for name in names]
    found = locate(resolve_data(data))
    if missing := [name for name in wanted if name not in found]:
        held = [name for name in DATA_SETS if name in found]
        raise FileNotFoundError(
            f"data: {data} lacks {', '.join(missing)}; it holds "
            + (", ".join(held) or f"no data set: expected {FORMS}")
        )
    return {name: found[name] for name in wanted}


def read(data: str | Path, name: str) -> list[Item]:
    """All items of one data set, in order, each of them checked, each with an _id of its own."""
    sources = find(data, [name])[name]
    items: dict[str, Item] = {}
    for where, row in (found for source in sources for found in rows(source, name)):
        item = checked(where, row, name)
        if item["_id"] in items:
            refuse(where, item, "_id", "an _id that no item before it has")
        items[item["_id"]] = item
    if not items:
        raise ValueError(f"{sources[0]} is empty; expected items of {name}")
    return list(items.values())


def subset(
    items: Sequence[Item],
    limit: int | None = None,
    sample: int | None = None,
    min_length: int | None = None,
    max_length: int | None = None,
) -> list[Item]:
    """The items from `min_length` to `max_length`; of these the first `limit`, or `sample` drawn, in order.

    A sample depends on its size and the number of items alone, and a larger one contains a smaller one.
    """
    for option, value, least in (
        ("limit", limit, 1),
        ("sample", sample, 1),
        ("min_length", min_length, 0),
        ("max_length", max_length, 0),
    ):
        check_count(option, value, least)
    if limit is not None and sample is not None:
        raise ValueError(f"limit is {limit} and sample is {sample}; expected one of them")
    low, high = min_length or 0, max_length
    chosen = [item for item in items if low <= item["length"] and (high is None or item["length"] <= high)]
    return drawn(chosen, sample) if sample is not None else chosen[:limit]


def check_count(name: str, value: int | None, least: int) -> None:
    """For an option that may be left out."""
    if value is not None:
        check_whole(name, value, least)


def check_whole(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")


def drawn(items: Sequence[Item], count: int) -> list[Item]:
    """Of Python's generator only random() is promised to stay as it is, so each item draws one number."""
    generator = random.Random(SAMPLE_SEED)
    lots = sorted((generator.random(), index) for index in range(len(items)))
    return [items[index] for index in sorted(index for _, index in lots[:count])]


# ---- one item ------------------------------------------------------------------------------------


def rows(source: Source, name: str) -> Iterator[tuple[str, Item]]:
    """Each row of a file, after where it stands."""
    if source.path.suffix == ".parquet":
        yield from parquet_rows(source, name)
        return
    with source.open() as file:
        for number, line in enumerate(iter(lambda: file.readline(LINE_LIMIT + 1), b""), 1):
            where = f"{source}, line {number}"
            if len(line) > LINE_LIMIT:
                raise ValueError(f"{where} has more than {LINE_LIMIT} bytes; expected one item")
            if line.strip():
                yield where, parse_object(where, line)


def parquet_rows(source: Source, name: str) -> Iterator[tuple[str, Item]]:
    for number, row in enumerate(read_parquet(source.path).to_pylist(), 1):
        if not source.mixed or row["dataset"] == name:
            yield f"{source}, row {number}", row


def is_text(value: object) -> bool:
    """Whether this is text that UTF-8 can hold, which half a surrogate pair is not."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_name(value: object) -> bool:
    return is_text(value) and value != ""


def is_list(value: object) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(map(is_text, value))


CHECKS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "input": (is_text, "a string"),
    "context": (is_text, "a string"),
    "answers": (is_list, "a list of at least one string"),
    "length": (lambda value: type(value) is int and value >= 0, "a whole number from 0"),
    "dataset": (is_name, "the name of its data set"),
    "language": (is_name, "a string that is not empty"),
    "all_classes": (lambda value: value is None or is_list(value), "a list of at least one string, or null"),
    "_id": (is_name, "a string that is not empty"),
}


def checked(where: str, row: Item, name: str) -> Item:
    """The row itself, if it has the fields that the benchmark gives an item of `name`."""
    for field, (accepts, expected) in CHECKS.items():
        if field not in row or not accepts(row[field]):
            refuse(where, row, field, expected)
    if row["dataset"] not in (name, name.removesuffix("_e")):
        refuse(where, row, "dataset", repr(name))
    return row


def refuse(where: str, row: Item, field: str, expected: str) -> None:
    shown = shortened(row[field]) if field in row else "missing"
    raise ValueError(f"{where}: {field} is {shown}; expected {expected}")
