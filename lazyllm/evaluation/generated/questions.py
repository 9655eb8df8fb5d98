"""Questions on documents, for RULER's two question-answering tasks, from files that the user has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lazyllm.evaluation.longbench import items
from lazyllm.support.files import user_path

QA = ("qa_1", "qa_2")
SQUAD, HOTPOT = "squad.json", "hotpotqa.json"
LONGBENCH = {"qa_1": "triviaqa", "qa_2": "hotpotqa"}
QA_FILES = (
    f"a folder with {SQUAD} (qa_1) and {HOTPOT} (qa_2), the files that RULER downloads, or with "
    "triviaqa and hotpotqa of LongBench"
)
PASSAGE = re.compile(r"^Passage \d+:\n", re.MULTILINE)
EXAMPLE = re.compile(r"^Passage:\n(.*?)\nQuestion:\n(.*?)\nAnswer:", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Question:
    """`documents` and `related` are indices: those it is asked about, and others on the same subject."""

    text: str
    answers: list[str]
    documents: list[int]
    related: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Questions:
    documents: list[str] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)


def read_questions(folder: str | Path, task: str) -> Questions | None:
    """The questions for qa_1 or qa_2; None if the folder has no file for the task."""
    file = user_path(folder) / (SQUAD if task == "qa_1" else HOTPOT)
    if file.is_file():
        try:
            found = (squad if task == "qa_1" else hotpot)(json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} is not the file that RULER downloads: {error!r}") from None
    elif LONGBENCH[task] in items.available(folder):
        found = (trivia if task == "qa_1" else passages)(items.read(folder, LONGBENCH[task]))
    else:
        return None
    if not found.questions:
        raise ValueError(f"{folder} has no question for {task}")
    return found


def squad(data: Mapping[str, Any]) -> Questions:
    """The answerable questions of SQUAD's 2.0 file; the other paragraphs of an article are related."""
    made, index = Questions(), Index()
    for article in data["data"]:
        places = [index.of(one["context"]) for one in article["paragraphs"]]
        for place, paragraph in zip(places, article["paragraphs"], strict=True):
            related = [other for other in dict.fromkeys(places) if other != place]
            made.questions.extend(
                Question(one["question"], [answer["text"] for answer in one["answers"]], [place], related)
                for one in paragraph["qas"]
                if not one["is_impossible"]
            )
    return Questions(list(index.places), made.questions)


def hotpot(data: Iterable[Mapping[str, Any]]) -> Questions:
    """HotpotQA's file: each question with its ten paragraphs."""
    index = Index()
    asked = [
        Question(
            one["question"],
            [one["answer"]],
            [index.of(f"{title}\n{''.join(sentences)}") for title, sentences in one["context"]],
        )
        for one in data
    ]
    return Questions(list(index.places), asked)


def trivia(rows: Iterable[Mapping[str, Any]]) -> Questions:
    """LongBench's triviaqa: an item's own question and passage. Its examples, whose answers lack other
    spellings, give passages only."""
    index, asked = Index(), []
    for row in rows:
        for text, question in EXAMPLE.findall(row["input"]):
            asked.append(Question(question.strip(), list(row["answers"]), [index.of(text.strip())]))
        for text, _ in EXAMPLE.findall(row["context"]):
            index.of(text.strip())
    return Questions(list(index.places), asked)


def passages(rows: Iterable[Mapping[str, Any]]) -> Questions:
    """LongBench's hotpotqa, whose contexts consist of passages."""
    index = Index()
    asked = [
        Question(
            row["input"],
            list(row["answers"]),
            [index.of(text) for part in PASSAGE.split(row["context"]) if (text := part.strip())],
        )
        for row in rows
    ]
    return Questions(list(index.places), asked)


class Index:
    """Numbers documents in the order in which they first come."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {}

    def of(self, document: str) -> int:
        return self.places.setdefault(document, len(self.places))
