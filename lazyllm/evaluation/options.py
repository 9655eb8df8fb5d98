"""Options of runs. Each is declared once, with its type, default and help: commands make arguments of them,
and `documented` adds them to signature and docstring of the functions that take them as keyword arguments."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self, get_type_hints

from lazyllm.evaluation.chats import AnyWrapper
from lazyllm.support import checked
from lazyllm.support.signatures import Function, takes

DEPTHS = tuple(range(0, 101, 10))  # percent
MAX_LENGTH = 3500  # prompt tokens before the chat wrapper, for models with a context of 4096
EDIT_SIM = "difflib"
LEAST = {"warm_ups": 0, "workers": 1, "worker_threads": 1, "max_length": 2, "max_new_tokens": 1, "limit": 1}
IN_PYTHON = "in Python"  # in place of a metavar: commands have no such argument
OF_PRESET = "that of the preset"


class Option(NamedTuple):
    """An option as annotated below; by `metavar`, commands choose how to read its value."""

    name: str
    default: Any
    help: str
    metavar: str | None = None

    def described(self, default: str = "") -> str:
        """The help text with the default value, or with the text `default` in its place."""
        if not default and not any(self.default is nothing for nothing in (None, False, MISSING)):
            values = self.default if isinstance(self.default, tuple) else [self.default]
            default = ",".join(map(str, values))
        return f"{self.help}; default {default}" if default else self.help


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of every run."""

    wrapper: Annotated[AnyWrapper, "the wrapper of prompts: auto, none, llama-2, xgen or template"] = "auto"
    warm_ups: Annotated[int, "short untimed runs, then one of each setting; 0 for neither", "N"] = 5
    workers: Annotated[int | None, "processes of this machine, which share its threads", "N"] = None
    scheduler: Annotated[
        str | None, "run on this Dask scheduler's workers, with the device and threads of each", "ADDRESS"
    ] = None
    worker_device: Annotated[
        str | None, "device of each worker; workers on cuda have a GPU each in turn", IN_PYTHON
    ] = None
    worker_threads: Annotated[int | None, "threads of each worker", IN_PYTHON] = None
    progress: Annotated[bool, "show a bar", IN_PYTHON] = True
    on_row: Annotated[Callable[[dict[str, Any]], object] | None, "a function called with each new row", IN_PYTHON] = (
        None
    )

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            if (value := getattr(self, name, None)) is not None:
                checked.whole(value, name, least)
        if self.workers is not None and self.scheduler is not None:
            raise ValueError("give workers, for this machine, or scheduler, for a cluster")
        if not self.on_workers and (self.worker_device, self.worker_threads) != (None, None):
            raise ValueError("worker_device and worker_threads are for workers or a scheduler")

    @property
    def on_workers(self) -> bool:
        return self.workers is not None or self.scheduler is not None

    @classmethod
    def of(cls, keywords: Mapping[str, Any], **defaults: Any) -> Self:
        """Options from keyword arguments, in which None is the default."""
        chosen = {name: value for name, value in keywords.items() if value is not None}
        return cls(**{**defaults, **chosen})


@dataclass(frozen=True, kw_only=True)
class DataOptions(RunOptions):
    """Options of the runs on LongBench's items."""

    data: Annotated[
        str | Path | None, "the benchmark's folder or zip, or hub:OWNER/NAME; default: generated", "DIR"
    ] = None
    datasets: Annotated[
        Sequence[str] | None, "default: the 16 English ones that are there, or all generated tasks", "NAME,…"
    ] = None
    limit: Annotated[int | None, "the first N items of each data set", "N"] = None
    max_length: Annotated[int, "tokens of a prompt, with the answer for generated tasks", "N"] = MAX_LENGTH
    max_new_tokens: Annotated[int | None, "cap on the benchmark's own limits", "N"] = None
    templates: Annotated[
        str | Path | None, "file such as dataset2prompt.json; default: the data's own or the official", "FILE"
    ] = None
    edit_sim: Annotated[str, "of code: difflib, as by the benchmark's requirements, or levenshtein"] = EDIT_SIM

    def __post_init__(self) -> None:
        super().__post_init__()
        checked.a_list(self.datasets, "datasets", '["trec"]')

    def refuse(self, names: Iterable[str], reason: str) -> None:
        """Raises ValueError if one of these options is given."""
        for name in names:
            if getattr(self, name) != getattr(DataOptions, name):
                raise ValueError(f"{name} is {reason}")


@dataclass(frozen=True, kw_only=True)
class GeneratedOptions(RunOptions):
    """Options of the runs on generated items."""

    lengths: Annotated[Sequence[int], "of prompts in tokens, with chat template and answer", "N,…"]
    count: Annotated[int, "items of each task at each length", "N"] = 5
    seed: Annotated[int, "of the items", "N"] = 0

    @property
    def selection(self) -> dict[str, Any]:
        """The options that choose the items, as plain data."""
        others = {item.name for item in fields(RunOptions)}
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name not in others}


@dataclass(frozen=True, kw_only=True)
class RulerOptions(GeneratedOptions):
    """Options of RULER's tasks."""

    tasks: Annotated[Sequence[str] | None, "default: all tasks", "NAME,…"] = None


@dataclass(frozen=True, kw_only=True)
class NiahOptions(GeneratedOptions):
    """Options of the runs with one needle."""

    depths: Annotated[Sequence[float], "of the needle in percent", "N,…"] = DEPTHS
    count: Annotated[int, "items of each depth at each length", "N"] = 1


def options_of(kind: type[Any]) -> list[Option]:
    notes = {name: hint.__metadata__ for name, hint in get_type_hints(kind, include_extras=True).items()}
    return [Option(item.name, item.default, *notes[item.name]) for item in fields(kind)]


def documented(kind: type[RunOptions], **defaults: str) -> Callable[[Function], Function]:
    """Decorates a function whose **options are of this kind: adds them to its signature and docstring.

    `defaults` describes those that the function itself chooses.
    """

    def add(function: Function) -> Function:
        described = {item.name: item.described(defaults.get(item.name, "")) for item in options_of(kind)}
        lines = [f"- `{name}`: {text}" for name, text in described.items()]
        function.__doc__ = "\n    ".join([f"{function.__doc__}\n", "Options:", "", *lines])
        return takes(kind, chosen=defaults)(function)

    return add
