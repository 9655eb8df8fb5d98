"""Chat templates: the Jinja programs that checkpoints carry, rendered in Jinja's immutable sandbox."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NoReturn

import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lazyllm.checkpoints.fields import Fields, check_size
from lazyllm.errors import CheckpointError

LONGEST = 1 << 20  # bytes of a template; the longest known have 30,000
CHARACTERS = 1 << 26  # that a template may write


class Refusal(Exception):
    """Raised by a template that calls raise_exception."""


def refuse(message: object) -> NoReturn:
    raise Refusal(message)


class GenerationTag(jinja2.ext.Extension):
    """{% generation %} marks text to train on; it renders as its body."""

    tags = {"generation"}  # noqa: RUF012 (the base class has it as a plain set)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
)
ENVIRONMENT.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # Jinja's own escapes for HTML
ENVIRONMENT.globals["raise_exception"] = refuse
ENVIRONMENT.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)


@dataclass
class ChatTemplate:
    """A template. `source` is the file that errors name; `tokens` holds bos_token and the like."""

    text: str
    source: Path
    tokens: Mapping[str, str]

    @cached_property
    def _compiled(self) -> jinja2.Template:
        try:
            return ENVIRONMENT.from_string(self.text)
        except Exception as error:  # of Jinja, and of Python, to which a template is translated
            raise self._error("is not valid", error) from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        /,
        **variables: Any,
    ) -> str:
        """The text of a chat; `variables` are further ones that the template reads, such as enable_thinking=False."""
        values = {
            "messages": plain(messages, "messages"),
            "tools": plain(tools, "tools") or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self.tokens,
        }
        if taken := [name for name in variables if name in values]:
            raise ValueError(f"{taken[0]!r} is taken: chat templates have {', '.join(values)} already")
        values |= plain([variables], "variables")[0]
        template = self._compiled
        pieces: list[str] = []
        room = CHARACTERS
        try:
            for piece in template.generate(values):
                pieces.append(piece)
                room -= len(piece)
                if room < 0:
                    raise OverflowError(f"it wrote more than {CHARACTERS} characters")
        except Refusal as refusal:
            raise ValueError(f"the chat template refuses these messages: {refusal}") from None
        except Exception as error:  # whatever the template's expressions raise
            raise self._error("failed", error) from None
        return "".join(pieces)

    def _error(self, problem: str, error: Exception) -> CheckpointError:
        return CheckpointError(f"{self.source}: the chat template {problem}: {str(error) or type(error).__name__}")


EXAMPLES = {
    "messages": "{'role': 'user', 'content': 'Hello'}",
    "tools": "{'type': 'function', 'function': {'name': 'weather', 'parameters': …}}",
}


def plain(values: Sequence[Mapping[str, Any]], name: str) -> list[dict[str, Any]]:
    """Copies of dicts in JSON's types, so that a template cannot reach the caller's objects."""
    if not all(isinstance(value, Mapping) for value in values):
        raise TypeError(f"{name} must be a list of dicts such as {EXAMPLES[name]}")
    try:
        return [dict(json.loads(json.dumps(dict(value)))) for value in values]
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must hold strings, numbers, lists and dicts only: {error}") from None


def find_template(settings: Fields, tokens: Mapping[str, str], folder: Path | None = None) -> ChatTemplate | None:
    """The default template of a checkpoint, or None: chat_template.jinja in its folder, else the field
    chat_template of tokenizer_config.json, a string or a list with an entry named "default"."""
    if folder and (source := folder / "chat_template.jinja").is_file():
        check_size(source, LONGEST)
        try:
            return ChatTemplate(source.read_text(encoding="utf-8"), source, tokens)
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{source} is not UTF-8: {error}") from error
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[0].get("template") if named else None
    if template is None:
        return None
    if not isinstance(template, str):
        settings.refuse("chat_template", "a string or a list of named templates")
    return ChatTemplate(template, Path(settings.source), tokens)
