"""A process of its own that renders chat templates, which are programs, within limits of time and memory.

Run as a script with the entries of sys.path as arguments; imports nothing of this package. Each line of its
input is a request, each line of its output the reply, both JSON objects. It ends with its input.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from datetime import datetime
from functools import cache
from typing import Any, NoReturn


class Refusal(Exception):
    """Raised by a template that calls raise_exception."""


def refuse(message: object) -> NoReturn:
    raise Refusal(str(message))


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


@cache
def compiled(text: str) -> Any:
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

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
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment.from_string(text)


def rendered(template: Any, variables: dict[str, Any], most: int) -> str:
    pieces, size = [], 0
    for piece in template.generate(variables):
        pieces.append(piece)
        size += len(piece)
        if size > most:
            raise OverflowError(f"it wrote more than {most} characters")
    return "".join(pieces)


def reply_to(request: dict[str, Any]) -> dict[str, str]:
    """`text`, or why there is none: `missing`, `invalid`, `refused` or `failed`."""
    try:
        template = compiled(request["template"])
    except ImportError as error:
        return {"missing": str(error)}
    except Exception as error:  # of Jinja, and of Python, to which a template is translated
        return {"invalid": str(error) or type(error).__name__}
    try:
        return {"text": rendered(template, request["variables"], request["characters"])}
    except Refusal as refusal:
        return {"refused": str(refusal)}
    except Exception as error:  # whatever the template's expressions raise
        return {"failed": str(error) or type(error).__name__}


def limit_memory(most: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def main() -> None:
    sys.path[:] = sys.argv[1:]
    for line in sys.stdin:
        request = json.loads(line)
        limit_memory(request["bytes"])
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])  # of CPU time; then SIGPROF ends the process
        reply = json.dumps(reply_to(request))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(reply, flush=True)


if __name__ == "__main__":
    main()
