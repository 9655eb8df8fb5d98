"""Questions on documents, for RULER's two question-answering tasks, from files that the user has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lazyllm.support.files import user_path
from lazyllm.support.json_text import parse_json

QA = ("qa_1", "qa_2")
SQUAD, HOTPOT = "squad.json", "hotpotqa.json"
QA_FILES = f"a folder with {SQUAD} (qa_1) and {HOTPOT} (qa_2), the files that RULER downloads"


@dataclass(frozen=True)
class Question:
    """`documents` has the indices of those it is asked about, `related` of others on the same subject."""

    text: str
    answers: list[str]
    documents: list[int]
    related: Sequence[int] = ()


@dataclass(frozen=True)
class Questions:
    """Questions, and by document, without repetitions, its index."""

    questions: list[Question] = field(default_factory=list)
    documents: dict[str, int] = field(default_factory=dict)

    def index(self, document: str) -> int:
        """The index of a document, which is added if it is new."""
        return self.documents.setdefault(document, len(self.documents))


def read_questions(folder: str | Path, task: str) -> Questions | None:
    """The questions for qa_1 or qa_2; None if the folder has no file for the task."""
    questions = Questions()
    name, add = SOURCES[task]
    file = user_path(folder) / name
    if not file.is_file():
        return None
    try:
        add(questions, parse_json(file.read_bytes(), file))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is not the file that RULER downloads: {error!r}") from None
    if not questions.questions:
        raise ValueError(f"{folder} has no question for {task}")
    return questions


def add_squad(to: Questions, data: Any) -> None:
    """Adds the answerable questions of SQuAD 2.0; the other paragraphs of an article are related."""
    for article in data["data"]:
        indices = [to.index(paragraph["context"]) for paragraph in article["paragraphs"]]
        for own, paragraph in zip(indices, article["paragraphs"], strict=True):
            related = [index for index in dict.fromkeys(indices) if index != own]
            for question in paragraph["qas"]:
                if not question["is_impossible"]:
                    answers = [answer["text"] for answer in question["answers"]]
                    to.questions.append(Question(question["question"], answers, [own], related))


def add_hotpot(to: Questions, rows: Any) -> None:
    """Adds HotpotQA's questions, each on its ten paragraphs."""
    for row in rows:
        documents = [to.index(f"{title}\n{''.join(sentences)}") for title, sentences in row["context"]]
        to.questions.append(Question(row["question"], [row["answer"]], documents))


SOURCES: Mapping[str, tuple[str, Callable[[Questions, Any], None]]] = {
    "qa_1": (SQUAD, add_squad),
    "qa_2": (HOTPOT, add_hotpot),
}
"""By task: RULER's file, and the function that adds its questions."""
