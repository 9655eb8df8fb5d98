"""Heatmap: the text of a prompt with each token coloured by the number of layers that computed it."""

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path

import numpy as np

from lazyllm.support.files import user_path

SHADES = 10  # in heat_map.css, from tokens that no layer computed to those that all did
STYLE = Path(__file__).with_suffix(".css").read_text("utf-8")
PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<h1 style="font: 600 1.4em system-ui, sans-serif">{title}</h1>
{body}
</html>
"""


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
        return self._html("lazyllm-map boxed")

    def _html(self, kind: str = "lazyllm-map") -> str:
        depths, counts = np.unique(self.prefill_depths[self.kinds == 0], return_counts=True)
        legend = "".join(
            f'<span class="{self._shade(depth)}">{"all" if depth == self.n_layers else f"{depth} of"} '
            f"{self.n_layers} layers: {count} tokens</span>"
            for depth, count in zip(depths.tolist(), counts, strict=True)
        )
        if revived := np.count_nonzero((self.depths > self.prefill_depths) & (self.kinds == 0)):
            legend += f'<span class="revived">revived later: {revived} tokens</span>'
        facts = f'<p class="facts">{escape(self.subtitle)}</p>' if self.subtitle else ""
        body = f'{facts}<div class="legend">{legend}</div><div class="text">{"".join(self._spans())}</div>'
        return f'<div class="{kind}"><style>{STYLE}</style>{body}</div>'

    def _shade(self, depth: int) -> str:
        """The class of a token by the share of the layers that computed it."""
        return f"s{round((SHADES - 1) * depth / self.n_layers)}"

    def save(self, path: str | Path, title: str = "Layers that computed each prompt token") -> Path:
        """Writes one self-contained HTML page."""
        target = user_path(path)
        target.write_text(PAGE.format(title=escape(title), body=self._html()), encoding="utf-8")
        return target

    def _spans(self) -> Iterator[str]:
        """One span per run of tokens with equal depths, which are its tooltip."""
        depths = np.column_stack([self.kinds, self.prefill_depths, self.depths]).tolist()
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
            revived = " revived" if last > first else ""
            yield f'<span class="{self._shade(first)}{revived}" title="{tip}">{text}</span>'
