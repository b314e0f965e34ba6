"""Pieces of HTML. Everything that comes from a run passes `escape`: the words of a model are hostile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape as html_escape

from tandem.report.charts import SERIES


def escape(text: object) -> str:
    """Text as text, in an element or an attribute. A torn surrogate becomes a question mark."""
    return html_escape(str(text).encode("utf-8", "replace").decode("utf-8"), quote=True)


def section(name: str, title: str, *parts: str) -> str:
    """A section of the page; `name` is its anchor."""
    return f'<section id="{escape(name)}"><h2>{escape(title)}</h2>{"".join(parts)}</section>'


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def legend(labels: Iterable[tuple[str, int, int]]) -> str:
    """Label, colour, dash of each curve; nothing for a single one that needs no name."""
    style = ("solid", "dashed", "dotted", "double")
    marks = [
        f'<span><i style="border-color:var(--s{color % SERIES});border-top-style:{style[dash % 4]}"></i>'
        f"{escape(label)}</span>"
        for label, color, dash in labels
    ]
    return f'<div class="legend">{"".join(marks)}</div>'


def figure(title: str, drawing: str, key: str = "", *, wide: bool = False) -> str:
    """A chart with its title and legend. `drawing` is SVG of ours."""
    kind = ' class="wide"' if wide else ""
    return f"<figure{kind}><h3>{escape(title)}</h3>{drawing}{key}</figure>"


def charts(figures: Iterable[str]) -> str:
    return f'<div class="charts">{"".join(figures)}</div>'


def table(head: Sequence[str], rows: Iterable[Sequence[object]], *, text: Sequence[int] = ()) -> str:
    """A table; numbers stand right, the columns in `text` keep their line breaks. A severity is coloured."""
    made = ["<tr>" + "".join(f"<th>{escape(name)}</th>" for name in head) + "</tr>"]
    for row in rows:
        made.append("<tr>" + "".join(cell(value, place in text) for place, value in enumerate(row)) + "</tr>")
    return f'<div class="scroll"><table>{"".join(made)}</table></div>'


def cell(value: object, text: bool) -> str:
    kind = "text" if text else "n" if isinstance(value, int | float) else ""
    if value in ("warning", "severe"):
        kind = str(value)
    return f'<td class="{kind}">{escape(short(value))}</td>' if kind else f"<td>{escape(short(value))}</td>"


def folded(title: str, body: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


def short(value: object) -> str:
    """Numbers in four digits, text as it is, nothing as a dash."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    return "-" if value is None else str(value)
