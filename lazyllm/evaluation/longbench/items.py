"""LongBench's items: read from a folder, a zip or the hub, each field of each item checked."""

import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lazyllm.checkpoints.fields import shortened
from lazyllm.evaluation.longbench.datasets import DATA_SETS, dataset
from lazyllm.support.files import user_path
from lazyllm.support.json_text import parse_object
from lazyllm.support.optional import fetch

HUB = "hub:"
HUB_FILE = "data.zip"
GET = f"for LongBench itself: pip install huggingface_hub, then --data {HUB}THUDM/LongBench"
"""Message for users who have no copy of the benchmark."""
EXPECTED = f"a folder of NAME.jsonl, a {HUB_FILE}, or {HUB}OWNER/NAME"

Item = dict[str, Any]
File = Path | zipfile.Path
"""A file on disk or a member of a zip."""


def resolve_data(data: str | Path) -> Path:
    """The folder or file that `data` names; for hub:OWNER/NAME, data.zip in the hub's cache."""
    if str(data).startswith(HUB):
        repository = str(data).removeprefix(HUB)
        return fetch(
            f"{HUB_FILE} of {data}", lambda module: module.hf_hub_download(repository, HUB_FILE, repo_type="dataset")
        )
    path = user_path(data).absolute()
    if not path.exists():
        raise FileNotFoundError(f"data: {path} does not exist; expected {EXPECTED}; {GET}")
    return path


def located(path: Path) -> dict[str, File]:
    """The file of each data set in `path`, a zip or a folder or its subfolder data, in the benchmark's order."""
    if path.suffix == ".zip":
        return in_zip(path)
    if not path.is_dir():
        raise ValueError(f"data: {path} is a file of an unknown kind; expected {EXPECTED}")
    places = ((name, folder / f"{name}.jsonl") for name in DATA_SETS for folder in (path / "data", path))
    return {name: file for name, file in places if file.is_file()}


def in_zip(path: Path) -> dict[str, File]:
    """NAME.jsonl of each data set, in any folder of the zip."""
    with zip_errors(path):
        archive = zipfile.ZipFile(path)
    files: dict[str, File] = {}
    for name in DATA_SETS:
        found = (place for place in archive.namelist() if f"/{place}".endswith(f"/{name}.jsonl"))
        members = [place for place in found if not place.startswith("__MACOSX/")]
        if len(members) > 1:
            raise ValueError(f"{path} holds {name}.jsonl more than once: {', '.join(members)}; expected one")
        if members:
            files[name] = zipfile.Path(archive, members[0])
    return files


@contextmanager
def zip_errors(file: object) -> Iterator[None]:
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise ValueError(f"{file} is damaged, encrypted or no zip file: {error}") from error


def available(data: str | Path, *names: str) -> dict[str, File]:
    """The file of each data set in `data`, in the benchmark's order; an error if it lacks one of `names`."""
    files = located(resolve_data(data))
    if missing := [name for name in names if dataset(name).name not in files]:
        held = ", ".join(files) or f"no data set: expected {EXPECTED}; {GET}"
        raise FileNotFoundError(f"data: {data} lacks {', '.join(missing)}; it holds {held}")
    return files


def read(data: str | Path, name: str) -> list[Item]:
    """All items of one data set, in order; an invalid item or a second item with the same _id is an error."""
    file = available(data, name)[name]
    items: dict[str, Item] = {}
    with zip_errors(file), file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                where = f"{file}, line {number}"
                item = checked_item(where, parse_object(line, where), name)
                if items.setdefault(item["_id"], item) is not item:
                    raise ValueError(f"{where}: _id is {item['_id']!r}; expected one that no earlier item has")
    if not items:
        raise ValueError(f"{file} is empty; expected items of {name}")
    return list(items.values())


def are_texts(value: object) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(isinstance(text, str) for text in value)


TEXT = (lambda value: isinstance(value, str)), "a string"
CHECKS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "input": TEXT,
    "context": TEXT,
    "answers": (are_texts, "a list of at least one string"),
    "length": (lambda value: type(value) is int and value >= 0, "a whole number from 0"),
    "all_classes": (lambda value: value is None or are_texts(value), "a list of at least one string, or null"),
    "_id": (lambda value: isinstance(value, str) and value != "", "a string that is not empty"),
}


def checked_item(where: str, row: Item, name: str) -> Item:
    """The row itself, if its fields are those of an item of `name`."""
    of_set = (lambda value: value in (name, name.removesuffix("_e"))), repr(name)
    for field, (accepts, expected) in {**CHECKS, "dataset": of_set}.items():
        if field not in row or not accepts(row[field]):
            shown = shortened(row[field]) if field in row else "missing"
            raise ValueError(f"{where}: {field} is {shown}; expected {expected}")
    return row
