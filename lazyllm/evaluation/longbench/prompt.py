"""The prompt of a LongBench item by the official harness' rules: its template, the cut, the wrapper.

`official/` has the benchmark's own templates and answer lengths, unchanged, and their licence; others may lie
beside the items or be named by the user.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from os.path import commonprefix
from pathlib import Path
from typing import Any, TypeVar

from lazyllm.checkpoints.fields import shortened
from lazyllm.checkpoints.tokenizer import Tokenizer
from lazyllm.evaluation.chats import AnyWrapper, chat_wrapper, wrapped_ids
from lazyllm.evaluation.longbench.datasets import dataset
from lazyllm.evaluation.longbench.items import File, in_zip, is_text, resolve_data, zip_errors
from lazyllm.evaluation.options import MAX_LENGTH
from lazyllm.evaluation.tasks import ItemPrompt, Shorten
from lazyllm.support import checked
from lazyllm.support.files import user_path
from lazyllm.support.json_text import parse_object

PROMPT_FILE = "dataset2prompt.json"
LENGTH_FILE = "dataset2maxlen.json"
ORIGIN = "LongBench/config of https://github.com/THUDM/LongBench"
OFFICIAL = Path(__file__).with_name("official")
ALLOWED = re.compile(r"\{\{|\}\}|\{input\}|\{context\}")
BRACES = re.compile(r"[{}][^{}]*\}?")
MARK = "\0"
"""A context that no item has."""
MAX_NEW_TOKENS = 1 << 20
Value = TypeVar("Value")


@dataclass(frozen=True)
class Templates:
    """Template and maximum of new tokens by data set, read from `source`; NAME_e shares those of NAME."""

    source: str
    prompts: Mapping[str, str]
    lengths: Mapping[str, int]

    def prompt(self, item: Mapping[str, Any]) -> str:
        """The prompt of one item."""
        return self.template(item["dataset"]).format(input=item["input"], context=item["context"])

    def template(self, name: str) -> str:
        """The template of a data set."""
        return entry(self.prompts, name, f"{self.source} has no template")

    def max_new_tokens(self, name: str) -> int:
        """The official limit of an answer's tokens."""
        return entry(self.lengths, name, f"{LENGTH_FILE} beside {self.source} has no length")

    def digest(self, name: str) -> str:
        """SHA-256 of the template and length of a data set."""
        text = json.dumps([self.template(name), self.max_new_tokens(name)], ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def verdict(self, name: str) -> str:
        """The manifest's statement on the template of a data set."""
        return "official" if self.template(name) == official().template(name) else "not official"


def entry(table: Mapping[str, Value], name: str, lack: str) -> Value:
    """The table's value for a data set, without the ending of LongBench-E: qasper_e is qasper."""
    plain = dataset(name).name.removesuffix("_e")
    if plain not in table:
        raise ValueError(f"{lack} for {plain}; expected one as in {ORIGIN}")
    return table[plain]


def find_templates(data: str | Path | None = None, prompts: str | Path | None = None) -> Templates:
    """The templates in the file `prompts`, else those with the items in `data`, else the official ones."""
    if prompts is not None:
        return read_templates(user_path(prompts))
    if not data:
        return official()
    if (path := resolve_data(data)).suffix == ".zip":
        member = in_zip(path, PROMPT_FILE)
        return read_templates(member) if member else official()
    files = (path / PROMPT_FILE, path / "config" / PROMPT_FILE)
    return next((read_templates(file) for file in files if file.is_file()), official())


@cache
def official() -> Templates:
    """The benchmark's own templates and lengths, which are part of this package."""
    return read_templates(OFFICIAL / PROMPT_FILE)


def read_templates(file: File) -> Templates:
    """The templates in a file, and the lengths beside it, or else the official ones."""
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing; expected a file such as {PROMPT_FILE} of {ORIGIN}")
    beside: File = file.parent / LENGTH_FILE  # type: ignore[operator]
    lengths = beside if beside.is_file() else OFFICIAL / LENGTH_FILE
    with zip_errors(file):
        tables = [parse_object(table.read_bytes(), table) for table in (file, lengths)]
    templates = Templates(str(file), *tables)
    for name, template in templates.prompts.items():
        if wrong := BRACES.findall(ALLOWED.sub("", template)) if is_text(template) else [template]:
            expected = "a template with the fields {input} and {context} only"
            raise ValueError(f"{file}: {name} has {shortened(wrong[0])}; expected {expected}")
    for name, length in templates.lengths.items():
        if type(length) is not int or not 1 <= length <= MAX_NEW_TOKENS:
            expected = f"a whole number from 1 to {MAX_NEW_TOKENS}"
            raise ValueError(f"{lengths}: {name} is {shortened(length)}; expected {expected}")
    return templates


def prompt_ids(
    tokenizer: Tokenizer,
    item: Mapping[str, Any],
    max_length: int = MAX_LENGTH,
    wrapper: AnyWrapper = "auto",
    templates: Templates | None = None,
) -> list[int]:
    """The token ids of one item, a dict with the fields of LongBench's files.

    A prompt of more than `max_length` tokens loses its middle. `wrapper` is "llama-2", "xgen",
    "template" (the checkpoint's own), "none", or "auto" by the checkpoint. `templates` are the official ones
    unless they are given.
    """
    return make_prompt(tokenizer, item, max_length, wrapper, templates).ids


def make_prompt(
    tokenizer: Tokenizer,
    item: Mapping[str, Any],
    max_length: int = MAX_LENGTH,
    wrapper: AnyWrapper = "auto",
    templates: Templates | None = None,
    shorten: Shorten | None = None,
) -> ItemPrompt:
    """`prompt_ids`, with whether the prompt was cut, and its wrapper.

    `shorten` compresses what the cut has left of the context.
    """
    for field in ("dataset", "input", "context"):
        if not is_text(item.get(field)):
            raise ValueError(f"item: {field} is {item.get(field)!r:.80}; expected a string")
    checked.whole(max_length, "max_length", 2)
    wrapper = chat_wrapper(tokenizer, wrapper) if dataset(item["dataset"]).chat else "none"
    templates = templates or find_templates()
    text = templates.prompt(item)
    ids = tokenizer.encode(text)
    if cut := len(ids) > max_length:
        half = int(max_length / 2)
        text = tokenizer.decode(ids[:half]) + tokenizer.decode(ids[-half:])
    if shorten:
        before, _, after = templates.prompt({**item, "context": MARK}).partition(MARK)
        text = with_shorter_context(text, before, after, shorten)
    return ItemPrompt(wrapped_ids(tokenizer, text, wrapper), cut, wrapper)


def with_shorter_context(text: str, before: str, after: str, shorten: Shorten) -> str:
    """The prompt with the text between `before` and `after` shortened; a cut may have shortened those too."""
    before = commonprefix([text, before])  # noqa: RUF071
    rest = text.removeprefix(before)
    after = commonprefix([rest[::-1], after[::-1]])[::-1]  # noqa: RUF071
    return before + shorten(rest.removesuffix(after)) + after
