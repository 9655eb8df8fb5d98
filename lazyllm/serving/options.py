"""Options of a server, each declared once; the command makes arguments of them."""

import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any

from lazyllm.support import checked
from lazyllm.support.files import user_path


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a server."""

    speedup: Annotated[str | None, "wished, such as 2; for --guard its bounds, as in 1.2:3", "SPEEDUP"] = None
    pruning: Annotated[Any, "another setting than a speedup, as for generate", "SETTING"] = None
    protect: Annotated[str | None, "roles of messages that are never dropped, or tools", "ROLE,…"] = None
    at_once: Annotated[int, "requests that run at once, in turns", "N"] = 4
    waiting: Annotated[int, "requests that wait; others get status 429", "N"] = 64
    cache_bytes: Annotated[int, "memory for the beginnings that prompts share; 0 shares none", "N"] = 2**30
    shadow: Annotated[float, "share of prompts that are compared with dense while no request runs", "X"] = 0.0
    guard: Annotated[float | None, "lowers the speedup while the mean divergence (nats) is above", "X"] = None
    log: Annotated[str | None, "a line of JSON for each comparison and change of the guard", "FILE"] = None
    log_text: Annotated[bool, "the prompts' text too in that log"] = False

    def __post_init__(self) -> None:
        from lazyllm.prompt import ROLES  # imports NumPy, which --help does not need

        for role in [] if self.protect is None else self.protect.split(","):
            checked.choice(role, "a role of protect", (*ROLES, "tools"))
        checked.whole(self.at_once, "at_once", 1, 257)
        checked.whole(self.waiting, "waiting", 0)
        checked.whole(self.cache_bytes, "cache_bytes", 0, sys.maxsize)
        checked.share(self.shadow, "shadow")
        if self.speedup is not None and self.pruning is not None:
            raise ValueError("give speedup or pruning, not both")
        if self.guard is not None and checked.number(self.guard, "guard") <= 0:
            raise ValueError(f"guard must be above 0, not {self.guard:g}")
        for name, needed in ("guard", "shadow"), ("log", "shadow"), ("log_text", "log"):
            if getattr(self, name) and not getattr(self, needed):
                raise ValueError(f"{name} changes nothing without {needed}")
        if self.log is not None and not user_path(self.log).parent.is_dir():
            raise ValueError(f"log is {self.log}; there is no such folder")

    @property
    def bounds(self) -> tuple[float, float]:
        """The lowest and the highest speedup of a guard."""
        with suppress(ValueError):
            low, high = map(float, str(self.speedup).split(":"))
            if 1 < low < high:
                return low, high
        bounds = "the bounds of a speedup, which must ascend from above 1, such as 1.2:3"
        raise ValueError(f"guard needs {bounds}, not {self.speedup}")
