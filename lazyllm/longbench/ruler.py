"""Long-context tasks like RULER's, generated: needles to find, variables to follow, words to count.

An item has LongBench's fields and fills a prompt of any length in the model's own tokens; the same seed gives
the same item on every machine. `string_match` scores the answers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from hashlib import sha256
from itertools import cycle, islice
from numbers import Real
from operator import index
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any, Protocol, TypeVar
from uuid import UUID

Drawn = TypeVar("Drawn")
Item = dict[str, Any]


class Encoder(Protocol):
    """A tokenizer, as far as it is needed here."""

    def encode(self, text: str, /) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class Task:
    """How one task is asked: `template.format(**item)` is the prompt."""

    name: str
    category: str
    template: str
    max_new_tokens: int


# ---- draws ---------------------------------------------------------------------------------------


class Draws:
    """Random choices that belong to a label.

    Of Python's generator only random() is promised to stay as it is, so all of them are made from it.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._random = Random(int.from_bytes(sha256(label.encode()).digest(), "big")).random

    def fork(self, name: str) -> Draws:
        """Other choices, which are the same however many were made here before."""
        return Draws(f"{self._label}/{name}")

    def below(self, count: int) -> int:
        return int(self._random() * count)

    def percent(self) -> int:
        return self.below(101)

    def order(self, count: int) -> Iterator[int]:
        """0 to count - 1, shuffled as they are asked for."""
        moved: dict[int, int] = {}
        for place in range(count):
            taken = place + self.below(count - place)
            displaced = moved.pop(place, place)
            if taken == place:
                yield displaced
            else:
                yield moved.get(taken, taken)
                moved[taken] = displaced

    def shuffled(self, values: Sequence[Drawn]) -> list[Drawn]:
        return [values[place] for place in self.order(len(values))]


# ---- names, numbers and codes --------------------------------------------------------------------

WORD_LIST = """
acorn amber anchor apple april arrow autumn badger bamboo barley basket beacon beaver beetle bishop blanket
bottle branch bridge bronze bucket butter button cabin cactus camel candle canyon carbon carpet castle cedar
cherry chimney cider circus clover cobalt coffee comet copper coral cotton cradle cricket crystal curtain
daisy desert diamond dolphin dragon eagle echo ember engine falcon feather ferry fiddle flannel forest
fossil fountain galaxy garden garlic ginger glacier goblet granite guitar hammer harbor harvest hazel helmet
heron hollow honey horizon igloo indigo island ivory jacket jasmine jelly jigsaw jungle juniper kayak kernel
kettle kitten ladder lagoon lantern laurel lemon leopard lily linen lizard lotus magnet mango mantle maple
marble meadow melon meteor mirror monsoon mosaic mustard napkin nectar needle nutmeg oasis ocean olive onion
opal orbit orchid otter oyster paddle palace panther paper parrot peach pebble pelican pencil pepper piano
pigeon pillow pirate planet plaza pocket pollen poppy prairie pumpkin puzzle quartz rabbit radish raven
ribbon river robin rocket saddle saffron salmon sandal sapphire scarlet shadow silver spider sponge squirrel
summit sunset table teapot temple thistle thunder tiger timber tomato tulip tunnel turtle umbrella
valley vanilla velvet violin volcano wagon walnut water willow window winter wizard yogurt zebra zipper
"""
WORDS = tuple(WORD_LIST.split())
CONSONANTS = "bcdfghjklmnpqrstvwxz"


def names(draws: Draws) -> Iterator[str]:
    """Two words each, no name twice."""
    others = len(WORDS) - 1
    for pair in draws.order(len(WORDS) * others):
        first, second = divmod(pair, others)
        yield f"{WORDS[first]}-{WORDS[second + (second >= first)]}"
    raise ValueError(
        f"an item so long needs more than the {len(WORDS) * others} names there are; use a smaller length"
    )


def numbers(draws: Draws, digits: int = 7) -> Iterator[str]:
    least = 10 ** (digits - 1)
    while True:
        yield str(least + draws.below(9 * least))


def uuids(draws: Draws) -> Iterator[str]:
    while True:
        parts = [draws.below(1 << 32) for _ in range(4)]
        yield str(UUID(int=sum(part << 32 * place for place, part in enumerate(parts)), version=4))


def codewords(draws: Draws, letters: int) -> Iterator[str]:
    """Without vowels, so that none is a word of a text."""
    while True:
        yield "".join(CONSONANTS[draws.below(len(CONSONANTS))] for _ in range(letters))


# ---- the text around the needles -----------------------------------------------------------------

SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[.!?][\"'”’)])\s+|\n\s*\n")  # noqa: RUF001 - quotation marks


class Haystack:
    """Sentences that are repeated for as long as the text has to be."""

    def __init__(self, text: str) -> None:
        sentences = (" ".join(sentence.split()) for sentence in SENTENCE_END.split(text))
        self.sentences = [sentence for sentence in sentences if sentence]
        self._folded = " ".join(self.sentences).casefold()

    @classmethod
    def read(cls, folder: str | Path) -> Haystack:
        """From the .txt files in a folder, in the order of their names."""
        path = Path(folder)
        if not path.is_dir():
            raise FileNotFoundError(f"prose: {path} is no folder; expected one with .txt files")
        made = cls("\n\n".join(map(read_text, sorted(path.glob("*.txt"), key=lambda file: file.name))))
        if not made.sentences:
            raise ValueError(f"prose: {path} has no .txt file with text in it")
        return made

    def holds(self, text: str) -> bool:
        return text.casefold() in self._folded

    def first(self, words: int, start: int = 0) -> list[str]:
        """Sentences of so many words in all from sentence `start` on, the last one cut to fit."""
        taken: list[str] = []
        for sentence in islice(cycle(self.sentences), start, None):
            if words <= 0:
                break
            parts = sentence.split()
            whole = len(parts) <= words
            taken.append(sentence if whole else " ".join(parts[:words]).rstrip(",;:.") + ".")
            words -= len(parts)
        return taken

    def around(self, needles: Iterable[tuple[float, str]], words: int, start: int) -> str:
        """So many words with each needle between two sentences, as deep as its percentage says."""
        sentences = self.first(words, start)
        ends = [0]
        for sentence in sentences:
            ends.append(ends[-1] + len(sentence.split()))
        placed: list[list[str]] = [[] for _ in ends]
        for percent, needle in needles:
            wanted = words * percent / 100
            nearest = min(range(len(ends)), key=lambda place: abs(ends[place] - wanted))
            placed[nearest].append(needle)
        text = [*placed[0]]
        for sentence, after in zip(sentences, placed[1:], strict=True):
            text += [sentence, *after]
        return " ".join(text)


def read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"prose: {file} is not UTF-8 text: {error}") from None


NOISE = Haystack(
    """
    The road is long and the day is mild. Rain comes early and is gone by noon. A cart goes by, and then
    another one. The clock on the wall keeps its own time. Leaves come down and nobody counts them. There is
    bread on the shelf and milk in the jug. Some people walk, and others stay where they are. The hill looks
    the same from either side. Evening comes, the lamps are lit, and it is quiet again.
    """
)


def distinct(candidates: Iterable[str], text: Haystack = NOISE) -> Iterator[str]:
    """Each candidate once, without those that the text holds by itself."""
    seen: set[str] = set()
    for candidate in candidates:
        if candidate not in seen and not text.holds(candidate):
            seen.add(candidate)
            yield candidate


# ---- the tasks -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """What a draft is made from."""

    draws: Draws
    depth: float
    prose: Haystack
    length: int


@dataclass(frozen=True)
class Draft:
    """An item of no length yet: `context` gives more text for a larger size, which is at least `least`."""

    input: str
    answers: list[str]
    context: Callable[[int], str]
    least: int


Source = Callable[[Draws], Iterator[str]]

NEEDLE, ONE_OF_SEVERAL = "The secret code of {} is {}.", "One secret code of {} is {}."
LEAST_WORDS = 30
NUMBER_FILLER, UUID_FILLER = 48, 160  # words of noise that take more tokens than one needle
HOPS = 4
COMMON = 10
LONG = 4096  # tokens from which on words come more often
TIMES, LONG_TIMES = (6, 1), (30, 3)  # of a common and of any other word
FREQUENT = 3
DOTS_FILLER = 64  # dots that take more tokens than the words of one step
LEAST_FREQUENCY = 32  # from here on no other word comes as often as one of the FREQUENT


def hidden_needles(
    request: Request,
    *,
    noise: bool = False,
    values: Source = numbers,
    keys: int = 1,
    each: int = 1,
    asked: int = 1,
) -> Draft:
    """`each` codes for each of the keys in a text, the first `asked` of which are asked for."""
    draws, text = request.draws, NOISE if noise else request.prose
    named = list(islice(distinct(names(draws.fork("keys")), text), keys))
    codes = list(islice(distinct(values(draws.fork("values")), text), keys * each))
    needle = ONE_OF_SEVERAL if each > 1 else NEEDLE
    needles = [needle.format(named[place // each], code) for place, code in enumerate(codes)]
    percents = [request.depth, *(draws.percent() for _ in needles[1:])]
    start = draws.below(len(text.sentences))
    return Draft(
        question(named[:asked], each),
        codes[: asked * each],
        lambda words: text.around(zip(percents, needles, strict=True), words, start),
        LEAST_WORDS,
    )


def only_needles(request: Request, *, keys: Source, values: Source, filler: int) -> Draft:
    """A text of nothing but codes of other keys; its size counts a needle as `filler` words of noise."""
    draws = request.draws

    def pairs() -> Iterator[tuple[str, str]]:
        named, codes = distinct(keys(draws.fork("keys"))), distinct(values(draws.fork("values")))
        return zip(named, codes, strict=False)

    def context(size: int) -> str:
        others, words = divmod(size, filler)
        asked, *text = (NEEDLE.format(key, code) for key, code in islice(pairs(), 1 + others))
        text.insert(round(others * request.depth / 100), asked)
        return " ".join([*text, *NOISE.first(words)])

    key, code = next(pairs())
    return Draft(question([key], 1), [code], context, filler)


def question(keys: Sequence[str], each: int) -> str:
    listed = f"{', '.join(keys[:-1])} and {keys[-1]}" if len(keys) > 1 else keys[0]
    if each > 1:
        return f"What are the {each} secret codes of {listed}? The {each} secret codes of {listed} are"
    if len(keys) > 1:
        return f"What are the secret codes of {listed}? The secret codes of {listed} are"
    return f"What is the secret code of {listed}? The secret code of {listed} is"


def chained_variables(request: Request) -> Draft:
    """A value that variables take over from each other, step by step, all through the text."""
    draws = request.draws
    variables = [name.upper() for name in islice(distinct(codewords(draws.fork("variables"), 5)), 1 + HOPS)]
    value = next(numbers(draws, digits=5))
    steps = [f"Let {new} be {old}." for new, old in zip(variables, [value, *variables], strict=False)]
    percents = sorted(draws.percent() for _ in steps)
    start = draws.below(len(NOISE.sentences))
    return Draft(
        f"Which {len(variables)} variables have the value {value}? The variables with the value {value} are",
        variables,
        lambda words: NOISE.around(zip(percents, steps, strict=True), words, start),
        LEAST_WORDS,
    )


def common_words(request: Request) -> Draft:
    """A numbered list; its size counts the entries that are not the words asked for."""
    draws = request.draws
    often, seldom = LONG_TIMES if request.length >= LONG else TIMES

    def context(size: int) -> str:
        words = list(islice(names(draws.fork("words")), COMMON + math.ceil(size / seldom)))
        entries = [*words[:COMMON] * often, *(words[COMMON:] * seldom)[:size]]
        listed = draws.fork("order").shuffled(entries)
        return " ".join(f"{number}. {word}" for number, word in enumerate(listed, 1))

    return Draft(
        f"Which {COMMON} words come most often in the list? The {COMMON} words that come most often are",
        list(islice(names(draws.fork("words")), COMMON)),
        context,
        COMMON,
    )


def frequent_words(request: Request) -> Draft:
    """Dots, and words whose counts fall with the square of their rank; a size in between has more dots."""
    draws = request.draws

    def words(count: int) -> list[str]:
        return list(islice(distinct(codewords(draws.fork("words"), 6)), count))

    def context(size: int) -> str:
        most, dots = divmod(size, DOTS_FILLER)
        text = ["..."] * (most + dots)
        for rank, word in enumerate(words(math.isqrt(most) - 1), 2):
            text += [word] * (most // rank**2)
        return " ".join(draws.fork("order").shuffled(text))

    return Draft(
        f"Which {FREQUENT} words come most often in the text? The {FREQUENT} words that come most often are",
        words(FREQUENT),
        context,
        LEAST_FREQUENCY * DOTS_FILLER,
    )


DRAFTS: Mapping[str, Callable[[Request], Draft]] = {
    "niah_single_1": partial(hidden_needles, noise=True),
    "niah_single_2": hidden_needles,
    "niah_single_3": partial(hidden_needles, values=uuids),
    "niah_multikey_1": partial(hidden_needles, keys=4),
    "niah_multikey_2": partial(only_needles, keys=names, values=numbers, filler=NUMBER_FILLER),
    "niah_multikey_3": partial(only_needles, keys=uuids, values=uuids, filler=UUID_FILLER),
    "niah_multivalue": partial(hidden_needles, each=4),
    "niah_multiquery": partial(hidden_needles, keys=4, asked=4),
    "vt": chained_variables,
    "cwe": common_words,
    "fwe": frequent_words,
}
ONE_NEEDLE = tuple(name for name in DRAFTS if name.startswith(("niah_single", "niah_multikey")))

# Each input ends where its answer begins, so that models without a chat template answer it, too.
RETRIEVAL = """\
Read the text and keep its secret codes in mind.

{context}

{input}"""
TRACKING = """\
Read the text and keep in mind which value each variable has. A variable may take the value of another one.

Let MOON be 12. There is bread on the shelf. Let STAR be MOON.

Which 2 variables have the value 12? The variables with the value 12 are MOON, STAR.

{context}

{input}"""
COMMON_WORDS = """\
Read the list of words and keep count of them. Some come often, the others seldom.

1. moon 2. star 3. sun 4. moon 5. star 6. moon 7. star

Which 2 words come most often in the list? The 2 words that come most often are moon, star.

{context}

{input}"""
FREQUENT_WORDS = """\
Read the text of code words and keep count of each of them. The dots between them do not count.

{context}

{input}"""


def _tasks() -> Iterator[Task]:
    for name in DRAFTS:
        if name.startswith("niah"):
            yield Task(name, "Retrieval", RETRIEVAL, 128)
    yield Task("vt", "Multi-hop Tracing", TRACKING, 64)
    yield Task("cwe", "Aggregation", COMMON_WORDS, 120)
    yield Task("fwe", "Aggregation", FREQUENT_WORDS, 50)


TASKS: Mapping[str, Task] = MappingProxyType({task.name: task for task in _tasks()})


# ---- items ---------------------------------------------------------------------------------------


def generate(
    task: str,
    tokenizer: Encoder,
    length: int,
    count: int,
    seed: int,
    depth: float | None = None,
    prose: str | Path | Haystack | None = None,
) -> list[Item]:
    """`count` items of a task, each with a prompt of `length` tokens: never more, at most 3 percent fewer.

    The tokens of a chat template and of the answer come on top. `depth` is where the needle is, in percent,
    for the tasks with one needle; None draws it. `prose`, a folder of .txt files, is the text around the
    needles; None takes noise, as niah_single_1 always does (niah_multikey_2 and _3 are needles only).
    """
    chosen = find_task(task)
    length, count, seed = whole("length", length, 1), whole("count", count, 1), whole("seed", seed, 0)
    at = percentage(chosen, depth)
    text = prose if isinstance(prose, Haystack) else NOISE if prose is None else Haystack.read(prose)
    return [make_item(chosen, tokenizer, length, seed, number, at, text) for number in range(count)]


def find_task(name: str) -> Task:
    """The task of that name; ValueError names those that come close."""
    if not isinstance(name, str):
        raise TypeError(f"a task is named by a string, not {name!r}")
    if name in TASKS:
        return TASKS[name]
    close = get_close_matches(name.lower(), TASKS, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else f"expected one of {', '.join(TASKS)}"
    raise ValueError(f"there is no task {name!r}; {hint}")


def whole(name: str, value: int, least: int) -> int:
    try:
        number = index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {value!r}") from None
    if isinstance(value, bool):
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    if number < least:
        raise ValueError(f"{name} must be at least {least}, not {number}")
    return number


def percentage(task: Task, depth: float | None) -> float | None:
    """The depth, a whole number wherever it is one, so that 50.0 and 50 make the same item."""
    if depth is None:
        return None
    if isinstance(depth, bool) or not isinstance(depth, Real):
        raise TypeError(f"depth must be a percentage or None, not {depth!r}")
    if not 0 <= depth <= 100:
        raise ValueError(f"depth must be from 0 to 100 percent, not {depth}")
    if task.name not in ONE_NEEDLE:
        raise ValueError(f"depth is for {', '.join(ONE_NEEDLE)}; {task.name} takes None")
    return int(depth) if depth == int(depth) else float(depth)


def make_item(
    task: Task, tokenizer: Encoder, length: int, seed: int, number: int, depth: float | None, prose: Haystack
) -> Item:
    draws = Draws(f"{task.name}/{length}/{seed}/{number}")
    drawn = draws.percent()
    at = drawn if depth is None else depth
    draft = DRAFTS[task.name](Request(draws, at, prose, length))

    def tokens(size: int) -> int:
        prompt = task.template.format(input=draft.input, context=draft.context(size))
        return len(tokenizer.encode(prompt))

    size, fitted = fit(tokens, length, draft.least)
    if fitted > length:
        raise ValueError(f"length is {length}; item {number} of {task.name} needs at least {fitted} tokens")
    if not nearly(fitted, length, percent=97):
        raise ValueError(
            f"length is {length}; the nearest below for item {number} of {task.name} is {fitted} tokens"
        )
    one_needle = task.name in ONE_NEEDLE
    where = f"-depth{at}" if one_needle else ""
    return {
        "input": draft.input,
        "context": draft.context(size),
        "answers": draft.answers,
        "length": length,
        "dataset": task.name,
        "language": "en",
        "all_classes": None,
        "_id": f"{task.name}-{length}{where}-seed{seed}-{number}",
        "depth": at if one_needle else None,
    }


def nearly(tokens: int, length: int, percent: int) -> bool:
    return 100 * tokens >= percent * length


def fit(tokens: Callable[[int], int], length: int, least: int) -> tuple[int, int]:
    """A size and its tokens: at most 1 percent below `length`, or so many that the next size is too large.

    Only if the least size is too large is it the one returned.
    """
    low, low_tokens = least, tokens(least)
    high, high_tokens = low, low_tokens
    while high_tokens <= length:
        low, low_tokens = high, high_tokens
        high *= 2
        high_tokens = tokens(high)
    halve = False
    while high - low > 1 and not nearly(low_tokens, length, percent=99):
        share = 0.5 if halve else (length - low_tokens) / (high_tokens - low_tokens)
        size = min(max(low + int((high - low) * share), low + 1), high - 1)
        size_tokens = tokens(size)
        if size_tokens <= length:
            low, low_tokens = size, size_tokens
        else:
            high, high_tokens = size, size_tokens
        halve = not halve
    return low, low_tokens
