"""LongBench's data sets: category, metric and handling of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import Literal

Language = Literal["en", "zh"]
Metric = Literal[
    "f1",
    "f1_zh",
    "rouge",
    "rouge_zh",
    "classification",
    "count",
    "retrieval",
    "retrieval_zh",
    "code_similarity",
]


@dataclass(frozen=True, slots=True)
class DataSet:
    """Handling of one data set.

    `chat`: prompts are wrapped for a chat model. `first_line`: only the first line of a prediction is scored.
    `stop_at_newline`: a line break ends generation.
    """

    name: str
    category: str
    metric: Metric
    language: Language
    chat: bool
    first_line: bool
    stop_at_newline: bool


_METRICS: Mapping[str, Mapping[str, Metric]] = {
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


def _build(name: str, category: str, metric: Metric) -> DataSet:
    return DataSet(
        name=name,
        category=category,
        metric=metric,
        language="zh" if name in _CHINESE else "en",
        chat=name not in _UNWRAPPED,
        first_line=name in _FIRST_LINE,
        stop_at_newline=name == "samsum",
    )


_PLAIN = tuple(
    _build(name, category, metric) for category, sets in _METRICS.items() for name, metric in sets.items()
)
_BY_LENGTH = tuple(replace(one, name=f"{one.name}_e") for one in _PLAIN if one.name not in _WITHOUT_LENGTHS)

DATA_SETS: Mapping[str, DataSet] = MappingProxyType({one.name: one for one in (*_PLAIN, *_BY_LENGTH)})
ENGLISH = tuple(one.name for one in _PLAIN if one.language == "en")
CATEGORIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {category: tuple(name for name in sets if name in ENGLISH) for category, sets in _METRICS.items()}
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
    return name in {one.name for one in _BY_LENGTH}


def length_bin(length: float) -> str:
    """The one of LENGTH_BINS that contains `length`."""
    return LENGTH_BINS[(length >= 4000) + (length >= 8000)]
