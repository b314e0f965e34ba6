"""How the numbers of a run look: the live panel, the line of a step, the summary. Text in, text out; no terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

REWARD = "rollout/reward"
ACCURACY = "val/accuracy"
EXPLAINED_VARIANCE = "critic/explained_variance"
APPROX_KL = "actor/approx_kl"
STALENESS_MEAN, STALENESS_MAX = "staleness/mean", "staleness/max"
SPEED = "speed/tokens_per_s"
STEP_TIME = "time/step_s"

NONE = "-"
BARS = "▁▂▃▄▅▆▇█"
COLUMNS = ("step", "reward", "accuracy", "expl.var", "approx.KL", "staleness", "tokens/s", "s/step", "left")
WIDTHS = (9, 8, 9, 9, 10, 10, 9, 7, 8)  # 79 together
WIDEST = 110  # columns of the panel


@dataclass
class Progress:
    """What the display remembers: the newest value of each metric, rewards and accuracies, and when it began."""

    total_steps: int
    title: str
    first_step: int
    started: float
    accuracies: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    latest: dict[str, float] = field(default_factory=dict)
    step: int = field(init=False)

    def __post_init__(self) -> None:
        self.step = self.first_step

    def add(self, step: int, record: Mapping[str, float]) -> None:
        self.step = step
        self.latest.update(record)
        for name, values in ((REWARD, self.rewards), (ACCURACY, self.accuracies)):
            if name in record:
                values.append(record[name])

    def left_s(self, now: float) -> float | None:
        """Time left at the pace of this process so far, all it did between the steps included."""
        done = self.step - self.first_step
        return (now - self.started) / done * (self.total_steps - self.step) if done > 0 else None

    def show(self, name: str, form: str) -> str:
        """The newest value of a metric, or "-" when it has never come."""
        return format(self.latest[name], form) if name in self.latest else NONE


def panel_of(progress: Progress, *, now: float, width: int) -> RenderableType:
    """The live picture: a bar, and the figures in two columns."""
    width = min(width, WIDEST)
    figures = Table.grid(padding=(0, 2), expand=True)
    for style, ratio in (("dim", None), ("bold", 3), ("dim", None), ("bold", 2)):
        figures.add_column(style=style, ratio=ratio, no_wrap=True)
    figures.add_row("reward", _reward(progress, bars=width // 3 - 12), "accuracy", change_of(progress.accuracies, "→"))
    variance, kl = progress.show(EXPLAINED_VARIANCE, ".3f"), _small(progress, APPROX_KL)
    figures.add_row("explained variance", variance, "approx. KL", kl)
    figures.add_row("staleness", _staleness(progress, " mean, ", " max"), "speed", _speed(progress, " tokens/s"))
    pace = progress.show(STEP_TIME, ".2f") + (" s" if STEP_TIME in progress.latest else "")
    left = progress.left_s(now)
    figures.add_row("time a step", pace, "time left", NONE if left is None else clock(left))
    bar = Table.grid(padding=(0, 2), expand=True)
    bar.add_column(no_wrap=True)
    bar.add_column(ratio=1)
    bar.add_column(no_wrap=True)
    share = progress.step / progress.total_steps if progress.total_steps else 0.0
    bar.add_row(
        f"step {progress.step}/{progress.total_steps}",
        ProgressBar(total=max(progress.total_steps, 1), completed=progress.step),
        f"{share:4.0%}  {clock(now - progress.started)}",
    )
    return Panel(Group(bar, figures), title=progress.title, title_align="left", border_style="cyan", width=width)


def header_of() -> str:
    """The names over the columns of line_of."""
    return "".join(name.rjust(width) for name, width in zip(COLUMNS, WIDTHS, strict=True))


def line_of(progress: Progress, *, now: float) -> str:
    """One step in one line of at most 80 characters, plain ASCII: it may go to a log file."""
    left = progress.left_s(now)
    cells = (
        f"{progress.step}/{progress.total_steps}",
        progress.show(REWARD, ".3f"),
        progress.show(ACCURACY, ".3f"),
        progress.show(EXPLAINED_VARIANCE, ".3f"),
        _small(progress, APPROX_KL),
        _staleness(progress, "/", ""),
        _speed(progress, ""),
        progress.show(STEP_TIME, ".2f"),
        NONE if left is None else clock(left),
    )
    return "".join(cell.rjust(width) for cell, width in zip(cells, WIDTHS, strict=True))


def summary_of(progress: Progress, run_dir: Path, try_next: Sequence[str], *, now: float) -> Text:
    """What came of the run: before and after, time, files, and what to try next."""
    done = "Done" if progress.step >= progress.total_steps else "Stopped"
    text = Text("\n")
    text.append(f"{done}: {progress.step} of {progress.total_steps} steps", style="bold")
    text.append(f" in {clock(now - progress.started)}\n")
    for name, values, what in (
        ("accuracy", progress.accuracies, "validation, before -> after"),
        ("reward", progress.rewards, "rollouts, first step -> last step"),
    ):
        if values:
            text.append(f"  {name:<10}")
            text.append(f"{change_of(values, '->'):<18}", style="bold green")
            text.append(f"{what}\n" if len(values) > 1 else "\n", style="dim")
    text.append(f"  {'files':<10}{run_dir}\n")
    if try_next:
        text.append("Try next\n", style="bold")
        text.append("".join(f"  {line}\n" for line in try_next))
    return text


def change_of(values: Sequence[float], arrow: str) -> str:
    """First and newest value: `0.160 -> 0.975`, or the one there is, or "-"."""
    if len(values) > 1:
        return f"{values[0]:.3f} {arrow} {values[-1]:.3f}"
    return f"{values[0]:.3f}" if values else NONE


def sparkline(values: Sequence[float], width: int) -> str:
    """The newest `width` values as bars from the smallest to the largest of them; what is not finite is a gap."""
    shown = values[-width:] if width > 0 else []
    finite = [value for value in shown if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] if math.isfinite(value) else " " for value in shown)


def clock(seconds: float) -> str:
    """`0:36`, `12:05` or `1:02:03`."""
    minutes, second = divmod(max(round(seconds), 0), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _reward(progress: Progress, *, bars: int) -> Text:
    line = Text(progress.show(REWARD, ".3f") + "  ")
    return line.append(sparkline(progress.rewards, bars), style="green")


def _small(progress: Progress, name: str) -> str:
    """Four decimals, or a power of ten where they would show nothing."""
    tiny = name in progress.latest and 0 < abs(progress.latest[name]) < 1e-4
    return progress.show(name, ".1e" if tiny else ".4f")


def _staleness(progress: Progress, middle: str, end: str) -> str:
    if STALENESS_MEAN not in progress.latest and STALENESS_MAX not in progress.latest:
        return NONE
    return progress.show(STALENESS_MEAN, ".1f") + middle + progress.show(STALENESS_MAX, ".0f") + end


def _speed(progress: Progress, unit: str) -> str:
    speed = progress.latest.get(SPEED, math.nan)
    if not math.isfinite(speed):
        return progress.show(SPEED, ".0f")
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if speed >= size:
            return f"{speed / size:.1f}{letter}{unit}"
    return f"{speed:.0f}{unit}"
