"""OpenAI's requests, checked, and its answers: /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

from lazyllm.generation import Generation
from lazyllm.llm import LLM
from lazyllm.method import Method, Spans
from lazyllm.methods.compression import PromptCompression
from lazyllm.methods.parsing import BUILT_IN, SPEEDUP, as_method
from lazyllm.prefix_cache import shared
from lazyllm.prompt import checked_ids, checked_messages, is_batch
from lazyllm.sampling import SamplingParams
from lazyllm.support import checked
from lazyllm.support.json_text import parse_object

T = TypeVar("T")
MOST_ANSWERS, MOST_LOGPROBS, MOST_STOPS = 128, 20, 16
COMPLETION_TOKENS, CHAT_TOKENS = 16, 1024
"""New tokens where a request sets no limit; in a chat fewer, if the context leaves fewer."""
SAMPLING = tuple(item.name for item in fields(SamplingParams))
SHARED = (
    *("model", "max_tokens", "stop", "stop_token_ids", "n", "stream", "stream_options", "logprobs"),
    "lazyllm",
)
CHAT = ("messages", "tools", "max_completion_tokens", "top_logprobs", "chat_template_kwargs")
WITHOUT_EFFECT = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
ONLY: Mapping[str, Any] = {
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0,
    "function_call": "auto",
    "functions": [],
    "logit_bias": {},
    "modalities": ["text"],
    "parallel_tool_calls": True,
    "presence_penalty": 0,
    "response_format": {"type": "text"},
    "suffix": "",
    "tool_choice": "auto",
}
"""Fields of which one value alone is accepted, the one that asks for nothing."""


class NoSuchModel(ValueError):
    """The request names another model than the one that is served."""


@dataclass(frozen=True)
class Ask:
    """A checked request: the prompts as token ids, and how to answer each."""

    prompts: list[list[int]]
    pruning: Method | None  # None: the server's own
    options: dict[str, Any]  # of `LLM.generate`
    n: int
    chat: bool
    stream: bool
    include_usage: bool
    top_logprobs: int | None  # None: no log probabilities
    protected: Spans  # of the prompt, which is never dropped
    id: str = field(default_factory=lambda: uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def sampling(self) -> SamplingParams:
        sampling: SamplingParams = self.options["sampling"]
        return sampling


def checked_request(llm: LLM, model: str, body: bytes, chat: bool, roles: Sequence[str] = ()) -> Ask:
    """The request in a body; ValueError or TypeError, in one sentence, for anything that cannot be done. What
    the messages of `roles` say is protected."""
    given = parse_object(body, "the request's body", strict=True)
    given = {name: value for name, value in given.items() if value is not None}
    known = (*SHARED, *SAMPLING, *WITHOUT_EFFECT, *ONLY, *(CHAT if chat else ("prompt",)))
    checked.known_names(given, known, "a request")
    for name, value in ONLY.items():
        if given.get(name, value) != value:
            raise ValueError(f"{name} is not supported; leave it out")
    if given.get("model", model) != model:
        raise NoSuchModel(f"there is no model {given['model']!r:.200}; this server has {model!r}")
    stream_options, own = _typed(given, "stream_options", dict), _typed(given, "lazyllm", dict)
    checked.known_names(stream_options, ("include_usage",), "stream_options")
    checked.known_names(own, ("pruning", "trace"), "lazyllm")
    ids, protected = _chat_ids(llm, given, roles) if chat else ([], ())
    prompts = [ids] if chat else _prompt_ids(llm, given.get("prompt"))
    n = checked.whole(given.get("n", 1), "n", 1, MOST_ANSWERS + 1)
    sampling = SamplingParams.of(llm)
    sampling = SamplingParams(**{name: given.get(name, getattr(sampling, name)) for name in SAMPLING})
    if n > 1 and not sampling.temperature:
        raise ValueError(f"{n} answers to a prompt differ only with a temperature above 0")
    top_logprobs = _top_logprobs(given, chat)
    options = {
        "max_new_tokens": _most_tokens(llm, given, prompts, chat),
        "sampling": sampling,
        "stop": _stops(given.get("stop", ())),
        "stop_token_ids": _typed(given, "stop_token_ids", list),
        "logprobs": 0 if top_logprobs is None else max(1, top_logprobs),
        "trace": checked.truth(own.get("trace", False), "trace"),
        "progress": False,
    }
    return Ask(
        prompts,
        _setting(own["pruning"]) if own.get("pruning") is not None else None,
        options,
        n,
        chat,
        checked.truth(given.get("stream", False), "stream"),
        checked.truth(stream_options.get("include_usage", False), "include_usage"),
        top_logprobs,
        protected,
    )


def _typed(given: Mapping[str, Any], name: str, kind: type[T]) -> T:
    """The field's object or list, an empty one where there is none."""
    value = given.get(name, kind())
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {'a list' if kind is list else 'an object'}, not {value!r:.80}")
    return value


def _chat_ids(llm: LLM, given: Mapping[str, Any], roles: Sequence[str]) -> tuple[list[int], Spans]:
    """The token ids that the chat template makes of the messages and tools; and for each of the roles where
    they differ from those of a chat in which its messages say something else, or that has no tools."""
    messages, tools = checked_messages(_typed(given, "messages", list)), _typed(given, "tools", list)
    variables = _typed(given, "chat_template_kwargs", dict)
    if not messages:
        raise ValueError("messages must be a list of at least one message")
    ids, spans = llm.tokenizer.apply_chat_template(messages, tools=tools, **variables), []
    for role in roles:
        texts = [str(message.get("content")) for message in messages if message["role"] == role] or [""]
        ends = texts[0].strip()[:1] + texts[-1].strip()[-1:]
        mark = {"content": next(mark for mark in "xyz" if mark not in ends)}
        others = [message | (mark if message["role"] == role else {}) for message in messages]
        other = llm.tokenizer.apply_chat_template(others, tools=tools if role != "tools" else [], **variables)
        first = shared(ids, other)
        end = len(ids) - shared(ids[first:][::-1], other[first:][::-1])
        spans += [(first, end)] if end > first else []
    return ids, tuple(spans)


def _prompt_ids(llm: LLM, prompt: Any) -> list[list[int]]:
    if not isinstance(prompt, str | list) or prompt in ("", []):
        raise TypeError("prompt must be text, token ids, or a list of those")
    prompts = prompt if is_batch(prompt) else [prompt]
    if len(prompts) > MOST_ANSWERS:
        raise ValueError(f"{len(prompts)} prompts are more than the {MOST_ANSWERS} of one request")
    encoded = (llm.tokenizer.encode(item) if isinstance(item, str) else item for item in prompts)
    return [checked_ids(ids, llm.config.vocab) for ids in encoded]


def _most_tokens(llm: LLM, given: Mapping[str, Any], prompts: Sequence[Sequence[int]], chat: bool) -> int:
    """The limit of new tokens, which the context has room for behind each prompt."""
    longest, context = max(map(len, prompts)), llm.config.context
    most = given.get("max_completion_tokens", given.get("max_tokens"))
    if most is None:
        most = min(CHAT_TOKENS, max(1, context - longest)) if chat else COMPLETION_TOKENS
    most = checked.whole(most, "max_tokens", 1)
    if longest + most > context:
        raise ValueError(
            f"{longest} prompt tokens and {most} new ones exceed the model's context of {context}"
        )
    return most


def _stops(stop: Any) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list | tuple) else stop
    if not isinstance(stops, tuple) or not all(isinstance(item, str) for item in stops):
        raise TypeError(f"stop must be text or a list of texts, not {stop!r:.80}")
    if len(stops) > MOST_STOPS:
        raise ValueError(f"{len(stops)} stop texts are more than {MOST_STOPS}")
    return stops


def _top_logprobs(given: Mapping[str, Any], chat: bool) -> int | None:
    """How many log probabilities each token of the answer shows beside its own; None for not even that."""
    top = given.get("top_logprobs" if chat else "logprobs")
    if top is not None:
        top = checked.whole(top, "top_logprobs" if chat else "logprobs", 0, MOST_LOGPROBS + 1)
    if not chat or checked.truth(given.get("logprobs", False), "logprobs"):
        return top or 0 if chat else top
    if top:
        raise ValueError("top_logprobs needs logprobs to be true")
    return None


def _setting(pruning: Any) -> Method:
    """A setting that a client may ask for: none that opens files of the server or rewrites prompts."""
    allowed = [name for name, cls in BUILT_IN.items() if not issubclass(cls, PromptCompression)]
    if isinstance(pruning, str):
        if pruning.strip() != "dense" and not SPEEDUP.fullmatch(pruning.strip()):
            raise ValueError(
                f'pruning is {pruning!r:.80}; it must be "dense", a speedup such as "2x" or 2.0, or an '
                'object: stages such as {"10": 0.7}, or the fields of a Pruning or another method'
            )
    elif isinstance(pruning, Mapping):
        checked.choice(pruning.get("method", allowed[0]), "method", allowed)
    return as_method(pruning)


# ---- answers -------------------------------------------------------------------------------------


class Answered(NamedTuple):
    """An answer at its end, and the measured speedup of its setting so far, None before there is one."""

    generation: Generation
    measured_speedup: float | None


def happened(answered: Answered) -> dict[str, Any]:
    """What the setting did to one answer."""
    generation, passes = answered.generation, answered.generation.passes
    return {
        "pruning": json.loads(generation.pruning.to_json()),
        "speedup": generation.speedup,
        "measured_speedup": answered.measured_speedup,
        "computed": generation.computed,
        "reached_top": generation.reached_top,
        "in_play": passes["in_play"][passes["pass_"] == 0].tolist(),
        "revived": int(passes["revived"].sum()),
        "seconds_to_first_token": generation.ttft,
        "seconds": generation.seconds,
        "unpruned": generation.unpruned,
    }


def usage(ask: Ask, new_tokens: int) -> dict[str, int]:
    given = sum(map(len, ask.prompts))
    return {"prompt_tokens": given, "completion_tokens": new_tokens, "total_tokens": given + new_tokens}


def envelope(ask: Ask, model: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    """A whole answer or a chunk of a streamed one, without its usage."""
    kind = "chat.completion" if ask.chat else "text_completion"
    kind += ".chunk" if ask.chat and ask.stream else ""
    name = f"{'chatcmpl' if ask.chat else 'cmpl'}-{ask.id}"
    return {"id": name, "object": kind, "created": ask.created, "model": model, "choices": choices}


def choice(llm: LLM, ask: Ask, index: int, text: str, end: Answered | None = None) -> dict[str, Any]:
    """Text of the answer of that index; at its `end` the reason, log probabilities, and what happened."""
    made: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": None}
    if not ask.chat:
        made["text"] = text
    elif ask.stream:
        made["delta"] = {"content": text} if text else {}
    else:
        made["message"] = {"role": "assistant", "content": text}
    if end is not None:
        made |= {"finish_reason": end.generation.finish_reason, "lazyllm": happened(end)}
        made["logprobs"] = None if ask.top_logprobs is None else _logprobs(llm, ask, end.generation)
    return made


def _logprobs(llm: LLM, ask: Ask, generation: Generation) -> dict[str, Any]:
    """The log probabilities of the tokens drawn, but for the end token."""
    tokens: list[dict[str, Any]] = []
    tops: list[list[dict[str, Any]]] = []
    for token, table in zip(generation.token_ids, generation.logprobs or (), strict=True):
        if token in llm.eos_token_ids and len(tokens) == len(generation.token_ids) - 1:
            break
        best = sorted(table, key=table.__getitem__, reverse=True)[: ask.top_logprobs]
        tokens.append(_entry(llm, token, table))
        tops.append([_entry(llm, other, table) for other in best])
    if ask.chat:
        return {"content": [{**entry, "top_logprobs": top} for entry, top in zip(tokens, tops, strict=True)]}
    texts = [entry["token"] for entry in tokens]
    return {
        "tokens": texts,
        "token_logprobs": [entry["logprob"] for entry in tokens],
        # of tokens with equal texts, such as parts of characters, the likelier one counts
        "top_logprobs": [{entry["token"]: entry["logprob"] for entry in reversed(top)} for top in tops],
        "text_offset": [sum(map(len, texts[:i])) for i in range(len(texts))],
    }


def _entry(llm: LLM, token: int, table: Mapping[int, float]) -> dict[str, Any]:
    data = llm.tokenizer.vocabulary.token_bytes(token)
    return {"token": data.decode(errors="replace"), "logprob": table[token], "bytes": list(data)}
