"""LongBench for the runner; and the prompt of an item by the official harness' rules: template, cut, wrapper.

`official/` has the benchmark's own templates and answer lengths, unchanged, and their licence; others may lie
beside the items or be named by the user.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from os.path import commonprefix
from pathlib import Path
from typing import Any, TypeVar

from lazyllm.checkpoints.fields import shortened
from lazyllm.checkpoints.tokenizer import Tokenizer
from lazyllm.evaluation.chats import AnyWrapper, chat_wrapper, wrapped_ids
from lazyllm.evaluation.longbench import items
from lazyllm.evaluation.longbench.datasets import ENGLISH, dataset
from lazyllm.evaluation.longbench.items import resolve_data
from lazyllm.evaluation.longbench.metrics import score_item
from lazyllm.evaluation.options import MAX_LENGTH, DataOptions
from lazyllm.evaluation.tasks import ItemPrompt, Shorten, Tasks
from lazyllm.generation import Request
from lazyllm.llm import LLM
from lazyllm.support import checked
from lazyllm.support.files import user_path
from lazyllm.support.json_text import json_digest, parse_object

PROMPT_FILE = "dataset2prompt.json"
LENGTH_FILE = "dataset2maxlen.json"
ORIGIN = "LongBench/config of https://github.com/THUDM/LongBench"
OFFICIAL = Path(__file__).with_name("official")
ALLOWED = re.compile(r"\{\{|\}\}|\{input\}|\{context\}")
BRACES = re.compile(r"[{}][^{}]*\}?")
MARK = "\0"
"""A context that no item has."""
ANY_ANSWER = "Paragraph 1 段落1"  # a valid answer for every metric
Value = TypeVar("Value")


@dataclass(frozen=True)
class Templates:
    """Template and maximum of new tokens by data set, read from `source`; NAME_e shares those of NAME."""

    source: str
    prompts: Mapping[str, str]
    lengths: Mapping[str, int]

    def prompt(self, item: Mapping[str, Any]) -> str:
        return self.template(item["dataset"]).format(input=item["input"], context=item["context"])

    def template(self, name: str) -> str:
        return entry(self.prompts, name, f"{self.source} has no template")

    def max_new_tokens(self, name: str) -> int:
        return entry(self.lengths, name, f"{LENGTH_FILE} beside {self.source} has no length")

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
    folders = [path := resolve_data(data), path / "config"] if data else []
    files = (folder / PROMPT_FILE for folder in folders)
    return next((read_templates(file) for file in files if file.is_file()), official())


@cache
def official() -> Templates:
    """The benchmark's own templates and lengths, which are part of this package."""
    return read_templates(OFFICIAL / PROMPT_FILE)


def read_templates(file: Path) -> Templates:
    """The templates in a file, and the lengths beside it, or else the official ones."""
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing; expected a file such as {PROMPT_FILE} of {ORIGIN}")
    neighbour = file.with_name(LENGTH_FILE)
    lengths = neighbour if neighbour.is_file() else OFFICIAL / LENGTH_FILE
    templates = Templates(str(file), *(parse_object(table.read_bytes(), table) for table in (file, lengths)))
    for name, template in templates.prompts.items():
        if wrong := BRACES.findall(ALLOWED.sub("", template)) if isinstance(template, str) else [template]:
            expected = "a template with the fields {input} and {context} only"
            raise ValueError(f"{file}: {name} has {shortened(wrong[0])}; expected {expected}")
    for name, length in templates.lengths.items():
        checked.whole(length, f"{lengths}: {name}", 1)
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
    "template" (the checkpoint's own), "none", or "auto" by the checkpoint. The default `templates` are the
    official ones.
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
    """The prompt of `prompt_ids`, with its wrapper, and `cut` if it lost its middle.

    `shorten` compresses the part of the context that the cut has left.
    """
    for field in ("dataset", "input", "context"):
        if not isinstance(item.get(field), str):
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
        before = commonprefix([text, before])  # noqa: RUF071 - the cut may have shortened those around it too
        rest = text.removeprefix(before)
        after = commonprefix([rest[::-1], after[::-1]])[::-1]  # noqa: RUF071
        text = before + shorten(rest.removesuffix(after)) + after
    return ItemPrompt(wrapped_ids(tokenizer, text, wrapper), cut, wrapper)


class LongBench(Tasks):
    """The items of the files in `options.data`."""

    def __init__(self, options: DataOptions) -> None:
        data = options.data or ""
        available = items.available(data, *(options.datasets or ()))
        names = list(options.datasets or (name for name in ENGLISH if name in available))
        if not names:
            held = f"; it holds {', '.join(available)}: name some in datasets" if available else ""
            raise FileNotFoundError(
                f"{data} holds no file NAME.jsonl of an English data set of LongBench{held}. Prompts of yours go to "
                "lazyllm.sweep(prompts=[…])"
            )
        for name in names:  # raises what every score would raise: an unknown option, a missing package
            score_item(name, ANY_ANSWER, [ANY_ANSWER], [ANY_ANSWER], options.edit_sim)
        self._templates = templates = find_templates(data, options.templates)
        self._options, self.wrapper = options, options.wrapper
        self.items = {name: items.read(data, name)[: options.limit] for name in names}
        self.selection = {"data sets": names, "first items": options.limit}
        self.conditions = {
            "tasks": "LongBench",
            "prompts": {name: templates.verdict(name) for name in names},
            "prompts sha256": {
                name: json_digest([templates.template(name), templates.max_new_tokens(name)]) for name in names
            },
            "max length": options.max_length,
            "cap on new tokens": options.max_new_tokens,
            "edit similarity": options.edit_sim,
        }

    def request(self, llm: LLM, name: str) -> Request:
        limit, ends = self._templates.max_new_tokens(name), frozenset(llm.tokenizer.eos_token_ids)
        request = Request(min(limit, self._options.max_new_tokens or limit), stop_token_ids=ends, progress=False)
        if not dataset(name).stop_at_newline:
            return request
        ends |= {llm.tokenizer.encode("\n", add_special=False)[-1]}
        return replace(request, stop_token_ids=ends, never_first=ends)

    def prompt(self, llm: LLM, name: str, item: Mapping[str, Any], shorten: Shorten | None = None) -> ItemPrompt:
        return make_prompt(llm.tokenizer, item, self._options.max_length, self.wrapper, self._templates, shorten)

    def score(self, name: str, prediction: str, item: Mapping[str, Any]) -> dict[str, float]:
        answers, classes = item["answers"], item["all_classes"]
        return {"score": score_item(name, prediction, answers, classes, self._options.edit_sim)}
