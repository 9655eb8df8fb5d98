"""Pictures: an empty figure to draw on, or word of what draws it."""

from __future__ import annotations

from typing import TYPE_CHECKING

LABEL_WIDTH = 100

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """Of so many inches, laid out by itself, without a window; ImportError where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("pictures need matplotlib: pip install 'lazyllm-engine[plots]'") from None
    return Figure(figsize=(width, height), layout="constrained")


def label(text: str) -> str:
    """Cut to what a legend has room for."""
    return text if len(text) <= LABEL_WIDTH else f"{text[: LABEL_WIDTH - 1]}…"
