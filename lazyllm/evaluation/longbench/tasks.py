"""LongBench as the runner sees it: the data sets in the user's files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lazyllm.evaluation.chats import chat_wrapper
from lazyllm.evaluation.longbench import items
from lazyllm.evaluation.longbench.datasets import ENGLISH, dataset
from lazyllm.evaluation.longbench.prompt import find_templates, make_prompt
from lazyllm.evaluation.longbench.scoring import score_item
from lazyllm.evaluation.options import DataOptions
from lazyllm.evaluation.tasks import ItemPrompt, Shorten, Stops, Tasks
from lazyllm.llm import LLM

ANY_ANSWER = "Paragraph 1 段落1"  # a valid answer for every metric


class LongBench(Tasks):
    """The items of the files in `options.data`."""

    def __init__(self, options: DataOptions) -> None:
        data = options.data or ""
        available = items.available(data)
        names = list(options.datasets or (name for name in ENGLISH if name in available))
        items.available(data, *names)
        if not names:
            raise FileNotFoundError(
                f"{data} holds no English data set; it holds {', '.join(available) or 'no data set at all'}. "
                "Name the data sets to run in datasets"
            )
        for name in names:  # raises what every score would raise: an unknown option, a missing package
            score_item(name, ANY_ANSWER, [ANY_ANSWER], [ANY_ANSWER], options.edit_sim)
        self._templates = find_templates(data, options.prompts)
        self._options, self.wrapper = options, options.wrapper
        self.items = {name: items.subset(items.read(data, name), options) for name in names}
        if empty := [name for name, rows in self.items.items() if not rows]:
            raise ValueError(f"no item of {', '.join(empty)} is within the limits")
        self.selection = {
            "data sets": names,
            "first items": options.limit,
            "sampled items": options.sample,
            "min item length": options.min_item_length,
            "max item length": options.max_item_length,
        }
        self.conditions = {
            "tasks": "LongBench",
            "prompts": {name: self._templates.verdict(name) for name in names},
            "prompts sha256": {name: self._templates.digest(name) for name in names},
            "max length": options.max_length,
            "cap on new tokens": options.max_new_tokens,
            "edit similarity": options.edit_sim,
        }

    def check(self, llm: LLM) -> None:
        chat_wrapper(llm.tokenizer, self.wrapper)

    def max_new_tokens(self, name: str) -> int:
        limit = self._templates.max_new_tokens(name)
        return min(limit, self._options.max_new_tokens or limit)

    def prompt(
        self, llm: LLM, name: str, item: Mapping[str, Any], shorten: Shorten | None = None
    ) -> ItemPrompt:
        max_length = self._options.max_length
        return make_prompt(llm.tokenizer, item, max_length, self.wrapper, self._templates, shorten)

    def stops(self, llm: LLM, name: str) -> Stops:
        ends = llm.tokenizer.eos_token_ids
        if not dataset(name).stop_at_newline:
            return Stops(ends)
        ends = (*ends, llm.tokenizer.encode("\n", add_special=False)[-1])
        return Stops(ends, never_first=ends)

    def score(self, name: str, prediction: str, item: Mapping[str, Any]) -> dict[str, float]:
        edit_sim = self._options.edit_sim
        return {"score": score_item(name, prediction, item["answers"], item["all_classes"], edit_sim)}
