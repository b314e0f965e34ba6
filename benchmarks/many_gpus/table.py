"""What the parts left in a directory, as tables: of parts that were cut short what had come by then."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.many_gpus.place import NOTES
from benchmarks.many_gpus.runs import APART, COLOCATED, LEADS, steps_of
from benchmarks.many_gpus.updates import FSDP, MEGATRON

SYNC = "sync.jsonl"
Row = Mapping[str, Any]
STAGES = {  # of a step: what is summed
    "writing": ["control/wait_for_groups"],
    "log-probs, values": ["actor/infer", "critic/infer"],
    "critic": ["critic/forward_backward", "critic/optim_step"],
    "actor": ["actor/forward_backward", "actor/optim_step"],
    "sync": ["weights/publish"],
}


def table(out: Path) -> str:
    """All parts that left something, then a line for whatever was left out."""
    parts = [
        updates("a: FSDP2 update", read(out / FSDP)),
        updates("b: Megatron-Core update", read(out / MEGATRON)),
        colocated(out / COLOCATED),
        apart(out),
        syncs(read(out / SYNC)),
        "\n".join(f"{note['part']}: {note['text']}" for note in read(out / NOTES)),
    ]
    return "\n\n".join(part for part in parts if part)


def read(path: Path) -> list[Row]:
    """JSON objects, one a line; a line that a kill tore is left out."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            row = json.loads(line.rstrip(","))
        except json.JSONDecodeError:
            continue
        found += [row] if isinstance(row, dict) else []
    return found


def markdown(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """'' without rows."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    head = f"{title}\n\n| {' | '.join(columns)} |\n{'|---' * len(columns)}|\n"
    return head + "\n".join(lines) if lines else ""


def updates(title: str, rows: Sequence[Row]) -> str:
    """Efficiency: tokens a second and rank, against the fewest ranks that the same variant ran on."""
    columns = ["shape, variant", "ranks"]
    columns += [f"{part} {what}" for part in ("passes", "step") for what in ("tok/s", "MFU", "GiB", "efficiency")]
    shown = []
    for row in sorted(rows, key=lambda row: (plain(row), row["ranks"])):
        cells = [f"{row['shape']} {row['variant']}", str(row["ranks"])]
        for part in ("passes", "step"):
            if f"{part}_tok_s" not in row:
                cells += ["out of memory", "", "", ""]
                continue
            cells += [f"{row[f'{part}_tok_s']:,.0f}", f"{row[f'{part}_mfu']:.2f}", f"{row[f'{part}_gib']:.1f}"]
            cells.append(efficiency(rows, row, f"{part}_tok_s"))
        shown.append(cells)
    return markdown(title, columns, shown)


def plain(row: Row) -> str:
    """A variant without what one rank cannot be told."""
    return f"{row['shape']} {row['variant'].replace(',keep=true', '')}"


def efficiency(rows: Sequence[Row], row: Row, key: str) -> str:
    """'' where there is nothing to compare with."""
    same = [other for other in rows if plain(other) == plain(row) and key in other]
    base = min(same, key=lambda other: other["ranks"])
    if base["ranks"] == row["ranks"]:
        return ""
    return f"{row[key] / row['ranks'] / (base[key] / base['ranks']):.2f} of {base['ranks']}"


def colocated(run: Path) -> str:
    """Mean seconds of the steps that are measured, and of their stages."""
    steps = measured(read(run / "metrics.jsonl"), 0)
    if not steps:
        return ""
    cells = [f"{mean(steps, 'rollout/samples'):.0f} x {mean(steps, 'rollout/length'):.0f}"]
    cells += [f"{mean(steps, 'time/step_s'):.2f}"]
    for names in STAGES.values():
        cells.append(f"{sum(mean(steps, f'time/{name}_s') for name in names):.2f}")
    cells += [f"{mean(steps, 'weights/pause_s'):.2f}", f"{mean(steps, 'speed/tokens_per_s'):,.0f}"]
    columns = ["samples x tokens", "step s", *(f"{name} s" for name in STAGES), "pause of engines s", "tok/s"]
    return markdown("c: colocated PPO step", columns, [cells])


def measured(records: Sequence[Row], lead: int) -> list[Row]:
    """The steps of a run that say something; what came of them."""
    _, first, last = steps_of(lead)
    return [record for record in records if "time/step_s" in record and first <= record["step"] <= last]


def mean(steps: Sequence[Row], name: str) -> float:
    return fmean(step.get(name) or 0.0 for step in steps)


def apart(out: Path) -> str:
    """A row for each lead."""
    columns = [
        "lead",
        "step s",
        "tok/s",
        "staleness mean",
        "staleness max",
        "generation idle",
        "training idle",
        "sync s",
    ]
    rows = []
    for lead in LEADS:
        run = out / f"{APART}-{lead}"
        steps = measured(read(run / "metrics.jsonl"), lead)
        spans = list(spans_of(read(run / "timeline.json")))
        window = window_of(spans, lead)
        if window is None or len(steps) < steps_of(lead)[2] - steps_of(lead)[1] + 1:
            continue  # cut short
        seconds = (window[1] - window[0]) / len(steps)
        tokens = mean(steps, "rollout/tokens") / seconds
        stale = [f"{mean(steps, 'staleness/mean'):.2f}", f"{max(step['staleness/max'] for step in steps):.0f}"]
        idle = [f"{1 - busy(spans, names, window):.2f}" for names in (GENERATES, TRAINS)]
        sync = f"{mean(steps, 'time/weights/publish_s'):.2f}"
        rows.append([str(lead), f"{seconds:.2f}", f"{tokens:,.0f}", *stale, *idle, sync])
    return markdown("d: trainers and engines on GPUs of their own", columns, rows)


Span = tuple[str, float, float]  # its name, begin and end in seconds
GENERATES, TRAINS = ("rollout/in_flight",), ("control/learn", "weights/publish")


def spans_of(events: Iterable[Row]) -> Iterator[Span]:
    """Of a timeline.json."""
    for event in events:
        if event.get("ph") == "X":
            yield event["name"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6


def window_of(spans: Sequence[Span], lead: int) -> tuple[float, float] | None:
    """From the end of learning in the step before the first that is measured to that of the last; None: cut short."""
    _, first, last = steps_of(lead)
    ends = sorted(end for name, _, end in spans if name == "control/learn")
    return (ends[first - 2], ends[last - 1]) if len(ends) >= last else None


def busy(spans: Sequence[Span], names: Sequence[str], window: tuple[float, float]) -> float:
    """The part of the window in which at least one of these spans is open."""
    total, done = 0.0, window[0]
    for _, begin, end in sorted((s for s in spans if s[0] in names), key=lambda span: span[1]):
        begin, end = max(begin, done), min(end, window[1])
        total += max(0.0, end - begin)
        done = max(done, end)
    return total / (window[1] - window[0])


def syncs(rows: Sequence[Row]) -> str:
    """GB/s of one copy of the weights."""
    columns = ["weights", "way", "ranks -> engines", "GB", "sync s", "GB/s", "limit GB/s", "of it"]
    columns += ["fingerprint of trainer s", "of engine s"]
    shown = []
    for row in rows:
        rate, limit = row["gbytes"] / row["sync_s"], row["gbytes"] / row["limit_s"]
        cells = [row["shape"], row["way"], f"{row['trainers']} -> {row['engines']}", f"{row['gbytes']:.2f}"]
        cells += [f"{row['sync_s']:.3f}", f"{rate:.1f}", f"{limit:.1f}", f"{rate / limit:.2f}"]
        shown.append([*cells, f"{row['survey_s']:.3f}", f"{row['fingerprint_s']:.3f}"])
    return markdown("e: weight sync", columns, shown)
