"""Items of generated tasks, fitted to a length.

An item has LongBench's fields, and fills with its chat template and its answer a given length in the model's
own tokens. The same seed gives the same item on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import cycle
from types import MappingProxyType

from lazyllm.evaluation.generated.draws import Draws
from lazyllm.evaluation.generated.haystack import Haystack, made_prose
from lazyllm.evaluation.generated.kinds import Encode, Item, Kind, Spec
from lazyllm.evaluation.generated.questions import QA, QA_FILES, Questions
from lazyllm.evaluation.generated.quotes import QUOTES
from lazyllm.evaluation.generated.ruler import ALONE, FURTHER, IN_TURN, OF_RULER, ONE_NEEDLE
from lazyllm.support import checked

KINDS = (*OF_RULER, *FURTHER, *QUOTES)
TASKS: Mapping[str, Kind] = MappingProxyType({kind.name: kind for kind in KINDS})
WHOLE_PARTS = {*QA, *(kind.name for kind in QUOTES)}  # which are not cut, so that items may be shorter


class TooShort(ValueError):
    """The length is less than a task's shortest item needs."""


def generate(
    task: str,
    encode: Encode,
    length: int,
    count: int,
    seed: int,
    depth: float | None = None,
    prose: Haystack | None = None,
    questions: Questions | None = None,
) -> list[Item]:
    """`count` items of a task, each of `length` tokens or up to 3 percent fewer.

    The length is that of the prompt, its chat template and the longest answer. `depth` is the needle's place
    in percent, for the tasks with one needle; None draws it. `prose` is the text around the needles, by
    default one made by rule; niah_single_1 and vt always have noise, niah_multikey_2 and _3 needles only.
    The tasks of QA need `questions`, and their items may be shorter, as documents are not cut.
    """
    kind = checked.entry(task, TASKS, "generated task")
    length, count = checked.whole(length, "length", 1), checked.whole(count, "count", 1)
    seed = checked.whole(seed, "seed", 0, checked.SEED_LIMIT)
    if depth is not None:
        depth = checked.number(depth, "depth")
        if not 0 <= depth <= 100:
            raise ValueError(f"depth must be from 0 to 100 percent, not {depth:g}")
        if task not in ONE_NEEDLE:
            raise ValueError(f"depth is for {', '.join(ONE_NEEDLE)}; {task} takes None")
        depth = int(depth) if depth.is_integer() else depth  # 50.0 and 50 make the same item
    if task in QA and questions is None:
        raise ValueError(f"{task} needs questions on documents: {QA_FILES}")
    items = []
    for number in range(count):
        # the same documents and questions in turn and alone
        draws = Draws(f"{IN_TURN if task == ALONE else task}/{length}/{seed}/{number}")
        (drawn,) = draws.depths(1)
        at = drawn if depth is None else depth
        spec = Spec(draws, at, prose or made_prose(), questions or Questions(), length, seed, number)
        items.append(make_item(kind, encode, spec))
    return items


def make_item(kind: Kind, encode: Encode, spec: Spec) -> Item:
    """The item, fitted to its length."""
    draft, length = kind.draft(spec), spec.length
    depth = spec.depth if kind.name in ONE_NEEDLE else None
    place = "" if depth is None else f"-depth{depth}"
    item = {
        "input": draft.input,
        "answer_prefix": draft.answer_prefix,
        "example": draft.example,
        "answers": draft.answers,
        "length": length,
        "dataset": kind.name,
        "language": "en",
        "all_classes": None,
        "context": "",
        "_id": f"{kind.name}-{length}{place}-seed{spec.seed}-{spec.number}",
        "depth": depth,
    }
    if draft.turns:
        item |= {"turns": draft.turns, "alone": kind.name == ALONE}

    def tokens(size: int) -> int:
        text = kind.template.format(**{**item, "context": draft.context(size)})
        return len(encode(text, draft.answer_prefix)) + kind.max_new_tokens

    size, fitted = fit(tokens, length, draft.min_size)
    where = f"length is {length}; item {spec.number} of {kind.name}"
    if fitted > length:
        raise TooShort(f"{where} needs at least {fitted} tokens")
    if kind.name not in WHOLE_PARTS and 100 * fitted < 97 * length:  # whole documents leave more room
        raise ValueError(f"{where} can only have {fitted} tokens or more than {length}")
    return item | {"context": draft.context(size)}


def fit(tokens: Callable[[int], int], length: int, min_size: int) -> tuple[int, int]:
    """A size and its number of tokens: at most `length`, and within 1 percent of it or the largest that fits.

    If even `min_size` is too large, `min_size` is returned.
    """
    low = high = (min_size, tokens(min_size))
    while high[1] <= length:
        low, high = high, (2 * high[0], tokens(2 * high[0]))
    for share in cycle((None, 0.5)):  # by turns where the tokens seem to be, and in the middle
        if high[0] - low[0] <= 1 or 100 * low[1] >= 99 * length:
            break
        share = share or (length - low[1]) / (high[1] - low[1])
        size = min(max(low[0] + int((high[0] - low[0]) * share), low[0] + 1), high[0] - 1)
        tried = size, tokens(size)
        low, high = (tried, high) if tried[1] <= length else (low, tried)
    return low
