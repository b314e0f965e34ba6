"""timeline.json as rows of blocks: the whole run, and a window of a few steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.report import charts
from tandem.report.html import figure, legend, paragraph, section
from tandem.report.run import Record, Run, number

STEP = "control/learn"  # the span that training has once a step
WINDOW = 3  # steps that are drawn large
PIXELS = 1000  # of a row: shorter gaps are not drawn


@dataclass(frozen=True)
class Span:
    """One event, in seconds since the run began."""

    track: str
    name: str
    start: float
    end: float


def spans_of(events: Sequence[Record]) -> list[Span]:
    """The spans of a file of trace events, by start; what is no whole span is left out."""
    tracks: dict[object, str] = {}
    for event in events:
        args = event.get("args")
        if event.get("name") == "process_name" and isinstance(args, dict):
            tracks[event.get("pid")] = str(args.get("name"))
    found = []
    for event in events:
        start, length = number(event.get("ts")), number(event.get("dur"))
        if event.get("ph") == "X" and start is not None and length is not None:
            track = tracks.get(event.get("pid"), str(event.get("pid")))
            found.append(Span(track, str(event.get("name")), start / 1e6, (start + length) / 1e6))
    return sorted(found, key=lambda span: span.start)


def blocks_of(
    spans: Sequence[Span], colors: Mapping[str, int], rows: Mapping[str, int], window: tuple[float, float]
) -> list[charts.Block]:
    """Spans within the window, a row for each name; blocks closer than a pixel become one."""
    pixel = (window[1] - window[0]) / PIXELS
    last: dict[str, charts.Block] = {}
    found: list[charts.Block] = []
    for span in spans:
        start, end = max(span.start, window[0]), min(span.end, window[1])
        if end <= start or span.name not in rows:
            continue
        before = last.get(span.name)
        if before is not None and start - before.end < pixel:
            last[span.name] = charts.Block(before.row, before.start, max(before.end, end), before.color)
            continue
        if before is not None:
            found.append(before)
        last[span.name] = charts.Block(rows[span.name], start, max(end, start + pixel), colors[span.track])
    return [*found, *last.values()]


def steps_window(spans: Sequence[Span]) -> tuple[float, float]:
    """The last WINDOW steps but one (the last is followed by saving and validation), or everything."""
    ends = [span.end for span in spans if span.name == STEP]
    if len(ends) < WINDOW + 2:
        return min(span.start for span in spans), max(span.end for span in spans)
    return ends[-WINDOW - 2], ends[-2]


def timeline_section(runs: Sequence[Run]) -> str:
    """Both pumps of each run: when rollouts were in flight, and when training waited, computed and sent."""
    parts = []
    for run in runs:
        spans = spans_of(run.events)
        if not spans:
            parts.append(paragraph(f"{run.name}: no timeline.json with spans (logger.timeline=true draws one)."))
            continue
        tracks = list(dict.fromkeys(span.track for span in spans))
        names = list(dict.fromkeys(name for track in tracks for name in names_of(spans, track)))
        rows, colors = {name: row for row, name in enumerate(names)}, {name: n for n, name in enumerate(tracks)}
        key = legend((track, colors[track], 0) for track in tracks)
        whole = (min(span.start for span in spans), max(span.end for span in spans))
        close = steps_window(spans)
        for title, window in {f"{run.name}: the whole run": whole, f"{run.name}: {WINDOW} steps": close}.items():
            if title.endswith("steps") and window == whole:
                continue
            drawing = charts.timeline(names, blocks_of(spans, colors, rows, window), window=window)
            parts.append(figure(title, drawing, key, wide=True))
    return section("timeline", "Timeline of both pumps", *parts)


def names_of(spans: Sequence[Span], track: str) -> list[str]:
    return [span.name for span in spans if span.track == track]
