"""LongBench's items: read from a folder, a zip, parquet files or the hub, each field of each item checked."""

from __future__ import annotations

import math
import os
import random
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any

from lazyllm.checkpoints.checkpoint import HUB_ID
from lazyllm.checkpoints.fields import shortened
from lazyllm.evaluation.longbench.datasets import DATA_SETS, dataset
from lazyllm.support import checked, hub
from lazyllm.support.files import user_path
from lazyllm.support.json_text import parse_object
from lazyllm.support.optional import package

HUB = "hub:"
HUB_FILE = "data.zip"
SPLITS = ("*.parquet", "*/*.parquet")  # below a folder named after a data set
LINE_LIMIT = 64 << 20
SAMPLE_SEED = 0
GET = f"for LongBench itself: pip install huggingface_hub, then --data {HUB}THUDM/LongBench"
"""Message for users who have no copy of the benchmark."""
EXPECTED = f"a folder of NAME.jsonl or parquet files, a {HUB_FILE}, a parquet file, or {HUB}OWNER/NAME"

Item = dict[str, Any]


# ---- files on disk and in zips ---------------------------------------------------------------------


File = Path | zipfile.Path
"""A file on disk or a member of a zip."""


@contextmanager
def opened(file: File) -> Iterator[IO[bytes]]:
    if isinstance(file, Path):
        with file.open("rb") as stream:
            yield stream
    else:
        with zip_errors(file.root.filename), file.open("rb") as stream:
            yield stream


@contextmanager
def zip_errors(path: object) -> Iterator[None]:
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise ValueError(f"{path} is damaged, encrypted or no zip file: {error}") from error


def in_zip(path: Path, name: str) -> zipfile.Path | None:
    """The file of that name in any folder of the zip; None if there is none."""
    with zip_errors(path):
        archive = zipfile.ZipFile(path)
    members = [
        member
        for member in archive.namelist()
        if member.rpartition("/")[2] == name and not member.startswith("__MACOSX/")
    ]
    if len(members) > 1:
        raise ValueError(f"{path} holds {name} more than once: {', '.join(members)}; expected one")
    return zipfile.Path(archive, members[0]) if members else None


@dataclass(frozen=True)
class Source:
    """A file of items. `mixed`: it has rows of several data sets."""

    file: File
    mixed: bool = False


# ---- finding data sets -----------------------------------------------------------------------------


def resolve_data(data: str | Path) -> Path:
    """The folder or file that `data` names; for hub:OWNER/NAME, data.zip in the hub's cache."""
    if not isinstance(data, str | Path):
        raise TypeError(f"data must be {EXPECTED}, not {data!r}")
    if str(data).startswith(HUB):
        repository = str(data).removeprefix(HUB)
        if not HUB_ID.fullmatch(repository):
            raise ValueError(f"data: {data} is not of the form {HUB}OWNER/NAME")
        return hub.fetch(
            f"{HUB_FILE} of {data}",
            lambda module: module.hf_hub_download(repository, HUB_FILE, repo_type="dataset"),
        )
    path = Path(os.path.abspath(user_path(data)))
    if not path.exists():
        raise FileNotFoundError(f"data: {path} does not exist; expected {EXPECTED}; {GET}")
    return path


def locate(path: Path) -> dict[str, list[Source]]:
    """The files of each data set in the folder or file `path`."""
    if path.suffix == ".zip":
        return {name: [Source(file)] for name in DATA_SETS if (file := in_zip(path, f"{name}.jsonl"))}
    if path.suffix == ".parquet":
        return locate_parquet(path.parent, [path])
    if not path.is_dir():
        raise ValueError(f"data: {path} is a file of an unknown kind; expected {EXPECTED}")
    for folder in (path, path / "data"):
        lines = {name: folder / f"{name}.jsonl" for name in DATA_SETS}
        if any(file.is_file() for file in lines.values()):
            return {name: [Source(file)] for name, file in lines.items() if file.is_file()}
        if tables := parquet_files(folder):
            return locate_parquet(folder, tables)
    return {}


def parquet_files(folder: Path) -> list[Path]:
    """The parquet files in `folder` and in its subfolders NAME and NAME/SPLIT, NAME being a data set."""
    patterns = ["*.parquet", *(f"{name}/{below}" for name in DATA_SETS for below in SPLITS)]
    return sorted(file for pattern in patterns for file in folder.glob(pattern))


def locate_parquet(root: Path, files: Sequence[Path]) -> dict[str, list[Source]]:
    """By data set: the files that are named after it or lie in a folder named so, else by their rows."""
    sources: dict[str, list[Source]] = {}
    for file in files:
        own_name = name_of(root, file)
        for name in [own_name] if own_name else names_in(file):
            sources.setdefault(name, []).append(Source(file, mixed=not own_name))
    return sources


def names_in(file: Path) -> set[str]:
    """The data sets that rows of the parquet file belong to."""
    column = read_parquet(file, ["dataset"]).column("dataset").unique().to_pylist()
    return {name for name in column if name in DATA_SETS}


def name_of(root: Path, file: Path) -> str | None:
    """The data set named by NAME.parquet, NAME-00000-of-00001.parquet, NAME/test.parquet or
    NAME/test/0000.parquet, the forms on the hub."""
    parts = (file.stem, *reversed(file.relative_to(root).parts[:-1]))
    names = (name for part in parts for name in DATA_SETS if part == name or part.startswith(f"{name}-"))
    return next(names, None)


def read_parquet(file: Path, columns: list[str] | None = None) -> Any:
    """The pyarrow table in `file`; with `columns`, only these."""
    arrow, parquet = package("pyarrow", file), package("pyarrow.parquet", file)
    try:
        with parquet.ParquetFile(file) as table:
            missing = sorted({*(columns or ())} - {*table.schema_arrow.names})
            if missing:
                raise ValueError(f"{file}: column {missing[0]} is missing; expected LongBench's fields")
            return table.read(columns)
    except (arrow.ArrowException, OSError) as error:
        raise ValueError(f"{file} could not be read as parquet: {error}") from error


# ---- reading data sets ----------------------------------------------------------------------------


def available(data: str | Path) -> tuple[str, ...]:
    """The data sets that `data` holds, in the benchmark's order."""
    sources = locate(resolve_data(data))
    return tuple(name for name in DATA_SETS if name in sources)


def require(data: str | Path, names: Iterable[str]) -> dict[str, list[Source]]:
    """The files of each data set; FileNotFoundError if `data` lacks one."""
    names = [dataset(name).name for name in names]
    sources = locate(resolve_data(data))
    if missing := [name for name in names if name not in sources]:
        held = ", ".join(name for name in DATA_SETS if name in sources)
        raise FileNotFoundError(
            f"data: {data} lacks {', '.join(missing)}; it holds "
            + (held or f"no data set: expected {EXPECTED}; {GET}")
        )
    return {name: sources[name] for name in names}


def read(data: str | Path, name: str) -> list[Item]:
    """All items of one data set, in order; an invalid item or a second item with the same _id is an error."""
    sources = require(data, [name])[name]
    items: dict[str, Item] = {}
    for where, row in chain.from_iterable(rows(source, name) for source in sources):
        item = checked_item(where, row, name)
        if item["_id"] in items:
            refuse(where, item, "_id", "an _id that no earlier item has")
        items[item["_id"]] = item
    if not items:
        raise ValueError(f"{sources[0].file} is empty; expected items of {name}")
    return list(items.values())


def subset(
    items: Sequence[Item],
    limit: int | None = None,
    sample: int | None = None,
    min_length: int | None = None,
    max_length: int | None = None,
) -> list[Item]:
    """The items of `min_length` to `max_length`: the first `limit` of them, or a random `sample`, in order.

    A sample depends only on its size and the number of items; a larger sample contains every smaller one.
    """
    for option, value, low in (
        ("limit", limit, 1),
        ("sample", sample, 1),
        ("min_length", min_length, 0),
        ("max_length", max_length, 0),
    ):
        if value is not None:
            checked.whole(value, option, low)
    if limit is not None and sample is not None:
        raise ValueError(f"limit is {limit} and sample is {sample}; expected one of them")
    low, high = min_length or 0, math.inf if max_length is None else max_length
    items = [item for item in items if low <= item["length"] <= high]
    if sample is None:
        return items[:limit]
    generator = random.Random(SAMPLE_SEED)  # one random() per item, which is stable across Python versions
    draws = sorted((generator.random(), index) for index in range(len(items)))
    return [items[index] for index in sorted(index for _, index in draws[:sample])]


# ---- one item ------------------------------------------------------------------------------------


def rows(source: Source, name: str) -> Iterator[tuple[str, Item]]:
    """Each row of a file, with the file and line for error messages."""
    file = source.file
    if isinstance(file, Path) and file.suffix == ".parquet":
        for number, row in enumerate(read_parquet(file).to_pylist(), 1):
            if not source.mixed or row["dataset"] == name:
                yield f"{file}, row {number}", row
        return
    with opened(file) as stream:
        for number, line in enumerate(iter(lambda: stream.readline(LINE_LIMIT + 1), b""), 1):
            where = f"{file}, line {number}"
            if len(line) > LINE_LIMIT:
                raise ValueError(f"{where} has more than {LINE_LIMIT} bytes; expected one item")
            if line.strip():
                yield where, parse_object(line, where)


def is_text(value: object) -> bool:
    """True for a string without lone surrogates, which UTF-8 cannot encode."""
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
    "dataset": (is_name, "the data set's name"),
    "language": (is_name, "a string that is not empty"),
    "all_classes": (lambda value: value is None or is_list(value), "a list of at least one string, or null"),
    "_id": (is_name, "a string that is not empty"),
}


def checked_item(where: str, row: Item, name: str) -> Item:
    """The row itself, if its fields are those of an item of `name`."""
    for field, (accepts, expected) in CHECKS.items():
        if field not in row or not accepts(row[field]):
            refuse(where, row, field, expected)
    if row["dataset"] not in (name, name.removesuffix("_e")):
        refuse(where, row, "dataset", repr(name))
    return row


def refuse(where: str, row: Item, field: str, expected: str) -> None:
    shown = shortened(row[field]) if field in row else "missing"
    raise ValueError(f"{where}: {field} is {shown}; expected {expected}")
