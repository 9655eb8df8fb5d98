"""LongBench's data sets: category, metric and handling of each, from datasets.json."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from types import MappingProxyType

from lazyllm.support import checked


@dataclass(frozen=True, slots=True)
class DataSet:
    """One data set; `metric` is a function of metrics.py.

    `chat`: prompts are wrapped for a chat model. `first_line`: only the first line of a prediction is scored.
    `stop_at_newline`: a line break ends generation. `by_length`: LongBench-E has it too, as NAME_e.
    """

    name: str
    category: str
    metric: str
    language: str = "en"
    chat: bool = True
    first_line: bool = False
    stop_at_newline: bool = False
    by_length: bool = False


_PLAIN = [DataSet(**row) for row in json.loads((files(__package__) / "datasets.json").read_text("utf-8"))]
_BY_LENGTH = [replace(data, name=f"{data.name}_e") for data in _PLAIN if data.by_length]
DATA_SETS: Mapping[str, DataSet] = MappingProxyType({data.name: data for data in (*_PLAIN, *_BY_LENGTH)})
_ENGLISH = [data for data in _PLAIN if data.language == "en"]
ENGLISH = tuple(data.name for data in _ENGLISH)
CATEGORIES = {
    category: tuple(data.name for data in _ENGLISH if data.category == category)
    for category in dict.fromkeys(data.category for data in _ENGLISH)
}


def dataset(name: str) -> DataSet:
    """The data set of that name; a ValueError suggests similar names."""
    return checked.entry(name, DATA_SETS, "LongBench data set")
