"""Options of a server, each declared once; the command makes arguments of them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

from lazyllm.support import checked


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a server."""

    at_once: Annotated[int, "requests that run at once, in turns", "N"] = 4
    waiting: Annotated[int, "requests that wait; others get status 429", "N"] = 64
    cache_bytes: Annotated[int, "memory for the beginnings that prompts share; 0 shares none", "N"] = 2**30

    def __post_init__(self) -> None:
        checked.whole(self.at_once, "at_once", 1, 257)
        checked.whole(self.waiting, "waiting", 0)
        checked.whole(self.cache_bytes, "cache_bytes", 0, sys.maxsize)
