"""LongBench's prompt templates and answer lengths: the official ones, or others, located and checked.

`official/` has the benchmark's own two files, unchanged, and their licence.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import Formatter
from types import MappingProxyType
from typing import Any

from lazyllm.checkpoints.fields import shortened
from lazyllm.evaluation.longbench.datasets import dataset
from lazyllm.evaluation.longbench.items import File, in_zip, is_text, opened, resolve_data
from lazyllm.support.files import user_path
from lazyllm.support.json_text import parse_object

PROMPT_FILE = "dataset2prompt.json"
LENGTH_FILE = "dataset2maxlen.json"
ORIGIN = "LongBench/config of https://github.com/THUDM/LongBench"
OFFICIAL = Path(__file__).with_name("official")
FIELDS = ("input", "context")
MARK = "\0"
"""A context that no item has."""
SIZE_LIMIT = 1 << 20
MAX_NEW_TOKENS = 1 << 20


@dataclass(frozen=True)
class Templates:
    """Template and maximum of new tokens by data set, read from `source`; NAME_e shares those of NAME."""

    source: str
    prompts: Mapping[str, str]
    lengths: Mapping[str, int]

    def prompt(self, item: Mapping[str, Any]) -> str:
        """The prompt of one item."""
        return self.template(item["dataset"]).format(**{field: item[field] for field in FIELDS})

    def around(self, item: Mapping[str, Any]) -> tuple[str, str]:
        """The prompt's text before the context and after it."""
        before, _, after = self.prompt({**item, "context": MARK}).partition(MARK)
        return before, after

    def template(self, name: str) -> str:
        """The template of a data set."""
        if (template := self.prompts.get(plain(name))) is None:
            raise ValueError(f"{self.source} has no template for {plain(name)}; expected one as in {ORIGIN}")
        return template

    def max_new_tokens(self, name: str) -> int:
        """The official limit of an answer's tokens."""
        if (length := self.lengths.get(plain(name))) is None:
            raise ValueError(
                f"{LENGTH_FILE} beside {self.source} has no length for {plain(name)}; "
                f"expected one as in {ORIGIN}"
            )
        return length

    def digest(self, name: str) -> str:
        """SHA-256 of the template and length of a data set."""
        text = json.dumps([self.template(name), self.max_new_tokens(name)], ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def verdict(self, name: str) -> str:
        """The manifest's statement on the template of a data set."""
        return "official" if self.template(name) == official().template(name) else "not official"


def plain(name: str) -> str:
    """The name without LongBench-E's ending: qasper_e is qasper."""
    return dataset(name).name.removesuffix("_e")


# ---- locating templates --------------------------------------------------------------------------


def find_templates(data: str | Path | None = None, prompts: str | Path | None = None) -> Templates:
    """The templates in the file `prompts`, else those with the items in `data`, else the official ones."""
    if prompts is not None:
        return read_templates(user_path(prompts))
    file = beside_items(resolve_data(data)) if data else None
    return read_templates(file) if file else official()


def beside_items(path: Path) -> File | None:
    """The file of templates in the zip at `path`, or in the folder at `path` or its subfolder config."""
    if path.suffix == ".zip":
        return in_zip(path, PROMPT_FILE)
    files = (path / PROMPT_FILE, path / "config" / PROMPT_FILE)
    return next((file for file in files if file.is_file()), None)


@cache
def official() -> Templates:
    """The benchmark's own templates and lengths, which are part of this package."""
    return read_templates(OFFICIAL / PROMPT_FILE)


def read_templates(file: File) -> Templates:
    """The templates in a file, and the lengths beside it, or else the official ones."""
    beside: File = file.parent / LENGTH_FILE  # type: ignore[operator]
    lengths = beside if beside.is_file() else OFFICIAL / LENGTH_FILE
    return Templates(
        str(file),
        MappingProxyType({name: checked_template(file, name, text) for name, text in entries(file)}),
        MappingProxyType({name: checked_length(lengths, name, count) for name, count in entries(lengths)}),
    )


def entries(file: File) -> Iterable[tuple[str, Any]]:
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing; expected a file such as {PROMPT_FILE} of {ORIGIN}")
    with opened(file) as stream:
        text = stream.read(SIZE_LIMIT + 1)
    if len(text) > SIZE_LIMIT:
        raise ValueError(f"{file} has more than {SIZE_LIMIT} bytes; expected the file of {ORIGIN}")
    return parse_object(text, file).items()


def checked_template(file: File, name: str, template: object) -> str:
    expected = f"a template with the fields {' and '.join(f'{{{field}}}' for field in FIELDS)} only"
    if not isinstance(template, str) or not is_text(template):
        raise ValueError(f"{file}: {name} is {shortened(template)}; expected {expected}")
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{file}: {name} is no template ({error}); expected {expected}") from error
    for _, field, form, conversion in parts:
        if field is not None and (field not in FIELDS or form or conversion):
            written = field + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")
            raise ValueError(f"{file}: {name} has the field {{{written}}}; expected {expected}")
    return template


def checked_length(file: File, name: str, length: object) -> int:
    if type(length) is not int or not 1 <= length <= MAX_NEW_TOKENS:
        raise ValueError(
            f"{file}: {name} is {shortened(length)}; expected a whole number from 1 to {MAX_NEW_TOKENS}"
        )
    return length
