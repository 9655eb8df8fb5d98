"""Prompt compression by self-information (Selective Context, Li et al. 2023)."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from lazyllm.llm import LLM

UNITS = ("sentence", "token", "phrase")
SPACY_MODEL = "en_core_web_sm"
# after a stop, with what closes a quotation or bracket, where a blank follows; Chinese and Japanese have none
SENTENCE_END = re.compile(
    r"[.!?\u2026]+[\"'\u201d\u2019)\]]*\s+|[\u3002\uff01\uff1f]+[\u201d\u2019\u300d\u300f\uff09]*\s*"
)


def compressed(text: str, llm: LLM, ratio: float, unit: str) -> str:
    """The text, its white space collapsed, without the units that score below the 100 * ratio percentile."""
    plain = " ".join(text.split())
    if not plain:
        return ""
    ids = llm.tokenizer.encode(plain, add_special=False)
    pieces = llm.tokenizer.offsets(ids)
    plain = "".join(pieces)
    ends, unit_of_token = assigned(unit_ends(plain, pieces, unit), pieces)
    scores = unit_scores(self_information(llm, ids), unit_of_token, len(ends))
    return "".join(
        plain[first:end]
        for first, end, stays in zip([0, *ends[:-1]], ends, kept(scores, ratio), strict=True)
        if stays
    ).strip()


def self_information(llm: LLM, ids: list[int]) -> np.ndarray:
    """-ln p of each token given those before it; NaN for the first, unless the model has a token that begins.

    A text longer than the model's context is read in windows, each of which begins half a window before its
    first new token.
    """
    tokenizer = llm.tokenizer
    begins = [token for token in tokenizer.encode("") if token == tokenizer.bos_token_id]
    ids = [*begins, *ids]
    window = llm.config.context
    half = max(1, window // 2)
    known = llm.session().surprisal(ids[:window])
    while known.size < len(ids):
        first = known.size - half
        known = np.append(known, llm.session().surprisal(ids[first : first + window])[half:])
    return known[len(begins) :]


# ---- units ----


def unit_ends(text: str, pieces: list[str], unit: str) -> list[int]:
    """Where the units end, which together are the text; `pieces` are its tokens."""
    if unit == "token":
        return sorted(set(np.cumsum([len(piece) for piece in pieces]).tolist()) - {0})
    sentences = [*(match.end() for match in SENTENCE_END.finditer(text)), len(text)]
    if unit == "phrase":
        return [end for first, last in spans(sentences) for end in phrase_ends(text[first:last], first)]
    return [last for _, last in spans(sentences)]


def spans(ends: list[int]) -> list[tuple[int, int]]:
    return [(first, last) for first, last in zip([0, *ends], ends, strict=False) if last > first]


def phrase_ends(sentence: str, first: int) -> list[int]:
    """Ends of a sentence's noun phrases and of its other words, blanks after them included."""
    parsed = spacy_model()(sentence)
    inside = {token.i for chunk in parsed.noun_chunks for token in chunk[:-1]}
    return [first + word.idx + len(word.text_with_ws) for word in parsed if word.i not in inside]


@functools.cache
def spacy_model() -> Any:
    try:
        import spacy
    except ImportError:
        raise ImportError(
            'unit="phrase" needs spaCy: pip install "lazyllm-engine[phrases]"; unit="sentence" and '
            'unit="token" do without'
        ) from None
    try:
        return spacy.load(SPACY_MODEL, exclude=["ner", "lemmatizer"])
    except OSError:
        raise ImportError(
            f'unit="phrase" needs spaCy\'s {SPACY_MODEL}: python -m spacy download {SPACY_MODEL}'
        ) from None


def assigned(ends: list[int], pieces: list[str]) -> tuple[list[int], np.ndarray]:
    """The units that have tokens, one that has none being joined to the next; and the unit of each token.

    A token belongs where its last character does; one of several that make a character, where that does.
    """
    after = np.cumsum([len(piece) for piece in pieces])
    last_character = np.where([bool(piece) for piece in pieces], after - 1, np.minimum(after, after[-1] - 1))
    units, unit_of_token = np.unique(np.searchsorted(ends, last_character, side="right"), return_inverse=True)
    used = [ends[unit] for unit in units]
    return [*used[:-1], ends[-1]], unit_of_token


def unit_scores(information: np.ndarray, unit_of_token: np.ndarray, n_units: int) -> np.ndarray:
    """The mean over each unit's tokens, as far as known; NaN where none is."""
    known = ~np.isnan(information)
    counts = np.bincount(unit_of_token[known], minlength=n_units)
    sums = np.bincount(unit_of_token[known], information[known].astype(np.float64), minlength=n_units)
    means = np.full(n_units, np.nan)
    np.divide(sums, counts, out=means, where=counts > 0)
    return means


def kept(scores: np.ndarray, ratio: float) -> np.ndarray:
    """Whether each unit stays; one whose score is unknown does."""
    known = scores[~np.isnan(scores)]
    if known.size == 0:
        return np.ones(scores.size, bool)
    below: np.ndarray = scores < np.percentile(known, 100 * ratio)
    return ~below
