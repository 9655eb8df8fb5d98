"""Chat templates: the Jinja programs that checkpoints carry, run in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from lazyllm.errors import CheckpointError

TEMPLATE_FILE = "chat_template.jinja"


def find_template(folder: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """The default template of a checkpoint, from chat_template.jinja or from tokenizer_config.json."""
    if (folder / TEMPLATE_FILE).is_file():
        try:
            return (folder / TEMPLATE_FILE).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{folder / TEMPLATE_FILE} is not UTF-8: {error}") from error
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        defaults = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = defaults[0].get("template") if defaults else None
    if template is not None and not isinstance(template, str):
        raise CheckpointError(
            f"{folder / 'tokenizer_config.json'}: chat_template is a {type(template).__name__}; "
            "expected a string or a list of named templates"
        )
    return template


class ChatTemplate:
    """A compiled template. `source` is the file that errors name; `tokens` holds bos_token and the like."""

    def __init__(self, template: str, source: Path, tokens: Mapping[str, str]):
        try:
            import jinja2
            import jinja2.ext
            import jinja2.nodes
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise ImportError("chat templates need the package jinja2: pip install jinja2") from None

        class Generation(jinja2.ext.Extension):
            """{% generation %} marks text to train on; rendering it gives its body."""

            tags = {"generation"}  # noqa: RUF012 (the base class has it as a plain set)

            def parse(self, parser: Any) -> Any:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = to_json
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        self.text = template
        self.source = source
        self.tokens = dict(tokens)
        self.error = jinja2.TemplateError
        try:
            self.template = environment.from_string(template)
        except (jinja2.TemplateError, RecursionError) as error:
            raise CheckpointError(f"{source}: the chat template is not valid: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        messages = plain(messages)
        try:
            return self.template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.tokens,
            )
        except TemplateRefusal as refusal:
            raise ValueError(f"the chat template refuses these messages: {refusal}") from None
        except (
            self.error,
            ArithmeticError,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
            RecursionError,
        ) as error:
            raise CheckpointError(f"{self.source}: the chat template failed: {error}") from error


class TemplateRefusal(Exception):
    """Raised by a template that calls raise_exception."""


def raise_exception(message: object) -> NoReturn:
    raise TemplateRefusal(str(message))


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Templates expect plain JSON, where Jinja's own filter escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def plain(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the messages in JSON's types, so that a template cannot reach the caller's objects."""
    if isinstance(messages, str | bytes | Mapping) or not all(
        isinstance(message, Mapping) for message in messages
    ):
        raise TypeError("messages must be a list of dicts such as {'role': 'user', 'content': 'Hello'}")
    try:
        return [dict(json.loads(json.dumps(dict(message)))) for message in messages]
    except (TypeError, ValueError) as error:
        raise TypeError(f"messages must hold strings, numbers, lists and dicts only: {error}") from None
