"""Chat templates: the Jinja programs that checkpoints carry, run in a sandbox in a process of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lazyllm.checkpoints import chat_worker
from lazyllm.errors import CheckpointError

TEMPLATE_FILE = "chat_template.jinja"
LONGEST = 1 << 20  # bytes of a template; the longest known have 30,000
SECONDS = 10.0  # of CPU time that a template may take; the longest that are known take milliseconds
CHARACTERS = 1 << 26  # that it may write
BYTES = 1 << 30  # of address space that its process may have


def find_template(folder: Path, tokenizer_config: dict[str, Any]) -> tuple[str | None, Path]:
    """The default template of a checkpoint, and the file that has it: chat_template.jinja or
    tokenizer_config.json."""
    source = folder / TEMPLATE_FILE
    if source.is_file():
        if source.stat().st_size > LONGEST:
            raise CheckpointError(f"{source} has {source.stat().st_size} bytes; expected at most {LONGEST}")
        try:
            return source.read_text(encoding="utf-8"), source
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{source} is not UTF-8: {error}") from error
    source = folder / "tokenizer_config.json"
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        defaults = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = defaults[0].get("template") if defaults else None
    if template is not None and not isinstance(template, str):
        raise CheckpointError(
            f"{source}: chat_template is a {type(template).__name__}; "
            "expected a string or a list of named templates"
        )
    return template, source


class ChatTemplate:
    """A template. `source` is the file that errors name; `tokens` holds bos_token and the like."""

    def __init__(self, template: str, source: Path, tokens: Mapping[str, str]):
        self.text = template
        self.source = source
        self.tokens = dict(tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        variables = {
            "messages": plain(messages, "messages"),
            "tools": plain(tools, "tools") or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self.tokens,
        }
        reply = _renderer.ask(
            {
                "template": self.text,
                "variables": variables,
                "seconds": SECONDS,
                "characters": CHARACTERS,
                "bytes": BYTES,
            }
        )
        ((outcome, text),) = reply.items()
        if outcome == "refused":
            raise ValueError(f"the chat template refuses these messages: {text}")
        if outcome == "missing":
            raise ImportError("chat templates need the package jinja2: pip install jinja2")
        if outcome != "text":
            told = "is not valid" if outcome == "invalid" else "failed"
            raise CheckpointError(f"{self.source}: the chat template {told}: {text}")
        return text


class Renderer:
    """The process that renders: started when it is first asked, and again after it has ended."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """In a forked child the process is the parent's."""
        self.lock = threading.Lock()
        self.process: subprocess.Popen[str] | None = None

    def ask(self, request: dict[str, Any]) -> dict[str, str]:
        line = json.dumps(request) + "\n"
        with self.lock:
            process = self.process = self.process or start()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
                answer = process.stdout.readline()
            except BrokenPipeError:
                answer = ""
            except BaseException:  # the reply would be taken for that to the next request
                self.end()
                raise
            return dict(json.loads(answer)) if answer.endswith("\n") else {"failed": why(self.end())}

    def end(self) -> int:
        """Stops the process; its exit code."""
        assert self.process is not None
        process, self.process = self.process, None
        process.kill()
        with contextlib.suppress(BrokenPipeError), process:
            pass  # closes its pipes and waits
        return int(process.returncode)


def start() -> subprocess.Popen[str]:
    # what is preloaded, such as a sanitizer, may need more memory than the process is given
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    return subprocess.Popen(
        [sys.executable, "-I", chat_worker.__file__, *(str(place) for place in sys.path if place)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        encoding="utf-8",
        env=environment,
        start_new_session=True,  # Ctrl-C is not for it
    )


def why(code: int) -> str:
    if code == -signal.SIGPROF:
        return f"it took more than {SECONDS:g} seconds"
    return f"its process ended with code {code}, perhaps for want of memory: it may have {BYTES >> 20} MiB"


_renderer = Renderer()
os.register_at_fork(after_in_child=_renderer.forget)


EXAMPLES = {
    "messages": "{'role': 'user', 'content': 'Hello'}",
    "tools": "{'type': 'function', 'function': {'name': 'weather', 'parameters': …}}",
}


def plain(given: Sequence[Mapping[str, Any]], name: str) -> list[dict[str, Any]]:
    """Copies of messages or tools in JSON's types, so that a template cannot reach the caller's objects."""
    if isinstance(given, str | bytes | Mapping) or not all(isinstance(one, Mapping) for one in given):
        raise TypeError(f"{name} must be a list of dicts such as {EXAMPLES[name]}")
    try:
        return [dict(json.loads(json.dumps(dict(one)))) for one in given]
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must hold strings, numbers, lists and dicts only: {error}") from None
