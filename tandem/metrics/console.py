"""What the user sees while a run goes on: a live display, or one line a step where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from tandem.metrics.figures import ACCURACY, REWARD, Progress, header_of, line_of, panel_of, summary_of

Mode = Literal["live", "lines", "silent"]

HEADER_EVERY = 20  # lines
REFRESH_PER_SECOND = 4


class Display:
    """The console of a run, a Sink: start(), write() each step, close(), summary().

    `live` needs a terminal that can draw; elsewhere it is `lines`. While it is live, what other code writes to stdout
    and stderr appears above it; log handlers should write to `console` (rich.logging.RichHandler(console=...)).
    """

    def __init__(
        self, mode: Mode, *, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console = console or Console()
        drawable = (
            self.console.is_terminal and not self.console.is_dumb_terminal and not self.console.options.ascii_only
        )
        self.mode: Mode = "lines" if mode == "live" and not drawable else mode
        self._clock = clock
        self._progress = Progress(total_steps=0, title="", first_step=0, started=clock())
        self._live: Live | None = None
        self._lines = 0

    def start(self, total_steps: int, title: str, *, first_step: int = 0, accuracy_before: float | None = None) -> None:
        """Begin. `first_step`: steps trained before this process (resume); `accuracy_before`: known from then."""
        self._progress = Progress(total_steps, title, first_step, started=self._clock())
        if accuracy_before is not None:
            self._progress.accuracies.append(accuracy_before)
        if self.mode == "live":
            self._live = Live(
                get_renderable=self._panel, console=self.console, refresh_per_second=REFRESH_PER_SECOND, transient=False
            )
            self._live.start()
        elif self.mode == "lines":
            self._line(title)

    def write(self, step: int, record: Mapping[str, float]) -> None:
        self._progress.add(step, record)
        if self.mode == "lines":
            self._write_line(record)

    def note(self, text: str) -> None:
        """One message between the steps."""
        if self.mode != "silent":
            self._line(text)

    def close(self) -> None:
        """Leave the last picture standing. The display may be asked for its summary afterwards."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def summary(self, run_dir: Path, try_next: Sequence[str] = ()) -> None:
        """Before and after, time, where the files are, and what to try next (one line each)."""
        self.close()
        if self.mode != "silent":
            self.console.print(summary_of(self._progress, run_dir, try_next, now=self._clock()), soft_wrap=True)

    def _panel(self) -> RenderableType:
        return panel_of(self._progress, now=self._clock(), width=self.console.width)

    def _write_line(self, record: Mapping[str, float]) -> None:
        if REWARD not in record:  # a validation alone, before the first step or after the last
            if ACCURACY in record:
                self._line(f"validation at step {self._progress.step}: accuracy {record[ACCURACY]:.3f}")
            return
        if self._lines % HEADER_EVERY == 0:
            self._line(header_of())
        self._lines += 1
        self._line(line_of(self._progress, now=self._clock()))

    def _line(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)
