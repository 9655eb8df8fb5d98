"""PromptCompression: removes the parts of a text that a language model predicts easily."""

import itertools
import re
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from lazyllm.method import Method
from lazyllm.support import checked

# stop marks, closing quotation marks or brackets, white space; Chinese and Japanese stops need no white space
SENTENCE_END = re.compile(
    r"[.!?\u2026]+[\"'\u201d\u2019)\]]*\s+|[\u3002\uff01\uff1f]+[\u201d\u2019\u300d\u300f\uff09]*\s*"
)


@dataclass(frozen=True)
class PromptCompression(Method):
    """Selective Context (Li et al. 2023): removes from a text what a language model predicts easily.

    A sentence's score is the mean self-information of its tokens, found in one pass of the model that answers
    over the text; sentences below the `100 * ratio` percentile are removed.
    """

    name: ClassVar[str] = "compress"
    compresses = True
    ratio: float

    def __post_init__(self) -> None:
        self._set(ratio=checked.share(self.ratio, "ratio"))

    def compress(self, llm: Any, text: str) -> str:
        """The text, its white space collapsed, without the sentences that are removed."""
        ids = llm.tokenizer.encode(" ".join(text.split()), add_special=False)
        if not ids:
            return ""
        pieces = llm.tokenizer.offsets(ids)
        plain = "".join(pieces)
        ends, sentence_of_token = assigned(sentence_ends(plain), pieces)
        scores = sentence_scores(self_information(llm, ids), sentence_of_token, len(ends))
        sentences = [plain[first:end] for first, end in itertools.pairwise([0, *ends])]
        return "".join(itertools.compress(sentences, kept(scores, self.ratio))).strip()


def self_information(llm: Any, ids: list[int]) -> np.ndarray:
    """-ln p of each token given those before it; NaN for the first, unless the tokenizer puts BOS before it.
    A text longer than the context is read in windows, each from half a window before its first new token."""
    tokenizer, window = llm.tokenizer, llm.config.context
    begins = [token for token in tokenizer.encode("") if token == tokenizer.bos_token_id]
    ids = [*begins, *ids]
    half = max(1, window // 2)
    values = llm.session().surprisal(ids[:window], progress=False)
    while values.size < len(ids):
        first = values.size - half
        more = llm.session().surprisal(ids[first : first + window], progress=False)
        values = np.append(values, more[half:])
    return np.asarray(values[len(begins) :])


def sentence_ends(text: str) -> list[int]:
    """The index after each sentence in the text."""
    return sorted({*(match.end() for match in SENTENCE_END.finditer(text)), len(text)} - {0})


def assigned(ends: list[int], pieces: list[str]) -> tuple[list[int], np.ndarray]:
    """Ends of the sentences that contain tokens, and the sentence of each token: that of its last character,
    or of the character that it is a part of. Sentences without tokens are joined to the next. `pieces` are
    the tokens' texts."""
    after = np.cumsum([len(piece) for piece in pieces])
    last_character = np.where([bool(piece) for piece in pieces], after - 1, np.minimum(after, after[-1] - 1))
    numbers, sentence_of_token = np.unique(np.searchsorted(ends, last_character, side="right"), return_inverse=True)
    used = [ends[number] for number in numbers]
    return [*used[:-1], ends[-1]], sentence_of_token


def sentence_scores(information: np.ndarray, sentence_of_token: np.ndarray, n_sentences: int) -> np.ndarray:
    """The mean of the known values of each sentence's tokens; NaN for a sentence without any."""
    is_known = ~np.isnan(information)
    counts = np.bincount(sentence_of_token[is_known], minlength=n_sentences)
    sums = np.bincount(sentence_of_token[is_known], information[is_known].astype(np.float64), minlength=n_sentences)
    return np.asarray(sums / np.where(counts, counts, np.nan))


def kept(scores: np.ndarray, ratio: float) -> np.ndarray:
    """True for each sentence that is kept; one with an unknown score is kept."""
    numbers = scores[~np.isnan(scores)]
    return ~(scores < np.percentile(numbers, 100 * ratio)) if numbers.size else np.ones(scores.size, bool)
