"""Heatmap: a prompt's own text, each token coloured by how deep it was computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path

import numpy as np

LIGHT, DARK = (0xF3, 0xF5, 0xF8), (0x0B, 0x4A, 0x8F)

STYLE = """
.lazyllm-map { font-family: system-ui, sans-serif; color: #1b1f24; background: #fff; line-height: 1.5; }
.lazyllm-map .facts { color: #57606a; font-size: 0.85em; margin: 0 0 0.6em; }
.lazyllm-map .legend { display: flex; flex-wrap: wrap; gap: 0.5em; margin: 0 0 0.9em; font-size: 0.85em; }
.lazyllm-map .legend span { padding: 0.1em 0.6em; border-radius: 0.3em; border: 1px solid #d0d7de; }
.lazyllm-map .text { white-space: pre-wrap; overflow-wrap: anywhere; font-family: Georgia, serif;
  line-height: 1.75; border: 1px solid #d0d7de; border-radius: 0.5em; padding: 1em 1.2em; }
.lazyllm-map .revived { text-decoration: underline 2px #d1480b; text-underline-offset: 0.2em; }
.lazyllm-map .answer { font-style: italic; color: #57606a; background: none; }
"""
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ margin: 0 auto; padding: 2em 1.5em 4em; max-width: 54em; background: #fff; color: #1b1f24; }}
h1 {{ font: 600 1.4em system-ui, sans-serif; margin: 0 0 0.5em; }}
</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


@dataclass(frozen=True, repr=False, eq=False)
class Heatmap:
    """Shown by notebooks, or saved as a page that needs nothing else; made by `Trace.heatmap`."""

    texts: list[str]
    kinds: np.ndarray
    prefill_depths: np.ndarray
    depths: np.ndarray
    n_layers: int
    subtitle: str = ""

    def __repr__(self) -> str:
        return f"<Heatmap of {len(self.texts)} tokens; save(path) writes it as HTML>"

    def _repr_html_(self) -> str:
        levels = sorted({int(depth) for depth in self.prefill_depths[self.kinds == 0]})
        rules = "".join(
            f".lazyllm-map .d{depth} {{ background: {_hex(colour)}; color: {_ink(colour)}; }}\n"
            for depth, colour in zip(levels, _colours(len(levels)), strict=True)
        )
        legend = "".join(f'<span class="d{depth}">{escape(self._level(depth))}</span>' for depth in levels)
        revived = int(np.count_nonzero(self._revived))
        if revived:
            legend += f'<span class="revived">revived later: {revived} tokens</span>'
        facts = f'<p class="facts">{escape(self.subtitle)}</p>' if self.subtitle else ""
        return (
            f'<div class="lazyllm-map"><style>{STYLE}{rules}</style>{facts}'
            f'<div class="legend">{legend}</div><div class="text">{"".join(self._spans())}</div></div>'
        )

    def save(self, path: str | Path, title: str = "What the prompt's tokens went through") -> Path:
        """Writes one self-contained HTML page."""
        target = Path(path)
        target.write_text(PAGE.format(title=escape(title), body=self._repr_html_()), encoding="utf-8")
        return target

    @property
    def _revived(self) -> np.ndarray:
        revived: np.ndarray = (self.depths > self.prefill_depths) & (self.kinds == 0)
        return revived

    def _level(self, depth: int) -> str:
        count = int(np.count_nonzero((self.prefill_depths == depth) & (self.kinds == 0)))
        if depth == self.n_layers:
            return f"all {depth} layers: {count} tokens"
        return f"{depth} of {self.n_layers} layers: {count} tokens"

    def _spans(self) -> Iterator[str]:
        """Neighbours with the same fate in one span, which says it when pointed at."""
        fates = list(zip(self.kinds, self.prefill_depths, self.depths, strict=True))
        for (kind, first, last), group in groupby(range(len(fates)), key=lambda i: tuple(map(int, fates[i]))):
            positions = list(group)
            text = escape("".join(self.texts[i] for i in positions))
            where = f"token {positions[0]}" + (f" to {positions[-1]}" if len(positions) > 1 else "")
            if kind:
                yield f'<span class="answer" title="{where}: generated">{text}</span>'
                continue
            fate = f"{where}: {first} of {self.n_layers} layers in prefill"
            if last > first:
                fate += f", {last} by the end"
            yield f'<span class="d{first}{" revived" if last > first else ""}" title="{fate}">{text}</span>'


def _colours(count: int) -> list[tuple[int, int, int]]:
    """From light to dark, so that the order reads without colour vision and in print."""

    def between(share: float) -> tuple[int, int, int]:
        red, green, blue = (round(a + (b - a) * share) for a, b in zip(LIGHT, DARK, strict=True))
        return red, green, blue

    return [between(i / (count - 1)) for i in range(count)] if count > 1 else [DARK]


def _hex(colour: tuple[int, int, int]) -> str:
    return "#" + "".join(f"{value:02x}" for value in colour)


def _ink(colour: tuple[int, int, int]) -> str:
    """Black or white, whichever stands out more (at least 4.5 to 1)."""
    linear = [
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
        for value in (c / 255 for c in colour)
    ]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000" if luminance > 0.179 else "#fff"
