"""Charts as SVG text: small, static, coloured by CSS variables of the page, so that one drawing is light and dark."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise ValueError(
        "a report is drawn by matplotlib, which is not installed here; pip install 'tandem-rl[report]'"
    ) from error

SERIES = 8  # colours of the page: --s0 ... --s7
# What stands for a colour while it is drawn -> the page's variable.
INK, GRID = "#010203", "#010204"
PALETTE = [f"#0102{16 + number:02x}" for number in range(SERIES)]
VARIABLES = {INK: "var(--ink)", GRID: "var(--grid)"} | {color: f"var(--s{n})" for n, color in enumerate(PALETTE)}
DASHES = ["-", "--", ":", "-."]
WIDE, HIGH = 4.6, 2.5  # inches: 331 x 180 points, read at 360 to 640 pixels
MOST_POINTS = 600  # of a line
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "tandem",
    "text.parse_math": False,
    "axes.formatter.use_mathtext": False,
    "axes.formatter.useoffset": False,  # 1.0000002, not 2 and somewhere else "1e-7+1"
    "font.family": "sans-serif",
    "font.size": 8,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.4,
}


@dataclass(frozen=True)
class Line:
    """One curve. `color` and `dash` are numbers of the palette and the dashes, taken round."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    color: int = 0
    dash: int = 0


@dataclass(frozen=True)
class Block:
    """A piece of time in a row of the timeline, in seconds."""

    row: int
    start: float
    end: float
    color: int


def lines(curves: Sequence[Line], *, x_label: str = "step", diagonal: bool = False) -> str:
    """Curves over each other. A curve of few points shows them. `diagonal` draws y = x."""
    figure, axes = canvas()
    for curve in curves:
        x, y = thin(curve.x, curve.y)
        few = "o" if len(x) <= 40 else None
        style = {"color": PALETTE[curve.color % SERIES], "linestyle": DASHES[curve.dash % len(DASHES)]}
        axes.plot(x, y, marker=few, markersize=2.5, **style)
    if not any(any(curve.y) for curve in curves):
        axes.set_ylim(-0.05, 1)  # nothing but zeros: no axis of negative counts and shares
    if diagonal:
        axes.axline((0, 0), slope=1, color=INK, linewidth=0.7, linestyle=":")
    if x_label == "step":
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.set_xlabel(x_label)
    return svg(figure)


def histogram(sets: Sequence[tuple[int, np.ndarray]], *, x_label: str, bins: int = 24) -> str:
    """Shares of each set (colour, values) in common bins; whole numbers of a small range get a bin each."""
    figure, axes = canvas()
    everything = np.concatenate([values for _, values in sets])
    low, high = float(everything.min()), float(everything.max())
    whole = high - low < bins and bool((everything == np.floor(everything)).all())
    width = 1.0 if whole else (high - low) / bins or 1.0
    edges = [low - 0.5 * whole + width * number for number in range(int(high - low) + 2 if whole else bins + 1)]
    for color, values in sets:
        shares = np.full(len(values), 1 / len(values))
        axes.hist(values, bins=edges, weights=shares, color=PALETTE[color % SERIES], alpha=0.25)
        axes.hist(values, bins=edges, weights=shares, color=PALETTE[color % SERIES], histtype="step", linewidth=1.2)
    if whole:
        axes.set_xticks(range(int(low), int(high) + 1, 1 + int(high - low) // 12))
    axes.set_xlabel(x_label)
    axes.set_ylabel("share")
    return svg(figure)


def bars(names: Sequence[str], values: Sequence[Sequence[float]], *, x_label: str) -> str:
    """Horizontal bars: for each name one bar for each of the sets of values, coloured by set."""
    figure, axes = canvas(high=0.6 + 0.16 * len(names) * max(1.0, 0.6 * len(values)))
    thick = 0.8 / len(values)
    for color, of_one in enumerate(values):
        places = [place + thick * (color - (len(values) - 1) / 2) for place in range(len(names))]
        axes.barh(places, of_one, height=thick * 0.9, color=PALETTE[color % SERIES])
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.set_xlabel(x_label)
    return svg(figure)


def timeline(rows: Sequence[str], blocks: Sequence[Block], *, window: tuple[float, float]) -> str:
    """Blocks of time, row by row."""
    figure, axes = canvas(wide=11.0, high=0.5 + 0.24 * len(rows))
    for color in sorted({block.color for block in blocks}):
        for row in range(len(rows)):
            pieces = [(b.start, b.end - b.start) for b in blocks if b.color == color and b.row == row]
            if pieces:
                axes.broken_barh(pieces, (row - 0.4, 0.8), facecolors=PALETTE[color % SERIES])
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(*window)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("seconds")
    return svg(figure)


def canvas(*, wide: float = WIDE, high: float = HIGH) -> tuple[Figure, Axes]:
    """An empty chart."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(wide, high), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        dress(axes)
    return figure, axes


def dress(axes: Axes) -> None:
    """The house's look."""
    axes.grid(visible=True, color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(INK)
    axes.tick_params(colors=INK, length=2.5, width=0.6, labelsize=8)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(INK)
        label.set_fontsize(8)
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_offset_text().set_color(INK)


def svg(figure: Figure) -> str:
    """The drawing as an element of a page: no XML header, no ids of groups, colours as variables."""
    file = io.StringIO()
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a sign that the font lacks: the reader's may have it
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*">', "<g>", text)
    text = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img">', text, count=1)
    text = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), text)
    for stand_in, variable in VARIABLES.items():
        text = text.replace(stand_in, variable)
    return re.sub(r"\n\s*", "\n", text)


def thin(x: Sequence[float], y: Sequence[float], most: int = MOST_POINTS) -> tuple[list[float], list[float]]:
    """At most about `most` points: of each stretch its lowest and its highest, so that no spike is lost."""
    if len(x) <= most:
        return list(x), list(y)
    stretch = -(-2 * len(x) // most)
    kept: list[int] = [0]
    for begin in range(0, len(x), stretch):
        places = range(begin, min(begin + stretch, len(x)))
        kept += sorted({min(places, key=y.__getitem__), max(places, key=y.__getitem__)})
    kept = sorted({*kept, len(x) - 1})
    return [x[place] for place in kept], [y[place] for place in kept]
