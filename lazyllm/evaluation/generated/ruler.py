"""Drafts of RULER's tasks: needles, variables to follow, words to count."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice

from lazyllm.evaluation.generated.kinds import TEMPLATES, Draft, Spec
from lazyllm.evaluation.generated.material import Draws, codewords, distinct, names, noise, numbers, prose, vocabulary

Source = Callable[[Draws], Iterator[str]]
TURNS = 5
NEEDLE, ONE_OF_SEVERAL = "The secret code of {} is {}.", "One secret code of {} is {}."
MIN_WORDS = 30
NUMBER_FILLER, UUID_FILLER = 48, 160  # this many words of noise have more tokens than one needle


def hidden_needles(
    spec: Spec,
    in_noise: bool = False,
    values: Source = numbers,
    keys: int = 1,
    per_key: int = 1,
    asked: int = 1,
    in_turn: bool = False,
) -> Draft:
    """A text with `keys` keys of `per_key` codes, the first code at the item's depth; the question is for the
    codes of the first `asked` keys, or `in_turn` for the code of each key."""
    draws, text = spec.draws, noise() if in_noise else prose()
    all_keys = list(islice(distinct(names(draws.fork("keys")), text), keys))
    codes = list(islice(distinct(values(draws.fork("values")), text), keys * per_key))
    needle = ONE_OF_SEVERAL if per_key > 1 else NEEDLE
    needles = [needle.format(all_keys[place // per_key], code) for place, code in enumerate(codes)]
    depths = [spec.depth, *(depth for depth in draws.depths(len(needles)) if depth != spec.depth)]
    start = draws.below(len(text.sentences))
    asked_for, prefix = question(all_keys[:asked], per_key)

    def context(words: int) -> str:
        return text.around(zip(depths, needles, strict=False), words, start)

    draft = Draft(asked_for, codes[: asked * per_key], context, MIN_WORDS, prefix)
    if not in_turn:
        return draft
    turns = [
        {"input": question([key])[0], "answers": [code], "depth": depth}
        for key, code, depth in zip(all_keys, codes, depths, strict=False)
    ]
    return replace(draft, answer_prefix="", turns=turns)


def only_needles(spec: Spec, keys: Source, values: Source, filler: int) -> Draft:
    """A text of needles only; the question is for one of them. A needle adds `filler` to the size."""

    def pairs() -> Iterator[tuple[str, str]]:
        draws = spec.draws
        return zip(distinct(keys(draws.fork("keys"))), distinct(values(draws.fork("values"))), strict=False)

    def context(size: int) -> str:
        others, words = divmod(size, filler)
        needle, *text = (NEEDLE.format(key, code) for key, code in islice(pairs(), 1 + others))
        text.insert(round(others * spec.depth / 100), needle)
        return " ".join([*text, *noise().first(words)])

    key, code = next(pairs())
    asked, prefix = question([key])
    return Draft(asked, [code], context, filler, prefix)


def question(keys: Sequence[str], per_key: int = 1) -> tuple[str, str]:
    """The question for the codes of some keys, and the beginning of its answer."""
    listed = f"{', '.join(keys[:-1])} and {keys[-1]}" if len(keys) > 1 else keys[0]
    if per_key == len(keys) == 1:
        return f"What is the secret code of {listed}?", f" The secret code of {listed} is"
    codes = f"{per_key} secret codes" if per_key > 1 else "secret codes"
    return f"What are the {codes} of {listed}?", f" The {codes} of {listed} are"


HOPS = 4
EXAMPLE_WORDS = 300  # of noise in the example of variable tracking, which RULER fits to 500 tokens


def chained_variables(spec: Spec) -> Draft:
    """Variables assigned from one another, one step after the other, spread over the text."""
    shown = chain_of(spec.draws.fork("example"), letters=3)
    example = worked_example("vt", shown, shown.context(EXAMPLE_WORDS), " ".join(shown.answers))
    return replace(chain_of(spec.draws, letters=5), example=example)


def chain_of(draws: Draws, letters: int) -> Draft:
    """One chain of HOPS assignments, of variables of `letters` letters; its size is the words of noise."""
    found = islice(distinct(codewords(draws.fork("variables"), letters)), 1 + HOPS)
    variables = [name.upper() for name in found]
    value = next(numbers(draws, digits=5))
    steps = [f"Let {new} be {old}." for new, old in zip(variables, [value, *variables], strict=False)]
    depths = sorted(draws.depths(len(steps)))
    start = draws.below(len(noise().sentences))
    return Draft(
        f"Which {len(variables)} variables have the value {value}?",
        variables,
        lambda words: noise().around(zip(depths, steps, strict=True), words, start),
        MIN_WORDS,
        f" The {len(variables)} variables with the value {value} are:",
    )


def worked_example(task: str, draft: Draft, context: str, answer: str) -> str:
    """A whole prompt with its answer, to stand before the prompt that is to be answered."""
    prompt = TEMPLATES[task].format(example="", input=draft.input, context=context)
    return f"{prompt}{draft.answer_prefix} {answer}\n\n"


COMMON = 10
LONG = 4096  # tokens; longer items repeat their words more often
# repetitions of a common word and of another, in the list and in its example; the example's other words
SHORT_LIST, LONG_LIST = ((6, 1), (3, 1), 10), ((30, 3), (10, 3), 30)
FREQUENT = 3
DOTS_FILLER = 64  # this many dots have more tokens than the words that one step of the size adds
MIN_FREQUENCY = 32  # with at least this size the FREQUENT words are more frequent than any other


def common_words(spec: Spec) -> Draft:
    """A numbered list of words; its size is the number of entries besides the common words."""
    draws = spec.draws
    times, example_times, n_others = LONG_LIST if spec.length >= LONG else SHORT_LIST
    words = draws.fork("words").shuffled([*vocabulary("adjective"), *vocabulary("noun")])
    common, others = words[:COMMON], words[COMMON:]

    def context(size: int) -> str:
        further = (name for name in names(draws.fork("names")) if not {*name.split("-")} & {*common})
        uncommon = list(islice(chain(others, further), math.ceil(size / times[1])))
        return listed(draws.fork("order").shuffled([*common * times[0], *(uncommon * times[1])[:size]]))

    prefix = f" The {COMMON} words that come most often in the list are:"
    draft = Draft(f"Which {COMMON} words come most often in the list?", common, context, COMMON, prefix)
    shown = draws.fork("example words").shuffled(others)
    often, seldom = shown[:COMMON], shown[COMMON : COMMON + n_others]
    entries = draws.fork("example order").shuffled([*often * example_times[0], *seldom * example_times[1]])
    return replace(draft, example=worked_example("cwe", draft, listed(entries), listed(often)))


def listed(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def frequent_words(spec: Spec) -> Draft:
    """Code words, the one of rank r about 1 / r**2 times as often as dots.

    Between sizes that add words, each step of the size adds a dot.
    """
    draws = spec.draws

    def words(count: int) -> list[str]:
        return list(islice(distinct(codewords(draws.fork("words"), 6)), count))

    def context(size: int) -> str:
        n_most, dots = divmod(size, DOTS_FILLER)
        text = ["..."] * (n_most + dots)
        for rank, word in enumerate(words(math.isqrt(n_most) - 1), 2):
            text += [word] * (n_most // rank**2)
        return " ".join(draws.fork("order").shuffled(text))

    least = MIN_FREQUENCY * DOTS_FILLER
    prefix = f" The {FREQUENT} words that come most often in the text are:"
    return Draft(f"Which {FREQUENT} words come most often in the text?", words(FREQUENT), context, least, prefix)
