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
WIDE = 100  # columns from which the panel shows three pairs a row
LINE_HEADER = "    step  reward  accuracy  expl.var  approx.KL  staleness  tokens/s  s/step     left"


@dataclass
class Progress:
    """What the display remembers: the newest value of each metric, the rewards, and the clock."""

    total_steps: int
    title: str
    first_step: int
    started: float
    before: float | None = None
    step: int = 0
    finished: float | None = None
    latest: dict[str, float] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.step = self.first_step

    def add(self, step: int, record: Mapping[str, float], *, now: float) -> None:
        self.step = step
        self.latest.update(record)
        if REWARD in record:
            self.rewards.append(record[REWARD])
        if self.before is None and ACCURACY in record:
            self.before = record[ACCURACY]

    def left_s(self, now: float) -> float | None:
        """Time left at the pace of this process so far, all it did between the steps included."""
        done = self.step - self.first_step
        return (now - self.started) / done * (self.total_steps - self.step) if done > 0 else None
