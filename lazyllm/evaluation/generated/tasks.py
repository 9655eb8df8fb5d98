"""Generated tasks: the table of their kinds, their items by length or depth, and what the runner asks for."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from statistics import fmean
from types import MappingProxyType
from typing import Any

from lazyllm.checkpoints.tokenizer import Tokenizer
from lazyllm.evaluation.chats import AnyWrapper, chat_wrapper, wrapped_ids
from lazyllm.evaluation.generated import quotes, ruler
from lazyllm.evaluation.generated.kinds import Draft, Encode, Item, Kind, Spec
from lazyllm.evaluation.generated.material import Draws, names, numbers, uuids
from lazyllm.evaluation.options import NiahOptions, RulerOptions
from lazyllm.evaluation.tasks import ItemPrompt, Shorten, Tasks
from lazyllm.generation import Request
from lazyllm.llm import LLM
from lazyllm.support import checked

RULER, NIAH = "ruler", "niah"
AT = "@"  # niah_single_1@4096: a task at a length is a data set of its own

# ---- the kinds -----------------------------------------------------------------------------------

NEEDLES: Mapping[str, Callable[[Spec], Draft]] = {
    "niah_single_1": partial(ruler.hidden_needles, in_noise=True),
    "niah_single_2": ruler.hidden_needles,
    "niah_single_3": partial(ruler.hidden_needles, values=uuids),
    "niah_multikey_1": partial(ruler.hidden_needles, keys=4),
    "niah_multikey_2": partial(ruler.only_needles, keys=names, values=numbers, filler=ruler.NUMBER_FILLER),
    "niah_multikey_3": partial(ruler.only_needles, keys=uuids, values=uuids, filler=ruler.UUID_FILLER),
    "niah_multivalue": partial(ruler.hidden_needles, per_key=4),
    "niah_multiquery": partial(ruler.hidden_needles, keys=4, asked=4),
}
ONE_NEEDLE = tuple(NEEDLES)[:6]  # niah_single_* and niah_multikey_*
IN_NOISE = ONE_NEEDLE[0]
IN_TURN, ALONE = "niah_turns", "niah_alone"
in_turn = partial(ruler.hidden_needles, keys=ruler.TURNS, in_turn=True)
OF_RULER = (
    *(Kind(name, "Retrieval", 128, draft, one_needle=name in ONE_NEEDLE) for name, draft in NEEDLES.items()),
    Kind("vt", "Multi-hop Tracing", 30, ruler.chained_variables),
    Kind("cwe", "Aggregation", 120, ruler.common_words),
    Kind("fwe", "Aggregation", 50, ruler.frequent_words),
)
FURTHER = (
    Kind(IN_TURN, "Turns", 32, in_turn),
    Kind(ALONE, "Turns", 32, in_turn, alone=True),
    Kind("quote_lines", "Quotes", 160, quotes.quoted_lines, quotes.quote_score, whole_parts=True),
    Kind("quote_paragraph", "Quotes", 160, quotes.quoted_paragraph, quotes.quote_score, whole_parts=True),
    Kind("quote_function", "Quotes", 160, quotes.quoted_function, quotes.quote_score, whole_parts=True),
)
TASKS: Mapping[str, Kind] = MappingProxyType({kind.name: kind for kind in (*OF_RULER, *FURTHER)})


def task_and_length(data_set: str) -> tuple[str, int]:
    task, _, length = data_set.partition(AT)
    return task, int(length)


def kind_of(data_set: str) -> Kind:
    return TASKS[task_and_length(data_set)[0]]


# ---- items ---------------------------------------------------------------------------------------


def generate(task: str, encode: Encode, length: int, count: int, seed: int, depth: float | None = None) -> list[Item]:
    """`count` items of a task, each of `length` tokens or up to 3 percent fewer.

    The length is that of the prompt, its chat template and the longest answer. `depth` is the needle's place
    in percent, for the tasks with one needle; None draws it.
    """
    kind = checked.entry(task, TASKS, "generated task")
    length, count = checked.whole(length, "length", 1), checked.whole(count, "count", 1)
    seed = checked.whole(seed, "seed", 0, checked.SEED_LIMIT)
    if depth is not None:
        depth = checked.number(depth, "depth")
        if not 0 <= depth <= 100:
            raise ValueError(f"depth must be from 0 to 100 percent, not {depth:g}")
        depth = int(depth) if depth.is_integer() else depth  # 50.0 and 50 make the same item
    items = []
    for number in range(count):
        # the same texts and questions in turn and alone
        draws = Draws(f"{IN_TURN if kind.alone else task}/{length}/{seed}/{number}")
        (drawn,) = draws.depths(1)
        spec = Spec(draws, drawn if depth is None else depth, length, seed, number)
        items.append(kind.item(encode, spec))
    return items


def prompt_encoder(tokenizer: Tokenizer, wrapper: AnyWrapper) -> Encode:
    chosen = chat_wrapper(tokenizer, wrapper)
    return lambda text, answer_prefix: wrapped_ids(tokenizer, text, chosen, answer_prefix)


def generated_items(encode: Encode, options: RulerOptions | NiahOptions) -> dict[str, list[Item]]:
    """The items of each task at each length, by data set; the default tasks are RULER's.

    With NiahOptions, those with a needle at each depth: ids are DEPTH/NUMBER, such as 50/0, and items of equal
    length and number differ only in depth.
    """
    checked.a_list(options.lengths, "lengths", "[1024, 4096]")
    items_of = partial(generate, encode=encode, count=options.count, seed=options.seed)
    if isinstance(options, NiahOptions):
        checked.a_list(options.depths, "depths", "[0, 50, 100]")
        for name, values in (("lengths", options.lengths), ("depths", options.depths)):
            if not len(values) or len({*values}) < len(values):
                raise ValueError(f"{name} must be different numbers, at least one, not {values!r}")
        return {
            f"{IN_NOISE}{AT}{length}": [
                {**item, "_id": f"{depth:g}/{number}"}
                for depth in options.depths
                for number, item in enumerate(items_of(IN_NOISE, length=length, depth=depth))
            ]
            for length in options.lengths
        }
    checked.a_list(options.tasks, "tasks", '["niah_single_1"]')
    tasks = options.tasks or [kind.name for kind in OF_RULER]
    return {f"{name}{AT}{length}": items_of(name, length=length) for length in options.lengths for name in tasks}


def needles_found(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[tuple[float, int], float]]:
    """By setting, then by depth and length: the mean score of a niah run's result rows, 0 to 100."""
    scores: dict[str, dict[tuple[float, int], list[float]]] = {}
    for row in rows:
        place = float(row["item"].partition("/")[0]), task_and_length(row["dataset"])[1]
        scores.setdefault(row["setting"], {}).setdefault(place, []).append(100 * row["score"])
    return {
        setting: {place: fmean(values) for place, values in by_place.items()} for setting, by_place in scores.items()
    }


class GeneratedTasks(Tasks):
    """The generated tasks for the runner."""

    def __init__(self, llm: LLM, options: RulerOptions | NiahOptions, max_new_tokens: int | None = None) -> None:
        self.items = generated_items(prompt_encoder(llm.tokenizer, options.wrapper), options)
        self.selection, self.wrapper, self.cap = options.selection, options.wrapper, max_new_tokens
        kind = NIAH if isinstance(options, NiahOptions) else RULER
        self.conditions = {"tasks": kind, "cap on new tokens": max_new_tokens}

    def check(self, llm: LLM) -> None:
        for items in self.items.values():
            if (length := items[0]["length"]) > llm.config.context:
                context = f"the model's context of {llm.config.context}"
                raise ValueError(f"length {length}, a prompt and its answer, is more than {context}")

    def request(self, llm: LLM, name: str) -> Request:
        limit = kind_of(name).max_new_tokens
        return Request(min(limit, self.cap or limit), progress=False)

    def prompt(self, llm: LLM, name: str, item: Mapping[str, Any], shorten: Shorten | None = None) -> ItemPrompt:
        text, wrapper = self._text(name, item, shorten), chat_wrapper(llm.tokenizer, self.wrapper)
        return ItemPrompt(wrapped_ids(llm.tokenizer, text, wrapper, item["answer_prefix"]), False, wrapper)

    def turns(self, name: str, item: Mapping[str, Any]) -> list[str]:
        questions = item["turns"]
        if item["alone"]:
            return [self._text(name, {**item, **question}) for question in questions]
        return [self._text(name, item), *(question["input"] for question in questions[1:])]

    def _text(self, name: str, item: Mapping[str, Any], shorten: Shorten | None = None) -> str:
        context = shorten(item["context"]) if shorten else item["context"]
        return kind_of(name).template.format(**{**item, "context": context})

    def score(self, name: str, prediction: str, item: Mapping[str, Any]) -> dict[str, float]:
        return kind_of(name).score(prediction, item["answers"])
