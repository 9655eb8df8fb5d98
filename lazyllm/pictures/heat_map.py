"""Heatmap: the text of a prompt with each token coloured by the number of layers that computed it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from html import escape
from itertools import groupby
from pathlib import Path
from string import Template

import numpy as np

from lazyllm.support.files import user_path

Colour = tuple[int, ...]
DAY = (0xF3, 0xF5, 0xF8), (0x0B, 0x4A, 0x8F)  # tokens of the fewest and of the most layers, on a light page
NIGHT = (0x1C, 0x21, 0x28), (0x79, 0xB8, 0xFF)  # on a dark one
STYLE = Path(__file__).with_suffix(".css").read_text("utf-8")
PAGE = Template(Path(__file__).with_suffix(".html").read_text("utf-8"))
SCROLLED = "#ID .text { max-height: 32em; overflow-y: auto; }\n"


@dataclass(frozen=True, repr=False, eq=False)
class Heatmap:
    """Displayed in notebooks or saved as a self-contained page; made by `Trace.heatmap`.

    `kinds` is 0 for prompt tokens and 1 for generated ones; `prefill_depths` and `depths` are the numbers of
    layers that computed each token in prefill and by the end. All have one entry per token of `texts`.
    """

    texts: list[str]
    kinds: np.ndarray
    prefill_depths: np.ndarray
    depths: np.ndarray
    n_layers: int
    subtitle: str = ""

    def __repr__(self) -> str:
        return f"<Heatmap of {len(self.texts)} tokens; save(path) writes it as HTML>"

    def _repr_html_(self) -> str:
        """The map for a notebook, where a long text scrolls in a box."""
        return self._html(SCROLLED)

    def _html(self, more_rules: str = "") -> str:
        """The map as a <div>; its CSS rules name its id, a hash, and so apply to no other map on the page."""
        depths, counts = np.unique(self.prefill_depths[self.kinds == 0], return_counts=True)
        levels = depths.tolist()
        rules = f"{_rules(levels, *DAY)}@media (prefers-color-scheme: dark) {{\n{_rules(levels, *NIGHT)}}}\n"
        legend = "".join(
            f'<span class="d{depth}">{"all" if depth == self.n_layers else f"{depth} of"} {self.n_layers} '
            f"layers: {count} tokens</span>"
            for depth, count in zip(levels, counts, strict=True)
        )
        if revived := np.count_nonzero((self.depths > self.prefill_depths) & (self.kinds == 0)):
            legend += f'<span class="revived">revived later: {revived} tokens</span>'
        facts = f'<p class="facts">{escape(self.subtitle)}</p>' if self.subtitle else ""
        body = f'{facts}<div class="legend">{legend}</div><div class="text">{"".join(self._spans())}</div>'
        rules += more_rules
        name = f"lazyllm-{sha256((rules + body).encode()).hexdigest()[:12]}"
        style = f"<style>{STYLE}{rules.replace('#ID', f'#{name}')}</style>"
        return f'<div class="lazyllm-map" id="{name}">{style}{body}</div>'

    def save(self, path: str | Path, title: str = "Layers that computed each prompt token") -> Path:
        """Writes one self-contained HTML page."""
        target = user_path(path)
        page = PAGE.substitute(title=escape(title), body=self._html())
        target.write_text(page, encoding="utf-8")
        return target

    def _spans(self) -> Iterator[str]:
        """One span per run of tokens with equal depths, which are its tooltip."""
        depths = list(
            zip(self.kinds.tolist(), self.prefill_depths.tolist(), self.depths.tolist(), strict=True)
        )
        for (kind, first, last), group in groupby(range(len(depths)), key=depths.__getitem__):
            positions = list(group)
            text = escape("".join(self.texts[i] for i in positions))
            where = f"token {positions[0]}" + (f" to {positions[-1]}" if len(positions) > 1 else "")
            if kind:
                yield f'<span class="answer" title="{where}: generated">{text}</span>'
                continue
            tip = f"{where}: {first} of {self.n_layers} layers in prefill"
            if last > first:
                tip += f", {last} by the end"
            yield f'<span class="d{first}{" revived" if last > first else ""}" title="{tip}">{text}</span>'


def _rules(levels: Sequence[int], fewest: Colour, most: Colour) -> str:
    """CSS rules for the colours of tokens by depth; their order is visible without colour vision."""
    colours = _colours(len(levels), fewest, most)
    return "".join(
        f"#ID .d{depth} {{ background: #{bytes(colour).hex()}; color: {_ink(colour)}; }}\n"
        for depth, colour in zip(levels, colours, strict=True)
    )


def _colours(count: int, fewest: Colour, most: Colour) -> list[Colour]:
    """`count` colours from `fewest` to `most`; one alone is `most`."""
    shares = np.arange(count) / (count - 1) if count > 1 else [1.0]
    between = np.array(fewest) + np.outer(shares, np.subtract(most, fewest))
    return [*map(tuple, np.rint(between).astype(int).tolist())]


def _ink(colour: Colour) -> str:
    """Black or white, whichever has more contrast (at least 4.5 to 1)."""
    values = np.array(colour) / 255
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    return "#000" if linear @ (0.2126, 0.7152, 0.0722) > 0.179 else "#fff"
