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

    The `unit` is a sentence or a token. A unit's score is the mean self-information of its tokens, found in
    one pass of the model that answers over the text; units below the `100 * ratio` percentile are removed.
    """

    name: ClassVar[str] = "compress"
    compresses = True
    ratio: float
    unit: str = "sentence"

    def __post_init__(self) -> None:
        self._set(ratio=checked.share(self.ratio, "ratio"))
        checked.choice(self.unit, "unit", ("sentence", "token"))

    def compress(self, llm: Any, text: str) -> str:
        """The text, its white space collapsed, without the units that are removed."""
        ids = llm.tokenizer.encode(" ".join(text.split()), add_special=False)
        if not ids:
            return ""
        pieces = llm.tokenizer.offsets(ids)
        plain = "".join(pieces)
        ends, unit_of_token = assigned(unit_ends(plain, pieces, self.unit), pieces)
        scores = unit_scores(self_information(llm, ids), unit_of_token, len(ends))
        units = [plain[first:end] for first, end in itertools.pairwise([0, *ends])]
        return "".join(itertools.compress(units, kept(scores, self.ratio))).strip()


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


def unit_ends(text: str, pieces: list[str], unit: str) -> list[int]:
    """The index after each unit in the text; `pieces` are its tokens' texts."""
    if unit == "token":
        ends = np.cumsum([len(piece) for piece in pieces]).tolist()
    else:
        ends = [match.end() for match in SENTENCE_END.finditer(text)]
    return sorted({*ends, len(text)} - {0})


def assigned(ends: list[int], pieces: list[str]) -> tuple[list[int], np.ndarray]:
    """Ends of the units that contain tokens, and the unit of each token: that of its last character, or of
    the character that it is a part of. Units without tokens are joined to the next."""
    after = np.cumsum([len(piece) for piece in pieces])
    last_character = np.where([bool(piece) for piece in pieces], after - 1, np.minimum(after, after[-1] - 1))
    units, unit_of_token = np.unique(np.searchsorted(ends, last_character, side="right"), return_inverse=True)
    used = [ends[unit] for unit in units]
    return [*used[:-1], ends[-1]], unit_of_token


def unit_scores(information: np.ndarray, unit_of_token: np.ndarray, n_units: int) -> np.ndarray:
    """The mean of the known values of each unit's tokens; NaN for a unit without any."""
    known = ~np.isnan(information)
    counts = np.bincount(unit_of_token[known], minlength=n_units)
    sums = np.bincount(unit_of_token[known], information[known].astype(np.float64), minlength=n_units)
    return np.asarray(sums / np.where(counts, counts, np.nan))


def kept(scores: np.ndarray, ratio: float) -> np.ndarray:
    """True for each unit that is kept; a unit with an unknown score is kept."""
    known = scores[~np.isnan(scores)]
    return ~(scores < np.percentile(known, 100 * ratio)) if known.size else np.ones(scores.size, bool)
