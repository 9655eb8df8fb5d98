"""Options of `longbench.run`, `sweep` and `reproduce`, as keyword arguments and as frozen objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any, Self, TypedDict

from lazyllm.evaluation.chats import CHATS, Chat
from lazyllm.machine.device import check_device
from lazyllm.support import checked

MAX_LENGTH = 3500  # prompt tokens before the chat wrapper, for models with a context of 4096
WARM_UPS = 5
EDIT_SIM = "difflib"
OnRow = Callable[[dict[str, Any]], object] | Sequence[Callable[[dict[str, Any]], object]]


class RunKeywords(TypedDict, total=False):
    """Keyword arguments of every run."""

    chat: Chat | None
    warm_ups: int
    retry_failed: bool
    progress: bool
    on_row: OnRow
    workers: int | None
    scheduler: str | None
    worker_device: str | None
    worker_threads: int | None


class DataKeywords(RunKeywords, total=False):
    """Keyword arguments of `longbench.run`, `sweep` and `reproduce`; `longbench.run` describes them."""

    data: str | Path | None
    datasets: Sequence[str] | None
    limit: int | None
    sample: int | None
    min_item_length: int | None
    max_item_length: int | None
    max_length: int | None
    max_new_tokens: int | None
    prompts: str | Path | None
    edit_sim: str


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The checked values of RunKeywords, with defaults."""

    chat: Chat = "auto"
    warm_ups: int = WARM_UPS
    retry_failed: bool = False
    progress: bool = True
    on_row: OnRow = ()
    workers: int | None = None
    scheduler: str | None = None
    worker_device: str | None = None
    worker_threads: int | None = None

    def __post_init__(self) -> None:
        checked.whole(self.warm_ups, "warm_ups", 0)
        if self.workers is not None:
            checked.whole(self.workers, "workers", 1)
        if self.workers is not None and self.scheduler is not None:
            raise ValueError(
                "give workers, for processes on this machine, or scheduler, for those of a cluster"
            )
        if not self.on_workers and (self.worker_device, self.worker_threads) != (None, None):
            raise ValueError("worker_device and worker_threads are for workers or a scheduler")
        if self.worker_threads is not None:
            checked.whole(self.worker_threads, "worker_threads", 1)
        if self.worker_device is not None:
            check_device(self.worker_device)
        several = [self.on_row] if callable(self.on_row) else self.on_row
        if not isinstance(several, Sequence) or not all(map(callable, several)):
            raise TypeError(f"on_row must be a function, or a list of functions, not {self.on_row!r}")
        if self.chat not in CHATS:
            raise ValueError(f"chat must be one of {', '.join(CHATS)}, not {self.chat!r}")

    @property
    def on_workers(self) -> bool:
        return self.workers is not None or self.scheduler is not None

    @property
    def callbacks(self) -> tuple[Callable[[dict[str, Any]], object], ...]:
        """The functions that are called with each new row."""
        return (self.on_row,) if callable(self.on_row) else tuple(self.on_row)

    @classmethod
    def of(cls, keywords: Mapping[str, Any], function: Callable[..., Any], **defaults: Any) -> Self:
        """The options among the keyword arguments of a function; None is the default."""
        options = [field.name for field in fields(cls)]
        for name in keywords:
            if name not in options:
                names = [*signature(function).parameters][:-1] + options
                close = get_close_matches(name, names, n=1)
                hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(names)}"
                raise TypeError(f"{function.__name__} has no option {name!r}; {hint}")
        given = {name: value for name, value in keywords.items() if value is not None}
        return cls(**{**defaults, **given})


@dataclass(frozen=True, kw_only=True)
class DataOptions(RunOptions):
    """The checked values of DataKeywords, with defaults."""

    data: str | Path | None = None
    datasets: Sequence[str] | None = None
    limit: int | None = None
    sample: int | None = None
    min_item_length: int | None = None
    max_item_length: int | None = None
    max_length: int = MAX_LENGTH
    max_new_tokens: int | None = None
    prompts: str | Path | None = None
    edit_sim: str = EDIT_SIM

    def __post_init__(self) -> None:
        super().__post_init__()
        checked.a_list(self.datasets, "datasets", '["trec"]')
        checked.whole(self.max_length, "max_length", 2)
        if self.max_new_tokens is not None:
            checked.whole(self.max_new_tokens, "max_new_tokens", 1)
