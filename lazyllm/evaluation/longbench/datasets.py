"""LongBench's data sets: category, metric and handling of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class DataSet:
    """One data set; `metric` is a function of metrics.py.

    `chat`: prompts are wrapped for a chat model. `first_line`: only the first line of a prediction is scored.
    `stop_at_newline`: a line break ends generation.
    """

    name: str
    category: str
    metric: str
    language: str
    chat: bool
    first_line: bool
    stop_at_newline: bool


_METRICS: Mapping[str, Mapping[str, str]] = {
    "Single-Document QA": {
        "narrativeqa": "f1",
        "qasper": "f1",
        "multifieldqa_en": "f1",
        "multifieldqa_zh": "f1_zh",
    },
    "Multi-Document QA": {"hotpotqa": "f1", "2wikimqa": "f1", "musique": "f1", "dureader": "rouge_zh"},
    "Summarization": {"gov_report": "rouge", "qmsum": "rouge", "multi_news": "rouge", "vcsum": "rouge_zh"},
    "Few-shot Learning": {
        "trec": "classification",
        "triviaqa": "f1",
        "samsum": "rouge",
        "lsht": "classification",
    },
    "Synthetic": {
        "passage_count": "count",
        "passage_retrieval_en": "retrieval",
        "passage_retrieval_zh": "retrieval_zh",
    },
    "Code Completion": {"lcc": "code_similarity", "repobench-p": "code_similarity"},
}
_CHINESE = frozenset({"multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh"})
_FIRST_LINE = frozenset({"trec", "triviaqa", "samsum", "lsht"})
_UNWRAPPED = _FIRST_LINE | {"lcc", "repobench-p"}
_WITHOUT_LENGTHS = _CHINESE | {"narrativeqa", "musique", "qmsum"}


_PLAIN = tuple(
    DataSet(
        name,
        category,
        metric,
        language="zh" if name in _CHINESE else "en",
        chat=name not in _UNWRAPPED,
        first_line=name in _FIRST_LINE,
        stop_at_newline=name == "samsum",
    )
    for category, metrics in _METRICS.items()
    for name, metric in metrics.items()
)
_BY_LENGTH = {
    f"{data.name}_e": replace(data, name=f"{data.name}_e")
    for data in _PLAIN
    if data.name not in _WITHOUT_LENGTHS
}
DATA_SETS: Mapping[str, DataSet] = MappingProxyType({data.name: data for data in _PLAIN} | _BY_LENGTH)
ENGLISH = tuple(data.name for data in _PLAIN if data.language == "en")
CATEGORIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {category: tuple(name for name in metrics if name in ENGLISH) for category, metrics in _METRICS.items()}
)
LENGTH_BINS = ("0-4k", "4-8k", "8k+")


def dataset(name: str) -> DataSet:
    """The data set of that name; a ValueError suggests similar names."""
    if not isinstance(name, str):
        raise TypeError(f"the name of a data set must be a string, not {name!r}")
    if name in DATA_SETS:
        return DATA_SETS[name]
    close = get_close_matches(name.lower(), DATA_SETS, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else f"it has {', '.join(DATA_SETS)}"
    raise ValueError(f"LongBench has no data set {name!r}; {hint}")


def is_by_length(name: str) -> bool:
    """True for data sets of LongBench-E, whose items are spread evenly over LENGTH_BINS."""
    return name in _BY_LENGTH


def length_bin(length: float) -> str:
    """The one of LENGTH_BINS that contains `length`."""
    return LENGTH_BINS[(length >= 4000) + (length >= 8000)]
