"""Table: text cells in columns, written as Markdown, CSV, HTML or aligned plain text."""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import zip_longest
from textwrap import wrap

HEAD_WIDTH = 20  # characters; a longer column head is wrapped in plain text


def with_bounds(values: Iterable[float | None], form: str) -> str:
    """The value with its bounds, as in `1.0 [0.5, 1.5]`; None and NaN are left out."""
    texts = [f"{number:{form}}" for number in values if number is not None and number == number]
    return f"{texts[0]} [{texts[1]}, {texts[2]}]" if len(texts) == 3 else "".join(texts[:1])


@dataclass(frozen=True)
class Table:
    """One head per column; each row has one cell per head."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        lines = [self.heads, ["---"] * len(self.heads), *self.rows]
        return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)

    def text(self) -> str:
        """Lines of equal width for a terminal: the first column left-aligned, the others right-aligned."""
        columns = zip(self.heads, *self.rows, strict=True)
        wrapped = [wrap(head, max(HEAD_WIDTH, *map(len, cells), 0)) for head, *cells in columns]
        lines = [*zip_longest(*wrapped, fillvalue=""), *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join("  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines)

    def csv(self) -> str:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.heads, *self.rows])
        return text.getvalue()

    def html(self) -> str:
        def row(tag: str, cells: Sequence[str]) -> str:
            return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        body = "".join(row("td", line) for line in self.rows)
        return f"<table><thead>{row('th', self.heads)}</thead><tbody>{body}</tbody></table>"
