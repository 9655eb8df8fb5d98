"""OpenAI's requests, checked, and its answers: /v1/completions and /v1/chat/completions."""

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from heapq import nlargest
from itertools import accumulate
from typing import Any
from uuid import uuid4

from starlette.exceptions import HTTPException

from lazyllm.generation import Generation, Request
from lazyllm.llm import LLM
from lazyllm.method import Method, Spans
from lazyllm.methods.compression import PromptCompression
from lazyllm.methods.parsing import BUILT_IN, SPEEDUP, as_method
from lazyllm.prefix_cache import shared
from lazyllm.prompt import checked_ids, checked_messages, is_batch
from lazyllm.sampling import SamplingParams
from lazyllm.support import checked
from lazyllm.support.json_text import parse_object

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
"""By field: the only value that is accepted, which has no effect."""

KINDS = {bool: "true or false", dict: "an object", list: "a list"}


class Ask:
    """A checked request: the prompts as token ids, and how to answer each."""

    def __init__(self, llm: LLM, model: str, body: bytes, chat: bool, roles: Sequence[str] = ()) -> None:
        """Raises ValueError or TypeError, with one sentence, for a body that cannot be answered. The text of
        messages by `roles` is protected."""
        parsed = parse_object(body, "the request's body")
        values = {name: value for name, value in parsed.items() if value is not None}
        names = (*SHARED, *SAMPLING, *WITHOUT_EFFECT, *ONLY, *(CHAT if chat else ("prompt",)))
        checked.known_names(values, names, "a request")
        for name, value in ONLY.items():
            if values.get(name, value) != value:
                raise ValueError(f"{name} is not supported; leave it out")
        if values.get("model", model) != model:
            raise HTTPException(404, f"there is no model {values['model']!r:.200}; this server has {model!r}")
        stream_options, extra = _field(values, "stream_options", dict), _field(values, "lazyllm", dict)
        checked.known_names(stream_options, ("include_usage",), "stream_options")
        checked.known_names(extra, ("pruning", "trace"), "lazyllm")
        self.llm, self.model, self.chat = llm, model, chat
        self.stream = _field(values, "stream", bool)
        self.include_usage = _field(stream_options, "include_usage", bool)
        self.pruning = None if extra.get("pruning") is None else _setting(extra["pruning"])  # None: the server's
        self.prompts, self.protected = _chat(llm, values, roles) if chat else (_prompts(llm, values), ())
        self.n = checked.whole(values.get("n", 1), "n", 1, MOST_ANSWERS + 1)
        name = "top_logprobs" if chat else "logprobs"
        self.top_logprobs = checked.whole(values.get(name, 0), name, 0, MOST_LOGPROBS + 1)
        self.logprobs = _field(values, "logprobs", bool) if chat else name in values
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        stop = values["stop"] if isinstance(values.get("stop"), str) else _field(values, "stop", list)
        if isinstance(stop, list) and len(stop) > MOST_STOPS:
            raise ValueError(f"{len(stop)} stop texts are more than {MOST_STOPS}")
        left = llm.config.context - len(self.prompts[0])
        most = min(CHAT_TOKENS, max(1, left)) if chat else COMPLETION_TOKENS
        most = values.get("max_completion_tokens", values.get("max_tokens", most))
        sampling = {name: values[name] for name in SAMPLING if name in values}
        self.request = Request(
            max_new_tokens=checked.whole(most, "max_tokens", 1),
            sampling=replace(SamplingParams.of(llm), **sampling),
            stop=stop,
            logprobs=max(int(self.logprobs), self.top_logprobs),
            trace=_field(extra, "trace", bool),
            progress=False,
        )
        if self.n > 1 and not self.request.sampling.temperature:
            raise ValueError(f"{self.n} answers to a prompt differ only with a temperature above 0")


def _field(values: Mapping[str, Any], name: str, kind: type) -> Any:
    """The field's value; False or an empty object or list if it is missing."""
    value = values.get(name, kind())
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {KINDS[kind]}, not {value!r:.80}")
    return value


def _chat(llm: LLM, values: Mapping[str, Any], roles: Sequence[str]) -> tuple[list[list[int]], Spans]:
    """The token ids that the chat template makes of messages and tools; and for each role the span in
    which the ids change if its messages have another text, or for the role "tools" if there are no tools."""
    messages, tools = checked_messages(_field(values, "messages", list)), _field(values, "tools", list)
    variables = _field(values, "chat_template_kwargs", dict)
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
    return [ids], tuple(spans)


def _prompts(llm: LLM, values: Mapping[str, Any]) -> list[list[int]]:
    prompt = values.get("prompt")
    if not isinstance(prompt, str | list) or prompt in ("", []):
        raise TypeError("prompt must be text, token ids, or a list of those, and not empty")
    prompts = prompt if is_batch(prompt) else [prompt]
    if len(prompts) > MOST_ANSWERS:
        raise ValueError(f"{len(prompts)} prompts are more than the {MOST_ANSWERS} of one request")
    encoded = (llm.tokenizer.encode(item) if isinstance(item, str) else item for item in prompts)
    return [checked_ids(ids, llm.config.vocab) for ids in encoded]


def _setting(pruning: Any) -> Method:
    """A setting that a client may ask for: none that opens files of the server or rewrites prompts."""
    allowed = [name for name, cls in BUILT_IN.items() if not issubclass(cls, PromptCompression)]
    if isinstance(pruning, str) and pruning.strip() != "dense" and not SPEEDUP.fullmatch(pruning.strip()):
        forms = 'dense, a speedup such as 2x, stages such as {"10": 0.7}, or the fields of a method'
        raise ValueError(f"pruning is {pruning!r:.80}; it must be {forms}")
    if isinstance(pruning, Mapping):
        checked.choice(pruning.get("method", allowed[0]), "method", allowed)
    return as_method(pruning)


# ---- answers -------------------------------------------------------------------------------------


Part = tuple[int, str, Generation | None, dict[str, Any]]
"""An answer's number and its next text; with its end also the whole answer and the setting's effect."""


def contents(ask: Ask, parts: Iterable[Part]) -> Iterator[Any]:
    """The events of streamed answers; or the body of whole answers, each of which is one part."""
    kind, prefix = ("chat.completion", "chatcmpl") if ask.chat else ("text_completion", "cmpl")
    kind += ".chunk" if ask.chat and ask.stream else ""
    common = {"id": f"{prefix}-{uuid4().hex}", "object": kind, "created": int(time.time()), "model": ask.model}
    started, choices, n_given, n_new = set[int](), list[dict[str, Any]](), sum(map(len, ask.prompts)), 0
    for number, text, end, effect in parts:
        choice: dict[str, Any] = {"index": number, "logprobs": None, "finish_reason": None}
        message = {"content": text} if number in started else {"role": "assistant", "content": text}
        started.add(number)
        choice |= {"delta" if ask.stream else "message": message} if ask.chat else {"text": text}
        if end is not None:
            n_new += len(end.token_ids)
            choice |= {"finish_reason": end.finish_reason, "lazyllm": effect}
            choice["logprobs"] = _logprobs(ask, end) if ask.logprobs else None
        if ask.stream:
            yield f"data: {json.dumps({**common, 'choices': [choice]})}\n\n"
        else:
            choices.append(choice)
    usage = {"prompt_tokens": n_given, "completion_tokens": n_new, "total_tokens": n_given + n_new}
    last = {**common, "choices": choices, "usage": usage}
    if ask.stream:
        yield (f"data: {json.dumps(last)}\n\n" if ask.include_usage else "") + "data: [DONE]\n\n"
    else:
        yield last


def _logprobs(ask: Ask, generation: Generation) -> dict[str, Any]:
    """The log probabilities of the tokens drawn, but for the end token, which can only be the last."""

    def entry(token: int, table: Mapping[int, float]) -> dict[str, Any]:
        data = ask.llm.tokenizer.vocabulary.token_bytes(token)
        return {"token": data.decode(errors="replace"), "logprob": table[token], "bytes": list(data)}

    entries = list[dict[str, Any]]()
    for token, table in zip(generation.token_ids, generation.logprobs or (), strict=True):
        if token not in ask.llm.eos_token_ids:
            best = nlargest(ask.top_logprobs, table, key=table.__getitem__)
            entries.append({**entry(token, table), "top_logprobs": [entry(other, table) for other in best]})
    if ask.chat:
        return {"content": entries}
    texts = [entry["token"] for entry in entries]
    return {
        "tokens": texts,
        "token_logprobs": [entry["logprob"] for entry in entries],
        # of tokens with equal texts, such as parts of characters, the likelier one counts
        "top_logprobs": [{top["token"]: top["logprob"] for top in entry["top_logprobs"][::-1]} for entry in entries],
        "text_offset": [*accumulate(map(len, texts), initial=0)][:-1],
    }
