"""Prompt compression by self-information (Selective Context, Li et al. 2023)."""

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np

UNITS = ("sentence", "token", "phrase")
SPACY_MODEL = "en_core_web_sm"
# stop marks, closing quotation marks or brackets, white space; Chinese and Japanese stops need no white space
SENTENCE_END = re.compile(
    r"[.!?\u2026]+[\"'\u201d\u2019)\]]*\s+|[\u3002\uff01\uff1f]+[\u201d\u2019\u300d\u300f\uff09]*\s*"
)
REFERENCE_STOP = re.compile(r"[.?] ")
ABBREVIATION = re.compile(r"(?:\w\.\w.|[A-Z][a-z]\.)$")


def compressed(text: str, llm: Any, ratio: float, unit: str, by_sentence: bool = False) -> str:
    """The text, its white space collapsed, without the units that score below the 100 * ratio percentile.

    `by_sentence`: sentences are found and scored as in the authors' code, each by itself behind BOS.
    """
    plain = " ".join(text.split())
    if not plain:
        return ""
    parts = reference_sentences(plain) if by_sentence else [plain]
    scored = [scored_units(part, llm, unit, by_sentence) for part in parts]
    stays = iter(kept(np.concatenate([scores for _, scores in scored]), ratio))
    return "".join(unit for units, _ in scored for unit in units if next(stays)).strip()


def scored_units(text: str, llm: Any, unit: str, sentence: bool) -> tuple[list[str], np.ndarray]:
    """The units of a text and their scores. `sentence`: the text is one, behind BOS and before a blank."""
    ids = llm.tokenizer.encode(text, add_special=False)
    pieces = llm.tokenizer.offsets(ids)
    text = "".join(pieces)
    ends, unit_of_token = assigned(unit_ends(text, pieces, unit, sentence), pieces)
    scores = unit_scores(self_information(llm, ids, sentence), unit_of_token, len(ends))
    units = [text[first:end] for first, end in zip([0, *ends[:-1]], ends, strict=True)]
    return [*units[:-1], f"{units[-1]} "] if sentence else units, scores


def self_information(llm: Any, ids: list[int], needs_bos: bool = False) -> np.ndarray:
    """-ln p of each token given those before it; NaN for the first, unless the tokenizer puts BOS before it.

    `needs_bos` puts BOS there in any case, or an end token if there is no BOS. A text longer than the model's
    context is read in windows, each of which begins half a window before its first new token.
    """
    tokenizer = llm.tokenizer
    begins = [token for token in tokenizer.encode("") if token == tokenizer.bos_token_id]
    if needs_bos and not begins:
        bos = tokenizer.bos_token_id
        begins = [*tokenizer.eos_token_ids[:1]] if bos is None else [bos]
    ids = [*begins, *ids]
    window = llm.config.context
    half = max(1, window // 2)
    values = llm.session().surprisal(ids[:window], progress=False)
    while values.size < len(ids):
        first = values.size - half
        more = llm.session().surprisal(ids[first : first + window], progress=False)
        values = np.append(values, more[half:])
    return np.asarray(values[len(begins) :])


# ---- units ----


def unit_ends(text: str, pieces: list[str], unit: str, sentence: bool = False) -> list[int]:
    """The index after each unit in the text, which may be one `sentence`; `pieces` are its tokens' texts."""
    if unit == "token":
        return sorted(set(np.cumsum([len(piece) for piece in pieces]).tolist()) - {0})
    sentences = [*(match.end() for match in SENTENCE_END.finditer(text) if not sentence), len(text)]
    if unit == "phrase":
        return [end for first, last in spans(sentences) for end in phrase_ends(text[first:last], first)]
    return [last for _, last in spans(sentences)]


def reference_sentences(text: str) -> list[str]:
    """Sentences as the authors' code finds them: they end with a full stop or a question mark before a blank,
    but not after abbreviations such as e.g. and Mr."""
    stops = (match.start() + 1 for match in REFERENCE_STOP.finditer(text))
    ends = [end for end in stops if not ABBREVIATION.search(text, max(0, end - 4), end)]
    return [text[first:last].strip() for first, last in spans([*ends, len(text)])]


def spans(ends: list[int]) -> list[tuple[int, int]]:
    return [(first, last) for first, last in zip([0, *ends], ends, strict=False) if last > first]


def phrase_ends(sentence: str, first: int) -> list[int]:
    """Ends of a sentence's noun phrases and of its other words, each with the white space after it."""
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
    """Ends of the units that contain tokens, and the unit of each token. Others are joined to the next unit.

    A token belongs to the unit of its last character, or of the character that it is a part of.
    """
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
    means = np.full(n_units, np.nan)
    np.divide(sums, counts, out=means, where=counts > 0)
    return means


def kept(scores: np.ndarray, ratio: float) -> np.ndarray:
    """True for each unit that is kept; a unit with an unknown score is kept."""
    known = scores[~np.isnan(scores)]
    if known.size == 0:
        return np.ones(scores.size, bool)
    below: np.ndarray = scores < np.percentile(known, 100 * ratio)
    return ~below
