"""Where the time goes: named spans, summed for the metrics of a step and drawn in a Perfetto-readable timeline.json.

The file is Chrome's JSON array of trace events, one event a line. Every event is flushed when it ends, and Perfetto
reads the array without its closing bracket: what a killed run leaves behind can be opened as it is.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from tandem.metrics.previous import set_aside
from tandem.types import Metrics, Sum

log = logging.getLogger(__name__)

MAX_EVENTS = 200_000  # about 30 MB; Perfetto opens that in seconds
Owner = tuple[int, int]  # thread, asyncio task


@dataclass
class _Track:
    """One named group of rows in the drawing. A lane is a row: the owner of its open spans and how many are open."""

    pid: int
    owners: list[Owner | None] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)


class Timeline:
    """Spans and counters of a run. Safe from any thread and any asyncio task.

    Spans of one task nest in one lane; spans of one track that overlap in several tasks or threads get lanes of their
    own, so that none hides another. The sums count overlapping spans in full: they can exceed the time on the wall.

    with timeline.span("actor/infer"):   # track "actor", metric time/actor/infer_s
        ...
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        max_events: int = MAX_EVENTS,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        """`clock_ns` is the wall's clock, or a simulation's."""
        self._clock_ns = clock_ns
        self._sums: dict[str, float] = {}
        self._tracks: dict[str, _Track] = {}
        self._lock = threading.Lock()
        self._start_ns = clock_ns()
        self._left = max_events
        self._max_events = max_events
        self._path = path
        self._file: TextIO | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            set_aside(path)
            self._file = path.open("w", encoding="utf-8", buffering=1)  # a line at a time: a kill loses one at most
            self._file.write("[\n")

    @contextmanager
    def span(self, name: str, *, track: str | None = None) -> Generator[None, None, None]:
        """Time the body under `name`; drawn on `track`, by default the part of the name before its first slash."""
        row = track or name.split("/")[0]
        with self._lock:
            lane = self._enter(row)
        begin = self._clock_ns()
        try:
            yield
        finally:
            end = self._clock_ns()
            with self._lock:
                self._leave(row, lane)
                self._sums[name] = self._sums.get(name, 0.0) + (end - begin) / 1e9
                times = {"ts": self._microseconds(begin), "dur": (end - begin) / 1000}
                self._write({"ph": "X", "name": name, "pid": self._tracks[row].pid, "tid": lane + 1, **times})

    def counter(self, name: str, value: float) -> None:
        """Draw `value` from now on as a step curve, on the track named by the part before the first slash."""
        now = self._microseconds(self._clock_ns())
        with self._lock:
            pid = self._track(name.split("/")[0]).pid
            self._write({"ph": "C", "name": name, "pid": pid, "ts": now, "args": {"value": value}})

    def drain(self) -> Metrics:
        """The seconds of all spans that ended since the last drain, as time/<name>_s."""
        with self._lock:
            sums, self._sums = self._sums, {}
        return {f"time/{name}_s": Sum(seconds) for name, seconds in sums.items()}

    def close(self) -> None:
        """Finish the file to valid JSON. Spans that end later are still summed, not drawn."""
        with self._lock:
            if self._file is None:
                return
            self._file.write('{"ph": "M", "name": "trace_end", "pid": 0, "args": {}}\n]\n')
            self._file.close()
            self._file = None

    def _enter(self, row: str) -> int:
        """The lane of a span that begins: the first that is empty or whose open spans are this task's own."""
        track, owner = self._track(row), _owner()
        own = [lane for lane, name in enumerate(track.owners) if name == owner]
        free = [lane for lane, name in enumerate(track.owners) if name is None]
        if own or free:
            lane = (own or free)[0]
        else:
            lane = len(track.owners)
            track.owners.append(None)
            track.depths.append(0)
            self._name_row("thread", track.pid, lane + 1, row if lane == 0 else f"{row} {lane + 1}")
        track.owners[lane] = owner
        track.depths[lane] += 1
        return lane

    def _leave(self, row: str, lane: int) -> None:
        track = self._tracks[row]
        track.depths[lane] -= 1
        if track.depths[lane] == 0:
            track.owners[lane] = None

    def _track(self, row: str) -> _Track:
        if row not in self._tracks:
            self._tracks[row] = _Track(pid=len(self._tracks) + 1)
            self._name_row("process", self._tracks[row].pid, 0, row)
        return self._tracks[row]

    def _name_row(self, kind: str, pid: int, tid: int, name: str) -> None:
        self._write({"ph": "M", "name": f"{kind}_name", "pid": pid, "tid": tid, "args": {"name": name}})
        order = {"sort_index": pid if kind == "process" else tid}
        self._write({"ph": "M", "name": f"{kind}_sort_index", "pid": pid, "tid": tid, "args": order})

    def _write(self, event: dict[str, object]) -> None:
        if self._file is None or self._left < 0:
            return
        self._left -= 1
        if self._left < 0:
            log.warning("%s is full at %d events: later spans are summed, not drawn", self._path, self._max_events)
            return
        self._file.write(json.dumps(event) + ",\n")

    def _microseconds(self, moment_ns: int) -> float:
        return (moment_ns - self._start_ns) / 1000


def _owner() -> Owner:
    """Who runs now: the thread, and its asyncio task if a loop runs in it."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no loop runs in this thread
        task = None
    return threading.get_ident(), id(task)
