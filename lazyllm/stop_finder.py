"""StopFinder: ends a growing text before the first stop string in it."""

from __future__ import annotations

from collections.abc import Iterable


class StopFinder:
    """Passes pieces of text on; an end that may be the beginning of a stop string is held back."""

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """The text that may be shown now; empty after a stop string."""
        if self.stopped:
            return ""
        text = self._held + piece
        places = [place for place in map(text.find, self._stops) if place >= 0]
        if places:
            self.stopped = True
            return text[: min(places)]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """The text held back, once no more can come."""
        return "" if self.stopped else self._held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
