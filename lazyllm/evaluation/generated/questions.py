"""Questions on documents, for RULER's two question-answering tasks, from the user's LongBench."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lazyllm.evaluation.longbench import items

QA = {"qa_1": "triviaqa", "qa_2": "hotpotqa"}
"""By task: the data set of LongBench that has its questions."""
PASSAGE = re.compile(r"^Passage \d+:\n", re.MULTILINE)
EXAMPLE = re.compile(r"^Passage:\n(.*?)\nQuestion:\n(.*?)\nAnswer:", re.MULTILINE | re.DOTALL)


class Question(NamedTuple):
    text: str
    answers: list[str]
    documents: list[str]  # that it is asked about


class Questions(NamedTuple):
    """Questions, and all documents without repetitions."""

    questions: Sequence[Question] = ()
    documents: Sequence[str] = ()


def read_questions(folder: str | Path, task: str) -> Questions | None:
    """The questions for qa_1 or qa_2; None if the folder has none.

    An item of hotpotqa asks about all passages of its context. One of triviaqa asks about a passage in its
    input; its examples are further documents, as the answers of their questions lack other spellings.
    """
    if (name := QA[task]) not in items.available(folder):
        return None
    questions: list[Question] = []
    documents: list[str] = []
    for item in items.read(folder, name):
        if name == "hotpotqa":
            own = [passage.strip() for passage in PASSAGE.split(item["context"]) if passage.strip()]
            questions.append(Question(item["input"], item["answers"], own))
            documents += own
        else:
            for text, question in EXAMPLE.findall(item["input"]):
                questions.append(Question(question.strip(), item["answers"], [text.strip()]))
            examples = EXAMPLE.findall(item["input"]) + EXAMPLE.findall(item["context"])
            documents += [text.strip() for text, _ in examples]
    return Questions(questions, list(dict.fromkeys(documents))) if questions else None
