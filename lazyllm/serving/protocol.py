"""OpenAI's requests, checked, and its answers: /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar
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
SHARED = ("model", "max_tokens", "stop", "n", "stream", "stream_options", "logprobs", "lazyllm")
CHAT = ("messages", "tools", "max_completion_tokens", "top_logprobs", "chat_template_kwargs")
WITHOUT_EFFECT = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
ONLY: Mapping[str, Any] = {
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0,
    "parallel_tool_calls": True,
    "presence_penalty": 0,
    "response_format": {"type": "text"},
    "tool_choice": "auto",
}
"""Fields of which one value alone is accepted, the one that asks for nothing."""

HAPPENED = ("speedup", "computed", "reached_top", "seconds", "unpruned")


class NoSuchModel(ValueError):
    """The request names another model than the one that is served."""


class Ask:
    """A checked request: the prompts as token ids, and how to answer each."""

    def __init__(self, llm: LLM, model: str, body: bytes, chat: bool, roles: Sequence[str] = ()) -> None:
        """ValueError or TypeError, in one sentence, for anything in the body that cannot be done. What the
        messages of `roles` say is protected."""
        request = parse_object(body, "the request's body", strict=True)
        request = {name: value for name, value in request.items() if value is not None}
        known = (*SHARED, *SAMPLING, *WITHOUT_EFFECT, *ONLY, *(CHAT if chat else ("prompt",)))
        checked.known_names(request, known, "a request")
        for name, value in ONLY.items():
            if request.get(name, value) != value:
                raise ValueError(f"{name} is not supported; leave it out")
        if request.get("model", model) != model:
            raise NoSuchModel(f"there is no model {request['model']!r:.200}; this server has {model!r}")
        stream_options, own = _typed(request, "stream_options", dict), _typed(request, "lazyllm", dict)
        checked.known_names(stream_options, ("include_usage",), "stream_options")
        checked.known_names(own, ("pruning", "trace"), "lazyllm")
        self.llm, self.model, self.chat = llm, model, chat
        self.id, self.created = uuid4().hex, int(time.time())
        self.stream = checked.truth(request.get("stream", False), "stream")
        self.include_usage = checked.truth(stream_options.get("include_usage", False), "include_usage")
        self.trace = checked.truth(own.get("trace", False), "trace")
        self.pruning = None if own.get("pruning") is None else _setting(own["pruning"])  # None: the server's
        self.protected: Spans = ()  # of the prompt, which is never dropped
        if chat:
            ids, self.protected = _chat_ids(llm, request, roles)
            self.prompts = [ids]
        else:
            self.prompts = _prompt_ids(llm, request.get("prompt"))
        recommended = SamplingParams.of(llm)
        drawing = {name: request.get(name, getattr(recommended, name)) for name in SAMPLING}
        self.sampling = SamplingParams(**drawing)
        self.n = checked.whole(request.get("n", 1), "n", 1, MOST_ANSWERS + 1)
        if self.n > 1 and not self.sampling.temperature:
            raise ValueError(f"{self.n} answers to a prompt differ only with a temperature above 0")
        text = isinstance(request.get("stop"), str)
        self.stop = [request["stop"]] if text else _typed(request, "stop", list)
        if len(self.stop) > MOST_STOPS:
            raise ValueError(f"{len(self.stop)} stop texts are more than {MOST_STOPS}")
        self.top_logprobs = _top_logprobs(request, chat)  # None: no log probabilities
        self.most_tokens = _most_tokens(llm, request, self.prompts, chat)

    def options(self, number: int) -> dict[str, Any]:
        """The keywords of `LLM.generate` for the prompt of that number."""
        return {
            "max_new_tokens": self.most_tokens,
            "sampling": self.sampling.for_prompt(number),
            "stop": self.stop,
            "logprobs": 0 if self.top_logprobs is None else max(1, self.top_logprobs),
            "trace": self.trace,
            "progress": False,
        }


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


def _top_logprobs(request: Mapping[str, Any], chat: bool) -> int | None:
    """How many log probabilities each token of the answer shows beside its own; None for not even that."""
    name = "top_logprobs" if chat else "logprobs"
    top = checked.whole(request.get(name, 0), name, 0, MOST_LOGPROBS + 1)
    asked = checked.truth(request.get("logprobs", False), "logprobs") if chat else name in request
    if top and not asked:
        raise ValueError("top_logprobs needs logprobs to be true")
    return top if asked else None


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


@dataclass(frozen=True)
class Part:
    """More text of the answer of that index; the last part has the whole answer as `end`, and the measured
    speedup of its setting so far, None before there is one."""

    index: int
    text: str
    end: Generation | None = None
    measured_speedup: float | None = None


def whole(ask: Ask, parts: Iterable[Part]) -> dict[str, Any]:
    """The body of an answer that comes in one piece."""
    texts, ends = defaultdict[int, str](str), list[Part]()
    for part in parts:
        texts[part.index] += part.text
        if part.end:
            ends.append(replace(part, text=texts[part.index]))
    return {**_envelope(ask, *(_choice(ask, end) for end in ends)), "usage": _usage(ask, ends)}


def events(ask: Ask, parts: Iterable[Part]) -> Iterator[str]:
    """The server-sent events of a streamed answer."""
    begun, ends = set[int](), list[Part]()
    for part in parts:
        choice = _choice(ask, part)
        if ask.chat and part.index not in begun:
            choice["delta"] = {"role": "assistant", "content": part.text}
        begun.add(part.index)
        ends += [part] if part.end else []
        yield event(_envelope(ask, choice))
    if ask.include_usage:
        yield event({**_envelope(ask), "usage": _usage(ask, ends)})
    yield "data: [DONE]\n\n"


def event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


def _usage(ask: Ask, ends: list[Part]) -> dict[str, int]:
    given, new = sum(map(len, ask.prompts)), sum(len(part.end.token_ids) for part in ends if part.end)
    return {"prompt_tokens": given, "completion_tokens": new, "total_tokens": given + new}


def _envelope(ask: Ask, *choices: dict[str, Any]) -> dict[str, Any]:
    kind, prefix = ("chat.completion", "chatcmpl") if ask.chat else ("text_completion", "cmpl")
    kind += ".chunk" if ask.chat and ask.stream else ""
    about = {"id": f"{prefix}-{ask.id}", "object": kind, "created": ask.created, "model": ask.model}
    return {**about, "choices": [*choices]}


def _choice(ask: Ask, part: Part) -> dict[str, Any]:
    """The text of a part; of the last one also the reason, log probabilities, and what happened."""
    choice: dict[str, Any] = {"index": part.index, "logprobs": None, "finish_reason": None}
    if not ask.chat:
        choice["text"] = part.text
    elif ask.stream:
        choice["delta"] = {"content": part.text} if part.text else {}
    else:
        choice["message"] = {"role": "assistant", "content": part.text}
    if part.end is not None:
        choice["finish_reason"] = part.end.finish_reason
        choice["logprobs"] = None if ask.top_logprobs is None else _logprobs(ask, part.end)
        choice["lazyllm"] = {**_happened(part.end), "measured_speedup": part.measured_speedup}
    return choice


def _happened(generation: Generation) -> dict[str, Any]:
    """What the setting did to one answer."""
    passes = generation.passes
    return {
        "pruning": json.loads(generation.pruning.to_json()),
        "in_play": passes["in_play"][passes["pass_"] == 0].tolist(),
        "revived": int(passes["revived"].sum()),
        "seconds_to_first_token": generation.ttft,
        **{name: getattr(generation, name) for name in HAPPENED},
    }


def _logprobs(ask: Ask, generation: Generation) -> dict[str, Any]:
    """The log probabilities of the tokens drawn, but for the end token."""

    def entry(token: int, table: Mapping[int, float]) -> dict[str, Any]:
        data = ask.llm.tokenizer.vocabulary.token_bytes(token)
        return {"token": data.decode(errors="replace"), "logprob": table[token], "bytes": list(data)}

    entries = list[dict[str, Any]]()
    for token, table in zip(generation.token_ids, generation.logprobs or (), strict=True):
        best = sorted(table, key=table.__getitem__, reverse=True)[: ask.top_logprobs]
        entries.append({**entry(token, table), "top_logprobs": [entry(other, table) for other in best]})
    if generation.token_ids[-1] in ask.llm.eos_token_ids:
        entries.pop()
    if ask.chat:
        return {"content": entries}
    texts = [entry["token"] for entry in entries]
    # of tokens with equal texts, such as parts of characters, the likelier one counts
    tops = [{top["token"]: top["logprob"] for top in entry["top_logprobs"][::-1]} for entry in entries]
    offsets = [sum(map(len, texts[:i])) for i in range(len(texts))]
    logprobs = [entry["logprob"] for entry in entries]
    return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}
