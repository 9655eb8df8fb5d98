"""Questions on documents, for RULER's two question-answering tasks, from files that the user has."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lazyllm.evaluation.longbench import items
from lazyllm.support.files import user_path
from lazyllm.support.json_text import parse_json

QA = ("qa_1", "qa_2")
SQUAD, HOTPOT = "squad.json", "hotpotqa.json"
QA_FILES = (
    f"a folder with {SQUAD} (qa_1) and {HOTPOT} (qa_2), the files that RULER downloads, or with "
    "triviaqa and hotpotqa of LongBench"
)
PASSAGE = re.compile(r"^Passage \d+:\n", re.MULTILINE)
EXAMPLE = re.compile(r"^Passage:\n(.*?)\nQuestion:\n(.*?)\nAnswer:", re.MULTILINE | re.DOTALL)


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
    name, data_set, add_file, add_item = SOURCES[task]
    file = user_path(folder) / name
    if file.is_file():
        try:
            add_file(questions, parse_json(file.read_bytes(), file))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} is not the file that RULER downloads: {error!r}") from None
    elif data_set in items.available(folder):
        for item in items.read(folder, data_set):
            add_item(questions, item)
    else:
        return None
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


def add_triviaqa(to: Questions, item: items.Item) -> None:
    """Adds the question of an item of LongBench's triviaqa, and the passages of its examples, whose own
    questions are left out: their answers lack other spellings."""
    for text, question in EXAMPLE.findall(item["input"]):
        to.questions.append(Question(question.strip(), item["answers"], [to.index(text.strip())]))
    for text, _ in EXAMPLE.findall(item["context"]):
        to.index(text.strip())


def add_hotpotqa(to: Questions, item: items.Item) -> None:
    """Adds the question of an item of LongBench's hotpotqa, whose context consists of passages."""
    passages = filter(None, map(str.strip, PASSAGE.split(item["context"])))
    to.questions.append(Question(item["input"], item["answers"], [*map(to.index, passages)]))


Add = Callable[[Questions, Any], None]
SOURCES: Mapping[str, tuple[str, str, Add, Add]] = {
    "qa_1": (SQUAD, "triviaqa", add_squad, add_triviaqa),
    "qa_2": (HOTPOT, "hotpotqa", add_hotpot, add_hotpotqa),
}
"""By task: RULER's file, LongBench's data set, and the functions that add a file and an item."""
